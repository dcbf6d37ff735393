"""`--model pruned-server`: lm-eval's model class for servers, with variants that vLLM, SGLang or llama.cpp serve."""

from __future__ import annotations

import json
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.models.utils import resolve_max_length

from lmeval_prune.artefacts import CREATED_BY, digest
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.identity import checkpoint_identity
from lmeval_prune.checkpoints.loading import as_input_error
from lmeval_prune.errors import InputError, first_line, print_input_errors
from lmeval_prune.export.manifest import read_adapters
from lmeval_prune.interventions import HeadMask
from lmeval_prune.models.arguments import Arguments, refuse_empty, unknown_argument
from lmeval_prune.models.checkpoint import Checkpoint
from lmeval_prune.models.dispatch import Dispatcher, Server
from lmeval_prune.models.http_client import Connection
from lmeval_prune.models.identity import ModelIdentity, config_fingerprint
from lmeval_prune.models.lengths import Ending
from lmeval_prune.models.lm_base import AnsweringLM
from lmeval_prune.models.logs import as_lm_eval_does
from lmeval_prune.models.served import API_OPTIONS, DENSE, ApiOptions, Served, ServerOptions
from lmeval_prune.models.served_answering import ServedAnswering
from lmeval_prune.models.server_jobs import Jobs, Scored
from lmeval_prune.models.server_probe import Probe, model_name, reach

# what lm-eval's own class is told of `ApiOptions`
_FOR_LM_EVAL = {
    *("trust_remote_code", "revision", "use_fast_tokenizer", "custom_prefix_token_id", "eos_string"),
    *("auth_token", "header", "verify_certificate", "ca_cert_path", "max_gen_toks"),
}


class PrunedServerLM(AnsweringLM, LocalCompletionsAPI):
    """Asks servers that have adapters which take heads away (`lmeval-prune export adapter`).

    Args:
        base_url: of a server or several.
        arguments: the fields of `ServerOptions` (`models/served.py`); `heads`, `mask`, `router` and what belongs to it,
            `responses` as for `pruned-hf`; `tokenizer`, `max_gen_toks`, `max_length`, … as for `local-completions`.

    Attributes:
        adapters: manifests of exported adapters by name, if their folder is known.
        base: digest that identifies the checkpoint that is served.

    Raises:
        InputError: an argument cannot be used, or a server does not serve what it should.
    """

    chat = False
    MULTIMODAL = False
    engine = None
    weights = None  # not known here

    @print_input_errors
    def __init__(self, base_url: Any = None, **arguments: Any) -> None:
        as_lm_eval_does()
        known = {each.name for each in fields(ServerOptions)}
        values = {name: value for name, value in {"base_url": base_url, **arguments}.items() if value is not None}
        refuse_empty(values, known)
        self.options = ServerOptions(**{name: value for name, value in values.items() if name in known})
        others = {name: value for name, value in values.items() if name not in known}
        self.arguments = Arguments.of(others)
        self._check_arguments(others)
        self.api = ApiOptions.of(others)
        self.kind, self.seed = self.options.kind, self.options.seed
        self.endings: deque[Ending] = deque()
        self.checkpoint = self._checkpoint()
        self.config, self.model_map = self.checkpoint.config, self.checkpoint.map
        self.adapters = read_adapters(self.options.adapters) if self.options.adapters else {}
        self.base, self.dtype = self._base(), self._dtype()
        connection = Connection(self.header, self._certificates, self.options.timeout)
        servers = reach(self.kind, self.options.urls, connection)
        name = model_name(self.kind, servers, self.options.model)
        self._load(name, servers)
        limits = (self.options.num_concurrent, self.options.max_retries)
        self.dispatcher = Dispatcher(self.kind, name, servers, connection, *limits)
        self.jobs = Jobs(self)
        self.answering = ServedAnswering(self)
        try:
            variants = self.answering.variants()
            self._check_adapters(variants)
            if self.options.probe:
                Probe(self.dispatcher, self.tokenizer).run(variants)
        except BaseException:
            self.answering.close()
            raise

    def close(self) -> None:
        """Release the answer store."""
        self.answering.close()

    # ------------------------------------------------------------------ connection

    def _check_arguments(self, others: dict[str, Any]) -> None:
        for name in ("engine", "engine_rows", "deterministic"):
            if name in others:
                raise InputError(f"{name}= is for pruned-hf, which decodes itself; leave it out")
        for intervention in self.arguments.interventions:
            if not isinstance(intervention, HeadMask):
                raise InputError(
                    f"a server's adapters take heads away and nothing else: {type(intervention).__name__} cannot be "
                    f"served; give heads=, mask= or router=, or use pruned-hf"
                )
        known = [*(each.name for each in fields(ServerOptions)), *API_OPTIONS]
        for name in self.arguments.others:
            if name not in known:
                raise unknown_argument(name, known)

    def _checkpoint(self) -> Checkpoint:
        """Read the model that is served, as far as it is here."""
        name = self.options.pretrained or self.api.tokenizer or self.options.model
        if not name:
            raise InputError(
                "name the model that is served: pretrained=NAME_OR_FOLDER with its configuration and tokenizer"
            )
        description = {key: value for key, value in self.arguments.description.items() if value is not None}
        more = {"revision": self.api.revision, "trust_remote_code": self.api.trust_remote_code}
        return Checkpoint({"pretrained": str(name), **more, **description})

    def _base(self) -> str:
        """Identify the checkpoint that is served: what the adapters were made from, or what is here."""
        path = self.checkpoint.path
        bases = {adapter["base"]["checkpoint"]: name for name, adapter in self.adapters.items()}
        if len(bases) > 1:
            names = " and ".join(list(bases.values())[:2])
            raise InputError(f"{self.options.adapters}: {names} were made from different models; export them again")
        for name, adapter in self.adapters.items():
            if adapter["base"]["heads"] != self.model_map.signature()["heads"]:
                raise InputError(
                    f"adapter {name} was made for {adapter['base']['name']}, which has other layers than {path}; "
                    f"another base model? Give pretrained= of the model that is served"
                )
        try:
            here = checkpoint_identity(path, self.api.revision)
        except InputError:  # only configuration and tokenizer are here
            here = None
        for base, name in bases.items():
            if here not in (None, base):
                raise InputError(
                    f"adapter {name} was made from {self.adapters[name]['base']['name']}, another base model than "
                    f"{path}; give pretrained= of the one that is served and pruned, or export the adapters again"
                )
            return str(base)
        if here is None and self.arguments.responses:
            raise InputError(
                f"{path} has no weights here, so that answers of another model of this shape could not be told apart: "
                f"give adapters=FOLDER, which says what they were made from, or leave out responses="
            )
        return here or digest([path, config_fingerprint(self.config)])

    def _dtype(self) -> str:
        """Return the type in which the servers compute, from the option or from the adapters."""
        dtype = str(self.options.dtype or "").removeprefix("torch.")
        exported = {adapter["dtype"] for adapter in self.adapters.values()}
        if dtype and exported and exported != {dtype}:
            raise InputError(
                f"{self.options.adapters} was made for servers in {', '.join(sorted(exported))}, not in dtype={dtype}; "
                f"export the adapters in the type in which the server computes"
            )
        dtype = dtype or (next(iter(exported)) if len(exported) == 1 else "")
        if not dtype and self.arguments.responses:
            raise InputError("answers that are kept need to name the type in which the servers compute: dtype=bfloat16")
        return dtype

    def _load(self, name: str, servers: Sequence[Server]) -> None:
        """Set up lm-eval's own class, with the tokenizer."""
        options = {each: getattr(self.api, each) for each in _FOR_LM_EVAL if getattr(self.api, each) is not None}
        tokenizer = embedded.resolve(str(self.api.tokenizer or self.checkpoint.path))
        url = f"{servers[0].url}/v1/{'chat/completions' if self.chat else 'completions'}"
        options |= {"model": name, "tokenizer": tokenizer, "tokenizer_backend": "huggingface", "seed": self.seed}
        with as_input_error(f"the tokenizer of {tokenizer} cannot be loaded; give tokenizer="):
            super().__init__(base_url=url, **options)
        self.add_bos_token = self.api.add_bos_token
        self.think_end_token = self.api.think_end_token
        self.chat_template_args = self.api.template_arguments
        lengths = [server.listing.length for server in servers if server.listing.length]
        self.max_length = min([self.api.max_length or int(resolve_max_length(self.config, self.tokenizer)), *lengths])

    @cached_property
    def header(self) -> dict[str, str]:
        """Return the headers of each request."""
        key = self.api.auth_token or self.api_key
        return dict(self.api.header) if self.api.header else ({"Authorization": f"Bearer {key}"} if key else {})

    @property
    def _certificates(self) -> Any:
        """Return aiohttp's `ssl`."""
        path, verify = self.api.ca_cert_path, self.api.verify_certificate
        try:
            return ssl.create_default_context(cafile=path) if path and verify else verify
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"ca_cert_path={path} holds no certificates ({first_line(error)})") from None

    def _check_adapters(self, variants: Sequence[Served]) -> None:
        """Check that what will be asked for has been exported, if the folder is here."""
        if not self.adapters:
            return
        form = "gguf" if self.kind.lists else "peft"
        for variant in variants:
            composed = self.kind.lists and variant.name not in self.adapters
            names = () if variant == DENSE else variant.heads if composed else (variant.name,)
            for name in names:
                if name not in self.adapters:
                    raise InputError(
                        f"{self.options.adapters} has no adapter {name}; write it with `lmeval-prune export adapter`, "
                        f"and start the server with it"
                    )
                if self.adapters[name]["format"] != form:
                    raise InputError(
                        f"adapter {name} is of another format than {self.kind.name} takes; export it as {form}"
                    )

    # ------------------------------------------------------------------ identity

    @property
    def max_gen_toks(self) -> int:
        """Return the tokens of an answer where a task does not say."""
        return int(self._max_gen_toks)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return everything of the model that an answer depends on, beside the variant, as JSON."""
        return ModelIdentity.of_server(self).to_json()

    @property
    def outcome_identity(self) -> dict[str, Any]:
        """Return what outcomes depend on beside `identity`: the adapters' content.

        Raises:
            InputError: the folder of adapters is not known.
        """
        if not self.adapters:
            raise InputError(
                "a sweep of a server names what was pruned: give adapters=FOLDER in model_args, as exported"
            )
        hashes = [item for variant in self.answering.variants() for item in self.hashes(variant).items()]
        return {"adapters": dict(sorted(hashes))}

    def hashes(self, variant: Served) -> dict[str, str]:
        """Return digests of the contents of a variant's adapters, as far as they are known here."""
        names = (variant.name,) if variant.name in self.adapters else variant.heads
        return {name: str(self.adapters[name]["hash"]) for name in names if name in self.adapters}

    def get_model_info(self) -> dict[str, Any]:
        """Return a section `pruning` for the results file: what was asked for."""
        masks: Any = self.arguments.interventions
        heads = [head for mask in masks for head in mask.resolve(self.model_map).heads]
        info: dict[str, Any] = {"created_by": CREATED_BY, **self.identity, "heads": heads}
        if self.adapters:
            info["adapters"] = {name: adapter["hash"] for name, adapter in self.adapters.items()}
        if self.arguments.router:
            info["router"] = self.arguments.router.info
        return {"pruning": info}

    # ------------------------------------------------------------------ prompts

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
    ) -> list[int]:
        """Return a text's tokens, as `hf` makes them for prompts."""
        return list(HFLM.tok_encode(self, string, add_special_tokens, left_truncate_len))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Any:
        """Return a chat as the prompt's text, by the tokenizer's template, as `hf` does.

        Raises:
            InputError: it has none.
        """
        try:
            return HFLM.apply_chat_template(self, chat_history, add_generation_prompt)
        except ValueError as error:
            raise InputError(_no_template(f" ({first_line(error)})")) from None

    @print_input_errors
    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the tokenizer's template; `InputError` if it has none."""
        if chat_template and not getattr(self.tokenizer, "chat_template", None):
            raise InputError(_no_template(""))
        template: str | None = super().chat_template(chat_template)
        return template

    @property
    def tokenizer_name(self) -> str:
        """Return a name for lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    # ------------------------------------------------------------------ answering

    @print_input_errors
    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse `--use_cache`, which would not tell variants apart."""
        if getattr(cache_hook, "dbdict", None) is not None:
            raise InputError("--use_cache cannot tell served variants apart; use responses=FOLDER among the model_args")
        super().set_cache_hook(cache_hook)

    def check_requests(self, kind: str, requests: list[Any]) -> None:
        """Refuse to score given texts where the server does not tell the log-probabilities of a prompt."""
        if kind != "generate_until" and (not self.kind.scores or self.chat):
            source = "a chat" if self.chat else f"server={self.kind.name}"
            raise InputError(
                f"task {requests[0].task_name} scores given texts, and {source} does not tell the log-probabilities of "
                f"a prompt: use server=vllm with --model pruned-server, or pruned-hf"
            )

    def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any) -> list[Scored]:
        return self.jobs.score(requests, not disable_tqdm)


class PrunedServerChatLM(PrunedServerLM):
    """Asks chats, by the servers' own chat templates; for `--apply_chat_template`."""

    chat = True

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Any:
        """Return the chat itself."""
        return JsonChatStr(json.dumps(chat_history, ensure_ascii=False))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return an empty text: the template is not known here."""
        return ""


def _no_template(reason: str) -> str:
    return (
        f"the tokenizer has no chat template{reason}: leave out --apply_chat_template, give tokenizer= of one that has "
        f"one, or use --model pruned-server-chat with a server that has one"
    )
