"""Interventions: reversible changes to the computation of a stock model."""

from lmeval_prune.interventions.base import Intervention, Origin, combined, interventions_on, load_intervention
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.interventions.row_masks import RowMasks
from lmeval_prune.interventions.table import METHODS

__all__ = [
    "METHODS",
    "HeadMask",
    "Intervention",
    "Origin",
    "Plan",
    "RowMasks",
    "combined",
    "interventions_on",
    "load_intervention",
]
