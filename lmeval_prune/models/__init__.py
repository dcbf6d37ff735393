"""lm-eval model classes; thin."""
