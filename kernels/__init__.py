"""Kernels: a folder an operation, a reference that reads like the formula beside its fast forms."""
