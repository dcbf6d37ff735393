"""What llama.cpp calls models and their tensors: the families that are written as GGUF."""

from __future__ import annotations

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def gguf_architecture(model_map: ModelMap) -> str:
    """The architecture of llama.cpp's that computes as a model does.

    `llama` has one number of heads and channels for all layers, `deci` one a layer; both take biases anywhere. `qwen2`
    divides the width by the heads and has no other biases than its own; where that does not fit, a Qwen2 is written as
    one of the two, whose rotary embedding takes rows of queries and keys in another order. Queries and keys with norms
    (`qwen3`) are in neither.

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
    if family == "qwen3":
        if not alike or not plain:
            what = "layers differ" if plain else "projections have biases"
            raise InputError(
                f"llama.cpp's qwen3 has no form for a model whose {what}; write a checkpoint instead of GGUF, or plan "
                f"the same number of heads and channels in all layers, without biases"
            )
        return "qwen3"
    divides = first.heads * first.head_dim == model_map.model.config.hidden_size
    if family == "qwen2" and alike and divides and plain:
        return "qwen2"
    return "llama" if alike else "deci"


def tensor_name(name: str) -> str | None:
    """What llama.cpp calls a parameter; None if it has no such."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, _, rest = name.partition("model.layers.")
    index, _, path = rest.partition(".")
    module, _, kind = path.rpartition(".")
    return f"blk.{index}.{_INSIDE[module]}.{kind}" if module in _INSIDE else None


def output_projection(layer: int) -> str:
    """What llama.cpp calls the weight of a layer's output projection."""
    return f"blk.{layer}.{_INSIDE['self_attn.o_proj']}.weight"


_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _parameters(model_map: ModelMap) -> list[str]:
    return [name for name, _ in model_map.model.named_parameters()]


def _biases(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{module}.bias" for module in modules)
