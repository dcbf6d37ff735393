"""Interventions: reversible changes to the computation of a stock model."""

from lmeval_prune.interventions.applied import combined, preserve_state
from lmeval_prune.interventions.base import Intervention, interventions_on
from lmeval_prune.interventions.head_mask import HeadMask, RowMasks
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.interventions.table import METHODS, load_intervention

__all__ = [
    "METHODS",
    "HeadMask",
    "Intervention",
    "Plan",
    "RowMasks",
    "combined",
    "interventions_on",
    "load_intervention",
    "preserve_state",
]
