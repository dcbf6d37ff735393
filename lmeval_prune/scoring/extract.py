"""Finding the final answer in a response."""

from __future__ import annotations

import re
from typing import NamedTuple

from lmeval_prune.scoring.numbers import NUMBER, normalise, readings

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"[{}]")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")


# "the answer is …", "Answer: …", "答案是…": up to the end of the sentence or line
_PHRASE = re.compile(
    r"(?:\banswer(?:\s+is)?\s*(?:[:：=]|\bis\b|(?<=is))|答案\s*(?:[:：是为]\s*)+)[ \t*$]*([^\n]{1,200}?)"
    r"(?=[.。]?\s*(?:\n|$)|[.。](?:\s|$))",
    re.IGNORECASE,
)
MARKED = frozenset({"boxed", "hashes", "phrase"})


class Extraction(NamedTuple):
    """A final answer and how it was found: `boxed`, `hashes`, `phrase`, `number`, or `none` (empty answer)."""

    answer: str
    how: str


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` whose braces balance; one pass over the text."""
    starts = {found.end() for found in _BOX.finditer(text)}
    if not starts:
        return None
    opened: list[int] = []
    best: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text, min(starts)):
        if brace.group() == "{":
            opened.append(brace.start())
        elif opened and (start := opened.pop()) in starts:
            best = max(best or (start, brace.start()), (start, brace.start()))
    return text[best[0] + 1 : best[1]].strip() if best else None


def extract(response: str, numbers: bool = True) -> Extraction:
    r"""Find the final answer.

    The last balanced `\boxed{}`, else what follows the last `####`, else what follows the last 'the answer
    is' (`Answer:`, 答案是), else, if `numbers`, the last number.
    """
    boxed = last_boxed(response)
    if boxed:
        return Extraction(boxed, "boxed")
    hashes = _HASHES.findall(response)
    if hashes and hashes[-1].strip():
        return Extraction(hashes[-1].strip(), "hashes")
    phrases = _PHRASE.findall(response)
    phrase = phrases[-1].rpartition("=")[2].strip(" *$") if phrases else ""
    if phrase and (readings(phrase) or not numbers):
        return Extraction(phrase, "phrase")
    found = NUMBER.findall(normalise(response)) if numbers else []
    if found:
        return Extraction(found[-1], "number")
    return Extraction("", "none")
