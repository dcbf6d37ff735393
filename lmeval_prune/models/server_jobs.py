"""Makes requests to servers of requests of lm-eval's, and reads the servers' answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from lm_eval import utils
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError, did_you_mean
from lmeval_prune.models import generation
from lmeval_prune.models.dispatch import Job
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.models.http_client import Failure, log_probability
from lmeval_prune.models.lengths import Ending

logger = logging.getLogger(__name__)
SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # `hf`'s, where nobody says anything
WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
Scored = tuple[float, bool]
Done = Callable[[int, Any], None]


class Text(str):
    """A text that a server gives."""

    ending: Ending | None = None  # where the server says


class NoText(Text):
    """Stands for a text that a server does not give."""


def seed_of(seed: int, repeat: int) -> int:
    """Return the seed of a drawn try; of neighbouring seeds of runs, no two tries share one."""
    return int(digest([seed, repeat]), 16) & 0x7FFFFFFF


class Jobs:
    """Asks for texts and log-likelihoods, for a `PrunedServerLM`."""

    def __init__(self, lm: Any) -> None:
        self.lm = lm
        self._warned = False
        self._tokens = lru_cache(maxsize=4096)(lm.tok_encode)  # variant by variant, the same prompts come again

    def generate(self, requests: Sequence[Any], repeats: Sequence[int], done: Done, show: bool) -> list[Any]:
        """Ask for texts; arguments as of `generation.generate_until`."""
        pairs = zip(requests, repeats, strict=True)
        return self._ask([self._generation(*pair, index) for index, pair in enumerate(pairs)], done, show)

    def score(self, requests: Sequence[Any], show: bool) -> list[Scored]:
        """Ask for log-likelihoods of requests: texts (or None), context tokens and continuation tokens of each.

        Each is reported to lm-eval's cache hook as it comes.
        """

        def done(index: int, response: Scored) -> None:
            if requests[index][0] is not None:
                self.lm.cache_hook.add_partial("loglikelihood", requests[index][0], response)

        jobs = [
            self._scoring(f"the text that ends in {''.join(texts)[-60:]!r}", context, continuation, index)
            for index, (texts, context, continuation) in enumerate(requests)
        ]
        return self._ask(jobs, done, show)

    def score_whole(self, requests: Sequence[Any], show: bool) -> list[float]:
        """Ask for log-likelihoods of whole texts, window by window; each is reported with its last window."""
        windows = [(number, window) for number, each in enumerate(requests) for window in self._windows(each.args[0])]
        left, sums = [0] * len(requests), [0.0] * len(requests)
        for number, _ in windows:
            left[number] += 1

        def done(index: int, response: Scored) -> None:
            number, _ = windows[index]
            sums[number] += response[0]
            left[number] -= 1
            if not left[number]:
                self.lm.cache_hook.add_partial("loglikelihood_rolling", requests[number].args, sums[number])

        jobs = [
            self._scoring(_name(requests[number]), context, continuation, index)
            for index, (number, (context, continuation)) in enumerate(windows)
        ]
        self._ask(jobs, done, show)
        return sums

    def cut(self, kind: str, request: Any) -> int | None:
        """Return to how many tokens a request is cut; None if it is not."""
        if kind != "generate_until":
            return int(self.lm.max_length)
        if self.lm.chat or not request.args[0]:
            return None
        room = self.lm.max_length - normalize_gen_kwargs(request.args[1], self.lm.max_gen_toks)["max_gen_toks"]
        return int(room) if len(self._tokens(request.args[0])) > room else None

    def _ask(self, jobs: list[Job], done: Done, show: bool) -> list[Any]:
        """Return responses by index; variant by variant, so that few are in use at a time."""
        responses: dict[int, Any] = {}

        def keep(job: Job, response: Any) -> None:
            responses[job.index] = response
            done(job.index, response)

        self.lm.dispatcher.run(sorted(jobs, key=lambda job: str(job.variant)), keep, show)
        return [responses[index] for index in range(len(jobs))]

    # ------------------------------------------------------------------ texts

    def _generation(self, request: Any, repeat: int, index: int) -> Job:
        lm, name, router = self.lm, _name(request), self.lm.arguments.router
        context, settings = request.args[:2]
        if len(request.args) > 2:
            raise InputError(f"{name}: it has more than a text; pruned-server sends texts only")
        sampled = generation.is_sampling(settings) and not router
        options: dict[str, Any] = dict(
            normalize_gen_kwargs(settings if sampled else generation.without_sampling(settings), lm.max_gen_toks)
        )
        until = handle_stop_sequences(options.pop("until", None), eos=lm.eos_string)
        length, drawn = options.pop("max_gen_toks"), bool(options.pop("do_sample", False))
        payload: dict[str, Any] = {"max_tokens": length, "stop": until, **self._sampling(options, drawn)}
        payload["seed"] = seed_of(lm.seed, repeat) if drawn else lm.seed
        prompt = self._prompt(name, context, length)
        variant = lm.answering.variant(router.head(request, repeat) if router else DENSE)

        def text(body: dict[str, Any]) -> Text:
            answer = self._text(body)
            if answer is None:
                self._warn_of_no_text(name)
                return NoText()
            processed = Text(postprocess_generated_text(answer, until, lm.think_end_token))
            processed.ending = _ending(body)
            return processed

        path = "/v1/chat/completions" if lm.chat else "/v1/completions"
        return Job(path, lambda: {**payload, **prompt()}, variant, text, name, index=index)

    def _sampling(self, settings: dict[str, Any], drawn: bool) -> dict[str, Any]:
        """Return settings of generation as `hf` would have them: the task's, then the model's, then its defaults."""
        kind = self.lm.kind
        model = {name: value for name, value in self.lm.checkpoint.generation_config.items() if value is not None}
        chosen = {"repetition_penalty": model.get("repetition_penalty", 1.0), **settings}
        if drawn:
            chosen = {**{name: model.get(name, usual) for name, usual in SAMPLING.items()}, **chosen}
            chosen["top_k"] = chosen["top_k"] or -1  # 0 is all in `hf`, and an error elsewhere
        else:
            chosen["temperature"] = 0.0
        chosen = {name: value for name, value in chosen.items() if WITHOUT_EFFECT.get(name, ()) != value}
        for name in chosen:
            if name not in kind.settings:
                known = sorted(kind.settings)
                source = "the model's own " if name not in settings else ""
                raise InputError(
                    f"{source}generation setting {name}={chosen[name]} cannot be sent to server={kind.name}"
                    f"{did_you_mean(name, known)}; it takes {', '.join(known)}: change gen_kwargs"
                )
        return chosen

    def _prompt(self, name: str, context: Any, length: int) -> Callable[[], dict[str, Any]]:
        """Return what makes the prompt when it is sent."""
        if self.lm.chat:
            if not isinstance(context, JsonChatStr):
                raise InputError(
                    "pruned-server-chat asks chats: add --apply_chat_template, or use --model pruned-server"
                )
            template = self.lm.api.template_arguments
            more = {"chat_template_kwargs": template} if template else {}
            return lambda: {"messages": json.loads(context.prompt), **more}
        if not context:
            raise InputError(f"{name}: the prompt is empty")
        room = self.lm.max_length - length
        if room <= 0:
            raise InputError(f"max_gen_toks={length} leaves no room for a prompt in max_length={self.lm.max_length}")
        return lambda: {"prompt": self._tokens(context)[-room:]}

    def _text(self, body: dict[str, Any]) -> str | None:
        """Return the text of an answer; None if the server says that there is none."""
        choices = _choices(body)
        texts = {choice["message"]["content"] if self.lm.chat else choice["text"] for choice in choices}
        if len(texts) != 1:
            raise Failure(f"it gives {len(texts)} answers to one request")
        if any(choice.get("finish_reason") in ("abort", "error") for choice in choices):
            raise Failure("it broke off its answer")
        (text,) = texts
        if not isinstance(text, str | None):
            raise Failure("its answer is no text")
        return text

    def _warn_of_no_text(self, name: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: the server gives no text (content is null), as a reasoning parser does of thoughts without an end;"
                " such answers count as empty and are not stored: give more max_gen_toks, or start it without parser",
                name,
            )

    # ------------------------------------------------------------------ log-likelihoods

    def _scoring(self, name: str, context: list[int], continuation: list[int], index: int) -> Job:
        lm = self.lm
        tokens = [*context, *continuation][-(lm.max_length - 1) :]  # a token more is generated
        length = len(tokens) - len(continuation)
        if length < 1:
            raise InputError(f"a text of {len(continuation)} tokens cannot be scored within max_length={lm.max_length}")

        def score(body: dict[str, Any]) -> Scored:
            (choice,) = body["choices"]
            logprobs, best = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            for count in (len(logprobs), len(best)):
                if count != len(tokens) + 1:
                    raise Failure(f"it scores {count - 1} tokens of a text that has {len(tokens)}")
            for value in [*logprobs[1:], *(value for top in best[1:] for value in top.values())]:  # the first has none
                log_probability(value)
            ((value, greedy),) = lm.parse_logprobs(body, ctxlens=[length])
            return float(value), bool(greedy)

        payload = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        payload |= {"return_tokens_as_token_ids": True}  # texts of two tokens can be the same
        return Job("/v1/completions", lambda: payload, lm.answering.variant(), score, name, index=index)

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        windows = utils.get_rolling_token_windows(
            token_list=self.lm.tok_encode(text),
            prefix_token=self.lm.prefix_token_id,
            max_seq_len=self.lm.max_length - 2,  # a token more is read, and one generated
            context_len=1,
        )
        return list(map(utils.make_disjoint_window, windows))


def _choices(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [choice for choice in body["choices"] if choice.get("index", 0) == 0]


def _ending(body: dict[str, Any]) -> Ending | None:
    """Return how a text ended, where the server says how many tokens there are and why it ended."""
    reasons = {choice.get("finish_reason") for choice in _choices(body)}
    length = (body.get("usage") or {}).get("completion_tokens")
    if isinstance(length, int) and 0 <= length < 1 << 31 and None not in reasons:
        return Ending(length, "length" in reasons)
    return None


def _name(request: Any) -> str:
    return f"task {request.task_name}, document {request.doc_id}"
