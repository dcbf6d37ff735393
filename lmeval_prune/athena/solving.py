"""Search for the answer: keep likely thoughts step by step, until an answer is likely enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate.utils import send_to_device

from lmeval_prune.athena.batches import EncodedProblem, join_step, leaf_rows, text_inputs
from lmeval_prune.athena.model import Athena
from lmeval_prune.athena.problems import Problem
from lmeval_prune.athena.thoughts import Expansion, Thought, expression


class Solution(NamedTuple):
    """Result of a search."""

    thought: Thought | None  # the answer; None for a problem without numbers and constants
    logit: float  # logit of `answer` for this thought
    kept: tuple[Thought, ...]  # all kept thoughts


@torch.no_grad()
def solve(model: Athena, problems: Sequence[EncodedProblem]) -> list[Solution]:
    """Solve problems in a single batch; the model must be in evaluation mode."""
    if not problems:
        return []
    settings, constants = model.settings, len(model.settings.constants)
    accept, conclude = (math.log(p / (1 - p)) for p in (settings.accept, settings.conclude))
    state, _ = model.read(send_to_device(text_inputs(problems, constants, model.tokenizer.pad_token_id), model.device))
    leaves = leaf_rows(problems, constants)
    expansions = [Expansion(problem.leaves(settings.constants)) for problem in problems]
    rows: list[list[int]] = [[] for _ in problems]  # row of each kept thought in the state
    verdicts: list[list[float]] = [[] for _ in problems]  # logit of `answer` for each kept thought

    def is_running(number: int) -> bool:
        expansion = expansions[number]
        return not (
            expansion.ended
            or expansion.depth == settings.steps
            or len(expansion.kept) >= settings.max_kept
            or max(verdicts[number], default=-math.inf) >= conclude
        )

    while active := [number for number in range(len(problems)) if is_running(number)]:
        candidates = [expansion.candidates() if n in active else [] for n, expansion in enumerate(expansions)]
        is_first = expansions[active[0]].depth == 0
        step, places = join_step(candidates, leaves if is_first else rows)
        step, logits, chosen = send_to_device(step, model.device), list[float](), list[int]()
        if len(step["first"]):
            thoughts, contexts, reasons = model.think(state, step)
            logits = reasons.tolist()
        for number in active:  # the most likely candidates; of all leaves, if no leaf is likely
            own, expansion = [logits[row] for row in places[number]], expansions[number]
            likely = [index for index, logit in enumerate(own) if logit >= accept]
            if not likely and is_first:
                likely = list(range(len(own)))
            room = settings.max_kept - len(expansion.kept)
            accepted = sorted(sorted(likely, key=own.__getitem__, reverse=True)[:room])
            start = len(state.kept) + len(chosen)
            rows[number] += range(start, start + len(accepted))
            expansion.keep(candidates[number][index] for index in accepted)
            chosen += [places[number][index] for index in accepted]
        if chosen:
            indices = torch.tensor(chosen, device=model.device)
            kept, problem = thoughts[indices], step["problem"][indices]
            state = model.keep(state, kept, contexts[indices], problem)
            for number, logit in zip(problem.tolist(), model.conclude(state, kept, problem).tolist(), strict=True):
                verdicts[number].append(logit)
    solutions = []
    for expansion, logits in zip(expansions, verdicts, strict=True):
        best = max(range(len(logits)), key=logits.__getitem__, default=None)
        thought, logit = (None, -math.inf) if best is None else (expansion.kept[best], logits[best])
        solutions.append(Solution(thought, logit, tuple(expansion.kept)))
    return solutions


def answers(model: Athena, problems: Sequence[Problem], batch: int = 32) -> list[str]:
    """Return an expression for each problem, empty for one without numbers and constants.

    The model is in evaluation mode; problems of similar length share a batch.
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
