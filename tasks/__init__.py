"""lm-eval tasks of this package: one folder per data set, and shared Python modules."""
