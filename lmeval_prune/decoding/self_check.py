"""The check of whether the engine runs a model: its logits are compared with the model's own, path by path."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.model_lock import refuse_locked
from lmeval_prune.decoding.model_runner import Chunk, ModelRunner
from lmeval_prune.errors import first_line
from lmeval_prune.interventions import interventions_on
from lmeval_prune.interventions.attention_call import UnsupportedAttention

logger = logging.getLogger(__name__)


def why_unsupported(model_map: ModelMap) -> str | None:
    """Return why a model, with what is applied to it, is left to `generate`; None if the engine runs it."""
    refuse_locked(model_map.model)
    try:
        _check(model_map)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model that works otherwise raises here
        reason = first_line(error).removeprefix("UnsupportedAttention: ")
        logger.warning(
            "%s is decoded by plain generate, each row with its mask: %s", model_map.model_type or "the model", reason
        )
        return reason
    return None


def _check(model_map: ModelMap) -> None:
    """Refuse a model whose logits differ, or that a comparison cannot judge."""
    model: Any = model_map.model
    _check_interventions(model)
    _check_config(model)
    tokens = [7 * i % model.config.get_text_config().vocab_size for i in range(12)]
    (layer,) = middle = frozenset({len(model_map.attention) // 2})
    device = next(model.parameters()).device
    hidden: list[Any] = []
    with torch.inference_mode(), ExitStack() as stack:
        for intervention in interventions_on(model):
            stack.enter_context(intervention.self_check())
        expected = model(torch.tensor([tokens], device=device), use_cache=False).logits[0].float()
        with ModelRunner.on(model_map, KVCache(2, 12), [None]) as runner:

            def difference(start: int, stop: int, skip: int = 0, *args: Any, **kwargs: Any) -> float:
                batch = [Chunk(slot, start, 0, tokens[start:stop], skip, **kwargs) for slot in (0, 1)]
                logits, kept = runner.forward(batch, *args)
                hidden.extend(kept)
                return float((logits.unflatten(0, (2, -1)).float() - expected[start + skip : stop]).abs().max())

            # a token filter skips one token of the first pass, and the only one of the third
            differences = [difference(0, 8, keep=middle), difference(8, 10, 1), difference(10, 11), difference(11, 12)]
            differences.append(difference(0, 8, 5, layer, torch.cat([kept[layer] for kept in hidden[:2]])))
    tolerance = 0.05 if next(model.parameters()).element_size() < 4 else 1e-3
    if not all(value <= tolerance * float(expected.abs().max()) for value in differences):  # nor not-a-number
        raise UnsupportedAttention(f"its logits would differ by {max(differences):.2g}")


def _check_interventions(model: Any) -> None:
    for intervention in interventions_on(model):
        if intervention.needs_order:
            raise UnsupportedAttention(f"answers under {type(intervention).__name__} depend on those before them")
        if not (intervention.tokenwise or intervention.by_sequence):
            raise UnsupportedAttention(
                f"{type(intervention).__name__} does not say that it treats each token by itself"
            )


def _check_config(model: Any) -> None:
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise UnsupportedAttention("its layers are on several devices")
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise UnsupportedAttention(f"it has layers of type {', '.join(sorted(others))}")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):  # turns every row by the longest one's length
            raise UnsupportedAttention(f"its positions are scaled by the longest row ({rope['rope_type']})")
