"""Base class of routers, which choose the variant of the model for each attempt at a question."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lmeval_prune.architectures import ModelMap
from lmeval_prune.models.attempts import DENSE, Attempt
from lmeval_prune.models.variants import Records, Variant

POLICIES = ("random", "random_top", "best", "cover", "oracle")  # values of `router=` besides folders


class HeadRouter(ABC):
    """Orders attempts for each request: attempt i is answered under the i-th variant of the order.

    Attributes:
        allowances: `allow_empty_layer` and `allow_other_model`, if given.
        records: what rebuilds the variants of the pool, where their names do not.
        variants: the variants of the pool by name; filled by `fit_to`.
    """

    def __init__(self, records: Records | None = None) -> None:
        self.allowances: Mapping[str, bool] = {}
        self.records: Records = records or {}
        self.variants: dict[str, Variant] = {DENSE: Variant()}

    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        """Check that the pool fits the model, and create its variants; `InputError` if it does not fit.

        `weights` is the fingerprint of the model's weights, `interventions` are the identities of its interventions.
        """
        for name in dict.fromkeys(Attempt.named(entry).variant for entry in self.pool):
            if name != DENSE:
                self.variants[name] = Variant.named(name, model_map, self.records.get(name), self.allowances)

    @property
    @abstractmethod
    def pool(self) -> Sequence[str]:
        """Return the variants (or attempts) that an order may contain, by name."""

    def prepare(self, requests: Sequence[Any], lm: Any) -> None:  # noqa: B027 - optional
        """Prepare for requests of lm-eval to a model; `InputError` if they cannot be routed."""

    @abstractmethod
    def order(self, request: Any) -> Sequence[str]:
        """Return the names of a request's attempts."""

    def weights(self, request: Any) -> Sequence[float] | None:
        """Return the weight of each of a request's attempts in a vote; None if the router has none."""
        return None

    @property
    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return a description for the results file."""

    def attempt(self, request: Any, repeat: int) -> Attempt:
        """Return an attempt; attempts beyond `request.repeats` (padding of ranks) start again."""
        return Attempt.named(self.order(request)[repeat % request.repeats])


class FixedOrderRouter(HeadRouter):
    """Uses entry i of the pool for attempt i, the same for every question."""

    def __init__(self, pool: Sequence[str], records: Records | None = None) -> None:
        super().__init__(records)
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
        return {"source": "in turn", "pool": self._pool}
