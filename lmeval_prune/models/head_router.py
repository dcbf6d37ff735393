"""Attempts at a question, and the base class of routers, which choose the heads to prune for each attempt.

An attempt is named `dense`, the unpruned model, or by its pruned heads: `L5H3` or `L5H3+L15H0`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from lmeval_prune.architectures import Head, ModelMap, head_names

DENSE = "dense"
POLICIES = ("random", "random_top", "best", "oracle")  # values of `router=` besides folders


def attempt_order(names: Iterable[str]) -> list[str]:
    """Sort unique names: dense, then heads by number, layer and head."""
    heads = {name: [] if name == DENSE else [Head.named(head) for head in head_names(name)] for name in names}
    return sorted(heads, key=lambda name: (len(heads[name]), heads[name]))


class HeadRouter(ABC):
    """Orders attempts for each request: try i is answered under the heads of the i-th."""

    needs_weights = True  # `fit_to` does

    @abstractmethod
    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        """Choose the pool for a model; `InputError` if the router was made for another one.

        `weights` is the fingerprint of the model's weights, `interventions` are the identities of its interventions.
        """

    @property
    @abstractmethod
    def pool(self) -> Sequence[str]:
        """Return the attempts that an order may contain, by name."""

    def prepare(self, requests: Sequence[Any], lm: Any) -> None:  # noqa: B027 - optional
        """Prepare for requests of lm-eval to a model; `InputError` if they cannot be routed."""

    @abstractmethod
    def order(self, request: Any) -> Sequence[str]:
        """Return the names of a request's attempts."""

    @property
    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return a description for the results file."""

    def attempt(self, request: Any, repeat: int) -> str:
        """Return an attempt; attempts beyond `request.repeats` (padding of ranks) start again."""
        return self.order(request)[repeat % request.repeats]
