"""`--model resumable`: any lm-eval model with the answer store, so that a killed evaluation is resumed.

`--model_args lm=vllm,responses=FOLDER,…` evaluates `--model vllm --model_args …`. Weights behind such a model cannot
be read in general, so it is identified by its arguments: files and folders by their content, a model of the hub by its
commit, a served model by its name and address.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import ref

import numpy as np
import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from lm_eval.models import api_models
from lm_eval.models.api_models import TemplateAPI
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import simple_parse_args_string

from lmeval_prune.artefacts import content_digest, digest
from lmeval_prune.attributes import replaced
from lmeval_prune.checkpoints.identity import checkpoint_identity, configuration_files
from lmeval_prune.config import Count, parse_value
from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.models import generation
from lmeval_prune.models.answer_store import AnswerStore, PendingRequests, answer_requests
from lmeval_prune.models.answering import AUTO_GROUP_SIZE
from lmeval_prune.models.identity import IGNORED_ARGUMENTS, argument_identity, code_versions
from lmeval_prune.models.lm_base import AnsweringLM, CheckedArgumentsLM, report_answers
from lmeval_prune.models.logs import use_lm_eval_logging

# Arguments of served and other models that change how fast or by whom an answer is computed, but not the answer.
_IGNORED = (IGNORED_ARGUMENTS - {"dtype"}) | {
    *("num_concurrent", "max_retries", "timeout", "auth_token", "header", "verify_certificate", "ca_cert_path"),
    *("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "max_num_seqs", "swap_space"),
    *("cache_dir", "download_dir"),
}
# Models that take a request's `seed` among its generation settings. Others draw from the process's random numbers.
_TAKES_SEED = (
    *("vllm", "vllm-vlm", "local-completions", "local-chat-completions"),
    *("openai-completions", "openai-chat-completions"),
)
_NO_TEXT = api_models.LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER  # what lm-eval takes for a missing text of a server


class ResumableLM(CheckedArgumentsLM):
    """Creates any lm-eval model with an answer store.

    Args:
        lm: name of the model for `--model`.
        responses: folder of the answer store.
        store_every: requests after which answers are stored, for models that return them at the end only.
        arguments: model_args of `lm`.
    """

    @classmethod
    @print_input_errors
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
        """Create the model that `lm=` names."""
        use_lm_eval_logging()
        arguments = dict(arg_dict)
        name, folder = arguments.pop("lm", None), arguments.pop("responses", None)
        store_every = parse_value("store_every", arguments.pop("store_every", 256), Count)
        model: type[LM] = get_model(name)
        if issubclass(model, CheckedArgumentsLM):
            raise InputError(f"lm={name} is a model of lmeval-prune; use --model {name}")
        if not folder:
            raise InputError("name the folder of the answers: responses=FOLDER")
        identity = model_identity(str(name), arguments)
        gc.collect()  # an earlier model with this store, if it is part of a reference cycle
        store = AnswerStore(str(folder), int(os.environ.get("RANK", "0")))
        try:
            kind: Any = type(f"Resumable{model.__name__}", (_Resumable, model), {"model_class": model})
            lm = kind.create_from_arg_obj(arguments, additional_config)
        except BaseException:
            store.close()
            raise
        lm.answering = StoredAnswering(lm, str(name), identity, store, store_every)
        return lm

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
        """Create the model that `lm=` names, from a string of arguments."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)


class _Resumable(AnsweringLM):
    """Answers requests from the store; mixed into the class of a model.

    Attributes:
        model_class: the model's own class, which computes answers.
    """

    why_no_cache = "--use_cache and responses= both store answers; give one of them"
    model_class: type[LM]

    def close(self) -> None:
        """Release the answer store; garbage collection does the same."""
        self.answering.store.close()


def model_identity(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what identifies a model by its arguments, as JSON."""
    named = {key: value for key, value in arguments.items() if key not in _IGNORED and value is not None}
    parts: dict[str, Any] = {}
    for key, value in named.items():
        if key == "pretrained":
            parts[key] = _checkpoint(str(value), arguments)
        elif isinstance(value, str) and key != "model" and os.access(value, os.R_OK):  # `model`: a served one's name
            parts[key] = {"content": content_digest(value)}
        else:
            parts[key] = argument_identity(key, value)
    return {"lm": name, "arguments": parts}


def _checkpoint(pretrained: str, arguments: dict[str, Any]) -> Any:
    """Return the identity of a checkpoint by its content or commit; by its name if neither is here."""
    source = {key: arguments[key] for key in ("revision", "subfolder", "gguf_file") if arguments.get(key)}
    try:
        weights = checkpoint_identity(pretrained, **source)
    except InputError:
        return pretrained
    return [weights, *map(content_digest, configuration_files(pretrained, source.get("subfolder", "")))]


class StoredAnswering:
    """Answers the requests of a model from its store; see `ResumableLM`."""

    def __init__(self, lm: Any, name: str, identity: dict[str, Any], store: AnswerStore, store_every: int) -> None:
        self._lm, self.name, self.store, self.store_every = ref(lm), name, store, store_every
        self.takes_seed = name in _TAKES_SEED
        self._model = digest(identity)

    @property
    def lm(self) -> Any:
        """Return the model."""
        return self._lm()

    @property
    def seed(self) -> int:
        """Seed of sampled answers: torch's, which lm-eval sets at the beginning of an evaluation."""
        return torch.initial_seed()

    @property
    def _is_served(self) -> bool:
        return issubclass(self.lm.model_class, TemplateAPI)

    @cached_property
    def versions(self) -> dict[str, Any]:
        """Return the versions of the libraries that compute answers."""
        libraries = ["lm_eval", *([] if self._is_served else ["transformers"])]
        engines = [engine for engine in ("vllm", "sglang") if engine in self.lm.model_class.__module__]
        return code_versions(*libraries, *engines)

    def answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Return the responses to requests of one kind; `InputError` if an answer cannot be stored."""
        groups = (self._is_grouped, self._group_size) if kind == "generate_until" else ()
        key_parts, run = partial(self._key_parts, kind), partial(self._run, disable_tqdm=disable_tqdm)
        responses, _ = answer_requests(self.store, requests, kind, key_parts, run, self.lm.any_rank, *groups)
        return responses

    def _key_parts(self, kind: str, request: Any, repeat: int) -> tuple[dict[str, Any], str]:
        if len(request.args) > 2:
            raise InputError(
                f"task {request.task_name} has images or sound, which cannot be stored; use --model itself"
            )
        sampled = kind == "generate_until" and self._is_sampling(request.args[1])
        drawn = generation.sampling_key(self.seed, request, repeat) if sampled else []
        parts = {"model": self._model, "request": list(request.args), "drawn": drawn, "versions": self.versions}
        return parts, ""  # the heads of a model that is not this package's are unknown

    def _is_sampling(self, settings: dict[str, Any]) -> bool:
        """Return whether the model samples; API models and SGLang do not read do_sample beside a temperature."""
        reads_temperature = self._is_served or "sglang" in self.lm.model_class.__module__
        has_temperature = reads_temperature and float(settings.get("temperature") or 0) > 0
        return has_temperature or generation.is_sampling(settings)

    # ------------------------------------------------------------------ answering

    def _is_grouped(self, request: Any) -> bool:
        """Return whether a request is sampled from the random numbers of this process."""
        return self._is_sampling(request.args[1]) and not self.takes_seed

    @property
    def _group_size(self) -> int:
        """Return how many requests are sampled from one stream of random numbers; see `Answering`."""
        size = getattr(self.lm, "batch_size", None)
        largest = getattr(self.lm, "max_batch_size", None) or AUTO_GROUP_SIZE
        return size if isinstance(size, int) else min(AUTO_GROUP_SIZE, largest)

    def _run(self, pending: PendingRequests, disable_tqdm: bool) -> list[Any]:
        """Compute the answers to pending requests, and store them as they are reported, or part by part.

        What lm-eval takes for a text that a server did not send is used in this run, and not stored.
        """

        def add(key: str, response: Any, **columns: Any) -> None:
            if response is None or (self._is_served and response == _NO_TEXT):
                self.store.responses.setdefault(key, response)
            else:
                pending.add(key, response, **columns)

        requests = list(pending.requests)
        if pending.kind == "generate_until" and self.takes_seed:
            requests = [self._with_seed(*pair) for pair in zip(requests, pending.repeats, strict=True)]
        seeded = PendingRequests(pending.kind, add, requests, pending.keys, pending.repeats)
        responses: dict[int, Any] = {}
        for indices, seed in self._parts(seeded):
            with report_answers(self.lm, seeded.answered), self._sampling(seed):
                part = self._compute(seeded.kind, [seeded.requests[index] for index in indices], disable_tqdm)
            for index, response in zip(indices, part, strict=True):
                responses[index] = response
                add(seeded.keys[index], response)
        return [responses[index] for index in range(len(seeded.requests))]

    def _compute(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        options = {"disable_tqdm": True} if disable_tqdm else {}  # not all classes know it
        return list(getattr(self.lm.model_class, kind)(self.lm, requests, **options))

    def _with_seed(self, request: Any, repeat: int) -> Any:
        """Return a sampled request with a seed of its own.

        Questions share the seeds of repeats on a server: lm-eval sends only requests with equal settings side by side.
        """
        context, settings = request.args
        if not self._is_sampling(settings) or "seed" in settings:
            return request
        key = [self.seed, repeat] if self._is_served else generation.sampling_key(self.seed, request, repeat)
        return replace(request, arguments=(context, {**settings, "seed": int(digest(key), 16) & 0x7FFFFFFF}))

    def _parts(self, pending: PendingRequests) -> Iterator[tuple[Sequence[int], int | None]]:
        """Yield the indices of each call of the model, and the seed of its random numbers, if it samples."""
        everything, kind = range(len(pending.requests)), pending.kind
        grouped = [i for i in everything if kind == "generate_until" and self._is_grouped(pending.requests[i])]
        ungrouped = sorted({*everything} - {*grouped})
        size = max(len(ungrouped), 1) if self._reports(kind) or self.lm.world_size > 1 else self.store_every
        for start in range(0, len(ungrouped), size):
            yield ungrouped[start : start + size], None
        for start in range(0, len(grouped), self._group_size):
            group = grouped[start : start + self._group_size]
            yield group, int(digest([self.seed, [pending.keys[i] for i in group]]), 16) >> 1

    def _reports(self, kind: str) -> bool:
        """Return whether the model reports each batch of answers: by a method of lm-eval's `hf` or API models."""
        method = getattr(self.lm.model_class, kind)
        bases = [base for base in (HFLM, TemplateAPI) if isinstance(self.lm, base)]
        return kind != "loglikelihood_rolling" and any(method is getattr(base, kind) for base in bases)

    @contextmanager
    def _sampling(self, seed: int | None) -> Iterator[None]:
        """Seed random numbers for a block, in batches of one size, and restore both; None: leave them."""
        if seed is None:
            yield
            return
        lm, state = self.lm, (random.getstate(), np.random.get_state())
        has_size = getattr(lm, "batch_size_per_gpu", None) is not None
        sizes = {"batch_size_per_gpu": self._group_size} if has_size else {}
        devices = [lm.device] if getattr(lm.device, "type", None) == "cuda" else []
        with torch.random.fork_rng(devices), replaced(lm, **sizes):
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            torch.manual_seed(seed)
            try:
                yield
            finally:
                random.setstate(state[0])
                np.random.set_state(state[1])
