"""Names of attempts at a question: the columns of an outcome store, and what a router's order consists of.

    dense                           the unpruned model
    L5H3, L5H3+L15H0                heads are pruned
    {"token_filter":{"ratio":0.2}}  other interventions, by the settings that determine their effect (JSON)
    L5H3@0.6#2                      sampled at temperature 0.6; the third such sample (they are counted from zero)

A name without a temperature is decoded greedily.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lmeval_prune.architectures import Head, head_names
from lmeval_prune.errors import InputError

DENSE = "dense"  # the name of the unpruned model
_SAMPLED = re.compile(r"(?P<variant>.+)@(?P<temperature>[\d.]+(?:e-?\d+)?)#(?P<draw>\d{1,9})", re.DOTALL)


@dataclass(frozen=True)
class Attempt:
    """A variant of the model, and how it is decoded.

    Attributes:
        variant: name of the variant.
        temperature: of sampling; 0: greedy.
        draw: number of the sample among those of this variant at this temperature.
    """

    variant: str = DENSE
    temperature: float = 0.0
    draw: int = 0

    @classmethod
    def named(cls, name: str) -> Attempt:
        """Parse the name of an attempt; `InputError` if its temperature is not a number above 0."""
        match = _SAMPLED.fullmatch(name)
        if not match:
            return cls(name)
        return cls(match["variant"], parse_temperature(match["temperature"], name), int(match["draw"]))

    def __str__(self) -> str:
        return f"{self.variant}@{self.temperature:g}#{self.draw}" if self.is_sampled else self.variant

    @property
    def kind(self) -> tuple[str, float]:
        """Return variant and temperature; samples of one kind are exchangeable."""
        return self.variant, self.temperature

    @property
    def is_sampled(self) -> bool:
        """Return whether tokens are drawn at random."""
        return self.temperature > 0


def parse_temperature(text: str, name: str) -> float:
    """Parse a temperature above 0; `name` is named in the message of the `InputError`."""
    try:
        temperature = float(text)
    except ValueError:
        temperature = 0.0
    if not 0 < temperature < math.inf or float(f"{temperature:g}") != temperature:
        raise InputError(f"{name}: the temperature {text} must be a number above 0 with at most six digits")
    return temperature


def is_heads(variant: str) -> bool:
    """Return whether the name of a variant is one of heads."""
    return variant != DENSE and not variant.startswith("{")


def is_single_head(name: str) -> bool:
    """Return whether an attempt is a greedy one with a single head pruned."""
    return is_heads(name) and "+" not in name and not Attempt.named(name).is_sampled


def attempt_order(names: Iterable[str]) -> list[str]:
    """Sort unique names: greedy first; dense, then heads by number, layer and head, then others; then by sample."""
    return sorted(set(names), key=_rank)


def _rank(name: str) -> tuple[Any, ...]:
    attempt = Attempt.named(name)
    heads = [Head.named(head) for head in head_names(attempt.variant)] if is_heads(attempt.variant) else []
    kind = 0 if attempt.variant == DENSE else 1 if heads else 2
    return attempt.is_sampled, kind, len(heads), heads, attempt.variant, attempt.temperature, attempt.draw


def short_label(name: str, labels: dict[str, str] | None = None) -> str:
    """Return a short label of an attempt: its variant's own label, its heads or its methods, and its temperature."""
    attempt = Attempt.named(name)
    label = (labels or {}).get(attempt.variant) or _variant_label(attempt.variant)
    return f"{label} @{attempt.temperature:g} #{attempt.draw}" if attempt.is_sampled else label


def _variant_label(variant: str) -> str:
    if is_heads(variant) and variant.count("+") > 2:
        first, *rest = variant.split("+")
        return f"{first} and {len(rest)} heads"
    if not variant.startswith("{"):
        return variant
    methods = json.loads(variant)
    return " + ".join(f"{name} {_first_value(settings)}" for name, settings in methods.items())


def _first_value(settings: dict[str, Any]) -> Any:
    value = next(iter(settings.values()), "")
    return value if isinstance(value, str | int | float) else ""
