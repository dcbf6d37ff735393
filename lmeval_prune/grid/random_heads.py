"""A random set of heads: what any choice of heads must be compared with."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmeval_prune.errors import InputError
from lmeval_prune.grid.preparations import Preparation
from lmeval_prune.interventions import HeadMask


@dataclass(frozen=True)
class RandomHeads(Preparation):
    """Draws a share of a model's heads, never all of a layer; the result is a mask artefact.

    Attributes:
        share: of all heads, rounded to a whole number of them.
        seed: of the draw.

    Raises:
        InputError: the share is not between 0 and 1.
    """

    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise InputError(f"random_heads.share={self.share} must be between 0 and 1")

    def make(self, lm: Any, folder: Path) -> None:
        """Draw heads one by one, passing over the last one of a layer; see the base class."""
        layers = lm.model_map.attention
        every = [(layer, head) for layer in layers for head in range(layer.heads)]
        count = round(self.share * len(every))
        random.Random(self.seed).shuffle(every)
        left = {layer.label: layer.heads for layer in layers}
        chosen: list[str] = []
        for layer, head in every:
            if len(chosen) < count and left[layer.label] > 1:
                left[layer.label] -= 1
                chosen.append(f"{layer.label}H{head}")
        if len(chosen) < max(count, 1):
            raise InputError(
                f"random_heads.share={self.share} of {len(every)} heads leaves a layer none, or draws none"
            )
        HeadMask(chosen).save(folder / "mask.json", lm.model_map)

    def model_args(self, folder: Path) -> dict[str, Any]:
        """The mask; see the base class."""
        return {"mask": str(folder / "mask.json")}
