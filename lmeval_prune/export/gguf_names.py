"""What llama.cpp calls models and their tensors: the families that are written as GGUF."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def gguf_architecture(model_map: ModelMap) -> str:
    """The architecture of llama.cpp's that computes as a model does.

    `llama` has one number of heads and channels for all layers, `deci` one a layer; both take biases anywhere. `qwen2`
    divides the width by the heads and has no other biases than its own; where that does not fit, a Qwen2 is written as
    one of the two, whose rotary embedding takes rows of queries and keys in another order. Queries and keys with norms
    (`qwen3`) are in neither. Only these two read factors of frequencies, as Llama 3 has them.

    Raises:
        InputError: the family is not known here, or its layers differ in a way that llama.cpp has no architecture for.
    """
    family = model_map.model_type
    if family not in FAMILIES:
        raise InputError(f"{family} models are not written as GGUF yet; known: {', '.join(FAMILIES)}")
    alike = len({(one.heads, one.kv_heads) for one in model_map.attention}) == 1
    alike &= len({block.channels for block in model_map.feed_forward}) == 1
    first = model_map.attention[0]
    own = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") if family.startswith("qwen2") else ()
    plain = not any(name.endswith(".bias") and not name.endswith(_biases(own)) for name in _parameters(model_map))
    factors = rope_of(model_map.model.config)["rope_type"] == "llama3"
    if family == "qwen3":
        if not alike or not plain or factors:
            what = "projections have biases" if not plain else "layers differ" if not alike else "rope is llama3's"
            hint = "" if factors else ", or plan the same number of heads and channels in all layers, without biases"
            raise InputError(
                f"llama.cpp's qwen3 has no form for a model whose {what}; write a checkpoint instead of GGUF{hint}"
            )
        return "qwen3"
    divides = first.heads * first.head_dim == model_map.model.config.hidden_size
    if family == "qwen2" and alike and divides and plain and not factors:
        return "qwen2"
    return "llama" if alike else "deci"


def tensor_names(architecture: str, layers: int) -> Callable[[str], str | None]:
    """A function from transformers' names of parameters to an architecture's; None for what it has not."""
    kind = next(one for one, name in MODEL_ARCH_NAMES.items() if name == architecture)
    places = get_tensor_name_map(kind, layers)
    return lambda name: places.get_name(name, (".weight", ".bias"))


def output_projection(layer: int) -> str:
    """What llama.cpp calls the weight of a layer's output projection."""
    return f"blk.{layer}.attn_output.weight"


def rope_of(config: Any) -> dict[str, Any]:
    """Settings of a model's rotary embedding."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    return {"rope_type": "default", "rope_theta": 10000.0, **found}


def _parameters(model_map: ModelMap) -> list[str]:
    return [name for name, _ in model_map.model.named_parameters()]


def _biases(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{module}.bias" for module in modules)
