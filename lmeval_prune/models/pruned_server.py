"""`--model pruned-server`: evaluate pruned variants that vLLM, SGLang or llama.cpp serve."""

from __future__ import annotations

import json
import logging
import ssl
from collections import deque
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.models.utils import resolve_max_length

from lmeval_prune.architectures import config_fingerprint
from lmeval_prune.artefacts import CREATED_BY, digest
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.identity import checkpoint_identity
from lmeval_prune.checkpoints.loading import as_input_error
from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.export.manifest import read_adapters, read_lora
from lmeval_prune.interventions import HeadMask
from lmeval_prune.models.arguments import Arguments, refuse_empty, unknown_argument
from lmeval_prune.models.checkpoint import Checkpoint
from lmeval_prune.models.dispatch import Dispatcher, list_models
from lmeval_prune.models.http_client import Connection, RetryableError
from lmeval_prune.models.identity import ModelIdentity
from lmeval_prune.models.lengths import Ending
from lmeval_prune.models.lm_base import AnsweringLM
from lmeval_prune.models.logs import use_lm_eval_logging
from lmeval_prune.models.server_answering import ServerAnswering
from lmeval_prune.models.server_client import LogLikelihood, ServerClient
from lmeval_prune.models.server_kinds import ServedModel, ServedVariant
from lmeval_prune.models.server_options import SERVER_OPTIONS, ServerOptions
from lmeval_prune.models.server_probe import Probe, model_name
from lmeval_prune.models.server_record import RECORD, ServerRecord

# options that lm-eval's own class takes
_LM_EVAL_OPTIONS = {
    *("trust_remote_code", "revision", "use_fast_tokenizer", "custom_prefix_token_id", "eos_string"),
    *("auth_token", "header", "verify_certificate", "ca_cert_path", "max_gen_toks"),
}


logger = logging.getLogger(__name__)
ROOT_WARNING = "%s serves %s, and its answers are taken for those of pretrained=%s: is it the same model?"
ROUNDED_WARNING = (
    "%s serves a file of %.3g bytes for each parameter, and the adapters in %s are for %s: heads are not pruned "
    "exactly, unless its output projections are in that type, which `export adapter --served FILE.gguf` checks"
)


class PrunedServerLM(AnsweringLM, LocalCompletionsAPI):
    """Evaluates a model on a server, whose adapters prune heads (`lmeval-prune export adapter`).

    Args:
        base_url: address of the server.
        arguments: the fields of `ServerOptions` (`models/server_options.py`); `heads`, `mask`, `router` and its
            options, `responses` as for `pruned-hf`.

    Attributes:
        adapters: name → manifest of each adapter in the folder `adapters=`; empty without one.
        lora: name → digest of the ordinary LoRA adapter `lora=`; empty without one.
        base: digest of the served checkpoint.
        model_length: tokens that the model takes, or `max_length=`; the servers may take fewer.
    """

    why_no_cache = "--use_cache cannot tell served variants apart; use responses=FOLDER among the model_args"
    chat = False
    MULTIMODAL = False
    engine = None
    weights = None

    @print_input_errors
    def __init__(self, base_url: Any = None, **arguments: Any) -> None:
        use_lm_eval_logging()
        values = {name: value for name, value in {"base_url": base_url, **arguments}.items() if value is not None}
        refuse_empty(values, SERVER_OPTIONS)
        variant_arguments = {name: value for name, value in values.items() if name not in SERVER_OPTIONS}
        self.arguments = Arguments.of(variant_arguments)
        for intervention in self.arguments.interventions:
            if not isinstance(intervention, HeadMask):
                raise InputError(
                    f"a server's adapters can only prune heads: {type(intervention).__name__} cannot be served; give "
                    f"heads=, mask= or router=, or use pruned-hf"
                )
        for name in self.arguments.others:
            raise unknown_argument(name, SERVER_OPTIONS)
        self.options = ServerOptions(**{name: value for name, value in values.items() if name in SERVER_OPTIONS})
        if self.options.lora and (self.arguments.interventions or self.arguments.router):
            raise InputError("a request has one adapter: give either lora=, or heads=, mask= or router=")
        self.lora = read_lora(self.options.lora) if self.options.lora else {}
        self.kind, self.seed = self.options.kind, self.options.seed
        self.endings: deque[Ending] = deque()
        model = str(self.options.pretrained or self.options.tokenizer or self.options.model)
        source = {"revision": self.options.revision, "trust_remote_code": self.options.trust_remote_code}
        description = {key: value for key, value in self.arguments.description.items() if value is not None}
        self.checkpoint = Checkpoint({"pretrained": model, **source, **description})
        self.config, self.model_map = self.checkpoint.config, self.checkpoint.map
        self.adapters = read_adapters(self.options.adapters) if self.options.adapters else {}
        self.base, self.dtype = self._identify_base(), self._resolve_dtype()
        certificates, verify = self.options.ca_cert_path, self.options.verify_certificate
        context = ssl.create_default_context(cafile=certificates) if certificates and verify else verify
        connection = Connection(self.header, context, self.options.timeout)
        url, limits = self.options.url, (self.options.num_concurrent, self.options.max_retries)
        try:
            listing = connection.run(partial(list_models, url=url, kind=self.kind))
        except RetryableError as error:
            raise InputError(f"{url}: {error}") from None
        name = model_name(url, listing, self.kind, self.options.model)
        self.dispatcher = Dispatcher(self.kind, name, url, listing, connection, *limits)
        self._check_root()
        self._init_lm_eval()
        self.client = ServerClient(self)
        self.answering = ServerAnswering(self)
        try:
            variants = self.answering.variants()
            self._check_adapters(variants)
            if self.options.probe:
                path, store = self.record_path, self.answering.store
                is_empty = bool(path and store and store.folder == path.parent and not store.responses)
                record = ServerRecord(path, self.record_key, self.dtype, is_empty)
                Probe(self.dispatcher, self.tokenizer, record).run(variants)
        except BaseException:
            self.answering.close()
            raise

    def close(self) -> None:
        """Release the answer store."""
        self.answering.close()

    # ------------------------------------------------------------------ set-up

    def _identify_base(self) -> str:
        """Return the digest of the served checkpoint, from the adapters' manifests or from local weights."""
        path = self.checkpoint.path
        try:
            self.local: str | None = checkpoint_identity(path, self.options.revision)
        except InputError:  # only configuration and tokenizer are here
            self.local = None
        bases = {adapter["base"]["checkpoint"]: name for name, adapter in self.adapters.items()}
        if bases:
            base, *others = bases
            if others or self.local not in (None, base):
                raise InputError(
                    f"{' and '.join(list(bases.values())[:2])} in {self.options.adapters} were made from another model "
                    f"than {path}; give pretrained= of the served model, or export the adapters again"
                )
            return str(base)
        if self.local is None and self.arguments.responses:
            raise InputError(
                f"{path} has no weights here, so stored answers could not be told from those of another model of this "
                f"shape: give adapters=FOLDER, whose manifests name the weights, or leave out responses="
            )
        return self.local or digest([path, config_fingerprint(self.config)])

    def _resolve_dtype(self) -> str:
        """Return the type in which the servers compute, from `dtype=` or from the adapters; empty if unknown."""
        dtype = str(self.options.dtype or "").removeprefix("torch.")
        exported = {adapter["dtype"] for adapter in self.adapters.values()}
        if dtype and exported and exported != {dtype}:
            raise InputError(
                f"{self.options.adapters} was made for servers in {', '.join(sorted(exported))}, not in dtype={dtype}; "
                f"export the adapters in the type in which the server computes"
            )
        dtype = dtype or (next(iter(exported)) if len(exported) == 1 else "")
        if not dtype and self.arguments.responses:
            raise InputError("responses= needs the type in which the servers compute: give dtype=, e.g. dtype=bfloat16")
        return dtype

    def _init_lm_eval(self) -> None:
        options = {
            option: getattr(self.options, option)
            for option in _LM_EVAL_OPTIONS
            if getattr(self.options, option) is not None
        }
        tokenizer = embedded.resolve(str(self.options.tokenizer or self.checkpoint.path))
        url = f"{self.dispatcher.url}/v1/{'chat/completions' if self.chat else 'completions'}"
        options |= {
            "model": self.dispatcher.model,
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "seed": self.seed,
        }
        limits = [self.served.max_length] if self.served.max_length else []
        length = self.options.max_length or resolve_max_length(self.config, None)
        options["max_length"] = min([length, *limits])  # for its log
        options["num_concurrent"] = self.options.num_concurrent
        with as_input_error(f"the tokenizer of {tokenizer} cannot be loaded; give tokenizer="):
            super().__init__(base_url=url, **options)
        self.add_bos_token = self.options.add_bos_token
        self.think_end_token = self.options.think_end_token
        self.chat_template_args = self.options.template_arguments
        self.model_length = self.options.max_length or resolve_max_length(self.config, self.tokenizer)
        self.max_length = min([self.model_length, *limits])

    @cached_property
    def header(self) -> dict[str, str]:
        """Return the headers of each request."""
        if self.options.header:
            return dict(self.options.header)
        key = self.options.auth_token or self.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def served(self) -> ServedModel:
        """Return what the server says of the unpruned model."""
        return self.dispatcher.listing.model(self.dispatcher.model)

    def _check_root(self) -> None:
        """Refuse a server of other weights, if its folder is here; warn of a folder of another name.

        Adapters name the model that serves them, and llama.cpp lists no folder.
        """
        path, root = Path(self.checkpoint.path), self.served.root
        if not root or root == self.options.model or self.adapters or self.kind.adapter_list:  # or a chosen name
            return
        if self.local and Path(root).is_dir() and checkpoint_identity(root) != self.local:
            raise InputError(f"{self.dispatcher.url} serves {root}, which has other weights than pretrained={path}")
        if path.name.lower() not in root.lower() and not Path(root).is_dir():
            logger.warning(ROOT_WARNING, self.dispatcher.url, root, path)

    def _check_adapters(self, variants: Sequence[ServedVariant]) -> None:
        """Check that the adapters of all variants are in the folder `adapters=`; warn of a coarser type."""
        if not self.adapters:
            return
        names = [name for variant in variants if variant.heads for name in self._adapter_names(variant)]
        for name in names:
            if name not in self.adapters:
                raise InputError(
                    f"{self.options.adapters} has no adapter {name}; write it with `lmeval-prune export adapter`, and "
                    f"start the server with it"
                )
        stored = self.served.parameter_bytes
        if names and stored is not None and self.dtype and stored < getattr(torch, self.dtype).itemsize:
            logger.warning(ROUNDED_WARNING, self.dispatcher.url, stored, self.options.adapters, self.dtype)

    @property
    def record_path(self) -> Path | None:
        """Return the file by which the servers of another run are compared with those of this one."""
        return Path(self.arguments.responses) / RECORD if self.arguments.responses else None

    @property
    def record_key(self) -> Any:
        """Return what stored answers depend on of the served model: others have a record of their own."""
        return [self.kind.name, self.dtype, self.base, self.served.identity if self.kind.adapter_list else None]

    def _adapter_names(self, variant: ServedVariant) -> Sequence[str]:
        """Return the names of a variant's adapters: a single one, or for llama.cpp one for each head."""
        return variant.heads if self.kind.adapter_list and variant.name not in self.adapters else (variant.name,)

    # ------------------------------------------------------------------ identity

    @property
    def max_gen_toks(self) -> int:
        """Return the default limit of generated tokens."""
        return int(self._max_gen_toks)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return the parts of the model that answers depend on, except the variant, as JSON."""
        return ModelIdentity.of_server(self).to_json()

    @property
    def outcome_identity(self) -> dict[str, Any]:
        """Return the hashes of the adapters, on which outcomes depend beside `identity`."""
        if not self.adapters:
            raise InputError("a sweep on a server needs the adapters' content: give adapters=FOLDER in model_args")
        hashes = [item for variant in self.answering.variants() for item in self.adapter_hashes(variant).items()]
        return {"adapters": dict(sorted(hashes))}

    def adapter_hashes(self, variant: ServedVariant) -> dict[str, str]:
        """Return the hashes of a variant's adapters, as far as they are in the folder `adapters=` or `lora=`."""
        if variant.name in self.lora:
            return self.lora
        names = (variant.name,) if variant.name in self.adapters else variant.heads
        return {name: str(self.adapters[name]["hash"]) for name in names if name in self.adapters}

    def get_model_info(self) -> dict[str, Any]:
        """Return the section `pruning` of the results file."""
        masks: Any = self.arguments.interventions
        heads = [head for mask in masks for head in mask.resolve(self.model_map).heads]
        info: dict[str, Any] = {"created_by": CREATED_BY, **self.identity, "heads": heads}
        if self.lora:
            info["lora"] = self.lora
        if self.adapters:
            info["adapters"] = {name: adapter["hash"] for name, adapter in self.adapters.items()}
        if self.arguments.router:
            info["router"] = self.arguments.router.info
        return {"pruning": info}

    # ------------------------------------------------------------------ prompts

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text, as `hf` tokenizes prompts."""
        return list(HFLM.tok_encode(self, string, add_special_tokens, left_truncate_len))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Any:
        """Return a chat as a text, by the tokenizer's chat template."""
        return HFLM.apply_chat_template(self, chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """Return a key for lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    # ------------------------------------------------------------------ answering

    def check_requests(self, kind: str, requests: list[Any]) -> None:
        """Refuse log-likelihoods if the server does not return the log-probabilities of a prompt."""
        if kind != "generate_until" and (not self.kind.scores_prompts or self.chat):
            source = "a chat" if self.chat else f"server={self.kind.name}"
            raise InputError(
                f"task {requests[0].task_name} scores given texts, and {source} does not return the log-probabilities "
                f"of a prompt: use server=vllm with --model pruned-server, or pruned-hf"
            )

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any
    ) -> list[LogLikelihood]:
        return self.client.score(requests, not disable_tqdm)


class PrunedServerChatLM(PrunedServerLM):
    """Sends chats, to which the servers apply their own chat templates; for `--apply_chat_template`."""

    chat = True

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Any:
        """Return the chat itself."""
        return JsonChatStr(json.dumps(chat_history, ensure_ascii=False))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return an empty text: only the servers know the template."""
        return ""
