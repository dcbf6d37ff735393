"""Recursive distillation: a model is pruned stage by stage, and each stage learns from the one before it."""
