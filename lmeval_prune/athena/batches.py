"""Problems as tensors: what the encoder reads, and the steps of several problems as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmeval_prune.athena.problems import Problem
from lmeval_prune.athena.thoughts import OPERATORS, Candidate, LabelledStep, Thought


@dataclass(frozen=True)
class Encoded:
    """A problem as tokens.

    Attributes:
        ids: of the tokens.
        places: number of each number of the problem, and the place of its mask; numbers that were cut off are not here.
        goal: place of the last token of the text.
    """

    ids: list[int]
    places: tuple[tuple[int, int], ...]
    goal: int

    @classmethod
    def of(cls, problem: Problem, tokenizer: Any, max_length: int) -> Encoded:
        """Tokenize a problem; of one that is too long the beginning is cut off."""
        tokenizer.truncation_side = "left"
        ids = list(tokenizer(problem.masked(tokenizer.mask_token), truncation=True, max_length=max_length)["input_ids"])
        masks = [place for place, token in enumerate(ids) if token == tokenizer.mask_token_id]
        numbers = range(len(problem.numbers) - len(masks), len(problem.numbers))
        ends = {tokenizer.sep_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        goal = max((place for place, token in enumerate(ids) if token not in ends), default=0)
        return cls(ids, tuple(zip(numbers, masks, strict=True)), goal)

    def leaves(self, constants: Sequence[str]) -> list[Thought]:
        """What can be thought of at first: the numbers, then the constants."""
        return [*(("num", number) for number, _ in self.places), *(("con", value) for value in constants)]


@dataclass(frozen=True)
class Example:
    """A problem with the steps that lead to its equation, and the number of the equation among the kept thoughts."""

    problem: Encoded
    steps: list[LabelledStep]
    root: int


def texts(problems: Sequence[Encoded], constants: int, padding: int) -> dict[str, Any]:
    """What `Athena.read` takes of several problems.

    Args:
        problems: in the order of the batch.
        constants: how many there are.
        padding: id of the padding token.

    Returns:
        Tensors: `input_ids` and `attention_mask` (problems, tokens); `number_rows` and `number_columns`, places of all
        numbers; `leaf_order`, which sorts numbers and constants of all problems into leaves by problem; `goals`.
    """
    longest = max(len(one.ids) for one in problems)
    ids = torch.tensor([one.ids + [padding] * (longest - len(one.ids)) for one in problems])
    lengths = torch.tensor([len(one.ids) for one in problems])
    rows = [row for row, one in enumerate(problems) for _ in one.places]
    columns = [column for one in problems for _, column in one.places]
    order, number = list[int](), 0
    for one in problems:
        order += [*range(number, number + len(one.places)), *range(len(rows), len(rows) + constants)]
        number += len(one.places)
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        "number_rows": torch.tensor(rows, dtype=torch.long),
        "number_columns": torch.tensor(columns, dtype=torch.long),
        "leaf_order": torch.tensor(order, dtype=torch.long),
        "goals": torch.tensor([one.goal for one in problems]),
    }


@dataclass
class Joined:
    """One step of several problems.

    Attributes:
        tensors: `first` and `second`, rows of what the candidates are made of; `problem`, whose they are; `sizes`, how
            many there are of each operator of `OPERATORS`, in which order they stand.
        rows: of each problem, the rows of its candidates, in their order.
    """

    tensors: dict[str, Any]
    rows: list[list[int]]

    @classmethod
    def of(cls, candidates: Sequence[Sequence[Candidate]], sources: Sequence[Sequence[int]]) -> Joined:
        """Join the candidates of several problems, operator by operator.

        Args:
            candidates: by problem.
            sources: of each problem, the rows of its kept thoughts (at step 0, of its leaves).
        """
        rows: list[list[int]] = [[] for _ in candidates]
        first, second, problem, sizes = list[int](), list[int](), list[int](), list[int]()
        for operator in OPERATORS:
            before = len(first)
            for number, own in enumerate(candidates):
                for candidate in own:
                    if candidate.operator == operator:
                        rows[number].append(len(first))
                        first.append(sources[number][candidate.first])
                        second.append(sources[number][candidate.second])
                        problem.append(number)
            sizes.append(len(first) - before)
        tensors: dict[str, Any] = {
            name: torch.tensor(values, dtype=torch.long)
            for name, values in (("first", first), ("second", second), ("problem", problem))
        }
        return cls({**tensors, "sizes": sizes}, rows)


def leaf_rows(problems: Sequence[Encoded], constants: int) -> list[list[int]]:
    """Of each problem, the rows of its leaves among those of all."""
    rows, start = list[list[int]](), 0
    for one in problems:
        rows.append(list(range(start, start + len(one.places) + constants)))
        start = rows[-1][-1] + 1 if rows[-1] else start
    return rows


@dataclass(frozen=True)
class Collator:
    """Joins examples for teacher forcing.

    Attributes:
        constants: how many there are.
        padding: id of the padding token.
    """

    constants: int
    padding: int

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Make what `Athena.forward` takes, and `labels`: of all candidates by step, then of all kept thoughts."""
        problems = [example.problem for example in examples]
        sources, kept = leaf_rows(problems, self.constants), [list[int]() for _ in examples]
        steps, labels, total = list[dict[str, Any]](), list[Tensor](), 0
        for depth in range(max(len(example.steps) for example in examples)):
            own = [e.steps[depth] if depth < len(e.steps) else LabelledStep([], []) for e in examples]
            joined = Joined.of([step.candidates for step in own], sources if depth == 0 else kept)
            label = torch.zeros(len(joined.tensors["first"]), dtype=torch.long)
            for rows, step in zip(joined.rows, own, strict=True):
                label[rows] = torch.tensor(step.labels, dtype=torch.long)
            positive = label.nonzero()[:, 0]
            place = {row: number for number, row in enumerate(positive.tolist(), start=total)}
            for mine, rows in zip(kept, joined.rows, strict=True):
                mine += [place[row] for row in rows if row in place]
            total += len(positive)
            steps.append({**joined.tensors, "kept": positive})
            labels.append(label)
        answers = torch.zeros(total, dtype=torch.long)
        answers[[mine[example.root] for mine, example in zip(kept, examples, strict=True)]] = 1
        return {
            **texts(problems, self.constants, self.padding),
            "steps": steps,
            "labels": torch.cat([*labels, answers]),
        }
