"""Refuses in one line what lm-eval's command line and model_args both name."""

from __future__ import annotations

from typing import Any

from lm_eval.api.model import LM
from lm_eval.utils import simple_parse_args_string

from lmeval_prune.errors import InputError, reported


class GivenOnce(LM):
    """A model class that takes each of its arguments once: from model_args, or from lm-eval's own option."""

    @classmethod
    @reported
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
        """Make a model of model_args and of lm-eval's own options.

        Raises:
            InputError: both give the same argument.
        """
        for name, value in (additional_config or {}).items():
            if value is not None and name in arg_dict:
                raise InputError(f"{name}= is lm-eval's own option: write --{name} {arg_dict[name]}, not model_args")
        return super().create_from_arg_obj(arg_dict, additional_config)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
        """Make a model of a text; see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)
