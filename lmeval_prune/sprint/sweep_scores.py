"""The pruner `sweep`: score a head by what accuracy loses without it, as measured by a sweep (CAP, arXiv 2606.19350).

The score of head h is the mean of z_dense − z_h over the questions that both were asked, z the outcomes in the sweep's
matrix Z. A head without which more questions are solved has a negative score, and is removed first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.artefacts import content_digest
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import check_weights
from lmeval_prune.models.attempts import DENSE, is_single_head
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.norm_entropy import weight_norms
from lmeval_prune.pruners.parts import Part, Removed
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.tasks.splits import warn_of_scored_splits


@dataclass(frozen=True)
class SweepScores(Pruner):
    """Scores a head by the drop of accuracy that a sweep measured when the head alone was pruned.

    Equal drops, of which a sweep of few questions has many, are ordered by the weight norm (eq. 1 of the dynamic
    pruning paper).

    Attributes:
        outcomes: folder of the sweep.
        unknown: heads without outcomes: `refuse` them, remove them `last`, or give them the `mean` score of the others.
    """

    heads_only: ClassVar[bool] = True
    one_model: ClassVar[bool] = True
    outcomes: str = ""
    unknown: Literal["refuse", "last", "mean"] = "refuse"

    @property
    def identity(self) -> dict[str, Any]:
        """Return the digest of the outcomes instead of their folder, and the splits that were swept, by task.

        Of stored scores, `outcomes` is the digest.
        """
        if not self.outcomes or not Path(self.outcomes).is_dir():
            return super().identity
        return {**super().identity, "outcomes": content_digest(self.outcomes), "swept": self._swept()}

    def questions(self) -> list[str]:
        """Return the questions of the sweep; see `Pruner.questions`."""
        return self._read().texts

    def check_model(self, model_map: ModelMap) -> None:
        """Refuse a missing store, another model, and heads without outcomes; see `Pruner.check_model`."""
        outcomes, name = self._read(), Path(self.outcomes).name
        model = outcomes.model
        fingerprints = [x for x in [model.get("weights", ""), *model.get("rounded", [])] if x]
        subject, fix = f"the sweep {self.outcomes} is of", "give the sweep of this model"
        check_weights(fingerprints, str(model.get("name", "")), "", model_map, subject, fix)
        heads = {f"{layer.label}H{head}" for layer in model_map.attention for head in range(layer.heads)}
        drops = drops_of(outcomes)
        if foreign := [head for head in drops if head not in heads]:
            raise InputError(f"the sweep {name} has outcomes of {foreign[0]}, which this model lacks; {fix}")
        missing = sorted(heads - drops.keys(), key=lambda head: (len(head), head))
        if missing and self.unknown == "refuse":
            raise InputError(
                f"the sweep {name} has no outcomes of {len(missing)} of {len(heads)} heads, e.g. {missing[0]}; sweep "
                f"them, too, or give --options unknown=last (remove them last) or unknown=mean"
            )

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Return the drops; see `Pruner.scores`."""
        self.check_model(model_map)
        outcomes, remedy = self._read(), "sweep other questions (--split), e.g. those of training"
        for task, splits in self._swept().items():
            scored = outcomes.tasks.get(task, {}).get("scored_splits", ["test"])  # earlier sweeps did not record them
            warn_of_scored_splits(f"the sweep {self.outcomes}", task, splits, scored, remedy)
        drops = drops_of(outcomes)
        values = {
            part.key: torch.tensor([drops.get(f"{part.label}H{head}", torch.nan) for head in range(part.size)]).double()
            for part in parts
        }
        return Scores(self._ordered(values, weight_norms(parts)))

    def _ordered(self, drops: Mapping[str, Tensor], norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fill in unknown drops, and order equal ones by norms: each rank adds less than the next drop."""
        flat, sizes = torch.cat([*drops.values()]).round(decimals=9), [len(values) for values in drops.values()]
        known_drops = flat[~flat.isnan()]
        distinct = known_drops.unique()
        gap = float(distinct.diff().min()) if len(distinct) > 1 else 1.0
        flat = flat.nan_to_num(float(distinct[-1]) + gap if self.unknown == "last" else float(known_drops.mean()))
        ranks = torch.cat([norms[key] for key in drops]).argsort(stable=True).argsort(stable=True)
        ordered = flat + 0.5 * gap * ranks / len(flat)
        return dict(zip(drops, ordered.split(sizes), strict=True))

    def _swept(self) -> dict[str, list[str]]:
        """Return the splits of the sweep's questions by task."""
        keys = sorted({(row["task"], row["split"]) for row in self._read().questions})
        return {task: [split for name, split in keys if name == task] for task, _ in keys}

    def _read(self) -> Outcomes:
        if not self.outcomes:
            raise InputError("sweep scores by the outcomes of a sweep; give --outcomes FOLDER")
        outcomes = OutcomeStore(self.outcomes).read()
        if DENSE not in outcomes.pool or not drops_of(outcomes):
            raise InputError(
                f"the sweep {self.outcomes} has no question that the unpruned model and a head were both asked; sweep "
                f"it to its end"
            )
        return outcomes


def drops_of(outcomes: Outcomes) -> dict[str, float]:
    """Return the mean of z_dense − z_head over the questions with both, by single head that has any."""
    dense = outcomes.z[:, outcomes.pool.index(DENSE)].astype(np.float64)
    drops = {}
    for head, z in zip(outcomes.pool, outcomes.z.T.astype(np.float64), strict=True):
        both = ~np.isnan(dense) & ~np.isnan(z)
        if is_single_head(head) and both.any():
            drops[head] = float((dense[both] - z[both]).mean())
    return drops
