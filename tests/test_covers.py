"""Covers of crosses: nothing that they promise is missing, nothing is there twice, and they are small."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covers import cover, crossed


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3))
def test_each_choice_is_in_as_many_cases_as_asked(sizes: list[int], together: int, times: int) -> None:
    cases = cover(sizes, together, times)
    assert all(0 <= value < size for case in cases for value, size in zip(case, sizes, strict=True))
    for axes in itertools.combinations(range(len(sizes)), min(together, len(sizes))):
        seen = Counter(tuple(case[axis] for axis in axes) for case in cases)
        others = math.prod(size for axis, size in enumerate(sizes) if axis not in axes)  # cases that have a choice
        for choice in itertools.product(*(range(sizes[axis]) for axis in axes)):
            assert seen[choice] >= min(times, others)
    assert cases == cover(sizes, together, times)


def test_what_is_in_no_cover_is_long_and_nothing_is_lost() -> None:
    names, cases = crossed({"a": "xyz", "b": [1, 2, 3]}, always=[("x", 3)], ids=str).args
    assert names == ("a", "b") and [case.values for case in cases] == [*itertools.product("xyz", [1, 2, 3])]
    everyday = {case.values for case in cases if not case.marks}
    assert ("x", 3) in everyday and len(everyday) == 4
    assert {a for a, _ in everyday} == {*"xyz"} and {b for _, b in everyday} == {1, 2, 3}
    assert all([mark.name for mark in case.marks] == ["long"] for case in cases if case.values not in everyday)
