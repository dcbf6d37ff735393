"""Stages of a distillation: any pruner with its compensation, own calibration text, and what a teacher's answers teach."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lmeval_prune import InputError, load_pretrained, map_model
from lmeval_prune.checkpoints.loading import read_manifest
from lmeval_prune.decoding import Engine
from lmeval_prune.distillation.language_host import LanguageHost
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill, make_host
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.models.answer_store import AnswerStore, read_answers
from lmeval_prune.planning.own_answers import calibration_text
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import Part
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.surgery.cut import cut, cut_to
from tests.athena_hosts import language_options
from tests.kills import run_killed
from tests.test_own_answers import task_file
from tests.tiny_models import tiny

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def model_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers, so that a fifth of the parameters is several units."""
    folder = tmp_path_factory.mktemp("deep") / "model"
    model = tiny("llama", vocab_size=259, max_position_embeddings=512, num_hidden_layers=4, dtype=torch.float64)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def options(model_folder: str, tmp_path: Path) -> DistillOptions:
    """Two stages without training, of a third of the parameters."""
    return language_options(
        model_folder, tmp_path, limit=10, validation=0.2, ratio=0.3, pruning={"budget": "parameters"}, stages=2,
        epochs=0, max_length=400, terms=("response",), answer="{}", batch=8, calibration=64, rate=5e-5,
    )  # fmt: skip


def by_hand(options: DistillOptions, **more: Any) -> Any:
    """Score, compensate and cut twice, by the shares of the unpruned model that eq. 5 gives."""
    host: Any = make_host(options)
    examples = host.examples()
    model = host.read(options.pretrained)
    pruner = make_pruner(options.method, options.options)
    whole = None
    for share in (options.ratio / 2, options.ratio):
        model_map = map_model(model)
        text = host.calibration(examples, model)
        (first, *_) = stages(pruner, model_map, PruneOptions(share, unit="group", **more), text)
        whole = whole or first.provenance["parameters"]["removable"]
        left = first.provenance["parameters"]["removable"]
        ratio = (share * whole - (whole - left)) / left
        *_, plan = stages(
            pruner, model_map, PruneOptions(ratio, unit="group", steps=options.pruning.get("steps", 1), **more), text
        )
        model = cut(model, plan).model
    return model


@pytest.mark.parametrize(
    ("method", "steps", "more"),
    [
        ("slimgpt", 1, {}),
        ("wanda_sp", 1, {"compensation": "bias"}),
        ("flap", 2, {}),
        ("gisp", 3, {}),
        ("gisp", 2, {"compensation": "least_squares", "skip_first": 1}),
        ("random", 1, {"allocation": "uniform", "compensation": "least_squares"}),
    ],
)
def test_each_stage_scores_compensates_and_cuts(
    options: DistillOptions, method: str, steps: int, more: dict[str, Any]
) -> None:
    """The weights are those of the same plans made one after another."""
    options = replace(options, method=method, pruning={**options.pruning, "steps": steps, **more})
    if method == "random":  # draws anew in each stage
        distill(options)
    else:
        expected = by_hand(options, **more).state_dict()
        distill(options)
        actual = load_pretrained(options.output).state_dict()
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value.to(actual[name].dtype), rtol=1e-5, atol=1e-6)
    manifest = read_manifest(options.output)
    assert manifest is not None
    provenances = [stage["plan"]["made"] for stage in manifest["stages"]]
    compensation = {"slimgpt": "least_squares", "flap": "bias"}.get(method, "none")
    assert [provenance["options"]["compensation"] for provenance in provenances] == [
        more.get("compensation", compensation)
    ] * 2
    assert [len(provenance["stages"]) for provenance in provenances] == [steps] * 2
    removable = provenances[0]["parameters"]["removable"]
    removed = sum(provenance["parameters"]["removed"] for provenance in provenances)
    unit = Part(map_model(load_pretrained(options.pretrained)).attention[0]).cost("group")
    assert abs(removed - 0.3 * removable) <= 2 * unit


# ---------------------------------------------------------------- own calibration text


def calibration_texts(options: DistillOptions) -> list[dict[str, Any]]:
    manifest = read_manifest(options.output)
    assert manifest is not None
    return [stage["plan"]["made"]["calibration"] for stage in manifest["stages"]]


def test_stages_read_answers_of_the_model_that_they_prune(options: DistillOptions) -> None:
    options = replace(options, method="flap", calibrate_on="own", max_gen_toks=10, stages=3, calibration=6)
    distill(options)
    texts = calibration_texts(options)
    assert all(text["text"] == "own answers to 6 training problems" for text in texts)
    assert len({text["sha256"] for text in texts}) == 3
    assert len(list(read_answers(Path(f"{options.output}.responses")))) == 6 * 3


def test_own_text_is_of_the_problems_that_are_drawn(options: DistillOptions) -> None:
    options = replace(options, calibrate_on="own", max_gen_toks=10, calibration=6)
    host: Any = make_host(options)
    examples, model = host.examples(), host.read(options.pretrained)
    text = host.calibration(examples, model)
    drawn = host.drawn(examples.questions)
    answers = host.answerer.answers(model, [problem.question for problem in drawn])
    expected = calibration_text(text.name, host.answerer, answers, False)
    assert text.record() == expected.record() and len(drawn) == 6
    rows = [row[real.bool()].tolist() for row, real, _ in zip(*text.batches[0], strict=True)]
    ordered = sorted(zip(drawn, answers, strict=True), key=lambda pair: len(pair[1].prompt) + len(pair[1].tokens))
    for row, (problem, _) in zip(rows, ordered, strict=True):
        assert row[: problem.start] == problem.ids[: problem.start]


# ---------------------------------------------------------------- a teacher's answers


def teaching(options: DistillOptions, tmp_path: Path, **changes: Any) -> DistillOptions:
    """A training by a teacher's answers, which end at a third of all characters."""
    ends = [chr(number) for number in range(33, 126)]
    path = task_file(
        tmp_path / "task",
        dataset_kwargs={
            "data_files": {name: str(tmp_path / "task" / f"{name}.jsonl") for name in ("rows", "test")},
            "cache_dir": str(tmp_path),
        },
        training_split="rows",
        test_split="test",
        generation_kwargs={"until": ends, "max_gen_toks": 8, "do_sample": False},
    )
    (tmp_path / "task" / "test.jsonl").write_text(
        json.dumps({"question": "What is 50 + 50?", "answer": "100", "n": 50})
    )
    settings = {
        "task": path,
        "test": None,
        "data_dir": None,
        "train_on": "teacher",
        "max_gen_toks": 8,
        "epochs": 1,
        "stages": 1,
        "ratio": 0.25,
        "batch": 4,
        "answer": "\\boxed{{}}",
        **changes,
    }
    return replace(options, **settings)


def test_a_student_learns_the_answers_that_are_right(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a scorer that likes even numbers; other problems keep their target."""
    options = teaching(options, tmp_path, validation=0.0, limit=20)
    host: Any = make_host(options)

    monkeypatch.setattr(
        "lmeval_prune.tasks.tries.outcomes", lambda task, metric, documents, texts: [x["n"] % 2 == 0 for x in documents]
    )
    examples = host.examples()
    answers = host.answerer.answers(host.read(options.pretrained), [p.question for p in examples.questions])
    counts = distill(options)["material"]["lessons"]["train"]
    expected, solved = [], 0
    for problem, answer in zip(examples.questions, answers, strict=True):
        is_kept = problem.question.document["n"] % 2 == 0 and not answer.cut_off
        solved += is_kept
        text = ([*answer.prompt, *answer.tokens], len(answer.prompt)) if is_kept else (problem.ids, problem.start)
        expected.append(text)
    assert counts["kept"] == solved and counts["unsolved"] == 20 - solved and 0 < solved < 20
    assert [text[:2] for text in host.taught(examples, tmp_path).train] == expected


def test_problems_calibrate_and_are_compared_whatever_is_learned(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text a problem, with its target, whatever of the teacher's answers is kept."""
    monkeypatch.setattr("lmeval_prune.tasks.tries.outcomes", lambda *arguments: [True] * len(arguments[-1]))
    options = teaching(options, tmp_path, limit=20, validation=0.4)
    host: Any = make_host(options)
    examples = host.examples()
    taught = host.taught(examples, tmp_path)
    assert taught.train != examples.train and len(taught.validation) == len(examples.validation) == 8
    model = host.read(options.pretrained)
    first, second = (host.calibration(source, model).record() for source in (examples, taught))
    assert first == second
    compared = host.compared_texts(taught)
    assert [text.document[1] for text in compared] == [*range(8)]
    assert [[*text.context, *text.continuation] for text in compared] == [
        problem.ids for problem in examples.validation
    ]


def test_lessons_are_written_once_and_survive_a_kill(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the teacher answers, then while the student trains; the result is that of an uninterrupted run."""
    options = teaching(options, tmp_path)
    distill(replace(options, output=str(tmp_path / "whole")))
    work = Path(f"{options.output}.distilling")
    for target, name, count in ((AnswerStore, "add", 7), (Plan, "__post_init__", 0)):
        run_killed(target, name, count, lambda: distill(options))
        assert (work / "lessons.json").exists() == (target is Plan)
    assert len(list(read_answers(Path(f"{options.output}.responses")))) == 10
    rows = tmp_path / "task" / "rows.jsonl"
    before = rows.read_text()
    rows.write_text(before.replace("What is", "How much is"))
    with pytest.raises(InputError, match="was made with problems="):
        distill(options)
    rows.write_text(before)
    monkeypatch.setattr(Engine, "decode", lambda *_: pytest.fail("the teacher was asked again"))
    distill(options)
    first, second = (load_pretrained(folder).state_dict() for folder in (options.output, str(tmp_path / "whole")))
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_another_teacher_is_asked(options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmeval_prune.tasks.tries.outcomes", lambda *arguments: [True] * len(arguments[-1]))
    model = load_pretrained(options.pretrained)
    cut_to(tmp_path / "teacher", model, Plan("L0H0-1"), AutoTokenizer.from_pretrained(options.pretrained))
    taught = teaching(options, tmp_path)
    texts = []
    for name, teacher in (("own", "previous"), ("other", str(tmp_path / "teacher"))):
        host: Any = make_host(replace(taught, teacher=teacher, output=str(tmp_path / name)))
        texts.append(host.taught(host.examples(), tmp_path / name).train)
    assert texts[0] != texts[1]


PROMPTS = [f"What is {n} plus {n + 1}?" for n in range(9)]


def unlabelled(options: DistillOptions, tmp_path: Path, **changes: Any) -> DistillOptions:
    """A training that reads nine prompts without answers, an empty one, a test question and a repeated one, as well."""
    rows = [*PROMPTS, " ", "What is 50 + 50?", PROMPTS[3]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in rows))
    prompts = {"prompts": str(tmp_path / "prompts.jsonl"), "train_on": "task"}
    return teaching(options, tmp_path, **{**prompts, **changes})


@pytest.mark.parametrize("chat", [False, True])
def test_the_teacher_answers_prompts(options: DistillOptions, tmp_path: Path, chat: bool) -> None:
    """Its greedy answers up to a stop text, by `generate`, with the end token; those that were cut off are left out."""
    options = unlabelled(options, tmp_path, chat=chat)
    host: Any = make_host(options)
    examples = host.examples()
    taught = host.taught(examples, tmp_path)
    model, tokenizer = host.read(options.pretrained).eval(), host.tokenizer
    ends, expected, cut_off = [chr(number) for number in range(33, 126)], set(), 0
    for prompt in PROMPTS:
        text = f"u: {prompt}\na:" if chat else prompt
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        tokens = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
        size = next(
            (n for n, t in enumerate(tokens) if t == tokenizer.eos_token_id or tokenizer.decode(t) in ends), None
        )
        cut_off += size is None
        if size is not None:
            expected.add(((*ids[0].tolist(), *tokens[:size], tokenizer.eos_token_id), ids.shape[1]))
    problems = [example for example in taught.train if example.is_problem]
    learned = [example for example in taught.train if not example.is_problem]
    assert {(tuple(lesson.ids), lesson.start) for lesson in learned} == expected and len(learned) == len(expected) > 0
    assert problems == examples.questions and len(problems) == 8
    counts = taught.note["lessons"]["train_prompts"]
    assert counts["questions"] == len(PROMPTS) and counts["cut_off"] == cut_off and "right" not in counts
    assert [taught.note["prompts"][name] for name in ("empty", "with_test_questions", "repeated")] == [1, 1, 1]
    assert set(taught.note["lessons"]) == {"train_prompts"}
    assert len(taught.lengths) == len(taught.train)


ALONE: dict[str, Any] = {"task": None, "answer": "{}", "limit": None, "validation": 0.25, "max_gen_toks": 90}


def test_prompts_without_a_task(options: DistillOptions, tmp_path: Path) -> None:
    """The end token alone ends answers, and some prompts validate."""
    note = distill(unlabelled(options, tmp_path, **ALONE))["material"]["lessons"]
    assert [note[f"{part}_prompts"]["questions"] for part in ("train", "validation")] == [8, 2]
    assert note["train_prompts"]["kept"] == 8 - note["train_prompts"]["cut_off"] > 0


@pytest.mark.parametrize("train_on", ["task", "teacher"])
def test_the_teacher_of_no_training_is_not_asked(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_on: str
) -> None:
    """Without epochs nothing would learn its answers."""
    monkeypatch.setattr(LanguageHost, "taught", lambda *_: pytest.fail("the teacher is asked"))
    options = unlabelled(options, tmp_path, train_on=train_on, method="random", stages=1, epochs=0)
    assert "lessons" not in distill(options)["material"]


def test_prompts_that_leave_no_room_for_an_answer_are_too_long(options: DistillOptions, tmp_path: Path) -> None:
    """The model would be given the end of such a prompt alone."""
    options = unlabelled(options, tmp_path, max_gen_toks=450, max_length=512)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "word " * n}) + "\n" for n in (1, 30, 2)))
    host: Any = make_host(options)
    examples = host.examples()
    prompts = [example for example in examples.train if not example.is_problem]
    assert sum(512 - 450 < len(prompt.ids) < 512 for prompt in prompts) == 1 and len(prompts) == 3
    taught = host.taught(examples, tmp_path)
    assert taught.note["lessons"]["train_prompts"]["too_long"] == 1
    assert {text.start for text in taught.train if not text.is_problem} <= {len(prompt.ids) for prompt in prompts}


def test_stages_remove_whole_layers(options: DistillOptions) -> None:
    """One layer of four in each stage."""
    pruning = {"budget": "parameters", "parts": "layers"}
    note = distill(replace(options, method="block_influence", pruning=pruning, ratio=0.5))
    assert len(map_model(load_pretrained(options.output)).attention) == 2
    assert len(note["stages"]) == 2 and [len(stage["heads"]) for stage in note["stages"]] == [3, 2]
