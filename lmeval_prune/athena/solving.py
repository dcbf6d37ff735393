"""Search for answers: likely thoughts are kept until one seems to be the answer, or no new one comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate.utils import send_to_device

from lmeval_prune.athena.batches import EncodedProblem, joined_step, leaf_rows, text_inputs
from lmeval_prune.athena.equations import expression
from lmeval_prune.athena.model import Athena, Thinking
from lmeval_prune.athena.problems import Problem
from lmeval_prune.athena.thoughts import Candidate, Expansion, Thought


@dataclass(frozen=True)
class Solution:
    """Result of a search.

    Attributes:
        thought: the answer; None of a problem without numbers and constants.
        logit: of `answer`, for it.
        kept: all kept thoughts.
    """

    thought: Thought | None
    logit: float
    kept: tuple[Thought, ...]


class Search:
    """Search for the answer of a problem.

    Attributes:
        answers, rows: of the kept thoughts the logits of `answer`, and the rows in the model's state.
    """

    def __init__(self, model: Athena, problem: EncodedProblem) -> None:
        self.settings = model.settings
        self.expansion = Expansion(problem.leaves(model.settings.constants))
        self.answers: list[float] = []
        self.rows: list[int] = []

    @property
    def ended(self) -> bool:
        """Return whether the search ends: an answer is likely enough, a limit is reached, or no thought is new."""
        return (
            self.expansion.ended
            or self.expansion.depth == self.settings.steps
            or len(self.expansion.kept) >= self.settings.max_kept
            or max(self.answers, default=-math.inf) >= _logit(self.settings.conclude)
        )

    def accepted(self, logits: Sequence[float]) -> list[int]:
        """Choose the candidates to keep: the likely ones, of too many the likeliest; all leaves, if none is likely."""
        likely = [index for index, logit in enumerate(logits) if logit >= _logit(self.settings.accept)]
        if not likely and self.expansion.depth == 0:
            likely = list(range(len(logits)))
        room = self.settings.max_kept - len(self.expansion.kept)
        return sorted(sorted(likely, key=lambda index: -logits[index])[:room])

    def keep(self, candidates: Sequence[Candidate], accepted: Sequence[int], start: int) -> None:
        """Keep candidates, whose rows in the model's state begin at `start`."""
        self.rows += range(start, start + len(accepted))
        self.expansion.keep(candidates[index] for index in accepted)

    @property
    def solution(self) -> Solution:
        """Likeliest answer among the kept thoughts."""
        kept = tuple(self.expansion.kept)
        if not kept:
            return Solution(None, -math.inf, kept)
        best = max(range(len(kept)), key=self.answers.__getitem__)
        return Solution(kept[best], self.answers[best], kept)


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


@torch.no_grad()
def solve(model: Athena, problems: Sequence[EncodedProblem]) -> list[Solution]:
    """Solve problems as one batch; the model is to be in evaluation mode."""
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
    """Take the next step of all searches that have not ended."""
    active = [number for number, search in enumerate(searches) if not search.ended]
    candidates: list[list[Candidate]] = [[] for _ in searches]
    for number in active:
        candidates[number] = searches[number].expansion.candidates()
    is_first = searches[active[0]].expansion.depth == 0
    tensors, rows = joined_step(candidates, leaves if is_first else [search.rows for search in searches])
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
    """Return expressions that answer problems, by a model in evaluation mode; empty without numbers and constants."""
    encoded = [EncodedProblem.of(problem, model.tokenizer, model.settings.max_length) for problem in problems]
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number].ids))
    expressions = [""] * len(problems)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        for number, solution in zip(part, solve(model, [encoded[number] for number in part]), strict=True):
            if solution.thought:
                expressions[number] = expression(solution.thought, problems[number].numbers)
    return expressions
