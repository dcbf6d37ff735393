"""Training on problems, for ATHENA and distillation alike: splits, resuming, batches by length, loss curves."""
