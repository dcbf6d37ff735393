"""Covers of crosses: of a cross of parameters, a few cases that hold what matters run in `make test`, the others in `make test-long`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def cover(sizes: Sequence[int], together: int, times: int = 1) -> set[tuple[int, ...]]:
    """Choose cases of a cross so that each choice of values for any `together` of its axes is in one.

    Greedily, and the same ones each time: the next case has the most choices that are in none so far, then the most new
    pairs of values, then the values that were used least.

    Args:
        sizes: the number of values of each axis.
        together: 1: each value is in a case; 2: each pair of values; …
        times: in as many different cases, if the cross has them.

    Returns:
        Cases, each with the index of its value in each axis.
    """
    together = min(together, len(sizes))
    cases = list(itertools.product(*map(range, sizes)))

    def choices(case: tuple[int, ...], size: int = together) -> list[tuple[Any, ...]]:
        return list(itertools.combinations(enumerate(case), size))

    chosen: dict[tuple[int, ...], None] = {}
    used: Counter[tuple[int, int]] = Counter()
    paired: set[tuple[Any, ...]] = set()
    for _ in range(times):
        missing = {choice for case in cases if case not in chosen for choice in choices(case)}
        while missing:
            best = max(
                (case for case in cases if case not in chosen),
                key=lambda case: (
                    sum(choice in missing for choice in choices(case)),
                    sum(pair not in paired for pair in choices(case, 2)),
                    -sum(used[axis_value] for axis_value in enumerate(case)),
                ),
            )
            missing.difference_update(choices(best))
            paired.update(choices(best, 2))
            used.update(enumerate(best))
            chosen[best] = None
    return set(chosen)


def crossed(
    axes: Mapping[str, Iterable[Any]],
    together: int = 1,
    times: int = 1,
    always: Sequence[tuple[Any, ...]] = (),
    **options: Any,
) -> pytest.MarkDecorator:
    """Parametrize a test by a cross; cases that are in no cover of it run in the long suite alone.

    Args:
        axes: values by the name of the parameter.
        together: see `cover`.
        times: see `cover`.
        always: cases that run in any case, each with a value of every axis.
        options: of `pytest.mark.parametrize`.
    """
    values = [list(axis) for axis in axes.values()]
    everyday = cover([len(axis) for axis in values], together, times)
    everyday |= {tuple(axis.index(value) for axis, value in zip(values, case, strict=True)) for case in always}
    parameters = [
        pytest.param(
            *(axis[index] for axis, index in zip(values, indices, strict=True)),
            marks=() if indices in everyday else pytest.mark.long,
        )
        for indices in itertools.product(*(range(len(axis)) for axis in values))
    ]
    return pytest.mark.parametrize(tuple(axes), parameters, **options)
