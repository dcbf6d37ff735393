"""The memory that a run of the engine may use."""

from __future__ import annotations

from pathlib import Path

import torch

from lmeval_prune.errors import InputError

# by version of cgroups: files of the limit (in 1: a huge number without one) and the usage, and a field of memory.stat
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


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
        mount: folder of the cgroups; those of version 1 are in its folder `memory`.
        membership: file with the cgroups of this process. Those above them limit it, too.
    """
    import psutil

    free = [psutil.virtual_memory().available]
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, group = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2
        if controllers and version == 2:  # a group of version 1 without the memory controller
            continue
        limit_file, usage_file, cached = _FILES[version]
        names = Path(group).parts[1:]
        root = mount / "memory" if version == 1 else mount
        for depth in range(len(names) + 1):
            folder = root.joinpath(*names[:depth])
            try:
                limit, used = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except OSError:  # a group outside a container's own has no folder in it
                continue
            if limit != "max":
                free.append(max(0, int(limit) - used + int(statistics[cached])))
    return min(free)
