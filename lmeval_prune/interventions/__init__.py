"""Interventions change how a model computes for as long as they are applied; nothing stays behind."""

from lmeval_prune.interventions.base import Intervention
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.interventions.heads import Head
from lmeval_prune.interventions.row_masks import RowMasks

__all__ = ["Head", "HeadMask", "Intervention", "RowMasks"]
