"""`--model pruned-server`: lm-eval's model class for servers, with variants that vLLM, SGLang or llama.cpp serve."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from lm_eval import utils
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from transformers import AutoConfig, GenerationConfig

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.artefacts import CREATED_BY, digest
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.identity import checkpoint_identity
from lmeval_prune.checkpoints.skeleton import UNREADABLE, skeleton
from lmeval_prune.errors import InputError, first_line, nearest, reported
from lmeval_prune.export.manifest import adapter_name, read_adapters
from lmeval_prune.interventions import HeadMask, Intervention, combined
from lmeval_prune.models import generation
from lmeval_prune.models.answer_store import Missing, Recorder, answer, occurrences
from lmeval_prune.models.answering import Answering
from lmeval_prune.models.arguments import Arguments, EngineOptions, our_names, read_fields
from lmeval_prune.models.dispatch import Dispatcher, Failure, Job, Server
from lmeval_prune.models.identity import config_fingerprint, tokenizer_fingerprint
from lmeval_prune.models.served import DENSE, Served, ServerOptions
from lmeval_prune.models.server_probe import Connection, Probe, model_name, reach
from lmeval_prune.models.tries import DENSE as UNPRUNED

eval_logger = logging.getLogger(__name__)
# lm-eval's own arguments that an answer depends on, and those that it does not
_ANSWERS = {"max_gen_toks", "add_bos_token", "tokenized_requests", "eos_string", "think_end_token"}
_OTHERS = {
    *("tokenizer", "trust_remote_code", "revision", "use_fast_tokenizer", "max_length", "custom_prefix_token_id"),
    *("verify_certificate", "ca_cert_path", "auth_token", "header", "batch_size", "max_batch_size", "device"),
}
Scored = tuple[float, bool]


class PrunedServerLM(LocalCompletionsAPI):
    """Asks servers that have adapters which take heads away (`lmeval-prune export adapter`).

    Args:
        base_url: of a server or several.
        arguments: the fields of `ServerOptions` (`models/served.py`); `heads`, `mask`, `router` and what belongs to it,
            `responses` as for `pruned-hf`; `tokenizer`, `max_gen_toks`, `max_length`, … as for `local-completions`.

    Raises:
        InputError: an argument cannot be used, or a server does not serve what it should.
    """

    chat = False

    @reported
    def __init__(self, base_url: Any = None, **arguments: Any) -> None:
        left = {"base_url": base_url, **arguments}
        self.options = ServerOptions(**read_fields(ServerOptions, {k: v for k, v in left.items() if v is not None}))
        others = {
            name: value for name, value in left.items() if name not in {one.name for one in fields(ServerOptions)}
        }
        self.given = Arguments.of(others)
        self._check(others)
        self.kind, self.seed = self.options.kind, self.options.seed
        path, self.config, self.model_map = self._local()
        self.adapters = read_adapters(self.options.adapters) if self.options.adapters else {}
        self.checkpoint, self.dtype = self._base(path), self._dtype()
        self.connection = Connection(self._headers(), self._verification(), self.options.timeout)
        servers = reach(self.kind, self.options.urls, self.connection)
        name = model_name(self.kind, servers, self.options.model)
        self._load(path, name, servers)
        options = (self.options.num_concurrent, self.options.max_retries, self.options.timeout)
        self.dispatcher = Dispatcher(self.kind, name, servers, self.header, *options, verify=self._verification())
        self.answering = ServedAnswering(self)
        try:
            variants = self.answering.variants()
            self._check_adapters(variants)
            if self.options.probe:
                Probe(self.dispatcher, self.tokenizer, self.connection).run(variants)
        except BaseException:
            self.answering.close()
            raise

    def close(self) -> None:
        """Release the answer store."""
        self.answering.close()

    # ------------------------------------------------------------------ getting ready

    def _check(self, others: dict[str, Any]) -> None:
        for each in fields(EngineOptions):
            if others.get(each.name) is not None:
                raise InputError(f"{each.name}= is for pruned-hf, which decodes itself; leave it out")
        for one in self.given.interventions:
            if not isinstance(one, HeadMask):
                raise InputError(
                    f"a server's adapters take heads away and nothing else: {type(one).__name__} cannot be served; "
                    f"give heads=, mask= or router=, or use pruned-hf"
                )
        for name in self.given.others:
            known = [*our_names(), *(one.name for one in fields(ServerOptions)), *_ANSWERS, *_OTHERS]
            if name not in known:
                raise InputError(f"unknown model_arg {name!r}{nearest(name, known) or '; leave it out'}")

    def _local(self) -> tuple[str, Any, ModelMap]:
        """Where the model can be read here, its configuration, and the model without weights."""
        given = self.given.others
        named = self.options.pretrained or given.get("tokenizer") or self.options.model
        if not named:
            raise InputError(
                "name the model that is served: pretrained=NAME_OR_FOLDER with its configuration and tokenizer"
            )
        path, trust = embedded.resolve(str(named)), bool(given.get("trust_remote_code"))
        embedded.check_name(path)
        try:
            config = AutoConfig.from_pretrained(path, revision=given.get("revision"), trust_remote_code=trust)
            bare = skeleton(config, trust_remote_code=trust)
        except UNREADABLE as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"cannot read the model {named} here ({first_line(error)}); give pretrained= of the one that is served"
            ) from error
        return path, config, map_model(bare, **self.given.description)

    def _base(self, path: str) -> str:
        """By what the model that is served is known: what the adapters were made from, or what is here."""
        made_from = {one["base"]["checkpoint"]: name for name, one in self.adapters.items()}
        if len(made_from) > 1:
            names = " and ".join(list(made_from.values())[:2])
            raise InputError(f"{self.options.adapters}: {names} were made from different models; export them again")
        for name, one in self.adapters.items():
            theirs, ours = one["base"]["heads"], self.model_map.signature()["heads"]
            if theirs != ours:
                raise InputError(
                    f"adapter {name} was made for {one['base']['name']}, which has other layers than {path}; another "
                    f"base model? Give pretrained= of the model that is served"
                )
        if made_from:
            return str(next(iter(made_from)))
        try:
            return checkpoint_identity(path, self.given.others.get("revision"))
        except InputError:  # only configuration and tokenizer are here
            return digest([Path(path).name, config_fingerprint(self.config)])

    def _dtype(self) -> str:
        given = str(self.options.dtype or "").removeprefix("torch.")
        made = {one["dtype"] for one in self.adapters.values()}
        if given and made and made != {given}:
            raise InputError(
                f"{self.options.adapters} was made for servers in {', '.join(sorted(made))}, not in dtype={given}; "
                f"export the adapters in the type in which the server computes"
            )
        found = given or (next(iter(made)) if len(made) == 1 else "")
        if not found and self.given.responses:
            raise InputError("answers that are kept need to name the type in which the servers compute: dtype=bfloat16")
        return found

    def _load(self, path: str, name: str, servers: Sequence[Server]) -> None:
        """lm-eval's own part, with the tokenizer."""
        theirs = {"tokenizer": path, "custom_prefix_token_id": None, **self.given.others}
        theirs["tokenizer"] = embedded.resolve(str(theirs["tokenizer"]))
        for ours in ("batch_size", "max_batch_size", "device", "max_length", "add_bos_token", "think_end_token"):
            theirs.pop(ours, None)
        url = f"{servers[0].url}/v1/{'chat/completions' if self.chat else 'completions'}"
        try:
            super().__init__(base_url=url, model=name, tokenizer_backend="huggingface", seed=self.seed, **theirs)
        except UNREADABLE as error:
            raise InputError(
                f"the tokenizer of {theirs['tokenizer']} cannot be loaded ({first_line(error)}); give tokenizer="
            ) from error
        given = self.given.others
        self.add_bos_token = given.get("add_bos_token")
        self.think_end_token = given.get("think_end_token")
        lengths = [one.listing.length for one in servers if one.listing.length]
        own = given.get("max_length") or resolve_max_length(self.config, self.tokenizer)
        self.max_length = min([int(own), *lengths])

    def _headers(self) -> dict[str, str]:
        given, key = self.given.others.get("header"), self.given.others.get("auth_token") or self.api_key
        return dict(given) if given else ({"Authorization": f"Bearer {key}"} if key else {})

    @cached_property
    def header(self) -> dict[str, str]:
        """Of each request."""
        return self._headers()

    def _verification(self) -> bool:
        return bool(self.given.others.get("verify_certificate", True))

    def _check_adapters(self, variants: Sequence[Served]) -> None:
        """Whether what will be asked for has been exported, if the folder is here."""
        wanted = "gguf" if self.kind.lists else "peft"
        for variant in variants:
            if not self.adapters or variant == DENSE:
                continue
            composed = self.kind.lists and variant.name not in self.adapters
            for name in variant.heads if composed else (variant.name,):
                if name not in self.adapters:
                    raise InputError(
                        f"{self.options.adapters} has no adapter {name}; write it with `lmeval-prune export adapter`, "
                        f"and start the server with it"
                    )
                if self.adapters[name]["format"] != wanted:
                    raise InputError(
                        f"adapter {name} is of another format than {self.kind.name} takes; export it as {wanted}"
                    )

    # ------------------------------------------------------------------ identity

    @property
    def store_rank(self) -> int | None:
        """By which number this process writes into a store of answers; see `AnswerStore`."""
        return 0

    @property
    def weights(self) -> str | None:
        """Fingerprint of the weights: not known here."""
        return None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """JSON value of all of the model that an answer depends on, beside the variant."""
        given = self.given.others.items()
        return {
            "server": self.kind.name + ("-chat" if self.chat else ""),
            "dtype": self.dtype,
            "checkpoint": self.checkpoint,
            "config": config_fingerprint(self.config),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "generation_config": self._generation_config(),
            "arguments": {key: str(value) for key, value in sorted(given) if key in _ANSWERS},
            "max_length": self.max_length,
        }

    def _generation_config(self) -> str:
        """What the server takes from the model's own settings."""
        try:
            found = GenerationConfig.from_pretrained(str(self.config._name_or_path)).to_dict()
        except OSError:
            return ""
        return digest({key: str(value) for key, value in found.items() if key != "transformers_version"})

    @property
    def outcomes_of(self) -> dict[str, Any]:
        """What outcomes of this model are known by beside `identity`: the adapters, by their content.

        Raises:
            InputError: the folder of adapters is not known.
        """
        if not self.adapters:
            raise InputError(
                "a sweep of a server names what was pruned: give adapters=FOLDER in model_args, as exported"
            )
        served = {each: one for variant in self.answering.variants() for each, one in self.hashes(variant).items()}
        return {"adapters": dict(sorted(served.items()))}

    def hashes(self, variant: Served) -> dict[str, str]:
        """Of the adapters of a variant, as far as they are known here, what they contain."""
        names = (variant.name,) if variant.name in self.adapters else variant.heads
        return {name: str(self.adapters[name]["hash"]) for name in names if name in self.adapters}

    def get_model_info(self) -> dict[str, Any]:
        """A section `pruning` for the results file: what was asked for."""
        heads = [head for one in self.given.interventions for head in one.resolve(self.model_map).heads]  # type: ignore[attr-defined]
        info: dict[str, Any] = {"created_by": CREATED_BY, **self.identity, "heads": heads}
        if self.adapters:
            info["adapters"] = {name: one["hash"] for name, one in self.adapters.items()}
        if self.given.tries:
            info["router"] = self.given.tries.info
        return {"pruning": info}

    # ------------------------------------------------------------------ prompts

    def tok_encode(
        self,
        string: Any,
        left_truncate_len: int | None = None,
        add_special_tokens: bool | None = None,
        truncation: bool = False,
        **_: Any,
    ) -> Any:
        """A text's tokens, as `hf` makes them."""
        special = add_special_tokens
        if special is None:
            special = False if has_bos_prefix(string, self.tokenizer.bos_token) else self.add_bos_token
        own = {} if special is None else {"add_special_tokens": special}
        found = self.tokenizer.encode(string, truncation=truncation, **own)
        return found[-left_truncate_len:] if left_truncate_len else found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Any:
        """A chat as the prompt's text, by the tokenizer's template.

        Raises:
            InputError: it has none.
        """
        ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            try:
                return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **ends)
            except jinja2.TemplateError:  # some know no system role; as `hf`
                others = [message for message in chat_history if message["role"] != "system"]
                return self.tokenizer.apply_chat_template(others, tokenize=False, **ends)
        except ValueError as error:
            raise InputError(_no_template(error)) from None

    @reported
    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template.

        Raises:
            InputError: it has none.
        """
        if chat_template and not getattr(self.tokenizer, "chat_template", None):
            raise InputError(_no_template(None))
        found: str | None = super().chat_template(chat_template)
        return found

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    # ------------------------------------------------------------------ answering

    @reported
    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse `--use_cache`, which would not tell variants apart.

        Raises:
            InputError: always, if there is such a cache.
        """
        if getattr(cache_hook, "dbdict", None) is not None:
            raise InputError("--use_cache cannot tell served variants apart; use responses=FOLDER among the model_args")
        super().set_cache_hook(cache_hook)

    @reported
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts, each try under its variant."""
        return self.answering.answer("generate_until", requests, disable_tqdm)

    @reported
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False, **_: Any) -> list[Scored]:
        """Log-likelihoods of given texts, where the server tells them.

        Raises:
            InputError: it does not.
        """
        self._check_scores(requests)
        return self.answering.answer("loglikelihood", requests, disable_tqdm)

    @reported
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, where the server tells them.

        Raises:
            InputError: it does not.
        """
        self._check_scores(requests)
        return self.answering.answer("loglikelihood_rolling", requests, disable_tqdm)

    def _check_scores(self, requests: list[Any]) -> None:
        if not self.kind.scores or self.chat:
            how = "a chat" if self.chat else f"server={self.kind.name}"
            raise InputError(
                f"task {requests[0].task_name} scores given texts, and {how} does not tell the log-probabilities of a "
                f"prompt: use server=vllm with --model pruned-server, or pruned-hf"
            )

    def generated(
        self, requests: Sequence[Any], repeats: Sequence[int], done: Callable[[int, Any], None], show: bool
    ) -> list[Any]:
        """Ask for texts.

        Args:
            requests: lm-eval's.
            repeats: of each, how many for the same document came before it.
            done: called with a request's place and its text, as soon as it is there.
            show: whether progress is shown.

        Raises:
            InputError: servers do not answer, or a request cannot be asked.
        """
        jobs = [self._job(*pair, place) for place, pair in enumerate(zip(requests, repeats, strict=True))]
        return self._asked(jobs, done, show)

    def _asked(self, jobs: list[Job], done: Callable[[int, Any], None], show: bool) -> list[Any]:
        """Responses of jobs, in the order of their tags; variant by variant, so that few are in use at a time."""
        found: dict[int, Any] = {}

        def keep(job: Job, response: Any) -> None:
            found[job.tag] = response
            done(job.tag, response)

        self.dispatcher.run(sorted(jobs, key=lambda job: str(job.variant)), keep, show)
        return [found[place] for place in range(len(jobs))]

    def _job(self, request: Any, repeat: int, place: int) -> Job:
        """One request for a text."""
        context, settings = request.args[:2]
        sampled = generation.samples(settings) and not self.given.tries
        options: dict[str, Any] = dict(
            normalize_gen_kwargs(settings if sampled else generation.greedily(settings), self._max_gen_toks)
        )
        until = handle_stop_sequences(options.pop("until", None), eos=self.eos_string)
        length, drawn = options.pop("max_gen_toks"), bool(options.pop("do_sample", False))
        options["temperature"] = options.get("temperature", 1.0) if drawn else 0.0
        payload: dict[str, Any] = {"max_tokens": length, "stop": until, "seed": self.seed + (repeat if drawn else 0)}
        payload |= {**(self.kind.sampling if drawn else {}), **options, **self._prompt(request, context, length)}
        variant = self.answering.variant(self.given.tries.head(request, repeat) if self.given.tries else UNPRUNED)
        path = "/v1/chat/completions" if self.chat else "/v1/completions"

        def read(body: dict[str, Any]) -> str:
            return postprocess_generated_text(self._text(body), until, self.think_end_token)

        return Job(path, payload, variant, read, f"task {request.task_name}, document {request.doc_id}", tag=place)

    def _prompt(self, request: Any, context: Any, length: int) -> dict[str, Any]:
        if not context:
            raise InputError(f"task {request.task_name}, document {request.doc_id}: the prompt is empty")
        room = self.max_length - length
        if room <= 0:
            raise InputError(f"max_gen_toks={length} leaves no room for a prompt in max_length={self.max_length}")
        if not self.tokenized_requests:
            return {"prompt": context}
        return {"prompt": self.tok_encode(context, left_truncate_len=room)}

    def _text(self, body: dict[str, Any]) -> str:
        """The text of an answer.

        Raises:
            Failure: there is none, or the server did not end it.
        """
        choices = [one for one in body["choices"] if one.get("index", 0) == 0]
        texts = {one["message"]["content"] if self.chat else one["text"] for one in choices}
        if len(texts) != 1:
            raise Failure(f"it gives {len(texts)} answers to one request")
        if any(one.get("finish_reason") in ("abort", "error") for one in choices):
            raise Failure("it broke off its answer")
        (text,) = texts
        return str(text or "")

    def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any) -> list[Scored]:
        """Log-likelihoods of tokens after tokens; each is reported as it comes."""

        def done(place: int, response: Scored) -> None:
            if requests[place][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[place][0], response)

        jobs = [self._scoring(context, more, place) for place, (_, context, more) in enumerate(requests)]
        return self._asked(jobs, done, not disable_tqdm)

    def _scoring(self, context: list[int], continuation: list[int], place: int) -> Job:
        """One request for a log-likelihood."""
        tokens = [*context, *continuation][-(self.max_length - 1) :]  # a token more is generated
        length = len(tokens) - len(continuation)
        if length < 1:
            raise InputError(
                f"a text of {len(continuation)} tokens cannot be scored within max_length={self.max_length}"
            )

        def read(body: dict[str, Any]) -> Scored:
            (choice,) = body["choices"]
            count = len(choice["logprobs"]["token_logprobs"])
            if count != len(tokens) + 1:
                raise Failure(f"it scores {count - 1} tokens of a text that has {len(tokens)}")
            ((value, greedy),) = self.parse_logprobs(body, ctxlens=[length])
            return float(value), bool(greedy)

        payload = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        payload |= {"return_tokens_as_token_ids": True}  # texts of two tokens can be the same
        return Job("/v1/completions", payload, self.answering.variant(), read, "a text to score", tag=place)

    def scored_whole(self, requests: Sequence[Any], disable_tqdm: bool) -> list[float]:
        """Log-likelihoods of whole texts, window by window; each is reported when its last window is there."""
        windows: list[list[tuple[list[int], list[int]]]] = [
            [utils.make_disjoint_window(each) for each in self._windows(request.args[0])] for request in requests
        ]
        owner = [number for number, own in enumerate(windows) for _ in own]
        left, sums = [len(own) for own in windows], [0.0] * len(windows)

        def done(place: int, response: Scored) -> None:
            number = owner[place]
            sums[number] += response[0]
            left[number] -= 1
            if not left[number]:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[number].args, sums[number])

        every = [each for own in windows for each in own]
        self._asked([self._scoring(*each, place) for place, each in enumerate(every)], done, not disable_tqdm)
        return sums

    def _windows(self, text: str) -> Any:
        return utils.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length - 1,
            context_len=1,
        )

    def any_rank(self, flag: bool) -> bool:
        """Whether a flag is true in some process; there is one."""
        return flag


class PrunedServerChatLM(PrunedServerLM):
    """As the base class, by the servers' own chat templates; for `--apply_chat_template`."""

    chat = True

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Any:
        """The chat itself."""
        return JsonChatStr(json.dumps(chat_history, ensure_ascii=False))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """None that is known here."""
        return ""

    def _prompt(self, request: Any, context: Any, length: int) -> dict[str, Any]:
        if not isinstance(context, JsonChatStr):
            raise InputError("pruned-server-chat asks chats: add --apply_chat_template, or use --model pruned-server")
        return {"messages": json.loads(context.prompt)}


class ServedAnswering(Answering):
    """Answers requests from the store, or by asking servers."""

    def _applied(self) -> tuple[Intervention, ...]:
        applied: tuple[Intervention, ...] = self.lm.given.interventions
        return applied

    def _drawn(self, request: Any, repeat: int) -> list[Any]:
        return [self.lm.seed + repeat]

    def _depends_on(self, kind: str, request: Any, repeat: int) -> tuple[dict[str, Any], str]:
        depends, head = super()._depends_on(kind, request, repeat)
        return {**depends, "adapters": self.lm.hashes(self.variant(head))}, head

    def variant(self, head: str = UNPRUNED) -> Served:
        """As what a try's head is served, together with what is always pruned."""
        mask = self.tries.masks[head] if self.tries and head != UNPRUNED else None
        everything: Any = combined([*self._applied(), *([mask] if mask else [])])
        heads = [str(each) for one in everything for each in one.heads_of(self.lm.model_map)]
        return Served(adapter_name(heads), tuple(heads)) if heads else DENSE

    def variants(self) -> list[Served]:
        """All that may be asked for."""
        return list(dict.fromkeys(map(self.variant, self.tries.pool if self.tries else (UNPRUNED,))))

    def _answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> tuple[list[Any], list[str]]:
        if self.store is None:

            def pass_on(place: int, response: Any) -> None:
                self.lm.cache_hook.add_partial(kind, requests[place].args, response)

            if kind == "generate_until":
                return self.lm.generated(requests, occurrences(requests), pass_on, not disable_tqdm), []
            return self._scores(kind, requests, disable_tqdm), []

        def run(missing: Missing) -> list[Any]:
            def keep(place: int, response: Any) -> None:
                missing.record(missing.keys[place], response)

            if kind == "generate_until":
                return list(self.lm.generated(missing.requests, missing.repeats, keep, not disable_tqdm))
            hook = self.lm.cache_hook
            self.lm.cache_hook = Recorder(hook, missing.answered)
            try:
                return self._scores(kind, missing.requests, disable_tqdm)
            finally:
                self.lm.cache_hook = hook

        return answer(self.store, requests, kind, lambda *pair: self._depends_on(kind, *pair), run)

    def _scores(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        if kind == "loglikelihood":
            return list(LocalCompletionsAPI.loglikelihood(self.lm, requests, disable_tqdm=disable_tqdm))
        return list(self.lm.scored_whole(requests, disable_tqdm))


def _no_template(error: Exception | None) -> str:
    why = f" ({first_line(error)})" if error else ""
    return (
        f"the tokenizer has no chat template{why}: leave out --apply_chat_template, give tokenizer= of one that has "
        f"one, or use --model pruned-server-chat with a server that has one"
    )
