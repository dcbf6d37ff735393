"""Search for the answer: keep likely thoughts step by step, until an answer is likely enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate.utils import send_to_device

from lmeval_prune.athena.batches import EncodedProblem, join_step, leaf_rows, text_inputs
from lmeval_prune.athena.equations import expression
from lmeval_prune.athena.model import Athena, Thinking
from lmeval_prune.athena.problems import Problem
from lmeval_prune.athena.thoughts import Candidate, Expansion, Thought


@dataclass(frozen=True)
class Solution:
    """Result of a search."""

    thought: Thought | None  # the answer; None for a problem without numbers and constants
    logit: float  # logit of `answer` for this thought
    kept: tuple[Thought, ...]  # all kept thoughts


class Search:
    """State of the search for a problem's answer."""

    def __init__(self, model: Athena, problem: EncodedProblem) -> None:
        self.settings = model.settings
        self.expansion = Expansion(problem.leaves(model.settings.constants))
        self.answers: list[float] = []  # logit of `answer` for each kept thought
        self.rows: list[int] = []  # row of each kept thought in the model's state

    @property
    def ended(self) -> bool:
        """Whether an answer is likely enough, a limit is reached, or there are no new candidates."""
        return (
            self.expansion.ended
            or self.expansion.depth == self.settings.steps
            or len(self.expansion.kept) >= self.settings.max_kept
            or max(self.answers, default=-math.inf) >= _logit(self.settings.conclude)
        )

    def accepted(self, logits: Sequence[float]) -> list[int]:
        """Return the indices of the most likely candidates up to `max_kept`; of all leaves, if no leaf is likely."""
        likely = [index for index, logit in enumerate(logits) if logit >= _logit(self.settings.accept)]
        if not likely and self.expansion.depth == 0:
            likely = list(range(len(logits)))
        room = self.settings.max_kept - len(self.expansion.kept)
        return sorted(sorted(likely, key=lambda index: -logits[index])[:room])

    def keep(self, candidates: Sequence[Candidate], accepted: Sequence[int], start: int) -> None:
        """Keep the accepted candidates; their rows in the model's state begin at `start`."""
        self.rows += range(start, start + len(accepted))
        self.expansion.keep(candidates[index] for index in accepted)

    @property
    def solution(self) -> Solution:
        """Most likely answer among the kept thoughts."""
        kept = tuple(self.expansion.kept)
        if not kept:
            return Solution(None, -math.inf, kept)
        best = max(range(len(kept)), key=self.answers.__getitem__)
        return Solution(kept[best], self.answers[best], kept)


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


@torch.no_grad()
def solve(model: Athena, problems: Sequence[EncodedProblem]) -> list[Solution]:
    """Solve problems in a single batch; the model must be in evaluation mode."""
    if not problems:
        return []
    searches, constants = [Search(model, problem) for problem in problems], len(model.settings.constants)
    inputs = text_inputs(problems, constants, model.tokenizer.pad_token_id)
    state, _ = model.read(send_to_device(inputs, model.device))
    leaves = leaf_rows(problems, constants)
    while any(not search.ended for search in searches):
        state = _step(model, state, searches, leaves)
    return [search.solution for search in searches]


def _step(model: Athena, state: Thinking, searches: Sequence[Search], leaves: list[list[int]]) -> Thinking:
    """Do the next step of all running searches."""
    active = [number for number, search in enumerate(searches) if not search.ended]
    candidates: list[list[Candidate]] = [[] for _ in searches]
    for number in active:
        candidates[number] = searches[number].expansion.candidates()
    is_first = searches[active[0]].expansion.depth == 0
    tensors, rows = join_step(candidates, leaves if is_first else [search.rows for search in searches])
    tensors, logits, chosen = send_to_device(tensors, model.device), list[float](), list[int]()
    if len(tensors["first"]):
        thoughts, contexts, reasons = model.think(state, tensors)
        logits = reasons.tolist()
    for number in active:
        accepted = searches[number].accepted([logits[row] for row in rows[number]])
        searches[number].keep(candidates[number], accepted, len(state.kept) + len(chosen))
        chosen += [rows[number][index] for index in accepted]
    if chosen:
        indices = torch.tensor(chosen, device=model.device)
        kept, problem = thoughts[indices], tensors["problem"][indices]
        state = model.keep(state, kept, contexts[indices], problem)
        conclusions = model.conclude(state, kept, problem)
        for number, logit in zip(problem.tolist(), conclusions.tolist(), strict=True):
            searches[number].answers.append(logit)
    return state


def answers(model: Athena, problems: Sequence[Problem], batch: int = 32) -> list[str]:
    """Answer problems with expressions.

    Args:
        model: in evaluation mode.
        problems: the problems.
        batch: number of problems in a batch.

    Returns:
        An expression for each problem; empty for a problem without numbers and constants.
    """
    encoded = [EncodedProblem.of(problem, model.tokenizer, model.settings.max_length) for problem in problems]
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number].ids))
    expressions = [""] * len(problems)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        for number, solution in zip(part, solve(model, [encoded[number] for number in part]), strict=True):
            if solution.thought:
                expressions[number] = expression(solution.thought, problems[number].numbers)
    return expressions
