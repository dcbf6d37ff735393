"""Training of ATHENA: what it learns from, going on after a kill, evaluation through lm-eval, refusals."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmeval_prune import InputError
from lmeval_prune.athena import checkpoint, training
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.athena.problems import ProblemSplit
from lmeval_prune.cli import main
from lmeval_prune.training.questions import question_key
from lmeval_prune.training.trainer import BatchesByLength, ResumableTrainer, draw, last_checkpoint
from tests.athena_hosts import data_folder, encoder_folder, train_options
from tests.conftest import task_manager
from tests.kills import Killed, counted

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> TrainOptions:
    """Three epochs over 20 problems, 4 for validation."""
    folder = tmp_path_factory.mktemp("training")
    return train_options(folder, epochs=3, batch=4, encoder_rate=1e-3, head_rate=1e-3)


@pytest.fixture(scope="module")
def trained(options: TrainOptions) -> str:
    """An uninterrupted training with its loss curves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "draw", draw)
        training.train(options)
    return options.output


def weights(folder: str) -> dict[str, torch.Tensor]:
    return checkpoint.read(folder).state_dict()


def losses(folder: str) -> list[tuple[str, float]]:
    log = checkpoint.describe(folder)["log"]
    return [(key, row[key]) for row in log for key in ("loss", "eval_loss", "eval_accuracy") if key in row]


def train_killed(options: TrainOptions, name: str, call: int) -> None:
    """Train up to the n-th call of a trainer's method."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        counted(patch, ResumableTrainer, name, call - 1)
        training.train(options)


def test_killed_training_ends_with_the_same_weights(options: TrainOptions, trained: str, tmp_path: Path) -> None:
    """Killed while a checkpoint is written, after another."""
    again = replace(options, output=str(tmp_path / "host"))
    train_killed(again, "_save_rng_state", 2)
    assert not (tmp_path / "host").exists()
    training.train(again)
    expected, actual = weights(trained), weights(again.output)
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=0, atol=1e-6)
    assert losses(again.output) == losses(trained)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host"]


@pytest.mark.parametrize("changed", ["encoder", "data_dir"])
def test_other_contents_are_refused_before_and_after_the_end(
    options: TrainOptions, trained: str, tmp_path: Path, changed: str
) -> None:
    """A file that changed under its name, as a folder that was written again, or one that another option names."""
    path = tmp_path / changed
    shutil.copytree(getattr(options, changed), path)
    begun, done = (
        replace(options, output=str(tmp_path / folder), **{changed: str(path)}) for folder in ("begun", "done")
    )
    train_killed(begun, "compute_loss", 9)
    shutil.copytree(trained, done.output)
    if changed == "encoder":
        about = json.loads((tmp_path / "done" / "athena.json").read_text())
        about["options"]["encoder"] = str(path)
        (tmp_path / "done" / "athena.json").write_text(json.dumps(about))
        encoder_folder(path, dtype=torch.float32, initializer_range=0.5)
    else:
        data_folder(path, rows=35)
    for changed_options in (begun, done):
        with pytest.raises(InputError):
            training.train(changed_options)
    assert checkpoint.describe(trained)["contents"].keys() == {"encoder_checkpoint", "problems"}


def test_patience_survives_a_kill(options: TrainOptions, tmp_path: Path) -> None:
    still = replace(
        options, epochs=6, batch=10, patience=1, encoder_rate=1e-9, head_rate=1e-9, output=str(tmp_path / "one")
    )
    training.train(still)
    epochs = sum("loss" in row for row in checkpoint.describe(still.output)["log"])
    assert epochs == 2  # nothing is learned, and the second epoch is no better
    train_killed(replace(still, output=str(tmp_path / "two")), "compute_loss", 4)
    training.train(replace(still, output=str(tmp_path / "two")))
    assert losses(str(tmp_path / "two")) == losses(still.output)


def test_training_improves_and_is_recorded(options: TrainOptions, trained: str) -> None:
    about = checkpoint.describe(trained)
    result = losses(trained)
    first, *_, last = [value for key, value in result if key == "loss"]
    assert last < first
    assert about["problems"] == {"train": 20, "validation": 4, "ungrounded": 0, "repeated": 0}
    assert about["settings"]["steps"] == 5
    assert about["settings"]["constants"] == []
    best = max(value for key, value in result if key == "eval_accuracy")
    accuracies = [row["eval_accuracy"] for row in about["log"] if "eval_accuracy" in row]
    assert about["best_epoch"] == accuracies.index(best) + 1
    for ending in ("png", "svg"):
        assert (Path(trained) / f"training.{ending}").stat().st_size > 1000
    test = {question_key(row) for row in training_rows(options, "fold0")}
    assert len(about["trained_on"]) == 24
    assert test.isdisjoint(about["trained_on"])


def training_rows(options: TrainOptions, split: str) -> list[dict[str, Any]]:
    from lmeval_prune.tasks.data import load

    return list(load("asdiv_a", split, options.data_dir))


def test_complete_training_is_not_repeated_and_other_options_are_refused(options: TrainOptions, trained: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, ResumableTrainer, "compute_loss", 0)  # would end a training
        training.train(options)
    with pytest.raises(InputError):
        training.train(replace(options, epochs=4))


def test_without_a_validation_split_the_last_epoch_counts(options: TrainOptions, tmp_path: Path) -> None:
    model = training.train(replace(options, validation=0, epochs=1, output=str(tmp_path / "host")))
    assert model.about["best_epoch"] == 1
    assert model.about["problems"]["train"] == 24
    assert [key for key, _ in losses(str(tmp_path / "host"))] == ["loss"]


def test_batches_have_similar_lengths_and_a_new_order_each_epoch() -> None:
    lengths = [(7 * i) % 50 for i in range(101)]
    sampler = BatchesByLength(lengths, 4, 0)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert sorted(orders[-1]) == list(range(101))
    assert orders[0] == orders[2] != orders[1]
    batches = [orders[0][i : i + 4] for i in range(0, 101, 4)]
    spread = [max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in batches]
    assert sum(spread) / len(spread) < 5
    assert len(batches[-1]) == 1


def test_incomplete_checkpoints_are_deleted(tmp_path: Path) -> None:
    """A checkpoint without optimizer states has weights, but no training resumes from it."""
    whole = [(step, f'{{"global_step": {step}}}') for step in (10, 20, 50)]
    for step, state in (*whole, (30, '{"global_'), (40, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step != 50:
            (tmp_path / f"checkpoint-{step}" / "optimizer.pt").touch()
        if state:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-20")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-20"]


def test_split_excludes_test_and_ungrounded_problems(options: TrainOptions, tmp_path: Path) -> None:
    folder = data_folder(tmp_path / "data")
    rows = [json.loads(line) for line in (folder / "asdiv.jsonl").read_text().splitlines()]
    rows[1] |= {"formula": "3+99=102"}  # fold 1: a number that the text lacks
    rows[2] |= {"body": rows[0]["body"], "question": rows[0]["question"], "formula": rows[0]["formula"]}  # of the test
    (folder / "asdiv.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = ProblemSplit.load(replace(options, data_dir=str(folder)))
    assert (result.ungrounded, result.repeated) == (1, 1)
    assert (len(result.train), len(result.validation)) == (18, 4)
    assert result.constants == ()


# ---------------------------------------------------------------- through lm-eval


def evaluate(
    model: str, options: TrainOptions, task: str = "prune_asdiv_a_equation", split: str = "fold0", **others: Any
) -> Any:
    import lm_eval

    from lmeval_prune.plugin import registration

    registration.register()
    metadata = {"data_dir": options.data_dir, "data_split": split}
    return lm_eval.simple_evaluate(
        model="athena", model_args=model, tasks=[task], task_manager=task_manager(metadata), metadata=metadata,
        bootstrap_iters=0, **others,
    )  # fmt: skip


def test_lm_eval_prompts_with_the_bare_question(options: TrainOptions, trained: str) -> None:
    results = {}
    for heads in ("", ",heads=L0H0-2+L1H1-3"):
        result = evaluate(f"pretrained={trained}{heads}", options, batch_size=3)
        results[heads] = [row["resps"][0][0] for row in result["samples"]["prune_asdiv_a_equation"]]
        pruning = result["config"]["pruning"]
        assert pruning["heads"] == ([f"L0H{i}" for i in range(3)] + [f"L1H{i}" for i in range(1, 4)] if heads else [])
        assert result["config"]["athena"]["problems"]["train"] == 20
    model = checkpoint.read(trained)
    rows = training_rows(options, "fold0")
    from lmeval_prune.athena.problems import Problem
    from lmeval_prune.athena.solving import answers

    texts = answers(model, [Problem.of_document(row) for row in rows])
    assert results[""] == [rf"\boxed{{{text}}}" for text in texts]
    assert results[""] != results[",heads=L0H0-2+L1H1-3"]


def test_training_questions_in_a_test_are_reported(
    options: TrainOptions, trained: str, caplog: pytest.LogCaptureFixture
) -> None:
    from lmeval_prune.models.athena import AthenaLM
    from lmeval_prune.tasks import compat

    lm = AthenaLM(trained, batch_size=4, device="cuda:0")  # what lm-eval's command line says everywhere
    docs = training_rows(options, "fold0")[:1] + training_rows(options, "fold1")[:2]
    requests = [compat.request("generate_until", ("whatever", {}), "t", i, doc=doc) for i, doc in enumerate(docs)]
    assert len(lm.generate_until(requests)) == 3
    assert "2 of the questions" in caplog.text  # the only sign of it
    with pytest.raises(InputError):
        lm.set_cache_hook(SimpleNamespace(dbdict={}))  # of --use_cache, which would mix masks


@pytest.mark.parametrize("arguments", [{"router": "best"}, {"token_filter": 0.2}, {"dtype": "float32"}])
def test_arguments_that_would_change_nothing_are_refused(trained: str, arguments: dict[str, Any]) -> None:
    from lmeval_prune.models.athena import AthenaLM

    with pytest.raises(InputError, match=next(iter(arguments))):
        AthenaLM(trained, **arguments)


def test_mask_file_of_the_encoder(trained: str, tmp_path: Path) -> None:
    from lmeval_prune.interventions import interventions_on
    from lmeval_prune.models.athena import AthenaLM

    path = tmp_path / "mask.json"
    assert main(["mask", "--pretrained", f"{trained}/encoder", "--heads", "L0H1", "--output", str(path)]) == 0
    lm = AthenaLM(trained, mask=str(path))
    assert [item.heads for item in interventions_on(lm.host.encoder)] == [("L0H1",)]
    lm.close()
    assert interventions_on(lm.host.encoder) == ()
    shutil.copytree(trained, tmp_path / "other")
    other = checkpoint.read(trained)
    with torch.no_grad():
        other.encoder.encoder.layer[0].output.dense.weight[0, 0] += 1
    checkpoint.write(other, tmp_path / "other")
    with pytest.raises(InputError):
        AthenaLM(str(tmp_path / "other"), mask=str(path))


def test_training_on_math23k_with_constants(options: TrainOptions, shared_data: Path, tmp_path: Path) -> None:
    with gzip.open(shared_data / "math23k.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(next(lines)) for _ in range(600)]
    some = [row for row in rows if not row["standard_test"]][:50] + [row for row in rows if row["standard_test"]][:5]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "math23k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    model = training.train(
        replace(
            options, data="math23k", train=("train",), test="test", epochs=1, batch=25, max_kept=12,
            data_dir=str(tmp_path / "data"), output=str(tmp_path / "host"),
        )
    )  # fmt: skip
    assert model.about["problems"]["train"] + model.about["problems"]["validation"] == 50
    assert "1" in model.settings.constants
    assert model.settings.steps > 5
    result = evaluate(
        f"pretrained={tmp_path / 'host'}",
        replace(options, data_dir=str(tmp_path / "data")),
        "prune_math23k_equation",
        split="test",
    )
    answers = [row["resps"][0][0] for row in result["samples"]["prune_math23k_equation"]]
    assert len(answers) == 5
    assert all(answer.startswith(r"\boxed{") for answer in answers)
