"""`lmeval-prune sweep --server`: the outcomes equal those of a local sweep, and are never stored together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lmeval_prune import InputError
from lmeval_prune.cli import main
from lmeval_prune.export.manifest import MANIFEST, SCHEMA, VERSION
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.models.servers import RECORD
from lmeval_prune.sprint.options import FitOptions, SweepOptions
from lmeval_prune.sprint.outcomes import OutcomeStore
from lmeval_prune.sprint.router import fit
from lmeval_prune.sprint.sweep import run_sweep
from tests.conftest import file_contents
from tests.stub_server import Stub
from tests.test_sweep import few_shot
from tests.test_sweep import sweep as sweep_here

pytestmark = pytest.mark.usefixtures("quick_retries")
HEADS = ("L0H0", "L0H1", "L0H2", "L0H3", "L1H2")


@pytest.fixture(scope="module")
def adapters(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of adapters, exported by the command."""
    folder = tmp_path_factory.mktemp("adapters") / "pool"
    words = ["--pretrained", str(tiny_folder), "--each", "+".join(HEADS), "--dtype", "float32", "--output", str(folder)]
    assert main(["export", "adapter", *words]) == 0
    return folder


def sweep(stub: Stub, folder: Path, adapters: Path, output: Path, **options: Any) -> Any:
    arguments = {"pretrained": str(folder), "server": "vllm", "adapters": str(adapters), "max_retries": 3}
    settings = {"heads": "L0H*+L1H2", "limit": 5, "gen_kwargs": {"max_gen_toks": 10}, **options}
    arguments |= settings.pop("model_args", {})
    return run_sweep(
        SweepOptions(arguments, settings.pop("tasks", ("prune_tiny_words",)), str(output), server=stub.url, **settings)
    )


def test_outcomes_are_those_of_a_local_sweep(tiny_folder: Path, adapters: Path, tmp_path: Path) -> None:
    sweep_here(tiny_folder, tmp_path / "here")
    with Stub(tiny_folder, HEADS) as stub:
        served = sweep(stub, tiny_folder, adapters, tmp_path / "there", heads="L0H*", limit=3)
        assert served.pool == ["dense", *HEADS[:4]]
        served = sweep(stub, tiny_folder, adapters, tmp_path / "there")  # with another head, and more questions
        count = len(stub.payloads)
        assert sum("echo" not in payload for payload in stub.payloads) == 5 * 6  # nothing twice
        before = file_contents(tmp_path / "there")
        sweep(stub, tiny_folder, adapters, tmp_path / "there")
        assert (
            all("echo" in payload for payload in stub.payloads[count:]) and file_contents(tmp_path / "there") == before
        )
    here = OutcomeStore(tmp_path / "here").read()
    assert served.pool == here.pool and np.array_equal(served.z, here.z) and served.questions == here.questions
    every = [OutcomeStore(tmp_path / name).cells() for name in ("here", "there")]
    for local, remote in zip(*every, strict=True):
        assert {**local, "tokens": None, "answer": None} == {**remote, "tokens": None, "answer": None}
    assert {RECORD, *(path.name for path in (tmp_path / "here").glob("[a-z]*"))} == {*before}
    model = served.model
    assert (model["server"], model["dtype"]) == ("vllm", "float32") and set(model["adapters"]) == set(HEADS)
    assert model["adapters"]["L0H1"] == json.loads((adapters / "L0H1" / MANIFEST).read_text())["hash"]
    for name in ("here", "there"):  # neither goes on in the other's folder
        with pytest.raises(InputError):
            if name == "here":
                with Stub(tiny_folder, HEADS) as stub:
                    sweep(stub, tiny_folder, adapters, tmp_path / name)
            else:
                sweep_here(tiny_folder, tmp_path / name)


def test_another_server_type_or_adapter_is_refused(tiny_folder: Path, adapters: Path, tmp_path: Path) -> None:
    with Stub(tiny_folder, HEADS) as stub:
        options: dict[str, Any] = {"heads": "L0H0+L0H1", "limit": 1}
        sweep(stub, tiny_folder, adapters, tmp_path / "s", **options)
        with pytest.raises(InputError):
            sweep(stub, tiny_folder, adapters, tmp_path / "s", model_args={"dtype": "bfloat16"}, **options)
        changed = tmp_path / "changed"
        for name in HEADS:
            about = json.loads((adapters / name / MANIFEST).read_text())
            (changed / name).mkdir(parents=True)
            about["hash"] = "0" * 16 if name == "L0H1" else about["hash"]
            (changed / name / MANIFEST).write_text(json.dumps({**about, "schema": SCHEMA, "schema_version": VERSION}))
        with pytest.raises(InputError):
            sweep(stub, tiny_folder, changed, tmp_path / "s", **options)
        unaffected = {**options, "heads": "L0H0+L0H2"}  # does not use the changed adapter
        sweep(stub, tiny_folder, changed, tmp_path / "s", **unaffected)
        other = tmp_path / "other" / tiny_folder.name
        shutil.copytree(tiny_folder, other)
        model = AutoModelForCausalLM.from_pretrained(other)
        torch.nn.init.normal_(model.lm_head.weight)
        model.save_pretrained(other)
        with pytest.raises(InputError):
            sweep(stub, other, adapters, tmp_path / "o", **options)
        stub.length = 400  # a server that takes less leaves what was not cut as it is
        sweep(stub, tiny_folder, adapters, tmp_path / "s", **options)
        with pytest.raises(InputError):
            sweep(stub, tiny_folder, adapters, tmp_path / "s", heads="L1H0", limit=1)


def test_a_router_of_a_served_sweep_routes_both(tiny_folder: Path, adapters: Path, tmp_path: Path) -> None:
    with Stub(tiny_folder, HEADS) as stub:
        outcomes = sweep(
            stub, tiny_folder, adapters, tmp_path / "s", tasks=(few_shot(tmp_path),), limit=4, gen_kwargs={}
        )
        outcomes.z[:] = np.eye(*outcomes.z.shape)
        router = fit(outcomes, "all-minilm-l6-v2", FitOptions(epochs=1, validation=0.0, weights=(0.0,), sizes=(2,)))
        router.save(tmp_path / "r")
        PrunedServerLM(stub.url, pretrained=str(tiny_folder), router=str(tmp_path / "r")).close()
        PrunedHFLM(str(tiny_folder), device="cpu", router=str(tmp_path / "r")).close()
        other = tmp_path / "another-name"
        other.symlink_to(tiny_folder)
        with pytest.raises(InputError):
            PrunedServerLM(stub.url, pretrained=str(other), router=str(tmp_path / "r"))
