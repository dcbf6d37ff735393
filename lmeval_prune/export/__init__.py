"""Takes pruned variants to the engines that serve them: adapters, checkpoints, GGUF files."""
