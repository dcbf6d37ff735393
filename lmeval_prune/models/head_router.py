"""Base class of routers, which choose the heads to prune for each attempt at a question."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lmeval_prune.architectures import ModelMap
from lmeval_prune.interventions.head_mask import HeadMask

DENSE = "dense"  # the entry of a pool under which no head is pruned
POLICIES = ("random", "random_top", "best", "oracle")  # values of `router=` besides folders


class HeadRouter(ABC):
    """Orders heads for each request: attempt i is answered greedily with the i-th head of the order pruned.

    Attributes:
        allow_empty_layer: whether a layer may lose all its heads.
        masks: the mask of each entry of the pool; filled by `fit_to`.
    """

    allow_empty_layer = False

    def __init__(self) -> None:
        self.masks: dict[str, HeadMask | None] = {DENSE: None}

    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        """Check that the pool fits the model, and create its masks; `InputError` if it does not fit.

        `weights` is the fingerprint of the model's weights, `interventions` are the identities of its interventions.
        """
        for name in self.pool:
            if name != DENSE:
                self.masks[name] = HeadMask(name, self.allow_empty_layer).fit_to(model_map)

    @property
    @abstractmethod
    def pool(self) -> Sequence[str]:
        """Return all entries that an order may contain: heads, several joined by `+`, or `dense`."""

    def prepare(self, requests: Sequence[Any]) -> None:  # noqa: B027 - optional
        """Prepare for requests of lm-eval; `InputError` if they cannot be routed."""

    @abstractmethod
    def order(self, request: Any) -> Sequence[str]:
        """Return the entries of the pool for a request's attempts."""

    @property
    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return a description for the results file."""

    def head(self, request: Any, repeat: int) -> str:
        """Return the entry of an attempt; attempts beyond `request.repeats` (padding of ranks) start again."""
        return self.order(request)[repeat % request.repeats]


class FixedOrderRouter(HeadRouter):
    """Uses entry i of the pool for attempt i, the same for every question."""

    def __init__(self, pool: Sequence[str]) -> None:
        super().__init__()
        self._pool = list(pool)

    @property
    def pool(self) -> Sequence[str]:
        """Return the pool."""
        return self._pool

    def order(self, request: Any) -> Sequence[str]:
        """Return the pool."""
        return self._pool

    @property
    def info(self) -> dict[str, Any]:
        """Return the pool."""
        return {"source": "in turn", "decoding": "greedy", "pool": self._pool}
