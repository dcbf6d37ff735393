"""Choose between the Triton kernel of an operation and its PyTorch version.

Kernels run on CUDA devices; tests run them on a CPU in Triton's interpreter. If a kernel does not support its inputs,
PyTorch runs instead, with one warning per reason.
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
KERNELS_ON_CPU = False  # set by tests, with TRITON_INTERPRET=1 before triton is imported
DISPATCHED: Counter[str] = Counter()  # calls by operation and choice: `decide and store: triton`
MAX_HEAD_WIDTH = 256  # a wider head does not fit into the registers of a Triton program


def on_device(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or KERNELS_ON_CPU


def use_kernel(operation: str, tensor: torch.Tensor, *obstacles: str | None) -> bool:
    """Return whether to run an operation as a kernel on a tensor's device, and count the choice.

    Each of `obstacles` is a reason why the kernel does not support the inputs, or None.
    """
    if not on_device(tensor):
        return False
    reasons = [reason for reason in (*obstacles, _triton_missing()) if reason]
    if reasons:
        _warn_once(operation, reasons[0])
    DISPATCHED[f"{operation}: {'torch' if reasons else 'triton'}"] += 1
    return not reasons


@cache
def _triton_missing() -> str | None:
    return None if find_spec("triton") else "triton is not installed (pip install triton)"


@cache
def _warn_once(operation: str, reason: str) -> None:
    logger.warning("%s runs in PyTorch, not in its Triton kernel: %s", operation, reason)


def unsupported_types(*tensors: torch.Tensor) -> str | None:
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1 or not types <= {torch.float32, torch.float16, torch.bfloat16}:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in types)
        return f"its inputs must all be float32, float16 or bfloat16, not {' and '.join(names)}"
    return None


def needs_gradients(*tensors: torch.Tensor) -> str | None:
    needs = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return "the kernel computes no gradients" if needs else None


def too_wide(*widths: int) -> str | None:
    return f"heads are {max(widths)} wide, more than {MAX_HEAD_WIDTH}" if max(widths) > MAX_HEAD_WIDTH else None


def launch_on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
