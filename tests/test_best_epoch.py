"""Which epoch's weights a distillation keeps: by the validation loss, by problems solved, or the last."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lmeval_prune import InputError, load_pretrained
from lmeval_prune.distillation import language_host
from lmeval_prune.distillation.athena_host import LANGUAGE_OPTIONS
from lmeval_prune.distillation.host import read_note
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill, make_host
from lmeval_prune.distillation.trainer import DistillTrainer, solved_then_loss
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.planning.own_answers import Answerer
from lmeval_prune.tasks import tries
from tests.athena_hosts import data_folder
from tests.conftest import ROOT
from tests.kills import Killed, counted

pytestmark = pytest.mark.usefixtures("no_pictures")
ACCURACY = "eval_accuracy"
TEACHER = {"distill_weight": 0.5, "ratio": 0.5, "unit": "balanced", "calibration": 4}


@pytest.fixture
def options(tiny_folder: Path, tmp_path: Path) -> DistillOptions:
    """Three epochs on six problems, chosen among by two others."""
    return DistillOptions(
        pretrained=str(tiny_folder),
        output=str(tmp_path / "student"),
        data_dir=str(data_folder(tmp_path / "data")),
        task="prune_asdiv_a_equation",
        test="fold0",
        limit=8,
        validation=0.25,
        ratio=0.0,
        distill_weight=0.0,
        stages=1,
        epochs=3,
        batch=3,
        rate=1e-2,
        max_gen_toks=6,
        best_by="accuracy",
    )


def is_right(text: str) -> bool:
    """Return whether a text counts as right, by a rule that the answers of a random model can meet."""
    return sum(map(ord, text)) % 2 == 0


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge answers by `is_right`."""
    monkeypatch.setattr(tries, "outcomes", lambda task, name, documents, texts: [is_right(text) for text in texts])


def values(folder: str, name: str) -> list[float]:
    return [row[name] for row in read_note(folder)["stages"][0]["log"] if name in row]


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def weights_of_epochs(patch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Return a list that is filled with the weights at each validation."""
    weights: list[dict[str, torch.Tensor]] = []
    original = DistillTrainer._solved
    patch.setattr(
        DistillTrainer, "_solved", lambda self, loss: weights.append(state_of(self.student)) or original(self, loss)
    )
    return weights


def told(patch: pytest.MonkeyPatch, rights: list[list[bool]], losses: list[float]) -> list[dict[str, torch.Tensor]]:
    """Set which answers of each epoch are right, and its loss; return the weights of the epochs, when they are there."""
    weights = weights_of_epochs(patch)
    original = DistillTrainer._solved

    def solved(self: Any, loss: float) -> dict[str, float]:
        epoch = len(weights)
        return {"eval_task": losses[epoch], **original(self, losses[epoch])}

    patch.setattr(DistillTrainer, "_solved", solved)
    patch.setattr(Answerer, "outcomes", lambda *_: [[right] for right in rights[len(weights) - 1]])
    return weights


@pytest.mark.parametrize(
    ("rights", "losses", "best"),
    [
        ([[False, False], [True, True], [True, False]], [1.0, 9.0, 0.1], 2),
        ([[True, False], [False, True], [False, False]], [2.0, 1.5, 0.1], 2),  # of equal ones that of the least loss
        ([[False, False], [False, False], [False, False]], [3.0, 2.0, 1.0], 3),
        ([[True, True], [True, True], [True, True]], [1.0, 1.0, 1.0], 1),
    ],
)
@pytest.mark.parametrize("patience", [0, 1])
def test_the_epoch_that_solves_most_is_kept(
    options: DistillOptions,
    monkeypatch: pytest.MonkeyPatch,
    rights: list[list[bool]],
    losses: list[float],
    best: int,
    patience: int,
) -> None:
    """Patience waits for a better epoch by the same order."""
    weights = told(monkeypatch, rights, losses)
    note = distill(replace(options, patience=patience))
    epochs = min(3, best + 1) if patience else 3
    assert values(options.output, ACCURACY) == [sum(several) / 2 for several in rights[:epochs]]
    assert len(weights) == epochs and note["stages"][0]["best_epoch"] == best
    kept = load_pretrained(options.output).state_dict()
    assert [equal(kept, state) for state in weights] == [epoch == best for epoch in range(1, epochs + 1)]


@settings(max_examples=200)
@given(st.integers(0, 500), st.integers(0, 500), st.floats(0, 1e4), st.floats(0, 1e4))
def test_the_loss_only_decides_between_equal_numbers(solved: int, other: int, loss: float, other_loss: float) -> None:
    one, two = solved_then_loss(solved, loss, 500), solved_then_loss(other, other_loss, 500)
    if solved != other:
        assert (one > two) == (solved > other)
    elif abs(loss - other_loss) > 1e-3 * max(loss, other_loss, 1.0):
        assert (one > two) == (loss < other_loss)


@pytest.mark.parametrize("best_by", ["loss", "accuracy", "none"])
@pytest.mark.parametrize("from_epoch", [1, 2])
@pytest.mark.usefixtures("judged")
def test_weights_of_a_diverged_training_are_not_kept(
    options: DistillOptions,
    best_by: Any,
    from_epoch: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A loss that is NaN makes the weights NaN; those of an epoch before it are kept, if one was chosen."""
    kept, total = weights_of_epochs(monkeypatch), DistillTrainer.total

    def diverging(trainer: DistillTrainer, terms: Any) -> Any:
        is_step = torch.is_tensor(terms["task"]) and terms["task"].requires_grad
        return total(trainer, terms) * (torch.nan if is_step and (trainer.state.epoch or 0) >= from_epoch - 1 else 1)

    monkeypatch.setattr(DistillTrainer, "total", diverging)
    changed = replace(options, best_by=best_by, max_gen_toks=6 if best_by == "accuracy" else None)
    if best_by == "none" or from_epoch == 1:
        for _ in range(2):  # again, when it is resumed
            with pytest.raises(InputError, match="has diverged: weights are NaN or infinite; give a smaller --rate"):
                distill(changed)
        assert not Path(changed.output).exists()
        return
    distill(changed)
    assert capsys.readouterr().out.count("the training has diverged: the best weights before are kept") == 1
    assert read_note(changed.output)["stages"][0]["best_epoch"] == 1
    assert len(kept) == 1
    assert equal(state_of(load_pretrained(changed.output)), kept[0])


def test_the_last_epoch_is_kept_and_still_validated(options: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = told(monkeypatch, [[]] * 3, [3.25, 1.25, 2.25])
    last = replace(options, best_by="none", max_gen_toks=None)
    note = distill(last)
    assert note["stages"][0]["best_epoch"] == 3
    assert values(last.output, "eval_task") == [3.25, 1.25, 2.25] and not values(last.output, ACCURACY)
    assert equal(load_pretrained(last.output).state_dict(), weights[-1])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora": {"r": 2, "lora_dropout": 0.5}},
        {"chat": True},
        TEACHER,  # with attention maps, so that the student has eager attention
        {**TEACHER, "feature": False, "hidden": True, "trainer": {"bf16": True}},
        {"train_on": "teacher", "keep_answers": "all", "teacher": "PRETRAINED", "max_gen_toks": 5},
    ],
)
@pytest.mark.usefixtures("judged")
def test_accuracy_is_that_of_greedy_answers(options: DistillOptions, changes: dict[str, Any]) -> None:
    options = replace(options, epochs=1, limit=16, validation=0.5, rate=1e-3, **changes)
    if options.teacher:
        options = replace(options, teacher=options.pretrained)
    distill(options)
    model: Any = load_pretrained(options.output).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(options.pretrained)
    host: Any = make_host(options)
    rights = []
    for problem in host.examples().problems:
        ids = torch.tensor([tokenizer(problem.question.prompt, add_special_tokens=False)["input_ids"]])
        tokens = model.generate(ids, max_new_tokens=options.max_gen_toks, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
        for stop in host.task.get_config("generation_kwargs").get("until", ()):
            text = text.split(stop)[0]
        rights.append(is_right(text))
    assert values(options.output, ACCURACY) == [sum(rights) / 8]
    assert 0 < sum(rights) < 8


@pytest.mark.usefixtures("judged")
def test_answers_are_judged_by_the_metric_that_was_named(
    options: DistillOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[Any] = []
    original = tries.choose_metric
    monkeypatch.setattr(tries, "choose_metric", lambda task, metric: names.append(metric) or original(task, metric))
    distill(replace(options, epochs=1, answer_metric="exact_match"))
    assert len(names) == 2 and {*names} == {"exact_match"}  # before the training, and after its epoch


@pytest.mark.parametrize(("best_by", "moment"), [("accuracy", "step"), ("accuracy", "answers"), ("none", "step")])
@pytest.mark.usefixtures("judged")
def test_a_killed_distillation_ends_the_same(
    options: DistillOptions, tmp_path: Path, best_by: Any, moment: str
) -> None:
    """With dropout, whose random numbers the answers must not take; killed in the last epoch or in its validation."""
    tokens = 6 if best_by == "accuracy" else None
    changes: dict[str, Any] = {"lora": {"r": 2, "lora_dropout": 0.5}, "validation": 0.5, "limit": 12}
    options = replace(options, best_by=best_by, max_gen_toks=tokens, **changes)
    distill(options)
    again = replace(options, output=str(tmp_path / "again"))
    with pytest.MonkeyPatch.context() as patch:
        owner, name = (DistillTrainer, "training_step") if moment == "step" else (PrunedHFLM, "generate_until")
        counted(patch, owner, name, 4 if moment == "step" else 2)
        with pytest.raises(Killed):
            distill(again)
    distill(again)
    for name in ("eval_task", ACCURACY):
        assert values(options.output, name) == values(again.output, name)
    assert len({*values(options.output, ACCURACY)}) > 1 or best_by == "none"
    assert equal(load_pretrained(options.output).state_dict(), load_pretrained(again.output).state_dict())
    assert {path.name for path in tmp_path.iterdir()} == {"student", "again", "data"}


@pytest.mark.long
def test_two_processes_share_the_answers(options: DistillOptions, tmp_path: Path) -> None:
    """Five problems, of which the first process has three; its answers are right."""
    script = tmp_path / "script.py"
    script.write_text(
        "import datetime, json, os, sys\n"
        "import torch\n"
        "from lmeval_prune.distillation.options import DistillOptions\n"
        "from lmeval_prune.distillation.recursion import distill\n"
        "from lmeval_prune.planning.own_answers import Answerer\n"
        "def outcomes(self, questions, answers, metric):\n"
        "    backend = torch.distributed.group.WORLD._get_backend(torch.device('cpu'))\n"
        "    assert backend.options._timeout >= datetime.timedelta(days=1)  # the teacher can take as long\n"
        "    return [[os.environ['RANK'] == '0'] for _ in answers]\n"
        "Answerer.outcomes = outcomes\n"
        "distill(DistillOptions(**json.loads(sys.argv[1])))\n"
    )
    options = replace(options, limit=10, validation=0.5)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(script), json.dumps(asdict(options))],
        check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, capture_output=True, text=True,
    )  # fmt: skip
    assert values(options.output, ACCURACY) == [0.6] * 3


def test_options_of_language_models_are_refused_for_an_athena() -> None:
    """All whose description says so."""
    described = re.findall(r"^ +(\w+): \(language models\)", DistillOptions.__doc__ or "", re.MULTILINE)
    assert {*described} == {*LANGUAGE_OPTIONS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_by": "none", "max_gen_toks": None, "patience": 1}, "best_by=none looks for none"),
        ({"validation": 0.0}, "best_by is for a validation split"),
        ({"best_by": "loss"}, "max_gen_toks is for calibrate_on=own, train_on=teacher, corpus_answers=teacher or"),
        ({"best_by": "loss", "max_gen_toks": None, "answer_metric": "acc"}, "answer_metric is for train_on=teacher or"),
        ({"best_by": "bleu"}, "best_by='bleu' must be accuracy, loss or none"),
        ({"max_gen_toks": 512}, "leaves no room for a prompt, since .* has 512 positions"),
        ({"answer_metric": "bleu"}, "bleu is not a metric with values 0 and 1; name another, of exact_match"),
        ({"answer_metric": "exact_match,strickt"}, "has no filter 'strickt'"),
        ({"task": None, "test": None, "limit": None, "corpus": "texts"}, "give task, or best_by=loss"),
        (
            {"task": "hellaswag", "test": None},
            "hellaswag is not generative, and .*; name another task, or best_by=loss",
        ),
    ],
)
def test_mistakes_are_one_line_before_any_weights_are_read(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(language_host, "load_pretrained", lambda *_: pytest.fail("weights were read"))
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("some words")
    if changes.get("task") == "hellaswag":
        task = type("Task", (), {"task_name": "hellaswag", "get_config": lambda *_: "multiple_choice"})()
        monkeypatch.setattr(language_host, "load_task", lambda *_: task)
    with pytest.raises(InputError, match=message) as raised:
        distill(replace(options, **changes))
    assert "\n" not in str(raised.value)
