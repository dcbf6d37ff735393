"""SPRINT: outcomes of pruned heads, the router that is learned from them, and what it is compared with."""

from lmeval_prune.models.tries import DENSE
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore, Question
from lmeval_prune.sprint.router import FitOptions, Router, fit

__all__ = ["DENSE", "FitOptions", "OutcomeStore", "Outcomes", "Question", "Router", "fit"]
