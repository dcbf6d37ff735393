"""What we log is heard where lm-eval's is."""

from __future__ import annotations

import logging


def as_lm_eval_does() -> None:
    """Log at lm-eval's level and by its handlers, unless a program has set up logging itself."""
    ours, theirs = logging.getLogger("lmeval_prune"), logging.getLogger("lm_eval")
    if logging.getLogger().handlers or ours.handlers or not theirs.handlers:
        return
    ours.setLevel(theirs.level)
    for handler in theirs.handlers:
        ours.addHandler(handler)
