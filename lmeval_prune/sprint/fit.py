"""Fit a router to outcomes, and choose its settings on validation questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmeval_prune.artefacts import check_finite, digest
from lmeval_prune.errors import InputError
from lmeval_prune.models.attempts import DENSE
from lmeval_prune.models.hidden_states import LAST_HIDDEN_STATE
from lmeval_prune.scoring.passes import pass_ordered
from lmeval_prune.sprint import encoder as encoders
from lmeval_prune.sprint.hidden_states import states_of
from lmeval_prune.sprint.options import FitOptions
from lmeval_prune.sprint.outcomes import Outcomes
from lmeval_prune.sprint.router import Router
from lmeval_prune.sprint.routers import calibration
from lmeval_prune.sprint.routers.base import Candidate, Examples


class UnsolvedError(InputError):
    """Questions that no head solves."""


def fit(outcomes: Outcomes, encoder: str, options: FitOptions | None = None) -> Router:
    """Fit a router to outcomes.

    Args:
        outcomes: outcomes of the training questions.
        encoder: name of the sentence encoder, or `last_hidden_state` for the model's own of the prompts.
        options: settings of the fit.
    """
    options = options or FitOptions()
    options.method()  # refuses wrong settings before the questions are embedded
    cut_off = outcomes.cut_off
    outcomes = outcomes.greedy()
    groups = number_questions(outcomes.texts)
    _, used = split(groups, options.holdout, [options.seed, 1])
    outcomes = outcomes.rows(used)
    dense = torch.from_numpy(outcomes.z[:, outcomes.pool.index(DENSE)]) if DENSE in outcomes.pool else None
    if not options.dense:
        outcomes = outcomes.columns([name for name in outcomes.pool if name != DENSE])
    with _naming_cut_answers(cut_off):
        _check_outcomes(outcomes)
    z = torch.from_numpy(outcomes.z)
    x, fingerprint = _embed(encoder, outcomes)
    about = {
        "encoder_fingerprint": fingerprint,
        "model": outcomes.model,
        "tasks": outcomes.tasks,
        "variants": dict(outcomes.variants),
        "questions": len(z),
        "questions_no_head_solves": int((~(z == 1).any(1)).sum()),
        "questions_all_heads_solve": int(((z == 1) | z.isnan()).all(1).sum()),
        "answers": outcomes.lengths,
        "unknown_cells": int(z.isnan().sum()),
        "held_out": len(groups) - len(used),
        "seen": sorted({digest(text) for text in outcomes.texts}),
    }
    with _naming_cut_answers(cut_off):
        return fit_embeddings(x, z, outcomes.pool, encoder, options, about, number_questions(outcomes.texts), dense)


@contextmanager
def _naming_cut_answers(cut_off: str) -> Iterator[None]:
    """Say of questions that no head solves that answers were cut off, a likely cause."""
    try:
        yield
    except UnsolvedError as error:
        if not cut_off:
            raise
        raise InputError(f"{cut_off}, sweep again with more max_gen_toks: {error}") from None


def _embed(encoder: str, outcomes: Outcomes) -> tuple[Tensor, str]:
    """Return embeddings of questions, (questions, width), and the encoder's fingerprint (empty: the model itself)."""
    if encoder == LAST_HIDDEN_STATE:
        return states_of(outcomes), ""
    model = encoders.load_encoder(encoder)
    encoders.warn_of_long_texts(model, outcomes.texts)
    return encoders.embed(model, outcomes.texts), encoders.fingerprint(model)


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
        encoder: name of the encoder that embedded the questions.
        options: settings of the fit.
        about: details for `router.json`.
        groups: number of each row's group, whose rows are in the same split; by default each row is a group.
        dense: outcomes of the unpruned model, shape (questions,); by default the column of that name.
    """
    method = options.method()
    if dense is None and DENSE in pool:
        dense = z[:, pool.index(DENSE)]
    validation, training = split(groups or range(len(z)), options.validation, options.seed)
    if options.validation and not validation:
        raise InputError(f"validation={options.validation:g} of {len(z)} questions is none; give more, or 0")
    if options.validation and not (z[validation] == 1).any():
        raise UnsolvedError(
            "no validation question is solved by any head; sweep more questions, or set validation to 0"
        )
    if not (z[training] == 1).any():
        raise UnsolvedError("no training question is solved by any head; sweep more or easier questions")
    examples = Examples(x[training], z[training], x[validation], z[validation], options.seed)
    dense_rate = float((dense[validation] == 1).double().mean()) if dense is not None and validation else None
    is_guarded = (method.guarded if options.guard is None else options.guard) and DENSE in pool
    tried = []
    for candidate in method.candidates(examples):
        _check(candidate, len(pool), options.router)
        router = Router(candidate.ranker, pool, encoder, options.router)
        tried.append((candidate, *_judge(router, examples, dense_rate if is_guarded else None)))
    if not tried:
        raise InputError(f"router {options.router} fitted nothing; mend its `candidates`")
    candidate, router, passes = max(tried, key=lambda item: (sum(item[2].values()), -item[0].loss))
    platt, scores = _calibrate(router, examples)
    return replace(
        router,
        platt=platt,
        about={
            **(about or {}),
            "chosen": candidate.values,
            "method_version": method.version,
            "options": {**asdict(options), "options": asdict(method)},
            "training_questions": len(training),
            "validation_questions": len(validation),
            "validation_pass": passes,
            "validation_dense": dense_rate,
            "calibration": scores,
            "tried": [_record(*item) for item in tried],
            **candidate.about,
        },
    )


def _check(candidate: Candidate, pool: int, name: str) -> None:
    """Raise `InputError` for a candidate whose files could not be read, or whose loss decides nothing."""
    ranker = candidate.ranker
    try:
        ranker.of(ranker.tensors, ranker.settings, pool)
        check_finite(ranker.tensors | {"loss": torch.tensor(candidate.loss)}, "its candidate", "mend its `candidates`")
    except InputError as error:
        raise InputError(f"router {name}: {error}") from None


def _record(candidate: Candidate, router: Router, passes: dict[str, float]) -> dict[str, Any]:
    """Return the entry of a candidate in `tried`."""
    values = {**candidate.values, "validation_loss": candidate.loss, "validation_pass": passes}
    return {**values, **({"dense_first": True} if router.dense_first else {})}


def _judge(router: Router, examples: Examples, dense_rate: float | None) -> tuple[Router, dict[str, float]]:
    """Return the router and its validation pass@k; if it is below `dense_rate` at k = 1, with dense first."""
    x, z = examples.validation_x, examples.validation_z
    passes = mean_passes(router.ranking(x), z) if len(z) else {}
    if passes and dense_rate is not None and passes["pass@1"] < dense_rate:
        router = replace(router, dense_first=True)
        passes = mean_passes(router.ranking(x), z)
    return router, passes


def _calibrate(router: Router, examples: Examples) -> tuple[tuple[float, float], dict[str, Any] | None]:
    """Return the calibration on the validation questions, and its scores; none without probabilities or questions."""
    x, z = examples.validation_x, examples.validation_z
    p = router.chances(x) if len(z) else None
    if p is None:
        return (1.0, 0.0), None
    solved, observed = (examples.z == 1).double().sum(0), (~examples.z.isnan()).double().sum(0)
    rates = ((solved + 1) / (observed + 2)).expand(len(z), -1)
    scores = {**calibration.cross_fitted(p, z), "training_accuracy": calibration.scores(rates, z)}
    return calibration.platt(p, z), scores


def mean_passes(rankings: list[list[int]], z: Tensor, up_to: int = 8) -> dict[str, float]:
    """Return the mean pass@k for k = 1 … 8; an unknown outcome counts as not solved."""
    solved = (z == 1).tolist()
    ordered = [[row[j] for j in ranking] for row, ranking in zip(solved, rankings, strict=True)]
    ks = range(1, min(up_to, z.shape[1]) + 1)
    return {f"pass@{k}": sum(pass_ordered(row, k) for row in ordered) / len(ordered) for k in ks}


def _check_outcomes(outcomes: Outcomes) -> None:
    """Raise `InputError` for outcomes that a router cannot learn from."""
    if len(outcomes.pool) < 2:
        raise InputError("a router needs at least two heads to choose from; sweep more heads")
    if len(set(outcomes.texts)) < 2:
        raise InputError(
            "a router needs at least two different questions that are not held out; sweep more, or lower holdout"
        )
    observed = outcomes.z[outcomes.observed]
    if not observed.size or observed.max() == 0:
        raise UnsolvedError(
            f"none of the {len(outcomes.texts)} questions that are not held out is solved by any head: there is "
            f"nothing to learn; sweep more or easier questions, or lower holdout"
        )
    if observed.min() == 1:
        raise InputError(
            "every head solves every question (Z is all one): there is nothing to learn; take harder questions"
        )
