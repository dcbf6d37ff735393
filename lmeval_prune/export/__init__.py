"""Export pruned models for inference servers: LoRA adapters, checkpoints, GGUF files."""
