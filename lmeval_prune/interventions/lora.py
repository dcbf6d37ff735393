"""A LoRA adapter in PEFT's format, not merged: a projection computes W x + s B A x.

A (rank, inputs) and B (outputs, rank) are the adapter's matrices of this projection. s is `lora_alpha` / rank, or
`lora_alpha` / √rank with `use_rslora`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.blocks import in_features, out_features, weight_of
from lmeval_prune.artefacts import digest, read_json, read_tensors
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import Intervention
from lmeval_prune.interventions.plan import copies_of, tensors_digest
from lmeval_prune.interventions.table import ArtefactContents

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight")
_REWRITES = ("pissa", "olora", "loftq", "corda", "lora_ga")  # initialisations that change the model's own weights
_UNSUPPORTED = ("use_dora", "modules_to_save", "layer_replication", "target_parameters", "alora_invocation_tokens")


class LoraContents(ArtefactContents):
    """Fields of a LoRA intervention's artefact."""

    adapter: str


class Update(NamedTuple):
    """The update of one projection."""

    a: Tensor  # (rank, inputs)
    b: Tensor  # (outputs, rank)
    scaling: float


@dataclass(frozen=True)
class Lora(Intervention):
    """Add an adapter to a model.

    Attributes:
        adapter: folder with `adapter_config.json` and `adapter_model.safetensors`.
        sha256: digest of the adapter's matrices and scaling, computed from the folder.
        updates: by the projection's module name.
    """

    contents: ClassVar[Any] = LoraContents
    tokenwise = True
    adapter: str = field(compare=False)
    sha256: str = ""
    updates: Mapping[str, Update] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        updates = _read(Path(self.adapter).expanduser())
        matrices = {f"{name}.{part}": getattr(update, part) for name, update in updates.items() for part in ("a", "b")}
        scaling = {name: update.scaling for name, update in sorted(updates.items())}
        sha256 = digest([tensors_digest(matrices), scaling])
        if self.sha256 not in ("", sha256):
            raise InputError(f"the adapter {self.adapter} has changed since the file that names it was written")
        object.__setattr__(self, "sha256", sha256)
        object.__setattr__(self, "updates", updates)

    def resolve(self, model_map: ModelMap) -> Self:
        for name, update in self.updates.items():
            module = self._projection(name, model_map)
            if (len(update.b), update.a.shape[1]) != (out_features(module), in_features(module)):
                raise InputError(f"the adapter {self.adapter} updates {name} of another shape than the model's")
        return self

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Hook each updated projection; refuse a model whose heads an adapter of `export adapter` does not prune."""
        manifest = Path(self.adapter).expanduser() / "lmeval_prune.json"
        exported = manifest.is_file() and read_json(manifest).get("schema") == "lmeval-prune/adapter"
        for name, update in self.updates.items():
            module = self._projection(name, model_map)
            if exported and not _prunes(update, module):
                raise InputError(
                    f"the adapter {self.adapter} was exported from another model: {name} has other weights in this "
                    f"one; export it from this model"
                )
            stack.callback(module.register_forward_hook(_adding(update)).remove)

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        report: dict[str, Any] = super().report(model_map)
        report["lora"] |= {"adapter": Path(self.adapter).name, "projections": len(self.updates)}
        return report

    def save(self, path: str | os.PathLike[str], model_map: ModelMap, **extra: Any) -> None:
        super().save(path, model_map, adapter=self.adapter, **extra)

    @classmethod
    def fields_of(cls, path: Path, content: dict[str, Any]) -> dict[str, Any]:
        return {"adapter": content["adapter"]}

    def _projection(self, name: str, model_map: ModelMap) -> nn.Module:
        for prefix in ("", "base_model.model."):  # of a model that PEFT wraps
            try:
                module = model_map.model.get_submodule(prefix + name)
                out_features(module)
                return module
            except AttributeError:
                continue
        raise InputError(f"the model has no projection {name}, which the adapter {self.adapter} updates")


def _adding(update: Update) -> Callable[..., Tensor]:
    """Return a hook that adds an update to a projection's output, computed in at least float32."""
    a_like, b_like = copies_of(update.a), copies_of(update.b)

    def hook(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        x = inputs[0].to(torch.promote_types(output.dtype, torch.float32))
        added = nn.functional.linear(nn.functional.linear(x, a_like(x)), b_like(x)) * update.scaling
        return (output + added).to(output.dtype)

    return hook


def _prunes(update: Update, module: nn.Module) -> bool:
    """Return whether an update cancels weights, apart from rounding if they were loaded in another type.

    The weights say more than a digest of the checkpoint's files: they may be stored in other files, or trained since.
    """
    try:
        weight = weight_of(module)
    except InputError:  # of a quantised model
        return True
    columns = update.a.any(0)
    added = (update.b.double() @ update.a.double() * update.scaling)[:, columns]
    dtypes = {weight.dtype, update.b.dtype}
    rounding = sum(torch.finfo(dtype).eps for dtype in dtypes) / 2 if len(dtypes) > 1 else 0.0
    return torch.allclose(weight.cpu()[:, columns].double(), -added, rtol=rounding, atol=rounding * 1e-4)


def _read(folder: Path) -> dict[str, Update]:
    config = read_lora_config(folder, "load it by peft=, or ")
    unsupported = [name for name in _UNSUPPORTED if config.get(name)]
    if unsupported or config.get("bias", "none") != "none":
        raise InputError(f"lora={folder} has {(unsupported or ['bias'])[0]}, which is not supported; load it by peft=")
    matrices: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_tensors(folder / "adapter_model.safetensors").items():
        match = _NAME.fullmatch(name)
        if not match or tensor.ndim != 2:
            raise InputError(f"lora={folder} has a tensor {name}, which is not supported; load it by peft=")
        matrices.setdefault(match["module"], {})[match["matrix"]] = tensor
    updates, patterns = {}, config.get("alpha_pattern") or {}
    for module, pair in matrices.items():
        rank = len(pair["A"])
        own = (alpha for pattern, alpha in patterns.items() if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module))
        alpha = float(next(own, config.get("lora_alpha", 8)))
        updates[module] = Update(pair["A"], pair["B"], alpha / (rank**0.5 if config.get("use_rslora") else rank))
    return updates


def read_lora_config(folder: Path, remedy: str = "") -> dict[str, Any]:
    """Read the configuration of a LoRA adapter; refuse other adapters.

    `remedy` precedes another one for an adapter of weights that its initialisation changed.
    """
    config: dict[str, Any] = read_json(folder / "adapter_config.json")
    if (kind := config.get("peft_type")) != "LORA":
        raise InputError(f"lora={folder} is an adapter of type {kind}; give a LoRA adapter")
    if (start := str(config.get("init_lora_weights"))).lower().startswith(_REWRITES):
        raise InputError(
            f"lora={folder} was trained on weights that init_lora_weights={start} had changed; {remedy}save it again "
            f"with path_initial_model_for_weight_conversion= of PEFT's save_pretrained"
        )
    return config
