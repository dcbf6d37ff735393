"""`--model pruned-server`: lm-eval's model class for servers, with variants that vLLM, SGLang or llama.cpp serve."""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property, lru_cache
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
from lmeval_prune.checkpoints.loading import refused_as
from lmeval_prune.checkpoints.skeleton import language_skeleton
from lmeval_prune.errors import InputError, first_line, nearest, reported
from lmeval_prune.export.manifest import read_adapters
from lmeval_prune.interventions import HeadMask
from lmeval_prune.models import generation
from lmeval_prune.models.arguments import Arguments, argument_names
from lmeval_prune.models.dispatch import Dispatcher, Job, Server
from lmeval_prune.models.http_client import Failure, log_probability
from lmeval_prune.models.identity import config_fingerprint, tokenizer_fingerprint
from lmeval_prune.models.lengths import Ending
from lmeval_prune.models.logs import as_lm_eval_does
from lmeval_prune.models.once import GivenOnce
from lmeval_prune.models.served import API_OPTIONS, DENSE, ApiOptions, Served, ServerOptions
from lmeval_prune.models.served_answering import NoText, ServedAnswering, Text, seed_of
from lmeval_prune.models.server_probe import Connection, Probe, model_name, reach
from lmeval_prune.models.tries import DENSE as UNPRUNED

eval_logger = logging.getLogger(__name__)
# settings of sampling, as `hf` has them where neither the task nor the model says anything
_DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
_NOTHING = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
Scored = tuple[float, bool]


class PrunedServerLM(GivenOnce, LocalCompletionsAPI):
    """Asks servers that have adapters which take heads away (`lmeval-prune export adapter`).

    Args:
        base_url: of a server or several.
        arguments: the fields of `ServerOptions` (`models/served.py`); `heads`, `mask`, `router` and what belongs to it,
            `responses` as for `pruned-hf`; `tokenizer`, `max_gen_toks`, `max_length`, … as for `local-completions`.

    Raises:
        InputError: an argument cannot be used, or a server does not serve what it should.
    """

    chat = False
    MULTIMODAL = False
    _warned = False  # of an answer without text

    @reported
    def __init__(self, base_url: Any = None, **arguments: Any) -> None:
        as_lm_eval_does()
        known = {each.name for each in fields(ServerOptions)}
        values = {name: value for name, value in {"base_url": base_url, **arguments}.items() if value is not None}
        self.options = ServerOptions(**{name: value for name, value in values.items() if name in known})
        others = {name: value for name, value in arguments.items() if name not in known}
        self.arguments = Arguments.of(others)
        self._check(others)
        self.api = ApiOptions.of(others)
        self.kind, self.seed = self.options.kind, self.options.seed
        path, self.config, self.model_map = self._local()
        self.adapters = read_adapters(self.options.adapters) if self.options.adapters else {}
        self.checkpoint, self.dtype = self._base(path), self._dtype()
        self.connection = Connection(self.header, self._certificates, self.options.timeout)
        servers = reach(self.kind, self.options.urls, self.connection)
        name = model_name(self.kind, servers, self.options.model)
        self._load(path, name, servers)
        options = (self.options.num_concurrent, self.options.max_retries, self.options.timeout)
        self.dispatcher = Dispatcher(self.kind, name, servers, self.header, *options, verify=self._certificates)
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
        for name in ("engine", "engine_rows", "deterministic"):
            if others.get(name) is not None:
                raise InputError(f"{name}= is for pruned-hf, which decodes itself; leave it out")
        for one in self.arguments.interventions:
            if not isinstance(one, HeadMask):
                raise InputError(
                    f"a server's adapters take heads away and nothing else: {type(one).__name__} cannot be served; "
                    f"give heads=, mask= or router=, or use pruned-hf"
                )
        for name in self.arguments.others:
            known = [*argument_names(), *(one.name for one in fields(ServerOptions)), *API_OPTIONS]
            if name not in known:
                raise InputError(f"unknown model_arg {name!r}{nearest(name, known) or '; leave it out'}")

    def _local(self) -> tuple[str, Any, ModelMap]:
        """Where the model can be read here, its configuration, and the model without weights."""
        named = self.options.pretrained or self.api.tokenizer or self.options.model
        if not named:
            raise InputError(
                "name the model that is served: pretrained=NAME_OR_FOLDER with its configuration and tokenizer"
            )
        path, trust = embedded.resolve(str(named)), self.api.trust_remote_code
        embedded.check_name(path, {"revision": self.api.revision})
        with refused_as(f"cannot read the model {named} here; give pretrained= of the one that is served"):
            config = AutoConfig.from_pretrained(path, revision=self.api.revision, trust_remote_code=trust)
        bare = language_skeleton(config, trust)
        return path, config, map_model(bare, **self.arguments.description)

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
        try:
            here = checkpoint_identity(path, self.api.revision)
        except InputError:  # only configuration and tokenizer are here
            here = None
        for checkpoint, name in made_from.items():
            if here not in (None, checkpoint):
                raise InputError(
                    f"adapter {name} was made from {self.adapters[name]['base']['name']}, another base model than "
                    f"{path}; give pretrained= of the one that is served and pruned, or export the adapters again"
                )
            return str(checkpoint)
        if here is None and self.arguments.responses:
            raise InputError(
                f"{path} has no weights here, so that answers of another model of this shape could not be told apart: "
                f"give adapters=FOLDER, which says what they were made from, or leave out responses="
            )
        return here or digest([path, config_fingerprint(self.config)])

    def _dtype(self) -> str:
        given = str(self.options.dtype or "").removeprefix("torch.")
        made = {one["dtype"] for one in self.adapters.values()}
        if given and made and made != {given}:
            raise InputError(
                f"{self.options.adapters} was made for servers in {', '.join(sorted(made))}, not in dtype={given}; "
                f"export the adapters in the type in which the server computes"
            )
        found = given or (next(iter(made)) if len(made) == 1 else "")
        if not found and self.arguments.responses:
            raise InputError("answers that are kept need to name the type in which the servers compute: dtype=bfloat16")
        return found

    def _load(self, path: str, name: str, servers: Sequence[Server]) -> None:
        """lm-eval's own part, with the tokenizer."""
        names = (
            *("trust_remote_code", "revision", "use_fast_tokenizer", "custom_prefix_token_id", "eos_string"),
            *("auth_token", "header", "verify_certificate", "ca_cert_path", "max_gen_toks"),
        )
        theirs = {name: getattr(self.api, name) for name in names if getattr(self.api, name) is not None}
        tokenizer = embedded.resolve(str(self.api.tokenizer or path))
        url = f"{servers[0].url}/v1/{'chat/completions' if self.chat else 'completions'}"
        own: dict[str, Any] = {"model": name, "tokenizer": tokenizer, "tokenizer_backend": "huggingface"}
        with refused_as(f"the tokenizer of {tokenizer} cannot be loaded; give tokenizer="):
            super().__init__(base_url=url, seed=self.seed, **own, **theirs)
        self.add_bos_token = self.api.add_bos_token
        self.think_end_token = self.api.think_end_token
        lengths = [one.listing.length for one in servers if one.listing.length]
        self.max_length = min([self.api.max_length or int(resolve_max_length(self.config, self.tokenizer)), *lengths])
        self._tokens = lru_cache(maxsize=4096)(self.tok_encode)  # variant by variant, the same prompts come again

    @cached_property
    def header(self) -> dict[str, str]:
        """Of each request."""
        key = self.api.auth_token or self.api_key
        return dict(self.api.header) if self.api.header else ({"Authorization": f"Bearer {key}"} if key else {})

    @cached_property
    def _certificates(self) -> Any:
        """As aiohttp's `ssl`."""
        path, verify = self.api.ca_cert_path, self.api.verify_certificate
        try:
            return ssl.create_default_context(cafile=path) if path and verify else verify
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"ca_cert_path={path} holds no certificates ({first_line(error)})") from None

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
    def max_gen_toks(self) -> int:
        """Tokens of an answer where a task does not say."""
        return int(self._max_gen_toks)

    @property
    def weights(self) -> str | None:
        """Fingerprint of the weights: not known here."""
        return None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """JSON value of all of the model that an answer depends on, beside the variant."""
        return {
            "server": self.kind.name + ("-chat" if self.chat else ""),
            "dtype": self.dtype,
            "checkpoint": self.checkpoint,
            "config": config_fingerprint(self.config),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "generation_config": self._generation_config(),
            "arguments": {key: str(value) for key, value in sorted(self.api.answers.items())},
        }

    @cached_property
    def _own_settings(self) -> dict[str, Any]:
        """The model's own settings of generation."""
        name, revision = str(self.config._name_or_path), self.api.revision or "main"
        try:
            found: dict[str, Any] = GenerationConfig.from_pretrained(name, revision=revision).to_dict()
        except OSError:
            return {}
        return found

    def _generation_config(self) -> str:
        found = self._own_settings
        return digest({key: str(found[key]) for key in found if key != "transformers_version"}) if found else ""

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
        heads = [head for one in self.arguments.interventions for head in one.resolve(self.model_map).heads]  # type: ignore[attr-defined]
        info: dict[str, Any] = {"created_by": CREATED_BY, **self.identity, "heads": heads}
        if self.adapters:
            info["adapters"] = {name: one["hash"] for name, one in self.adapters.items()}
        if self.arguments.router:
            info["router"] = self.arguments.router.info
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
        ends: dict[str, Any] = {"continue_final_message": not add_generation_prompt, **self.api.template_arguments}
        ends["add_generation_prompt"] = add_generation_prompt
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
        where = _name(request)
        if len(request.args) > 2:
            raise InputError(f"{where}: it has more than a text; pruned-server sends texts only")
        sampled = generation.samples(settings) and not self.arguments.router
        options: dict[str, Any] = dict(
            normalize_gen_kwargs(settings if sampled else generation.greedily(settings), self._max_gen_toks)
        )
        until = handle_stop_sequences(options.pop("until", None), eos=self.eos_string)
        length, drawn = options.pop("max_gen_toks"), bool(options.pop("do_sample", False))
        options = self._sampling(options, drawn)
        payload: dict[str, Any] = {"max_tokens": length, "stop": until, **options}
        payload["seed"] = seed_of(self.seed, repeat) if drawn else self.seed
        prompt = self._prompt(request, context, length)
        variant = self.answering.variant(
            self.arguments.router.head(request, repeat) if self.arguments.router else UNPRUNED
        )
        path = "/v1/chat/completions" if self.chat else "/v1/completions"

        def finished(text: str | None) -> str:
            if text is None:
                self._warn_of_no_text(where)
                return NoText()
            made = Text(postprocess_generated_text(text, until, self.think_end_token))
            made.ending = getattr(text, "ending", None)
            return made

        return Job(path, lambda: {**payload, **prompt()}, variant, self._text, where, tag=place, made=finished)

    def _sampling(self, given: dict[str, Any], drawn: bool) -> dict[str, Any]:
        """Settings of generation, as `hf` would have them: the task's, then the model's own, then its defaults.

        Raises:
            InputError: servers of this kind do not know one.
        """
        own = {name: value for name, value in self._own_settings.items() if value is not None}
        found = {"repetition_penalty": own.get("repetition_penalty", 1.0), **given}
        if drawn:
            found = {**{name: own.get(name, usual) for name, usual in _DRAWN.items()}, **found}
            found["top_k"] = found["top_k"] or -1  # 0 is all in `hf`, and an error elsewhere
        else:
            found["temperature"] = 0.0
        found = {name: value for name, value in found.items() if _NOTHING.get(name, ()) != value}
        for name in found:
            if name not in self.kind.settings:
                known = sorted(self.kind.settings)
                theirs = "the model's own " if name not in given else ""
                raise InputError(
                    f"{theirs}generation setting {name}={found[name]} cannot be sent to server={self.kind.name}"
                    f"{nearest(name, known)}; it takes {', '.join(known)}: change gen_kwargs"
                )
        return found

    def _warn_of_no_text(self, where: str) -> None:
        if not self._warned:
            self._warned = True
            eval_logger.warning(
                "%s: the server gives no text (content is null), as a reasoning parser does of thoughts without an end;"
                " such answers count as empty and are not stored: give more max_gen_toks, or start it without parser",
                where,
            )

    def _prompt(self, request: Any, context: Any, length: int) -> Callable[[], dict[str, Any]]:
        if not context:
            raise InputError(f"{_name(request)}: the prompt is empty")
        room = self.max_length - length
        if room <= 0:
            raise InputError(f"max_gen_toks={length} leaves no room for a prompt in max_length={self.max_length}")
        return lambda: {"prompt": self._tokens(context)[-room:]}

    def cut(self, kind: str, request: Any) -> int | None:
        """To how many tokens the request is cut; None if it is not."""
        if kind != "generate_until":
            return int(self.max_length)
        if self.chat or not request.args[0]:
            return None
        room = self.max_length - normalize_gen_kwargs(request.args[1], self._max_gen_toks)["max_gen_toks"]
        return int(room) if len(self._tokens(request.args[0])) > room else None

    def _text(self, body: dict[str, Any]) -> str | None:
        """The text of an answer; None if the server says that there is none.

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
        if not isinstance(text, str | None):
            raise Failure("its answer is no text")
        return text if text is None else _with_ending(text, choices, body)

    def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any) -> list[Scored]:
        """Log-likelihoods of tokens after tokens; each is reported as it comes."""

        def done(place: int, response: Scored) -> None:
            if requests[place][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[place][0], response)

        jobs = [
            self._scoring(f"the text that ends in {''.join(texts)[-60:]!r}", context, more, place)
            for place, (texts, context, more) in enumerate(requests)
        ]
        return self._asked(jobs, done, not disable_tqdm)

    def _scoring(self, name: str, context: list[int], continuation: list[int], place: int) -> Job:
        """One request for a log-likelihood."""
        tokens = [*context, *continuation][-(self.max_length - 1) :]  # a token more is generated
        length = len(tokens) - len(continuation)
        if length < 1:
            raise InputError(
                f"a text of {len(continuation)} tokens cannot be scored within max_length={self.max_length}"
            )

        def read(body: dict[str, Any]) -> Scored:
            (choice,) = body["choices"]
            own, best = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            for count in (len(own), len(best)):
                if count != len(tokens) + 1:
                    raise Failure(f"it scores {count - 1} tokens of a text that has {len(tokens)}")
            for value in [*own[1:], *(value for top in best[1:] for value in top.values())]:  # the first has none
                log_probability(value)
            ((value, greedy),) = self.parse_logprobs(body, ctxlens=[length])
            return float(value), bool(greedy)

        payload = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        payload |= {"return_tokens_as_token_ids": True}  # texts of two tokens can be the same
        return Job("/v1/completions", lambda: payload, self.answering.variant(), read, name, tag=place)

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

        names = [_name(requests[number]) for number in owner]
        every = [each for own in windows for each in own]
        jobs = [self._scoring(name, *each, place) for place, (name, each) in enumerate(zip(names, every, strict=True))]
        self._asked(jobs, done, not disable_tqdm)
        return sums

    def _windows(self, text: str) -> Any:
        return utils.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length - 2,  # a token more is read, and one generated
            context_len=1,
        )

    def gathered(self, value: Any) -> list[Any]:
        """A value of each process; there is one."""
        return [value]

    def any_rank(self, flag: bool) -> bool:
        """Whether a flag is true in some process; there is one."""
        return flag


def _with_ending(text: str, choices: list[dict[str, Any]], body: dict[str, Any]) -> Text:
    """A text with its ending, where the server says how many tokens there are and why it ended."""
    found = Text(text)
    reasons, length = {one.get("finish_reason") for one in choices}, (body.get("usage") or {}).get("completion_tokens")
    if isinstance(length, int) and 0 <= length < 1 << 31 and None not in reasons:
        found.ending = Ending(length, "length" in reasons)
    return found


class PrunedServerChatLM(PrunedServerLM):
    """As the base class, by the servers' own chat templates; for `--apply_chat_template`."""

    chat = True

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Any:
        """The chat itself."""
        return JsonChatStr(json.dumps(chat_history, ensure_ascii=False))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """None that is known here."""
        return ""

    def _prompt(self, request: Any, context: Any, length: int) -> Callable[[], dict[str, Any]]:
        if not isinstance(context, JsonChatStr):
            raise InputError("pruned-server-chat asks chats: add --apply_chat_template, or use --model pruned-server")
        told = self.api.template_arguments
        return lambda: {
            "messages": json.loads(context.prompt),
            **({"chat_template_kwargs": told} if told else {}),
        }


def _name(request: Any) -> str:
    return f"task {request.task_name}, document {request.doc_id}"


def _no_template(error: Exception | None) -> str:
    why = f" ({first_line(error)})" if error else ""
    return (
        f"the tokenizer has no chat template{why}: leave out --apply_chat_template, give tokenizer= of one that has "
        f"one, or use --model pruned-server-chat with a server that has one"
    )
