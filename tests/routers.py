"""A row for each router method; `test_routers.py` runs every row through the same tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lmeval_prune.sprint.router import Router
from lmeval_prune.tasks.tries import pass_ordered


@dataclass(frozen=True)
class Row:
    """A method, and what is to be tested with it.

    Attributes:
        name: the method.
        options: one value for each option that has several, quick to fit.
        flat: the same as fields of `FitOptions`, where they are the method's options.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    flat: dict[str, Any] = field(default_factory=dict)


ROWS = (
    Row(
        "contrastive",
        flat={"sizes": (8,), "weights": (1e-3,), "epochs": 60},
    ),
    Row(
        "knn",
        {"k": 10, "weighting": "uniform", "prior": 1},
    ),
)


def pass_at(router: Router, x: torch.Tensor, z: torch.Tensor, k: int) -> float:
    """Return pass@k of a router's order of the columns of `z`, (questions, columns), at the questions' embeddings `x`."""
    rows = zip(router.ranking(x), z.tolist(), strict=True)
    return sum(pass_ordered([bool(row[j]) for j in order], k) for order, row in rows) / len(z)
