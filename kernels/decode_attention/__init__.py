"""Attention of one new token per row over the stored keys and values of its slot."""
