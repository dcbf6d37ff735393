"""Artefacts of earlier format versions, written by the code of that time (tests/formats/write.py), in the current one."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from lmeval_prune import HeadMask, InputError
from lmeval_prune.artefacts import read_json
from lmeval_prune.cli import main
from lmeval_prune.migration import migrate
from lmeval_prune.sprint.outcomes import OutcomeStore
from tests.conftest import ROOT

FORMATS = ROOT / "tests/formats"


@pytest.mark.parametrize("version", [1, 2])
def test_head_masks(version: int, tmp_path: Path) -> None:
    before = read_json(FORMATS / f"mask_{version}.json")
    assert before["schema_version"] == version
    assert main(["migrate", str(FORMATS / f"mask_{version}.json"), "--output", str(tmp_path / "mask.json")]) == 0
    after = read_json(tmp_path / "mask.json")
    assert after["schema_version"] == 3
    assert after["settings"]["heads"] == before["heads"] == ["L0H1", "L0H2", "L1H3"]
    assert after["model"] == before["model"] and ("weights" in after["model"]) == (version == 2)
    assert HeadMask.load(tmp_path / "mask.json") == HeadMask.load(FORMATS / f"mask_{version}.json")


def test_outcome_stores(tmp_path: Path) -> None:
    """The figures, texts and tokens are those that tests/formats/write.py wrote."""
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(FORMATS / "outcomes_1", old)
    with pytest.raises(InputError, match="migrate"):
        OutcomeStore(old).read()
    assert main(["migrate", str(old), "--output", str(new)]) == 0
    store = OutcomeStore(new)
    outcomes = store.read()
    assert outcomes.pool == ["dense", "L0H1", "L10H0"]
    assert outcomes.texts == ["0 + 1?", "1 + 1?", "2 + 1?"]
    assert [row["attributes"] for row in outcomes.questions] == [{"grade": i} for i in range(3)]
    assert [row["prompt"] for row in outcomes.questions] == ["p0", "p1", "p2"]
    np.testing.assert_array_equal(outcomes.z, [[1, 0, 1], [1, 0, 1], [np.nan] * 3])
    assert outcomes.model == {"name": "tiny", "weights": "abc"}
    assert outcomes.tasks["t"]["generation"] == {"max_gen_toks": 8, "do_sample": False}
    answers = {
        (cell["doc_id"], cell["attempt"]): (cell["text"], cell["tokens"], cell["length"]) for cell in store.cells()
    }
    written = {(i, head): (str(i + (head != "L0H1")), [i, 7], 2) for i in range(2) for head in outcomes.pool}
    assert answers == {**written, (2, "dense"): ("3", [2, 2, 7], 3)}
    assert sorted(path.name for path in old.iterdir() if path.name[0] != ".") == sorted(
        path.name for path in (FORMATS / "outcomes_1").iterdir() if path.name[0] != "."
    )


def test_a_killed_migration_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OutcomeStore, "add", die)
    with pytest.raises(KeyboardInterrupt):
        migrate(str(FORMATS / "outcomes_1"), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_refused(tmp_path: Path) -> None:
    """In one line: what is current, has one format only, is no artefact, or would be replaced."""
    mask = str(tmp_path / "mask.json")
    migrate(str(FORMATS / "mask_1.json"), mask)
    (tmp_path / "router").mkdir()
    (tmp_path / "router/router.json").write_text('{"schema": "lmeval-prune/router", "schema_version": 1}')
    (tmp_path / "other.json").write_text('{"schema": "x"}')
    for path, output, message in (
        (mask, "new.json", "version 3 of its format, which is read"),
        (str(FORMATS / "mask_1.json"), mask, "exists; name a new path"),
        (str(FORMATS / "mask_1.json"), "new", "must end in .json"),
        (str(tmp_path / "router"), "new", "has not changed"),
        (str(tmp_path / "other.json"), "new.json", "is no artefact"),
        (str(FORMATS), "new", "holds no artefact"),
        (str(tmp_path / "missing"), "new", "no such file"),
    ):
        with pytest.raises(InputError, match=message):
            migrate(path, str(output if output == mask else tmp_path / output))


@pytest.mark.parametrize("damage", ["no questions", "a column less", "a missing text", "a text for a number"])
def test_a_damaged_outcome_store_is_one_line(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    shutil.copytree(FORMATS / "outcomes_1", old)
    table = parquet.read_table(old / "cells.parquet")
    column = {"a missing text": "tokens", "a text for a number": "doc_id"}.get(damage, "text")
    index = table.column_names.index(column)
    empty = pa.nulls(len(table), table.schema.field(index).type)
    values = empty if damage == "a missing text" else pa.array(["x"] * len(table))
    less = table.remove_column(index)
    table = less if damage == "a column less" else less.add_column(index, column, values)
    parquet.write_table(table, old / "cells.parquet")
    if damage == "no questions":
        (old / "questions.parquet").unlink()
    assert main(["migrate", str(old), "--output", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert "the store is damaged" in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_a_store_whose_sweep_was_killed_before_it_was_scored(tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(FORMATS / "outcomes_1", old)
    (old / "cells.parquet").unlink()
    assert main(["migrate", str(old), "--output", str(tmp_path / "new")]) == 0
    assert [cell["outcome"] for cell in OutcomeStore(tmp_path / "new").cells()] == [None]
