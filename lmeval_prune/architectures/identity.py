"""Identity of a loaded model: its name, and a fingerprint of its weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def model_name(name_or_path: str) -> str:
    """Return the name of a model, the same for `org/NAME`, a folder `…/NAME` and a hub cache folder of it.

    A training checkpoint keeps its run's name: `…/RUN/checkpoint-500` is `RUN/checkpoint-500`.
    """
    parts = [part for part in name_or_path.replace("\\", "/").split("/") if part]
    if len(parts) >= 3 and parts[-2] == "snapshots":
        return parts[-3].rpartition("--")[2]
    generic = len(parts) > 1 and re.fullmatch(r"(checkpoint|step|epoch)[-_]?\d+", parts[-1])
    return "/".join(parts[-2:]) if generic else parts[-1] if parts else ""


def weights_fingerprint(model: nn.Module, rounded_to: torch.dtype | None = None) -> str | None:
    """Return a digest of all weights (parameters, and buffers that are saved): names, shapes, two checksums each.

    Values count, not how they are stored: bfloat16 weights loaded as float32 have the same fingerprint. The
    checksums (a sum, and a sum weighted by place, modulo 2⁶⁴) are computed where the tensor is.

    Args:
        model: the model.
        rounded_to: floating-point parameters are rounded to this type first: the fingerprint that the model has
            when it is loaded so.

    Returns:
        None if a tensor has no data here.
    """
    import torch

    state = hashlib.sha256()
    for name, tensor, is_weight in _tensors(model):
        if tensor.is_meta:
            return None
        sums = [0, 0]
        for number, chunk in enumerate(_chunks(tensor)):
            if rounded_to and is_weight and chunk.is_floating_point():
                chunk = chunk.to(rounded_to)
            values = _bits(chunk)
            places = torch.arange(1, len(values) + 1, device=values.device)
            sums[0] += int(values.sum())
            sums[1] += int((values * (places * 2654435761 + number)).sum())
        state.update(f"{name}{tuple(tensor.shape)}{sums[0] % 2**64},{sums[1] % 2**64};".encode())
    return state.hexdigest()[:16]


def nonfinite_tensor(model: nn.Module) -> str | None:
    """Return the name and layer of the first parameter that has NaN or infinite values; None of none.

    A sum is many times as fast as asking each value, and not finite where one of them is not. A sum of finite values
    may overflow; only then each is asked. Buffers may well hold -inf, for masks.
    """
    for name, tensor, is_weight in _tensors(model):
        plain = tensor.is_floating_point() and tensor.dtype.itemsize > 1  # quantised: torch cannot ask
        if tensor.is_meta or not is_weight or not plain:
            continue
        if not all(chunk.sum().isfinite() or chunk.isfinite().all() for chunk in _chunks(tensor)):
            return tensor_in_layer(name)
    return None


def tensor_in_layer(name: str) -> str:
    """Return a tensor's name, and the number of the layer that it says."""
    layer = re.search(r"\.(\d+)\.", name)
    return f"{name} of layer {layer[1]}" if layer else name


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """Return what PEFT's adapters are besides weights, by module: active ones with their scales, merged, disabled."""
    adapters: dict[str, Any] = {}
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, list | tuple) and hasattr(module, "base_layer"):
            scaling = getattr(module, "scaling", None) or {}
            merged, disabled = getattr(module, "merged_adapters", []), getattr(module, "disable_adapters", False)
            adapters[name] = [[[key, str(scaling.get(key))] for key in active], list(merged), bool(disabled)]
    return adapters


def loadable_fingerprints(model: nn.Module, fingerprint: str | None) -> list[str]:
    """Return the fingerprints that a model has in its own type and when it is loaded in another one.

    Args:
        model: the model.
        fingerprint: its `weights_fingerprint`; of None there are none.
    """
    import torch

    if not fingerprint:
        return []
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    largest = max((kind.itemsize for kind in kinds), default=0)  # a larger type keeps the values
    loadable = (torch.float32, torch.bfloat16, torch.float16)
    others = [kind for kind in loadable if kind.itemsize <= largest and {kind} != kinds]
    rounded = [weights_fingerprint(model, kind) for kind in others]
    return list(dict.fromkeys(filter(None, [fingerprint, *rounded])))


def is_dispatched(model: nn.Module) -> bool:
    """Return whether accelerate has placed a model's weights, and brings those that it offloaded as they are needed."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield each parameter and saved buffer once: its name, itself, and whether it is a parameter.

    Offloaded ones are brought module by module; those that cannot be had are on the meta device.
    """
    saved = model.state_dict().keys()
    if not is_dispatched(model):
        yield from ((name, parameter, True) for name, parameter in model.named_parameters())
        yield from ((name, buffer, False) for name, buffer in model.named_buffers() if name in saved)
        return
    import torch
    from accelerate.utils import align_module_device, has_offloaded_params

    modules, seen = dict(model.named_modules()), set()
    # a tied weight is no longer the same object as its first name
    tied = {
        f"{path}.{key}".removeprefix(".")
        for path, module in modules.items()
        for key in getattr(module, "all_tied_weights_keys", None) or ()
    }
    for is_weight in (True, False):
        for path, module in modules.items():
            offloaded = has_offloaded_params(module)
            with align_module_device(module, torch.device("cpu")) if offloaded else nullcontext():
                for key, tensor in (module._parameters if is_weight else module._buffers).items():
                    name = f"{path}.{key}".removeprefix(".")
                    if tensor is None or name in tied or tensor in seen or not (is_weight or name in saved):
                        continue
                    if not offloaded:  # else it would be kept in memory
                        seen.add(tensor)
                    yield name, tensor, is_weight


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield pieces of a tensor's values that are here, so that copies of them stay small."""
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().reshape(-1)
    yield from local.split(2**22)


def _bits(values: Tensor) -> Tensor:
    """Return whole numbers that are equal where the values are; those of float32, which MPS has too, where they fit."""
    import torch

    if not values.is_floating_point():
        return values.contiguous().view(torch.uint8).to(torch.int64)
    small = values.to(torch.float32)
    bits = (small + 0.0).contiguous().view(torch.int32).to(torch.int64)  # + 0.0: no negative zeros
    if values.dtype != torch.float64:
        return bits
    return torch.where(small.to(torch.float64) == values, bits, (values + 0.0).contiguous().view(torch.int64))
