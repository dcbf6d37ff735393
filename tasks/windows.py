"""A perplexity task with a fixed sequence length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval.api.task import ConfigurableTask

from lmeval_prune.errors import InputError, print_input_errors


def check_window(config: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> None:
    """Refuse a run of a task with windows, given by its configuration, whose `max_length` is another number."""
    window, length = config["window"], (metadata or {}).get("max_length")
    if str(length) != str(window):
        raise InputError(
            f"{config.get('task')} at sequence length {window} needs max_length={window} among the --model_args "
            f"(in Python also metadata={{'max_length': {window}}}); max_length is {length or 'not given'}"
        )


class WindowedTask(ConfigurableTask):
    """A rolling log-likelihood task with windows of `window` tokens; `InputError` if `max_length` is another number.

    The model cuts the windows at its `max_length`. The task reads it from the run's metadata, to which lm-eval adds the
    model_args.
    """

    @print_input_errors
    def __init__(self, config: dict[str, Any]) -> None:
        check_window(config, config.get("metadata"))
        super().__init__(config={key: value for key, value in config.items() if key not in ("class", "window")})
