"""Translate lm-eval's requests into server requests, and parse the answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from lm_eval import utils
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from lmeval_prune.artefacts import digest
from lmeval_prune.decoding.request import logits_settings
from lmeval_prune.errors import InputError, did_you_mean
from lmeval_prune.models import generation
from lmeval_prune.models.dispatch import Job
from lmeval_prune.models.http_client import RejectedError, RetryableError, log_probability
from lmeval_prune.models.lengths import Ending

logger = logging.getLogger(__name__)
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # of `hf`
NO_EFFECT = {
    **{"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
    **{"renormalize_logits": True, "remove_invalid_values": True},
}
MISSING_TEXT_WARNING = (
    "%s: the server gives an answer without text (content is null), as reasoning parsers do if the thoughts do not "
    "end; such answers count as empty and are not stored: give more max_gen_toks, or start the server without a parser"
)
CUT_WARNING = (
    "%s: its text of %d tokens is cut to the last %d, and others may be, because the server's context has %d tokens "
    "and the model's %d: start the server with a longer one"
)
LogLikelihood = tuple[float, bool]  # and whether the text is what greedy decoding generates
OnResult = Callable[[int, Any], None]  # called with the index of a request and its result


class GeneratedText(str):
    """A generated text."""

    ending: Ending | None = None  # if the server reports it


class MissingText(GeneratedText):
    """An empty text, for an answer whose content is null."""


def sampling_seed(seed: int, attempt: int) -> int:
    """Return the seed of an attempt; runs with neighbouring seeds draw differently."""
    return int(digest([seed, attempt]), 16) & 0x7FFFFFFF


class ServerClient:
    """Generates texts and scores log-likelihoods for a `PrunedServerLM`."""

    def __init__(self, lm: Any) -> None:
        self.lm = lm
        self._warned_missing_text = self._warned_cut = False
        self._encode = lru_cache(maxsize=4096)(lm.tok_encode)  # each variant has the same prompts

    def generate(
        self, requests: Sequence[Any], repeats: Sequence[int], on_text: OnResult, show_progress: bool
    ) -> list[GeneratedText]:
        """Generate a text for each request; see `generation.generate_until`."""
        pairs = zip(requests, repeats, strict=True)
        jobs = [self._generation_job(request, repeat, index) for index, (request, repeat) in enumerate(pairs)]
        return self._run(jobs, on_text, show_progress)

    def score(self, requests: Sequence[Any], show_progress: bool) -> list[LogLikelihood]:
        """Score requests of texts (or None), context tokens and continuation tokens; fill lm-eval's cache hook."""

        def on_score(index: int, score: LogLikelihood) -> None:
            if requests[index][0] is not None:
                self.lm.cache_hook.add_partial("loglikelihood", requests[index][0], score)

        jobs = [
            self._scoring_job(f"the text that ends in {''.join(texts)[-60:]!r}", context, continuation, index)
            for index, (texts, context, continuation) in enumerate(requests)
        ]
        return self._run(jobs, on_score, show_progress)

    def score_rolling(self, requests: Sequence[Any], show_progress: bool) -> list[Any]:
        """Score whole texts window by window; fill lm-eval's cache hook after the last window of each text."""
        windows = [
            (number, window) for number, request in enumerate(requests) for window in self._windows(request.args[-1])
        ]
        remaining, sums = [0] * len(requests), [0.0] * len(requests)
        for number, _ in windows:
            remaining[number] += 1

        def on_score(index: int, score: LogLikelihood) -> None:
            number, _ = windows[index]
            sums[number] += score[0]
            remaining[number] -= 1
            if not remaining[number]:
                self.lm.cache_hook.add_partial("loglikelihood_rolling", requests[number].args, sums[number])

        jobs = [
            self._scoring_job(_request_name(requests[number]), context, continuation, index)
            for index, (number, (context, continuation)) in enumerate(windows)
        ]
        self._run(jobs, on_score, show_progress)
        return sums

    def truncated_length(self, kind: str, request: Any) -> int | None:
        """Return the number of tokens that a request is truncated to; None if it fits."""
        if kind != "generate_until":
            return int(self.lm.max_length)
        if self.lm.chat or not request.args[0]:
            return None
        room = self.lm.max_length - normalize_gen_kwargs(request.args[1], self.lm.max_gen_toks)["max_gen_toks"]
        return int(room) if len(self._encode(request.args[0])) > room else None

    def _run(self, jobs: list[Job], on_result: OnResult, show_progress: bool) -> list[Any]:
        """Run jobs variant by variant, so that few adapters are in use at a time; return results by index."""
        jobs.sort(key=lambda job: str(job.variant))
        return list(self.lm.dispatcher.run(jobs, on_result, show_progress))

    # ------------------------------------------------------------------ generation

    def _generation_job(self, request: Any, repeat: int, index: int) -> Job:
        lm, name = self.lm, _request_name(request)
        context, settings = request.args
        attempt = lm.answering.attempt(request, repeat)
        if lm.arguments.router or not generation.is_sampling(settings):
            settings = generation.without_sampling(settings)
        options: dict[str, Any] = dict(normalize_gen_kwargs(settings, lm.max_gen_toks))
        until = handle_stop_sequences(options.pop("until", None), eos=lm.eos_string)
        length, is_sampled = options.pop("max_gen_toks"), bool(options.pop("do_sample", False))
        sampling = lm.kind.sampling_fields(self._sampling_settings(options, is_sampled), is_sampled, lm.max_length)
        payload: dict[str, Any] = {"max_tokens": length, "stop": until, **sampling}
        payload["seed"] = lm.seed
        if is_sampled:
            payload["seed"] = sampling_seed(lm.seed, repeat)
        beginning = _beginning(context)
        prompt = self._prompt(name, context, length, bool(beginning))
        parse = partial(self._parse_generated, name=name, beginning=beginning, until=until, length=length)
        path = "/v1/chat/completions" if lm.chat else "/v1/completions"
        variant = lm.answering.variant(attempt)
        return Job(path, lambda: {**payload, **prompt()}, variant, parse, name, index)

    def _sampling_settings(self, settings: dict[str, Any], is_sampled: bool) -> dict[str, Any]:
        """Complete a task's settings as `hf` does: with the model's generation config, then with `hf`'s defaults."""
        kind = self.lm.kind
        model = {name: value for name, value in self.lm.checkpoint.generation_config.items() if value is not None}
        model_settings = {**logits_settings(model), **{name: model[name] for name in NO_EFFECT if name in model}}
        # without settings that are switched off
        model_settings = {name: x for name, x in model_settings.items() if x or name in SAMPLING_DEFAULTS}
        result = {**(model_settings if is_sampled else generation.without_sampling(model_settings)), **settings}
        result.pop("do_sample", None)
        if is_sampled:
            result = {**{name: model.get(name, default) for name, default in SAMPLING_DEFAULTS.items()}, **result}
            result["top_k"] = result["top_k"] or -1  # "no limit" is 0 in `hf`, -1 in servers
        else:
            result["temperature"] = 0.0
        result = {name: value for name, value in result.items() if value not in (None, NO_EFFECT.get(name))}
        for name in result:
            if name not in kind.generation_settings:
                accepted = sorted(kind.generation_settings)
                source = "the model's own " if name not in settings else ""
                raise InputError(
                    f"{source}generation setting {name}={result[name]} cannot be sent to server={kind.name}"
                    f"{did_you_mean(name, accepted)}; it takes {', '.join(accepted)}: change gen_kwargs"
                )
        return result

    def _prompt(self, name: str, context: Any, length: int, has_beginning: bool) -> Callable[[], dict[str, Any]]:
        """Return a function that builds the prompt when it is sent; a chat may end with the beginning of its answer."""
        if self.lm.chat:
            template = self.lm.options.template_arguments
            extra = {"chat_template_kwargs": template} if template else {}
            extra |= self.lm.kind.continuation if has_beginning else {}
            return lambda: {"messages": json.loads(context.prompt), **extra}
        room = generation.prompt_room(self.lm, length)

        def prompt() -> dict[str, Any]:
            tokens = self._encode(context)
            self._note_cut(name, len(tokens), room)
            return {"prompt": tokens[-room:]}

        return prompt

    def _note_cut(self, name: str, length: int, room: int) -> None:
        """Warn once of a text that a server's context cuts, where the model's own would not."""
        lacking = self.lm.model_length - self.lm.max_length
        if self._warned_cut or not 0 < length - room <= lacking:
            return
        self._warned_cut = True
        logger.warning(CUT_WARNING, name, length, room, self.lm.max_length, self.lm.model_length)

    def _parse_generated(
        self, body: dict[str, Any], name: str, beginning: str, until: list[str], length: int
    ) -> GeneratedText:
        answer = self._parse_text(body)
        if answer is None:
            if not self._warned_missing_text:
                logger.warning(MISSING_TEXT_WARNING, name)
            self._warned_missing_text = True
            return MissingText()
        if self.lm.kind.repeats_beginning:
            answer = answer.removeprefix(beginning)
        text = GeneratedText(postprocess_generated_text(answer, until, self.lm.think_end_token))
        text.ending = _parse_ending(body)
        if text.ending and text.ending.cut_off and text.ending.length < length:
            raise RejectedError(
                f"it ends its answer after {text.ending.length} of {length} tokens, without an end token: its context "
                f"is full, or it has a limit of its own (llama.cpp: --predict); start it with a larger one, or give a "
                f"smaller max_length= or max_gen_toks"
            )
        return text

    def _parse_text(self, body: dict[str, Any]) -> str | None:
        choices = _first_choices(body)
        texts = {choice["message"]["content"] if self.lm.chat else choice["text"] for choice in choices}
        if len(texts) != 1:
            raise RetryableError(f"it gives {len(texts)} answers to one request")
        if any(choice.get("finish_reason") in ("abort", "error") for choice in choices):
            raise RetryableError("it aborted its answer")
        (text,) = texts
        if not isinstance(text, str | None):
            raise RetryableError("its answer is not a text")
        return text

    # ------------------------------------------------------------------ log-likelihoods

    def _scoring_job(self, name: str, context: list[int], continuation: list[int], index: int) -> Job:
        lm = self.lm
        room = lm.max_length - 1  # the server generates one more token
        self._note_cut(name, len(context) + len(continuation), room)
        tokens = [*context, *continuation][-room:]
        length = len(tokens) - len(continuation)
        if length < 1:
            raise InputError(f"a text of {len(continuation)} tokens cannot be scored within max_length={lm.max_length}")

        def parse(body: dict[str, Any]) -> LogLikelihood:
            (choice,) = body["choices"]
            logprobs, best = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            for count in (len(logprobs), len(best)):
                if count != len(tokens) + 1:
                    raise RetryableError(f"it scores {count - 1} tokens of a text that has {len(tokens)}")
            # the first token has no log-probability
            for value in [*logprobs[1:], *(value for top in best[1:] for value in top.values())]:
                log_probability(value)
            ((value, is_greedy),) = lm.parse_logprobs(body, ctxlens=[length])
            return float(value), bool(is_greedy)

        payload = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        payload |= {"return_tokens_as_token_ids": True}  # different tokens can have the same text
        return Job("/v1/completions", lambda: payload, lm.answering.variant(), parse, name, index)

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        windows = utils.get_rolling_token_windows(
            token_list=self.lm.tok_encode(text),
            prefix_token=self.lm.prefix_token_id,
            max_seq_len=self.lm.max_length - 2,  # one token is context, and the server generates one
            context_len=1,
        )
        return list(map(utils.make_disjoint_window, windows))


def _beginning(context: Any) -> str:
    """Return the beginning of the answer (a task's `gen_prefix`) that a chat ends with; empty for other prompts."""
    last = json.loads(context.prompt)[-1] if isinstance(context, JsonChatStr) else {}
    return str(last["content"]) if last.get("role") == "assistant" else ""


def _first_choices(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [choice for choice in body["choices"] if choice.get("index", 0) == 0]


def _parse_ending(body: dict[str, Any]) -> Ending | None:
    """Return the number of generated tokens and whether they were cut off; None if the server does not report both."""
    reasons = {choice.get("finish_reason") for choice in _first_choices(body)}
    length = (body.get("usage") or {}).get("completion_tokens")
    if isinstance(length, int) and 0 <= length < 1 << 31 and None not in reasons:
        return Ending(length, "length" in reasons)
    return None


def _request_name(request: Any) -> str:
    return f"task {request.task_name}, document {request.doc_id}"
