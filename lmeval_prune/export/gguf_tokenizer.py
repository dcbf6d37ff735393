"""Writes a tokenizer as llama.cpp reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gguf import GGUFWriter, TokenType

from lmeval_prune.errors import InputError, nearest

# How text is split before pieces are merged: by what is in the tokenizer's file, llama.cpp's name of the rule. With the
# names in `_WHOLE`, llama.cpp takes a piece that is a token as it is (`ignore_merges`); with others it always merges.
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITTINGS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (_CASELESS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_CASELESS + r"\p{N}" + _REST,): "qwen2",
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): "tekken",
}
_WHOLE = frozenset(
    [
        "minicpm5",
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
        "youtu",
        "glm4",
        "glm5",
        "tekken",
        "granite-embed-multi-97m",
    ]
)
_NAMES = _WHOLE | frozenset(
    [
        "deepseek-llm",
        "deepseek-coder",
        "deepseek-v3",
        "falcon",
        "mpt",
        "starcoder",
        "gpt-2",
        "phi-2",
        "jina-es",
        "jina-de",
        "gigachat",
        "jina-v2-es",
        "jina-v2-de",
        "a.x-4.0",
        "mellum",
        "modern-bert",
        "jais-2",
        "sarvam-moe",
        "jina-v1-en",
        "jina-v2-code",
        "roberta-bpe",
        "refact",
        "command-r",
        "qwen2",
        "deepseek-r1-qwen",
        "kormo",
        "qwen35",
        "stablelm2",
        "olmo",
        "dbrx",
        "smaug-bpe",
        "poro-chat",
        "chatglm-bpe",
        "viking",
        "jais",
        "smollm",
        "codeshell",
        "bloom",
        "gpt3-finnish",
        "exaone",
        "exaone4",
        "exaone-moe",
        "chameleon",
        "minerva-7b",
        "megrez",
        "gpt-4o",
        "llama4",
        "kanana2",
        "tiny_aya",
        "superbpe",
        "trillion",
        "granite-docling",
        "bailingmoe",
        "bailingmoe2",
        "llada-moe",
        "seed-coder",
        "hunyuan",
        "hunyuan-dense",
        "kimi-k2",
        "grok-2",
        "afmoe",
        "minimax-m2",
        "solar-open",
    ]
)
# Tokens at which llama.cpp stops by their text.
_ENDS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "<|end_of_text|>",
        "<end_of_utterance>",
    ]
)


def ends_of(model: Any) -> list[int]:
    """The tokens at which a model's generation stops."""
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return list(found) if isinstance(found, list | tuple) else [found]
    return []


def add_tokenizer(
    writer: GGUFWriter, tokenizer: Any, size: int, splitting: str | None = None, ends: Sequence[int] = ()
) -> None:
    """Add a tokenizer to a GGUF file.

    Args:
        writer: of the file.
        tokenizer: transformers' fast one, byte-level BPE.
        size: of the model's vocabulary, which may be larger.
        splitting: llama.cpp's name of the rule by which text is split, where it is not one of those known here.
        ends: tokens at which the model's generation stops.

    Raises:
        InputError: it is of another kind, splits text in a way that is not known here, or is not the model's.
    """
    check_tokenizer(tokenizer, splitting, ends)
    own = _description(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting or splitting_of(own))
    added = {one["id"]: one for one in own["added_tokens"]}
    pieces = {number: piece for piece, number in own["model"]["vocab"].items()}
    pieces |= {number: one["content"] for number, one in added.items()}
    if max(pieces) >= size:
        raise InputError(f"the tokenizer has {max(pieces) + 1} tokens, the model {size}: it is another model's")
    kinds = [_kind(number, pieces, added) for number in range(size)]
    writer.add_token_list([pieces.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([_merge(pair) for pair in own["model"]["merges"]])
    numbers = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    for name, number in {**numbers, **_further_ends(tokenizer, ends)}.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    tokens = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(numbers["bos"] is not None and tokens[:1] == [numbers["bos"]])
    writer.add_add_eos_token(numbers["eos"] is not None and tokens[-1:] == [numbers["eos"]])
    writer.add_add_space_prefix(False)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        writer.add_chat_template([{"name": name, "template": one} for name, one in template.items()])
    elif template:
        writer.add_chat_template(template)


def check_tokenizer(tokenizer: Any, splitting: str | None = None, ends: Sequence[int] = ()) -> None:
    """Refuse a tokenizer that `add_tokenizer` would refuse.

    Raises:
        InputError: as of `add_tokenizer`.
    """
    own = _description(tokenizer)
    _further_ends(tokenizer, ends)
    name = splitting or splitting_of(own)
    if name not in _NAMES:
        raise InputError(f"--splitting {name} is no rule of llama.cpp's{nearest(name, _NAMES)}")
    whole = bool(own["model"].get("ignore_merges"))
    if whole != (name in _WHOLE):
        raise InputError(
            f"the tokenizer has ignore_merges {str(whole).lower()}, and llama.cpp's {name} the opposite: it would "
            f"make other tokens; name another rule by --splitting, or write a checkpoint"
        )


def _further_ends(tokenizer: Any, ends: Sequence[int]) -> dict[str, int]:
    """The places for tokens at which generation stops, beside the tokenizer's own.

    Raises:
        InputError: there are more than llama.cpp has places for, and knows by their text.
    """
    first = tokenizer.eos_token_id
    further = [one for one in ends if one != first and tokenizer.convert_ids_to_tokens(one) not in _ENDS]
    places = ("eos", "eot", "eom") if first is None else ("eot", "eom")
    if len(further) > len(places):
        raise InputError(
            f"generation stops at {len(ends)} tokens, {further} among them, and llama.cpp has places for {len(places)} "
            f"of these; take some out of eos_token_id in generation_config.json"
        )
    return dict(zip(places, further, strict=False))


def _description(tokenizer: Any) -> dict[str, Any]:
    """What is in the file tokenizer.json."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    if found["model"].get("type") != "BPE" or not any(one["type"] == "ByteLevel" for one in _steps(found)):
        raise InputError(
            "the tokenizer is no byte-level BPE (SentencePiece, for one), which is not written as GGUF yet; write a "
            "checkpoint, and convert that with llama.cpp's own script"
        )
    normalizer = found.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    changing = [one["type"] for one in steps if one["type"] != "NFC"]
    changing += ["add_prefix_space"] * any(one.get("add_prefix_space") for one in _steps(found))
    changing += [name for name in ("continuing_subword_prefix", "end_of_word_suffix") if found["model"].get(name)]
    if changing:
        raise InputError(
            f"the tokenizer has {changing[0]}, which llama.cpp does not do: it would make other tokens; write a "
            f"checkpoint instead of GGUF"
        )
    return found


def splitting_of(description: dict[str, Any]) -> str:
    """What llama.cpp calls the rule by which a tokenizer splits text.

    Args:
        description: what is in its file tokenizer.json.

    Raises:
        InputError: it is none of those known here.
    """
    rules = []
    for step in _steps(description):
        if step["type"] == "Split":
            plain = step["behavior"] == "Isolated" and not step["invert"]
            rules.append(step["pattern"].get("Regex", "") if plain else f"Split {step['behavior']}")
        elif step["type"] == "Digits" and step["individual_digits"]:
            rules.append("digits")
        elif step["type"] == "ByteLevel" and step["use_regex"]:
            rules.append("bytes")
        elif step["type"] != "ByteLevel":
            rules.append(step["type"])
    if tuple(rules) not in _SPLITTINGS:
        raise InputError(
            "the tokenizer splits text by a rule that is not known here; name llama.cpp's by --splitting (one of those "
            f"in its llama-vocab.cpp; known by themselves: {', '.join(_SPLITTINGS.values())})"
        )
    return _SPLITTINGS[tuple(rules)]


def _steps(description: dict[str, Any]) -> list[dict[str, Any]]:
    step = description.get("pre_tokenizer") or {"type": "none"}
    return step["pretokenizers"] if step["type"] == "Sequence" else [step]


def _kind(number: int, pieces: dict[int, str], added: dict[int, dict[str, Any]]) -> TokenType:
    if number not in pieces:
        return TokenType.UNUSED
    if number in added:
        return TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
    return TokenType.NORMAL


def _merge(pair: Any) -> str:
    return pair if isinstance(pair, str) else " ".join(pair)
