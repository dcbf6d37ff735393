"""A perplexity task that holds for one sequence length only."""

from __future__ import annotations

from typing import Any

from lm_eval.api.task import ConfigurableTask

from lmeval_prune.errors import InputError, print_input_errors


class WindowedTask(ConfigurableTask):
    """A rolling log-likelihood task whose windows must have `window` tokens.

    The model cuts the windows, by its `max_length`; a task learns that only from the run's metadata, in which
    lm-eval puts the model_args.

    Raises:
        InputError: `max_length` is not known, or is not `window`.
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
