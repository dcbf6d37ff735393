"""The distance from the dense model in a grid: measured together, stored, resumed, and shown without a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from lmeval_prune import HeadMask, load_pretrained
from lmeval_prune.cli import main
from lmeval_prune.comparison.tokens import Text, token_distances
from lmeval_prune.comparison.variants import measure
from lmeval_prune.decoding import Engine
from lmeval_prune.grid import worker
from lmeval_prune.grid.comparison import compare_grid
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.run import run
from tests.conftest import task_manager
from tests.test_grid import described

SETTINGS: dict[str, Any] = {
    "variants": {
        "dense": {},
        "head {heads}": {"heads": {"each": ["L0H1", "L1H2"]}},
        "random": {"prepare": {"random_heads": {"share": 0.4, "seed": 0}}},
        "filter": {"token_filter": {"ratio": 0.4, "warmup": 3}},
    },
    "limit": 3,
    "distance": 2,
}


@pytest.fixture(scope="module")
def grid(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grids") / "grid"
    assert run(Grid.of(described(tiny_folder, **SETTINGS)), str(folder)).failed == []
    return folder


def entries(grid: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(entry["variant"], entry["task"]): entry for entry in GridFolder(grid).read()["cells"]}


def test_each_variant_but_the_dense_model_has_its_distance(grid: Path, tiny_folder: Path) -> None:
    """That of a head is computed anew: the dense model's greedy answers by `generate`, then every token."""
    cells, folder = entries(grid), GridFolder(grid)
    assert {name for name, entry in cells.items() if "distance" in entry} == {
        (variant, task) for variant, task in cells if variant != "dense"
    }
    model, tokenizer = (
        load_pretrained(str(tiny_folder), dtype=torch.float64),
        AutoTokenizer.from_pretrained(tiny_folder),
    )
    task = task_manager().load(["prune_tiny_words"])["tasks"]["prune_tiny_words"]
    rows = folder.distances(cells["head L0H1", "prune_tiny_words"]["distance"])
    assert list(rows["doc_id"]) == [0, 1]
    for number, doc in enumerate(list(task.test_docs())[:2]):
        prompt = tokenizer.encode(task.doc_to_text(doc))
        with torch.no_grad():
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
        text = Text(tuple(prompt), tuple(whole[len(prompt) :]), ("", 0))
        (expected,) = token_distances(Engine(model), {"": [HeadMask("L0H1")]}, [text])[""]
        np.testing.assert_allclose(rows["kld"][number], expected[:, 0].numpy(), rtol=1e-6)
        np.testing.assert_allclose(rows["delta_p"][number], expected[:, 2].numpy(), rtol=1e-5, atol=1e-9)
    choices = folder.distances(cells["filter", "prune_tiny_choice"]["distance"])
    assert set(choices["doc_id"]) == {0, 1} and len(choices) > 4 and "answer_tokens" not in choices
    assert all((values >= -1e-9).all() for values in choices["kld"])


def test_masks_share_a_pass_and_what_is_measured_is_kept(
    grid: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, calls = entries(grid), []

    def counted(lm: Any, requests: Any, variants: Any, others: Any) -> Any:
        calls.append(sorted(variants))
        return measure(lm, requests, variants, others)

    monkeypatch.setattr(worker, "measure_distances", counted)
    assert run(Grid.of(described(tiny_folder, **SETTINGS)), str(grid)).new == 0
    assert calls == []
    missing = [cells[f"head {head}", "prune_tiny_words"]["distance"] for head in ("L0H1", "L1H2")]
    before = [GridFolder(grid).distances(key) for key in missing]
    for key in missing:
        (grid / "distances" / f"{key}.parquet").unlink()
    assert run(Grid.of(described(tiny_folder, **SETTINGS)), str(grid)).new == 0
    assert calls == [sorted(missing)]
    for key, frame in zip(missing, before, strict=True):
        pd.testing.assert_frame_equal(GridFolder(grid).distances(key), frame)


def test_compare_shows_it_without_a_model(grid: Path) -> None:
    assert main(["grid", "compare", str(grid)]) == 0
    rows = json.loads((grid / "compare" / "comparison.json").read_text())["rows"]
    by_name = {(row["variant"], row["task"]): row for row in rows}
    kld = np.concatenate(
        GridFolder(grid).distances(entries(grid)["random", "prune_tiny_words"]["distance"])["kld"].to_list()
    )
    row = by_name["random", "prune_tiny_words"]
    assert row["mean_kld"] == pytest.approx(kld.mean(), rel=1e-6) and row["mean_kld_se"] > 0
    assert row["first_difference"] is None or row["first_difference"] >= 1
    assert by_name["dense", "prune_tiny_words"]["mean_kld"] is None
    assert by_name["random", "prune_tiny_choice"]["same_answers"] is None


@pytest.fixture(scope="module")
def noisy(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of the tiny model with noise on its weights."""
    folder = tmp_path_factory.mktemp("models") / "noisy"
    shutil.copytree(tiny_folder, folder)
    model = load_pretrained(str(tiny_folder))
    torch.manual_seed(0)
    for weights in model.parameters():
        weights.data += 0.02 * torch.randn_like(weights)
    model.save_pretrained(folder)
    return folder


def test_checkpoints_are_measured_from_the_baselines_model(tiny_folder: Path, noisy: Path, tmp_path: Path) -> None:
    """Also one with heads masked from its own, and one that a preparation cuts; each against plain passes."""
    cut = {"prepare": {"prune": {"method": "random", "ratio": 0.2, "cut": True}}}
    variants: dict[str, Any] = {
        "dense": {},
        "noisy": {"pretrained": str(noisy)},
        "noisy without a head": {"pretrained": str(noisy), "heads": "L0H1"},
        "cut": cut,
        "cut, without a head": {**cut, "heads": "L1H0"},
        "tried out": {"prepare": {"prune": {"method": "random", "ratio": 0.2}}},
    }
    path = tmp_path / "grid"
    assert run(Grid.of(described(tiny_folder, **{**SETTINGS, "variants": variants})), str(path)).failed == []
    cells, folder = entries(path), GridFolder(path)
    names = {variant for (variant, _), entry in cells.items() if "distance" in entry}
    assert names == set(variants) - {"dense"}
    rows = {name: folder.distances(cells[name, "prune_tiny_words"]["distance"]) for name in names}
    kld = {name: np.concatenate(row["kld"].to_list()) for name, row in rows.items()}
    assert all(values.mean() > 1e-6 for values in kld.values())
    np.testing.assert_allclose(kld["cut"], kld["tried out"], rtol=1e-4, atol=1e-9)  # one plan, executed and by hooks
    assert not np.allclose(kld["cut"], kld["cut, without a head"], rtol=0.01)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    dense, other = (load_pretrained(str(source), dtype=torch.float64) for source in (tiny_folder, noisy))
    task = task_manager().load(["prune_tiny_words"])["tasks"]["prune_tiny_words"]
    for number, doc in enumerate(list(task.test_docs())[:2]):
        prompt = tokenizer.encode(task.doc_to_text(doc))
        with torch.no_grad():
            whole = dense.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
            own = other.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
            p, q = (model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in (dense, other))
        expected = (p.exp() * (p - q)).sum(-1)
        np.testing.assert_allclose(rows["noisy"]["kld"][number], expected.numpy(), rtol=1e-5)
        assert rows["noisy"]["answer_tokens"][number] == len(own) - len(prompt)
    assert run(Grid.of(described(tiny_folder, **{**SETTINGS, "variants": variants})), str(path)).new == 0


def test_another_tokenizer_has_no_distance(tiny_folder: Path, noisy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(noisy, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<a new token>"])
    tokenizer.save_pretrained(other)
    variants = {"dense": {}, "other": {"pretrained": str(other)}}
    settings = {**SETTINGS, "variants": variants, "tasks": ["prune_tiny_choice"], "baseline": "dense"}
    assert run(Grid.of(described(tiny_folder, **settings)), str(tmp_path / "c")).failed == []
    comparison = compare_grid(tmp_path / "c")
    assert not comparison.rows["other", "prune_tiny_choice"].measured and len(comparison.notes) == 2
