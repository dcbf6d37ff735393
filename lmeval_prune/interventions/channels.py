"""Feed-forward channels of a layer as a plan names them: `"3,5-9"`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lmeval_prune.errors import InputError

_NUMBER = r"\d{1,18}"  # a range is compared with the model's width before it is expanded
_RANGES = re.compile(rf"\s*{_NUMBER}(-{_NUMBER})?(\s*,\s*{_NUMBER}(-{_NUMBER})?)*\s*")
HELP = 'write channels as {"L0": "3,5-9"}'


class Channels(str):
    """Channels of a layer as text, in order and each once, `"3,5-9"`; empty for none.

    Attributes:
        runs: first and last channel of each run.
    """

    runs: tuple[tuple[int, int], ...]

    def __new__(cls, channels: Any, layer: str = "a layer") -> Channels:
        """Read channels.

        Args:
            channels: text, or numbers in any order.
            layer: label, for the message.

        Raises:
            InputError: they cannot be read.
        """
        return channels if isinstance(channels, Channels) else cls._of(_pairs(channels, layer))

    @classmethod
    def _of(cls, pairs: Iterable[tuple[int, int]]) -> Channels:
        runs: list[tuple[int, int]] = []
        for first, last in sorted(pairs):
            if runs and first <= runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
            else:
                runs.append((first, last))
        text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
        channels = super().__new__(cls, text)
        channels.runs = tuple(runs)
        return channels

    def __or__(self, other: Channels) -> Channels:
        return self._of((*self.runs, *other.runs))

    @property
    def numbers(self) -> list[int]:
        """Channels in order, each once."""
        return [number for first, last in self.runs for number in range(first, last + 1)]


def _pairs(channels: Any, layer: str) -> list[tuple[int, int]]:
    what = f"channels {str(channels)[:60]!r} of {layer}"
    if not isinstance(channels, str) or not channels.strip():
        if not isinstance(channels, Iterable) or not all(isinstance(n, int) and n >= 0 for n in channels):
            raise InputError(f"{what} cannot be read; {HELP}")
        return [(number, number) for number in channels]
    if not _RANGES.fullmatch(channels):
        raise InputError(f"{what} cannot be read; {HELP}")
    ends = [part.split("-") for part in channels.split(",")]
    pairs = [(int(end[0]), int(end[-1])) for end in ends]
    if any(first > last for first, last in pairs):
        raise InputError(f"{what}: a range runs backwards; {HELP}")
    return pairs
