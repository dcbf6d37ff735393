"""Map a stock transformers model: attention layers, feed-forward blocks, heads, and a fingerprint of its weights.

torch is imported only when weights are read.
"""

from lmeval_prune.architectures.blocks import AttentionLayer, FeedForward, Rows
from lmeval_prune.architectures.identity import (
    adapters_of,
    config_fingerprint,
    input_device,
    is_dispatched,
    loadable_fingerprints,
    nonfinite_tensor,
    text_config,
    weights_fingerprint,
)
from lmeval_prune.architectures.model_map import (
    ModelMap,
    cache_argument,
    map_model,
    position_limit,
    takes_logits_to_keep,
    uncuttable,
)
from lmeval_prune.architectures.names import Head, head_names
from lmeval_prune.architectures.structure import recognise, tiny_model
from lmeval_prune.architectures.table import FAMILIES, Family

__all__ = [
    "FAMILIES", "AttentionLayer", "Family", "FeedForward", "Head", "ModelMap", "Rows",
    "adapters_of", "cache_argument", "config_fingerprint", "head_names", "input_device", "is_dispatched",
    "loadable_fingerprints", "map_model", "nonfinite_tensor", "position_limit", "recognise",
    "takes_logits_to_keep", "text_config", "tiny_model", "uncuttable", "weights_fingerprint",
]  # fmt: skip
