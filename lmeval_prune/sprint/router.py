"""The router, which chooses the heads to prune for a question (SPRINT §4).

A question x is embedded as q = θ φ(x) by a frozen sentence encoder φ and a linear map θ. Each head has a learned
embedding v_j. The N tries take the N heads nearest to q.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from typing_extensions import TypedDict

from lmeval_prune.artefacts import digest, output_lock, read_artefact, read_tensors, write_artefact, write_bytes
from lmeval_prune.errors import InputError
from lmeval_prune.models.attempts import DENSE
from lmeval_prune.scoring.passes import pass_ordered
from lmeval_prune.sprint import encoder as encoders
from lmeval_prune.sprint.loss import agreement, constrain, contrastive_loss, ranking_losses, squared_distances
from lmeval_prune.sprint.options import FitOptions
from lmeval_prune.sprint.outcomes import Outcomes

SCHEMA = "lmeval-prune/router"
SCHEMA_VERSION = 1


class RouterContents(TypedDict):
    """Fields of `router.json`; `Router.about` has all except the first three."""

    pool: list[str]
    encoder: str
    tensors_sha256: str
    encoder_fingerprint: NotRequired[str]
    model: NotRequired[dict[str, Any]]
    tasks: NotRequired[dict[str, dict[str, Any]]]
    options: NotRequired[dict[str, Any]]
    seen: NotRequired[list[str]]  # digests of the questions that it was fitted on
    held_out: NotRequired[int]


@dataclass(frozen=True)
class Router:
    """A fitted router.

    Attributes:
        theta: θ, shape (p, width of the encoder).
        heads: head embeddings v_j, shape (pool, p).
        pool: names of the heads; ties are broken by this order.
        encoder: name of the sentence encoder.
        about: details of the fit: model, tasks, options, counts, training curve.
        sha256: digest of `router.json`; empty before it is saved.
    """

    theta: Tensor
    heads: Tensor
    pool: list[str]
    encoder: str
    about: dict[str, Any] = field(default_factory=dict)
    sha256: str = ""

    @cached_property
    def _encoder(self) -> Any:
        encoder = encoders.load_encoder(self.encoder)
        expected = self.about.get("encoder_fingerprint")
        if expected and encoders.fingerprint(encoder) != expected:
            raise InputError(
                f"the sentence encoder {self.encoder} has other weights than when the router was fitted; fit it again"
            )
        return encoder

    def order(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the pool for each question, the nearest head first; ties by pool order."""
        return [[self.pool[j] for j in row] for row in self.ranking(encoders.embed(self._encoder, texts))]

    def ranking(self, embeddings: Tensor) -> list[list[int]]:
        """Return pool indices for each question, the nearest head first, from φ(x) of shape (questions, width)."""
        distances = squared_distances(embeddings @ self.theta.T, self.heads)
        ranking: list[list[int]] = distances.argsort(dim=1, stable=True).tolist()
        return ranking

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `router.json`, which has the hash of the tensors, and `router.safetensors`."""
        data = save({"theta": self.theta.contiguous(), "heads": self.heads.contiguous()})
        sha256 = hashlib.sha256(data).hexdigest()
        content = {"pool": self.pool, "encoder": self.encoder, "tensors_sha256": sha256, **self.about}
        with output_lock(folder):
            write_bytes(Path(folder) / "router.safetensors", data)
            write_artefact(Path(folder) / "router.json", SCHEMA, SCHEMA_VERSION, content)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Router:
        """Read a router.

        Raises:
            InputError: the folder is not a router, or its files are inconsistent.
        """
        if not (Path(folder) / "router.json").is_file():
            raise InputError(f"{folder} is not a router (no router.json); write one with `lmeval-prune fit`")
        try:
            content, sha256 = read_artefact(Path(folder) / "router.json", SCHEMA, SCHEMA_VERSION, RouterContents)
            pool, name, expected = content.pop("pool"), content.pop("encoder"), content.pop("tensors_sha256")
            tensors = read_tensors(Path(folder) / "router.safetensors", expected)
        except InputError as error:
            raise InputError(f"the router in {folder} cannot be used: {error}; fit it again") from None
        theta, heads = tensors.get("theta"), tensors.get("heads")
        if (
            theta is None
            or heads is None
            or [theta.dtype.is_floating_point, heads.dtype.is_floating_point, len(tensors)] != [True, True, 2]
            or theta.ndim != 2
            or heads.shape != (len(pool), len(theta))
            or len(set(pool)) < len(pool)
        ):
            shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
            raise InputError(
                f"the router in {folder} has a pool of {len(pool)} and tensors of shapes {shapes}; fit it again"
            )
        for key in ("schema", "schema_version", "created_by"):
            content.pop(key, None)
        return cls(theta, heads, pool, name, content, sha256)


def fit(outcomes: Outcomes, encoder: str, options: FitOptions | None = None) -> Router:
    """Fit a router to outcomes: minimise eq. 1 over θ and V.

    Args:
        outcomes: outcomes of the training questions.
        encoder: name of the sentence encoder.
        options: settings of the fit.

    Raises:
        InputError: the outcomes do not distinguish heads, or are too few for a validation split.
    """
    options = options or FitOptions()
    cut_off = outcomes.cut_off
    try:
        if not options.dense:
            outcomes = outcomes.columns([name for name in outcomes.pool if name != DENSE])
        groups = number_questions(outcomes.texts)
        _, used = split(groups, options.holdout, [options.seed, 1])
        outcomes = outcomes.rows(used)
        _check_outcomes(outcomes)
        model = encoders.load_encoder(encoder)
        z = torch.from_numpy(outcomes.z)
        about = {
            "encoder_fingerprint": encoders.fingerprint(model),
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
        embeddings = encoders.embed(model, outcomes.texts)
        return fit_embeddings(embeddings, z, outcomes.pool, encoder, options, about, number_questions(outcomes.texts))
    except InputError as error:
        if not cut_off:
            raise
        raise InputError(f"{cut_off}, sweep again with more max_gen_toks: {error}") from None


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
) -> Router:
    """Fit a router from φ(x) of shape (questions, width) and Z of shape (questions, pool).

    The validation split keeps rows of the same group together; by default each row is a group.
    """
    validation, training = split(groups or range(len(z)), options.validation, options.seed)
    if options.validation and not (z[validation] == 1).any():
        raise InputError("no validation question is solved by any head; sweep more questions, or set validation to 0")
    if not (z[training] == 1).any():
        raise InputError("no training question is solved by any head; sweep more or easier questions")
    candidates = []
    for size, weight in product(options.sizes, options.weights):
        theta, heads, curve = _optimise(x, z, training, validation, size, weight, options)
        router = Router(theta, heads, pool, encoder)
        candidate: dict[str, Any] = {
            "p": size,
            "lambda": weight,
            "validation_loss": min(epoch["validation"] for epoch in curve),
            "validation_pass": _mean_passes(router.ranking(x[validation]), z[validation]) if validation else {},
        }
        candidates.append((candidate, router, curve))
    chosen, router, curve = max(
        candidates, key=lambda item: (sum(item[0]["validation_pass"].values()), -item[0]["validation_loss"])
    )
    fitted = {
        **(about or {}),
        "p": chosen["p"],
        "lambda": chosen["lambda"],
        "options": asdict(options),
        "training_questions": len(training),
        "validation_questions": len(validation),
        "validation_pass": chosen["validation_pass"],
        "tried": [candidate for candidate, *_ in candidates],
        "curve": curve,
    }
    return replace(router, about=fitted)


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
        raise InputError(
            "no head solves any question (Z is all zero): there is nothing to learn; take easier questions"
        )
    if observed.min() == 1:
        raise InputError(
            "every head solves every question (Z is all one): there is nothing to learn; take harder questions"
        )


def _optimise(
    x: Tensor, z: Tensor, training: list[int], validation: list[int], size: int, weight: float, options: FitOptions
) -> tuple[Tensor, Tensor, list[dict[str, float]]]:
    """Return θ and V at the lowest validation loss (without validation: training loss), and the curve."""
    generator = torch.Generator().manual_seed(options.seed)
    theta = torch.randn(size, x.shape[1], generator=generator) / x.shape[1] ** 0.5
    raw = torch.randn(z.shape[1], size, generator=generator) * options.radius / (2 * size**0.5)
    theta.requires_grad_(), raw.requires_grad_()
    s = agreement(z[training])
    groups = [{"params": [theta], "weight_decay": options.decay}, {"params": [raw], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=options.learning_rate)
    best, lowest, epochs_since = (theta.detach().clone(), raw.detach().clone()), float("inf"), 0
    curve: list[dict[str, float]] = []
    rows = torch.tensor(training, dtype=torch.long)
    for epoch in range(options.epochs):
        for batch in rows[torch.randperm(len(rows), generator=generator)].split(options.batch):
            optimiser.zero_grad()
            heads = constrain(raw, options.diversity, options.radius)
            contrastive_loss(x[batch] @ theta.T, heads, z[batch], s, weight).backward()
            optimiser.step()
        with torch.no_grad():
            heads = constrain(raw, options.diversity, options.radius)
            training_loss = float(contrastive_loss(x[training] @ theta.T, heads, z[training], s, weight))
            losses = ranking_losses(x[validation] @ theta.T, heads, z[validation])
            validation_loss = float(losses.mean()) if len(losses) else training_loss
        curve.append({"epoch": epoch, "training": training_loss, "validation": validation_loss})
        epochs_since += 1
        if validation_loss < lowest:
            best, lowest, epochs_since = (theta.detach().clone(), raw.detach().clone()), validation_loss, 0
        if epochs_since >= options.patience or not np.isfinite(training_loss):
            break
    return best[0], constrain(best[1], options.diversity, options.radius).detach(), curve


def _mean_passes(rankings: list[list[int]], z: Tensor, up_to: int = 8) -> dict[str, float]:
    """Return the mean pass@k for k = 1 … 8; an unknown outcome counts as not solved."""
    solved = (z == 1).tolist()
    ordered = [[row[j] for j in ranking] for row, ranking in zip(solved, rankings, strict=True)]
    ks = range(1, min(up_to, z.shape[1]) + 1)
    return {f"pass@{k}": sum(pass_ordered(row, k) for row in ordered) / len(ordered) for k in ks}
