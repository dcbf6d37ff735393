"""Tiny random models of every family in the table, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.pytorch_utils import Conv1D

from lmeval_prune.architectures import FAMILIES
from lmeval_prune.checkpoints.loading import load_pretrained

_HEADS = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_MOE = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
_SEQ2SEQ = {"d_model": 32, "decoder_start_token_id": 0}
_PLAIN = (
    *("llama", "mistral", "qwen2", "olmo", "olmo2", "olmo3", "cohere", "cohere2", "stablelm", "starcoder2", "granite"),
    *("smollm3", "phi", "phi3", "gpt_neox", "arcee"),
)

CAUSAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_PLAIN, _HEADS),
    **{name: {**_HEADS, "head_dim": 8} for name in ("ministral", "helium", "hunyuan_v1_dense", "glm", "glm4")},
    "granitemoe": {**_HEADS, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mixtral": {**_HEADS, "num_local_experts": 2},
    "qwen2_moe": {**_HEADS, **_MOE, "num_experts": 2, "shared_expert_intermediate_size": 16},
    "qwen3": {**_HEADS, "head_dim": 16},
    "qwen3_moe": {**_HEADS, **_MOE, "head_dim": 8, "num_experts": 2},
    **{name: {**_HEADS, "head_dim": 16} for name in ("gemma", "gemma2", "gemma3_text")},
    "gpt_oss": {**_HEADS, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    "deepseek_v3": {
        **{**_HEADS, **_MOE, "num_key_value_heads": 4, "v_head_dim": 12, "n_routed_experts": 4},
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    },
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gptj": {**_GPT, "rotary_dim": 4},
    "codegen": {**_GPT, "rotary_dim": 4},
    "gpt_neo": {
        **{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128},
        "attention_types": [[["global", "local"], 1]],
    },
    "opt": {**_HEADS, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"new_decoder_architecture": True, "num_kv_heads": 2},
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
}
ENCODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), _HEADS),
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 128},
}
_T5 = {**_SEQ2SEQ, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
_BART = {
    **{**_SEQ2SEQ, "max_position_embeddings": 128, "encoder_layers": 2, "decoder_layers": 2},
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
}
SEQ2SEQ: dict[str, dict[str, Any]] = {"t5": _T5, "mt5": _T5, "bart": _BART, "mbart": _BART}
ALL = {**CAUSAL, **ENCODERS, **SEQ2SEQ}


def source_of(family: str) -> str:
    """The source text of a family's classes in the installed transformers, whose versions differ in it."""
    module = model_type_to_module_name(family)
    return (Path(transformers.__file__).parent / "models" / module / f"modeling_{module}.py").read_text()


EAGER_ONLY = {family for family in ALL if "_supports_sdpa = True" not in source_of(family)}
OWN_ATTENTION = {family for family in ALL if "ALL_ATTENTION_FUNCTIONS" not in source_of(family)}  # not by the interface
BY_GENERATE = OWN_ATTENTION | {"gpt_oss"}  # the decoding engine does not run them; gpt_oss has sinks
QUICK = ("llama", "gemma2", "qwen3", "phi3", "gpt_neox", "opt", "deepseek_v3")  # one of each kind of attention
VOCABULARY = 64


def distinct(families: Iterable[str]) -> list[Any]:
    """Return families as parameters of a test; those that share a table entry with one before run in `test-long`."""
    entries, parameters = set(), []
    for family in families:
        entry = FAMILIES[family]
        parameters.append(pytest.param(family, marks=[pytest.mark.long] if entry in entries else []))
        entries.add(entry)
    return parameters


def quick(families: Iterable[str], *more: str) -> list[Any]:
    """Return families as parameters of a test of the engine; those that are neither `QUICK` nor named run in `test-long`."""
    return [pytest.param(name, marks=() if name in {*QUICK, *more} else pytest.mark.long) for name in families]


def tiny(
    family: str, attention: str = "sdpa", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any
) -> nn.Module:
    """A random model of `family` in evaluation mode; large weights, so that every head matters."""
    torch.manual_seed(seed)
    special = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings = {**special, **ALL.get(family, _HEADS), **changes}
    config = AutoConfig.for_model(family, **settings)
    config._attn_implementation = "eager" if family in EAGER_ONLY else attention
    config._experts_implementation = "eager"  # grouped_mm has no float64
    kind = AutoModelForSeq2SeqLM if family in SEQ2SEQ else AutoModel if family in ENCODERS else AutoModelForCausalLM
    model = kind.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
    return model


def implementations(family: str) -> dict[str, str]:
    """Return options of loading: not every family supports sdpa, or grouped products in float64."""
    return {"attn_implementation": "eager" if family in EAGER_ONLY else "sdpa", "experts_implementation": "eager"}


def saved(family: str, folder: Path, **changes: Any) -> Any:
    """Save a tiny model in a folder, and return it."""
    model: Any = tiny(family, **changes)
    model.save_pretrained(folder)
    return model


def stored(family: str, folder: Path, **changes: Any) -> Any:
    """Save a tiny model in a folder, and return it as it is when loaded: some constants are rounded to float32 then."""
    saved(family, folder, **changes)
    return load_pretrained(folder, **implementations(family))


def tiny_llava() -> Any:
    """A Llava: a vision tower beside a Llama, which only an auto class for images and texts builds."""
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tower = {key: 2 if "layers" in key or "heads" in key else value for key, value in text.items()}
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, **text},
        vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **tower},
    )
    torch.manual_seed(0)
    model: Any = transformers.LlavaForConditionalGeneration(config)
    return model.to(torch.float64).eval()


def family_folder(family: str, tokenizer: Path, folder: Path) -> Path:
    """Save a tiny random model of any family with the tokenizer in a folder, as a user would have it."""
    special = {"vocab_size": 259, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **{**_HEADS, "max_position_embeddings": 512, "head_dim": 8, **special})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def output(model: nn.Module, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Logits, or an encoder's hidden states; shape (batch, tokens, …)."""
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens.flip(1)
    with torch.no_grad():
        result = model(tokens, **inputs)
    return result.logits if "logits" in result else result.last_hidden_state


def weight_view(module: nn.Module) -> torch.Tensor:
    """Return the weight of a linear module as a writable view, (outputs, inputs)."""
    return module.weight.data.T if isinstance(module, Conv1D) else module.weight.data


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(64 + token) for token in tokens)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) - 64 for letter in text]


def tokens(rows: int = 3, length: int = 7, seed: int = 1) -> torch.Tensor:
    """Random token ids without special ones, shape (rows, length)."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
