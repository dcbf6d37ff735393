"""Files: written by one at a time, whole or not at all; named so that they stay where they belong; read with suspicion."""

from __future__ import annotations

import errno
import gc
import inspect
import json
import math
import os
import shutil
import signal
import stat
import string
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from lmeval_prune import HeadMask, InputError, map_model
from lmeval_prune.artefacts import (
    check_writable,
    digest,
    file_name,
    final_path,
    locks,
    new_file,
    new_folder,
    output_lock,
    read_json,
    write_artefact,
    write_text,
    writing,
)  # fmt: skip
from lmeval_prune.athena import checkpoint as athena
from lmeval_prune.checkpoints import pruned
from lmeval_prune.checkpoints.loading import load_pretrained
from lmeval_prune.checkpoints.pruned import checkpoint_columns, removal_summary, valid_manifest
from lmeval_prune.cli import COMMANDS, OUTPUTS, SHARED, main
from lmeval_prune.distillation import lessons
from lmeval_prune.distillation.host import NOTE, read_note
from lmeval_prune.distillation.host import SCHEMA as DISTILLATION
from lmeval_prune.errors import DiskError
from lmeval_prune.export.adapters import AdapterExport
from lmeval_prune.export.manifest import read_adapters
from lmeval_prune.grid.comparison import compare
from lmeval_prune.grid.folder import GridFolder, samples_file
from lmeval_prune.grid.report import write_lm_eval
from lmeval_prune.interventions import load_intervention
from lmeval_prune.interventions import plan as plan_module
from lmeval_prune.interventions.lora import read_lora_config
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.models.answer_store import AnswerStore, read_answers
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.server_record import RECORD, ServerRecord
from lmeval_prune.options import Parser
from lmeval_prune.pruners.layer_store import LayerStore, Removal
from lmeval_prune.pruners.score_store import ScoreStore
from lmeval_prune.sprint.curves import samples_curve
from lmeval_prune.sprint.fit import fit_embeddings
from lmeval_prune.sprint.options import FitOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.sprint.router import Router
from lmeval_prune.sprint.routers.contrastive import NearestHeads
from lmeval_prune.surgery.cut import cut_to
from tests.athena_hosts import encoder_folder, host
from tests.methods import ROWS
from tests.routers import ROWS as ROUTER_ROWS
from tests.test_grid_comparison import write_grid
from tests.test_sprint import CELLS, filled
from tests.tiny_models import output, tiny, tokens

ROOT = Path(__file__).parents[1]

# --------------------------------------------------------------------------- several writers


def here(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def elsewhere(function: Callable[[], Any], ended: Event) -> Iterator[Any]:
    """A block during which another thread is in a function, until `ended`."""
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(function)
        finally:
            ended.set()


@contextmanager
def locked_elsewhere(output: Path) -> Iterator[None]:
    """A block during which another thread holds the lock of an output."""
    begun, ended = Event(), Event()

    def hold() -> None:
        with output_lock(output):
            begun.set()
            assert ended.wait(60)

    with elsewhere(hold, ended):
        assert begun.wait(60)
        yield


def test_two_writers_of_a_file_publish_one_of_both(tmp_path: Path) -> None:
    path, begun, ended = tmp_path / "big.gguf", Event(), Event()

    def slow() -> None:
        with new_file(path) as growing, growing.open("w") as file:
            file.write("a" * 1000)
            file.flush()
            begun.set()
            assert ended.wait(60)
            file.write("a" * 1000)

    with elsewhere(slow, ended) as first:
        assert begun.wait(60)
        with new_file(path) as growing:
            growing.write_text("b" * 500)
        assert path.read_text() == "b" * 500
        ended.set()
        first.result()
    assert path.read_text() == "a" * 2000 and here(tmp_path) == ["big.gguf"]


def test_the_second_writer_of_a_folder_is_refused(tmp_path: Path) -> None:
    begun, ended = Event(), Event()

    def slow() -> None:
        with new_folder(tmp_path / "x") as growing:
            (growing / "a").write_text("first")
            begun.set()
            assert ended.wait(60)
            (growing / "b").write_text("first")

    with elsewhere(slow, ended) as first:
        assert begun.wait(60)
        with pytest.raises(InputError, match=r"another run is writing to .*x; wait for it"), new_folder(tmp_path / "x"):
            pass
        with new_folder(tmp_path / "y") as growing:  # another's folder is none of its business
            (growing / "a").write_text("second")
        ended.set()
        first.result()
    assert here(tmp_path) == ["x", "y"] and here(tmp_path / "x") == ["a", "b"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no files")
def test_where_no_file_can_be_made_nobody_is_said_to_write() -> None:
    with pytest.raises(InputError, match=r"^/proc/x cannot be written; name another output$"), output_lock("/proc/x"):
        pass


def test_two_cuts_of_one_output(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The second one ends in a line; the checkpoint of the first is whole."""
    begun, ended, write = Event(), Event(), pruned._write_model

    def slow(*arguments: Any) -> None:
        write(*arguments)
        begun.set()
        assert ended.wait(60)

    model, out = load_pretrained(tiny_folder), tmp_path / "cut"
    for number, heads in enumerate(("L*H0-1", "L0H0-1")):
        Plan(heads).save(tmp_path / f"{number}.json", map_model(model))
    monkeypatch.setattr(pruned, "_write_model", slow)
    words = ["cut", "--pretrained", str(tiny_folder), "--output", str(out), "--plan"]
    with elsewhere(lambda: main([*words, str(tmp_path / "0.json")]), ended) as first:
        assert begun.wait(60)
        monkeypatch.setattr(pruned, "_write_model", write)
        assert main([*words, str(tmp_path / "1.json")]) == 2
        with pytest.raises(InputError, match="another run is writing"):  # in Python, too
            cut_to(out, model, Plan("L0H0-1"))
        ended.set()
        assert first.result() == 0
    assert "error: another run is writing to" in capsys.readouterr().err
    with Plan("L*H0-1").applied_to(model):
        torch.testing.assert_close(output(load_pretrained(out), tokens()), output(model, tokens()))
    assert not [name for name in here(tmp_path) if name.startswith(".")]


def options_of(command: str) -> Parser:
    parser = Parser(prog=command)
    parser.add_function_arguments(resolve_name(COMMANDS[command]), as_group=False)
    return parser


WRITE = [
    (name, option)
    for name in COMMANDS
    if not inspect.getfullargspec(resolve_name(COMMANDS[name])).varargs and name not in SHARED
    for option in OUTPUTS
    if option in options_of(name).option_names
]


@pytest.mark.parametrize(("command", "option"), WRITE)
def test_a_command_writes_alone(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused at once, before anything is read; `sweep`, `distill` and `grid run` lock what each process writes."""
    out = tmp_path / "new" / "out.json"
    required = {action.dest for action in options_of(command)._actions if action.required} | {option, "output"}
    own = {option: out, "output": out if option == "output" else tmp_path / "other.json"}
    words = [f"--{name}={own.get(name, 1)}" for name in sorted(required)]
    with locked_elsewhere(out):
        assert main([*command.split(), *words]) == 2
    assert capsys.readouterr().err == f"lmeval-prune: error: another run is writing to {out}; wait for it, or name " \
        "another output\n"  # fmt: skip
    assert here(tmp_path) == []


def test_what_commands_write_is_named_by_the_options_that_are_locked() -> None:
    named = {name for name in COMMANDS if not inspect.getfullargspec(resolve_name(COMMANDS[name])).varargs}
    assert {name for name, _ in WRITE} == named - {"models", "heads", "questions", *SHARED}


def test_a_lock_is_gone_when_it_is_released_and_can_be_held_twice(tmp_path: Path) -> None:
    with output_lock(tmp_path / "a" / "b" / "out"):
        with output_lock(tmp_path / "a" / "b" / "out"):
            pass
        assert here(tmp_path / "a" / "b") == [".lmeval-prune-out.lock"]
    assert here(tmp_path) == []
    (tmp_path / "full").write_text("")
    with pytest.raises(InputError, match="cannot be written"), output_lock(tmp_path / "full" / "out"):
        pass


def test_the_umask_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the whole process's: another thread's file would get its permissions by it."""
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask of all threads was changed"))
        write_text(tmp_path / "a.json", "1")
        with new_folder(tmp_path / "b") as growing:
            (growing / "weights").touch(0o600)
        monkeypatch.undo()
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.json", "b", "b/weights")}
    assert modes == {"a.json": 0o640, "b": 0o750, "b/weights": 0o640}


def write_many(folder: Path, rank: int) -> None:
    for number in range(120):
        part = folder / str(number)
        check_writable(part / f"{rank}.txt")  # a new folder, which is empty for a moment, goes again
        AnswerStore(part / "store", rank).close()
        write_text(part / f"{rank}.txt", str(rank))
        with output_lock(part / f"{rank}", timeout=0.2), new_folder(part / f"{rank}") as growing:
            (growing / "x").touch()


def forked(function: Callable[[], Any]) -> int:
    """Begin a process that ends after a function, with 0 if that raises nothing."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_processes_that_write_in_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    children = [forked(lambda rank=rank: write_many(tmp_path, rank)) for rank in range(4)]
    assert [ended(child) for child in children] == [0] * 4
    for part in tmp_path.iterdir():
        assert here(part) == sorted([f"{rank}{end}" for rank in range(4) for end in ("", ".txt")] + ["store"])
        assert here(part / "store") == ["answers.json"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    locks._warn_no_locks.cache_clear()
    write_text(tmp_path / "a.json", "1")
    assert not caplog.records  # a file needs no lock
    for name in "bc":
        with output_lock(tmp_path / name), new_folder(tmp_path / name) as growing:
            (growing / "x").touch()
    store = AnswerStore(tmp_path / "s")
    store.add("key", "text", {})
    store.close()
    (record,) = caplog.records
    assert "the file system has no locks" in record.getMessage()
    assert here(tmp_path) == ["a.json", "b", "c", "s"] and here(tmp_path / "s") == ["answers.json", "rank-0.jsonl"]


def test_a_store_that_nobody_has_any_more_leaves_no_lock(tmp_path: Path) -> None:
    AnswerStore(tmp_path).add("key", "text", {})
    gc.collect()
    assert here(tmp_path) == ["answers.json", "rank-0.jsonl"]


def test_what_the_block_of_a_new_file_raises_is_its_own(tmp_path: Path) -> None:
    for error in (FileNotFoundError(errno.ENOENT, "no", "/nonexistent"), PermissionError(errno.EACCES, "no", "/x")):
        with pytest.raises(type(error), match=error.filename), new_file(tmp_path / "a"):
            raise error
    with pytest.raises(DiskError, match="no space left"), new_file(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert here(tmp_path) == []


def test_a_folder_is_cleared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = []
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: cleared.append(folder) or glob(folder, pattern))
    for number in range(3):
        write_text(tmp_path / f"{number}.json", "1")
    assert cleared == [tmp_path]


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="root writes everywhere")
def test_an_empty_folder_in_one_that_is_read_only_is_refused_for_that(tmp_path: Path) -> None:
    out = tmp_path / "parent" / "out"
    out.mkdir(parents=True)
    out.parent.chmod(0o555)
    bare = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []
    code = f"from lmeval_prune.artefacts import output_lock, new_folder; out = {str(out)!r}\nwith output_lock(out), new_folder(out): 1"
    done = subprocess.run([*bare, sys.executable, "-c", code], capture_output=True, text=True)
    out.parent.chmod(0o755)
    reason = f"{out} cannot be written: Permission denied"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"lmeval_prune.errors.DiskError: {reason}"
    assert here(out) == [] and here(out.parent) == ["out"]


# --------------------------------------------------------------------------- what a kill leaves


def leftover(folder: Path, system: str, process: int, began: int, age: float = 0) -> Path:
    path = folder / f".lmeval-prune-{system}-{process}-{began}-x"
    path.mkdir()
    (path / "half").touch()
    for part in (path / "half", path):
        os.utime(part, (time.time() - age,) * 2)
    return path


def test_only_what_dead_writers_have_left_is_removed(tmp_path: Path) -> None:
    system, process, day = locks._system_id(), os.getpid(), 24 * 3600
    child = forked(lambda: None)
    ended(child)
    stay = {
        leftover(tmp_path, system, process, locks._start_time(process), 99 * day),  # of this process
        leftover(tmp_path, system, os.getppid(), locks._start_time(os.getppid()), 99 * day),
        leftover(tmp_path, "another", child, 0, day),  # may be alive there
    }
    go = {
        leftover(tmp_path, system, child, 0),
        leftover(tmp_path, system, process, locks._start_time(process) - 60),  # had the same number before
        leftover(tmp_path, "another", process, 0, 8 * day),
    }
    (tmp_path / ".lmeval-prune-x.lock").touch()
    with output_lock(tmp_path / "y"):
        assert {tmp_path / name for name in here(tmp_path)} == {*stay, tmp_path / ".lmeval-prune-y.lock"} - go


def write_file(path: Path, stop: Callable[[], Any]) -> None:
    with new_file(path) as growing:
        growing.write_text("new")
        stop()


def write_folder(path: Path, stop: Callable[[], Any]) -> None:
    with new_folder(path) as growing:
        (growing / "a").write_text("new")
        stop()


def write_plan(path: Path, stop: Callable[[], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_sync", lambda _: stop())
        Plan("L0H1", compensation={"L0.o_proj.bias": torch.ones(32)}).save(path, map_model(tiny("llama")))


def write_athena(path: Path, stop: Callable[[], Any]) -> None:
    model = host(encoder_folder(path.parent / "encoder"), constants=("1",))
    athena.write(model, path, add_files=lambda _: stop())


WRITERS = [write_file, write_folder, write_plan, write_athena]


@pytest.mark.parametrize("write", WRITERS)
def test_the_next_writer_removes_what_a_kill_has_left(write: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    child = os.fork()
    if child == 0:
        write(path, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = [name for name in here(tmp_path) if name.startswith(".")]
    assert left and not path.exists()
    write(path, lambda: None)
    assert path.exists() and not [name for name in here(tmp_path) if name.startswith(".")]


def test_what_is_being_written_is_left_alone(tmp_path: Path) -> None:
    with new_file(tmp_path / "a") as growing:
        growing.write_text("a")
        for name in "bcd":
            write_text(tmp_path / name, name)
        write_text(tmp_path / "a", "meanwhile")
        check_writable(tmp_path / "a")
        assert growing.read_text() == "a"
    assert here(tmp_path) == list("abcd") and (tmp_path / "a").read_text() == "a"


def test_what_is_kept_beside_a_growing_folder_outlives_a_kill(tmp_path: Path) -> None:
    """Layers that are done, by which the next run goes on."""
    with new_folder(tmp_path / "a" / "x") as growing:
        assert final_path(growing) == tmp_path / "a" / "x" == final_path(tmp_path / "a" / "x")


def test_the_comparison_of_a_grid_is_written_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = write_grid(tmp_path / "grid", {"a": {"t": [1, 0]}})
    with locked_elsewhere(grid / "compare"):
        assert main(["grid", "compare", str(grid)]) == 2
    assert "another run is writing to" in capsys.readouterr().err


def test_nothing_stays_of_what_was_not_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder" / "x.json")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "new" / "y"):
        raise ZeroDivisionError
    assert here(tmp_path) == []


# --------------------------------------------------------------------------- names

NAMES = st.text(st.characters() | st.sampled_from("/\\.%\0\n\x1b\u202e\ud800"), max_size=300)


@given(NAMES, NAMES)
def test_a_name_stays_in_its_folder(tmp_path_factory: pytest.TempPathFactory, name: str, other: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = file_name(name)
    assert (folder / text).parent == folder and (folder / text).resolve() == folder.resolve() / text
    assert 0 < len(text.encode()) <= 200 and text[0] != "." and text.isprintable()
    assert (text == file_name(other)) == (name == other)
    path = samples_file(folder, name)
    path.touch()
    path.unlink()


@given(
    st.text(string.ascii_letters + string.digits + " +-_=,.()~é数", min_size=1, max_size=40).filter(
        lambda x: x[0] != "."
    )
)
def test_an_ordinary_name_is_kept(name: str) -> None:
    assert file_name(name) == name


@pytest.mark.parametrize("name", ["..", ".", "../../../x", "/etc/x", "a/b", "", "x" * 300])
def test_variants_and_tasks_stay_in_their_folders(name: str, tmp_path: Path) -> None:
    """In a grid's folder and in lm-eval's layout of results, which is made from it."""
    folder = write_grid(tmp_path / "in" / "grid", {name: {name: [1, 0]}, "b": {name: [0, 1]}})
    outside = {path for path in tmp_path.rglob("*") if folder not in path.parents}
    write_lm_eval(str(folder), str(tmp_path / "lm" / "eval" / "out"))
    new = {path for path in tmp_path.rglob("*") if folder not in path.parents} - outside
    out = tmp_path / "lm" / "eval" / "out"
    assert len(list(out.glob("*/results_*.json"))) == 2 == len(list(out.glob("*/samples_*.jsonl")))
    assert new == {out.parent.parent, out.parent, out, *out.rglob("*")}
    assert outside == {folder.parent, folder}


@pytest.mark.parametrize("key", ["../../out", "..", "/etc/passwd"])
def test_keys_of_a_grid_stay_in_its_folder(key: str, tmp_path: Path) -> None:
    folder = GridFolder(tmp_path / "a" / "grid")
    folder.record_failure(key, "reason", "")
    folder.write_costs(key, {"device": "cpu", "threads": 1})
    with folder.lock(key), folder.new_cell(key) as growing:
        (growing / "x").touch()
    assert folder.failure(key) == "reason" and folder.has_cell(key) and folder.costs(key)
    assert here(tmp_path) == ["a"] and here(tmp_path / "a") == ["grid"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_not_appended_to(exists: bool, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    if exists:
        target.write_text("text")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "rank-0.jsonl").symlink_to(target)
    with pytest.raises(InputError, match="is a symbolic link"):
        AnswerStore(tmp_path / "store")
    assert target.exists() == exists and (not exists or target.read_text() == "text")
    (tmp_path / "store" / "rank-0.jsonl").unlink()
    store = AnswerStore(tmp_path / "store")
    (tmp_path / "store" / "rank-0.jsonl").symlink_to(target)
    with pytest.raises(InputError, match="is a symbolic link"):
        store.add("key", "text", {})
    assert target.exists() == exists and (not exists or target.read_text() == "text")


# --------------------------------------------------------------------------- damaged artefacts


@dataclass
class Kind:
    """A kind of artefact: its files, and how they are read; what is read can be compared."""

    files: list[Path]
    read: Callable[[], Any]


def tensors_of(tensors: Any) -> Any:
    return {name: tensor.tolist() for name, tensor in sorted(tensors.items())}


def of_intervention(path: Path) -> Any:
    loaded = load_intervention(path)
    more = {name: tensors_of(getattr(loaded, name)) for name in ("compensation", "scores") if hasattr(loaded, name)}
    provenance = dict(getattr(loaded, "provenance", {}))
    return type(loaded), loaded.settings(), more, json.dumps(provenance), json.dumps(loaded.origin.model)  # type: ignore[union-attr]


def _intervention(value: dict[str, Any]) -> Callable[[Path], Kind]:
    def make(folder: Path) -> Kind:
        (intervention,) = Arguments.of(value).interventions
        intervention.save(folder / "one.json", map_model(tiny("llama")))
        return Kind([folder / "one.json"], lambda: of_intervention(folder / "one.json"))

    return make


def _plan(folder: Path) -> Kind:
    model = tiny("llama")
    plan = Plan(
        "L0H1",
        {"L0": "3,5-9"},
        compensation={"L0.o_proj.bias": torch.ones(32)},
        scores={"heads.L0": torch.rand(4)},
        provenance={"method": "flap", "options": {"steps": 1}, "stages": []},
    )
    plan.save(folder / "plan.json", map_model(model))
    return Kind(sorted(folder.glob("plan.*")), lambda: of_intervention(folder / "plan.json"))


def a_router(theta: Any = None) -> Router:
    theta = torch.rand(3, 5) if theta is None else theta
    about = {"model": {"name": "m"}, "tasks": {"t": {"metric": "acc"}}, "seen": ["a"], "p": 3, "held_out": 1}
    return Router(
        NearestHeads(theta, torch.rand(4, 3)), ["dense", "L0H0", "L0H1", "L1H0"], "all-minilm-l6-v2", about=about
    )


def _router(folder: Path) -> Kind:
    a_router().save(folder)

    def read() -> Any:
        result = Router.load(folder)
        result.ranking(torch.rand(2, result.ranker.theta.shape[1]))
        return (
            tensors_of(result.ranker.tensors),
            result.pool,
            result.encoder,
            str(result.about),
        )

    return Kind(sorted(folder.glob("router.*")), read)


def _fitted_router(method: str) -> Callable[[Path], Kind]:
    def make(folder: Path) -> Kind:
        generator = torch.Generator().manual_seed(0)
        z = torch.randint(0, 2, (8, 4), generator=generator).float()
        options = next(row for row in ROUTER_ROWS if row.name == method).options
        fit_options = FitOptions(router=method, options=options, validation=0.0)
        pool = ["dense", "L0H0", "L0H1", "L1H0"]
        fit_embeddings(torch.randn(8, 3, generator=generator), z, pool, "none", fit_options).save(folder)

        def read() -> Any:
            result, x = Router.load(folder), torch.ones(2, 3)
            outputs = result.ranking(x), result.pool, result.method, str(result.about)
            return tensors_of(result.ranker.tensors), result.ranker.settings, *outputs

        return Kind(sorted(folder.glob("router.*")), read)

    return make


def _outcomes(folder: Path) -> Kind:
    filled(folder, CELLS)

    def read() -> Any:
        result = OutcomeStore(folder).read()
        assert all(isinstance(text, str) for text in result.texts)
        cells = OutcomeStore(folder).cells()
        return result.z.tolist(), result.pool, result.questions, result.tasks, result.model, str(cells)

    return Kind([folder / name for name in ("store.json", "questions.parquet", "cells.parquet")], read)


def _answers(compacted: bool) -> Callable[[Path], Kind]:
    def make(folder: Path) -> Kind:
        store = AnswerStore(folder)
        for number in range(3):
            store.add(f"g{number}", f"text {number}\n", {"kind": "generate_until", "task": "t", "tokens": [1, 2]})
            store.add(f"l{number}", (-1.5 * number, True), {"kind": "loglikelihood", "task": "t"})
            store.add(f"r{number}", -2.5, {"kind": "loglikelihood_rolling", "task": "t"})
        if compacted:
            store.compact()
        store.close()

        def read() -> Any:
            result = sorted(read_answers(folder), key=lambda record: record["key"])
            AnswerStore(folder).close()
            return str(result)

        return Kind([folder / ("answers.jsonl" if compacted else "rank-0.jsonl"), folder / "answers.json"], read)

    return make


def _adapters(folder: Path) -> Kind:
    tiny("llama").save_pretrained(folder / "model")
    list(AdapterExport(str(folder / "model"), [HeadMask("L0H1")], str(folder / "out"), "float32").run())

    def read() -> Any:
        result = read_adapters(folder / "out")
        return str(result)

    return Kind([folder / "out" / "L0H1" / "lmeval_prune.json"], read)


def _checkpoint(folder: Path) -> Kind:
    tiny("llama").save_pretrained(folder / "model")
    cut_to(folder / "cut", load_pretrained(folder / "model"), Plan("L*H0-1"))

    def read() -> Any:
        result = valid_manifest(folder / "cut")
        return str(result), result and removal_summary(result), result and str(checkpoint_columns(result))

    return Kind([folder / "cut" / "lmeval_prune.json"], read)


RANGES = {"decode_tokens_per_second": [4.0, 5.0]}


def _grid(folder: Path) -> Kind:
    grid = write_grid(folder / "grid", {"a": {"t": [1, 0, 1]}, "b": {"t": [0, 0, 1]}})
    GridFolder(grid).record_failure("a-t", "reason", "")
    (speed,) = RANGES
    for name in "ab":
        GridFolder(grid).write_costs(name, {"parameters": 100, speed: 4.5, "ranges": RANGES})
        lengths = {"answers": 3, "unknown": 1, "cut_off": 0.5, "mean_tokens": 4.0, "max_gen_toks": 8}
        results = {"configs": {"t": {}}, "results": {}, "config": {"pruning": {"answers": {"t": lengths}}}}
        write_text(grid / "cells" / f"{name}-t" / "results.json", json.dumps(results))

    def read() -> Any:
        GridFolder(grid).failure("a-t")
        result = compare(grid)
        write_lm_eval(str(grid), str(folder / "lm_eval"))
        return str(result)

    files = [grid / "grid.json", grid / "measures" / "a.json", grid / "failed" / "a-t.json"]
    return Kind([*files, *sorted((grid / "cells" / "a-t").glob("[!.]*"))], read)


def _athena(folder: Path) -> Kind:
    model = host(encoder_folder(folder / "encoder"), constants=("1",))
    model.about = {
        "options": {"data": "asdiv_a", "train": ["fold1"]},
        "log": [{"loss": 1.0, "epoch": 1}],
        "trained_on": ["a"],
    }
    athena.write(model, folder / "host")

    def read() -> Any:
        result = athena.read(folder / "host")
        return str(result.settings), tensors_of(athena.head_state(result)), str(result.about)

    return Kind([folder / "host" / name for name in (athena.SETTINGS, athena.HEAD)], read)


def _distillation(folder: Path) -> Kind:
    stage = {
        "stage": 1,
        "heads": {"L0": [0]},
        "removed": {"heads": 1, "channels": 0, "heads_total": 2},
        "removed_blocks": [],
        "parameters": 5,
    }
    material = {"splits": {"task": "t", "test": None}, "trained_on": ["a"], "validated_on": []}
    content = {"model": "m", "options": {"epochs": 1}, "material": material, "stages": [stage]}
    write_artefact(folder / NOTE, DISTILLATION, 1, content)
    return Kind([folder / NOTE], lambda: str(read_note(folder)))


def _lessons(folder: Path) -> Kind:
    text = {"ids": [5, 6, 7], "start": 2}
    content = {"texts": {"train": [text, text], "validation": [text]}, "counts": {"train": {"kept": 2}}}
    write_artefact(folder / "lessons.json", lessons.SCHEMA, lessons.VERSION, content)
    return Kind([folder / "lessons.json"], lambda: str(lessons.read_lessons(folder)))


def _begun(folder: Path) -> Kind:
    write_text(folder / "options.json", json.dumps({"epochs": 1, "train": ["a"]}))
    return Kind([folder / "options.json"], lambda: str(sorted(read_json(folder / "options.json").items())))


def _layers(folder: Path) -> Kind:
    removed = {"heads.L0": {1}, "channels.L0": {2, 3}}
    removal = Removal(removed, {"L0.o_proj.weight": torch.ones(2, 2)}, {"L0.o_proj": 0.5})
    LayerStore(folder / "layers", "plan").save("L0", removal)

    def read() -> Any:
        shutil.rmtree(folder / "copy", ignore_errors=True)  # what is of another plan is removed
        result = LayerStore(shutil.copytree(folder / "layers", folder / "copy"), "plan").load("L0")
        if result is None:  # it is made again
            raise InputError("not known")
        return result.removed, tensors_of(result.compensation), result.damping

    return Kind([folder / "layers" / name for name in ("about.json", "L0.safetensors")], read)


def _scores(folder: Path) -> Kind:
    store = ScoreStore(folder / "scoring", "plan")
    store.save("heads", {"heads.L0": torch.ones(2)}, {"heads.L0": torch.zeros(4)})
    write_text(folder / "scoring" / "layers.json", json.dumps({"0.layers.L0": 1.5, "1.layers.L0": 2.0}))

    def read() -> Any:
        shutil.rmtree(folder / "copy", ignore_errors=True)  # what is of another plan is removed
        store = ScoreStore(shutil.copytree(folder / "scoring", folder / "copy"), "plan")
        scores, sums = store.load("heads"), store.sums("layers")
        if scores is None or not (sums.has(0, "layers.L0") and sums.has(1, "layers.L0")):  # they are computed again
            raise InputError("not known")
        return tensors_of(scores[0]), tensors_of(scores[1] or {}), sums.total(2, "layers.L0")

    return Kind([folder / "scoring" / name for name in ("about.json", "heads.safetensors", "layers.json")], read)


def _samples(folder: Path) -> Kind:
    questions = [{"question": f"q{i}", "prompt": digest(f"p{i}")} for i in range(2)]
    outcomes = Outcomes(np.ones((2, 1), np.float32), ["dense"], questions, {}, {"t": {"question_field": "question"}})
    row: dict[str, Any] = {"filtered_resps": [["a", "b"]], "pass@1_unbiased": 0.5}
    rows = [
        {**row, "arguments": {"gen_args_0": {"arg_0": f"p{i}", "arg_1": {}}}, "doc": {"question": f"q{i}"}}
        for i in range(2)
    ]
    write_text(folder / "samples.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    outcomes.tasks["t"]["generation"] = {}
    return Kind(
        [folder / "samples.jsonl"],
        lambda: samples_curve("T", str(folder / "samples.jsonl"), outcomes, 2).values.tolist(),
    )


def _servers(folder: Path) -> Kind:
    path, signature = folder / RECORD, [("a", -1.0), ("b", -2.5)]
    record = ServerRecord(path, ["model"], "float32", True)
    record.check("http://a", signature)
    record.save()

    def read() -> Any:
        again = ServerRecord(path, ["model"], "float32", False)
        again.check("http://b", signature)
        return json.loads(path.read_bytes())["signatures"]

    return Kind([path], read)


KINDS: dict[str, Callable[[Path], Kind]] = {
    **{row.name: _intervention({row.name: row.value}) for row in ROWS if row.value is not None},
    "plan with tensors": _plan,
    "router": _router,
    "router knn": _fitted_router("knn"),
    "outcomes": _outcomes,
    "answers": _answers(False),
    "compacted answers": _answers(True),
    "adapters": _adapters,
    "checkpoint": _checkpoint,
    "grid": _grid,
    "athena": _athena,
    "distillation": _distillation,
    "lessons": _lessons,
    "begun": _begun,
    "layers": _layers,
    "scores": _scores,
    "plan with blocks": _intervention({"plan": {"heads": "L0H1", "blocks": "L1.attention+L0.feed_forward"}}),
    "samples": _samples,
    "servers": _servers,
}
ARTEFACTS: dict[str, tuple[Kind, Any]] = {}


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Any]:
    name = request.param
    if name not in ARTEFACTS:
        result = KINDS[name](tmp_path_factory.mktemp("kind"))
        ARTEFACTS[name] = result, result.read()
    return ARTEFACTS[name]


def refused_or(kind: Kind, path: Path, damaged: bytes) -> Any:
    """What is read of a kind with a damaged file; None if that was refused in one line."""
    whole = path.read_bytes()
    path.write_bytes(damaged)
    try:
        return kind.read()
    except InputError as error:
        assert str(error) and "\n" not in str(error)
        return None
    finally:
        path.write_bytes(whole)


TEXT = (".json", ".jsonl")
OTHER: list[Any] = [
    None,
    True,
    5,
    -1,
    10**30,
    0.5,
    math.nan,
    math.inf,
    "",
    "x",
    "..",
    "[" * 10**5,
    f"L{'9' * 5000}H0",
    [],
    {},
    [5],
    [[]],
    {"a": []},
    [None],
]
ABSURD = {
    "nested": b"[" * 100_000 + b"]" * 100_000,
    "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "digits": b"9" * 5_000,
    "byte": b'"\xff"',
}


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*above, key))


def changed(value: Any, location: tuple[Any, ...], new: Any) -> Any:
    """With something else in a place; without what is there, if that is `...`."""
    if not location:
        return {} if new is ... else new
    value = value.copy()
    if len(location) == 1 and new is ...:
        del value[location[0]]
    else:
        value[location[0]] = changed(value[location[0]], location[1:], new)
    return value


MARK = "absurd value"


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "hidden states"], indirect=True)  # no JSON
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fields_of_other_types_are_refused_in_one_line(kind: tuple[Kind, Any], data: st.DataObject) -> None:
    """Any value of an artefact's JSON, replaced by another or left out: it is read, or refused."""
    (whole, _), files = kind, [path for path in kind[0].files if path.suffix in TEXT]
    path = data.draw(st.sampled_from(files))
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = data.draw(st.integers(0, len(lines) - 1))
    content = json.loads(lines[number])
    location = data.draw(st.sampled_from(list(places(content))))
    new = data.draw(st.sampled_from([..., MARK, *OTHER]))
    assume(location != ("settings", "channels") or new is ... or isinstance(new, dict))  # Python's own error
    lines[number] = json.dumps(changed(content, location, new))
    absurd = data.draw(st.sampled_from(list(ABSURD.values()))) if new == MARK else b""
    damaged = "\n".join(lines).encode() + b"\n"
    refused_or(whole, path, damaged.replace(json.dumps(MARK).encode(), absurd))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_are_refused_in_one_line(kind: tuple[Kind, Any], data: st.DataObject) -> None:
    """Bytes that are gone, new or changed; of files whose hash is known, another content is never read."""
    result, expected = kind
    path = data.draw(st.sampled_from(result.files))
    whole, how = path.read_bytes(), data.draw(st.sampled_from(["cut", "more", "flip", "empty", "pickle"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = {
        "cut": whole[:at],
        "more": whole + data.draw(st.binary(min_size=1, max_size=9)),
        "flip": whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :],
        "empty": b"",
        "pickle": b"\x80\x04}.",
    }[how]
    got = refused_or(result, path, damaged)
    without_hash = path.suffix in (".jsonl", ".json", ".parquet") or path.parent.name in ("layers", "scoring")
    assert got is None or without_hash or got == expected


@pytest.mark.parametrize("absurd", ABSURD)
@pytest.mark.parametrize("kind", [name for name in KINDS if "compacted" not in name], indirect=True)
def test_absurd_values_are_refused_in_one_line(kind: tuple[Kind, Any], absurd: str) -> None:
    """As the whole file, and as a field of it."""
    result, expected = kind
    for path in (path for path in result.files if path.suffix in TEXT):
        first = next(i for i, byte in enumerate(path.read_bytes()) if byte == ord("{"))
        field = path.read_bytes()[: first + 1] + b'"absurd": ' + ABSURD[absurd] + b", " + path.read_bytes()[first + 1 :]
        for damaged in (ABSURD[absurd], field):
            actual = refused_or(result, path, damaged)
            skipped = path.suffix == ".jsonl" or path.name in ("cell.json", "about.json")  # asked again, or not needed
            assert actual is None or skipped or actual == expected


@pytest.mark.parametrize("damaged", [5, "x", None, [1.0], [1.0, 2.0, 3.0], ["a", "b"], [5.0, 4.0], [math.nan, 4.0]])
def test_ranges_of_speeds_are_two_numbers_in_order(damaged: Any, tmp_path: Path) -> None:
    kind, (speed,) = _grid(tmp_path), RANGES
    path = tmp_path / "grid" / "measures" / "a.json"
    for ranges in (damaged, {speed: damaged}):
        content = json.dumps({**json.loads(path.read_text()), "ranges": ranges}).encode()
        assert refused_or(kind, path, content) is None


@pytest.mark.parametrize(
    "damaged",
    [
        {"tokens": ["a"]},
        {"tokens": [], "log_probabilities": []},
        {"log_probabilities": [-1.0, math.nan]},
        {"log_probabilities": [-1.0, -1e200]},
    ],
)
def test_a_signature_of_a_server_has_a_number_for_each_token(damaged: dict[str, Any], tmp_path: Path) -> None:
    """Whatever it is compared with: no number differs from one that is none."""
    (path,) = (kind := _servers(tmp_path)).files
    content = json.loads(path.read_text())
    for signature in content["signatures"].values():
        signature |= damaged
    assert refused_or(kind, path, json.dumps(content).encode()) is None


def test_figures_that_were_not_measured_may_be_null(tmp_path: Path) -> None:
    kind, path = _grid(tmp_path), tmp_path / "grid" / "measures" / "a.json"
    assert refused_or(kind, path, json.dumps({**json.loads(path.read_text()), "parameters": None}).encode())


@pytest.mark.parametrize("kind", ["grid"], indirect=True)
def test_lengths_of_a_cell_are_whole_or_absent(kind: tuple[Kind, Any]) -> None:
    (path,) = (path for path in kind[0].files if path.name == "results.json")
    content, location = json.loads(path.read_text()), ("config", "pruning", "answers", "t")
    for field, damaged in product(["answers", "unknown", "cut_off", "mean_tokens"], [..., "x", -1, [5], math.nan]):
        damage = json.dumps(changed(content, (*location, field), damaged)).encode()
        assert refused_or(kind[0], path, damage) is None, (field, damaged)
    assert refused_or(kind[0], path, json.dumps(changed(content, location[:3], ...)).encode()) is not None


BROKEN = [
    ("generate_until", 5),
    ("generate_until", "half a character \ud83d"),
    ("loglikelihood", (math.nan, False)),
    ("loglikelihood", (-1.0,)),
    ("loglikelihood_rolling", math.inf),
]


@pytest.mark.parametrize(("kind", "response"), BROKEN)
def test_a_response_that_could_not_be_read_is_not_stored(kind: str, response: Any, tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.add("a", (-math.inf, True), {"kind": "loglikelihood", "task": "t"})
    with pytest.raises(InputError, match=f"^the model's answer to a {kind} request of task 't'[^\n]*float32"):
        store.add("b", response, {"kind": kind, "task": "t"})
    store.close()
    assert AnswerStore(tmp_path).responses == {"a": [-math.inf, True]} == {"a": list(store.responses["a"])}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_where_they_enter(
    number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(shape: tuple[int, ...]) -> torch.Tensor:
        result = torch.ones(shape)
        result.view(-1)[-1] = number
        return result

    for index, field in enumerate(
        ({"compensation": {"L0.o_proj.bias": of((32,))}}, {"scores": {"heads.L0": of((4,))}})
    ):
        with monkeypatch.context() as patch:
            patch.setattr(plan_module, "check_finite", lambda *_: None)  # refused when a plan is made, too
            Plan("L0H1", **field).save(tmp_path / f"{index}.json", map_model(tiny("llama")))
        with pytest.raises(InputError, match=r"infinite values in (L0\.o_proj\.bias|scores\.heads\.L0); make"):
            Plan.load(tmp_path / f"{index}.json")
    a_router(of((3, 5))).save(tmp_path / "router")
    with pytest.raises(InputError, match="NaN or infinite values in theta"):
        Router.load(tmp_path / "router")
    model = host(encoder_folder(tmp_path / "encoder"), constants=("1",))
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if not name.startswith("encoder."))[0] = number
    athena.write(model, tmp_path / "host")
    with pytest.raises(InputError, match="NaN or infinite"):
        athena.read(tmp_path / "host")


@pytest.mark.parametrize(
    "theta", [torch.rand(3), torch.rand(2, 5), torch.rand(3, 5, 1), torch.ones(3, 5, dtype=torch.long)]
)
def test_a_router_of_other_shapes_is_refused(theta: torch.Tensor, tmp_path: Path) -> None:
    a_router(theta).save(tmp_path)
    with pytest.raises(InputError, match="tensors of shapes"):
        Router.load(tmp_path)


def test_vectors_of_an_encoder_that_are_not_finite_are_refused() -> None:
    from lmeval_prune.sprint.encoder import embed

    class Broken(nn.Module):
        def encode(self, texts: list[str], **_: Any) -> Any:
            return torch.full((len(texts), 4), math.nan)

    with pytest.raises(InputError, match="NaN or infinite"):
        embed(Broken(), ["a", "b"])


def test_an_adapter_with_a_name_too_long_for_a_file_is_refused() -> None:
    with pytest.raises(InputError, match="is no LoRA adapter"):
        read_lora_config(Path("[" * 300))
