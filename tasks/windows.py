"""A perplexity task with a fixed sequence length."""

from __future__ import annotations

from typing import Any

from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.tasks.compat import RollingTask


class WindowedTask(RollingTask):
    """A rolling log-likelihood task with windows of `window` tokens; `InputError` if `max_length` is another number.

    The model cuts the windows at its `max_length`. The task reads it from the run's metadata, to which lm-eval adds the
    model_args.
    """

    @print_input_errors
    def __init__(self, config: dict[str, Any]) -> None:
        window = config["window"]
        length = (config.get("metadata") or {}).get("max_length")
        if str(length) != str(window):
            raise InputError(
                f"{config.get('task')} at sequence length {window} needs max_length={window} among the --model_args "
                f"(in Python also metadata={{'max_length': {window}}}); max_length is {length or 'not given'}"
            )
        super().__init__(config={key: value for key, value in config.items() if key not in ("class", "window")})
