"""Thoughts of ATHENA: expressions up to the order of sums and products, and the schedule that expands them.

A thought is a tuple that can be hashed and sorted: `("num", 0)`, `("con", "1")`, `("neg", t)`, `("inv", t)`,
`("root", t)`, `("halve", t)`, `("add", t, …)`, `("mul", t, …)`. Sums and products are flat and in order, so that equal
thoughts are equal tuples; nothing cancels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Thought = tuple[Any, ...]

LEAVES = ("num", "con")
TRANSFORMS = ("neg", "inv", "root", "halve")
MERGES = ("add", "mul")
OPERATORS = (*LEAVES, *TRANSFORMS, *MERGES)


def merged(operator: str, first: Thought, second: Thought) -> Thought:
    """Return the sum (`add`) or product (`mul`) of two thoughts."""
    parts = (thought[1:] if thought[0] == operator else (thought,) for thought in (first, second))
    return (operator, *sorted(part for several in parts for part in several))


class Candidate(NamedTuple):
    """A thought that may be kept, and the thoughts that it joins.

    Attributes:
        operator: one of `OPERATORS`.
        first, second: indices of the kept thoughts that it joins; twice the same for a transform; for a leaf, its index
            among the problem's leaves.
        thought: the result.
    """

    operator: str
    first: int
    second: int
    thought: Thought


class Expansion:
    """Candidate thoughts of a problem, step by step.

    Step 0 offers the leaves; odd steps transform, even ones merge. Each uses at least one thought that was kept since
    the last step of its kind, offers no thought that is kept already, and none twice.

    Args:
        leaves: the problem's numbers, then the constants.

    Attributes:
        kept: thoughts in the order in which they were kept.
        depth: index of the next step.
    """

    def __init__(self, leaves: Sequence[Thought]) -> None:
        self.leaves = list(leaves)
        self.kept: list[Thought] = []
        self.depth = 0
        self._used = [0, 0]  # how many of the kept thoughts the last merge, and the last transform, could use

    @property
    def ended(self) -> bool:
        """Return whether the next step has no new thought to use."""
        return self.depth > 0 and self._used[self.depth % 2] == len(self.kept)

    def candidates(self) -> list[Candidate]:
        """List the candidates of the next step, those of one operator side by side."""
        known = set(self.kept)
        new: dict[Thought, Candidate] = {}
        for candidate in self._all():
            if candidate.thought not in known:
                new.setdefault(candidate.thought, candidate)
        return list(new.values())

    def _all(self) -> Iterable[Candidate]:
        if self.depth == 0:
            yield from (Candidate(leaf[0], index, index, leaf) for index, leaf in enumerate(self.leaves))
            return
        new = range(self._used[self.depth % 2], len(self.kept))
        if self.depth % 2:
            yield from (Candidate(op, i, i, (op, self.kept[i])) for op in TRANSFORMS for i in new)
            return
        for op in MERGES:
            for j in new:
                yield from (Candidate(op, i, j, merged(op, self.kept[i], self.kept[j])) for i in range(j + 1))

    def keep(self, accepted: Iterable[Candidate]) -> None:
        """End the step and keep some of its candidates."""
        self._used[self.depth % 2] = len(self.kept)
        self.kept += [candidate.thought for candidate in accepted]
        self.depth += 1


class LabelledStep(NamedTuple):
    """Candidates of a step, and for each whether it leads to the equation."""

    candidates: list[Candidate]
    labels: list[bool]


def labelled_steps(leaves: Sequence[Thought], root: Thought, targets: frozenset[Thought]) -> list[LabelledStep]:
    """Return the steps of teacher forcing: candidates among the targets are kept, until the root is.

    Raises:
        ValueError: the schedule does not reach the root.
    """
    expansion, steps = Expansion(leaves), list[LabelledStep]()
    while root not in expansion.kept:
        if expansion.ended:
            raise ValueError(f"{root} cannot be reached")
        candidates = expansion.candidates()
        labels = [candidate.thought in targets for candidate in candidates]
        steps.append(LabelledStep(candidates, labels))
        expansion.keep(candidate for candidate, label in zip(candidates, labels, strict=True) if label)
    return steps
