"""Kernels: each folder has one operation, as a readable reference (`naive.py`) and in fast versions."""
