"""Shared training code of ATHENA and distillation: questions of splits, the resumable trainer, loss curves."""
