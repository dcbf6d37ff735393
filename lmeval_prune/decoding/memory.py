"""The memory that a run of the engine may use."""

from __future__ import annotations

from pathlib import Path

import torch

from lmeval_prune.errors import InputError


class InsufficientMemoryError(InputError):
    """The engine's memory is too small for its requests."""


def available_memory(device: torch.device) -> int:
    """Return the bytes that the engine may use: a share of the free memory, the rest is for activations."""
    if device.type == "cuda":  # PyTorch keeps the memory of freed tensors, such as an earlier run's cache
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(0.75 * (torch.cuda.mem_get_info(device)[0] + cached))
    return free_memory() // 2


def free_memory(mount: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the free bytes of the machine, or of this process's container if it has fewer.

    Args:
        mount: folder of the cgroups, of version 2.
        membership: file with the cgroup of this process. Those above it limit it, too.
    """
    import psutil

    free = [psutil.virtual_memory().available]
    lines = membership.read_text().splitlines() if membership.exists() else []
    for group in (Path(line.removeprefix("0::/")) for line in lines if line.startswith("0::")):
        for folder in (mount / group, *(mount / above for above in group.parents)):
            try:
                limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except OSError:  # a group outside a container's own has no folder in it
                continue
            if limit != "max":
                free.append(max(0, int(limit) - int(used) + int(statistics["inactive_file"])))
    return min(free)
