"""Table of model families: names of layers, attention modules, feed-forward blocks and projections.

Counts and sizes are read from the live modules, layer by layer, because layers of one model may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

# Row order of a projection that computes queries, keys and values: (part, index, heads, kv_heads, dim) -> first of the
# `dim` rows of a query head (part "q") or key-value head ("k", "v").
Fused = Callable[[str, int, int, int, int], int]


def _blocks(part: str, index: int, heads: int, kv_heads: int, dim: int) -> int:
    return dim * (index + {"q": 0, "k": heads, "v": heads + kv_heads}[part])


def _by_group(part: str, index: int, heads: int, kv_heads: int, dim: int) -> int:
    """Order rows by key-value group: [q of its heads | k | v]."""
    share = heads // kv_heads
    group, offset = divmod(index, share) if part == "q" else (index, share + (part == "v"))
    return dim * (group * (share + 2) + offset)


def _codegen(part: str, index: int, heads: int, kv_heads: int, dim: int) -> int:
    """Order rows in four slices, each [q | v | k] of a quarter of the heads."""
    quarter = heads // 4
    piece, offset = divmod(index, quarter)
    return dim * (piece * 3 * quarter + {"q": 0, "v": 1, "k": 2}[part] * quarter + offset)


@dataclass(frozen=True)
class FeedForwardNames:
    """Names in a family's feed-forward block: `down(activation(gate) * up)`, or `down(activation(up))`.

    If `gate` and `up` have the same name, one projection computes both, the gate with the first half of its rows.
    """

    block: str  # module that holds the projections, relative to the layer; empty: the layer itself
    up: str  # projections, relative to the block
    down: str
    gate: str | None = None  # a live block may lack it


@dataclass(frozen=True)
class Family:
    """Names of a family's layers, attention modules and feed-forward blocks.

    Names of attention modules are relative to the layer, names of projections relative to the attention module. A name
    may hold alternatives, separated by `|`; the first one that exists in a live module counts.
    """

    layer: str  # pattern of the end of a layer's name, with the groups `layer` and, for several stacks, `stack`
    attention: str
    output: str = "o_proj"  # output projection; a head is a slice of its input
    width: str = "head_dim"  # attribute that holds the width of a head's slice
    query: str = "q_proj"  # the same name for query, key and value if the projection is fused
    key: str = "k_proj"
    value: str = "v_proj"
    fused: Fused | None = None  # row order of a fused projection
    key_value_pairs: bool = False  # key and value rows alternate by head in one projection (latent attention)
    cross_attention: str | None = None
    feed_forward: FeedForwardNames | None = None
    head_parameters: tuple[tuple[str, str], ...] = ()  # (name, "q" or "k"): other parameters with an entry per head
    uncuttable: str = ""  # why heads can be masked but not cut; empty if they can be cut


def _fused(
    layer: str, attention: str, output: str, projection: str, order: Fused, names: FeedForwardNames, **more: Any
) -> Family:
    same: dict[str, Any] = dict.fromkeys(("query", "key", "value"), projection)
    return Family(layer, attention, output, **same, fused=order, feed_forward=names, **more)


_GATED = FeedForwardNames("mlp|feed_forward", "up_proj", "down_proj", "gate_proj")
_GATE_UP = FeedForwardNames("mlp", "gate_up_proj", "down_proj", "gate_up_proj")
_C_FC = FeedForwardNames("mlp", "c_fc", "c_proj")
_FC_IN = FeedForwardNames("mlp", "fc_in", "fc_out")
_TO_4H = FeedForwardNames("mlp", "dense_h_to_4h", "dense_4h_to_h")
_FC1 = FeedForwardNames("mlp", "fc1", "fc2")
_FC1_IN_LAYER = FeedForwardNames("", "fc1", "fc2")
_FFN = FeedForwardNames("ffn", "up_proj", "down_proj")
_DENSE_RELU = FeedForwardNames("layer.1.DenseReluDense|layer.2.DenseReluDense", "wi_1|wi", "wo", "wi_0")

ALIBI = "the slopes of its position biases depend on the number of heads"
_NUMBER = r"(?P<layer>\d+)"
_STACK = "(?P<stack>encoder|decoder)"
_LAYERS, _H = rf"layers\.{_NUMBER}", rf"h\.{_NUMBER}"
_LLAMA = Family(_LAYERS, "self_attn", feed_forward=_GATED)
_GLM = replace(_LLAMA, feed_forward=_GATE_UP)
_FALCON = _fused(_H, "self_attention", "dense", "query_key_value", _by_group, _TO_4H)
_BERT = replace(
    Family(rf"encoder\.layer\.{_NUMBER}", "attention", "output.dense", "self.attention_head_size"),
    query="self.query",
    key="self.key",
    value="self.value",
    feed_forward=FeedForwardNames("", "intermediate.dense", "output.dense"),
)
_DISTILBERT = replace(
    Family(rf"transformer\.layer\.{_NUMBER}", "attention", "out_lin", "attention_head_size", "q_lin", "k_lin", "v_lin"),
    feed_forward=FeedForwardNames("ffn", "lin1", "lin2"),
)
_T5 = replace(
    Family(rf"{_STACK}\.block\.{_NUMBER}", "layer.0.SelfAttention", "o", "key_value_proj_dim", "q", "k", "v"),
    cross_attention="layer.1.EncDecAttention",
    feed_forward=_DENSE_RELU,
    uncuttable="all layers share the position biases of the first one's heads",
)
_BART = replace(
    Family(rf"{_STACK}\.{_LAYERS}", "self_attn", "out_proj", feed_forward=_FC1_IN_LAYER),
    cross_attention="encoder_attn",
)

_LLAMA_LIKE = (
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text olmo cohere2 stablelm granite "
    "granitemoe smollm3 ministral helium arcee hunyuan_v1_dense"
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_LLAMA_LIKE.split(), _LLAMA),
    **dict.fromkeys(("olmo2", "olmo3"), replace(_LLAMA, uncuttable="its query and key norms go over all heads")),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), _BERT),
    **dict.fromkeys(("t5", "mt5"), _T5),
    **dict.fromkeys(("bart", "mbart"), _BART),
    **dict.fromkeys(("glm", "glm4"), _GLM),
    "deepseek_v3": replace(
        _LLAMA, width="v_head_dim", query="q_b_proj|q_proj", key="kv_b_proj", value="kv_b_proj", key_value_pairs=True
    ),
    "cohere": replace(_LLAMA, head_parameters=(("q_norm.weight", "q"), ("k_norm.weight", "k"))),
    "gpt_oss": replace(_LLAMA, head_parameters=(("sinks", "q"),)),
    "phi3": _fused(_LAYERS, "self_attn", "o_proj", "qkv_proj", _blocks, _GATE_UP),
    "starcoder2": replace(_LLAMA, feed_forward=_C_FC),
    "phi": replace(_LLAMA, output="dense", feed_forward=_FC1),
    "gpt2": _fused(_H, "attn", "c_proj", "c_attn", _blocks, _C_FC),
    "gpt_bigcode": _fused(_H, "attn", "c_proj", "c_attn", _by_group, _C_FC),
    "gptj": Family(_H, "attn", "out_proj", feed_forward=_FC_IN),
    "codegen": replace(
        _fused(_H, "attn", "out_proj", "qkv_proj", _codegen, _FC_IN),
        uncuttable="its fused projection is split into four slices of heads",
    ),
    "gpt_neo": Family(_H, "attn.attention", "out_proj", feed_forward=_C_FC),
    "gpt_neox": _fused(_LAYERS, "attention", "dense", "query_key_value", _by_group, _TO_4H, width="head_size"),
    "opt": Family(rf"decoder\.{_LAYERS}", "self_attn", "out_proj", feed_forward=_FC1_IN_LAYER),
    "falcon": _FALCON,
    "bloom": replace(_FALCON, uncuttable=ALIBI),
    "mpt": _fused(rf"blocks\.{_NUMBER}", "attn", "out_proj", "Wqkv", _blocks, _FFN, uncuttable=ALIBI),
    "distilbert": _DISTILBERT,
}
