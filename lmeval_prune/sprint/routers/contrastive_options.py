"""Options of the paper's router, which are options of `fit` itself. Imports nothing slow, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen

from lmeval_prune.config import Count, Decay, LearningRate, Scale, ScaleOrZero, Settings


@dataclass(frozen=True)
class ContrastiveOptions(Settings):
    """Settings of the paper's router (eq. 1).

    Attributes:
        sizes: of contrastive: p, the length of the embeddings q and v; of several values, validation chooses
        weights: of contrastive: λ, the weight of diversity; the paper gives no value; of several, validation chooses
        diversity: of contrastive: constraint on the head embeddings: ball, sphere, or unbounded (as in the paper)
        radius: of contrastive: radius of the ball or sphere
        epochs: of contrastive: maximum number of epochs
        patience: of contrastive: epochs without a better validation loss before the fit stops
        batch: of contrastive: questions per step
        learning_rate: of contrastive: learning rate of AdamW
        decay: of contrastive: weight decay of θ
    """

    sizes: Annotated[tuple[Count, ...], MinLen(1)] = (32,)
    weights: Annotated[tuple[ScaleOrZero, ...], MinLen(1)] = (0.0, 1e-4, 1e-3)
    diversity: Literal["ball", "sphere", "unbounded"] = "ball"
    radius: Scale = 1.0
    epochs: Count = 200
    patience: Count = 20
    batch: Count = 64
    learning_rate: LearningRate = 3e-3
    decay: Decay = 1e-2
