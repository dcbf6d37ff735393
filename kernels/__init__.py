"""Kernels: fast versions of attention and of Token Filtering's decisions. Tests hold the plain formulas."""
