"""Base classes of the package's lm-eval models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.utils import handle_arg_string

from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError, print_input_errors

TWO_STORES = "--use_cache and responses= both store answers; give one of them"


class CheckedArgumentsLM(LM):
    """A model that refuses model_args which repeat an option of lm-eval's command line, such as `--batch_size`.

    Attributes:
        why_no_cache: (class variable) why `--use_cache` is refused; empty if it is not.
    """

    why_no_cache = ""

    @classmethod
    @print_input_errors
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
        """Create a model from model_args and lm-eval's options; `InputError` if both set an argument."""
        for name, value in (additional_config or {}).items():
            if value is not None and name in arg_dict:
                raise InputError(f"{name}= is lm-eval's own option: write --{name} {arg_dict[name]}, not model_args")
        return super().create_from_arg_obj(arg_dict, additional_config)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
        """Create a model from a string of model_args, in which a list is written `[…]`; see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(parse_arguments(arg_string), additional_config)

    @print_input_errors
    def set_cache_hook(self, cache_hook: Any) -> None:
        """Set lm-eval's cache hook; refuse that of `--use_cache` if this model has to."""
        if self.why_no_cache and getattr(cache_hook, "dbdict", None) is not None:
            raise InputError(self.why_no_cache)
        super().set_cache_hook(cache_hook)


def parse_arguments(text: str | None) -> dict[str, Any]:
    """Parse `NAME=VALUE,NAME=VALUE` as lm-eval does, but for the commas inside brackets, which belong to a value."""
    parts: list[str] = []
    for piece in (text or "").strip().split(","):
        if parts and parts[-1].count("[") > parts[-1].count("]"):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    pairs = (part.partition("=") for part in parts if part)
    return {name: handle_arg_string(value) for name, _, value in pairs}


class AnsweringLM(CheckedArgumentsLM):
    """A model whose `answering` (an `Answering`) answers requests, from the answer store if there is one.

    Attributes:
        answering: answers the requests.
        store_rank: number of this process in an answer store; see `AnswerStore`.
    """

    answering: Any
    store_rank: Any = 0

    def check_requests(self, kind: str, requests: list[Any]) -> None:
        """Refuse requests that the model cannot answer."""

    def answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Answer requests of a kind, the name of lm-eval's method; a subclass changes all kinds here."""
        return list(self.answering.answer(kind, requests, disable_tqdm))

    @print_input_errors
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a text for each request."""
        return self.answer("generate_until", requests, disable_tqdm)

    @print_input_errors
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would generate it."""
        return self.answer("loglikelihood", requests, disable_tqdm)

    @print_input_errors
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return the log-likelihood of each text."""
        return self.answer("loglikelihood_rolling", requests, disable_tqdm)

    def gather_from_ranks(self, value: Any) -> list[Any]:
        """Return the value of each process, in the order of ranks."""
        return [value]

    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is true on some process."""
        if self.world_size <= 1:
            return flag
        return bool(self.all_gather(torch.tensor([int(flag)], device=self.device)).max())


@contextmanager
def report_answers(lm: LM, report: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Call a function with the kind, arguments and response of each request that a model reports to its cache hook."""
    hook = lm.cache_hook

    def add_partial(attr: str, req: Any, res: Any) -> None:
        report(attr, req, res)
        hook.add_partial(attr, req, res)

    with replaced(lm, cache_hook=SimpleNamespace(add_partial=add_partial)):
        yield
