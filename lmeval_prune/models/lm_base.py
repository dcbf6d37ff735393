"""Bases of our model classes of lm-eval's."""

from __future__ import annotations

from typing import Any

from lm_eval.api.model import LM
from lm_eval.utils import simple_parse_args_string

from lmeval_prune.errors import InputError, print_input_errors


class CheckedArgumentsLM(LM):
    """A model class that takes each of its arguments once: from model_args, or from lm-eval's own option."""

    @classmethod
    @print_input_errors
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
        """Make a model of model_args and of lm-eval's own options; `InputError` if both give the same argument."""
        for name, value in (additional_config or {}).items():
            if value is not None and name in arg_dict:
                raise InputError(f"{name}= is lm-eval's own option: write --{name} {arg_dict[name]}, not model_args")
        return super().create_from_arg_obj(arg_dict, additional_config)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
        """Make a model of a text; see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)


class AnsweringLM(CheckedArgumentsLM):
    """A model class whose `answering` answers requests, from the answer store where there is one."""

    answering: Any
    store_rank: Any = 0  # by which this process writes into a store; see `AnswerStore`

    def check_requests(self, kind: str, requests: list[Any]) -> None:
        """Refuse requests that the model cannot answer."""

    @print_input_errors
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a text for each request."""
        return list(self.answering.answer("generate_until", requests, disable_tqdm))

    @print_input_errors
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihoods of given texts, and whether each is what greedy decoding gives."""
        return list(self.answering.answer("loglikelihood", requests, disable_tqdm))

    @print_input_errors
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts."""
        return list(self.answering.answer("loglikelihood_rolling", requests, disable_tqdm))

    def gather_from_ranks(self, value: Any) -> list[Any]:
        """Return a value of each process, in the order of ranks."""
        return [value]

    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is true in some process."""
        return flag
