"""What orders a pool of heads for each question: SPRINT's router (§4) and its baselines.

The i-th attempt at a question prunes the i-th head of the order, so all attempts differ. For the router, a question is
embedded by a frozen sentence encoder φ, and a ranker (`routers/`) orders the pool for the embedding.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from lmeval_prune.artefacts import (
    ENVELOPE,
    check_finite,
    digest,
    output_lock,
    read_artefact,
    read_tensors,
    write_artefact,
    write_bytes,
)
from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.registry import class_record, import_path
from lmeval_prune.sprint.options import CONTRASTIVE, ROUTERS, FitOptions
from lmeval_prune.sprint.outcomes import Outcomes
from lmeval_prune.sprint.routers import Examples, Ranker
from lmeval_prune.tasks.tries import pass_ordered

logger = logging.getLogger(__name__)
SCHEMA = "lmeval-prune/router"
SCHEMA_VERSION = 2


# ---------------------------------------------------------------------- the sentence encoder


@lru_cache(maxsize=2)
def load_encoder(name: str) -> Any:
    """Load a sentence-transformers model by name or folder, once for all routers."""
    from sentence_transformers import SentenceTransformer

    logging.getLogger("sentence_transformers").setLevel(logging.WARNING)
    return SentenceTransformer(embedded.resolve(name), device="cpu")


def embed(encoder: Any, texts: Sequence[str]) -> Tensor:
    """Return φ(x) of each text in float32, shape (texts, width); `InputError` if a number is not finite.

    Texts are embedded one at a time, so that rounding, which may decide a ranking, does not depend on other texts.
    """
    if not texts:
        return torch.empty(0)
    vectors = encoder.encode(list(texts), batch_size=1, convert_to_tensor=True, show_progress_bar=len(texts) > 500)
    vectors = torch.as_tensor(vectors).detach().to("cpu", torch.float32).clone()
    check_finite({"vectors": vectors}, "the sentence encoder")
    return vectors


def fingerprint(encoder: Any) -> str:
    """Return a digest of the encoder's weights, to detect another encoder with the same name."""
    state = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        state.update(f"{name}{tuple(tensor.shape)}".encode())
        state.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


# ---------------------------------------------------------------------- the router


@dataclass(frozen=True)
class Router:
    """A fitted router.

    Attributes:
        ranker: orders the pool for an embedding.
        pool: names of the heads; ties are broken by this order.
        encoder: name of the sentence encoder.
        method: name of the method that fitted the ranker.
        about: details of the fit: model, tasks, options, counts, chosen values, digests of the questions (`seen`).
        sha256: digest of `router.json`; empty before it is saved.
    """

    ranker: Ranker
    pool: list[str]
    encoder: str
    method: str = CONTRASTIVE
    about: dict[str, Any] = field(default_factory=dict)
    sha256: str = ""

    @cached_property
    def _encoder(self) -> Any:
        encoder = load_encoder(self.encoder)
        expected = self.about.get("encoder_fingerprint")
        if expected and fingerprint(encoder) != expected:
            raise InputError(
                f"the sentence encoder {self.encoder} has other weights than when the router was fitted; fit it again"
            )
        return encoder

    def order(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the pool for each question in the order of the attempts; ties by pool order."""
        return [[self.pool[j] for j in row] for row in self.ranking(embed(self._encoder, texts))]

    def ranking(self, embeddings: Tensor) -> list[list[int]]:
        """Return pool indices for each question in the order of the attempts, from embeddings (questions, width)."""
        with torch.no_grad():
            rows: list[list[int]] = self.ranker.order(embeddings).tolist()
        columns = list(range(len(self.pool)))
        if len(rows) != len(embeddings) or any(sorted(row) != columns for row in rows):
            raise InputError(f"router {self.method} ordered other columns than 0 to {columns[-1]}, each once")
        return rows

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `router.json`, which has the hash of the tensors, and `router.safetensors`."""
        data = save({name: tensor.contiguous() for name, tensor in self.ranker.tensors.items()})
        content = {
            "router": self.method,
            **class_record(type(self.ranker)),
            "pool": self.pool,
            "encoder": self.encoder,
            "settings": self.ranker.settings,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
        }
        with output_lock(folder):
            write_bytes(Path(folder) / "router.safetensors", data)
            write_artefact(Path(folder) / "router.json", SCHEMA, SCHEMA_VERSION, {**content, **self.about})

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Router:
        """Read a router; a warning says so if its method has another version now."""
        content, sha256 = read_artefact(Path(folder) / "router.json", SCHEMA, SCHEMA_VERSION)
        about = {name: value for name, value in content.items() if name not in ENVELOPE}
        tensors = read_tensors(Path(folder) / "router.safetensors", about.pop("tensors_sha256"))
        pool, encoder, method = about.pop("pool"), about.pop("encoder"), about.pop("router")
        settings, recorded, kind = about.pop("settings", {}), about.pop("class", None), ROUTERS.load(method)
        if class_record(kind.ranker).get("class") != recorded:
            now = import_path(kind.ranker)
            raise InputError(f"router={method} is {now} now, and was {recorded or 'of this package'}")
        if about.get("method_version", 1) != kind.version:
            logger.warning("the router in %s was fitted by another version of %s: fit it again", folder, method)
        ranker = kind.ranker.from_dict({**tensors, **settings}, "the fitted router")
        return cls(ranker, pool, encoder, method, about, sha256)


# ---------------------------------------------------------------------- fitting


def fit(outcomes: Outcomes, encoder: str, options: FitOptions | None = None) -> Router:
    """Fit a router to the outcomes of training questions, with the sentence encoder of a name or folder."""
    options = options or FitOptions()
    options.method()  # refuses wrong settings before the questions are embedded
    groups = number_questions(outcomes.texts)
    _, used = split(groups, options.holdout, [options.seed, 1])
    outcomes = outcomes.rows(used)
    if not options.dense:
        outcomes = outcomes.columns([name for name in outcomes.pool if name != DENSE])
    observed = outcomes.z[outcomes.observed]
    if not observed.size or observed.min() == observed.max():
        raise InputError(
            f"every head solves all or none of {len(outcomes.texts)} questions: nothing to learn; sweep others"
        )
    z = torch.from_numpy(outcomes.z)
    model = load_encoder(encoder)
    x = embed(model, outcomes.texts)
    about = {
        "encoder_fingerprint": fingerprint(model),
        "model": outcomes.model,
        "tasks": outcomes.tasks,
        "questions": len(z),
        "questions_no_head_solves": int((~(z == 1).any(1)).sum()),
        "questions_all_heads_solve": int(((z == 1) | z.isnan()).all(1).sum()),
        "held_out": len(groups) - len(used),
        "seen": sorted({digest(text) for text in outcomes.texts}),
    }
    return fit_embeddings(x, z, outcomes.pool, encoder, options, about, number_questions(outcomes.texts))


def number_questions(texts: Sequence[str]) -> list[int]:
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
    """Fit a router from embeddings of shape (questions, width) and Z of shape (questions, pool).

    Of all candidates the one with the highest mean of validation pass@1 … pass@8 is chosen, then by loss. Rows with the
    same number in `groups` are in the same split; `about` has further details for `router.json`.
    """
    method = options.method()
    validation, training = split(groups or range(len(z)), options.validation, options.seed)
    several = [name for name, value in asdict(method).items() if isinstance(value, tuple) and len(value) > 1]
    if several and not validation:  # training losses do not choose between settings
        raise InputError(f"several values of {several[0]} need a validation split: give validation, or a single value")
    examples = Examples(x[training], z[training], x[validation], z[validation], options.seed)
    tried = []
    for candidate in method.candidates(examples):
        numbers = candidate.ranker.tensors | {"loss": torch.tensor(candidate.loss)}
        check_finite(numbers, f"a candidate of router {options.router}", "give a smaller learning_rate, or mend it")
        router = Router(candidate.ranker, pool, encoder, options.router)
        passes = {}
        if validation:  # an unknown outcome counts as not solved
            rankings, rows = router.ranking(examples.validation_x), (examples.validation_z == 1).tolist()
            solved = [[row[j] for j in ranking] for row, ranking in zip(rows, rankings, strict=True)]
            ks = range(1, min(8, z.shape[1]) + 1)
            passes = {f"pass@{k}": sum(pass_ordered(row, k) for row in solved) / len(solved) for k in ks}
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
            "tried": [{**one.values, "validation_loss": one.loss, "validation_pass": its} for one, _, its in tried],
            **candidate.about,
        },
    )


# ---------------------------------------------------------------------- policies: the router and its baselines


@dataclass(frozen=True)
class Policy:
    """An order of a pool for each question; a router is one, too."""

    pool: list[str]  # names of the heads, and perhaps `dense`
    order: Callable[[Sequence[str]], list[list[str]]]  # of questions: an order of the pool each, first choice first


def random_order(pool: list[str], seed: int = 0) -> Policy:
    def order(questions: Sequence[str]) -> list[list[str]]:
        return [random.Random(digest([seed, question])).sample(pool, len(pool)) for question in questions]

    return Policy(pool, order)


def random_top(outcomes: Outcomes, size: int, seed: int = 0) -> Policy:
    """Order at random the `size` heads that together solve most training questions: the paper's random baseline."""
    chosen = greedy_cover(outcomes.z, min(size, len(outcomes.pool)))
    return random_order([outcomes.pool[j] for j in chosen], seed)


def best(outcomes: Outcomes) -> Policy:
    """Order by training accuracy, the same for all questions; ties by pool order."""
    accuracy = np.nan_to_num(outcomes.accuracy(), nan=-1.0)
    pool = [outcomes.pool[j] for j in np.argsort(-accuracy, kind="stable")]
    return Policy(pool, lambda questions: [pool for _ in questions])


def oracle(outcomes: Outcomes) -> Policy:
    """Order the heads that solve the question first: an upper bound, not a method."""
    row_of = {text: i for i, text in enumerate(outcomes.texts)}
    if len(row_of) < len(outcomes.texts):
        raise InputError("the outcome store has the same question twice, so its outcome is ambiguous")

    def order(questions: Sequence[str]) -> list[list[str]]:
        z = np.nan_to_num(outcomes.z[[row_of[question] for question in questions]], nan=0.0)
        return [[outcomes.pool[j] for j in row] for row in np.argsort(-z, axis=1, kind="stable")]

    return Policy(outcomes.pool, order)


def greedy_cover(z: np.ndarray, size: int) -> list[int]:
    """Choose `size` columns of z (questions, pool) that together solve most questions; NaN counts as not solved.

    Each step takes the column that solves most of the unsolved questions; ties by accuracy, then by pool order.
    """
    solved = z == 1
    unsolved, chosen = np.ones(len(z), bool), []
    for _ in range(size):
        unchosen = [j for j in range(z.shape[1]) if j not in chosen]
        column = max(unchosen, key=lambda j: (solved[unsolved, j].sum(), solved[:, j].sum(), -j))
        chosen.append(column)
        unsolved &= ~solved[:, column]
    return chosen
