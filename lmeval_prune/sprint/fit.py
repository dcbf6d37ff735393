"""Fit a router to outcomes, and choose its settings on validation questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmeval_prune.artefacts import check_finite, digest
from lmeval_prune.errors import InputError
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.sprint.options import FitOptions
from lmeval_prune.sprint.outcomes import Outcomes
from lmeval_prune.sprint.router import Router, embed, fingerprint, load_encoder, warn_of_long_texts
from lmeval_prune.sprint.routers import Examples
from lmeval_prune.tasks.tries import pass_ordered


def fit(outcomes: Outcomes, encoder: str, options: FitOptions | None = None) -> Router:
    """Fit a router to the outcomes of training questions, with the sentence encoder of a name or folder."""
    options = options or FitOptions()
    options.method()  # refuses wrong settings before the questions are embedded
    groups = number_questions(outcomes.texts)
    _, used = split(groups, options.holdout, [options.seed, 1])
    outcomes = outcomes.rows(used)
    dense = torch.from_numpy(outcomes.z[:, outcomes.pool.index(DENSE)]) if DENSE in outcomes.pool else None
    if not options.dense:
        outcomes = outcomes.columns([name for name in outcomes.pool if name != DENSE])
    observed = outcomes.z[outcomes.observed]
    if not observed.size or observed.min() == observed.max():
        raise InputError(
            f"of {len(outcomes.texts)} questions that are not held out every head solves all or none: there is nothing "
            f"to learn; sweep other questions"
        )
    z = torch.from_numpy(outcomes.z)
    model = load_encoder(encoder)
    warn_of_long_texts(model, outcomes.texts)
    x = embed(model, outcomes.texts)
    about = {
        "encoder_fingerprint": fingerprint(model),
        "model": outcomes.model,
        "tasks": outcomes.tasks,
        "questions": len(z),
        "questions_no_head_solves": int((~(z == 1).any(1)).sum()),
        "questions_all_heads_solve": int(((z == 1) | z.isnan()).all(1).sum()),
        "answers": outcomes.lengths,
        "unknown_cells": int(z.isnan().sum()),
        "held_out": len(groups) - len(used),
        "seen": sorted({digest(text) for text in outcomes.texts}),
    }
    return fit_embeddings(x, z, outcomes.pool, encoder, options, about, number_questions(outcomes.texts), dense)


def number_questions(texts: Sequence[str]) -> list[int]:
    """Number the questions; equal texts have the same number."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(text, len(numbers)) for text in texts]


def split(groups: Sequence[int], share: float, seed: Any) -> tuple[list[int], list[int]]:
    """Split the rows into a random share of the groups and the rest."""
    shuffled = np.random.default_rng(seed).permutation(max(groups) + 1)
    chosen = set(shuffled[: round(share * len(shuffled))].tolist())
    return [i for i, g in enumerate(groups) if g in chosen], [i for i, g in enumerate(groups) if g not in chosen]


def fit_embeddings(
    x: Tensor,
    z: Tensor,
    pool: list[str],
    encoder: str,
    options: FitOptions,
    about: dict[str, Any] | None = None,
    groups: Sequence[int] | None = None,
    dense: Tensor | None = None,
) -> Router:
    """Fit a router from embeddings of shape (questions, width) and Z of shape (questions, pool).

    Of all candidates the one with the highest mean of validation pass@1 … pass@8 is chosen, then by loss.

    Args:
        x, z, pool: embeddings, outcomes and the names of the columns.
        encoder, options, about: name of the encoder, settings of the fit, and details for `router.json`.
        groups: number of each row's group, whose rows are in the same split; by default each row is a group.
        dense: outcomes of the unpruned model, shape (questions,), which need not be in the pool.
    """
    method = options.method()
    validation, training = split(groups or range(len(z)), options.validation, options.seed)
    several = [name for name, value in asdict(method).items() if isinstance(value, tuple) and len(value) > 1]
    if several and not validation:  # training losses do not choose between settings
        raise InputError(f"several values of {several[0]} need a validation split: give validation, or a single value")
    examples = Examples(x[training], z[training], x[validation], z[validation], options.seed)
    dense_rate = float((dense[validation] == 1).double().mean()) if dense is not None and validation else None
    tried = []
    for candidate in method.candidates(examples):
        numbers = candidate.ranker.tensors | {"loss": torch.tensor(candidate.loss)}
        check_finite(numbers, f"a candidate of router {options.router}", "mend its `candidates`")
        router = Router(candidate.ranker, pool, encoder, options.router)
        passes = mean_passes(router.ranking(examples.validation_x), examples.validation_z) if validation else {}
        tried.append((candidate, router, passes))
    candidate, router, passes = max(tried, key=lambda item: (sum(item[2].values()), -item[0].loss))
    return replace(
        router,
        about={
            **(about or {}),
            "chosen": candidate.values,
            "method_version": method.version,
            "options": {**asdict(options), "options": asdict(method)},
            "training_questions": len(training),
            "validation_questions": len(validation),
            "validation_pass": passes,
            "validation_dense": dense_rate,
            "tried": [
                {**each.values, "validation_loss": each.loss, "validation_pass": its_passes}
                for each, _, its_passes in tried
            ],
            **candidate.about,
        },
    )


def mean_passes(rankings: list[list[int]], z: Tensor, up_to: int = 8) -> dict[str, float]:
    """Return the mean pass@k for k = 1 … 8; an unknown outcome counts as not solved."""
    solved = (z == 1).tolist()
    ordered = [[row[j] for j in ranking] for row, ranking in zip(solved, rankings, strict=True)]
    ks = range(1, min(up_to, z.shape[1]) + 1)
    return {f"pass@{k}": sum(pass_ordered(row, k) for row in ordered) / len(ordered) for k in ks}
