"""Logging at lm-eval's level and with its handlers."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from lmeval_prune.interventions import interventions_on

logger = logging.getLogger(__name__)


def use_lm_eval_logging() -> None:
    """Log at lm-eval's level and with its handlers, unless the program has set up logging itself."""
    package, lm_eval = logging.getLogger("lmeval_prune"), logging.getLogger("lm_eval")
    if logging.getLogger().handlers or package.handlers or not lm_eval.handlers:
        return
    package.setLevel(lm_eval.level)
    for handler in lm_eval.handlers:
        package.addHandler(handler)


def log_interventions(lm: Any, model: nn.Module) -> None:
    """Log each intervention on the model of `lm`."""
    for intervention in interventions_on(model):
        logger.info("applied: %s", intervention.summary(lm.model_map))
