"""One entry a family: which modules are attention, and what their projections are called.

Everything numeric (head counts, head sizes, key-value heads) is read from the live modules, layer by
layer, because layers of one model may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Order of the rows in a projection that computes queries, keys and values at once: (part, index, heads, kv_heads,
# dim) -> first row of that query head (part "q") or key-value head ("k", "v"); the dim rows from there are its own.
Fused = Callable[[str, int, int, int, int], int]


def _blocks(part: str, index: int, heads: int, kv_heads: int, dim: int) -> int:
    """[all q | all k | all v]."""
    return dim * (index + {"q": 0, "k": heads, "v": heads + kv_heads}[part])


def _by_group(part: str, index: int, heads: int, kv_heads: int, dim: int) -> int:
    """For each key-value group: [its q … | k | v]. One group: multi-query; a group a head: q, k, v by head."""
    share = heads // kv_heads
    group, offset = divmod(index, share) if part == "q" else (index, share + (part == "v"))
    return dim * (group * (share + 2) + offset)


def _codegen(part: str, index: int, heads: int, kv_heads: int, dim: int) -> int:
    """Four slices, each [q | v | k] of a quarter of the heads."""
    quarter = heads // 4
    piece, offset = divmod(index, quarter)
    return dim * (piece * 3 * quarter + {"q": 0, "v": 1, "k": 2}[part] * quarter + offset)


@dataclass(frozen=True)
class Family:
    """How one family of models names its attention.

    Attributes:
        attention: regular expression for the end of an attention module's dotted name, with a group
            `layer` and, where a model has several stacks, `stack` and `kind`.
        output: output projection, relative to the attention module. A head is a slice of its *input*.
        width: attribute (relative) that holds the size of that slice.
        query, key, value: projections, relative; the same name three times if `fused` tells them apart.
        fused: order of the rows of a fused projection.
        key_value_pairs: key and value rows alternate by head in one projection (latent attention).
    """

    attention: str
    output: str = "o_proj"
    width: str = "head_dim"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    fused: Fused | None = None
    key_value_pairs: bool = False


def _fused(attention: str, output: str, projection: str, order: Fused, width: str = "head_dim") -> Family:
    return Family(attention, output, width, projection, projection, projection, order)


_LLAMA = Family(r"layers\.(?P<layer>\d+)\.self_attn")
_PHI3 = _fused(r"layers\.(?P<layer>\d+)\.self_attn", "o_proj", "qkv_proj", _blocks)
_GPT = r"\bh\.(?P<layer>\d+)\."
_BERT = Family(
    r"encoder\.layer\.(?P<layer>\d+)\.attention",
    "output.dense",
    "self.attention_head_size",
    "self.query",
    "self.key",
    "self.value",
)
_T5 = Family(
    r"(?P<stack>encoder|decoder)\.block\.(?P<layer>\d+)\.layer\.\d+\.(?P<kind>SelfAttention|EncDecAttention)",
    "o",
    "key_value_proj_dim",
    "q",
    "k",
    "v",
)
_BART = Family(r"(?P<stack>encoder|decoder)\.layers\.(?P<layer>\d+)\.(?P<kind>self_attn|encoder_attn)", "out_proj")

_LLAMA_LIKE = (
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text olmo olmo2 olmo3 cohere "
    "cohere2 stablelm starcoder2 granite granitemoe smollm3 glm4 gpt_oss ministral helium arcee hunyuan_v1_dense"
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_LLAMA_LIKE.split(), _LLAMA),
    "deepseek_v3": Family(
        r"layers\.(?P<layer>\d+)\.self_attn",
        width="v_head_dim",
        query="q_b_proj|q_proj",
        key="kv_b_proj",
        value="kv_b_proj",
        key_value_pairs=True,
    ),
    "phi3": _PHI3,
    "glm": _LLAMA,
    "phi": Family(r"layers\.(?P<layer>\d+)\.self_attn", "dense"),
    "gpt2": _fused(_GPT + "attn", "c_proj", "c_attn", _blocks),
    "gpt_bigcode": _fused(_GPT + "attn", "c_proj", "c_attn", _by_group),
    "gptj": Family(_GPT + "attn", "out_proj"),
    "codegen": _fused(_GPT + "attn", "out_proj", "qkv_proj", _codegen),
    "gpt_neo": Family(_GPT + r"attn\.attention", "out_proj"),
    "gpt_neox": _fused(r"layers\.(?P<layer>\d+)\.attention", "dense", "query_key_value", _by_group, "head_size"),
    "opt": Family(r"decoder\.layers\.(?P<layer>\d+)\.self_attn", "out_proj"),
    "falcon": _fused(_GPT + "self_attention", "dense", "query_key_value", _by_group),
    "bloom": _fused(_GPT + "self_attention", "dense", "query_key_value", _by_group),
    "mpt": _fused(r"blocks\.(?P<layer>\d+)\.attn", "out_proj", "Wqkv", _blocks),
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "distilbert": Family(
        r"transformer\.layer\.(?P<layer>\d+)\.attention",
        "out_lin",
        "attention_head_size",
        "q_lin",
        "k_lin",
        "v_lin",
    ),
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART,
    "mbart": _BART,
}
