"""Write a tokenizer to a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gguf import GGUFWriter, TokenType

from lmeval_prune.errors import InputError

# Names of recognised pre-tokenizers (`pre` in llama-vocab.cpp), by the steps of `pre_tokenizer` in tokenizer.json.
_CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_PUNCTUATION_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RULE_OF_STEPS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (_CONTRACTIONS_AND_WORDS + r"\p{N}{1,3}" + _PUNCTUATION_AND_SPACES,): "llama-bpe",
    (_CONTRACTIONS_AND_WORDS + r"\p{N}" + _PUNCTUATION_AND_SPACES,): "qwen2",
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): "tekken",
}
IGNORING_MERGES = ("llama-bpe", "tekken")  # a piece of text that is a token is taken without merging
# Tokens that llama.cpp recognises as end tokens by their text.
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>"),
    *("<|end_of_text|>", "<end_of_utterance>"),
)


def add_tokenizer(
    writer: GGUFWriter, tokenizer: Any, size: int, splitting: str | None = None, ends: Sequence[int] = ()
) -> None:
    """Add a byte-level BPE tokenizer to a GGUF file, padded to the model's vocabulary; `ends` are its end tokens."""
    check_tokenizer(tokenizer, splitting, ends)
    description = _read_description(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting or splitting_of(description))
    added = {token["id"]: token for token in description["added_tokens"]}
    pieces = {number: piece for piece, number in description["model"]["vocab"].items()}
    pieces |= {number: token["content"] for number, token in added.items()}
    writer.add_token_list([pieces.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([_token_type(number, pieces, added) for number in range(size)])
    merges = description["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    _add_special_tokens(writer, tokenizer, ends)
    writer.add_add_space_prefix(False)
    templates = tokenizer.chat_template  # a text, or a dictionary of texts
    if templates:
        named = isinstance(templates, dict)
        writer.add_chat_template(
            [{"name": name, "template": text} for name, text in templates.items()] if named else templates
        )


def _add_special_tokens(writer: GGUFWriter, tokenizer: Any, ends: Sequence[int]) -> None:
    numbers = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    for name, number in {**numbers, **_extra_end_tokens(tokenizer, ends)}.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    tokens = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(numbers["bos"] is not None and tokens[:1] == [numbers["bos"]])
    writer.add_add_eos_token(numbers["eos"] is not None and tokens[-1:] == [numbers["eos"]])


def check_tokenizer(tokenizer: Any, splitting: str | None = None, ends: Sequence[int] = ()) -> None:
    """Refuse a tokenizer that llama.cpp cannot reproduce."""
    description = _read_description(tokenizer)
    _extra_end_tokens(tokenizer, ends)
    if splitting is None:
        rule, ignores_merges = splitting_of(description), bool(description["model"].get("ignore_merges"))
        if ignores_merges != (rule in IGNORING_MERGES):
            raise InputError(
                f"the tokenizer has ignore_merges {str(ignores_merges).lower()}, and llama.cpp's {rule} the opposite; "
                f"name another rule by --splitting"
            )


def _extra_end_tokens(tokenizer: Any, ends: Sequence[int]) -> dict[str, int]:
    """Return the end tokens beside the tokenizer's own by their names in GGUF files."""
    eos = tokenizer.eos_token_id
    extra = [token for token in ends if token != eos and tokenizer.convert_ids_to_tokens(token) not in END_TEXTS]
    names = ("eos", "eot", "eom") if eos is None else ("eot", "eom")
    if len(extra) > len(names):
        raise InputError(f"llama.cpp has names for {len(names)} of the end tokens {extra}; remove some of eos_token_id")
    return dict(zip(names, extra, strict=False))


def _read_description(tokenizer: Any) -> dict[str, Any]:
    """Return the content of tokenizer.json; refuse a tokenizer that is not byte-level BPE, or changes the text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    description: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    steps = _pre_tokenizer_steps(description)
    if description["model"].get("type") != "BPE" or not any(step["type"] == "ByteLevel" for step in steps):
        raise InputError("only byte-level BPE is written as GGUF; write a checkpoint, and convert it with llama.cpp")
    normalizer = description.get("normalizer") or {"type": "Sequence", "normalizers": []}
    normalizers = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    unsupported = [normalizer["type"] for normalizer in normalizers if normalizer["type"] != "NFC"]
    unsupported += ["add_prefix_space"] * any(step.get("add_prefix_space") for step in steps)
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    unsupported += [affix for affix in affixes if description["model"].get(affix)]
    if unsupported:
        raise InputError(f"the tokenizer has {unsupported[0]}, which llama.cpp does not support; write a checkpoint")
    return description


def splitting_of(description: dict[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer in the content of a tokenizer.json."""
    steps = []
    for step in _pre_tokenizer_steps(description):
        if step["type"] == "Split":
            is_isolating = step["behavior"] == "Isolated" and not step["invert"]
            steps.append(step["pattern"].get("Regex", "") if is_isolating else f"Split {step['behavior']}")
        elif step["type"] == "Digits" and step["individual_digits"]:
            steps.append("digits")
        elif step["type"] == "ByteLevel" and step["use_regex"]:
            steps.append("bytes")
        elif step["type"] != "ByteLevel":
            steps.append(step["type"])
    if tuple(steps) not in RULE_OF_STEPS:
        raise InputError("the pre-tokenizer is not recognised; name that of llama-vocab.cpp by --splitting")
    return RULE_OF_STEPS[tuple(steps)]


def _pre_tokenizer_steps(description: dict[str, Any]) -> list[dict[str, Any]]:
    step = description.get("pre_tokenizer") or {"type": "none"}
    return step["pretokenizers"] if step["type"] == "Sequence" else [step]


def _token_type(number: int, pieces: dict[int, str], added: dict[int, dict[str, Any]]) -> TokenType:
    if number in added:
        return TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
    return TokenType.NORMAL if number in pieces else TokenType.UNUSED
