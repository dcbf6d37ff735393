"""`--model pruned-hf`: lm-eval's Hugging Face model class with interventions applied to the model."""

from __future__ import annotations

import copy
import difflib
import hashlib
import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from lmeval_prune.architectures import AttentionMap, find_attention
from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError, reported
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.models import embedded
from lmeval_prune.models.responses import Recorder, ResponseStore, answer

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
        responses: folder of our resumable response store.
        attention_path, attention_output, attention_heads: describe a family we do not know; see
            `find_attention`.

    Raises:
        InputError: an argument cannot be used; before the weights are loaded wherever that can be known.
    """

    @reported
    def __init__(
        self,
        pretrained: Any,
        heads: Any = None,
        mask: str | None = None,
        mask_method: str = "hook",
        allow_empty_layer: bool = False,
        allow_other_model: bool = False,
        responses: str | None = None,
        attention_path: str | None = None,
        attention_output: str | None = None,
        attention_heads: int | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_misspelt(kwargs)
        _check_data_folder()
        self._describe: dict[str, Any] = {
            "attention_path": attention_path,
            "attention_output": attention_output,
            "attention_heads": attention_heads,
        }
        self.mask = _mask(heads, mask, mask_method, allow_empty_layer, allow_other_model)
        self._mask_file = mask
        if self.mask and kwargs.get("tp_plan"):
            raise InputError("heads cannot be pruned under tp_plan yet; use parallelize=true or one GPU a process")
        if isinstance(pretrained, str):
            pretrained = embedded.resolve(pretrained)
        if kwargs.get("device") is None and not torch.cuda.is_available():
            kwargs["device"] = "mps" if torch.backends.mps.is_available() else "cpu"
        super().__init__(pretrained, **kwargs)
        self._shard_over_cpu_ranks()
        self._identity: dict[str, Any] = {
            "weights": weights_fingerprint(self.model),
            **{k: str(v) for k, v in sorted(kwargs.items()) if k not in _NOT_PART_OF_AN_ANSWER},
        }
        self.attention: AttentionMap | None = None
        self._applied = ExitStack()
        if self.mask:
            attention = find_attention(self.model, **self._describe)
            self.attention = self._applied.enter_context(self.mask.applied_to(self.model, attention))
            self._identity["heads"] = [str(head) for head in self.mask.heads(attention)]
        self._store = ResponseStore(responses, self.rank) if responses else None

    # ------------------------------------------------------------------ loading

    def _create_model(self, *args: Any, gguf_file: str | None = None, **kwargs: Any) -> None:
        self._check_before_loading()
        if gguf_file:
            from transformers import GgufConfig

            kwargs["quantization_config"] = GgufConfig(dequantize=True)
        super()._create_model(*args, gguf_file=gguf_file, **kwargs)

    def _check_before_loading(self) -> None:
        """Resolve the mask on a model without weights, so that a mistake costs no minutes of loading."""
        if not self.mask:
            return
        try:
            with torch.device("meta"):
                skeleton = self.AUTO_MODEL_CLASS.from_config(copy.deepcopy(self.config))
        except Exception:  # custom code, say: the real model will be checked
            return
        skeleton.config._name_or_path = getattr(self.config, "_name_or_path", "")
        self.mask.heads(find_attention(skeleton, **self._describe))

    def _shard_over_cpu_ranks(self) -> None:
        """Several processes on CPU: `hf` leaves each at rank 0, so that every one would run everything."""
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and accelerator.num_processes > 1 and self.device.type == "cpu":
            self._rank = accelerator.process_index
            self._world_size = accelerator.num_processes

    # ------------------------------------------------------------------ answering

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Keep what `--use_cache` stores apart by model, settings and pruned heads.

        lm-eval keys its cache by prompt and generation settings only. Each combination of the rest gets a
        table of its own in the same file.

        Raises:
            InputError: the cache is not one whose tables can be told apart.
        """
        database = getattr(cache_hook, "dbdict", None)
        if database is not None:
            if not hasattr(database, "tablename") or not hasattr(database, "conn"):
                raise InputError(
                    "this lm-eval's --use_cache would mix answers of differently pruned models; "
                    "use --model_args responses=FOLDER instead"
                )
            table = f"lmeval_prune_{digest(self._identity)}"
            database.conn.execute(f'CREATE TABLE IF NOT EXISTS "{table}" (key TEXT PRIMARY KEY, value BLOB)')
            database.conn.commit()
            database.tablename = table
        super().set_cache_hook(cache_hook)

    @reported
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """As lm-eval's, through the response store if there is one."""
        if getattr(self.cache_hook, "dbdict", None) is not None:
            for request in requests:
                settings = request.args[1]
                if float(settings.get("temperature") or 0) > 0 and settings.get("do_sample") is None:
                    raise InputError(
                        f"task {request.task_name} samples (temperature {settings['temperature']}) "
                        f"without do_sample: true, "
                        f"so --use_cache would give every repeat the same answer on the next run; add "
                        f"do_sample=true to --gen_kwargs, or use --model_args responses=FOLDER"
                    )
        return self._answered("generate_until", requests, disable_tqdm)

    @reported
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As lm-eval's, through the response store if there is one."""
        return self._answered("loglikelihood", requests, disable_tqdm)

    @reported
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """As lm-eval's, through the response store if there is one."""
        return self._answered("loglikelihood_rolling", requests, disable_tqdm)

    def _answered(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        compute = getattr(super(), kind)
        if self._store is None:
            return compute(requests, disable_tqdm=disable_tqdm)

        def run(missing: list[Any], answered: Callable[..., None]) -> list[Any]:
            hook: Any = self.cache_hook
            self.cache_hook: Any = Recorder(hook, answered)
            try:
                if kind != "loglikelihood_rolling" or self.world_size > 1:
                    return compute(missing, disable_tqdm=disable_tqdm)
                # lm-eval reports rolling requests only at the end of a call: make several calls
                size = 4 * self.batch_size if isinstance(self.batch_size, int) else 64
                parts = [missing[i : i + size] for i in range(0, len(missing), size)]
                return [response for part in parts for response in compute(part, disable_tqdm=disable_tqdm)]
            finally:
                self.cache_hook = hook

        shape = dict(self._identity)
        if kind == "generate_until" and any(_samples(request.args[1]) for request in requests):
            shape["seed"] = torch.initial_seed()
        return answer(self._store, requests, kind, shape, run, self._any_rank)

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
        from lmeval_prune.artefacts import CREATED_BY

        info: dict[str, Any] = {
            "created_by": CREATED_BY,
            "weights_fingerprint": self._identity["weights"],
            "heads": [],
        }
        if self.mask and self.attention:
            heads = self.mask.heads(self.attention)
            info |= {
                "heads": [str(head) for head in heads],
                "heads_pruned": len(heads),
                "heads_total": self.attention.total_heads,
                "method": self.mask.method,
                "mask_fingerprint": self.mask.fingerprint(self.attention),
            }
        if self._mask_file:
            info["mask_file"] = str(self._mask_file)
            info["mask_file_sha256"] = hashlib.sha256(Path(self._mask_file).read_bytes()).hexdigest()
        return info


def _mask(
    heads: Any, path: str | None, method: str, allow_empty_layer: bool, allow_other_model: bool
) -> HeadMask | None:
    """The union of `heads` and the mask at `path`; None if there is neither."""
    options: dict[str, Any] = {"method": method, "allow_empty_layer": allow_empty_layer}
    loaded = HeadMask.load(path, allow_other_model=allow_other_model, **options) if path else None
    given = HeadMask.parse(heads, **options) if heads not in (None, "") else None
    if loaded and given:
        return loaded | given
    HeadMask(**options)  # refuses a wrong method even where there is nothing to prune
    return loaded or given


def _refuse_misspelt(unknown: dict[str, Any]) -> None:
    """An argument that is nobody's but close to ours is a slip: `from_pretrained` would swallow it.

    Raises:
        InputError: naming the argument that was probably meant.
    """
    ours = [p for p in inspect.signature(PrunedHFLM.__init__).parameters if p not in ("self", "kwargs", "pretrained")]
    theirs = set(inspect.signature(HFLM.__init__).parameters)
    for name in unknown:
        close = difflib.get_close_matches(name, ours, n=1, cutoff=0.75)
        if name not in theirs and close:
            raise InputError(f"unknown model_arg {name!r}; did you mean {close[0]!r}?")


def _check_data_folder() -> None:
    folder = os.environ.get("LMEVAL_PRUNE_DATA")
    if folder and not Path(folder).is_dir():
        raise InputError(f"LMEVAL_PRUNE_DATA={folder} is not a folder; correct it, or unset it to load from the hub")


def _samples(settings: dict[str, Any]) -> bool:
    return bool(settings.get("do_sample")) or float(settings.get("temperature") or 0) > 0


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Digest of every parameter's name, shape, dtype and 16 evenly spaced values: tells models apart cheaply."""
    state = hashlib.sha256()
    for name, parameter in model.named_parameters():
        state.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        if parameter.numel() and not parameter.is_meta:
            flat = parameter.detach().reshape(-1)
            places = [i * (flat.numel() - 1) // 15 for i in range(16)]
            sample = flat[torch.tensor(places, device=flat.device)]
            state.update(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]
