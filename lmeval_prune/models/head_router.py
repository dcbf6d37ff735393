"""Interface of whatever chooses the heads under which the tries at a question are answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lmeval_prune.architectures import ModelMap
from lmeval_prune.interventions.head_mask import HeadMask

DENSE = "dense"  # among names of heads: nothing is pruned
POLICIES = ("random", "random_top", "best", "oracle")  # values of `router=` that are no folder


class HeadRouter(ABC):
    """Answers the i-th try at a question greedily under the i-th head of an order."""

    allow_empty_layer = False  # whether a layer may lose all its heads

    def __init__(self) -> None:
        self.masks: dict[str, HeadMask | None] = {DENSE: None}  # of each name in an order; filled by `fit_to`

    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        """Check that the pool fits the model, and make its masks.

        Args:
            model_map: of the model.
            weights: fingerprint of its weights.
            interventions: identities of what is applied to it anyway.

        Raises:
            InputError: it does not fit.
        """
        for name in self.pool:
            if name != DENSE:
                self.masks[name] = HeadMask(name, self.allow_empty_layer).fit_to(model_map)

    @property
    @abstractmethod
    def pool(self) -> Sequence[str]:
        """Return all names that an order may hold."""

    def prepare(self, requests: Sequence[Any]) -> None:  # noqa: B027 - most have nothing to get ready
        """Get ready for these requests of lm-eval's; `InputError` if they cannot be answered so."""

    @abstractmethod
    def order(self, request: Any) -> Sequence[str]:
        """Return the names of the heads of a request's tries."""

    @property
    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return a description for the results file."""

    def head(self, request: Any, repeat: int) -> str:
        """Return the head of a request's try; copies beyond its tries (padding of ranks) begin again."""
        return self.order(request)[repeat % request.repeats]


class FixedOrderRouter(HeadRouter):
    """Try i under member i of a pool (heads, several joined by `+`, or `dense`), the same for every question."""

    def __init__(self, pool: Sequence[str]) -> None:
        super().__init__()
        self._pool = list(pool)

    @property
    def pool(self) -> Sequence[str]:
        """Return its members."""
        return self._pool

    def order(self, request: Any) -> Sequence[str]:
        """Return the pool."""
        return self._pool

    @property
    def info(self) -> dict[str, Any]:
        """Return the pool."""
        return {"source": "in turn", "decoding": "greedy", "pool": self._pool}
