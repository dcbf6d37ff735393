"""Run the tokens with which all texts of a batch begin once instead of once a text, in training, too.

In a chat template it is the system turn. Loss and gradients stay the same: keys and values of the prefix are repeated
for each text, and the gradients of the copies add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lmeval_prune.architectures import cache_argument

LENGTH = "common_prefix"  # input with the number of tokens
LEAST = 4  # shorter ones cost more than they save


def common_prefix(ids: Tensor, first: int) -> int:
    """Return the number of tokens that all rows begin with, before the first token whose logits are needed.

    Args:
        ids: token ids, (texts, tokens).
        first: smallest index of a token whose logits are needed.
    """
    equal = (ids == ids[:1]).all(0)[:first].long().cumprod(0)
    length = int(equal.sum())
    return length if len(ids) > 1 and length >= LEAST else 0


def runs_in_parts(model: Any) -> bool:
    """Return whether a model in training gives the same outputs if a prefix of its texts is run before the rest.

    It does with a cache that keeps all tokens, and without dropout, which draws for each token of each text.
    """
    if not model._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) is DynamicLayer for layer in layers) and not any(
        _drops(module) or getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )


def _drops(module: nn.Module) -> bool:
    """Return whether a module has dropout."""
    if isinstance(module, nn.Dropout):
        return module.p > 0
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())


def forward_in_parts(model: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the outputs of a model for a batch whose common prefix is run once; logits are those of the other tokens.

    Args:
        model: a causal language model for which `runs_in_parts` is true.
        inputs: its inputs with `logits_to_keep`, an index tensor, and `common_prefix`, 0 if there is none.
    """
    values = dict(inputs)
    length = values.pop(LENGTH, 0)
    if not length:
        return model(**values)
    ids, columns = values.pop("input_ids"), values.pop("logits_to_keep")
    prefix = cache_argument(model(input_ids=ids[:1, :length], use_cache=True, logits_to_keep=1))
    for cache in prefix.values():
        cache.batch_repeat_interleave(len(ids))
    return model(input_ids=ids[:, length:], logits_to_keep=columns - length, **prefix, **values)
