"""Writes a tokenizer as llama.cpp reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gguf import GGUFWriter, TokenType

from lmeval_prune.errors import InputError, did_you_mean


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names of llama.cpp's splitting rules (`pre` in its llama-vocab.cpp). Under the first ones it takes a piece that is a
# token as it is (`ignore_merges`); under the others it always merges.
RULES_IGNORING_MERGES = _words("""
    falcon-h1 falcon3 glm4 glm5 granite-embed-multi-97m jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0
    minicpm5 pixtral tekken youtu
""")
RULES_MERGING = _words("""
    a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell command-r dbrx deepseek-coder
    deepseek-llm deepseek-r1-qwen deepseek-v3 exaone exaone-moe exaone4 falcon gigachat gpt-2 gpt-4o
    gpt3-finnish granite-docling grok-2 hunyuan hunyuan-dense jais jais-2 jina-de jina-es jina-v1-en
    jina-v2-code jina-v2-de jina-v2-es kanana2 kimi-k2 kormo llada-moe llama4 megrez mellum minerva-7b
    minimax-m2 modern-bert mpt olmo phi-2 poro-chat qwen2 qwen35 refact roberta-bpe sarvam-moe seed-coder
    smaug-bpe smollm solar-open stablelm2 starcoder superbpe tiny_aya trillion viking
""")
RULES = RULES_IGNORING_MERGES | RULES_MERGING

# The rules that are recognised, by the steps of `pre_tokenizer` in tokenizer.json.
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
# Tokens at which llama.cpp stops by their text.
END_TEXTS = _words("""
    <|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> _<EOT> <|end_of_text|>
    <end_of_utterance>
""")


def add_tokenizer(
    writer: GGUFWriter, tokenizer: Any, size: int, splitting: str | None = None, ends: Sequence[int] = ()
) -> None:
    """Add a tokenizer to a GGUF file.

    Args:
        writer: of the file.
        tokenizer: transformers' fast one, byte-level BPE.
        size: of the model's vocabulary, which may be larger.
        splitting: llama.cpp's name of the rule by which text is split, where it is not recognised.
        ends: tokens at which the model's generation stops.

    Raises:
        InputError: as of `check_tokenizer`, or the tokenizer has more tokens than the model.
    """
    check_tokenizer(tokenizer, splitting, ends)
    description = _read_description(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting or splitting_of(description))
    added = {token["id"]: token for token in description["added_tokens"]}
    pieces = {number: piece for piece, number in description["model"]["vocab"].items()}
    pieces |= {number: token["content"] for number, token in added.items()}
    if max(pieces) >= size:
        raise InputError(f"the tokenizer has {max(pieces) + 1} tokens, the model {size}: it is another model's")
    writer.add_token_list([pieces.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([_token_type(number, pieces, added) for number in range(size)])
    merges = description["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    _add_special_tokens(writer, tokenizer, ends)
    writer.add_add_space_prefix(False)
    templates = tokenizer.chat_template  # a text, or several by name
    if templates:
        named = isinstance(templates, dict)
        writer.add_chat_template(
            [{"name": name, "template": text} for name, text in templates.items()] if named else templates
        )


def _add_special_tokens(writer: GGUFWriter, tokenizer: Any, ends: Sequence[int]) -> None:
    numbers = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    for name, number in {**numbers, **_name_further_ends(tokenizer, ends)}.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    tokens = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(numbers["bos"] is not None and tokens[:1] == [numbers["bos"]])
    writer.add_add_eos_token(numbers["eos"] is not None and tokens[-1:] == [numbers["eos"]])


def check_tokenizer(tokenizer: Any, splitting: str | None = None, ends: Sequence[int] = ()) -> None:
    """Refuse a tokenizer with which llama.cpp would make other tokens.

    Raises:
        InputError: it is no byte-level BPE, changes text or merges otherwise than llama.cpp, or splits it by a rule
            that is not known.
    """
    description = _read_description(tokenizer)
    _name_further_ends(tokenizer, ends)
    rule = splitting or splitting_of(description)
    if rule not in RULES:
        raise InputError(f"--splitting {rule} is no rule of llama.cpp's{did_you_mean(rule, RULES)}")
    ignores_merges = bool(description["model"].get("ignore_merges"))
    if ignores_merges != (rule in RULES_IGNORING_MERGES):
        raise InputError(
            f"the tokenizer has ignore_merges {str(ignores_merges).lower()}, and llama.cpp's {rule} the opposite: it "
            f"would make other tokens; name another rule by --splitting, or write a checkpoint"
        )


def _name_further_ends(tokenizer: Any, ends: Sequence[int]) -> dict[str, int]:
    """Give end tokens beside the tokenizer's own the names that llama.cpp has for them."""
    first = tokenizer.eos_token_id
    further = [token for token in ends if token != first and tokenizer.convert_ids_to_tokens(token) not in END_TEXTS]
    names = ("eos", "eot", "eom") if first is None else ("eot", "eom")
    if len(further) > len(names):
        raise InputError(
            f"generation stops at {len(ends)} tokens, {further} among them, and llama.cpp has names for {len(names)} "
            f"of these; take some out of eos_token_id in generation_config.json"
        )
    return dict(zip(names, further, strict=False))


def _read_description(tokenizer: Any) -> dict[str, Any]:
    """Return the content of tokenizer.json, if it is a byte-level BPE that llama.cpp can follow."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    description: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    steps = _pre_tokenizer_steps(description)
    if description["model"].get("type") != "BPE" or not any(step["type"] == "ByteLevel" for step in steps):
        raise InputError(
            "the tokenizer is no byte-level BPE (SentencePiece, for one), which is not written as GGUF yet; write a "
            "checkpoint, and convert that with llama.cpp's own script"
        )
    normalizer = description.get("normalizer") or {"type": "Sequence", "normalizers": []}
    normalizers = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    unknown = [normalizer["type"] for normalizer in normalizers if normalizer["type"] != "NFC"]
    unknown += ["add_prefix_space"] * any(step.get("add_prefix_space") for step in steps)
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    unknown += [affix for affix in affixes if description["model"].get(affix)]
    if unknown:
        raise InputError(
            f"the tokenizer has {unknown[0]}, which llama.cpp does not do: it would make other tokens; write a "
            f"checkpoint instead of GGUF"
        )
    return description


def splitting_of(description: dict[str, Any]) -> str:
    """Return llama.cpp's name of the rule by which a tokenizer splits text.

    Args:
        description: content of its tokenizer.json.

    Raises:
        InputError: the rule is not recognised.
    """
    steps = []
    for step in _pre_tokenizer_steps(description):
        if step["type"] == "Split":
            plain = step["behavior"] == "Isolated" and not step["invert"]
            steps.append(step["pattern"].get("Regex", "") if plain else f"Split {step['behavior']}")
        elif step["type"] == "Digits" and step["individual_digits"]:
            steps.append("digits")
        elif step["type"] == "ByteLevel" and step["use_regex"]:
            steps.append("bytes")
        elif step["type"] != "ByteLevel":
            steps.append(step["type"])
    if tuple(steps) not in RULE_OF_STEPS:
        raise InputError(
            "the tokenizer splits text by a rule that is not known here; name llama.cpp's by --splitting (one of those "
            f"in its llama-vocab.cpp; known by themselves: {', '.join(RULE_OF_STEPS.values())})"
        )
    return RULE_OF_STEPS[tuple(steps)]


def _pre_tokenizer_steps(description: dict[str, Any]) -> list[dict[str, Any]]:
    step = description.get("pre_tokenizer") or {"type": "none"}
    return step["pretokenizers"] if step["type"] == "Sequence" else [step]


def _token_type(number: int, pieces: dict[int, str], added: dict[int, dict[str, Any]]) -> TokenType:
    if number in added:
        return TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
    return TokenType.NORMAL if number in pieces else TokenType.UNUSED
