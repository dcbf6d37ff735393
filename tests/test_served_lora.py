"""`pruned-server` with an ordinary LoRA adapter: its answers, its part in keys and cells, refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmeval_prune.cli import main
from lmeval_prune.errors import InputError
from lmeval_prune.export.manifest import MANIFEST
from lmeval_prune.grid import cells
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.models.servers import KINDS, ServedModel, ServedVariant
from tests.stub_server import Stub
from tests.test_pruned_hf import requests
from tests.test_pruned_server import served

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture(scope="module")
def lora(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter as PEFT writes it; the stub computes it as a mask, by its name."""
    folder = tmp_path_factory.mktemp("adapters")
    words = ["--pretrained", str(tiny_folder), "--heads", "L0H1", "--dtype", "float32", "--output", str(folder)]
    assert main(["export", "adapter", *words]) == 0
    (folder / "L0H1" / MANIFEST).unlink()
    return folder / "L0H1"


def test_answers_are_those_of_peft_and_stored_apart(tiny_folder: Path, lora: Path, tmp_path: Path) -> None:
    items = requests("generate_until")
    count = len(items)
    expected = PrunedHFLM(str(tiny_folder), dtype="float64", device="cpu", peft=str(lora)).generate_until(items)
    plain = PrunedHFLM(str(tiny_folder), dtype="float64", device="cpu").generate_until(items)
    assert expected != plain
    store = {"responses": str(tmp_path / "store")}
    changed = tmp_path / "changed" / lora.name
    shutil.copytree(lora, changed)
    config = json.loads((changed / "adapter_config.json").read_text())
    (changed / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 7}))
    with Stub(tiny_folder, ("L0H1",)) as stub:
        for arguments, answers, computed in (
            ({"lora": str(lora)}, expected, count),
            ({}, plain, count),
            ({"lora": str(lora)}, expected, 0),
            ({"lora": str(changed)}, expected, count),  # for the stub it has not changed
        ):
            lm = served(tiny_folder, stub, **store, **arguments, probe=False)
            before = len(stub.payloads)
            assert lm.generate_until(items) == answers
            assert len(stub.payloads) - before == computed
            assert lm.get_model_info()["pruning"].get("lora", {}).keys() == ({"L0H1"} if arguments else set())
            lm.close()


def test_an_adapter_that_changes_nothing_or_is_not_served_is_refused(tiny_folder: Path, lora: Path) -> None:
    with Stub(tiny_folder, ("L0H1",), silent=("L0H1",)) as stub, pytest.raises(InputError):
        served(tiny_folder, stub, lora=str(lora))
    with Stub(tiny_folder, ("L0H2",)) as stub, pytest.raises(InputError):
        served(tiny_folder, stub, lora=str(lora))
    with pytest.raises(InputError):
        KINDS["llamacpp"].variant_fields(ServedModel("tiny", adapter_ids={"other": 0}), ServedVariant("tuned"))
    model = ServedModel("tiny", adapter_ids={"other": 0, "tuned": 1})
    fields = KINDS["llamacpp"].variant_fields(model, ServedVariant("tuned"))
    assert [adapter["scale"] for adapter in fields["lora"]] == [0, 1]


def test_a_cell_of_a_grid_knows_its_lora_adapter(tiny_folder: Path, lora: Path, tmp_path: Path) -> None:
    copy, changed = tmp_path / "copy" / lora.name, tmp_path / "changed" / lora.name
    for folder in (copy, changed):
        shutil.copytree(lora, folder)
    weights = changed / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    variants: dict[str, Any] = {name: {"lora": str(path)} for name, path in (("a", lora), ("b", copy), ("c", changed))}
    model = {"pretrained": str(tiny_folder), "base_url": "http://localhost:9"}
    keys = []
    for name, variant in (*variants.items(), ("d", {})):
        grid = {"tasks": ["prune_tiny_words"], "variants": {name: variant}, "model": model, "measure": False}
        keys += [cell.key for cell in cells.cells_of(Grid.of(grid))]
    assert keys[0] == keys[1] and len(set(keys)) == 3
