"""Scoring that was killed resumes with the same scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmeval_prune import Plan, map_model
from lmeval_prune.artefacts import Work
from lmeval_prune.cli import main
from lmeval_prune.pruners import schedule
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.depth import BlockKl
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import stages
from tests.kills import Killed, counted
from tests.test_pruners import text_of
from tests.tiny_models import tiny


def planned(name: str, work: Path | None, text: CalibrationText, send: Any = lambda _: None, **more: Any) -> Plan:
    model_map = map_model(tiny("llama", num_hidden_layers=4))
    options = PruneOptions(0.5, **more)
    *_, plan = stages(make_pruner(name, {}), model_map, options, text, progress=send, work=work)
    return plan


@pytest.mark.parametrize("batches", [1, 2])
def test_a_killed_score_of_many_passes_resumes_at_the_batch(batches: int, tmp_path: Path) -> None:
    """Of three; the second run reads the rest and stores its scores, with the same digits."""
    expected = planned("block_kl", None, text_of(), parts="layers")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        counted(patch, Work, "write_tensors", batches)
        planned("block_kl", tmp_path / "work", text_of(), parts="layers")
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch, Work, "write_tensors")
        plan = planned("block_kl", tmp_path / "work", text_of(), parts="layers")
    assert calls == [3 - batches + 1]
    assert plan == expected and all(torch.equal(plan.scores[key], x) for key, x in expected.scores.items())


@pytest.mark.parametrize("change", ["text", "batch", "weights", "config", "method", "damage"])
def test_sums_of_other_work_are_not_taken(change: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        counted(patch, Work, "write_tensors", 2)
        planned("block_kl", tmp_path, text_of(), parts="layers")
    text, model_map, pruner = text_of(), map_model(tiny("llama", num_hidden_layers=4)), make_pruner("block_kl", {})
    if change == "text":
        text = text_of(rows=6)
    elif change == "batch":
        ids, real, _ = (torch.cat(tensors) for tensors in zip(*text.batches, strict=True))
        text = CalibrationText.from_windows("test", ids, 1, real)
    elif change == "weights":
        with torch.no_grad():
            model_map.attention[0].o_proj.weight.mul_(2)
    elif change == "config":
        model_map.model.config.rms_norm_eps = 0.1
    elif change == "damage":
        for path in tmp_path.glob("*/*.safetensors"):
            path.write_bytes(b"{")
    with pytest.MonkeyPatch.context() as patch:
        if change == "method":
            patch.setattr(BlockKl, "version", 2)
        calls = counted(patch, Work, "write_tensors")
        (_,) = stages(pruner, model_map, PruneOptions(0.5, parts="layers"), text, work=tmp_path)
    assert calls == [len(text.batches) + 1]


@pytest.mark.parametrize(("name", "more"), [("gisp", {}), ("block_kl", {"parts": "blocks"}), ("flap", {})])
def test_a_killed_schedule_resumes_at_the_step(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """With the compensation of the steps; scores of finished steps are not computed again."""
    text = text_of(rows=8, length=12)
    expected = planned(name, None, text, steps=3, **more)
    for step in range(3):
        work = tmp_path / str(step)
        with pytest.MonkeyPatch.context() as patch:
            calls = counted(patch, schedule, "_score", step)
            with pytest.raises(Killed):
                planned(name, work, text, steps=3, **more)
        assert len([*work.glob("*.safetensors")]) == step == calls[0]
        with pytest.MonkeyPatch.context() as patch:
            calls = counted(patch, schedule, "score")
            plan = planned(name, work, text, steps=3, **more)
        assert calls == [3 - step]
        assert plan == expected and plan.tensors == expected.tensors


def test_the_command_resumes_and_leaves_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"Ann has {n} apples and buys {n + 1} more." for n in range(60)))
    text = ["--text", str(tmp_path / "text.txt"), "--windows", "8", "--tokens", "16", "--batch", "4"]
    shared = ["--pretrained", str(tiny_folder), "--method", "block_kl", *text]
    for command, more in (("importance", []), ("prune", ["--ratio", "0.5"])):
        output = tmp_path / f"{command}.json"
        words = [command, *shared, *more, "--output", str(output)]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            counted(patch, Work, "write_tensors", 1)
            main(words)
        assert not output.exists()
        calls = counted(monkeypatch, Work, "write_tensors")
        assert main(words) == 0 and output.exists()
        assert calls == [{"importance": 1, "prune": 2}[command]]
        assert not (tmp_path / f".{command}.json.scoring").exists()
