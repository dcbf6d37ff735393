"""`--model pruned-server`: evaluate pruned variants that vLLM or llama.cpp serve.

lm-eval's `LocalCompletionsAPI` sends requests, some at a time, and sends those that fail again. Here each request
names its variant and has its own seed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import requests as http
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)

from lmeval_prune.architectures import config_fingerprint
from lmeval_prune.artefacts import CREATED_BY, digest
from lmeval_prune.attributes import replaced
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import as_input_error, checkpoint_identity
from lmeval_prune.decoding.request import logits_settings
from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.export.manifest import adapter_name, read_adapters, read_lora
from lmeval_prune.interventions import HeadMask, Intervention, combined
from lmeval_prune.models import generation
from lmeval_prune.models.answer_store import PendingRequests
from lmeval_prune.models.answering import PrunedLM, report_answers, use_lm_eval_logging
from lmeval_prune.models.arguments import Arguments, refuse_empty, unknown_argument
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.models.identity import SERVED_ANSWERING, Checkpoint, code_versions, identity_of, tokenizer_fingerprint
from lmeval_prune.models.servers import (
    KINDS,
    RECORD,
    SERVER_OPTIONS,
    UNPRUNED,
    ServedModel,
    ServedVariant,
    ServerOptions,
    Signature,
    check_record,
    distance,
)

logger = logging.getLogger(__name__)
PROBE_TEXT = (
    "A baker sells 12 rolls at 30 cents each and 5 loaves at 2.50 each. First she adds up what the rolls bring in, "
    "then the loaves, and writes both numbers into her green book. Why does she need the sum?"
)
PROBE_PROMPT, PROBE_ANSWER = 64, 12  # tokens of the text; tokens to generate, if a server does not score prompts
MIN_DISTANCE = 1e-5  # smaller distances of signatures are rounding
MAX_LOG_PROBABILITY = 0.01  # rounding can make a log-probability slightly positive
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # of `hf`
NO_EFFECT = {
    **{"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
    **{"renormalize_logits": True, "remove_invalid_values": True},
}
_ANSWER_OPTIONS = ("max_gen_toks", "add_bos_token", "eos_string", "custom_prefix_token_id", "think_end_token")


@dataclass(eq=False)
class Request:
    """A request to the server."""

    name: str  # for messages
    variant: ServedVariant
    payload: Callable[[], dict[str, Any]]  # builds the body, without the fields that name the variant
    parse: Callable[[dict[str, Any]], Any]  # extracts the result; `InputError` if another answer would be the same
    done: Callable[[Any], None] = lambda result: None  # called with the result as soon as it arrives
    result: Any = None


def sampling_seed(seed: int, attempt: int) -> int:
    return int(digest([seed, attempt]), 16) & 0x7FFFFFFF  # neighbouring seeds draw differently


def log_probability(value: Any) -> float:
    """Return a value if it is a log-probability; `InputError` otherwise: NaN, infinite, null, a text."""
    if type(value) not in (int, float) or not -sys.float_info.max <= value <= MAX_LOG_PROBABILITY:
        raise InputError(f"a log-probability is {repr(value)[:40]}, not a number up to 0; does the model overflow?")
    return float(value)


class PrunedServerLM(PrunedLM, LocalCompletionsAPI):
    """Evaluates a model on a server, whose adapters prune heads (`lmeval-prune export adapter`).

    Args:
        base_url: address of the server.
        parsed: what was parsed of the other arguments before, in place of those that are no `ServerOptions`.
        arguments: the fields of `ServerOptions` (`models/servers.py`); `heads`, `mask`, `router` and its options,
            `responses` as for `pruned-hf`.
    """

    why_no_cache = "--use_cache cannot tell served variants apart; use responses=FOLDER among the model_args"
    path = "/v1/completions"
    chat = MULTIMODAL = False
    engine = None
    tok_encode, apply_chat_template = HFLM.tok_encode, HFLM.apply_chat_template  # prompts as of `hf`
    tokenizer_name = HFLM.tokenizer_name

    @print_input_errors
    def __init__(self, base_url: Any = None, parsed: Arguments | None = None, **arguments: Any) -> None:
        use_lm_eval_logging()
        values = {name: value for name, value in {"base_url": base_url, **arguments}.items() if value is not None}
        refuse_empty(values, SERVER_OPTIONS)
        self.arguments = parsed or Arguments.of({name: values[name] for name in values if name not in SERVER_OPTIONS})
        for intervention in self.arguments.interventions:
            if not isinstance(intervention, HeadMask):
                raise InputError(
                    f"a server's adapters only prune heads, not {type(intervention).__name__}: use pruned-hf"
                )
        for name in self.arguments.others:
            raise unknown_argument(name, SERVER_OPTIONS)
        self.options = options = ServerOptions(**{name: values[name] for name in values if name in SERVER_OPTIONS})
        if options.lora and (self.arguments.interventions or self.arguments.router):
            raise InputError("a request has one adapter: give either lora=, or heads=, mask= or router=")
        self.lora = read_lora(options.lora) if options.lora else {}  # name → digest
        self.adapters = read_adapters(options.adapters) if options.adapters else {}  # name → manifest
        self.kind, self.seed, self.url = KINDS[options.server], options.seed, options.url
        self._stopped: InputError | None = None  # why no more requests are sent
        self._is_known = False  # whether the server is the one of the start: it can have been started again
        source = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
        source["pretrained"] = str(options.pretrained or options.tokenizer or options.model)
        self.checkpoint = Checkpoint({**source, **self.arguments.loading})
        self.config, self.model_map = self.checkpoint.config, self.checkpoint.map
        path, folder, local = self.checkpoint.path, options.adapters, None
        bases = {adapter["base"]["checkpoint"] for adapter in self.adapters.values()}
        dtypes = {adapter["dtype"] for adapter in self.adapters.values()}
        with suppress(InputError):  # only configuration and tokenizer are here
            local = checkpoint_identity(path, options.revision)
        if self.adapters and (len(bases) > 1 or local not in (None, *bases)):
            raise InputError(f"adapters in {folder} were made from another model than pretrained={path}")
        dtype = str(options.dtype or "").removeprefix("torch.")
        if dtype and dtypes and dtypes != {dtype}:
            raise InputError(f"{folder} was made for servers in {', '.join(sorted(dtypes))}, not in dtype={dtype}")
        self.dtype = dtype or (dtypes.pop() if len(dtypes) == 1 else "")  # in which the server computes
        base = bases.pop() if bases else local
        if self.arguments.responses and not (base and self.dtype):
            raise InputError(
                f"responses= needs the weights of {path} here, or adapters=FOLDER, and the type in which the server "
                "computes: give dtype=, e.g. dtype=bfloat16"
            )
        self.base = str(base or digest([path, config_fingerprint(self.config)]))  # of the served checkpoint
        tokenizer = embedded.resolve(str(options.tokenizer or self.checkpoint.path))
        with as_input_error(f"the tokenizer of {tokenizer} cannot be loaded; give tokenizer="):
            own = {"base_url": self.url, "tokenizer": tokenizer, "tokenizer_backend": "huggingface", "batch_size": 1}
            own["max_length"] = options.max_length or resolve_max_length(self.config, None)  # for its log
            super().__init__(**options.given(*vars(options)) | own)
        if options.ca_cert_path and options.verify_certificate:
            self.verify_certificate = ssl.create_default_context(cafile=options.ca_cert_path)
        if options.auth_token and not options.header:  # lm-eval reads it from the environment only
            self.header = {"Authorization": f"Bearer {options.auth_token}"}
        self.add_bos_token, self.think_end_token = options.add_bos_token, options.think_end_token
        self.max_gen_toks = self._max_gen_toks
        self.chat_template_args = {**(options.chat_template_args or {}), **options.given("enable_thinking")}
        with as_input_error(f"{self.url} does not answer: start it, or give another base_url= or server="):
            self.served = self._list()
        length = options.max_length or resolve_max_length(self.config, self.tokenizer)
        self.max_length = min(length, self.served.max_length or length)
        if self.max_length < length:
            logger.warning(
                "%s takes %d tokens, and the model %d: longer prompts are cut to their end, and answers can differ",
                *(self.url, self.max_length, length),
            )
        # adapters name the model that serves them, and llama.cpp lists no folder
        root = None if self.adapters or self.kind.adapter_list else self.served.root
        if local and root and Path(root).is_dir() and checkpoint_identity(str(root)) != local:
            raise InputError(f"{self.url} serves {root}, which has other weights than {path}")
        self._encode = lru_cache(maxsize=4096)(self.tok_encode)  # each variant has the same prompts
        try:
            self.begin_answering()
            pool = self.router.pool if self.router else [DENSE]
            self.variants = list(dict.fromkeys(map(self.variant, pool)))  # that requests may need
            for variant in self.variants:
                self.adapter_hashes(variant)  # raises if one is missing
            if options.probe:
                self._probe()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ set-up

    def _probe(self) -> None:
        """Refuse a server with another tokenizer or other weights, or under which two variants answer alike.

        A misconfigured server answers without an error: for example, an adapter that matches no module leaves the model
        unpruned, or two names mean one adapter.
        """
        own = tokens = list(self.tokenizer.encode(PROBE_TEXT, add_special_tokens=False))
        payload = {"model": self.served.name, **dict(zip(self.kind.tokenize_fields, (PROBE_TEXT, False), strict=True))}
        with suppress(OSError, LookupError, TypeError, ValueError):  # it cannot tokenize
            answered = self._ask("/tokenize", payload)["tokens"]
            tokens = [token["id"] if isinstance(token, dict) else token for token in answered]
        if tokens != own:
            raise InputError(f"{self.url} has another tokenizer than this run; set tokenizer= to the served model's")
        scored = {"max_tokens": PROBE_ANSWER} if self.kind.adapter_list else {"max_tokens": 1, "echo": True}
        settings = {**self.kind.sampling_fields({"temperature": 0}, False, len(own)), **self.kind.logprob_settings}
        probe = {"prompt": own[:PROBE_PROMPT], **settings, **scored}
        pruned = [variant for variant in self.variants if variant != UNPRUNED]
        asked = [*[UNPRUNED] * 4, *pruned]  # repeated to measure the server's noise
        mixed = [each for variant in pruned for each in (variant, UNPRUNED)]

        def parse(body: dict[str, Any]) -> Signature:
            logprobs = body["choices"][0]["logprobs"]
            if "content" in logprobs:  # the format of chat completions, which llama.cpp also uses for completions
                pairs = [(str(token["token"]), token["logprob"]) for token in logprobs["content"]]
            else:
                pairs = list(zip(map(str, logprobs["tokens"]), logprobs["token_logprobs"], strict=True))
            if not self.kind.adapter_list:
                pairs = pairs[1:-1]  # the first token has no log-probability, the last is generated
            if not pairs:
                raise ValueError("the response has no log-probabilities")
            return [(token, log_probability(value)) for token, value in pairs]

        def ask(variants: list[ServedVariant], at_once: int) -> list[Signature]:
            with replaced(self, path="/v1/completions", _concurrent=at_once):
                return self.send([Request("a probe", each, lambda: probe, parse) for each in variants])

        signatures, in_one_batch = ask(asked, 1), ask(mixed, self._concurrent)
        noise = max(MIN_DISTANCE, 1.5 * max(distance(*pair, 1) for pair in combinations(signatures[:4], 2)))
        known = dict(zip(asked[3:], signatures[3:], strict=True))
        for (other, first), (variant, second) in combinations(known.items(), 2):
            if distance(first, second, 1) <= noise:
                raise InputError(
                    f"{self.url} answers alike under {variant} and {other}: an adapter matches no module (vLLM: "
                    f"--lora-target-modules o_proj); start it by the command that `lmeval-prune export adapter` prints"
                )
        for variant, signature in zip(mixed, in_one_batch, strict=True):
            if min(known, key=lambda name: distance(signature, known[name], 1)) != variant:
                raise InputError(
                    f"{self.url} mixes variants in a batch: {variant} is answered as another one beside it; start it "
                    f"with a slot more than there are adapters (vLLM: --max-loras)"
                )
        if path := self.record_path:
            is_empty = self.store is not None and self.store.folder == path.parent and not self.store.responses
            check_record(path, self.record_key, self.dtype, signatures[0], is_empty, self.url)

    @property
    def record_path(self) -> Path | None:
        """Return the file by which the server of another run is compared with that of this one."""
        return Path(self.arguments.responses) / RECORD if self.arguments.responses else None

    @property
    def record_key(self) -> Any:
        """Return what stored answers depend on of the served model: others have a record of their own."""
        return [self.kind.name, self.dtype, self.base, self.identity.get("served")]

    # ------------------------------------------------------------------ variants and identity

    def applied(self) -> tuple[Intervention, ...]:
        return self.arguments.interventions

    def variant(self, attempt: str = DENSE) -> ServedVariant:
        """Return the variant that prunes the heads of an attempt and of the model_args, or has a LoRA adapter."""
        if self.lora:
            return ServedVariant(next(iter(self.lora)))
        masks: Any = combined([*self.applied(), *filter(None, [self.masks[attempt]])])
        heads = [str(head) for mask in masks for head in mask.heads_of(self.model_map)]
        return ServedVariant(adapter_name(heads), tuple(heads)) if heads else UNPRUNED

    def adapter_hashes(self, variant: ServedVariant) -> dict[str, str]:
        """Return the hashes of a variant's adapters: of the folder `adapters=` or `lora=`."""
        if self.lora or not (self.adapters and variant.heads):
            return self.lora
        is_composed = self.kind.adapter_list and variant.name not in self.adapters
        names = variant.heads if is_composed else (variant.name,)
        if missing := [name for name in names if name not in self.adapters]:
            raise InputError(
                f"{self.options.adapters} has no adapter {missing[0]}; write it with `lmeval-prune export adapter`"
            )
        return {name: str(self.adapters[name]["hash"]) for name in names}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return the parts of the model that answers depend on, except the variant, as JSON."""
        arguments: dict[str, Any] = self.options.given(*_ANSWER_OPTIONS)
        arguments |= {"template": self.chat_template_args} if self.chat_template_args else {}
        fingerprint, generation = tokenizer_fingerprint(self.tokenizer), self.checkpoint.generation_config
        return identity_of(
            *(self.config, self.tokenizer, fingerprint, generation, self.dtype, arguments),
            server=self.kind.name + ("-chat" if self.chat else ""),
            checkpoint=self.base,
            # models of one file name in several folders can be several trainings
            served=f"{self.served.name}: {self.served.root}" if self.kind.adapter_list else None,
        )

    @property
    def outcome_identity(self) -> dict[str, Any]:
        """Return the hashes of the adapters, on which outcomes depend beside `identity`."""
        if not self.adapters:
            raise InputError("a sweep on a server needs the adapters' content: give adapters=FOLDER in model_args")
        hashes = [item for variant in self.variants for item in self.adapter_hashes(variant).items()]
        return {"adapters": dict(sorted(hashes))}

    @property
    def versions(self) -> dict[str, Any]:
        """Return the versions that answers depend on; servers do not use the transformers installed here."""
        return {**code_versions("lm_eval"), "answering": SERVED_ANSWERING}

    def sampling_key(self, request: Any, repeat: int) -> list[Any]:
        return [sampling_seed(self.seed, repeat)]

    def key_parts(
        self, kind: str, masks: Mapping[Any, HeadMask | None]
    ) -> Callable[[Any, int, Hashable], tuple[dict[str, Any], str]]:
        """Return the function of `PrunedLM.key_parts`, which adds the adapters, and where a request is cut."""
        own = super().key_parts(kind, masks)

        def parts(request: Any, repeat: int, name: Any) -> tuple[dict[str, Any], str]:
            variant = self.variant(name)
            cut: Any = int(self.max_length)  # tokens that a request is cut to; None if it fits
            if kind == "generate_until":
                room = self.max_length - generation.answer_limit(request.args[1], self.max_gen_toks)
                is_cut = not self.chat and request.args[0] and len(self._encode(request.args[0])) > room
                cut = room if is_cut else None
            adapters = {"cut": cut, "adapters": self.adapter_hashes(variant)}
            return {**own(request, repeat, name)[0], **adapters}, str(variant)

        return parts

    def get_model_info(self) -> dict[str, Any]:
        masks: Any = self.arguments.interventions
        heads = [head for mask in masks for head in mask.resolve(self.model_map).heads]
        info: dict[str, Any] = {"created_by": CREATED_BY, **self.identity, "heads": heads}
        hashes = {name: adapter["hash"] for name, adapter in self.adapters.items()}
        about = {"lora": self.lora, "adapters": hashes, "router": self.router and self.router.info}
        return {"pruning": info | {name: value for name, value in about.items() if value}}

    # ------------------------------------------------------------------ sending

    def send(self, requests: Sequence[Request]) -> list[Any]:
        """Send requests variant by variant, so that few adapters are in use at a time; return their results.

        `InputError` if one fails for good, or if the server is gone; what was answered before is stored.
        """
        ordered = sorted(requests, key=lambda request: str(request.variant))
        self._stopped, self._is_known = None, False
        with as_input_error(f"{self.url} has failed: start it, and run the same command again; responses= resumes it"):
            asyncio.run(self.get_batched_requests(ordered, [None] * len(ordered)))
        if self._stopped:
            raise self._stopped
        return [request.result for request in requests]

    async def amodel_call(self, session: Any, sem: Any, messages: list[Any], **_: Any) -> list[Any]:
        """Send a request; lm-eval calls this again, up to `max_retries` times, if it raises an error."""
        (request,) = messages
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # it prints a traceback of each that fails
        async with sem:  # before the payload is built
            if self._stopped:
                return [None]
            try:
                if not self._is_known:
                    self._check_served()
                self._is_known = True
                payload = {**request.payload(), **self.kind.variant_fields(self.served, request.variant)}
                async with session.post(self.url + self.path, json=payload, headers=self.header) as response:
                    body = await response.json(content_type=None)
                if response.status in range(400, 500) and response.status not in (408, 429):  # it rejects the request
                    raise InputError(f"{self.url} refuses {request.name} under {request.variant}: {body}"[:400])
                response.raise_for_status()
                if self.kind.adapter_list:  # such answers do not name their adapters, whose numbers may have changed
                    self._check_served()
                elif body["model"] != payload["model"]:
                    raise ValueError(f"it answered as {str(body['model'])[:100]}")
                request.result = request.parse(body)
                request.done(request.result)
            except InputError as error:  # it would be the same again
                self._stopped = error
            except Exception:
                self._is_known = False
                raise
        return [None]

    def _check_served(self) -> None:
        if self._list() != self.served:
            raise InputError(f"{self.url} has another model or other adapters than at the start of this run")

    def _list(self) -> ServedModel:
        bodies = [self._ask(path) for path in ("/v1/models", self.kind.adapter_list) if path]
        return self.kind.parse_listing(bodies[0], bodies[-1], self.options.model)

    def _ask(self, path: str, payload: Any = None) -> Any:
        """Return the server's answer to anything but a completion."""
        trusted = self.options.ca_cert_path or True if self.options.verify_certificate else False
        settings: dict[str, Any] = {"headers": self.header, "verify": trusted, "timeout": min(self.timeout, 60)}
        settings["proxies"] = {"http": "", "https": ""}  # completions do not read the environment either
        response = http.request("GET" if payload is None else "POST", f"{self.url}{path}", json=payload, **settings)
        response.raise_for_status()
        return response.json()

    # ------------------------------------------------------------------ answers

    def check_requests(self, kind: str, requests: list[Any]) -> None:
        """Refuse log-likelihoods if the server does not return the log-probabilities of a prompt."""
        if kind != "generate_until" and (self.kind.adapter_list or self.chat):
            source = "a chat" if self.chat else f"server={self.kind.name}"
            raise InputError(
                f"task {requests[0].task_name} scores given texts, and {source} does not: use server=vllm, or pruned-hf"
            )

    def compute(self, pending: PendingRequests, disable_tqdm: bool) -> list[Any]:
        if pending.kind == "generate_until":
            rows = zip(pending.requests, pending.repeats, pending.keys, strict=True)
            return [text for text, _ in self.send([self._generating(*row, pending.add) for row in rows])]
        # a server generates one more token
        with report_answers(self, pending.answered), replaced(self, max_length=self.max_length - 1):
            return list(getattr(LocalCompletionsAPI, pending.kind)(self, pending.requests, disable_tqdm=disable_tqdm))

    def _generating(self, request: Any, repeat: int, key: Any, add: Callable[..., None]) -> Request:
        """Return the server's request for one of lm-eval's; its result is a text and the columns to store beside it."""
        name, (context, settings) = f"task {request.task_name}, document {request.doc_id}", request.args
        if self.router or not generation.is_sampling(settings):
            settings = generation.without_sampling(settings)
        options: dict[str, Any] = dict(normalize_gen_kwargs(settings, self.max_gen_toks))
        until = handle_stop_sequences(options.pop("until", None), eos=self.eos_string)
        length, is_sampled = options.pop("max_gen_toks"), bool(options.pop("do_sample", False))
        sampling = self.kind.sampling_fields(self._sampling_settings(options, is_sampled), is_sampled, self.max_length)
        fixed: dict[str, Any] = {"max_tokens": length, "stop": until, **sampling}
        fixed["seed"] = sampling_seed(self.seed, repeat) if is_sampled else self.seed
        beginning = ""  # of the answer, which a chat can end with (a task's `gen_prefix`)
        if self.chat:
            fixed["messages"] = json.loads(context.prompt)
            fixed |= {"chat_template_kwargs": self.chat_template_args} if self.chat_template_args else {}
            if fixed["messages"][-1].get("role") == "assistant":
                beginning = str(fixed["messages"][-1]["content"])
                fixed |= self.kind.continuation
        else:
            room = generation.prompt_room(self, length)

        def payload() -> dict[str, Any]:
            return fixed if self.chat else {**fixed, "prompt": self._encode(context)[-room:]}

        def parse(body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            choices = [choice for choice in body["choices"] if choice.get("index", 0) == 0]
            (answer,) = {choice["message"]["content"] if self.chat else choice["text"] for choice in choices}
            reasons = {choice.get("finish_reason") for choice in choices}
            if reasons & {"abort", "error"}:
                raise ValueError("it aborted its answer")
            if answer is None:
                logger.warning("%s: an answer without text counts as empty and is not stored; more max_gen_toks?", name)
                return "", {"is_answer": False}
            answer = answer.removeprefix(beginning if self.kind.adapter_list else "")  # llama.cpp repeats it
            text = postprocess_generated_text(answer, until, self.think_end_token)
            count = (body.get("usage") or {}).get("completion_tokens")
            if not isinstance(count, int) or not 0 <= count < 1 << 31 or None in reasons:
                return text, {}
            if "length" in reasons and count < length:
                raise InputError(
                    f"it ends its answer after {count} of {length} tokens: its context is full, or it has a limit of "
                    f"its own (llama.cpp: --predict); start it with a larger one, or give a smaller max_gen_toks"
                )
            return text, {"length": count, "cut_off": "length" in reasons}

        variant = self.variant(self.attempt(request, repeat))
        return Request(name, variant, payload, parse, lambda result: add(key, result[0], **result[1]))

    def _sampling_settings(self, settings: dict[str, Any], is_sampled: bool) -> dict[str, Any]:
        """Complete a task's settings as `hf` does: with the model's generation config, then with `hf`'s defaults."""
        model = {name: value for name, value in self.checkpoint.generation_config.items() if value is not None}
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
            if name not in self.kind.generation_settings:
                accepted = sorted(self.kind.generation_settings)
                source = "the model's own " if name not in settings else ""
                raise InputError(
                    f"server={self.kind.name} does not take {source}generation setting {name}={result[name]}, only "
                    f"{', '.join(accepted)}: change gen_kwargs"
                )
        return result

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return self.send([self._scoring(*request) for request in requests])

    def _scoring(self, texts: tuple[str, str] | None, context: list[int], continuation: list[int]) -> Request:
        """Return a request that scores tokens; `texts` are None for a window of a text."""
        tokens = [*context, *continuation][-self.max_length :]
        length = len(tokens) - len(continuation)
        name = f"the text that ends in {''.join(texts)[-60:]!r}" if texts else "a text"
        if length < 1:  # else only an assertion of lm-eval's
            raise InputError(f"{name}: {len(continuation)} tokens are too many for max_length={self.max_length}")
        payload = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        payload |= {"return_tokens_as_token_ids": True}  # different tokens can have the same text

        def parse(body: dict[str, Any]) -> tuple[float, bool]:
            (choice,) = body["choices"]
            logprobs, best = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            if {len(logprobs), len(best)} != {len(tokens) + 1}:
                raise ValueError(f"it scores {len(logprobs) - 1} tokens of a text that has {len(tokens)}")
            # the first token has no log-probability
            for value in [*logprobs[1:], *(value for top in best[1:] for value in top.values())]:
                log_probability(value)
            ((value, is_greedy),) = self.parse_logprobs(body, ctxlens=[length])
            return float(value), bool(is_greedy)

        def done(score: tuple[float, bool]) -> None:
            if texts:
                self.cache_hook.add_partial("loglikelihood", texts, score)

        return Request(name, self.variant(), lambda: payload, parse, done)


class PrunedServerChatLM(PrunedServerLM):
    """Sends chats, to which the server applies its own chat template; for `--apply_chat_template`."""

    path = "/v1/chat/completions"
    chat = True

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Any:
        """Return the chat itself."""
        return JsonChatStr(json.dumps(chat_history, ensure_ascii=False))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return an empty text: only the server knows the template."""
        return ""
