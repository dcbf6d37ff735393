"""Thoughts of ATHENA: expressions in a canonical form, and the schedule that proposes them.

A thought is a sortable tuple: `("num", 0)`, `("con", "1")`, `("neg", t)`, `("inv", t)`, `("root", t)`, `("halve", t)`,
`("add", t, …)`, `("mul", t, …)`. Sums and products are flat and sorted, so that the order of their terms does not
matter. Nothing cancels.
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
    return (operator, *sorted(part for terms in parts for part in terms))


class Candidate(NamedTuple):
    """A proposed thought and its operands.

    The operands are indices of kept thoughts. Both are the same for a transform; for a leaf, both are its index.
    """

    operator: str  # of `OPERATORS`
    first: int
    second: int
    thought: Thought  # the result


class Expansion:
    """Schedule that proposes the candidate thoughts of a problem, step by step.

    Step 0 proposes the leaves: the problem's numbers, then the constants. Odd steps transform, even steps merge. A
    candidate has at least one operand that was kept since the last step of its kind, and is never a kept thought.

    Attributes:
        kept: kept thoughts in order.
        depth: index of the next step.
    """

    def __init__(self, leaves: Sequence[Thought]) -> None:
        self.leaves = list(leaves)
        self.kept: list[Thought] = []
        self.depth = 0
        self._used = [0, 0]  # number of kept thoughts at the last merge and at the last transform

    @property
    def ended(self) -> bool:
        """Whether the next step has no new operands."""
        return self.depth > 0 and self._used[self.depth % 2] == len(self.kept)

    def candidates(self) -> list[Candidate]:
        """Return the candidates of the next step without duplicates, grouped by operator."""
        kept = set(self.kept)
        candidates: dict[Thought, Candidate] = {}
        for candidate in self._all():
            if candidate.thought not in kept:
                candidates.setdefault(candidate.thought, candidate)
        return list(candidates.values())

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
    """Candidates of a step, and whether each is part of the equation."""

    candidates: list[Candidate]
    labels: list[bool]


def labelled_steps(leaves: Sequence[Thought], root: Thought, targets: frozenset[Thought]) -> list[LabelledStep]:
    """Return the steps of teacher forcing, which keep all target thoughts; `ValueError` if they miss the root."""
    expansion, steps = Expansion(leaves), list[LabelledStep]()
    while root not in expansion.kept:
        if expansion.ended:
            raise ValueError(f"{root} cannot be reached")
        candidates = expansion.candidates()
        labels = [candidate.thought in targets for candidate in candidates]
        steps.append(LabelledStep(candidates, labels))
        expansion.keep(candidate for candidate, label in zip(candidates, labels, strict=True) if label)
    return steps
