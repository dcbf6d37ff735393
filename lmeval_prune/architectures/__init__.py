"""What is where in a stock transformers model, and what its parts are called.

Names are found on first use: those that need no torch do not import it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmeval_prune.architectures.blocks import AttentionLayer, FeedForward, Rows
    from lmeval_prune.architectures.heads import Head, head_names
    from lmeval_prune.architectures.identity import (
        adapters_of,
        is_dispatched,
        loadable_fingerprints,
        nonfinite_tensor,
        tensor_in_layer,
        weights_fingerprint,
    )
    from lmeval_prune.architectures.model_map import ModelMap, map_model
    from lmeval_prune.architectures.table import FAMILIES, Family
    from lmeval_prune.architectures.units import UNITS, check_unit, uncuttable, units_of

__all__ = [
    "FAMILIES", "UNITS", "AttentionLayer", "Family", "FeedForward", "Head", "ModelMap", "Rows",
    "adapters_of", "check_unit", "head_names", "is_dispatched", "loadable_fingerprints", "map_model",
    "nonfinite_tensor", "tensor_in_layer", "uncuttable", "units_of", "weights_fingerprint",
]  # fmt: skip

_MODULES = ("table", "blocks", "heads", "units", "model_map", "identity")  # the last two import torch


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            found = import_module(f"{__name__}.{module}")
            if hasattr(found, name):
                globals()[name] = getattr(found, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
