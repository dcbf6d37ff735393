"""Choice between the Triton kernel of an operation and the PyTorch twin beside it.

Kernels run on CUDA devices; in tests also on a CPU, in Triton's interpreter. Where a kernel is expected and cannot
serve a case, a warning says so, once for each reason.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch

logger = logging.getLogger(__name__)

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
KERNELS_ON_CPU = False  # tests set it, together with TRITON_INTERPRET=1 before triton is imported
TAKEN: Counter[str] = Counter()  # how often each way was taken: `decide: triton`, `decide: torch`
WIDEST = 256  # of a head: more does not fit into a program's registers


def on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is where kernels run."""
    return tensor.is_cuda or KERNELS_ON_CPU


def takes_kernel(operation: str, tensor: torch.Tensor, *obstacles: str | None) -> bool:
    """Return whether a kernel shall run; count it in `TAKEN`.

    Args:
        operation: its name.
        tensor: says on which device.
        obstacles: what the kernel cannot do in this case, None for what it can.
    """
    if not on_device(tensor):
        return False
    reasons = [reason for reason in (*obstacles, _triton_missing()) if reason]
    if reasons:
        _warn_once(operation, reasons[0])
    TAKEN[f"{operation}: {'torch' if reasons else 'triton'}"] += 1
    return not reasons


@cache
def _triton_missing() -> str | None:
    return None if find_spec("triton") else "triton is not installed (pip install triton)"


@cache
def _warn_once(operation: str, reason: str) -> None:
    logger.warning("%s runs in PyTorch, not in its Triton kernel: %s", operation, reason)


def unlike(*tensors: torch.Tensor) -> str | None:
    """Return what keeps these tensors from one kernel: their types, devices, or that they need gradients."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1 or not types <= {torch.float32, torch.float16, torch.bfloat16}:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in types)
        return f"it takes one type of float32, float16 and bfloat16, not {' and '.join(names)}"
    if len({tensor.device for tensor in tensors}) > 1:
        return "its tensors are on several devices"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "it has no gradients"
    return None


def too_wide(*widths: int) -> str | None:
    """Return a message if heads are wider than kernels take."""
    return f"heads are {max(widths)} wide, more than {WIDEST}" if max(widths) > WIDEST else None


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Launch kernels inside the block where a tensor is."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
