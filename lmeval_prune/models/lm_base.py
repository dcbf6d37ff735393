"""Base classes of the package's lm-eval models, and their logging."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.api.model import LM

from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError, first_line, print_input_errors
from lmeval_prune.interventions import interventions_on

logger = logging.getLogger(__name__)


class CheckedArgumentsLM(LM):
    """A model that refuses `--use_cache`, which keys an answer by its prompt and settings alone."""

    why_no_cache = "--use_cache does not know what answers depend on; leave it out"

    @print_input_errors
    def set_cache_hook(self, cache_hook: Any) -> None:
        """Set lm-eval's cache hook; refuse that of `--use_cache`."""
        if getattr(cache_hook, "dbdict", None) is not None:
            raise InputError(self.why_no_cache)
        super().set_cache_hook(cache_hook)


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

    @print_input_errors
    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template of this name (True: the default); `InputError` if the tokenizer has none."""
        try:
            template = super().chat_template(chat_template)
        except ValueError as error:
            raise InputError(f"apply_chat_template={chat_template}: {first_line(error)}") from None
        if chat_template and template is None:
            raise InputError("the tokenizer has no chat template; leave out apply_chat_template")
        return template

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


def use_lm_eval_logging() -> None:
    """Log at lm-eval's level and with its handlers, unless the program has set up logging itself."""
    package, lm_eval = logging.getLogger("lmeval_prune"), logging.getLogger("lm_eval")
    if logging.getLogger().handlers or package.handlers or not lm_eval.handlers:
        return
    package.setLevel(lm_eval.level)
    for handler in lm_eval.handlers:
        package.addHandler(handler)


def log_interventions(lm: Any, model: torch.nn.Module) -> None:
    """Log each intervention on the model of `lm`."""
    for intervention in interventions_on(model):
        logger.info("applied: %s", intervention.summary(lm.model_map))
