"""Batch problems: token ids for the encoder, and the candidates of each step as tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lmeval_prune.athena.model import AthenaSettings
from lmeval_prune.athena.problems import GroundedProblem, Problem
from lmeval_prune.athena.thoughts import OPERATORS, Candidate, LabelledStep, Thought, labelled_steps


@dataclass(frozen=True)
class EncodedProblem:
    """A tokenized problem."""

    ids: list[int]  # token ids
    numbers: tuple[tuple[int, int], ...]  # index of each number, and the position of its mask token
    goal: int  # position of the text's last token

    @classmethod
    def of(cls, problem: Problem, tokenizer: Any, max_length: int) -> EncodedProblem:
        tokenizer.truncation_side = "left"
        ids = list(tokenizer(problem.masked(tokenizer.mask_token), truncation=True, max_length=max_length)["input_ids"])
        masks = [position for position, token in enumerate(ids) if token == tokenizer.mask_token_id]
        indices = range(len(problem.numbers) - len(masks), len(problem.numbers))
        ends = {tokenizer.sep_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        goal = max((position for position, token in enumerate(ids) if token not in ends), default=0)
        return cls(ids, tuple(zip(indices, masks, strict=True)), goal)

    def leaves(self, constants: Sequence[str]) -> list[Thought]:
        return [*(("num", index) for index, _ in self.numbers), *(("con", value) for value in constants)]


@dataclass(frozen=True)
class Example:
    """A problem, its labelled steps, and the index of its equation among the kept thoughts."""

    problem: EncodedProblem
    steps: list[LabelledStep]
    root: int


def make_examples(problems: Iterable[GroundedProblem], tokenizer: Any, settings: AthenaSettings) -> list[Example]:
    """Make training examples; drop problems with truncated numbers or unknown constants."""
    examples = []
    for grounded in problems:
        encoded = EncodedProblem.of(grounded.problem, tokenizer, settings.max_length)
        try:
            steps = labelled_steps(encoded.leaves(settings.constants), *grounded.equation)
        except ValueError:
            continue
        pairs = [pair for step in steps for pair in zip(*step, strict=True)]
        kept = [candidate.thought for candidate, label in pairs if label]
        examples.append(Example(encoded, steps, kept.index(grounded.equation.root)))
    return examples


def text_inputs(problems: Sequence[EncodedProblem], constants: int, padding: int) -> dict[str, Any]:
    """Return the inputs of `Athena.read`, given the number of constants and the id of the padding token.

    `input_ids` and `attention_mask` have the shape (problems, tokens). `number_rows`, `number_columns` and `goals` are
    positions in it. `leaf_order` sorts the numbers and constants into leaves, problem by problem.
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


def join_step(
    candidates: Sequence[Sequence[Candidate]], sources: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], list[list[int]]]:
    """Batch the candidates of each problem in a step, sorted by operator.

    `sources` are, for each problem, the rows of its kept thoughts in the model's state (at step 0: of its leaves).

    Returns:
        Tensors `first` and `second` (rows of the thoughts that a candidate joins) and `problem`, and the counts `sizes`
        of each operator of `OPERATORS`; and for each problem the rows of its candidates in these tensors.
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
    """Return the rows of each problem's leaves in the batch of leaves."""
    counts = [len(problem.numbers) + constants for problem in problems]
    return [rows.tolist() for rows in torch.arange(sum(counts)).split(counts)]


def collate(examples: Sequence[Example], constants: int, padding: int) -> dict[str, Any]:
    """Batch examples for teacher forcing, given the number of constants and the id of the padding token.

    Returns the inputs of `Athena.forward`; `labels` are of all candidates by step, then of all kept thoughts.
    """
    problems = [example.problem for example in examples]
    leaves, kept = leaf_rows(problems, constants), [list[int]() for _ in examples]
    steps, labels, total = list[dict[str, Any]](), list[Tensor](), 0
    for depth in range(max(len(example.steps) for example in examples)):
        parts = [e.steps[depth] if depth < len(e.steps) else LabelledStep([], []) for e in examples]
        step, rows = join_step([part.candidates for part in parts], kept if depth else leaves)
        step_labels = torch.zeros(len(step["first"]), dtype=torch.long)
        for rows_of_problem, part in zip(rows, parts, strict=True):
            step_labels[rows_of_problem] = torch.tensor(part.labels, dtype=torch.long)
        step["kept"] = step_labels.nonzero()[:, 0]
        index_of = {row: index for index, row in enumerate(step["kept"].tolist(), start=total)}
        for indices, rows_of_problem in zip(kept, rows, strict=True):
            indices += [index_of[row] for row in rows_of_problem if row in index_of]
        total += len(index_of)
        steps.append(step)
        labels.append(step_labels)
    answers = torch.zeros(total, dtype=torch.long)
    answers[[rows[example.root] for rows, example in zip(kept, examples, strict=True)]] = 1
    return {
        **text_inputs(problems, constants, padding),
        "steps": steps,
        "labels": torch.cat([*labels, answers]),
    }
