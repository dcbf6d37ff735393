"""Attempts at a question, and the base class of routers, which choose the heads to prune for each attempt.

An attempt is named `dense`, the unpruned model, or by its pruned heads: `L5H3` or `L5H3+L15H0`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmeval_prune.architectures import Head, ModelMap, head_names
from lmeval_prune.interventions import HeadMask

DENSE = "dense"
POLICIES = ("random", "random_top", "best", "oracle")  # values of `router=` besides folders


def attempt_order(names: Iterable[str]) -> list[str]:
    """Sort unique names: dense, then heads by number, layer and head."""
    heads = {name: [] if name == DENSE else [Head.named(head) for head in head_names(name)] for name in names}
    return sorted(heads, key=lambda name: (len(heads[name]), heads[name]))


class HeadRouter(ABC):
    """Orders attempts for each request: try i is answered under the heads of the i-th."""

    def __init__(self) -> None:
        self.allowances: Mapping[str, bool] = {}  # `allow_empty_layer` and `allow_other_model`, if given
        self.masks: dict[str, HeadMask | None] = {DENSE: None}  # by the attempt's name; filled by `fit_to`

    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        """Create the masks of the pool; `InputError` if they do not fit the model.

        `weights` is the fingerprint of the model's weights, `interventions` are the identities of its interventions.
        """
        for name in self.pool:
            if name != DENSE:
                mask = HeadMask(heads=name, allow_empty_layer=bool(self.allowances.get("allow_empty_layer")))
                self.masks[name] = mask.fit_to(model_map)

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


class FixedOrderRouter(HeadRouter):
    """Uses entry i of the pool for attempt i, the same for every question."""

    pool: Sequence[str] = ()

    def order(self, request: Any) -> Sequence[str]:
        return self.pool

    @property
    def info(self) -> dict[str, Any]:
        return {"source": "in turn", "pool": list(self.pool)}
