"""The preparation `random_heads`: a random set of heads, the control for any selection of heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from lmeval_prune.config import Seed
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
    seed: Seed = 0

    def make(self, lm: Any, folder: Path) -> None:
        """Draw heads and write their mask."""
        self._draw(lm.model_map).save(folder / "mask.json", lm.model_map)

    def check(self, model_map: Any) -> None:
        """Refuse a share that leaves too few heads, or none; see `Preparation.check`."""
        self._draw(model_map)

    def _draw(self, model_map: Any) -> HeadMask:
        return HeadMask.random(round(self.share * model_map.total_heads), self.seed, model_map)

    def model_args(self, folder: Path) -> dict[str, Any]:
        """Return the mask."""
        return {"mask": str(folder / "mask.json")}
