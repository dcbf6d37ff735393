"""Lengths of answers, and the share that `max_gen_toks` cuts off: their accuracy measures the limit, not the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Interval
from typing_extensions import TypedDict

MIN_REPORTED_SHARE = 0.1  # of answers that were cut off


class Lengths(TypedDict):
    """Summary of the lengths of answers, as stored."""

    answers: Annotated[int, Ge(0)]
    unknown: Annotated[int, Ge(0)]  # answers of unknown length
    cut_off: Annotated[float, Interval(ge=0, le=1)] | None  # share of the answers of known length
    mean_tokens: Annotated[float, Interval(ge=0, lt=math.inf)] | None
    max_gen_toks: int | None


class Ending(NamedTuple):
    """Length of an answer, and how it ended."""

    length: int  # tokens, with the end token
    cut_off: bool  # at `max_gen_toks`, without an end token or a stop text


def summarize_lengths(endings: Iterable[Ending | None], limit: int | None) -> dict[str, Any]:
    """Return `Lengths` of answers under one limit of tokens."""
    endings = list(endings)
    known_endings = [ending for ending in endings if ending is not None]
    return {
        "answers": len(endings),
        "unknown": len(endings) - len(known_endings),
        "cut_off": sum(ending.cut_off for ending in known_endings) / len(known_endings) if known_endings else None,
        "mean_tokens": sum(ending.length for ending in known_endings) / len(known_endings) if known_endings else None,
        "max_gen_toks": limit,
    }


def merge_lengths(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several `Lengths`."""
    known_counts = [part["answers"] - part["unknown"] for part in parts]
    total: dict[str, Any] = {name: sum(part[name] for part in parts) for name in ("answers", "unknown")}
    for name in ("cut_off", "mean_tokens"):
        weighted = sum((part[name] or 0) * count for part, count in zip(parts, known_counts, strict=True))
        total[name] = weighted / sum(known_counts) if sum(known_counts) else None
    return {**total, "max_gen_toks": max((part["max_gen_toks"] or 0 for part in parts), default=0) or None}


def cut_off_note(answers: Mapping[str, Any]) -> str:
    """Return a note on answers that were cut off; empty if they are few."""
    if (answers["cut_off"] or 0) < MIN_REPORTED_SHARE:
        return ""
    limit = f"{answers['max_gen_toks']} tokens" if answers["max_gen_toks"] else "the limit of tokens"
    return f"{answers['cut_off']:.0%} of the answers were cut off at {limit}"
