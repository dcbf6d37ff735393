"""Crosses of parameters: a few cases, each value in one, run in `make test`, the others in `make test-long`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def crossed(axes: Mapping[str, Iterable[Any]], times: int = 1, **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test by a cross; all but a diagonal of it run in the long suite alone.

    Args:
        axes: values by the name of the parameter.
        times: so many diagonals, each with every value of every axis.
        options: of `pytest.mark.parametrize`.
    """
    values = [list(axis) for axis in axes.values()]
    everyday = {
        tuple((step + shift * (axis > 0)) % len(of_axis) for axis, of_axis in enumerate(values))
        for step in range(max(map(len, values)))
        for shift in range(times)
    }
    cases = itertools.product(*(range(len(of_axis)) for of_axis in values))
    parameters = [
        pytest.param(
            *(of_axis[index] for of_axis, index in zip(values, case, strict=True)),
            marks=() if case in everyday else pytest.mark.long,
        )
        for case in cases
    ]
    return pytest.mark.parametrize(tuple(axes), parameters, **options)
