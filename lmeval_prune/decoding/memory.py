"""The memory that a run of the engine may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from lmeval_prune.errors import InputError


class InsufficientMemoryError(InputError):
    """The engine's memory is too small for its requests."""


def available_memory(device: torch.device) -> int:
    """Return the bytes that the engine may use: a share of the free memory, the rest is for activations and graphs."""
    if device.type == "cuda":  # PyTorch keeps the memory of freed tensors, such as an earlier run's cache
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(0.75 * (torch.cuda.mem_get_info(device)[0] + kept))
    return free_memory() // 2


def free_memory(mount: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the free bytes of the machine, or of this process's container if it has fewer.

    Args:
        mount: folder of the cgroups (version 2; version 1 is not read).
        membership: file with the cgroups of this process.
    """
    import psutil

    return min([psutil.virtual_memory().available, *_free_in_groups(mount, membership)])


def _free_in_groups(mount: Path, membership: Path) -> Iterator[int]:
    """Yield the free bytes of each cgroup with a limit, from this process's own up to the root."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for group in (line.removeprefix("0::") for line in lines if line.startswith("0::")):
        names = Path(group).parts[1:]
        for depth in range(len(names), -1, -1):  # a group outside a container's own has no folder in it
            free = _free_in_group(mount.joinpath(*names[:depth]))
            if free is not None:
                yield free


def _free_in_group(folder: Path) -> int | None:
    """Return a cgroup's limit less the memory in use, without cached files; None without a limit."""
    try:
        limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(statistics["inactive_file"]))
