"""Attention of tokens that do not skip, over the keys and values of stored tokens."""
