"""Which model a server has: names, paths and sizes do not tell one training from another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lmeval_prune import InputError
from lmeval_prune.artefacts import file_name
from lmeval_prune.grid.cells import cells_of
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.run import run
from lmeval_prune.models.answer_store import read_answers
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.models.servers import RECORD, check_record
from tests.stub_server import Stub
from tests.test_pruned_server import served, text


@pytest.fixture(scope="module")
def retrained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape and tokenizer."""
    folder = tmp_path_factory.mktemp("retrained") / "tiny-llama"
    shutil.copytree(tiny_folder, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


def remote(folder: Path, kind: str = "vllm") -> Stub:
    """A server whose model has the same path, name and size, whatever it is."""
    stub = Stub(folder, kind=kind)
    stub.root = "/models/tiny-llama"
    return stub


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_another_training_does_not_go_on_with_stored_answers(
    tiny_folder: Path, retrained: Path, tmp_path: Path, kind: str
) -> None:
    def ask(folder: Path, responses: Path, prompt: str) -> None:
        with remote(folder, kind) as stub:
            lm: PrunedServerLM = served(tiny_folder, stub, responses=str(responses))
            lm.generate_until([text(prompt)])
            lm.close()

    ask(tiny_folder, tmp_path / "r", "a b")
    ask(tiny_folder, tmp_path / "r", "c d")
    with pytest.raises(InputError):
        ask(retrained, tmp_path / "r", "a b")
    assert len(list(read_answers(tmp_path / "r"))) == 2
    with remote(retrained, kind) as stub:  # no answer was asked for
        served(tiny_folder, stub, responses=str(tmp_path / "s")).close()
    ask(tiny_folder, tmp_path / "s", "a b")


def test_a_grid_has_answers_of_one_model(tiny_folder: Path, retrained: Path, tmp_path: Path) -> None:
    def evaluate(folder: Path, *tasks: str) -> list[Any]:
        with remote(folder) as stub:
            model = {"pretrained": str(tiny_folder), "dtype": "float64", "base_url": stub.url, "server": "vllm"}
            settings = {"limit": 1, "gen_kwargs": {"max_gen_toks": 4}, "measure": False}
            grid = Grid.of({"model": model, "variants": {"served": {}}, "tasks": list(tasks), **settings})
            return run(grid, str(tmp_path / "grid")).failed

    assert evaluate(tiny_folder, "prune_tiny_words") == []
    ((_, task, reason),) = evaluate(retrained, "prune_tiny_words", "prune_tiny_words_pass4")
    assert task == "prune_tiny_words_pass4" and reason
    assert (tmp_path / "grid" / "answers" / RECORD).is_file()


def test_a_grid_has_models_of_several_names(tiny_folder: Path, retrained: Path, tmp_path: Path) -> None:
    """A quantised model has the `pretrained=` of the one that it was made from, and answers of its own."""
    with remote(tiny_folder) as stub, remote(retrained) as other:
        stub.name, other.name = "whole", "quantised"
        model = {"pretrained": str(tiny_folder), "dtype": "float64", "server": "vllm"}
        variants = {server.name: {"model": server.name, "base_url": server.url} for server in (stub, other)}
        settings = {"limit": 1, "gen_kwargs": {"max_gen_toks": 4}, "measure": False}
        grid = Grid.of({"model": model, "variants": variants, "tasks": ["prune_tiny_words"], **settings})
        assert run(grid, str(tmp_path)).failed == []
    folders = [tmp_path / "answers" / file_name(cell.answers) for cell in cells_of(grid)]
    ((whole,), (quantised,)) = ([row["response"] for row in read_answers(folder)] for folder in folders)
    assert whole != quantised


@pytest.mark.parametrize("first", ["here", "there"])
def test_costs_of_a_model_here_are_none_of_a_served_one(tiny_folder: Path, tmp_path: Path, first: str) -> None:
    """They are measured, whichever is evaluated first; a server is not asked again for its own, which are unknown."""
    with remote(tiny_folder) as stub:
        variants = {"here": {}, "there": {"base_url": stub.url}}
        variants = {first: variants[first], **variants}
        model = {"pretrained": str(tiny_folder), "dtype": "float64"}
        settings = {"limit": 1, "gen_kwargs": {"max_gen_toks": 4}, "tasks": ["prune_tiny_words"]}
        grid = Grid.of({"model": model, "variants": variants, **settings})
        assert run(grid, str(tmp_path)).failed == []
    assert run(grid, str(tmp_path), retry_failed=True).failed == []
    folder = GridFolder(tmp_path)
    costs = {cell.variant.name: folder.costs(cell.costs) for cell in cells_of(grid)}
    assert costs["here"] and not costs["there"] and folder.failures() == {}


def test_rounding_is_no_other_model(tmp_path: Path) -> None:
    known = [("a", -1.0), ("b", -2.0), ("c", -1.5), ("d", -1.0)]
    near = [("a", -1.1), ("b", -1.9), ("e", -1.52), ("f", -9.0)]  # c and e are as probable: others follow
    for dtype, is_other in (("float32", True), ("bfloat16", False), ("", False)):
        check_record(tmp_path / RECORD, [dtype], dtype, known, False, "http://a")
        if is_other:
            with pytest.raises(InputError):
                check_record(tmp_path / RECORD, [dtype], dtype, near, False, "http://b")
        else:
            check_record(tmp_path / RECORD, [dtype], dtype, near, False, "http://b")


def test_the_folder_that_a_server_names(tiny_folder: Path, retrained: Path, tmp_path: Path) -> None:
    with Stub(tiny_folder) as stub:
        stub.root = str(retrained)
        with pytest.raises(InputError):
            served(tiny_folder, stub, probe=False)
        stub.root = str(shutil.copytree(tiny_folder, tmp_path / "copy"))  # the same weights
        served(tiny_folder, stub, probe=False)
