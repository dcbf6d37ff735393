"""Where attention heads are in a stock transformers model."""

from lmeval_prune.architectures.attention import AttentionLayer, AttentionMap, Rows, find_attention
from lmeval_prune.architectures.table import FAMILIES, Family

__all__ = ["FAMILIES", "AttentionLayer", "AttentionMap", "Family", "Rows", "find_attention"]
