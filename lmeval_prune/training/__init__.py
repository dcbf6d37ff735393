"""Shared training code of ATHENA and distillation: splits, resuming, batches by length, loss curves."""
