"""The preparation `random_heads`: a random set of heads, the control for any selection of heads."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from lmeval_prune.errors import InputError
from lmeval_prune.grid.preparations import Preparation
from lmeval_prune.interventions import HeadMask


@dataclass(frozen=True)
class RandomHeads(Preparation):
    """A mask of a random share of a model's heads, which keeps at least one head of each layer.

    Attributes:
        share: share of all heads, rounded to a whole number of heads.
        seed: seed of the draw.
    """

    share: Annotated[float, Interval(gt=0, lt=1)]
    seed: int = 0

    def make(self, lm: Any, folder: Path) -> None:
        """Draw heads, skipping the last remaining head of a layer."""
        layers = lm.model_map.attention
        heads = [(layer, head) for layer in layers for head in range(layer.heads)]
        count = round(self.share * len(heads))
        random.Random(self.seed).shuffle(heads)
        left = {layer.label: layer.heads for layer in layers}
        chosen: list[str] = []
        for layer, head in heads:
            if len(chosen) < count and left[layer.label] > 1:
                left[layer.label] -= 1
                chosen.append(f"{layer.label}H{head}")
        if len(chosen) < max(count, 1):
            raise InputError(
                f"random_heads.share={self.share} of {len(heads)} heads removes all heads of a layer, or none at all"
            )
        HeadMask(chosen).save(folder / "mask.json", lm.model_map)

    def model_args(self, folder: Path) -> dict[str, Any]:
        """Return the mask."""
        return {"mask": str(folder / "mask.json")}
