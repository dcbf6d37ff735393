"""Silence what libraries print that tells the user of a command nothing; their other messages stay."""

from __future__ import annotations

import logging
import sys
import warnings

# by logger, parts of messages that repeat what the user typed
HINTS = {"lm_eval.evaluator": ("specified through cli, these settings will update",)}


class _WithoutHints(logging.Filter):
    """Drops the messages of `HINTS`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a message is shown."""
        return not any(hint in str(record.msg) for hint in HINTS.get(record.name, ()))


_FILTER = _WithoutHints()


def silence_libraries() -> None:
    """Silence the bars of loading weights, hints of lm-eval, and warnings of deprecation; bars of downloads stay."""
    for name in HINTS:
        logging.getLogger(name).addFilter(_FILTER)  # the same one once, however often this is called
    for category in () if sys.warnoptions else (DeprecationWarning, FutureWarning):  # -W is the user's choice
        warnings.simplefilter("ignore", category)
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    has_downloads = not are_progress_bars_disabled()
    disable_progress_bar()  # the hub's, too
    if has_downloads:
        enable_progress_bars()
