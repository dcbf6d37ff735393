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
    description, rule = check_tokenizer(tokenizer, splitting)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    added = {token["id"]: token for token in description["added_tokens"]}
    pieces = {number: piece for piece, number in description["model"]["vocab"].items()}
    types = [TokenType.NORMAL if number in pieces else TokenType.UNUSED for number in range(size)]
    for number, token in added.items():
        pieces[number] = token["content"]
        if number < size:
            types[number] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    writer.add_token_list([pieces.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(types)
    merges = description["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])

    numbers = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    others = [x for x in ends if x != numbers["eos"] and tokenizer.convert_ids_to_tokens(x) not in END_TEXTS]
    names = ("eos", "eot", "eom") if numbers["eos"] is None else ("eot", "eom")
    if len(others) > len(names):
        raise InputError(
            f"llama.cpp has names for {len(names)} of the end tokens {others}; remove some of eos_token_id"
        )
    for name, number in {**numbers, **dict(zip(names, others, strict=False))}.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    tokens = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(numbers["bos"] is not None and tokens[:1] == [numbers["bos"]])
    writer.add_add_eos_token(numbers["eos"] is not None and tokens[-1:] == [numbers["eos"]])
    writer.add_add_space_prefix(False)
    templates = tokenizer.chat_template  # a text, or a dictionary of texts
    if isinstance(templates, dict):
        templates = [{"name": name, "template": text} for name, text in templates.items()]
    if templates:
        writer.add_chat_template(templates)


def check_tokenizer(tokenizer: Any, splitting: str | None = None) -> tuple[dict[str, Any], str]:
    """Return the content of tokenizer.json, and llama.cpp's name of the pre-tokenizer (default: the recognised one).

    Refuses a tokenizer that llama.cpp cannot reproduce: not byte-level BPE, or one that changes the text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    description: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    steps = _parts(description.get("pre_tokenizer"), "pretokenizers")
    if description["model"].get("type") != "BPE" or not any(step["type"] == "ByteLevel" for step in steps):
        raise InputError("only byte-level BPE is written as GGUF; write a checkpoint, and convert it with llama.cpp")
    normalizers = [part["type"] for part in _parts(description.get("normalizer"), "normalizers")]
    unsupported = [kind for kind in normalizers if kind != "NFC"]
    unsupported += ["add_prefix_space"] * any(step.get("add_prefix_space") for step in steps)
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    unsupported += [affix for affix in affixes if description["model"].get(affix)]
    if unsupported:
        raise InputError(f"the tokenizer has {unsupported[0]}, which llama.cpp does not support; write a checkpoint")
    if splitting:
        return description, splitting
    known = tuple(filter(None, map(_splitting_step, steps)))
    if known not in RULE_OF_STEPS:
        raise InputError("the pre-tokenizer is not recognised; name that of llama-vocab.cpp by --splitting")
    rule, ignores_merges = RULE_OF_STEPS[known], bool(description["model"].get("ignore_merges"))
    if ignores_merges != (rule in IGNORING_MERGES):
        raise InputError(
            f"the tokenizer has ignore_merges {str(ignores_merges).lower()}, and llama.cpp's {rule} the opposite; "
            f"name another rule by --splitting"
        )
    return description, rule


def _parts(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    return [] if step is None else step[name] if step["type"] == "Sequence" else [step]


def _splitting_step(step: dict[str, Any]) -> str:
    """Return a step of the pre-tokenizer as in `RULE_OF_STEPS`; empty if it does not split."""
    if step["type"] == "Split":
        is_isolating = step["behavior"] == "Isolated" and not step["invert"]
        return str(step["pattern"].get("Regex", "none")) if is_isolating else f"Split {step['behavior']}"
    if step["type"] == "Digits" and step["individual_digits"]:
        return "digits"
    if step["type"] == "ByteLevel":
        return "bytes" if step["use_regex"] else ""
    return str(step["type"])
