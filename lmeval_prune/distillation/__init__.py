"""Recursive distillation: prune a model stage by stage; each stage learns from the model before it."""
