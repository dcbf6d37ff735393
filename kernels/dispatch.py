"""Which way an operation takes: its Triton kernel, or the PyTorch twin beside it.

A kernel runs on CUDA devices, and on a CPU only in Triton's interpreter (`TRITON_INTERPRET=1` before triton is first
imported). Where a kernel was to be expected and cannot serve a case, a warning says so, once for each reason.
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
TAKEN: Counter[str] = Counter()  # how often each way was taken: `decide: triton`, `decide: torch`
HALVES = (torch.float16, torch.bfloat16)
WIDEST = 256  # of a head: more does not fit into a program's registers


@cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None


def takes_kernel(operation: str, tensor: torch.Tensor, *obstacles: str | None) -> bool:
    """Whether a kernel shall run; counted in `TAKEN`.

    Args:
        operation: its name.
        tensor: says on which device.
        obstacles: what the kernel cannot do about this case, None for what it can.
    """
    reasons = [reason for reason in obstacles if reason]
    if tensor.is_cuda and not has_triton():
        reasons.append("triton is not installed (pip install triton)")
    wanted = tensor.is_cuda or (INTERPRETED and has_triton())
    if wanted and reasons:
        _say_once(operation, reasons[0])
    takes = wanted and not reasons
    TAKEN[f"{operation}: {'triton' if takes else 'torch'}"] += 1
    return takes


@cache
def _say_once(operation: str, reason: str) -> None:
    logger.warning("%s runs in PyTorch, not in its Triton kernel: %s", operation, reason)


def unlike(*tensors: torch.Tensor | None) -> str | None:
    """What keeps these tensors from one kernel: their types, or that gradients are wanted."""
    given = [tensor for tensor in tensors if tensor is not None]
    types = {tensor.dtype for tensor in given}
    if len(types) > 1 or not types <= {torch.float32, *HALVES}:
        names = sorted(str(one).removeprefix("torch.") for one in types)
        return f"it takes one type of float32, float16 and bfloat16, not {' and '.join(names)}"
    if len({tensor.device for tensor in given}) > 1:
        return "its tensors are on several devices"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return "it has no gradients"
    return None


def too_wide(*widths: int) -> str | None:
    """That heads are wider than kernels take."""
    return f"heads are {max(widths)} wide, more than {WIDEST}" if max(widths) > WIDEST else None


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Where kernels are to be launched."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@cache
def processors(device: torch.device) -> int:
    """How many programs a device runs side by side, at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
