"""Finding the final answer in a response."""

from __future__ import annotations

import re
from typing import NamedTuple

from lmeval_prune.scoring.numbers import NUMBER, normalise

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"[{}]")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")


class Extraction(NamedTuple):
    """A final answer and how it was found: `boxed`, `hashes`, `number`, or `none` (empty answer)."""

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


def extract(response: str) -> Extraction:
    r"""Find the final answer: the last balanced `\boxed{}`, else after the last `####`, else the last number."""
    boxed = last_boxed(response)
    if boxed:
        return Extraction(boxed, "boxed")
    hashes = _HASHES.findall(response)
    if hashes and hashes[-1].strip():
        return Extraction(hashes[-1].strip(), "hashes")
    numbers = NUMBER.findall(normalise(response))
    if numbers:
        return Extraction(numbers[-1], "number")
    return Extraction("", "none")
