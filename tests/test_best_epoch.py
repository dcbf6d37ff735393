"""Which epoch's weights a distillation keeps: by the validation loss, by problems solved, or the last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lmeval_prune import InputError, load_pretrained
from lmeval_prune.distillation import language_host
from lmeval_prune.distillation.host import read_note
from lmeval_prune.distillation.language_host import LanguageHost
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill, make_host
from lmeval_prune.distillation.trainer import DistillTrainer
from lmeval_prune.planning.own_answers import Answerer
from lmeval_prune.tasks import tries
from tests.athena_hosts import data_folder, quick_training
from tests.conftest import ROOT
from tests.kills import Killed, counted

ACCURACY = "eval_accuracy"


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


@pytest.fixture(autouse=True)
def no_pictures() -> Any:
    """Skip drawing the figures."""
    with quick_training():
        yield


def log_of(folder: str) -> list[dict[str, Any]]:
    return list(read_note(folder)["stages"][0]["log"])


def values(folder: str, name: str) -> list[float]:
    return [row[name] for row in log_of(folder) if name in row]


def scripted(
    patch: pytest.MonkeyPatch, rights: list[list[bool]], losses: list[float] | None = None
) -> list[dict[str, torch.Tensor]]:
    """Set which answers of each epoch are right, and its loss; return the weights of each epoch, filled in training."""
    weights: list[dict[str, torch.Tensor]] = []
    original = LanguageHost.metrics

    def metrics(self: Any, model: Any, examples: Any) -> dict[str, float]:
        patch.setattr(Answerer, "outcomes", lambda *_: [[right] for right in rights[len(weights)]])
        result = original(self, model, examples) | ({"eval_task": losses[len(weights)]} if losses else {})
        weights.append({name: x.detach().clone() for name, x in model.state_dict().items()})
        return result

    patch.setattr(LanguageHost, "metrics", metrics)
    return weights


@pytest.mark.parametrize(
    ("rights", "best"),
    [
        ([[False, False], [True, True], [True, False]], 2),
        ([[True, False], [False, True], [False, False]], 1),  # the first of equal ones
        ([[False, False], [False, False], [False, True]], 3),
    ],
)
def test_the_epoch_that_solves_most_is_kept(
    options: DistillOptions, monkeypatch: pytest.MonkeyPatch, rights: list[list[bool]], best: int
) -> None:
    weights = scripted(monkeypatch, rights)
    note = distill(options)
    assert values(options.output, ACCURACY) == [sum(several) / 2 for several in rights]
    assert note["stages"][0]["best_epoch"] == best
    kept = load_pretrained(options.output).state_dict()
    for epoch, expected in enumerate(weights, start=1):
        equal = all(torch.equal(kept[name], expected[name]) for name in kept)
        assert equal == (epoch == best)
    card = (Path(options.output) / "README.md").read_text()
    assert "validation accuracy" in card and f"{max(map(sum, rights)) / 2:g}" in card


def test_the_last_epoch_is_kept_and_still_validated(options: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = scripted(monkeypatch, [[]] * 3, [3.25, 1.25, 2.25])
    last = replace(options, best_by="none", max_gen_toks=None)
    note = distill(last)
    assert note["stages"][0]["best_epoch"] == 3
    assert values(last.output, "eval_task") == [3.25, 1.25, 2.25]
    kept = load_pretrained(last.output).state_dict()
    assert all(torch.equal(kept[name], weights[-1][name]) for name in kept)
    assert "2.250 |" in (Path(last.output) / "README.md").read_text()


@pytest.mark.parametrize("lora", [{}, {"r": 2}])
def test_accuracy_is_that_of_greedy_answers(
    options: DistillOptions, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any]
) -> None:
    """Judged as the task judges: here by a rule that a random model can meet."""

    def outcomes(task: Any, name: str, documents: Any, texts: list[str]) -> list[bool]:
        assert task.task_name == options.task and len(documents) == len(texts)
        return [is_right(text) for text in texts]

    def is_right(text: str) -> bool:
        return sum(map(ord, text)) % 2 == 0

    monkeypatch.setattr(tries, "outcomes", outcomes)
    one = replace(options, epochs=1, lora=lora, limit=12, validation=0.5, chat=False)
    distill(one)
    model: Any = load_pretrained(one.output).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(one.pretrained)
    rights = []
    for problem in make_host(one).examples().problems:
        ids = torch.tensor([tokenizer(problem.question.prompt)["input_ids"]])
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        for stop in make_host(one).task.get_config("generation_kwargs").get("until", ()):
            text = text.split(stop)[0]
        rights.append(is_right(text))
    assert values(one.output, ACCURACY) == [sum(rights) / 6]
    assert 0 < sum(rights) < 6


@pytest.mark.parametrize("best_by", ["accuracy", "none"])
def test_an_interrupted_distillation_ends_the_same(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best_by: Any
) -> None:
    monkeypatch.setattr(
        Answerer, "outcomes", lambda self, questions, answers, metric: [[len(a[0].text) % 2 > 0] for a in answers]
    )
    options = replace(options, best_by=best_by, max_gen_toks=6 if best_by == "accuracy" else None)
    distill(options)
    again = replace(options, output=str(tmp_path / "again"))
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, DistillTrainer, "training_step", 4)
        with pytest.raises(Killed):
            distill(again)
    distill(again)
    for name in ("eval_task", ACCURACY):
        assert values(options.output, name) == values(again.output, name)
    one, other = (load_pretrained(each.output).state_dict() for each in (options, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not list(tmp_path.glob("*.responses"))


@pytest.mark.long
def test_each_of_two_processes_counts_all_answers(options: DistillOptions, tmp_path: Path) -> None:
    """All are right, so that half of them would show."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "from lmeval_prune.distillation.options import DistillOptions\n"
        "from lmeval_prune.distillation.recursion import distill\n"
        "from lmeval_prune.planning.own_answers import Answerer\n"
        "Answerer.outcomes = lambda self, questions, answers, metric: [[True] for _ in answers]\n"
        "distill(DistillOptions(**json.loads(sys.argv[1])))\n"
    )
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(script), json.dumps(asdict(options))],
        check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, capture_output=True, text=True,
    )  # fmt: skip
    assert values(options.output, ACCURACY) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_by": "none", "max_gen_toks": None, "patience": 1}, "best_by=none looks for none"),
        ({"validation": 0.0}, "best_by is for a validation split"),
        ({"best_by": "loss"}, "max_gen_toks is for calibrate_on=own, train_on=teacher or best_by=accuracy"),
        ({"best_by": "loss", "max_gen_toks": None, "answer_metric": "acc"}, "answer_metric is for train_on=teacher or"),
        ({"best_by": "bleu"}, "best_by='bleu' must be accuracy, loss or none"),
        ({"task": None, "test": None, "limit": None, "corpus": "texts"}, "to the problems of a task; give task"),
        ({"task": "hellaswag", "test": None}, "is not generative"),
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
