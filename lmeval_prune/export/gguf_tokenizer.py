"""Writes a tokenizer as llama.cpp reads it."""

from __future__ import annotations

import json
from typing import Any

from gguf import GGUFWriter, TokenType

from lmeval_prune.errors import InputError

# How text is split before pieces are merged: by what is in the tokenizer's file, llama.cpp's name of the rule.
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


def add_tokenizer(writer: GGUFWriter, tokenizer: Any, size: int, splitting: str | None = None) -> None:
    """Add a tokenizer to a GGUF file.

    Args:
        writer: of the file.
        tokenizer: transformers' fast one, byte-level BPE.
        size: of the model's vocabulary, which may be larger.
        splitting: llama.cpp's name of the rule by which text is split, where it is not one of those known here.

    Raises:
        InputError: it is of another kind, or splits text in a way that is not known here.
    """
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
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    tokens = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and tokens[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and tokens[-1] == tokenizer.eos_token_id)
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def check_tokenizer(tokenizer: Any, splitting: str | None = None) -> None:
    """Refuse a tokenizer that `add_tokenizer` would refuse.

    Raises:
        InputError: as of `add_tokenizer`.
    """
    own = _description(tokenizer)
    if not splitting:
        splitting_of(own)


def _description(tokenizer: Any) -> dict[str, Any]:
    """What is in the file tokenizer.json."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    if found["model"].get("type") != "BPE" or not any(one["type"] == "ByteLevel" for one in _steps(found)):
        raise InputError(
            "the tokenizer is no byte-level BPE (SentencePiece, for one), which is not written as GGUF yet; write a "
            "checkpoint, and convert that with llama.cpp's own script"
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
            rules.append(step["pattern"].get("Regex", ""))
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
