"""Finding the final answer in a response."""

from __future__ import annotations

import re
from typing import NamedTuple

from lmeval_prune.scoring.numbers import NUMBER, normalise

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")


class Extraction(NamedTuple):
    """A final answer and how it was found: `boxed`, `hashes`, `number`, or `none` (empty answer)."""

    answer: str
    how: str


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` whose braces balance."""
    for start in reversed([found.end() for found in _BOX.finditer(text)]):
        depth = 0
        for i in range(start, len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start + 1 : i].strip()
    return None


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
