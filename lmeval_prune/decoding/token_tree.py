"""A tree of token sequences, in which tokens that several sequences begin with are stored once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass
class Segment:
    """Consecutive tokens of the tree without a branch between them."""

    tokens: Tokens
    start: int  # number of tokens before it, in each sequence that has it
    parent: int | None  # number of the segment before it
    end: int  # its descendants are the segments from the next number up to here


class TokenTree:
    """The tree of some sequences, as segments of at most `longest` tokens, numbered depth first."""

    def __init__(self, sequences: Iterable[Tokens], longest: int) -> None:
        self.segments: list[Segment] = []
        self._leaves: list[Tokens] = []  # sequences that are no prefix of another, sorted
        for sequence in sorted(set(sequences), reverse=True):
            if not self._leaves or self._leaves[-1][: len(sequence)] != sequence:
                self._leaves.append(sequence)
        self._leaves.reverse()
        self._last_segments = [0] * len(self._leaves)
        self._build(longest)

    def _build(self, longest: int) -> None:
        """Create the segments: a range of sorted leaves shares what its first and its last leaf share."""
        stack: list[tuple[int, int, int, int | None]] = [(0, len(self._leaves), 0, None)]
        while stack:
            first, last, depth, parent = stack.pop()
            leaf = self._leaves[first]
            stop = common_length(leaf, self._leaves[last - 1], depth)
            for start in range(depth, stop, longest):
                number = len(self.segments)
                self.segments.append(Segment(leaf[start : min(start + longest, stop)], start, parent, number + 1))
                parent = number
            if last - first == 1:
                assert parent is not None
                self._last_segments[first] = parent
                continue
            tokens = [leaf[stop] for leaf in self._leaves[first:last]]
            branches = [first, *(first + i for i in range(1, len(tokens)) if tokens[i] != tokens[i - 1])]
            for begin, end in reversed(list(zip(branches, [*branches[1:], last], strict=True))):
                stack.append((begin, end, stop, parent))
        for segment in reversed(self.segments):
            if segment.parent is not None:
                parent_segment = self.segments[segment.parent]
                parent_segment.end = max(parent_segment.end, segment.end)

    def path(self, sequence: Tokens) -> list[int]:
        """Return the segments of a sequence, first to last; the last may have more tokens than the sequence."""
        number: int | None = self._last_segments[bisect_left(self._leaves, sequence)]
        path = []
        while number is not None:
            if self.segments[number].start < len(sequence):
                path.append(number)
            number = self.segments[number].parent
        return path[::-1]

    def passes(self, most: int) -> Iterator[range]:
        """Divide the segments, in their order, into ranges of at most `most` tokens, or of a single segment."""
        begin = tokens = 0
        for number, segment in enumerate(self.segments):
            if number > begin and tokens + len(segment.tokens) > most:
                yield range(begin, number)
                begin, tokens = number, 0
            tokens += len(segment.tokens)
        yield range(begin, len(self.segments))


def common_length(tokens: Sequence[int], others: Sequence[int], start: int = 0) -> int:
    """Return the length of the common prefix of two sequences of one type; the first `start` tokens are equal."""
    end = min(len(tokens), len(others))
    if tokens[start:end] == others[start:end]:
        return end
    return next(i for i in range(start, end) if tokens[i] != others[i])
