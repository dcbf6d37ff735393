"""Solving problems: what seems good is kept, until an answer seems right or nothing new can be thought of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmeval_prune.athena.batches import Encoded, Joined, leaf_rows, texts
from lmeval_prune.athena.equations import expression
from lmeval_prune.athena.model import Athena
from lmeval_prune.athena.problems import Problem
from lmeval_prune.athena.thoughts import Candidate, Expansion, Thought


@dataclass(frozen=True)
class Solution:
    """What was thought of a problem.

    Attributes:
        thought: the answer; None if there was nothing to think of.
        logit: of `answer`, for it.
        kept: all kept thoughts.
    """

    thought: Thought | None
    logit: float
    kept: tuple[Thought, ...]


class Search:
    """The search in one problem.

    Attributes:
        expansion: its thoughts.
        answers: logits of `answer` for the kept thoughts.
        rows: of the kept thoughts in the model's state.
    """

    def __init__(self, model: Athena, problem: Encoded) -> None:
        self.settings = model.settings
        self.expansion = Expansion(problem.leaves(model.settings.constants))
        self.answers: list[float] = []
        self.rows: list[int] = []

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be thought of."""
        own = self.expansion
        return (
            own.ended
            or own.depth == self.settings.steps
            or len(own.kept) >= self.settings.max_kept
            or max(self.answers, default=-math.inf) >= _logit(self.settings.conclude)
        )

    def accepted(self, logits: Sequence[float]) -> list[int]:
        """Numbers of the candidates to keep: the likely ones, of too many the likeliest; of leaves all, if none is."""
        likely = [number for number, logit in enumerate(logits) if logit >= _logit(self.settings.accept)]
        if not likely and self.expansion.depth == 0:
            likely = list(range(len(logits)))
        room = self.settings.max_kept - len(self.expansion.kept)
        return sorted(sorted(likely, key=lambda number: -logits[number])[:room])

    @property
    def solution(self) -> Solution:
        """The kept thought that is the likeliest answer."""
        kept = tuple(self.expansion.kept)
        if not kept:
            return Solution(None, -math.inf, kept)
        best = max(range(len(kept)), key=self.answers.__getitem__)
        return Solution(kept[best], self.answers[best], kept)


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


@torch.no_grad()
def solve(model: Athena, problems: Sequence[Encoded]) -> list[Solution]:
    """Solve problems as one batch; the model is to be in evaluation mode."""
    if not problems:
        return []
    searches, constants = [Search(model, one) for one in problems], len(model.settings.constants)
    state, _ = model.read(_on(texts(problems, constants, model.tokenizer.pad_token_id), model.device))
    leaves = leaf_rows(problems, constants)
    while active := [number for number, search in enumerate(searches) if not search.ended]:
        candidates: list[list[Candidate]] = [[] for _ in searches]
        for number in active:
            candidates[number] = searches[number].expansion.candidates()
        first = searches[active[0]].expansion.depth == 0
        joined = Joined.of(candidates, leaves if first else [search.rows for search in searches])
        step, logits, chosen = _on(joined.tensors, model.device), list[float](), list[int]()
        if len(step["first"]):
            thoughts, contexts, found = model.think(state, step)
            logits = found.tolist()
        for number in active:
            rows = joined.rows[number]
            accepted = searches[number].accepted([logits[row] for row in rows])
            start = len(state.kept) + len(chosen)
            searches[number].rows += range(start, start + len(accepted))
            searches[number].expansion.keep(candidates[number][place] for place in accepted)
            chosen += [rows[place] for place in accepted]
        if chosen:
            places = torch.tensor(chosen, device=model.device)
            kept, problem = thoughts[places], step["problem"][places]
            state = model.keep(state, kept, contexts[places], problem)
            answers = model.conclude(state, kept, problem)
            for number, logit in zip(problem.tolist(), answers.tolist(), strict=True):
                searches[number].answers.append(logit)
    return [search.solution for search in searches]


def _on(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def answers(model: Athena, problems: Sequence[Problem], batch: int = 32) -> list[str]:
    """Expressions that answer problems; empty where there was nothing to think of.

    Args:
        model: in evaluation mode.
        problems: to be solved.
        batch: so many at once, those of a length together.
    """
    encoded = [Encoded.of(one, model.tokenizer, model.settings.max_length) for one in problems]
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number].ids))
    found = [""] * len(problems)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        for number, solution in zip(part, solve(model, [encoded[number] for number in part]), strict=True):
            if solution.thought:
                found[number] = expression(solution.thought, problems[number].numbers)
    return found
