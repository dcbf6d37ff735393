"""Files: written by one at a time, whole or not at all; named so that they stay where they belong; read with suspicion."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
import string
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lmeval_prune import InputError, map_model
from lmeval_prune.artefacts import (
    Work,
    _warn_no_locks,
    check_writable,
    file_name,
    new_file,
    new_folder,
    output_lock,
    write_text,
)  # fmt: skip
from lmeval_prune.athena import checkpoint as athena
from lmeval_prune.cli import main
from lmeval_prune.grid.comparison import compare_grid
from lmeval_prune.interventions import load_intervention
from lmeval_prune.interventions import plan as plan_module
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.models.answer_store import AnswerStore, read_answers
from lmeval_prune.pruners.sequential import Removal
from lmeval_prune.sprint.router import Router
from lmeval_prune.sprint.routers.contrastive import NearestHeads
from tests.athena_hosts import encoder_folder, host
from tests.forks import Process
from tests.kills import run_killed
from tests.test_grid_comparison import write_grid
from tests.tiny_models import tiny

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


@pytest.mark.parametrize(
    "words",
    [
        "prune --pretrained x --output OUT",
        "prune --pretrained x --output other.json --cut OUT",
        "fit --outcomes x --output OUT",
    ],
)
def test_a_command_writes_alone(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused at once, before anything is read; `sweep`, `distill` and `grid run` lock what each process writes."""
    out = tmp_path / "new" / "out.json"
    with locked_elsewhere(out):
        assert main(words.replace("OUT", str(out)).split()) == 2
    assert f"another run is writing to {out}" in capsys.readouterr().err
    assert here(out.parent) == []


def test_a_lock_is_gone_when_it_is_released_and_can_be_held_twice(tmp_path: Path) -> None:
    with output_lock(tmp_path / "a" / "b" / "out"):
        with output_lock(tmp_path / "a" / "b" / "out"):
            pass
        assert here(tmp_path / "a" / "b") == [".lmeval-prune-out.lock"]
    assert here(tmp_path / "a" / "b") == []
    (tmp_path / "full").write_text("")
    with pytest.raises(InputError, match="cannot be written"), output_lock(tmp_path / "full" / "out"):
        pass


def test_permissions_are_those_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a.json", "1")
        with new_folder(tmp_path / "b") as growing:
            (growing / "weights").touch(0o600)
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


def test_processes_that_write_in_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    children = [Process(target=write_many, args=(tmp_path, rank)) for rank in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
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
    _warn_no_locks.cache_clear()
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


# --------------------------------------------------------------------------- what a kill leaves


def write_file(path: Path) -> None:
    with new_file(path) as growing:
        growing.write_text("new")


def write_folder(path: Path) -> None:
    with new_folder(path) as growing:
        (growing / "a").write_text("new")


@pytest.mark.parametrize("write", [write_file, write_folder])
def test_the_next_writer_removes_what_a_kill_has_left(write: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    run_killed(os, "fsync", 0, lambda: write(path))
    assert here(tmp_path) and not path.exists()
    (tmp_path / ".lmeval-prune-x.lock").touch()
    write(path)
    assert here(tmp_path) == ["out.json"]


def test_what_is_being_written_is_left_alone(tmp_path: Path) -> None:
    with new_file(tmp_path / "a") as growing:
        growing.write_text("a")
        for name in "bcd":
            write_text(tmp_path / name, name)
        write_text(tmp_path / "a", "meanwhile")
        check_writable(tmp_path / "a")
        assert growing.read_text() == "a"
    assert here(tmp_path) == list("abcd") and (tmp_path / "a").read_text() == "a"


# --------------------------------------------------------------------------- names

NAMES = st.text(st.characters() | st.sampled_from("/\\.%\0\n\x1b\u202e\ud800"), max_size=300)


@given(NAMES, NAMES)
def test_a_name_stays_in_its_folder(tmp_path_factory: pytest.TempPathFactory, name: str, other: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = file_name(name)
    assert (folder / text).parent == folder and (folder / text).resolve() == folder.resolve() / text
    assert 0 < len(text.encode()) <= 200 and text[0] != "." and text.isprintable()
    assert (text == file_name(other)) == (name == other)
    path = folder / text
    path.touch()
    path.unlink()


@given(
    st.text(string.ascii_letters + string.digits + " +-_=,.()~é数", min_size=1, max_size=40).filter(
        lambda x: x[0] != "."
    )
)
def test_an_ordinary_name_is_kept(name: str) -> None:
    assert file_name(name) == name


@pytest.mark.parametrize("name", ["..", "/etc/x", "a/b", "x" * 300])
def test_variants_and_tasks_stay_in_their_folders(name: str, tmp_path: Path) -> None:
    folder = write_grid(tmp_path / "in" / "grid", {name: {name: [1, 0]}, "b": {name: [0, 1]}})
    assert {path for path in tmp_path.rglob("*") if folder not in path.parents} == {folder.parent, folder}
    assert compare_grid(folder, name).rows["b", name].questions == 2


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


def _layers(folder: Path) -> Kind:
    removed = {"heads.L0": {1}, "channels.L0": {2, 3}}
    removal = Removal(removed, {"L0.o_proj.weight": torch.ones(2, 2)}, {"L0.o_proj": 0.5})
    removal.save(Work(folder / "layers", {"of": "plan"}), "L0")

    def read() -> Any:
        shutil.rmtree(folder / "copy", ignore_errors=True)  # what is of another plan is removed
        copy = shutil.copytree(folder / "layers", folder / "copy")
        result = Removal.load(Work(copy, {"of": "plan"}, restart=True), "L0")
        if result is None:  # it is made again
            raise InputError("not known")
        return result.removed, tensors_of(result.compensation), result.damping

    return Kind([folder / "layers" / name for name in ("settings.json", "L0.safetensors")], read)


def _scores(folder: Path) -> Kind:
    work = Work(folder / "scoring", {"of": "plan"})
    work.write_tensors("heads", {"values.heads.L0": torch.ones(2), "means.heads.L0": torch.zeros(4)})

    def read() -> Any:
        shutil.rmtree(folder / "copy", ignore_errors=True)  # what is of another plan is removed
        work = Work(shutil.copytree(folder / "scoring", folder / "copy"), {"of": "plan"}, restart=True)
        scores = work.tensors("heads")
        if scores is None:  # they are computed again
            raise InputError("not known")
        return tensors_of(scores)

    return Kind([folder / "scoring" / name for name in ("settings.json", "heads.safetensors")], read)


def test_what_is_left_of_a_removal_that_was_killed_is_not_used(tmp_path: Path) -> None:
    work = Work(tmp_path / "work", {"seed": 1})
    work.write_tensors("layer", {"weight": torch.ones(2)})
    (tmp_path / "work" / "settings.json").unlink()
    assert Work(tmp_path / "work", {"seed": 2}).tensors("layer") is None


KINDS: dict[str, Callable[[Path], Kind]] = {
    "plan": _plan,
    "answers": _answers(False),
    "compacted answers": _answers(True),
    "layers": _layers,
    "scores": _scores,
}
ARTEFACTS: dict[str, tuple[Kind, Any]] = {}


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Any]:
    name = request.param
    if name not in ARTEFACTS:
        result = KINDS[name](tmp_path_factory.mktemp("kind"))
        ARTEFACTS[name] = result, result.read()
    return ARTEFACTS[name]


def read_or_none(kind: Kind, path: Path, damaged: bytes) -> Any:
    """What is read of a kind with a damaged file; None if that ends in an error."""
    whole = path.read_bytes()
    path.write_bytes(damaged)
    try:
        return kind.read()
    except Exception:
        return None
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_are_not_read_as_others(kind: tuple[Kind, Any], data: st.DataObject) -> None:
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
    got = read_or_none(result, path, damaged)
    without_hash = path.suffix in (".jsonl", ".json", ".parquet") or path.parent.name in ("layers", "scoring")
    assert got is None or without_hash or got == expected


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


def test_vectors_of_an_encoder_that_are_not_finite_are_refused() -> None:
    from lmeval_prune.sprint.router import embed

    class Broken(nn.Module):
        def encode(self, texts: list[str], **_: Any) -> Any:
            return torch.full((len(texts), 4), math.nan)

    with pytest.raises(InputError, match="NaN or infinite"):
        embed(Broken(), ["a", "b"])
