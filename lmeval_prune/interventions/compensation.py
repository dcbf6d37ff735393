"""Compensation of plans: tensors by the names of projections, and hooks that apply them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lmeval_prune.architectures import ModelMap


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of named tensors."""
    from safetensors.torch import save

    ordered = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    return hashlib.sha256(save(ordered)).hexdigest()[:16]


def find_projection(name: str, model_map: ModelMap) -> nn.Module:
    """Return the projection of a compensation, named as in `Plan.compensation`."""
    projections: dict[str, nn.Module] = {f"{layer.label}.o_proj": layer.o_proj for layer in model_map.attention}
    projections |= {f"{block.label}.down": block.down for block in model_map.feed_forward}
    return projections[name.rpartition(".")[0]]


class DeviceCopies:
    """A tensor with a cached copy for each device and dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.original = tensor
        self.copies: dict[Any, Tensor] = {}

    def like(self, other: Tensor) -> Tensor:
        """Return the copy on the device and in the dtype of another tensor."""
        key = (other.device, other.dtype)
        if key not in self.copies:
            self.copies[key] = self.original.to(other)
        return self.copies[key]


class AddBias(DeviceCopies):
    """Hook that adds a bias to a projection's output."""

    def register(self, projection: nn.Module) -> RemovableHandle:
        """Put the hook on a projection."""
        return projection.register_forward_hook(self)

    def __call__(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        """Add the bias."""
        return output + self.like(output)


class ReplaceWeight(DeviceCopies):
    """Hook that computes a projection's output with another weight.

    It runs before the projection's other hooks, so that adapters and biases are added to its output. Of several, the
    latest counts.
    """

    def register(self, projection: nn.Module) -> RemovableHandle:
        """Put the hook on a projection, or on the one that PEFT wraps."""
        module: nn.Module = getattr(projection, "base_layer", projection)
        return module.register_forward_hook(self, prepend=True)

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Compute the output anew."""
        latest = next(hook for hook in module._forward_hooks.values() if isinstance(hook, ReplaceWeight))
        bias: Any = module.bias
        return nn.functional.linear(inputs[0], self.like(inputs[0]), bias) if latest is self else output
