"""configs/sprint/race.py: the race on a model of one's own."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmeval_prune.cli import main as command
from lmeval_prune.sprint.outcomes import OutcomeStore
from tests.conftest import ROOT
from tests.stub_server import Stub

SCRIPT = ROOT / "configs" / "sprint" / "race.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("model_race", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # dataclasses look for their module there
        patch.setitem(sys.modules, "model_race", module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --model NAME"),
        (["--model", "m", "--server", "http://localhost:1"], "belong together"),
        (["--model", "m", "--questions", "500"], "must be two numbers"),
        (["--model", "m", "--questions", "2,2"], "each at least 5"),
        (["--model", "m", "--layers", "five"], "whole numbers"),
        (["--quick", "--task", "prune_gsm8k"], "--quick has its own task; leave out --task"),
        (["--quick", "--questions", "20,20"], "--quick has its own questions"),
        (["--quick", "--layers", "3"], "--quick has its own layers"),
        (["--colour"], "unrecognized arguments: --colour (--help"),
        (["--model", "m", "--max_gen_toks", "many"], "--max_gen_toks: invalid int value: 'many' (--help"),
        (["--model", "out/nowhere/model"], "--model=out/nowhere/model: there is no such folder"),
        (["--model", "smollm2-135"], "--model=smollm2-135 is not known; did you mean smollm2-135m?"),
        (["--model", "smollm2-135m", "--task", "prune_gsm"], "there is no task prune_gsm"),
        (["--model", "smollm2-135m", "--device", "cuda"], "--device=cuda does not exist"),
        (["--quick", "--device", "gpu"], "--device=gpu cannot be used here; use cpu or cuda"),
        (["--model", "smollm2-135m", "--server", "http://x", "--adapters", "no/where"], "no such file: no/where"),
    ],
)
def test_wrong_words_are_refused(
    script: Any, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """In one line, before a race is made: nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (tmp_path / "m").mkdir()  # a model
    with pytest.raises(SystemExit, match=r"^race: [^\n]*$") as error:
        script.main(words)
    assert message in str(error.value) and not capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_race_has_the_settings_of_its_command_line(script: Any, tmp_path: Path) -> None:
    words = ["--model", "m", "--task", "prune_gsm8k", "--questions", "20,30", "--layers", "1", "--work", str(tmp_path)]
    race = script.make_race(script.parse([*words, "--server", "http://localhost:1", "--adapters", "a"]))
    options = race.options(0, "train", {"q": []})
    assert (options.split, options.layers, options.server) == ("train", (1,), "http://localhost:1")
    assert options.model_args == {"pretrained": "m", "adapters": "a"} and not options.random_sets
    assert race.numbers == (20, 30) and options.attempts == {"q": []}
    test = script.make_race(script.parse(words)).options(0, "test", {"q": ["dense"]})
    assert (test.split, test.likelihood, test.model_args["dtype"]) == ("test", True, "bfloat16") and test.random_sets


@pytest.fixture
def tiny_splits(script: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    splits = {
        "train": [f"A farmer has {i} cows and {'red ' * i} hens. How many animals are there?" for i in range(6)],
        "test": [f"{name} ran {i} miles past {name}'s {name} house." for i, name in enumerate("abcde")],
    }
    splits["test"].append(splits["train"][2].replace("2", "seventy-four"))
    splits["all"] = [*splits["train"], *splits["test"]]
    task = type("Task", (), {"get_config": lambda *_: {"prune_data": "tiny"}})
    monkeypatch.setattr(script, "load_task", lambda *_: task())
    monkeypatch.setattr(script, "task_manager", lambda: None)
    monkeypatch.setattr(script.data, "load", lambda _, split: {"question": splits[split]})
    return splits


def test_twins_of_training_questions_are_not_tested(
    script: Any, tiny_splits: dict[str, list[str]], tmp_path: Path, capsys: Any
) -> None:
    race = script.make_race(script.parse(["--model", "smollm2-135m", "--work", str(tmp_path)]))
    assert sorted(race.texts(0, "train")) == sorted(tiny_splits["train"])
    assert sorted(race.texts(0, "test")) == sorted(tiny_splits["test"][:5])
    race.run([])
    assert "1 test questions are left out" in capsys.readouterr().out


def test_overlapping_splits_are_refused(script: Any, tiny_splits: dict[str, list[str]], tmp_path: Path) -> None:
    for i, words in enumerate((["--train", "all", "--test", "all"], ["--test", "all"])):
        with pytest.raises(SystemExit, match=r"^race: \d+ of the test questions are also training questions[^\n]*$"):
            script.main(["--model", "smollm2-135m", "--work", str(tmp_path / str(i)), *words])


def test_a_work_folder_has_one_race(script: Any, tiny_splits: dict[str, list[str]], tmp_path: Path) -> None:
    words = ["--model", "smollm2-135m", "--work", str(tmp_path)]
    script.make_race(script.parse(words)).run([])
    script.make_race(script.parse([*words, "--device", "cpu"])).run([])  # another device is no other race
    script.make_race(script.parse([*words, "--questions", "8,8"])).run([])  # nothing is answered yet
    script.make_race(script.parse(words)).run([])
    (tmp_path / "fold0" / "train").mkdir(parents=True)
    for changed, name in ((["--task", "prune_gsm8k"], "task"), (["--questions", "9,9"], "numbers")):
        with pytest.raises(SystemExit, match=rf"^race: [^\n]*another {name}; give --work another folder$"):
            script.main([*words, *changed])


def test_an_estimate_says_first_how_much_it_answers(
    script: Any, tiny_splits: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One question under the whole pool: the unpruned model, 9 heads, 8 sets, 16 samples; then the cost at its rate."""
    said: list[str] = []

    def sweep(race: Any, number: int, part: str, attempts: dict[str, list[str]]) -> None:
        said.append(capsys.readouterr().out)
        assert (part, list(attempts.values())) == ("train", [[]])
        race.rates["train"] = {"0": {"start": 0, "questions": 1, "made": 34, "answers": 34, "seconds": 68.0}}

    layers = SimpleNamespace(attention=[SimpleNamespace(heads=9)])
    monkeypatch.setattr("sprint_race_stages.outline", lambda _: layers)
    monkeypatch.setattr(script.ModelRace, "sweep", sweep)
    script.main(["--quick", "--device", "cpu", "--estimate", "--work", str(tmp_path / "work")])
    line = (
        "the first question is answered by the whole pool and all samples, 34 answers, up to 4 tokens each, and timed"
    )
    assert said == [f"{line}\n"]
    assert "6 questions, about 7 min at the first ones' rate (34 answers took 68 s)" in capsys.readouterr().out


def test_a_file_is_no_work_folder(script: Any, tmp_path: Path) -> None:
    (tmp_path / "work").write_text("mine")
    with pytest.raises(SystemExit, match=r"^race: --work [^\n]*work is a file; name a folder$"):
        script.main(["--model", "smollm2-135m", "--work", str(tmp_path / "work")])


def test_servers_answer_a_race(script: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"draws": 4, "test_samples": 4, "ceiling_samples": 6, "ceiling_questions": 3, "n": 4, "most": 4, "parts": 2}
    few |= {"orders": ("best", "cover"), "temperatures": (0.8,)}
    monkeypatch.setattr(script, "PLAN", replace(script.PLAN, **few))
    monkeypatch.setattr(script.ModelRace, "texts", lambda self, number, part: self.drawn(part))
    monkeypatch.setattr(script.ModelRace, "twins", {})
    heads = tuple(f"L0H{head}" for head in range(4))
    adapters = tmp_path / "adapters"
    words = ["--pretrained", str(tiny_folder), "--each", "+".join(heads), "--dtype", "float32"]
    assert command(["export", "adapter", *words, "--output", str(adapters)]) == 0
    words = ["--model", str(tiny_folder), "--task", "prune_tiny_words", "--questions", "5,5", "--layers", "0"]
    words += ["--max_gen_toks", "4", "--adapters", str(adapters), "--device", "cpu", "--work", str(tmp_path / "race")]
    with Stub(tiny_folder, heads) as stub:
        script.main([*words, "--server", stub.url])
        answered = len(stub.payloads)
        script.main([*words, "--server", stub.url])  # all is done before
        assert len(stub.payloads) == answered
    store = OutcomeStore(tmp_path / "race" / "fold0" / "train").read()
    assert store.pool[:5] == ["dense", *heads] and np.isfinite(store.z[:, :5]).all() and len(store.texts) == 3
    assert {payload["model"] for payload in stub.payloads} == {"tiny", *heads}
    assert "No claim" in (tmp_path / "race" / "report" / "report.md").read_text()


@pytest.mark.real
@pytest.mark.long
def test_the_quick_race_runs_to_its_report(script: Any, tmp_path: Path) -> None:
    words = ["--quick", "--device", "cpu", "--work", str(tmp_path)]
    script.main(words)
    report = (tmp_path / "report" / "report.md").read_text()
    assert "Not pre-registered" in report and "No claim" in report and (tmp_path / "report" / "plan.md").is_file()
    assert "SPRINT as published" in report  # enough questions distinguish variants, so routers are fitted
    stores = [OutcomeStore(tmp_path / "fold0" / part).read() for part in ("train", "test")]
    assert not set(stores[0].texts) & set(stores[1].texts)
    assert np.isfinite(stores[0].greedy().z).all() and not np.isfinite(stores[1].z).all()  # only what is tried
    script.main(words)  # all is done before
    assert (tmp_path / "report" / "report.md").read_text() == report
