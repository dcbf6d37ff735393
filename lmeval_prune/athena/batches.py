"""Problems as tensors: texts for the encoder, and each step of several problems as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lmeval_prune.athena.data import GroundedProblem
from lmeval_prune.athena.model import AthenaSettings
from lmeval_prune.athena.problems import Problem
from lmeval_prune.athena.thoughts import OPERATORS, Candidate, LabelledStep, Thought, labelled_steps


@dataclass(frozen=True)
class EncodedProblem:
    """A problem as tokens.

    Attributes:
        ids: of the tokens.
        numbers: index of each number of the problem, and the position of its mask; without those that were cut off.
        goal: position of the last token of the text.
    """

    ids: list[int]
    numbers: tuple[tuple[int, int], ...]
    goal: int

    @classmethod
    def of(cls, problem: Problem, tokenizer: Any, max_length: int) -> EncodedProblem:
        """Tokenize a problem; of one that is too long the beginning is cut off."""
        tokenizer.truncation_side = "left"
        ids = list(tokenizer(problem.masked(tokenizer.mask_token), truncation=True, max_length=max_length)["input_ids"])
        masks = [position for position, token in enumerate(ids) if token == tokenizer.mask_token_id]
        indices = range(len(problem.numbers) - len(masks), len(problem.numbers))
        ends = {tokenizer.sep_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        goal = max((position for position, token in enumerate(ids) if token not in ends), default=0)
        return cls(ids, tuple(zip(indices, masks, strict=True)), goal)

    def leaves(self, constants: Sequence[str]) -> list[Thought]:
        """List the first thoughts: the numbers, then the constants."""
        return [*(("num", index) for index, _ in self.numbers), *(("con", value) for value in constants)]


@dataclass(frozen=True)
class Example:
    """A problem with the steps that lead to its equation, and the index of the equation among the kept thoughts."""

    problem: EncodedProblem
    steps: list[LabelledStep]
    root: int


def examples_of(problems: Iterable[GroundedProblem], tokenizer: Any, settings: AthenaSettings) -> list[Example]:
    """Make examples; problems whose numbers are cut off, or that need another constant, are left out."""
    examples = []
    for item in problems:
        encoded = EncodedProblem.of(item.problem, tokenizer, settings.max_length)
        try:
            steps = labelled_steps(encoded.leaves(settings.constants), *item.equation)
        except ValueError:
            continue
        pairs = [pair for step in steps for pair in zip(*step, strict=True)]
        kept = [candidate.thought for candidate, label in pairs if label]
        examples.append(Example(encoded, steps, kept.index(item.equation.root)))
    return examples


def text_inputs(problems: Sequence[EncodedProblem], constants: int, padding: int) -> dict[str, Any]:
    """Make the arguments of `Athena.read` for several problems, of the number of constants and the padding's id.

    Returns:
        Tensors: `input_ids` and `attention_mask` (problems, tokens); `number_rows` and `number_columns`, positions of
        all numbers; `leaf_order`, which sorts numbers and constants of all problems into leaves by problem; `goals`.
    """
    lengths = torch.tensor([len(problem.ids) for problem in problems])
    ids = [torch.tensor(problem.ids) for problem in problems]
    numbers = [(row, position) for row, problem in enumerate(problems) for _, position in problem.numbers]
    order, start = list[int](), 0
    for problem in problems:
        order += [*range(start, start + len(problem.numbers)), *range(len(numbers), len(numbers) + constants)]
        start += len(problem.numbers)
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=padding),
        "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
        "number_rows": torch.tensor([row for row, _ in numbers], dtype=torch.long),
        "number_columns": torch.tensor([position for _, position in numbers], dtype=torch.long),
        "leaf_order": torch.tensor(order, dtype=torch.long),
        "goals": torch.tensor([problem.goal for problem in problems]),
    }


def joined_step(
    candidates: Sequence[Sequence[Candidate]], sources: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], list[list[int]]]:
    """Join a step's candidates of several problems, operator by operator.

    Args:
        candidates: by problem.
        sources: of each problem, the rows of its kept thoughts (at step 0, of its leaves).

    Returns:
        Tensors: `first` and `second`, rows of the thoughts that each candidate joins; `problem`, its problem; and
        `sizes`, how many there are of each operator of `OPERATORS`, in this order. By problem, the rows of its
        candidates, in their order.
    """
    pairs = [(number, candidate) for number, part in enumerate(candidates) for candidate in part]
    pairs.sort(key=lambda pair: OPERATORS.index(pair[1].operator))
    rows: list[list[int]] = [[] for _ in candidates]
    for row, (number, _) in enumerate(pairs):
        rows[number].append(row)
    columns = {
        "first": [sources[number][candidate.first] for number, candidate in pairs],
        "second": [sources[number][candidate.second] for number, candidate in pairs],
        "problem": [number for number, _ in pairs],
    }
    tensors: dict[str, Any] = {name: torch.tensor(values, dtype=torch.long) for name, values in columns.items()}
    counts = Counter(candidate.operator for _, candidate in pairs)
    return {**tensors, "sizes": [counts[operator] for operator in OPERATORS]}, rows


def leaf_rows(problems: Sequence[EncodedProblem], constants: int) -> list[list[int]]:
    """List the rows of each problem's leaves among those of all."""
    counts = [len(problem.numbers) + constants for problem in problems]
    return [rows.tolist() for rows in torch.arange(sum(counts)).split(counts)]


@dataclass(frozen=True)
class Collator:
    """Joins examples for teacher forcing, with the number of constants and the id of the padding token."""

    constants: int
    padding: int

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Make the arguments of `Athena.forward`; `labels` are of all candidates by step, then of all kept thoughts."""
        problems = [example.problem for example in examples]
        steps, labels, total = list[dict[str, Any]](), list[Tensor](), 0
        sources, kept = leaf_rows(problems, self.constants), [list[int]() for _ in examples]
        for depth in range(max(len(example.steps) for example in examples)):
            parts = [e.steps[depth] if depth < len(e.steps) else LabelledStep([], []) for e in examples]
            tensors, rows = joined_step([step.candidates for step in parts], sources if depth == 0 else kept)
            label = torch.zeros(len(tensors["first"]), dtype=torch.long)
            for rows_of_problem, step in zip(rows, parts, strict=True):
                label[rows_of_problem] = torch.tensor(step.labels, dtype=torch.long)
            positive = label.nonzero()[:, 0]
            kept_rows = {row: number for number, row in enumerate(positive.tolist(), start=total)}
            for kept_of_problem, rows_of_problem in zip(kept, rows, strict=True):
                kept_of_problem += [kept_rows[row] for row in rows_of_problem if row in kept_rows]
            total += len(positive)
            steps.append({**tensors, "kept": positive})
            labels.append(label)
        answers = torch.zeros(total, dtype=torch.long)
        answers[[rows[example.root] for rows, example in zip(kept, examples, strict=True)]] = 1
        return {
            **text_inputs(problems, self.constants, self.padding),
            "steps": steps,
            "labels": torch.cat([*labels, answers]),
        }
