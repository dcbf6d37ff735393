"""Identify a loaded model: its name, and fingerprints of its configuration and weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from lmeval_prune.artefacts import digest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.weak import WeakIdRef

_CHUNK = 2**22  # numbers of a tensor that are read at a time; a fingerprint depends on it
_CACHED = 2**16  # numbers whose checksum is computed in a processor's cache
_POSITION = 2654435761  # factor of a number's position in its chunk


def model_name(name_or_path: str) -> str:
    """Return a model's short name, the same for `org/NAME`, a folder `…/NAME` and its folder in the hub cache.

    A training checkpoint keeps the name of its run: `…/RUN/checkpoint-500` is `RUN/checkpoint-500`.
    """
    parts = [part for part in name_or_path.replace("\\", "/").split("/") if part]
    if len(parts) >= 3 and parts[-2] == "snapshots":
        return parts[-3].rpartition("--")[2]
    generic = len(parts) > 1 and re.fullmatch(r"(checkpoint|step|epoch)[-_]?\d+", parts[-1])
    return "/".join(parts[-2:]) if generic else parts[-1] if parts else ""


def text_config(model: Any) -> Any:
    """Return the configuration of a model's language model; None if the model has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def config_fingerprint(config: Any) -> str:
    """Return a digest of a configuration without its path, version and dtype."""
    ignored = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
    return digest({key: str(value) for key, value in config.to_dict().items() if key not in ignored})


def weights_fingerprint(model: nn.Module, rounded_to: torch.dtype | None = None) -> str | None:
    """Return a digest of all parameters and saved buffers: names, shapes and two checksums of each tensor.

    The storage type does not matter: bfloat16 weights loaded as float32 have the same fingerprint. `rounded_to` gives
    the fingerprint of the model loaded in that type. The checksums (a sum, and a position-weighted sum, modulo 2⁶⁴) are
    computed on the tensor's device. Returns 16 hexadecimal digits, or None if a tensor is on the meta device.
    """
    import torch

    state = hashlib.sha256()
    for name, tensor, is_parameter in _tensors(model):
        if tensor.is_meta:
            return None
        sums = [0, 0]
        size = _CACHED if tensor.device.type == "cpu" else _CHUNK  # a GPU waits for each piece
        width = 1 if tensor.is_floating_point() else tensor.element_size()  # whole numbers are read as bytes
        weights = torch.arange(1, min(size, tensor.numel()) * width + 1, device=tensor.device) * _POSITION
        for number, chunk in enumerate(_chunks(tensor)):
            for start, piece in enumerate(chunk.split(size)):
                if rounded_to and is_parameter and piece.is_floating_point():
                    piece = piece.to(rounded_to)
                values = _bits(piece)
                plain = int(values.sum(dtype=torch.int64))
                sums[0] += plain
                before = start * size * width * _POSITION + number
                sums[1] += int((values * weights[: len(values)]).sum()) + before * plain
        state.update(f"{name}{tuple(tensor.shape)}{sums[0] % 2**64},{sums[1] % 2**64};".encode())
    return state.hexdigest()[:16]


def weight_writes(model: nn.Module) -> list[tuple[WeakIdRef, int]]:
    """Return what differs after parameters or saved buffers were written in place or replaced, without reading them.

    What is written through `.data` is not noticed, nor what accelerate manages: it replaces offloaded weights itself.
    """
    from torch.utils.weak import WeakIdRef

    if is_dispatched(model):
        return []
    tensors = [
        *model.parameters(),
        *(
            buffer
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ),
    ]
    return [(WeakIdRef(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]


def nonfinite_tensor(model: nn.Module) -> str | None:
    """Return the name and layer of the first parameter with NaN or infinite values, or None.

    Summing a chunk is much faster than testing each value. A sum of finite values may overflow, so a non-finite sum is
    confirmed value by value. Buffers are not tested: masks hold -inf.
    """
    for name, tensor, is_parameter in _tensors(model):
        testable = tensor.is_floating_point() and tensor.dtype.itemsize > 1  # torch cannot test 8-bit floats
        if tensor.is_meta or not is_parameter or not testable:
            continue
        if not all(chunk.sum().isfinite() or chunk.isfinite().all() for chunk in _chunks(tensor)):
            layer = re.search(r"\.(\d+)\.", name)
            return f"{name} of layer {layer[1]}" if layer else name
    return None


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """Return the state of PEFT adapters by module: [active adapters with scales, merged adapters, disabled]."""
    adapters: dict[str, Any] = {}
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, list | tuple) and hasattr(module, "base_layer"):
            scaling = getattr(module, "scaling", None) or {}
            merged, disabled = getattr(module, "merged_adapters", []), getattr(module, "disable_adapters", False)
            adapters[name] = [[[key, str(scaling.get(key))] for key in active], list(merged), bool(disabled)]
    return adapters


def loadable_fingerprints(model: nn.Module, fingerprint: str | None) -> list[str]:
    """Return the fingerprints of a model in its own type (`fingerprint`) and in each type it may be loaded in."""
    import torch

    if not fingerprint:
        return []
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    largest = max((dtype.itemsize for dtype in dtypes), default=0)  # a larger type keeps the values
    loadable = (torch.float32, torch.bfloat16, torch.float16)
    others = [dtype for dtype in loadable if dtype.itemsize <= largest and {dtype} != dtypes]
    rounded = [weights_fingerprint(model, dtype) for dtype in others]
    return list(dict.fromkeys(filter(None, [fingerprint, *rounded])))


def is_dispatched(model: nn.Module) -> bool:
    """Return whether accelerate manages the model's weights (`device_map`, with or without offloading)."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def input_device(model: nn.Module) -> torch.device:
    """Return the device on which a model takes its token ids: of offloaded weights, that on which they compute."""
    import torch

    device = next(model.parameters()).device
    if device.type == "meta":
        hooks = (module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook"))
        devices = (getattr(part, "execution_device", None) for hook in hooks for part in getattr(hook, "hooks", [hook]))
        device = torch.device(next((hook_device for hook_device in devices if hook_device is not None), device))
    return device


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, is parameter) of each parameter and saved buffer, without duplicates.

    Offloaded ones are loaded module by module.
    """
    saved, modules = model.state_dict().keys(), dict(model.named_modules())
    if not is_dispatched(model):
        yield from ((name, parameter, True) for name, parameter in model.named_parameters())
        yield from ((name, buffer, False) for name, buffer in model.named_buffers() if name in saved)
        return
    import torch
    from accelerate.utils import align_module_device, has_offloaded_params

    # offloading replaces tied weights by separate tensors, so they are recognised by name
    keys = {path: getattr(module, "all_tied_weights_keys", None) or () for path, module in modules.items()}
    tied, yielded = {f"{path}.{key}".lstrip(".") for path in keys for key in keys[path]}, set()
    for is_parameter in (True, False):
        for path, module in modules.items():
            offloaded = has_offloaded_params(module)
            with align_module_device(module, torch.device("cpu")) if offloaded else nullcontext():
                for key, tensor in (module._parameters if is_parameter else module._buffers).items():
                    name = f"{path}.{key}".lstrip(".")
                    if tensor is None or name in tied or tensor in yielded or not (is_parameter or name in saved):
                        continue
                    if not offloaded:  # a reference would keep an offloaded tensor in memory
                        yielded.add(tensor)
                    yield name, tensor, is_parameter


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().reshape(-1)
    yield from local.split(_CHUNK)


def _bits(values: Tensor) -> Tensor:
    """Return integers that are equal where values are equal: float32 bits where exact (MPS lacks float64).

    They have 32 bits if all values have.
    """
    import torch

    if not values.is_floating_point():
        return values.contiguous().view(torch.uint8).to(torch.int64)
    small = values.to(torch.float32)
    bits = (small + 0.0).contiguous().view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    if values.dtype != torch.float64:
        return bits
    bits = bits.to(torch.int64)
    return torch.where(small.to(torch.float64) == values, bits, (values + 0.0).contiguous().view(torch.int64))
