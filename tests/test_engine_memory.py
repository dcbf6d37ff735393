"""The memory that the engine may use: of the machine, of nested containers, without cached files."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lmeval_prune.architectures import map_model
from lmeval_prune.decoding import fallback, memory
from tests.tiny_models import tiny

MACHINE = 1 << 36


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE))


def write_group(folder: Path, limit: int | str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\nfile {cached}\ninactive_file {cached}\nsock 0\n")


def free(tmp_path: Path, *lines: str) -> int:
    membership = tmp_path / "membership"
    membership.write_text("".join(f"{line}\n" for line in lines))
    return memory.free_memory(tmp_path / "mount", membership)


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_of_the_machine_and_all_groups_up_to_the_root(tmp_path: Path, seed: int) -> None:
    """Groups with and without a limit, also those of other processes, which do not count."""
    rng = random.Random(seed)
    root = tmp_path / "mount"
    names = ["a.slice", "b.slice", "c.scope"][: rng.randint(1, 3)]
    expected = [MACHINE]
    for depth in range(len(names) + 1):
        used = rng.randrange(1 << 33, 1 << 37)
        cached = rng.randrange(used)
        limit = rng.choice(["max", used + rng.randrange(1 << 37)])
        write_group(root.joinpath(*names[:depth]), limit, used, cached)
        write_group(root.joinpath(*names[:depth], "other"), 1, 1, 0)
        if isinstance(limit, int):
            expected.append(limit - (used - cached))
    assert free(tmp_path, "9:name=systemd:/x", f"0::/{'/'.join(names)}") == min(expected)


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """With a namespace of its own the path is `/`; without one, or from outside, it names folders that are not there."""
    write_group(tmp_path / "mount", 1000, 700, 200)
    for path in ("/", "/system.slice/docker-1234.scope", "/../../other"):
        assert free(tmp_path, "4:memory:/elsewhere", f"0::{path}") == 500


def test_a_group_above_its_limit_has_nothing_free(tmp_path: Path) -> None:
    write_group(tmp_path / "mount", 1000, 1100, 50)
    assert free(tmp_path, "0::/") == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_weights_are_widened_for_a_check_only_where_they_fit(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("llama", dtype=torch.bfloat16)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(fallback, "available_memory", lambda device: size - missing)
    checked = list[torch.dtype]()

    def differences(_: Any) -> tuple[list[float], float]:
        checked.append(model.dtype)
        return [0.0 if model.dtype == torch.float32 else 1.0], 1.0

    assert (fallback.why_failing(differences, map_model(model)) is None) == (not missing)
    assert checked == [torch.bfloat16, *([] if missing else [torch.float32])]
    assert model.dtype == torch.bfloat16
