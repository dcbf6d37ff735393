"""Feed-forward channels of a layer in a plan's notation: `"3,5-9"`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lmeval_prune.errors import InputError

_NUMBER = r"\d{1,18}"  # ranges are checked against the model's width before they are expanded
_RANGES = re.compile(rf"\s*{_NUMBER}(-{_NUMBER})?(\s*,\s*{_NUMBER}(-{_NUMBER})?)*\s*")


class Channels(str):
    """Sorted channels of a layer without duplicates, as text: `"3,5-9"`.

    Attributes:
        runs: first and last channel of each run.
    """

    runs: tuple[tuple[int, int], ...]

    def __new__(cls, channels: Any, layer: str = "a layer") -> Channels:
        """Parse text or a list of numbers; `layer` names the layer in an `InputError`."""
        return channels if isinstance(channels, Channels) else cls._from_ranges(_parse_ranges(channels, layer))

    @classmethod
    def _from_ranges(cls, ranges: Iterable[tuple[int, int]]) -> Channels:
        runs: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if runs and first <= runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
            else:
                runs.append((first, last))
        text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
        channels = super().__new__(cls, text)
        channels.runs = tuple(runs)
        return channels

    def __or__(self, other: Channels) -> Channels:
        return self._from_ranges((*self.runs, *other.runs))

    @property
    def numbers(self) -> list[int]:
        """Sorted channel numbers."""
        return [number for first, last in self.runs for number in range(first, last + 1)]


def _parse_ranges(channels: Any, layer: str) -> list[tuple[int, int]]:
    if isinstance(channels, str) and _RANGES.fullmatch(channels):
        ends = [part.split("-") for part in channels.split(",")]
        ranges = [(int(end[0]), int(end[-1])) for end in ends]
    elif isinstance(channels, Iterable) and all(isinstance(n, int) and n >= 0 for n in channels):
        ranges = [(number, number) for number in channels]
    else:
        ranges = [(1, 0)]
    if any(first > last for first, last in ranges):
        raise InputError(f'channels {str(channels)[:60]!r} of {layer} cannot be read; write them as {{"L0": "3,5-9"}}')
    return ranges
