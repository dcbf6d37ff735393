"""A disk that fills up, or takes nothing: one line that names file and remedy, and the same command goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmeval_prune import HeadMask
from lmeval_prune.cli import main
from lmeval_prune.errors import DiskError
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.run import run
from lmeval_prune.models import answer_store
from lmeval_prune.models.answer_store import AnswerStore
from tests.test_grid import described, outcomes
from tests.tiny_models import tiny


def fill(patch: pytest.MonkeyPatch, number: int = errno.ENOSPC, after: int = 0) -> None:
    """Let every file but the first `after` ones meet a full disk: what is appended, too."""
    left, fsync, open_append = [after], os.fsync, answer_store.open_append

    def full(handle: int) -> None:
        if left[0] == 0:
            raise OSError(number, os.strerror(number))
        left[0] -= 1
        fsync(handle)

    def append_full(path: Path) -> Any:
        if left[0] == 0:
            return Path("/dev/full").open("a")
        left[0] -= 1
        return open_append(path)

    patch.setattr(os, "fsync", full)
    patch.setattr(answer_store, "open_append", append_full)


def answered(folder: Path, compact: bool = False) -> None:
    store = AnswerStore(folder)
    try:
        store.add("a", "x", {"kind": "generate_until"})
        if compact:
            store.compact()
    finally:
        store.close()


WRITERS: dict[str, tuple[str, int, Callable[[Path], Any]]] = {
    "append": ("rank-0.jsonl", 1, lambda path: answered(path / "s")),
    "compact": ("answers.jsonl", 2, lambda path: answered(path / "s", compact=True)),
    "artefact": ("mask.json", 0, lambda path: HeadMask("L0H1").save(path / "mask.json", map_of())),
    "failure": ("x.json", 0, lambda path: GridFolder(path).record_failure("x", "why", "")),
}


def map_of() -> Any:
    from lmeval_prune import map_model

    return map_model(tiny("llama"))


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_one_line_that_names_the_file(name: str, tmp_path: Path) -> None:
    file, after, write = WRITERS[name]
    with pytest.MonkeyPatch.context() as patch:
        fill(patch, after=after)
        with pytest.raises(DiskError) as raised:
            write(tmp_path)
        assert file in str(raised.value)
    assert not [path for path in tmp_path.rglob(".*") if path.suffix != ".lock"]
    write(tmp_path)


def test_cells_of_a_full_disk_have_not_failed(tiny_folder: Path, tmp_path: Path) -> None:
    """The run ends in one line; the same command evaluates them when there is room."""
    import json

    config = described(tiny_folder, variants={"dense": {}, "head": {"heads": "L0H1"}}, tasks=["prune_tiny_choice"])
    path = tmp_path / "grid.yaml"
    path.write_text(json.dumps(config))
    run(Grid.of(config), str(tmp_path / "whole"))
    command = ["grid", "run", str(path), "--output", str(tmp_path / "g")]
    for after in (1, 3, 8):
        with pytest.MonkeyPatch.context() as patch:
            fill(patch, after=after)
            assert main(command) == 2
        assert not list((tmp_path / "g").glob("failed/*"))
    assert main(command) == 0
    assert outcomes(tmp_path / "g") == outcomes(tmp_path / "whole")
