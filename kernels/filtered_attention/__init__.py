"""Attention of the tokens that do not skip, over stored keys and values."""
