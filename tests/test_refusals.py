"""Mistakes of users: what was typed, and the option or file that the one line of the refusal names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lm_eval.models.huggingface import HFLM

from lmeval_prune import InputError
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.models.resumable import ResumableLM
from tests.athena_hosts import data_folder, encoder_folder
from tests.conftest import ROOT, run_command
from tests.stub_server import Stub

# In words, MODEL, RUN, … are the files of the fixture `files`; OUT is a path for what a command would write
COMMANDS = [
    ("compare", "runs"),
    ("compare RUN", "RUN"),
    ("compare RUN none", "none"),
    ("compare RUN EMPTY", "EMPTY"),
    ("compare RUN RUN", "RUN"),
    ("compare RUN NEWER --baseline d", "baseline"),
    ("compare RUN NEWER --metric xyz", "metric"),
    ("compare RUN NEWER --by levle", "by"),
    ("compare RUN NEWER --tasks old_wrods", "old_words"),
    ("compare RUN NEWER --allow-different all", "allow_different"),
    ("distance", "pretrained"),
    ("distance MODEL --heads L0H1", "--text"),
    ("distance MODEL --task prune_tiny", "--heads"),
    ("distance MODEL --heads L0H1 --heads L0H1 --task prune_tiny", "L0H1"),
    ("distance MODEL --heads L9H0 --task prune_tiny", "L9H0"),
    ("distance MODEL --heads L0H1 --text none.txt", "none.txt"),
    ("mask --pretrained MODEL --heads L9H0 --output OUT.json", "L9H0"),
    ("heads --pretrained nowhere/none", "nowhere/none"),
    ("cut --pretrained MODEL --plan none.json --output OUT", "none.json"),
    ("prune --pretrained MODEL --output OUT.json --ratio 1.5", "ratio"),
    ("prune --pretrained MODEL --output OUT.json --text BLANK", "--ratio"),
    ("prune --pretrained MODEL --output OUT.json --ratio 0.2 --steps 0", "steps"),
    ("prune --pretrained MODEL --output OUT.json --ratio 0.2 --unit layer", "unit"),
    ("prune --pretrained MODEL --output OUT.json --ratio 0.2", "--task"),
    ("prune --pretrained MODEL --output OUT.json --ratio 0.2 --method flop", "flop"),
    ("prune --pretrained MODEL --output OUT.json --ratio 0.2 --text BLANK --task prune_gsm8k", "not both"),
    ("prune --pretrained MODEL --output OUT.json --ratio 0.2 --method random --cut MINE", "MINE"),
    ("export adapter --pretrained MODEL --output OUT", "heads"),
    ("export adapter --pretrained MODEL --output OUT --heads L7H0", "layer 7"),
    ("export adapter --pretrained MODEL --output OUT --heads L0H*", "allow_empty_layer"),
    ("export adapter --pretrained MODEL --output OUT --heads L0H0 --dtype int8", "--dtype"),
    ("export adapter --pretrained MODEL --output OUT --heads L0H0 --format onnx", "--format"),
    ("export model --pretrained MODEL --output OUT --heads L0H1 --plan plan.json", "plan"),
    ("export model --pretrained MODEL --output OUT --heads L0H1 --dtype float32", "--format"),
    ("athena train --encoder ENCODER --data_dir DATA --output OUT --test fold9", "fold9"),
    ("athena train --encoder ENCODER --data_dir DATA --output OUT --train all", "fold0"),  # its test questions
    ("athena train --encoder ENCODER --data_dir DATA --output OUT --validation 1.5", "validation"),
    ("athena train --encoder MODEL --data_dir DATA --output OUT", "mask token"),
]


@pytest.fixture
def files(tiny_folder: Path, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "blank.txt").write_text(" \n\n ")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    paths = {"BLANK": "blank.txt", "MINE": "mine", "EMPTY": "empty", "OUT": "out", "ENCODER": "encoder", "DATA": "data"}
    runs = {"RUN": "0.4.7", "NEWER": "0.4.12"}
    return {
        "MODEL": str(tiny_folder),
        **{name: str(tmp_path / path) for name, path in paths.items()},
        **{name: str(ROOT / "tests" / "old_runs" / version) for name, version in runs.items()},
    }


def refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    assert run_command(*words) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("lmeval-prune: error: ")]
    assert len(lines) == 1 and lines[0] == error.strip().splitlines()[-1] and "Traceback" not in error, error
    return lines[0]


@pytest.mark.parametrize(("words", "name"), COMMANDS)
def test_a_command_names_what_is_wrong(
    words: str, name: str, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "DATA" in words:
        encoder_folder(tmp_path / "encoder")
        data_folder(tmp_path / "data")
    typed = [
        files[word.removesuffix(end)] + end if word.removesuffix(end := Path(word).suffix) in files else word
        for word in words.split()
    ]
    assert (files.get(name, name) if name in words else name) in refused(capsys, typed)
    assert not list(tmp_path.glob("out*"))


PRUNE = {"method": "flap", "ratio": 0.2}
GRIDS: list[tuple[dict[str, Any] | str, str]] = [
    ({"variants": {"v": {"head": "L0H1"}}}, "heads"),
    ({"variants": {"v": {"heads": {"each": []}}}}, "each"),
    ({"variants": {"v": {"heads": "L9H0"}}}, "'v'"),
    ({"variants": {"v": {}, "w": {"seed": 5}}}, "'w'"),
    ({"variants": {"v": {"prepare": "random_head"}}}, "random_heads"),
    ({"variants": {"v": {"prepare": {"random_heads": {"share": 2}}}}}, "share"),
    ({"variants": {"v": {"prepare": {"prune": {**PRUNE, "method": "flapp"}}}}}, "flap"),
    ({"variants": {"v": {"prepare": {"prune": {**PRUNE, "ratio": 1.2}}}}}, "ratio"),
    ({"variants": {"v": {"prepare": {"prune": {"method": "flap"}}}}}, "ratio"),
    ({"variants": {"v": {"prepare": {"prune": {**PRUNE, "options": {"metrc": "ifv"}}}}}}, "metrc"),
    ({"variants": {"v": {"prepare": {"prune": {**PRUNE, "units": "head"}}}}}, "units"),
    ({"variants": {"v": {"prepare": {"prune": {**PRUNE, "text": "none.txt"}}}}}, "none.txt"),
    ({"variants": {"v": {"prepare": {"prune": PRUNE}}}}, "text"),
    ({"variants": {"v": {"batch_size": 3}}}, "batch_size"),
    ({"variants": {"v": {"pretrained": "./nothing"}}}, "nothing"),
    ({"variants": {"v": {"seed": 1.5}}}, "seed"),
    ({"variants": {}}, "variants"),
    ({"tasks": [{"task": "prune_tiny", "limits": 3}]}, "limits"),
    ({"tasks": [{"task": "prune_tiny", "num_fewshot": -1}]}, "num_fewshot"),
    ({"tasks": ["prune_tiny", "prune_tiny"]}, "prune_tiny"),
    ({"baseline": "dens"}, "dens"),
    ({"batch": 3}, "batch_size"),
    ({"limit": 0}, "limit"),
    ("model: {pretrained: m}\nvariants:\n  a: {heads: L0H0}\n  a: {heads: L0H1}\ntasks: [t]\n", "'a'"),
    ("model: {pretrained: m\nvariants:\n  dense: {}\n", "grid.yaml"),
]


@pytest.mark.parametrize(("changes", "name"), GRIDS, ids=str)
def test_a_grid_names_what_is_wrong(
    changes: dict[str, Any] | str, name: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"model": {"pretrained": str(tiny_folder)}, "variants": {"dense": {}}, "tasks": ["prune_tiny_words"]}
    path = tmp_path / "grid.yaml"
    path.write_text(changes if isinstance(changes, str) else json.dumps({**content, **changes}))
    assert name in refused(capsys, ["grid", "run", str(path), "--output", str(tmp_path / "out")])


MODEL_ARGS: list[tuple[dict[str, Any], str]] = [
    ({"heads": "L0H9"}, "L0H9"),
    ({"heads": "L0H*"}, "allow_empty_layer"),
    ({"heads": "L0H*", "allow_empty_layer": "perhaps"}, "allow_empty_layer"),
    ({"heads": "encoder.L0H1"}, "encoder.L0H1"),
    ({"heads": ""}, "heads"),
    ({"heads": "./smallr"}, "smallr"),
    ({"head": "L0H1"}, "heads"),
    ({"token_filtre": 0.2}, "token_filtre"),
    ({"mask": "nowhere.json"}, "nowhere.json"),
    ({"heads": "L0H1", "tp_plan": "auto"}, "tp_plan"),
    ({"responses": "/dev/null/x"}, "responses"),
    ({"router_seed": 4}, "router_seed"),
    ({"engine": "fast"}, "engine"),
    ({"deterministic": True}, "deterministic"),
    ({"engine": "batched", "engine_rows": 0}, "engine_rows"),
    ({"token_filter": {"ratio": 0.2, "warmup": 0}}, "warmup"),
    ({"pretrained": "smollm2-135n"}, "smollm2-135m"),
    ({"pretrained": "/no/such/one"}, "/no/such/one"),
]


@pytest.mark.parametrize(("arguments", "name"), MODEL_ARGS, ids=str)
def test_pruned_hf_names_what_is_wrong_before_it_loads_weights(
    arguments: dict[str, Any], name: str, tiny_folder: Path, no_weights: None
) -> None:
    with pytest.raises(InputError) as error:
        PrunedHFLM(**{"pretrained": str(tiny_folder), "device": "cpu", **arguments})
    assert name in str(error.value) and "\n" not in str(error.value)


SERVED: list[tuple[dict[str, Any], str]] = [
    ({"base_url": "http://127.0.0.1:9"}, "http://127.0.0.1:9"),
    ({"base_url": None}, "base_url"),
    ({"heads": "L1H1"}, "L1H1"),  # no adapter of the server
    ({"model": "llama"}, "model"),
    ({"server": "vlm"}, "server"),
    ({"server": "llamacpp"}, "server"),
    ({"token_filter": 0.2}, "TokenFilter"),
    ({"responses": "s", "dtype": None}, "dtype"),
    ({"lora": "missing"}, "missing"),
    ({"lora": "missing", "heads": "L0H1"}, "lora"),
]


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Stub]:
    with Stub(tiny_folder, ("L0H0", "L0H1")) as stub:
        yield stub


@pytest.mark.parametrize(("arguments", "name"), SERVED, ids=str)
def test_pruned_server_names_what_is_wrong(
    arguments: dict[str, Any], name: str, tiny_folder: Path, server: Stub, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        PrunedServerLM(**{"base_url": server.url, "pretrained": str(tiny_folder), "dtype": "float64", **arguments})
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"lm": "hf"}, "responses"),
        ({"lm": "hf", "responses": "s", "store_every": 0}, "store_every"),
        ({"lm": "pruned-hf", "responses": "s"}, "pruned-hf"),
    ],
    ids=str,
)
def test_resumable_names_what_is_wrong_before_it_loads_a_model(
    arguments: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HFLM, "__init__", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(InputError) as error:
        ResumableLM.create_from_arg_obj(arguments, {"batch_size": 1, "device": "cpu"})
    assert name in str(error.value) and "\n" not in str(error.value)
