"""Words that answers are read by: lists in `words/LANGUAGE.yaml`, the same lists in each language; `latex` is one.

An entry is a word, or a regular expression of words; `{{name}}` in it stands for any entry of another list.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).parent / "words"
_REFERENCE = re.compile(r"\{\{(\w+)\}\}")


@cache
def _lists() -> dict[str, dict[str, Any]]:
    """Read the lists of each language; `no` and `on` are words in them."""
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    return {path.stem: yaml.load(path.read_text("utf-8"), loader) for path in sorted(_FOLDER.glob("*.yaml"))}


def words(name: str) -> frozenset[str]:
    """Return the words of a list in all languages."""
    return frozenset(word for lists in _lists().values() for word in lists.get(name, ()))


def values(name: str) -> dict[str, int]:
    """Return the words of a list in all languages, each with its number."""
    return {word: int(number) for lists in _lists().values() for word, number in lists.get(name, {}).items()}


@cache
def phrases(name: str, language: str = "en") -> str:
    """Return a regular expression of all entries of a list in one language, or of the English one."""
    source = language if name in _lists()[language] else "en"
    entries = [_resolved(entry, language) for entry in _lists()[source][name]]
    return f"(?:{'|'.join(entries)})"


def _resolved(entry: str, language: str) -> str:
    return _REFERENCE.sub(lambda match: phrases(match[1], language), entry)


def words_by_key(name: str, language: str) -> dict[str, list[str]]:
    """Return a table of words."""
    return dict(_lists()[language][name])


def staged_rules(name: str) -> list[tuple[str, str]]:
    """Return the patterns and replacements of a stage of normalisation."""
    return [(_resolved(entry, "latex"), replacement) for entry, replacement, _ in _lists()["latex"]["stages"][name]]


def pattern(name: str) -> re.Pattern[str]:
    """Compile all entries of a list in all languages, of English ones as whole words; in upper and lower case."""
    chinese = f"|{phrases(name, 'zh')}" if name in _lists()["zh"] else ""
    return re.compile(rf"\b{phrases(name)}\b{chinese}", re.IGNORECASE)
