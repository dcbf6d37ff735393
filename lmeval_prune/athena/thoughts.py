"""The thoughts of ATHENA: expressions up to the order of sums and products, and the schedule that expands them.

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


def merged(operator: str, one: Thought, other: Thought) -> Thought:
    """The sum (`add`) or product (`mul`) of two thoughts."""
    parts = (thought[1:] if thought[0] == operator else (thought,) for thought in (one, other))
    return (operator, *sorted(part for several in parts for part in several))


class Candidate(NamedTuple):
    """A thought that may be kept, and what it is made of.

    Attributes:
        operator: one of `OPERATORS`.
        first, second: numbers of the kept thoughts that it joins; the same one twice for a transform; for a leaf, its
            number among the problem's leaves.
        thought: what comes of it.
    """

    operator: str
    first: int
    second: int
    thought: Thought


class Expansion:
    """What can be thought of one problem, step by step.

    Step 0 offers the leaves; odd steps transform, even ones merge. Each looks only at what was kept since the last step
    of its kind, offers no thought that is kept already, and none twice.

    Args:
        leaves: the problem's numbers, then the constants.

    Attributes:
        kept: thoughts in the order in which they were kept.
        depth: number of the next step.
    """

    def __init__(self, leaves: Sequence[Thought]) -> None:
        self.leaves = list(leaves)
        self.kept: list[Thought] = []
        self.depth = 0
        self._seen = [0, 0]  # how many of the kept thoughts the last merge, and the last transform, could look at

    @property
    def ended(self) -> bool:
        """Whether the next step has nothing new to look at."""
        return self.depth > 0 and self._seen[self.depth % 2] == len(self.kept)

    def candidates(self) -> list[Candidate]:
        """Candidates of the next step, those of one operator side by side."""
        known = set(self.kept)
        found: dict[Thought, Candidate] = {}
        for candidate in self._all():
            if candidate.thought not in known:
                found.setdefault(candidate.thought, candidate)
        return list(found.values())

    def _all(self) -> Iterable[Candidate]:
        if self.depth == 0:
            yield from (Candidate(leaf[0], place, place, leaf) for place, leaf in enumerate(self.leaves))
            return
        new = range(self._seen[self.depth % 2], len(self.kept))
        if self.depth % 2:
            yield from (Candidate(op, i, i, (op, self.kept[i])) for op in TRANSFORMS for i in new)
            return
        for op in MERGES:
            for j in new:
                yield from (Candidate(op, i, j, merged(op, self.kept[i], self.kept[j])) for i in range(j + 1))

    def keep(self, accepted: Iterable[Candidate]) -> None:
        """End the step; these of its candidates are kept."""
        self._seen[self.depth % 2] = len(self.kept)
        self.kept += [candidate.thought for candidate in accepted]
        self.depth += 1


class LabelledStep(NamedTuple):
    """The candidates of one step, and which of them lead to the equation."""

    candidates: list[Candidate]
    labels: list[bool]


def labelled_steps(leaves: Sequence[Thought], root: Thought, targets: frozenset[Thought]) -> list[LabelledStep]:
    """The steps of teacher forcing: of each step's candidates those among the targets are kept, until the root is.

    Args:
        leaves: the problem's numbers, then the constants.
        root: the whole equation.
        targets: the root and all that it is made of.

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
