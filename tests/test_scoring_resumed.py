"""Scoring that was killed resumes with the same scores, and tells how long it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmeval_prune import Plan, map_model
from lmeval_prune.cli import main
from lmeval_prune.pruners import estimate, score_store
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.block_kl import BlockKl
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.estimate import Estimate
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.pruners.score_store import ScoreStore, Sums
from lmeval_prune.pruners.sequential import LayerReplay
from lmeval_prune.surgery import cut as surgery
from tests.kills import Killed, counted
from tests.test_pruners import text_of
from tests.tiny_models import tiny

Clock = Callable[[float], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stop the time; the function sets it on by seconds."""
    now = [1000.0]

    def advance(seconds: float) -> None:
        now[0] += seconds

    for module in (estimate, score_store):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return advance


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_store, "INTERVAL", 0.0)


def planned(name: str, work: Path | None, text: CalibrationText, send: Any = lambda _: None, **more: Any) -> Plan:
    model_map = map_model(tiny("llama", num_hidden_layers=4))
    options = PruneOptions(0.5, **more)
    *_, plan = stages(make_pruner(name, {}), model_map, options, text, progress=send, work=work)
    return plan


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("passes", [0, 1, 5, 11])
def test_a_killed_score_of_many_passes_resumes_at_the_pass(passes: int, tmp_path: Path) -> None:
    """Of three batches and four layers; the second run has the rest of the passes, and the same digits."""
    expected = planned("block_kl", None, text_of(), parts="layers")
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, Sums, "add", passes)
        with pytest.raises(Killed):
            planned("block_kl", tmp_path / "work", text_of(), parts="layers")
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch, Sums, "add")
        plan = planned("block_kl", tmp_path / "work", text_of(), parts="layers")
    assert calls == [12 - passes]
    assert plan == expected and all(torch.equal(plan.scores[key], x) for key, x in expected.scores.items())


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("change", ["text", "batch", "weights", "config", "method"])
def test_sums_of_other_work_are_not_taken(change: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, Sums, "add", 7)
        with pytest.raises(Killed):
            planned("block_kl", tmp_path, text_of(), parts="layers")
    text, model_map, pruner = text_of(), map_model(tiny("llama", num_hidden_layers=4)), make_pruner("block_kl", {})
    if change == "text":
        text = text_of(rows=6)
    elif change == "batch":
        ids, real = (torch.cat(tensors) for tensors in zip(*text.batches, strict=True))
        text = CalibrationText.from_windows("test", ids, 1, real)
    elif change == "weights":
        with torch.no_grad():
            model_map.attention[0].o_proj.weight.mul_(2)
    elif change == "config":
        model_map.model.config.rms_norm_eps = 0.1
    with pytest.MonkeyPatch.context() as patch:
        if change == "method":
            patch.setattr(BlockKl, "version", 2)
        calls = counted(patch, Sums, "add")
        (_,) = stages(pruner, model_map, PruneOptions(0.5, parts="layers"), text, work=tmp_path)
    assert calls == [4 * len(text.batches)]


@pytest.mark.parametrize(("name", "more"), [("gisp", {}), ("block_kl", {"parts": "blocks"}), ("flap", {})])
def test_a_killed_schedule_resumes_at_the_step(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """With the compensation of the steps; scores of finished steps are not computed again."""
    text = text_of(rows=8, length=12)
    expected = planned(name, None, text, steps=3, **more)
    for step in range(3):
        work = tmp_path / str(step)
        with pytest.MonkeyPatch.context() as patch:
            counted(patch, ScoreStore, "save", step)
            with pytest.raises(Killed):
                planned(name, work, text, steps=3, **more)
        assert len([*work.glob("*.safetensors")]) == step
        with pytest.MonkeyPatch.context() as patch:
            calls = counted(patch, ScoreStore, "save")
            plan = planned(name, work, text, steps=3, **more)
        assert calls == [3 - step]
        assert plan == expected and plan.tensors == expected.tensors


@pytest.mark.parametrize("damage", [b"", b"{", b'{"0.layers.L0": "x"}', b"[1.0]"])
def test_a_damaged_file_is_as_a_missing_one(damage: bytes, tmp_path: Path) -> None:
    store = ScoreStore(tmp_path / "work", 1)
    sums = store.sums("a")
    assert sums.path is not None
    sums.path.write_bytes(damage)
    assert store.sums("a").values == {}
    store.save("a", {"heads.L0": torch.ones(3)}, {"heads.L0": torch.zeros(2)})
    values, means = ScoreStore(tmp_path / "work", 1).load("a") or ({}, {})
    assert means and values["heads.L0"].tolist() == [1] * 3 and means["heads.L0"].tolist() == [0] * 2
    (tmp_path / "work" / "a.safetensors").write_bytes(damage)
    assert ScoreStore(tmp_path / "work", 1).load("a") is None
    ScoreStore(tmp_path / "work", 2)
    assert not (tmp_path / "work").exists()


def test_sums_are_written_now_and_then(tmp_path: Path, clock: Clock) -> None:
    sums = Sums(tmp_path / "sums.json")
    for number in range(8):
        clock(2)
        sums.add(number, "layers.L0", number / 4)
    assert json.loads((tmp_path / "sums.json").read_text()) == {f"{n}.layers.L0": n / 4 for n in range(6)}


def test_the_command_resumes_and_leaves_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"Ann has {n} apples and buys {n + 1} more." for n in range(60)))
    text = ["--text", str(tmp_path / "text.txt"), "--windows", "8", "--tokens", "16", "--batch", "4"]
    for command, more in (("importance", []), ("prune", ["--ratio", "0.5"])):
        output = tmp_path / f"{command}.json"
        words = [
            command,
            "--pretrained",
            str(tiny_folder),
            "--method",
            "block_kl",
            *text,
            *more,
            "--output",
            str(output),
        ]
        with pytest.MonkeyPatch.context() as patch:
            counted(patch, Sums, "add", 3)
            with pytest.raises(Killed):
                main(words)
        assert not output.exists()
        calls = counted(monkeypatch, Sums, "add")
        assert main(words) == 0 and output.exists()
        assert calls == [{"importance": 12, "prune": 4}[command] - 3]
        assert not (tmp_path / f".{command}.json.scoring").exists()


def test_a_kill_between_plan_and_checkpoint_scores_nothing_again(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"Ann has {n} apples and buys {n + 1} more." for n in range(60)))
    words = ["prune", "--pretrained", str(tiny_folder), "--method", "block_kl", "--ratio", "0.5", "--windows", "8"]
    words += ["--tokens", "16", "--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "plan.json")]
    words += ["--cut", str(tmp_path / "cut")]
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, surgery, "cut_to", 0)
        with pytest.raises(Killed):
            main(words)
    assert (tmp_path / "plan.json").exists() and not (tmp_path / "cut").exists()
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch, BlockKl, "depth_scores")
        assert main(words) == 0 and (tmp_path / "cut" / "config.json").exists()
    assert calls == [0] and not (tmp_path / ".plan.json.scoring").exists()


# --------------------------------------------------------------------------- estimates


def test_estimates_go_from_the_first_share(clock: Clock) -> None:
    """At most one line in 30 seconds; a smaller share begins another task."""
    lines: list[str] = []
    report = Estimate("scoring", lines.append)
    for share in (0.5, 0.6, 0.7, 0.7, 0.9, 0.0, 0.1, 0.2):
        report(share)
        clock(20)
    assert lines == [
        "scoring: 70% complete, about 1.0 min left",
        "scoring: 90% complete, about 0.3 min left",
        "scoring: 20% complete, about 2.7 min left",
    ]


def test_estimates_of_a_step_cover_later_ones(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as long as this step is by the rate so far, also of one that goes on after a kill."""
    lines: list[str] = []
    report = Estimate("step 1 of 3: scoring", lines.append, 2)
    for share in (0.2, 0.4, 1.0):
        report(share)
        clock(60)
    assert lines == [
        "step 1 of 3: scoring: 40% complete, about 3.0 min left, 13.0 with later steps",
        "step 1 of 3: scoring: 100% complete, about 0.0 min left",
    ]
    later: list[int] = []
    monkeypatch.setattr(Estimate, "__call__", lambda self, _: later.append(self.later))
    planned("flap", None, text_of(), steps=3)
    assert sorted({*later}, reverse=True) == [2, 1, 0] and later == sorted(later, reverse=True)


@pytest.mark.parametrize("name", ["block_kl", "block_influence", "llm_pruner", "norm_entropy", "flap", "gisp"])
def test_methods_that_read_text_report_how_far_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From nothing on, in order, and in several parts."""
    shares: list[float] = []
    text = replace(text_of(), report=shares.append)
    monkeypatch.setattr(Estimate, "__call__", lambda self, share: shares.append(share))
    planned(name, None, text)
    assert shares[0] == 0 and shares == sorted(shares) and len({*shares}) >= 3 and max(shares) < 1


def test_layers_that_are_finished_tell_how_long_the_others_take(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    run_layer = LayerReplay.run_layer

    def run_slowly(self: Any, *args: Any, **kwargs: Any) -> None:
        clock(30)
        run_layer(self, *args, **kwargs)

    monkeypatch.setattr(LayerReplay, "run_layer", run_slowly)
    planned("wanda_sp", None, text_of(rows=8, length=12), lines.append)
    left = [line.rpartition("; ")[2] for line in lines if line.startswith("layer")]
    assert left[:3] == [f"about {minutes} min left" for minutes in (1.5, 1.5, 0.8)] and "left" not in left[3]
