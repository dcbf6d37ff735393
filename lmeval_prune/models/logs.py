"""What we log is heard where lm-eval's is."""

from __future__ import annotations

import logging

from torch import nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.interventions import interventions_on

logger = logging.getLogger(__name__)


def as_lm_eval_does() -> None:
    """Log at lm-eval's level and by its handlers, unless a program has set up logging itself."""
    ours, theirs = logging.getLogger("lmeval_prune"), logging.getLogger("lm_eval")
    if logging.getLogger().handlers or ours.handlers or not theirs.handlers:
        return
    ours.setLevel(theirs.level)
    for handler in theirs.handlers:
        ours.addHandler(handler)


def say_applied(model: nn.Module, model_map: ModelMap) -> None:
    """A line for each intervention on a model."""
    for one in interventions_on(model):
        logger.info("applied: %s", one.summary(model_map))
