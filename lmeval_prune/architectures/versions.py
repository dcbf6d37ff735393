"""Say once that the installed transformers is newer than the newest that the tests have run with.

An upper bound in `pyproject.toml` would keep the package out of environments that need a newer release; none at all
would hide where an unexpected refusal comes from. What is wrong is not silent: families are proven before weights are
loaded, and the decoding engine compares its logits with the model's.
"""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger(__name__)
NEWEST_TESTED = (5, 24)  # release of transformers, by its first two numbers


@cache
def warn_if_untested(installed: str) -> None:
    """Log a warning, once, if a version of transformers is newer than the newest tested release."""
    if tuple(map(int, installed.split(".")[:2])) > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        logger.warning(
            "transformers %s is newer than %s, the newest that this version of lmeval-prune was tested with; if a "
            "model is refused or fails, try transformers %s",
            *(installed, newest, newest),
        )
