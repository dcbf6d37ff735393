"""`--model pruned-hf`: lm-eval's Hugging Face model class with interventions applied to the model."""

from __future__ import annotations

import copy
import difflib
import hashlib
import inspect
import logging
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from lmeval_prune.architectures import AttentionMap, find_attention
from lmeval_prune.artefacts import CREATED_BY, digest
from lmeval_prune.decoding import Engine
from lmeval_prune.errors import InputError, reported
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.models import batched, embedded
from lmeval_prune.models.responses import Missing, Recorder, ResponseStore, answer, occurrences
from lmeval_prune.models.routing import Routing

eval_logger = logging.getLogger(__name__)

# Arguments that change where and how fast a response is computed, but not what it should be.
_NOT_PART_OF_AN_ANSWER = {
    "batch_size",
    "max_batch_size",
    "device",
    "parallelize",
    "device_map",
    "max_memory_per_gpu",
    "max_cpu_memory",
    "offload_folder",
}


class PrunedHFLM(HFLM):
    """lm-eval's `hf`, run with attention heads pruned. Everything that `hf` accepts is accepted.

    Args:
        pretrained: as for `hf`, or the name of an embedded model (`lmeval-prune models`).
        heads: heads to prune, zero-based: `L5H3+L15H0`, `L5H*`, `L5H0-3`, or a list.
        mask: path of a mask artefact; with `heads`, the union is pruned.
        mask_method: `hook` (default) or `weights`; see `HeadMask`.
        allow_empty_layer: allow a layer to lose all its heads.
        allow_other_model: accept a mask artefact made for another model, if it fits.
        engine: `generate` or `batched`: answers to generation requests come from our decoding engine, the same
            texts at a higher rate. Default `generate`; `batched` with a router, which needs it.
        engine_rows: answers that the engine decodes at once; default: what memory holds.
        deterministic: the engine decides near-ties alone, so that no answer depends on its neighbours; default
            only with a router.
        responses: folder of our resumable response store.
        router: answer the i-th try of a question greedily, under the i-th head of an order: that of a fitted
            router's folder, or `random`, `random_top`, `best`, `oracle`.
        router_store, router_pool, router_seed, router_size, question_field: see `Routing`.
        attention_path, attention_output, attention_heads: describe a family we do not know; see
            `find_attention`.

    Raises:
        InputError: an argument cannot be used; before the weights are loaded wherever that can be known.
    """

    @reported
    def __init__(
        self,
        pretrained: Any = None,
        heads: Any = None,
        mask: str | None = None,
        mask_method: str = "hook",
        allow_empty_layer: bool = False,
        allow_other_model: bool = False,
        engine: str | None = None,
        engine_rows: int | None = None,
        deterministic: bool | None = None,
        responses: str | None = None,
        router: str | None = None,
        router_store: str | None = None,
        router_pool: str | None = None,
        router_seed: int = 0,
        router_size: int = 16,
        question_field: str | None = None,
        attention_path: str | None = None,
        attention_output: str | None = None,
        attention_heads: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._describe: dict[str, Any] = {
            "attention_path": attention_path,
            "attention_output": attention_output,
            "attention_heads": attention_heads,
        }
        allowed = {name: _flag(name, value) for name, value in _flags(allow_empty_layer, allow_other_model)}
        self.mask = _mask(heads, mask, mask_method, **allowed)
        if self.mask and kwargs.get("tp_plan"):
            raise InputError("heads cannot be pruned under tp_plan yet; use parallelize=true or one GPU a process")
        if pretrained is None:
            raise InputError("name a model: --model_args pretrained=NAME_OR_FOLDER")
        if isinstance(pretrained, str):
            pretrained = embedded.resolve(pretrained)
            _check_names(pretrained, kwargs.get("dtype"), responses)
        if kwargs.get("device") is None and not torch.cuda.is_available():
            kwargs["device"] = "mps" if torch.backends.mps.is_available() else "cpu"
        self.routing: Routing | None = None
        if router is not None:
            if engine == "generate":
                raise InputError("router= answers by the decoding engine; leave out engine=generate")
            other = allowed["allow_other_model"]
            self.routing = Routing(router, router_store, router_pool, router_seed, router_size, question_field, other)
        elif router_store is not None or router_pool is not None:
            raise InputError(
                "router_store and router_pool belong to router=; add router=random, random_top, best or oracle"
            )
        engine = engine or ("batched" if router else "generate")
        if engine not in ("generate", "batched"):
            raise InputError(f"engine={engine!r} is not known; use generate or batched")
        if engine == "batched" and (kwargs.get("mixed_precision_dtype") or kwargs.get("tp_plan")):
            raise InputError("engine=batched does not work with mixed_precision_dtype or tp_plan; leave one out")
        deterministic = _flag("deterministic", bool(router) if deterministic is None else deterministic)
        if engine == "generate" and (deterministic or engine_rows is not None):
            raise InputError("engine_rows and deterministic are the engine's; add engine=batched")
        if engine_rows is not None and (not isinstance(engine_rows, int) or engine_rows < 1):
            raise InputError(f"engine_rows must be a whole number above 0, not {engine_rows!r}")
        self._arguments = kwargs
        self._seed = torch.initial_seed()
        super().__init__(pretrained, **kwargs)
        self._shard_over_cpu_ranks()
        self.attention: AttentionMap | None = None
        self._applied = ExitStack()
        if self.mask:
            attention = find_attention(self.model, **self._describe)
            if self.mask.method == "weights":
                _ = self.weights  # before they change
            self.attention = self._applied.enter_context(self.mask.applied_to(self.model, attention))
        self.engine: Engine | None = None
        if engine == "batched":
            self.engine = self._make_engine(engine_rows, deterministic)
        if self.routing and self.engine:
            self.routing.fit_to(self.engine.attention, self.weights, self._mask_fingerprint)
        self._store = ResponseStore(responses, self.rank) if responses else None
        _ = self._store and self.identity  # refuses what cannot be told apart, before anything is computed

    def close(self) -> None:
        """Undo the pruning and release the response store. (The end of the object does so too.)"""
        self._applied.close()
        if self._store:
            self._store.close()

    # ------------------------------------------------------------------ loading

    def _create_model(self, *args: Any, gguf_file: str | None = None, **kwargs: Any) -> None:
        _refuse_misspelt(self._arguments, self.config)
        self._check_before_loading(bool(kwargs.get("trust_remote_code")))
        if gguf_file:
            from transformers import GgufConfig

            kwargs["quantization_config"] = GgufConfig(dequantize=True)
        super()._create_model(*args, gguf_file=gguf_file, **kwargs)

    def _check_before_loading(self, trust_remote_code: bool) -> None:
        """Resolve the mask on a model without weights, so that a mistake costs no minutes of loading."""
        if not self.mask:
            return
        try:
            with torch.device("meta"):
                config = copy.deepcopy(self.config)
                skeleton = self.AUTO_MODEL_CLASS.from_config(config, trust_remote_code=trust_remote_code)
        except Exception as error:  # some models cannot be built without weights; the real one will be checked
            eval_logger.info("heads are checked after loading: a model without weights cannot be built (%s)", error)
            return
        skeleton.config._name_or_path = getattr(self.config, "_name_or_path", "")
        self.mask.heads(find_attention(skeleton, **self._describe))

    def _make_engine(self, rows: int | None, deterministic: bool) -> Engine:
        if self.backend != "causal":
            raise InputError("engine=batched decodes causal models only; leave engine out for an encoder-decoder")
        attention = self.attention or find_attention(self.model, **self._describe)
        return Engine(
            self.model,
            self.tokenizer,
            attention=attention,
            max_rows=rows,
            context=self.max_length,
            deterministic=deterministic,
        )

    def _shard_over_cpu_ranks(self) -> None:
        """Several processes on CPU: `hf` leaves each at rank 0, so that every one would run everything."""
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and accelerator.num_processes > 1 and self.device.type == "cpu":
            self._rank = accelerator.process_index
            self._world_size = accelerator.num_processes

    # ------------------------------------------------------------------ identity

    @cached_property
    def weights(self) -> str | None:
        """Fingerprint of the unpruned weights; None where some are offloaded and cannot be read."""
        return weights_fingerprint(self.model)

    @property
    def _mask_fingerprint(self) -> str:
        return self.mask.fingerprint(self.attention) if self.mask and self.attention else ""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """JSON value of everything that an answer depends on beside its request.

        Raises:
            InputError: weights are offloaded, so that two models could not be told apart.
        """
        if self.weights is None:
            raise InputError(
                "stored answers need weights that can be read, and some are offloaded; leave out the cache"
            )
        generation = getattr(self.model, "generation_config", None)
        return {
            "weights": self.weights,
            "tokenizer": _tokenizer_fingerprint(self.tokenizer),
            "generation_config": generation.to_json_string() if generation else "",
            "mask": self._mask_fingerprint,
            "arguments": {k: str(v) for k, v in sorted(self._arguments.items()) if k not in _NOT_PART_OF_AN_ANSWER},
            **({"router": self.routing.identity} if self.routing else {}),
        }

    # ------------------------------------------------------------------ answering

    @reported
    def set_cache_hook(self, cache_hook: Any) -> None:
        """Keep what `--use_cache` stores apart by model, settings and pruned heads.

        lm-eval keys its cache by prompt and generation settings only. Each combination of the rest gets a
        table of its own in the same file.

        Raises:
            InputError: there is a response store too, or the cache's tables cannot be told apart.
        """
        database = getattr(cache_hook, "dbdict", None)
        if database is not None:
            if self._store:
                raise InputError("--use_cache and responses= both keep answers; give one of them")
            if self.routing:
                raise InputError("--use_cache cannot keep the tries of a router apart; use responses=FOLDER instead")
            if not hasattr(database, "tablename") or not hasattr(database, "conn"):
                raise InputError(
                    "this lm-eval's --use_cache would mix answers of differently pruned models; "
                    "use --model_args responses=FOLDER instead"
                )
            table = f"lmeval_prune_{digest(self.identity)}"
            database.conn.execute(f'CREATE TABLE IF NOT EXISTS "{table}" (key TEXT PRIMARY KEY, value BLOB)')
            database.conn.commit()
            database.tablename = table
        super().set_cache_hook(cache_hook)

    @reported
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """As lm-eval's, through the response store if there is one."""
        if getattr(self.cache_hook, "dbdict", None) is not None:
            for request in requests:
                if _samples(request) and request.args[1].get("do_sample") is None:
                    raise InputError(
                        f"task {request.task_name} samples (temperature {request.args[1]['temperature']}) "
                        f"without do_sample: true, "
                        f"so --use_cache would give every repeat the same answer on the next run; add "
                        f"do_sample=true to --gen_kwargs, or use --model_args responses=FOLDER"
                    )
        if self.routing is None:
            return self._answered("generate_until", requests, disable_tqdm)
        self.routing.prepare(requests)
        answers = self._answered("generate_until", requests, disable_tqdm)
        self.routing.record(requests)
        return answers

    @reported
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As lm-eval's, through the response store if there is one."""
        self._refuse_routing()
        return self._answered("loglikelihood", requests, disable_tqdm)

    @reported
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """As lm-eval's, through the response store if there is one."""
        self._refuse_routing()
        return self._answered("loglikelihood_rolling", requests, disable_tqdm)

    def _refuse_routing(self) -> None:
        if self.routing:
            raise InputError("router= answers generative tasks only; leave out tasks that score given texts")

    def _answered(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        compute = getattr(super(), kind)
        on_engine = kind == "generate_until" and self.engine is not None
        if self._store is None:
            if on_engine:
                hook = self.cache_hook
                return self._batched(
                    requests,
                    occurrences(requests),
                    lambda i, text, _: hook.add_partial(kind, requests[i].args, text),
                    disable_tqdm,
                )
            return compute(requests, disable_tqdm=disable_tqdm)

        def run(missing: Missing) -> list[Any]:
            if on_engine:
                return self._batched(
                    missing.requests,
                    missing.repeats,
                    lambda i, text, _: missing.record(missing.keys[i], text),
                    disable_tqdm,
                )
            hook: Any = self.cache_hook
            schedule: float = self.batch_schedule
            self.cache_hook: Any = Recorder(hook, missing.answered)
            self.batch_schedule: float = min(schedule, len(missing.requests))  # lm-eval divides the requests by it
            try:
                if kind == "generate_until" and any(map(_samples, missing.requests)):
                    # A run that goes on must not draw again what the first requests drew: every set of
                    # requests has a random stream of its own.
                    with torch.random.fork_rng():
                        torch.manual_seed(int(digest([self._seed, missing.keys]), 16) >> 1)
                        return compute(missing.requests, disable_tqdm=disable_tqdm)
                if kind != "loglikelihood_rolling" or self.world_size > 1 or not isinstance(self.batch_size, int):
                    return compute(missing.requests, disable_tqdm=disable_tqdm)
                # lm-eval reports rolling requests only at the end of a call: make several calls
                size = 4 * self.batch_size
                parts = [missing.requests[i : i + size] for i in range(0, len(missing.requests), size)]
                return [response for part in parts for response in compute(part, disable_tqdm=disable_tqdm)]
            finally:
                self.cache_hook, self.batch_schedule = hook, schedule

        def context(request: Any, repeat: int) -> dict[str, Any]:
            if self.routing:
                return {**self.identity, "head": self.routing.head(request, repeat)}
            sampled = kind == "generate_until" and _samples(request)
            engine = "batched" if self.engine else "generate"  # their draws differ
            return {**self.identity, **({"seed": self._seed, "engine": engine} if sampled else {})}

        return answer(self._store, requests, kind, context, run, self._any_rank)

    def _batched(self, requests: list[Any], repeats: list[int], done: batched.Done, disable_tqdm: bool) -> list[str]:
        assert self.engine is not None
        self.engine.progress = not disable_tqdm and self.rank == 0
        if self.routing is None:
            return batched.generate_until(self, self.engine, requests, repeats, done, self._seed)
        pairs = zip(requests, repeats, strict=True)
        masks = [self.routing.masks[self.routing.head(request, repeat)] for request, repeat in pairs]
        return batched.generate_until(self, self.engine, requests, repeats, done, self._seed, masks, greedy=True)

    def _any_rank(self, flag: bool) -> bool:
        if self.world_size <= 1:
            return flag
        return bool(self.all_gather(torch.tensor([int(flag)], device=self.device)).max())

    # ------------------------------------------------------------------ reporting

    def get_model_info(self) -> dict[str, Any]:
        """lm-eval's model information and a section `pruning`: which heads, how many of how many."""
        return {**super().get_model_info(), "pruning": self.pruning_info()}

    def pruning_info(self) -> dict[str, Any]:
        """What was pruned, for the results file."""
        info: dict[str, Any] = {"created_by": CREATED_BY, "weights_fingerprint": self.weights, "heads": []}
        if self.mask and self.attention:
            heads = self.mask.heads(self.attention)
            info |= {
                "heads": [str(head) for head in heads],
                "heads_pruned": len(heads),
                "heads_total": self.attention.total_heads,
                "method": self.mask.method,
                "mask_fingerprint": self.mask.fingerprint(self.attention),
            }
            if self.mask.source_sha256:
                info |= {"mask_file": self.mask.source, "mask_file_sha256": self.mask.source_sha256}
        if self.routing:
            info["router"] = self.routing.info
        return info


def _check_names(pretrained: str, dtype: Any, responses: str | None) -> None:
    """Find mistakes that loading would report late, or by a traceback.

    Raises:
        InputError: saying what is wrong.
    """
    path = Path(pretrained).expanduser()
    if not path.exists():
        close = difflib.get_close_matches(pretrained, embedded.MODELS, n=1)
        if close:
            raise InputError(f"pretrained={pretrained} is not known; did you mean {close[0]}?")
        if pretrained.startswith(("/", "./", "../", "~")) or pretrained.count("/") > 1:
            raise InputError(f"pretrained={pretrained}: there is no such folder")
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise InputError(f"dtype={dtype} is not a type of torch's; use auto, float32, bfloat16 or float16")
    if responses:
        if Path(responses).is_file():
            raise InputError(f"responses={responses} is a file; name a folder")
        try:
            Path(responses).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"responses={responses} cannot be made: {error.strerror}; name another folder") from None


def _flags(empty: Any, other: Any) -> tuple[tuple[str, Any], ...]:
    return ("allow_empty_layer", empty), ("allow_other_model", other)


def _flag(name: str, value: Any) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "none": False}
    if str(value).lower() not in words:
        raise InputError(f"{name}={value!r} is neither true nor false")
    return words[str(value).lower()]


def _mask(
    heads: Any, path: str | None, method: str, allow_empty_layer: bool, allow_other_model: bool
) -> HeadMask | None:
    """The union of `heads` and the mask at `path`; None if there is neither."""
    options: dict[str, Any] = {"method": method, "allow_empty_layer": allow_empty_layer}
    if heads == "":
        raise InputError("heads= is empty; leave it out for the unpruned model")
    loaded = HeadMask.load(path, allow_other_model=allow_other_model, **options) if path else None
    given = HeadMask.parse(heads, **options) if heads is not None else None
    if loaded and given:
        return loaded | given
    HeadMask(**options)  # refuses a wrong method even where there is nothing to prune
    return loaded or given


def _refuse_misspelt(arguments: dict[str, Any], config: Any) -> None:
    """An argument that is nobody's but close to ours is a slip: `from_pretrained` would swallow it.

    Raises:
        InputError: naming the argument that was probably meant.
    """
    ours = [p for p in inspect.signature(PrunedHFLM.__init__).parameters if p not in ("self", "kwargs", "pretrained")]
    theirs = set(inspect.signature(HFLM.__init__).parameters)
    for name in arguments:
        close = difflib.get_close_matches(name, ours, n=1, cutoff=0.75)
        if name not in theirs and not hasattr(config, name) and close:
            raise InputError(f"unknown model_arg {name!r}; did you mean {close[0]!r}?")


def _samples(request: Any) -> bool:
    return batched.samples(request.args[1])


def _tokenizer_fingerprint(tokenizer: Any) -> str:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    content = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    return digest([content, str(tokenizer.special_tokens_map)])


def weights_fingerprint(model: torch.nn.Module) -> str | None:
    """Digest of all parameters and buffers: names, shapes, types, and two checksums of every tensor's bytes.

    The checksums (a sum, and a sum weighted by place, modulo 2⁶⁴) are computed where the tensor is. None if
    a tensor has no data here (offloaded weights).
    """
    state = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            return None
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        words = local.detach().contiguous().reshape(-1).view(torch.uint8)
        words = words.view(torch.int32) if words.numel() % 4 == 0 else words
        sums = [0, 0]
        for number, chunk in enumerate(words.split(2**22)):
            values = chunk.to(torch.int64)
            places = torch.arange(1, len(values) + 1, device=values.device)
            sums[0] += int(values.sum())
            sums[1] += int((values * (places * 2654435761 + number)).sum())
        state.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{sums[0] % 2**64},{sums[1] % 2**64};".encode())
    return state.hexdigest()[:16]
