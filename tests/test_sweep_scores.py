"""The pruner `sweep`: drops of accuracy against a literal loop, ties, heads without outcomes, other models, the command."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lmeval_prune import InputError, Plan, map_model
from lmeval_prune.artefacts import digest
from lmeval_prune.cli import main
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import HEADS, parts_of
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.sprint.outcomes import OutcomeStore
from tests.swept_outcomes import drawn_outcomes, write_outcomes
from tests.tiny_models import tiny

HEADS_OF_TINY = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]


def store(folder: Path, z: dict[str, list[float]], model: Any = None) -> str:
    model_map = map_model(model or tiny("llama"))
    return str(write_outcomes(folder, z, {"name": model_map.name, "weights": model_map.weights}))


def scores_by(folder: str, model: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    model_map = map_model(model or tiny("llama"))
    pruner = make_pruner("sweep", {"outcomes": folder, **options})
    return pruner.scores(model_map, None, parts_of(model_map, [HEADS]), {}).values


def literal_drops(z: dict[str, list[float]]) -> dict[str, float]:
    """Accuracy of the unpruned model minus that without a head, on the questions that both were asked."""
    drops = {}
    for head, column in z.items():
        pairs = [(d, h) for d, h in zip(z["dense"], column, strict=True) if not math.isnan(d) and not math.isnan(h)]
        if head != "dense" and pairs:
            drops[head] = sum(d for d, _ in pairs) / len(pairs) - sum(h for _, h in pairs) / len(pairs)
    return drops


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_drops_of_accuracy_and_equal_ones_go_by_the_norm(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    z = {name: draw.choice([0.0, 1.0, math.nan], 40, p=[0.4, 0.5, 0.1]).tolist() for name in ["dense", *HEADS_OF_TINY]}
    z["L1H2"], z["L0H3"] = list(z["L0H1"]), list(z["L0H1"])  # ties
    drops, scores = literal_drops(z), scores_by(store(tmp_path / "z", z))
    norms = (
        make_pruner("global_threshold", {})
        .scores(map_model(tiny("llama")), None, parts_of(map_model(tiny("llama")), [HEADS]), {})
        .values
    )
    actual = {
        f"{key.removeprefix('heads.')}H{n}": float(x) for key, values in scores.items() for n, x in enumerate(values)
    }
    norm = {
        f"{key.removeprefix('heads.')}H{n}": float(x) for key, values in norms.items() for n, x in enumerate(values)
    }
    expected = sorted(HEADS_OF_TINY, key=lambda head: (round(drops[head], 9), norm[head]))
    assert sorted(HEADS_OF_TINY, key=actual.__getitem__) == expected
    different = sorted({round(drop, 9) for drop in drops.values()})
    gap = min(b - a for a, b in pairwise(different))
    for head, drop in drops.items():
        assert drop - 1e-8 <= actual[head] <= drop + gap / 2


def test_a_plan_removes_the_heads_that_accuracy_misses_least(tmp_path: Path) -> None:
    right, wrong = [1.0] * 4, [0.0] * 4
    z = {"dense": right, **dict.fromkeys(HEADS_OF_TINY, wrong), "L0H2": right, "L1H0": [1.0, 1.0, 1.0, 0.0]}
    model_map = map_model(tiny("llama"))
    pruner = make_pruner("sweep", {"outcomes": store(tmp_path / "z", z)})
    (plan,) = stages(pruner, model_map, PruneOptions(0.25, budget="heads"))
    assert {*plan.heads} == {"L0H2", "L1H0"}
    assert plan.provenance["method"] == "sweep" and plan.provenance["unknown"] == "refuse"


def test_heads_without_outcomes_are_refused_or_follow_a_rule(tmp_path: Path) -> None:
    z = {"dense": [1.0, 1.0], **{head: [1.0, 0.0] for head in HEADS_OF_TINY[:6]}, "L1H2": [math.nan] * 2}
    folder = store(tmp_path / "z", z)
    with pytest.raises(InputError, match=r"no outcomes of 2 of 8 heads, e.g. L1H2; .*--options unknown=last") as error:
        scores_by(folder)
    assert "\n" not in str(error.value)
    last, mean = (torch.cat([*scores_by(folder, unknown=rule).values()]) for rule in ("last", "mean"))
    assert last[6:].min() > last[:6].max()
    assert 0.5 <= mean[6] < 1.0 and mean[:6].min() >= 0.5


def test_content_identifies_the_scores_and_not_the_folder(tmp_path: Path) -> None:
    first, second = (drawn_outcomes(map_model(tiny("llama")), tmp_path / name) for name in ("a", "b"))
    other = drawn_outcomes(map_model(tiny("llama")), tmp_path / "c", seed=1)
    identity = {path: make_pruner("sweep", {"outcomes": str(path)}).identity for path in (first, second, other)}
    assert identity[first] == identity[second] != identity[other]
    assert identity[first]["swept"] == {"toy": ["train"]}


@pytest.mark.parametrize(
    ("split", "scored", "warns"),
    [
        ("train", ["test"], False),
        ("train", ["train"], True),
        ("fold0", ["all", "test"], False),
        ("all", ["all", "test"], True),
        ("validation", ["test"], False),
        ("validation", ["validation"], True),
        ("test", ["validation"], False),
        ("test", None, True),  # a store that does not say what the task scores
        ("fold0", None, False),
    ],
)
def test_a_sweep_of_the_split_that_its_task_scores_is_warned_of(
    tmp_path: Path, split: str, scored: list[str] | None, warns: bool, split_warnings: Callable[[], list[str]]
) -> None:
    """In one line, with the split and what to do."""
    model_map = map_model(tiny("llama"))
    z = {"dense": [1.0], **{head: [1.0] for head in HEADS_OF_TINY}}
    model = {"name": model_map.name, "weights": model_map.weights}
    settings = {"scored_splits": scored} if scored else {}
    write_outcomes(tmp_path / "z", z, model, split=split, settings=settings)
    scores_by(str(tmp_path / "z"))
    lines = split_warnings()
    assert len(lines) == warns
    for line in lines:
        assert f"has questions of the split {split}, which toy scores: " in line and "--split" in line


@pytest.mark.parametrize(
    ("z", "options", "message"),
    [
        (None, {}, "give --outcomes FOLDER"),
        (None, {"outcomes": "nowhere"}, "nowhere is not an outcome store"),
        ({head: [1.0] for head in HEADS_OF_TINY}, {}, "no question that the unpruned model and a head were both asked"),
        (
            {"dense": [1.0], **{head: [1.0] for head in HEADS_OF_TINY}, "L7H0": [1.0]},
            {},
            "outcomes of L7H0, which this model",
        ),
        ({"dense": [1.0], "L0H0": [math.nan]}, {}, "no question that the unpruned model and a head were both asked"),
        (None, {"unknown": "guess"}, "unknown='guess' must be refuse, last or mean"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, z: Any, options: Any, message: str) -> None:
    if z:
        options = {**options, "outcomes": store(tmp_path / "z", z)}
    with pytest.raises(InputError, match=message) as error:
        scores_by(options.pop("outcomes", ""), **options)
    assert "\n" not in str(error.value)


def test_the_sweep_of_another_model_is_refused(tmp_path: Path) -> None:
    z = {"dense": [1.0], **{head: [1.0] for head in HEADS_OF_TINY}}
    with pytest.raises(InputError, match=r"is of other weights .*give the sweep of this model"):
        scores_by(store(tmp_path / "z", z, tiny("llama", seed=5)))


def test_the_command_reads_what_sweep_wrote(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["sweep", "--model_args", f"pretrained={tiny_folder},dtype=float64,device=cpu", "--tasks",
             "prune_tiny_words", "--heads", "L*H*", "--limit", "3", "--gen_kwargs", "max_gen_toks=4", "--output",
             str(tmp_path / "swept")]  # fmt: skip
    assert main(sweep) == 0
    assert len(OutcomeStore(tmp_path / "swept").read().pool) == 9
    words = ["prune", "--pretrained", str(tiny_folder), "--method", "sweep", "--outcomes", str(tmp_path / "swept")]
    assert main([*words, "--ratio", "0.5", "--output", str(tmp_path / "plan.json")]) == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert len(plan.heads) == 4 and not plan.channels
    importance = ["importance", *words[1:], "--output", str(tmp_path / "scores.json")]
    assert main(importance) == 0
    again = ["prune", "--pretrained", str(tiny_folder), "--scores", str(tmp_path / "scores.json"), "--ratio", "0.5"]
    capsys.readouterr()
    assert main([*again, "--output", str(tmp_path / "again.json")]) == 0
    again_plan = Plan.load(tmp_path / "again.json")
    assert again_plan.heads == plan.heads and again_plan.provenance["outcomes"] == plan.provenance["outcomes"] != ""
    assert again_plan.provenance["swept"] == plan.provenance["swept"] == {"prune_tiny_words": ["test"]}
    seen = sorted(map(digest, OutcomeStore(tmp_path / "swept").read().texts))
    assert len(seen) == 3 and plan.provenance["seen"] == again_plan.provenance["seen"] == seen
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model.model.layers[0].mlp.up_proj.weight.data += 1
    model.save_pretrained(tmp_path / "other")
    words[2] = str(tmp_path / "other")
    assert main([*words, "--ratio", "0.5", "--output", str(tmp_path / "others.json")]) == 2
    assert "other weights" in capsys.readouterr().err
