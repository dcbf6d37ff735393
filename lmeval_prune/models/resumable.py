"""`--model resumable`: any lm-eval model with the answer store, so that a killed evaluation is resumed.

`--model_args lm=vllm,responses=FOLDER,…` evaluates `--model vllm --model_args …`. Weights behind such a model cannot
be read in general, so it is identified by its arguments: files and folders by their content, a model of the hub by its
commit, a served model by its name and address.
"""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from lm_eval.models.api_models import LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER, TemplateAPI
from lm_eval.models.huggingface import HFLM

from lmeval_prune.artefacts import content_digest, digest
from lmeval_prune.checkpoints.loading import checkpoint_identity, configuration_files
from lmeval_prune.config import Count, parse_value
from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.models import generation
from lmeval_prune.models.answer_store import AnswerStore, PendingRequests, answer_requests
from lmeval_prune.models.answering import AnsweringLM, compute_in_parts, use_lm_eval_logging
from lmeval_prune.models.identity import IGNORED_ARGUMENTS, argument_identity, code_versions

# Arguments of served and other models that change how fast or by whom an answer is computed, but not the answer.
_IGNORED = (IGNORED_ARGUMENTS - {"dtype"}) | {
    *("num_concurrent", "max_retries", "timeout", "auth_token", "header", "verify_certificate", "ca_cert_path"),
    *("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "max_num_seqs", "swap_space"),
    *("cache_dir", "download_dir"),
}
# Models that take a request's `seed` among its generation settings. Others draw from torch's random numbers.
_TAKES_SEED = (
    *("vllm", "vllm-vlm", "local-completions", "local-chat-completions"),
    *("openai-completions", "openai-chat-completions"),
)


class ResumableLM(AnsweringLM):
    """Creates any lm-eval model with an answer store.

    Args:
        lm: name of the model for `--model`.
        responses: folder of the answer store.
        store_every: requests that are answered in one call, if the model returns answers at its end only, or samples.
        arguments: model_args of `lm`.
    """

    @print_input_errors
    def __new__(cls, lm: Any = None, responses: Any = None, store_every: Any = 256, **arguments: Any) -> Any:
        """Create the model that `lm=` names."""
        use_lm_eval_logging()
        every, model = parse_value("store_every", store_every, Count), get_model(lm)
        if issubclass(model, AnsweringLM):
            raise InputError(f"lm={lm} is a model of lmeval-prune; use --model {lm}")
        if not responses:
            raise InputError("name the folder of the answers: responses=FOLDER")
        attributes = {"model_class": model, "store_every": every, "takes_seed": lm in _TAKES_SEED}
        attributes["model_digest"] = digest(model_identity(lm, arguments))
        gc.collect()  # an earlier model with this store, if it is part of a reference cycle
        store = AnswerStore(str(responses), int(os.environ.get("RANK", "0")))
        try:
            return type(f"Resumable{model.__name__}", (_Resumable, model), {**attributes, "store": store})(**arguments)
        except BaseException:
            store.close()
            raise


def model_identity(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what identifies a model by its arguments, as JSON."""
    parts: dict[str, Any] = {}
    for key, value in arguments.items():
        if key in _IGNORED or value is None:
            continue
        parts[key] = argument_identity(key, value)
        if key == "pretrained":  # by its content or commit; by its name if neither is here
            source = {key: arguments[key] for key in ("revision", "subfolder", "gguf_file") if arguments.get(key)}
            with suppress(InputError):
                files = configuration_files(value, source.get("subfolder", ""))
                parts[key] = [checkpoint_identity(value, **source), *map(content_digest, files)]
        elif isinstance(value, str) and key != "model" and os.access(value, os.R_OK):  # `model`: a served one's name
            parts[key] = {"content": content_digest(value)}
    return {"lm": name, "arguments": parts}


class _Resumable(AnsweringLM):
    """Answers requests from the store; mixed into the class of a model, `model_class`."""

    why_no_cache = "--use_cache and responses= both store answers; give one of them"
    model_class: type[LM]
    store: AnswerStore
    store_every: int
    takes_seed: bool
    model_digest: str

    def answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Return the responses to requests of one kind; `InputError` if an answer cannot be stored."""
        is_served, module = isinstance(self, TemplateAPI), self.model_class.__module__
        engines = [engine for engine in ("vllm", "sglang") if engine in module]
        versions = code_versions("lm_eval", *engines, *([] if is_served else ["transformers"]))
        options = {"disable_tqdm": True} if disable_tqdm else {}  # not all classes know it
        seed = torch.initial_seed()  # lm-eval sets it at the beginning of an evaluation

        def is_sampled(request: Any) -> bool:  # API models and SGLang do not read do_sample beside a temperature
            settings = request.args[1] if kind == "generate_until" else {}
            has_temperature = (is_served or "sglang" in module) and float(settings.get("temperature") or 0) > 0
            return has_temperature or generation.is_sampling(settings)

        def is_grouped(request: Any) -> bool:
            return is_sampled(request) and not self.takes_seed

        def key_parts(request: Any, repeat: int) -> tuple[dict[str, Any], str]:
            if len(request.args) > 2:
                raise InputError(f"task {request.task_name} has images or sound: use --model itself")
            drawn = generation.sampling_key(seed, request, repeat) if is_sampled(request) else []
            parts = {"model": self.model_digest, "request": list(request.args), "drawn": drawn, "versions": versions}
            return parts, ""  # the heads of a model that is not this package's are unknown

        def with_seed(request: Any, repeat: int) -> Any:
            """Give a sampled request a seed; on a server, where lm-eval sends equal settings together, of its try."""
            if not (self.takes_seed and is_sampled(request)) or "seed" in request.args[1]:
                return request
            key = digest([seed, repeat] if is_served else generation.sampling_key(seed, request, repeat))
            return replace(request, arguments=(request.args[0], {**request.args[1], "seed": int(key, 16) & 0x7FFFFFFF}))

        def run(pending: PendingRequests) -> list[Any]:
            def add(key: str, response: Any) -> None:  # what lm-eval takes for a text that a server did not send is
                is_text = response != LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER or not is_served  # used in this run only
                pending.add(key, response, is_answer=is_text and response is not None)

            asked = list(map(with_seed, pending.requests, pending.repeats))
            own = replace(pending, add=add, requests=asked)
            grouped = [index for index, request in enumerate(asked) if is_grouped(request)]
            reports = isinstance(self, HFLM | TemplateAPI) and kind != "loglikelihood_rolling"  # each batch
            group_size = len(asked) if self.world_size > 1 else self.store_every  # ranks synchronise
            size = len(asked) if reports else group_size

            def compute(chosen: list[Any], is_group: bool) -> list[Any]:
                return list(getattr(self.model_class, kind)(self, chosen, **options))

            return compute_in_parts(self, own, compute, size, grouped, group_size, seed)

        size = self.store_every
        return answer_requests(self.store, requests, kind, key_parts, run, self.any_rank, is_grouped, size)[0]
