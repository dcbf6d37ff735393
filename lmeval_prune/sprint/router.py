"""The router, which chooses the heads to prune for a question (SPRINT §4).

A question is embedded by a frozen sentence encoder. A ranker (`routers/`) orders the pool for the embedding; the i-th
try takes the i-th head.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired

from safetensors.torch import save
from torch import Tensor
from typing_extensions import TypedDict

from lmeval_prune.artefacts import ENVELOPE, output_lock, read_artefact, read_tensors, write_artefact, write_bytes
from lmeval_prune.errors import InputError
from lmeval_prune.registry import class_record, import_path
from lmeval_prune.sprint import encoder as encoders
from lmeval_prune.sprint.routers.base import Ranker
from lmeval_prune.sprint.routers.table import CONTRASTIVE, ROUTERS

logger = logging.getLogger(__name__)
SCHEMA = "lmeval-prune/router"
SCHEMA_VERSION = 2


class RouterContents(TypedDict):
    """Fields of `router.json`; `Router.about` has those that `Router` does not have itself."""

    pool: list[str]
    encoder: str
    tensors_sha256: str
    router: str
    method_version: NotRequired[int]  # none: 1
    settings: NotRequired[dict[str, Any]]
    chosen: NotRequired[dict[str, Any]]
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
        ranker: orders the pool for an embedding.
        pool: names of the heads; ties are broken by this order.
        encoder: name of the sentence encoder.
        method: name of the method that fitted the ranker.
        about: details of the fit: model, tasks, options, counts, chosen values.
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
        encoder = encoders.load_encoder(self.encoder)
        expected = self.about.get("encoder_fingerprint")
        if expected and encoders.fingerprint(encoder) != expected:
            raise InputError(
                f"the sentence encoder {self.encoder} has other weights than when the router was fitted; fit it again"
            )
        return encoder

    def order(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the pool for each question in the order of the tries; ties by pool order."""
        return [[self.pool[j] for j in row] for row in self.ranking(encoders.embed(self._encoder, texts))]

    def ranking(self, embeddings: Tensor) -> list[list[int]]:
        """Return pool indices for each question in the order of the tries, from embeddings (questions, width)."""
        return self.ranker.columns(embeddings, len(self.pool), self.method)

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
        content, sha256 = read_artefact(Path(folder) / "router.json", SCHEMA, SCHEMA_VERSION, RouterContents)
        tensors = read_tensors(Path(folder) / "router.safetensors", content.pop("tensors_sha256"))
        about = {"chosen": {}} | {key: value for key, value in content.items() if key not in ENVELOPE}
        pool, encoder, method = about.pop("pool"), about.pop("encoder"), about.pop("router")
        kind, recorded = ROUTERS.load(method).ranker, about.pop("class", None)
        if class_record(kind).get("class") != recorded:
            raise InputError(f"router={method} is {import_path(kind)} now, and was {recorded or 'of this package'}")
        ranker = kind.of(tensors, about.pop("settings", {}), len(pool))
        router = cls(ranker, pool, encoder, method, about, sha256)
        before, now = router.about.get("method_version", 1), ROUTERS.load(router.method).version
        if before != now:
            logger.warning(
                "the router in %s was fitted by version %s of %s; version %s, which is installed, may order its pool "
                "in another way: fit it again",
                folder, before, router.method, now
            )  # fmt: skip
        return router
