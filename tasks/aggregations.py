"""How the items' values become a task's figure, and the tasks' figures their group's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from lmeval_prune.scoring import MARKED


class Share(float):
    """The mean of some documents' values (those of one level, say), which knows of how many.

    lm-eval pools the tasks of a group as Σ value·size / Σ size, with the sizes of whole tasks (release 0.4.13
    never calls a group's `aggregation` function). A share is a number like any other except in just that:
    a sum of shares times weights, divided by the sum of the weights, weighs each share by its own number of
    documents, so that in the group, too, each document counts once. Weights of one (`weight_by_size: false`)
    weigh all the same.
    """

    count: int

    def __new__(cls, value: float, count: int) -> Share:
        """The mean `value` of `count` documents."""
        share = super().__new__(cls, value)
        share.count = count
        return share

    def __getnewargs__(self) -> tuple[float, int]:  # type: ignore[override]
        """For copies and pickles."""
        return float(self), self.count

    def __mul__(self, size: Any) -> Any:
        """The product, which can become a term of a group's sum."""
        return _Weighted(float(self) * size, size, float(self), self.count if size != 1 else 1)


class NoDocuments(str):
    """`"N/A"`, in results (JSON has no NaN) where a task has no such documents; adds nothing to a group's sum."""

    __slots__ = ()

    def __mul__(self, size: Any) -> Any:
        return _Weighted(0.0, size, 0.0, 0)


class _Weighted(float):
    """A sum of weighted shares, as a number; it also knows the weights' sum and the documents' values and count."""

    size: Any
    total: float
    count: int

    def __new__(cls, plain: float, size: Any, value: float, count: int) -> _Weighted:
        term = super().__new__(cls, plain)
        term.size, term.total, term.count = size, value * count, count
        return term

    def __getnewargs__(self) -> tuple[float, Any, float, int]:  # type: ignore[override]
        return float(self), self.size, self.total / self.count if self.count else 0.0, self.count

    def __add__(self, other: Any) -> Any:
        if isinstance(other, _Weighted):
            count = self.count + other.count
            mean = (self.total + other.total) / count if count else 0.0
            return _Weighted(float(self) + float(other), self.size + other.size, mean, count)
        return self if other == 0 else float(self) + other

    __radd__ = __add__  # `sum` begins with 0

    def __truediv__(self, size: Any) -> Any:
        if size != self.size:
            return float(self) / size
        return Share(self.total / self.count, self.count) if self.count else NoDocuments("N/A")


def share(values: Iterable[float | None]) -> Share | NoDocuments:
    """Mean of the values that are not None; `"N/A"` if there are none."""
    known = [value for value in values if value is not None]
    return Share(math.fsum(known) / len(known), len(known)) if known else NoDocuments("N/A")


def found(values: Iterable[str | list[str]]) -> float:
    """Share of responses in which an answer was found."""
    flat = _flat(values)
    return sum(map(bool, flat)) / len(flat)


def marked(values: Iterable[str | list[str]]) -> float:
    """Share of responses whose answer was marked by the model (boxed, `####`, 'the answer is')."""
    flat = _flat(values)
    return sum(how in MARKED for how in flat) / len(flat)


def _flat(values: Iterable[str | list[str]]) -> list[str]:
    return [text for value in values for text in (value if isinstance(value, list) else [value])]
