"""Executes a plan: a model that is really smaller, equal to the one that the plan masks."""

from lmeval_prune.surgery.cut import Cut, cut, cut_to

__all__ = ["Cut", "cut", "cut_to"]
