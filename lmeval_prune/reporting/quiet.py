"""Silence what libraries print that tells the user of a command nothing; their other messages stay."""

from __future__ import annotations

import logging
import sys
import warnings


def _is_no_hint(record: logging.LogRecord) -> bool:
    """Return whether a message does not repeat what the user typed."""
    return "specified through cli, these settings will update" not in str(record.msg)


def silence_libraries() -> None:
    """Silence the bars of loading weights, a hint of lm-eval, and warnings of deprecation; bars of downloads stay."""
    logging.getLogger("lm_eval.evaluator").addFilter(_is_no_hint)  # once, however often this is called
    for category in () if sys.warnoptions else (DeprecationWarning, FutureWarning):  # -W is the user's choice
        warnings.simplefilter("ignore", category)
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    has_downloads = not are_progress_bars_disabled()
    disable_progress_bar()  # the hub's, too
    if has_downloads:
        enable_progress_bars()
