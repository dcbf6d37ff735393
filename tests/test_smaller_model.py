"""The experiment of a smaller model: rows that are made, resumed, estimated, timed and exchanged between machines."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import _smaller_estimate
import _smaller_rows
import pytest
import smaller_model
import torch
import yaml
from _smaller import DENSE, PROMPTS, Experiment, Row
from _smaller_choice import choice
from _smaller_estimate import removed_share
from _smaller_plan import chosen_recipes
from _smaller_rows import PROBLEMS, PackedHost, decoded, generated
from _smaller_run import RowMaker
from _smaller_scores import Scored
from _smaller_speed import measured_gains, read_speeds
from transformers import GenerationConfig, LlamaConfig

from lmeval_prune import InputError, load_pretrained
from lmeval_prune.artefacts import output_lock
from lmeval_prune.decoding import SamplingParams
from lmeval_prune.distillation.recursion import distill
from lmeval_prune.distillation.trainer import DistillTrainer
from lmeval_prune.profiling import costs
from tests.forks import Fork
from tests.smaller_experiments import command, problems, record, row_maker, tiny_experiment
from tests.test_distillation import Killed, killed_at

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_a_row_of_a_recipe_that_is_gone_is_one_line(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    record(experiment, Row("other", 0, 0), {"validation": "1000", "test": "1000"})
    content = yaml.safe_load(experiment.file.read_text())
    del content["recipes"]["other"]
    experiment.file.write_text(yaml.safe_dump({**content, "comparisons": []}))
    assert command(experiment, "choose") == 2
    assert "is a row of the recipe other, which experiment.yaml has no more" in capsys.readouterr().err


def test_rows_of_a_machine_without_the_dense_model_have_its_answers(experiment: Experiment, tmp_path: Path) -> None:
    """The dense row comes from elsewhere, by other weights; each row here is paired with the model that it was cut from."""
    assert command(experiment, "train", "--recipes", DENSE, "--rows", "1") == 0
    there = json.loads(experiment.path(Row(DENSE, 0, 0)).read_text())
    here = Experiment(experiment.file, tmp_path / "here", experiment.pretrained)
    copies = tmp_path / "copies"
    copies.mkdir()
    (copies / "dense_fold0_seed0.json").write_text(json.dumps({**there, "weights": "those of another machine"}))
    assert command(here, "collect", "--copy", str(copies)) == 0
    arguments = ["--folds", "0", "--copy", str(tmp_path / "given")]
    assert command(here, "train", "--recipes", "ours", *arguments) == 0
    assert command(here, "train", "--recipes", "other", *arguments) == 0  # the dense model is there by now
    rows = [Row(name, 0, 0) for name in ("ours", "other")]
    for row in rows:
        result = here.record(row)
        assert result["parent"] == result["dense"]["weights"] == there["weights"]  # trained anew, alike
        assert result["made"][0]["versions"] and result["made"][0]["commit"] and result["made"][0]["device"]
    assert Scored(here).difference(rows[1:], "validation").by_row.keys() == {rows[1]}
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    without = {name: value for name, value in here.record(rows[0]).items() if name != "dense"}
    (lonely / "ours_fold0_seed0.json").write_text(json.dumps(without))
    third = Experiment(experiment.file, tmp_path / "third", experiment.pretrained)
    assert command(third, "collect", "--copy", str(lonely)) == 2
    assert command(third, "collect", "--copy", str(tmp_path / "copies")) == 0
    assert command(third, "collect", "--copy", str(lonely)) == 2 and len(third.records()) == 1
    (lonely / "dense_fold0_seed0.json").write_text(json.dumps(there))
    assert command(third, "collect", "--copy", str(lonely)) == 0
    assert third.record(rows[0])["dense"]["weights"] == there["weights"]
    (third.work / PROBLEMS).write_text((here.work / PROBLEMS).read_text())
    assert Scored(third).difference(rows[:1], "validation").by_row.keys() == {rows[0]}


def test_rows_in_bfloat16_are_of_the_same_settings(
    experiment: Experiment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number type is noted like the device; a model is pruned from a dense one that was trained in the same."""
    trainings = list[bool]()
    distill = _smaller_rows.distill
    monkeypatch.setattr(
        _smaller_rows,
        "distill",
        lambda options, host: trainings.append(options.trainer.get("bf16", False)) or distill(options, host),
    )
    assert command(experiment, "train", "--recipes", DENSE, "--folds", "0", "--bf16") == 0
    assert command(experiment, "train", "--recipes", "ours", "--folds", "0") == 2
    assert "was trained in bfloat16, and this row would be in float32" in capsys.readouterr().err
    assert command(experiment, "train", "--recipes", "ours", "--folds", "0", "--bf16") == 0
    assert trainings == [True, True]
    for row in (Row(DENSE, 0, 0), Row("ours", 0, 0)):
        assert experiment.record(row)["products"] == "bfloat16"
        assert experiment.digest(row) == replace(experiment, bf16=True).digest(row)


def test_rows_of_other_settings_are_refused(
    experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rehearsal = Experiment(experiment.file, tmp_path / "rehearsal", experiment.pretrained, {"limit": 8})
    record(rehearsal, Row(DENSE, 0, 0), {"validation": "1000", "test": "1000"})
    assert command(experiment, "collect", "--copy", str(rehearsal.work / "rows")) == 2
    assert "is a row of other settings or of another model" in capsys.readouterr().err
    assert not experiment.path(Row(DENSE, 0, 0)).exists()


@pytest.fixture
def shape_of_smollm2(tmp_path: Path) -> str:
    """The configuration of SmolLM2-135M, without weights."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    config = LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "shape")
    return str(tmp_path / "shape")


def test_every_recipe_removes_what_the_goal_asks_for(shape_of_smollm2: str, tmp_path: Path) -> None:
    """`choose` would leave out others after hours of training; its options can be read, too."""
    own = Experiment(Path(smaller_model.HERE / "smaller_model.yaml"), tmp_path, shape_of_smollm2)
    shares = {name: removed_share(own, name) for name in own.settings["recipes"]}
    for name in ("continued", "continued_prompts"):  # trained as long, with nothing removed: for comparison
        assert shares.pop(name) == 0
    assert shares["depth"] == pytest.approx(own.settings["recipes"]["depth"]["ratio"], abs=1 / 60)
    for name, share in shares.items():
        assert share is not None
        assert own.goal["parameters"] <= share < 0.4, name


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio": 0.5, "unit": "balanced", "method": "magnitude"},
        {"ratio": 0.5, "unit": "group", "ffn_ratio": 0.25, "method": "magnitude"},
        {"ratio": 0.4, "budget": "parameters", "method": "slimgpt"},
        {"ratio": 0.5, "budget": "parameters", "method": "block_influence", "parts": "layers"},
        {"ratio": 0.4, "budget": "parameters", "method": "magnitude", "allocation": "composition"},
    ],
)
def test_the_share_that_is_removed_is_known_before(experiment: Experiment, changes: dict[str, Any]) -> None:
    """It is that of the cut model but for norms; a composition may remove more than its budget."""
    content = yaml.safe_load(experiment.file.read_text())
    content["recipes"]["ours"] |= {"unit": None, "epochs": 0, **changes}
    experiment.file.write_text(yaml.safe_dump(content))
    row = Row("ours", 0, 0)
    whole = replace(experiment.options(row), pretrained=experiment.pretrained, limit=8)
    distill(whole)
    before, after = (costs.parameters(load_pretrained(path))[1] for path in (experiment.pretrained, whole.output))
    known, removed = removed_share(experiment, "ours"), 1 - after / before
    assert known is not None
    assert removed >= known - 0.01
    assert removed <= known + (0.15 if "allocation" in changes else 0.02)


def test_options_can_be_changed_for_recipes_alone(experiment: Experiment) -> None:
    changed = replace(experiment, recipe_changes={"epochs": 0})
    dense, row = Row(DENSE, 0, 0), Row("ours", 0, 0)
    assert changed.options(dense) == experiment.options(dense) and changed.digest(dense) == experiment.digest(dense)
    assert changed.options(row) == replace(experiment.options(row), epochs=0)
    assert changed.digest(row) != experiment.digest(row)


def test_a_row_is_made_once_and_goes_on_after_a_kill(
    experiment: Experiment, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, DistillTrainer, "training_step", 2)
        with pytest.raises(Killed):
            command(experiment, "train", "--recipes", "ours", "--rows", "2")
    assert not list((experiment.work).glob("rows/*.json"))
    copies = tmp_path / "copies"
    assert command(experiment, "train", "--recipes", "ours", "--rows", "2", "--copy", str(copies)) == 0
    assert {path.stem for path in copies.iterdir()} == {"dense_fold0_seed0", "ours_fold0_seed0"}
    dense, pruned = (experiment.record(Row(name, 0, 0)) for name in (DENSE, "ours"))
    assert len(dense["test"]) == 6 and len(dense["validation"]) == 6
    assert [answer["id"] for answer in dense["validation"]] == [answer["id"] for answer in pruned["validation"]]
    assert [(entry["id"], len(entry["answers"])) for entry in pruned["sampled"]] == [
        (answer["id"], 2) for answer in pruned["validation"]
    ]
    assert pruned["parameters"][1] < dense["parameters"][1] and pruned["plans"][-1]["heads"]
    capsys.readouterr()
    assert command(experiment, "train", "--recipes", "ours", "--folds", "0", "--seeds", "0") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all rows are made"
    other = Experiment(experiment.file, tmp_path / "elsewhere", experiment.pretrained)
    assert command(other, "collect", "--copy", str(experiment.work)) == 0 and len(other.records()) == 2
    assert command(other, "collect", "--copy", str(copies)) == 0 and len(other.records()) == 2
    assert command(experiment, "choose", "--recipes", "ours", "--folds", "0") == 0
    assert command(experiment, "speed", "--copy", str(copies)) == 0
    speeds = json.loads((experiment.work / "speed.json").read_text())
    capsys.readouterr()
    assert command(other, "collect", "--copy", str(copies)) == 0
    assert capsys.readouterr().out == f"0 new rows in {other.work}, and 1 speeds\n"
    assert read_speeds(other.work) == speeds
    assert command(other, "collect", "--copy", str(copies)) == 0  # again: nothing is new
    assert capsys.readouterr().out == f"0 new rows in {other.work}\n"
    ((key, speed),) = speeds.items()
    stale = {key: {**speed, "settings": "of a recipe that was changed"}}
    (other.work / "speed.json").write_text(json.dumps(stale))
    assert measured_gains(other, "ours") == {} != measured_gains(experiment, "ours")
    assert command(other, "collect", "--copy", str(copies)) == 0  # the valid speed replaces it
    assert read_speeds(other.work) == speeds
    (copies / "speed.json").write_text(json.dumps(stale))
    (other.work / "speed.json").unlink()
    assert command(other, "collect", "--copy", str(copies)) == 0 and not read_speeds(other.work)
    assert speed["row"] == "ours_fold0_seed0" and len(speed["tokens_per_second"]["ours"]["generate_1"]) == 2
    assert speed["gains"].keys() == {"1"} and {"generate_1", "engine_1"} <= speed["tokens_per_second"]["ours"].keys()
    changed = yaml.safe_load(experiment.file.read_text())
    changed["recipes"]["ours"]["epochs"] = 2
    experiment.file.write_text(yaml.safe_dump(changed))
    assert command(experiment, "train") == 2
    assert "ours_fold0_seed0.json is a row of other settings" in capsys.readouterr().err


def test_an_estimate_is_enough_to_measure_the_speed(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    """The shape that the estimate left is timed, unless the recipe was changed since."""
    assert command(experiment, "estimate", "--recipes", "ours") == 0
    assert ", scoring " in capsys.readouterr().out
    (path,) = (path for path in (experiment.work / "estimate").glob("*.json") if "ours" in path.name)
    estimate = json.loads(path.read_text())
    path.write_text(json.dumps({**estimate, "settings": "another"}))
    assert command(experiment, "speed") == 2
    path.write_text(json.dumps(estimate))
    assert command(experiment, "speed") == 0
    (speed,) = json.loads((experiment.work / "speed.json").read_text()).values()
    assert speed["row"] == "estimate" and speed["parameters"] == estimate["parameters"]
    capsys.readouterr()
    assert command(experiment, "train", "--recipes", "ours", "--budget", str(estimate["seconds"] / 1e6)) == 0
    assert "0 rows made in 0 s; the next is dense_fold0_seed0" in capsys.readouterr().out


def test_training_goes_on_if_another_process_makes_a_row(
    experiment: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    for fold in (0, 1):
        record(experiment, Row(DENSE, fold, 0), {"validation": "1111", "test": "1111"}, 100)
    trained: list[Row] = []

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as elsewhere:
        patch.setattr("_smaller_run.make_row", row_maker(trained))
        lock = output_lock(experiment.path(Row("ours", 0, 0)))
        elsewhere.submit(lock.__enter__).result()
        assert command(experiment, "train") == 0
        elsewhere.submit(lock.__exit__, None, None, None).result()
    assert set(trained) == {Row("other", 0, 0), Row("ours", 1, 0), Row("other", 1, 0)}
    output = capsys.readouterr().out
    assert "ours_fold0_seed0 is left: another run is writing" in output and "1 rows wait for other processes" in output


def test_a_row_without_enough_memory_is_tried_again_after_longer_and_longer(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes, which share the GPU, end meanwhile; the memory of the row that failed is free by then."""
    pauses, tensors, row = list[float](), list[Any](), Row(DENSE, 0, 0)

    class Tensor:
        """A tensor of a row, in a circle."""

        def __init__(self) -> None:
            self.itself = self
            tensors.append(weakref.ref(self))

    def make(*_: Any) -> Any:
        tensor = Tensor()
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 24.00 MiB {type(tensor)}")

    def sleep(seconds: float) -> None:
        assert not any(tensor() for tensor in tensors)
        pauses.append(seconds)

    monkeypatch.setattr("_smaller_run.make_row", make)
    monkeypatch.setattr(
        "_smaller_run.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    )  # not other threads'
    maker = RowMaker(experiment, smaller_model.parsed(["train"]))
    for count in (1, 2, 3, 4):
        assert maker.make(row) and len(tensors) == count
    assert pauses == [15, 30, 60, 120]
    with pytest.raises(torch.OutOfMemoryError):
        maker.make(row)


def forked_script(command: list[str], stdout: IO[str], stderr: int) -> Fork:
    """Start the script in a fork."""
    assert command[:2] == [sys.executable, smaller_model.__file__] and stderr == subprocess.STDOUT
    return Fork(lambda: smaller_model.main(command[2:]), stdout)


def test_processes_run_the_whole_experiment(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of the choice, the choice, and rows of the verdict; what is there is not made again."""
    words = ("run", "--recipes", "ours", "other", "--no-resume", "--discard")
    monkeypatch.setattr("_smaller_run.subprocess", SimpleNamespace(Popen=forked_script, STDOUT=subprocess.STDOUT))
    settings = yaml.safe_load(experiment.file.read_text())
    goal = {**settings["goal"], "parameters": 0.05}
    experiment.file.write_text(yaml.safe_dump({**settings, "goal": goal, "folds": [0], "seeds": [1]}))
    experiment = replace(experiment)
    assert command(experiment, *words, "--processes", "2") == 0
    (chosen,) = chosen_recipes(experiment)
    rows = [*experiment.rows([], [0]), *experiment.rows([chosen], [1])]
    assert set(experiment.records()) == set(rows)
    assert {path.name for path in (experiment.work / "models").iterdir() if path.is_dir()} == {
        row.key for row in rows if row.recipe == DENSE
    }
    written = {row: experiment.path(row).stat().st_mtime_ns for row in rows}
    assert command(experiment, *words) == 0
    assert "all rows are made" in capsys.readouterr().out
    assert written == {row: experiment.path(row).stat().st_mtime_ns for row in rows}


def test_the_choice_does_not_wait_for_rows_of_the_verdict(experiment: Experiment) -> None:
    """A budget that ends after the rows of the choice leaves a choice; a row of another process ends nothing."""
    settings = yaml.safe_load(experiment.file.read_text())
    experiment.file.write_text(yaml.safe_dump({**settings, "goal": {**settings["goal"], "parameters": 0.05}}))
    problems(experiment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("_smaller_run.make_row", row_maker([]))
        assert command(experiment, "run", "--recipes", "ours", "--rows", "4") == 0
    assert chosen_recipes(experiment) == ["ours"] and len(experiment.records()) == 4


def test_seeds_are_run_recipe_after_recipe_without_a_choice(experiment: Experiment) -> None:
    """Dense rows first, then a recipe on all folds and seeds, then those that follow, by the first seed alone."""
    problems(experiment)
    rows = list[Row]()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("_smaller_run.make_row", row_maker(rows))
        assert command(experiment, "run", "--recipes", "other", "--seeds", "2", "1", "--then", "ours") == 0
    order = ((DENSE, (2, 1)), ("other", (2, 1)), ("ours", (2,)))
    assert rows == [Row(name, fold, seed) for name, seeds in order for seed in seeds for fold in (0, 1)]
    assert not chosen_recipes(experiment)


def test_a_process_that_fails_is_named(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the end of its log; that of a process that does not fail is not shown."""
    (experiment.work / PROBLEMS).parent.mkdir(parents=True)
    (experiment.work / PROBLEMS).write_text("{}")
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nmkdir {tmp_path}/first 2>/dev/null && echo no rows && exit 3\necho all rows are made\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr("_smaller_run.sys.executable", str(python))
    assert command(experiment, "run", "--recipes", "ours", "--processes", "2") == 1
    errors = capsys.readouterr().err
    assert errors.count("failed, ") == 1 and "no rows" in errors and "all rows are made" not in errors


def test_generate_answers_as_the_engine_does(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several lengths in several batches; sampled answers are as many, and differ."""
    problems(experiment)
    monkeypatch.setattr("_smaller_rows.ROWS", 3)
    host = PackedHost(experiment.options(Row(DENSE, 0, 0)), experiment.work / PROBLEMS)
    model: Any = load_pretrained(experiment.pretrained).eval()
    prompts = [tuple(host.tokenizer(text)["input_ids"]) for text in ("1 and 2?", "a longer one", "so", "what is it")]
    params = SamplingParams(max_new_tokens=6)
    assert generated(host, model, prompts, params, 1) == decoded(host, model, prompts, params, 1)
    padding, host.tokenizer.pad_token = host.tokenizer.pad_token, None  # as some versions of transformers read it
    assert generated(host, model, prompts, params, 1) == decoded(host, model, prompts, params, 1)
    host.tokenizer.pad_token = padding
    params = SamplingParams(max_new_tokens=6, do_sample=True, temperature=2.0)
    sampled = generated(host, model, prompts, params, 4)
    assert [len(set(texts)) for texts in sampled] == [4] * 4


def test_prompts_are_of_problems_outside_the_folds(
    tiny_folder: Path, tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are rendered as the problems are; the first are ASDiv's."""
    monkeypatch.setenv("LMEVAL_PRUNE_DATA", str(shared_data))
    experiment = with_prompts(tiny_experiment(tiny_folder, tmp_path), 1100)
    experiment = replace_options(experiment, data_dir=None)
    assert command(experiment, "problems") == 0
    prompts = [json.loads(line)["prompt"] for line in (experiment.work / PROMPTS).read_text().splitlines()]
    documents = [
        document for fold in json.loads((experiment.work / PROBLEMS).read_text()).values() for document in fold
    ]
    rows = [json.loads(line) for line in (shared_data / "asdiv.jsonl").read_text().splitlines()]
    outside = [f"{row['body']} {row['question']}".strip() for row in rows if row["asdiv_a_fold"] is None]
    task_words = documents[0]["rendered"]["prompt"].split(documents[0]["question"])[1].split("\na:")[0]
    assert prompts[: len(outside)] == [f"{question}{task_words}" for question in outside]
    assert len(prompts) == 1100 and all(len(prompt) < 150 + len(task_words) for prompt in prompts[len(outside) :])
    host = PackedHost(experiment.options(Row(DENSE, 0, 0)), experiment.work / PROBLEMS)
    assert host._in_chat(f"{documents[0]['question']}{task_words}") == documents[0]["rendered"]["prompt"]


def test_a_recipe_that_reads_prompts(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of other prompts is refused, and so is a folder without them; the dense model reads none."""
    experiment = with_prompts(experiment, 5)
    experiment.work.mkdir()
    (experiment.work / PROMPTS).write_text("".join(json.dumps({"prompt": f"{n} and {n}?"}) + "\n" for n in range(5)))
    assert command(experiment, "train", "--recipes", "ours", "--folds", "0") == 0
    row = Row("ours", 0, 0)
    record = experiment.record(row)
    assert record["stages"] and experiment.options(Row(DENSE, 0, 0)).corpus is None
    capsys.readouterr()
    (experiment.work / PROMPTS).write_text(json.dumps({"prompt": "6 and 6?"}) + "\n")
    assert command(experiment, "choose") == 2
    assert "is a row of other settings" in capsys.readouterr().err
    (experiment.work / PROMPTS).unlink()
    with pytest.raises(InputError, match=r"has no prompts\.jsonl; write it by the command problems"):
        Experiment(experiment.file, experiment.work, experiment.pretrained).record(row)


def test_another_corpus_of_a_recipe_counts_by_its_contents(experiment: Experiment, tmp_path: Path) -> None:
    experiment = with_prompts(experiment, 5)
    experiment.work.mkdir()
    (experiment.work / PROMPTS).write_text(json.dumps({"prompt": "1 and 1?"}) + "\n")
    row, other = Row("ours", 0, 0), tmp_path / "other.jsonl"
    digests = {experiment.digest(row)}
    own = replace(experiment, recipe_changes={"corpus": str(other)})
    for text in ("2 and 2?", "3 and 3?"):
        other.write_text(json.dumps({"prompt": text}) + "\n")
        assert own.options(row).corpus == str(other)
        digests.add(own.digest(row))
    assert len(digests) == 3


def test_an_estimate_of_prompts_reads_few_of_them(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("_smaller_estimate.FEW", 8)
    experiment = with_prompts(experiment, 40)
    experiment.work.mkdir()
    (experiment.work / PROMPTS).write_text("".join(json.dumps({"prompt": f"{n} and {n}?"}) + "\n" for n in range(40)))
    ratios = []
    ratio = _smaller_estimate._ratio
    monkeypatch.setattr(_smaller_estimate, "_ratio", lambda counts: ratios.append(counts) or ratio(counts))
    assert command(experiment, "train", "--recipes", DENSE, "--folds", "0") == 0
    assert command(experiment, "estimate", "--recipes", "ours", "--folds", "0") == 0
    assert "questions 8, answers 32" in capsys.readouterr().out
    assert [8, 40] in ratios


def with_prompts(experiment: Experiment, count: int) -> Experiment:
    """Return the experiment with a recipe whose teacher answers prompts; a fifth of its tokens end its answers."""
    pretrained = experiment.file.with_name("teacher")
    shutil.copytree(experiment.pretrained, pretrained)
    GenerationConfig(eos_token_id=list(range(2, 54))).save_pretrained(pretrained)
    settings = yaml.safe_load(experiment.file.read_text())
    settings["prompts"] = count
    corpus = {"corpus": PROMPTS, "corpus_prompt": "prompt", "corpus_answers": "teacher"}
    settings["recipes"]["ours"] |= {**corpus, "max_gen_toks": 12, "sample_temperature": 1.5, "samples": 4}
    experiment.file.write_text(yaml.safe_dump(settings))
    return Experiment(experiment.file, experiment.work, str(pretrained))


def replace_options(experiment: Experiment, **options: Any) -> Experiment:
    """Return the experiment with options of all its rows."""
    settings = yaml.safe_load(experiment.file.read_text())
    for own in (settings["dense"], *settings["recipes"].values()):
        own |= options
    experiment.file.write_text(yaml.safe_dump(settings))
    return Experiment(experiment.file, experiment.work, experiment.pretrained)


def test_scoring_is_timed_from_the_calibration_text_to_the_cut_model(tmp_path: Path) -> None:
    """Twice, as in two stages; what is written without scoring does not count."""
    from _smaller_estimate import PackedHost, TimedHost

    host: Any = object.__new__(TimedHost)
    moments = iter([1.0, 4.0, 20.0, 25.0])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("calibration", "write"):
            patch.setattr(PackedHost, name, lambda *_: None)
        patch.setattr("_smaller_estimate.time.monotonic", lambda: next(moments))
        for _ in range(2):
            host.calibration(None, None, None)
            host.write(None, {}, tmp_path)
            host.write(None, {}, tmp_path)
    assert host.scoring == 3 + 5


def test_an_estimate_counts_what_the_row_reads(experiment: Experiment) -> None:
    """More calibration texts, and sampled answers to validation problems, take longer."""
    from _smaller_estimate import _answering_seconds, _ratio

    assert _ratio([43, 256]) == 256 / 43 and _ratio([0, 256]) == 1.0
    calls: list[tuple[int, int]] = []

    def answers(host: Any, model: Any, documents: Any, params: Any, samples: int = 1) -> list[Any]:
        calls.append((len(documents), samples))
        return []

    moments = iter([0.0, 2.0, 10.0, 14.0])  # two seconds for the greedy answers, four for the sampled ones
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("_smaller_estimate.answers", answers)
        patch.setattr("_smaller_estimate.time.monotonic", lambda: next(moments))
        host: Any = SimpleNamespace(rows=lambda: SimpleNamespace(test=list(range(20))))
        seconds = _answering_seconds(experiment, host, None, 5)
    assert calls == [(16, 1), (8, 2)]
    assert seconds == 2 / 16 * 25 + 4 / 8 * 5


def test_mistakes_are_one_line(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (("train", "--recipes", "our"), "there is no recipe our; did you mean 'ours'?"),
        (("estimate", "--recipes", "our"), "there is no recipe our; did you mean 'ours'?"),
        (("choose", "--recipes", "ours", "our"), "there is no recipe our; did you mean 'ours'?"),
        (("train", "--folds", "9"), "there is no fold 9"),
        (("train", "--seeds", "9"), "there is no seed 9"),
        (("train", "--changes", "3"), "--changes 3 must be a mapping"),
        (("train", "--recipe_changes", "[1"), "--recipe_changes [1 is not YAML"),
        (("train", "--changes", "{epoch: 1}"), "has no setting 'epoch'; did you mean 'epochs'?"),
        (("collect",), "name the folder of the records"),
        (("speed",), "no recipe has a row or an estimate to measure"),
    ):
        assert command(experiment, *words) == 2
        assert message in capsys.readouterr().err
    problems(experiment)
    with pytest.raises(InputError, match="there are no rows by the seeds of the choice"):
        choice(experiment)


def test_the_recipe_for_users_is_that_of_the_experiment() -> None:
    """But for paths, and for how many texts are validated at once."""
    root = Path(__file__).parents[1]
    experiment = yaml.safe_load((root / "benchmarks/smaller_model.yaml").read_text())
    own = yaml.safe_load((root / "configs/distillation/smollm2_layers.yaml").read_text())["distill"]
    recipe = {name: value for name, value in experiment["recipes"]["depth_greedy_prompts"].items() if name != "trainer"}
    paths = {name: own.pop(name) for name in ("pretrained", "output", "test")}
    assert own == {**recipe, "task": experiment["task"], "corpus": "out/smaller_model/prompts.jsonl"}
    assert paths["pretrained"] == "out/distillation/smollm2_fold0_last"
    dense = yaml.safe_load((root / "configs/distillation/smollm2_finetune.yaml").read_text())["distill"]
    assert experiment["dense"] == {name: dense.get(name) for name in experiment["dense"]} | {"best_by": "none"}
