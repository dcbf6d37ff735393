"""Stages of a distillation: any pruner with its compensation, own calibration text, and what a teacher's answers teach."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lmeval_prune import InputError, load_pretrained, map_model
from lmeval_prune.artefacts import read_json
from lmeval_prune.checkpoints.pruned import read_manifest
from lmeval_prune.decoding import Engine
from lmeval_prune.distillation.corpus import Prompt, Text, read_corpus
from lmeval_prune.distillation.host import read_note
from lmeval_prune.distillation.language_host import LanguageHost
from lmeval_prune.distillation.lessons import Problem, read_lessons
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill, make_host
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.models.answer_store import AnswerStore, read_answers
from lmeval_prune.planning.own_answers import calibration_text
from lmeval_prune.pruners import score_store
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.layer_store import LayerStore
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import Part
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.pruners.score_store import Sums
from lmeval_prune.surgery.cut import cut, cut_to
from tests.athena_hosts import data_folder
from tests.kills import Killed, counted, run_killed
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
    return DistillOptions(
        pretrained=model_folder,
        output=str(tmp_path / "student"),
        data_dir=str(data_folder(tmp_path / "data")),
        task="prune_asdiv_a_equation",
        test="fold0",
        limit=10,
        validation=0.2,
        ratio=0.3,
        budget="parameters",
        stages=2,
        epochs=0,
        max_length=400,
        feature=False,
    )


def by_hand(options: DistillOptions, **more: Any) -> Any:
    """Score, compensate and cut twice, by the shares of the unpruned model that eq. 5 gives."""
    host: Any = make_host(options)
    examples = host.examples()
    model = host.read(options.pretrained)
    pruner = make_pruner(options.method, options.options)
    whole = None
    for share in (options.ratio / 2, options.ratio):
        model_map = map_model(model)
        text = host.calibration(examples, model, None)
        (first, *_) = stages(pruner, model_map, PruneOptions(share, unit="group", **more), text)
        whole = whole or first.provenance["parameters"]["removable"]
        left = first.provenance["parameters"]["removable"]
        ratio = (share * whole - (whole - left)) / left
        *_, plan = stages(pruner, model_map, PruneOptions(ratio, unit="group", steps=options.steps, **more), text)
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
    options = replace(options, method=method, steps=steps, **more)
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


def test_a_budget_of_parameters_needs_no_unit(options: DistillOptions) -> None:
    """Groups where heads share keys and values."""
    distill(replace(options, method="gisp", stages=1))
    removed = read_note(options.output)["stages"][0]["removed"]
    assert removed["heads"] == 2 * removed["kv_heads"] and not removed["fillers"]


def test_a_killed_stage_resumes_layer_by_layer(options: DistillOptions, tmp_path: Path) -> None:
    options = replace(options, method="slimgpt")
    distill(replace(options, output=str(tmp_path / "whole")))
    run_killed(LayerStore, "save", 6, lambda: distill(options))
    assert len(list(Path(f"{options.output}.distilling/stage2.scoring").glob("*.safetensors"))) == 2
    distill(options)
    first, second = (load_pretrained(folder).state_dict() for folder in (options.output, str(tmp_path / "whole")))
    assert all(torch.equal(first[name], second[name]) for name in second)


# ---------------------------------------------------------------- own calibration text


def calibration_texts(options: DistillOptions) -> list[dict[str, Any]]:
    manifest = read_manifest(options.output)
    assert manifest is not None
    return [stage["plan"]["made"]["calibration"] for stage in manifest["stages"]]


@pytest.mark.parametrize("regenerate", [1, 0, 2])
def test_stages_read_answers_of_the_model_that_is_to_give_them(options: DistillOptions, regenerate: int) -> None:
    options = replace(
        options,
        method="flap",
        calibrate_on="own",
        max_gen_toks=10,
        regenerate=regenerate,
        stages=3,
        prompts_count=False,
        calibration=6,
    )
    distill(options)
    texts = calibration_texts(options)
    assert all(text["text"] == "own answers to 6 training problems" for text in texts)
    hashes = [text["sha256"] for text in texts]
    expected = {1: [0, 1, 2], 2: [0, 0, 2], 0: [0, 0, 0]}[regenerate]
    assert [hashes.index(digest) for digest in hashes] == expected
    assert len(list(read_answers(Path(f"{options.output}.responses")))) == 6 * len({*expected})


def test_own_text_is_of_the_problems_that_are_drawn(options: DistillOptions) -> None:
    options = replace(options, calibrate_on="own", max_gen_toks=10, calibration=6)
    host: Any = make_host(options)
    examples, model = host.examples(), host.read(options.pretrained)
    text = host.calibration(examples, model, None)
    drawn = host.drawn(examples.questions)
    answers = host.answerer.answers(model, [problem.question for problem in drawn])
    expected = calibration_text(text.name, answers, host.answerer.sampling, True)
    assert text.record() == expected.record() and len(drawn) == 6
    rows = [row[real.bool()].tolist() for row, real in zip(*text.batches[0], strict=True)]
    ordered = sorted(zip(drawn, answers, strict=True), key=lambda pair: len(pair[1][0].prompt) + len(pair[1][0].tokens))
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
        "samples": 3,
        "sample_temperature": 1.5,
        "max_gen_toks": 8,
        "epochs": 1,
        "stages": 1,
        "ratio": 0.25,
        "batch": 4,
        "answer": "\\boxed{{}}",
        **changes,
    }
    return replace(options, **settings)


@pytest.mark.parametrize("unsolved", ["target", "drop"])
def test_a_student_learns_the_answers_that_are_kept(
    options: DistillOptions, tmp_path: Path, unsolved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the answers is right here, by a scorer that looks at the last character."""
    options = teaching(options, tmp_path, unsolved=unsolved, validation=0.0)
    host: Any = make_host(options)

    def score(documents: Any, texts: Any) -> list[bool]:
        return [ord(text[-1]) % 4 == 0 if text else False for text in texts]

    monkeypatch.setattr(
        "lmeval_prune.tasks.tries.outcomes", lambda task, metric, documents, texts: score(documents, texts)
    )
    examples = host.examples()
    answers = host.answerer.answers(host.read(options.pretrained), [p.question for p in examples.questions])
    note = distill(options)
    counts = note["material"]["lessons"]["train"]
    lessons = read_note(options.output)["material"]["lessons"]
    assert lessons["train"] == counts and counts["questions"] == len(examples.questions) == 10
    expected, solved = [], 0
    for problem, several in zip(examples.questions, answers, strict=True):
        right = [a for a in several if not a.cut_off and score([], [a.text])[0]]
        texts = [
            ([*prompt, *tokens], len(prompt)) for prompt, tokens in dict.fromkeys((a.prompt, a.tokens) for a in right)
        ]
        solved += bool(texts)
        expected += texts or ([(problem.ids, problem.start)] if unsolved == "target" else [])
    assert counts["unsolved"] == 10 - solved and counts["answers"] == 30 and 0 < solved < 10
    assert counts["right"] == sum(score([], [a.text])[0] for several in answers for a in several)
    assert counts["kept"] == len(expected) - (10 - solved if unsolved == "target" else 0)
    host.ask_teacher(examples, tmp_path, torch.device("cpu"))
    learned = (read_lessons(tmp_path) or {})["texts"]["train"]
    assert [(text["ids"], text["start"]) for text in learned] == expected
    rows = [json.loads(line) for line in Path(f"{options.output}.lessons.jsonl").read_text().splitlines()]
    targets = [(problem.ids, problem.start) for problem in examples.questions]
    for row, (ids, start) in zip([row for row in rows if row["part"] == "train"], expected, strict=True):
        assert (row["prompt"], row["answer"]) == tuple(map(host.tokenizer.decode, (ids[:start], ids[start:])))
        assert row["source"] == "teacher" or (ids, start) in targets
    assert sum(row["source"] == "target" for row in rows if row["part"] == "train") == (
        10 - solved if unsolved == "target" else 0
    )


def test_problems_calibrate_and_are_compared_whatever_is_learned(options: DistillOptions, tmp_path: Path) -> None:
    """One text a problem, with its target, however many answers of the teacher are kept."""
    options = teaching(options, tmp_path, keep_answers="all", limit=20, validation=0.4)
    host: Any = make_host(options)
    examples = host.examples()
    host.ask_teacher(examples, tmp_path, torch.device("cpu"))
    taught = host.taught(examples, tmp_path)
    assert len(taught.train) > len(examples.train) and len(taught.validation) > len(examples.validation) == 8
    model = host.read(options.pretrained)
    first, second = (host.calibration(source, model, None).record() for source in (examples, taught))
    assert first == second
    compared = host.compared_texts(taught)
    assert [text.document[1] for text in compared] == [problem.question.number for problem in examples.validation]
    assert [[*text.context, *text.continuation] for text in compared] == [
        problem.ids for problem in examples.validation
    ]


def test_lessons_are_written_once_and_survive_a_kill(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the teacher answers, then while the student trains; the result is that of an uninterrupted run."""
    options = teaching(options, tmp_path, keep_answers="all")
    distill(replace(options, output=str(tmp_path / "whole")))
    work = Path(f"{options.output}.distilling")
    for target, name, count in ((AnswerStore, "add", 7), (Plan, "__post_init__", 0)):
        run_killed(target, name, count, lambda: distill(options))
        assert (read_lessons(work) is not None) == (target is Plan)
    assert len(list(read_answers(Path(f"{options.output}.responses")))) == 30
    rows = tmp_path / "task" / "rows.jsonl"
    before = rows.read_text()
    rows.write_text(before.replace("What is", "How much is"))
    with pytest.raises(InputError, match=r"was made with other data \(the problems\)"):
        distill(options)
    rows.write_text(before)
    monkeypatch.setattr(Engine, "decode", lambda *_: pytest.fail("the teacher was asked again"))
    distill(options)
    first, second = (load_pretrained(folder).state_dict() for folder in (options.output, str(tmp_path / "whole")))
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_another_teacher_is_asked(options: DistillOptions, tmp_path: Path) -> None:
    model = load_pretrained(options.pretrained)
    cut_to(tmp_path / "teacher", model, Plan("L0H0-1"), AutoTokenizer.from_pretrained(options.pretrained))
    both = [teaching(options, tmp_path, keep_answers="all"), teaching(options, tmp_path, keep_answers="all")]
    both[1] = replace(both[1], teacher=str(tmp_path / "teacher"), output=str(tmp_path / "other"))
    texts = []
    for run_options in both:
        host: Any = make_host(run_options)
        host.ask_teacher(host.examples(), tmp_path / Path(run_options.output).name, torch.device("cpu"))
        texts.append((read_lessons(tmp_path / Path(run_options.output).name) or {})["texts"])
    assert texts[0] != texts[1]


def test_a_teacher_without_an_answer_to_keep_is_one_line(options: DistillOptions, tmp_path: Path) -> None:
    """A random model solves no problem."""
    with pytest.raises(InputError, match=r"to 8 training problems too few are kept; .*unsolved=target") as error:
        distill(teaching(options, tmp_path, unsolved="drop"))
    assert "\n" not in str(error.value)
    note = distill(teaching(options, tmp_path, output=str(tmp_path / "fallback")))
    assert note["material"]["lessons"]["train"]["unsolved"] == 8


PROMPTS = [f"What is {n} plus {n + 1}?" for n in range(9)]


def unlabelled(options: DistillOptions, tmp_path: Path, **changes: Any) -> DistillOptions:
    """A training that reads nine prompts without answers, an empty one, a test question and a repeated one, as well."""
    rows = [*PROMPTS, " ", "What is 50 + 50?", PROMPTS[3]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"p": prompt}) + "\n" for prompt in rows))
    corpus = {"corpus": str(tmp_path / "prompts.jsonl"), "corpus_prompt": "p", "corpus_answers": "teacher"}
    greedy = {"samples": 1, "sample_temperature": 0.0, "train_on": "task"}
    return teaching(options, tmp_path, **{**greedy, **corpus, **changes})


@pytest.mark.parametrize("chat", [False, True])
def test_the_teacher_answers_prompts_of_a_corpus(options: DistillOptions, tmp_path: Path, chat: bool) -> None:
    """Its greedy answers up to a stop text, by `generate`, with the end token; those that were cut off are left out."""
    options = unlabelled(options, tmp_path, chat=chat)
    host: Any = make_host(options)
    examples = host.examples()
    host.ask_teacher(examples, tmp_path, torch.device("cpu"))
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
    problems = [example for example in taught.train if isinstance(example, Problem)]
    learned = [example for example in taught.train if not isinstance(example, Problem)]
    assert {(tuple(lesson.ids), lesson.start) for lesson in learned} == expected and len(learned) == len(expected) > 0
    assert problems == examples.questions and len(problems) == 8
    counts = taught.note["lessons"]["corpus_train"]
    assert counts["questions"] == len(PROMPTS) and counts["cut_off"] == cut_off and "right" not in counts
    assert [taught.note["corpus"][name] for name in ("empty", "with_test_questions", "repeated")] == [1, 1, 1]
    assert set(taught.note["lessons"]) == {"corpus_train"}
    assert len(taught.lengths) == len(taught.train)


def test_the_teacher_can_answer_problems_and_prompts(options: DistillOptions, tmp_path: Path) -> None:
    note = distill(unlabelled(options, tmp_path, train_on="teacher", keep_answers="all", unsolved="target"))["material"]
    counts = note["lessons"]
    assert counts["train"]["questions"] == 8 and counts["corpus_train"]["questions"] == len(PROMPTS)
    assert {"unsolved", "right"} <= counts["train"].keys() and "unsolved" not in counts["corpus_train"]


ALONE: dict[str, Any] = {
    **{"task": None, "answer": "{}", "limit": None, "chat": False, "validation": 0.25},
    **{"max_gen_toks": 60, "samples": 4, "sample_temperature": 1.5},
}


def test_prompts_without_a_task(options: DistillOptions, tmp_path: Path) -> None:
    """The end token alone ends answers, and some prompts validate."""
    note = distill(unlabelled(options, tmp_path, **ALONE))["material"]["lessons"]
    assert [note[f"corpus_{part}"]["questions"] for part in ("train", "validation")] == [8, 2]
    assert note["corpus_train"]["kept"] == 32 - note["corpus_train"]["cut_off"] > 0


@pytest.mark.parametrize("alone", [False, True])
def test_prompts_are_not_called_problems(
    options: DistillOptions,
    tmp_path: Path,
    alone: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither where they are counted, nor where their answers are cut off."""
    changes = ALONE if alone else {"max_gen_toks": 3}
    options = unlabelled(options, tmp_path, **changes, method="norm_entropy", stages=1, epochs=0 if alone else 1)
    distill(options)
    printed = capsys.readouterr().out
    assert ("problems: train 8, validation 2," in printed) == (not alone) and "problems: train 17" not in printed
    assert f"corpus: {'train 8, validation 2, texts 10' if alone else 'texts 9'}, documents 12," in printed
    assert f"the corpus gives {10 if alone else 9} texts, not corpus_texts=1000" in printed
    assert "corpus: " in caplog.text and "of the answers were cut off" in caplog.text
    assert "sums: " not in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_gen_toks": 1, "samples": 1, "sample_temperature": 0.0},
            r"none is whole \(corpus_train: 8 of 8 cut off, 0 too long\); give more max_gen_toks",
        ),
        ({"train_on": "teacher"}, "answers of a model are to the problems of a task"),
        ({"corpus_field": "answer"}, "corpus_field is for corpus_answers=data; give that, or leave out corpus_field"),
        ({"corpus_prompt": None}, "corpus_answers is for a corpus with corpus_prompt"),
        ({"corpus_prompt": "q"}, "has no text in q; it has p: name them by corpus_prompt, or rename them"),
        (
            {
                "corpus_answers": "data",
                "corpus_field": "",
                "max_gen_toks": None,
                "samples": 1,
                "sample_temperature": 0.0,
            },
            "has no text in ; it has p: name them by corpus_prompt and corpus_field",
        ),
        ({"pretrained": "no template", "chat": True}, "no template has no chat template; leave chat out"),
    ],
)
def test_mistakes_with_prompts_are_one_line(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(options.pretrained, "no template")
    for file in (Path("no template/chat_template.jinja"), Path("no template/tokenizer_config.json")):
        if file.suffix == ".jinja":
            file.unlink(missing_ok=True)
        else:
            settings = json.loads(file.read_text())
            settings.pop("chat_template", None)
            file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match=message) as error:
        distill(unlabelled(options, tmp_path, **{**ALONE, **changes}))
    assert "\n" not in str(error.value)


def test_prompts_that_differ_in_spaces_alone_are_repeated(options: DistillOptions, tmp_path: Path) -> None:
    """Whatever a chat template puts around them."""
    options = unlabelled(options, tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"p": p}) + "\n" for p in ("Say so.", " Say  so.\n")))
    host: Any = make_host(options)
    corpus = read_corpus(options, host.tokenizer, [], lambda prompt: f"<{prompt}>")
    assert corpus.note["repeated"] == 1 and len(corpus.texts) == 1


@pytest.mark.parametrize("train_on", ["task", "teacher"])
def test_the_teacher_of_no_training_is_not_asked(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_on: str
) -> None:
    """Without epochs nothing would learn its answers."""
    monkeypatch.setattr(LanguageHost, "ask_teacher", lambda *_: pytest.fail("the teacher is asked"))
    options = unlabelled(options, tmp_path, train_on=train_on, method="random", stages=1, epochs=0)
    assert "lessons" not in distill(options)["material"]
    assert not Path(f"{options.output}.lessons.jsonl").exists()


@pytest.mark.parametrize("long", [2, 5])
def test_few_prompts_that_are_learned_are_a_line(
    options: DistillOptions, tmp_path: Path, long: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = unlabelled(options, tmp_path, max_gen_toks=450, max_length=512, method="random", stages=1, epochs=1)
    prompts = [*PROMPTS[:3], *("word " * (30 + n) for n in range(long))]  # these leave no room for an answer
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"p": prompt}) + "\n" for prompt in prompts))
    counts = distill(options)["material"]["lessons"]["corpus_train"]
    assert long <= counts["questions_without"] < counts["questions"] == long + 3
    few = 2 * counts["questions_without"] > counts["questions"]
    assert few == (long == 5) == ("are not learned; give more max_gen_toks" in capsys.readouterr().out)


def test_prompts_that_leave_no_room_for_an_answer_are_too_long(options: DistillOptions, tmp_path: Path) -> None:
    """The model would be given the end of such a prompt alone."""
    options = unlabelled(options, tmp_path, max_gen_toks=450, max_length=512)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"p": "word " * n}) + "\n" for n in (1, 30, 2)))
    host: Any = make_host(options)
    assert host.positions == 512
    examples = host.examples()
    prompts = [example for example in examples.train if isinstance(example, Prompt)]
    assert sum(512 - 450 < len(prompt.ids) < 512 for prompt in prompts) == 1 and len(prompts) == 3
    host.ask_teacher(examples, tmp_path, torch.device("cpu"))
    taught = host.taught(examples, tmp_path)
    assert taught.note["lessons"]["corpus_train"]["too_long"] == 1
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"p": "word " * 30}))
    with pytest.raises(InputError, match=r"0 of 0 cut off, 1 too long\); give fewer max_gen_toks or shorter prompts"):
        distill(replace(options, output=str(tmp_path / "long")))
    assert {text.start for text in taught.train if isinstance(text, Text)} <= {len(prompt.ids) for prompt in prompts}


def test_a_student_of_prompts_goes_on_after_a_kill(options: DistillOptions, tmp_path: Path) -> None:
    options = unlabelled(options, tmp_path)
    distill(replace(options, output=str(tmp_path / "whole")))
    run_killed(AnswerStore, "add", 4, lambda: distill(options))
    distill(options)
    folders = options.output, str(tmp_path / "whole")
    first, second = (load_pretrained(folder).state_dict() for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in second)
    resumed, lines = (Path(f"{folder}.lessons.jsonl").read_text().splitlines() for folder in folders)
    kept = read_json(Path(options.output) / "distillation.json")["material"]["lessons"]["corpus_train"]["kept"]
    assert resumed == lines and len(lines) == kept > 0
    host, prompts = make_host(options), [json.loads(line)["p"] for line in (tmp_path / "prompts.jsonl").open()]
    for row in map(json.loads, lines):
        assert row["part"] == "corpus_train" and any(prompt in row["prompt"] for prompt in prompts)
        assert row["source"] == "teacher"
        assert row["answer"].endswith(host.tokenizer.eos_token)  # type: ignore[attr-defined]
    shutil.rmtree(options.output)  # another model under the same name, without a teacher's answers
    distill(replace(options, corpus=None, corpus_prompt=None, corpus_answers="data", max_gen_toks=None))
    assert not Path(f"{options.output}.lessons.jsonl").exists()


def test_stages_remove_whole_layers(options: DistillOptions) -> None:
    """One layer of four in each stage."""
    depth = replace(options, method="block_influence", parts="layers", ratio=0.5)
    note = distill(depth)
    assert len(map_model(load_pretrained(depth.output)).attention) == 2
    assert len(note["stages"]) == 2 and [len(stage["heads"]) for stage in note["stages"]] == [3, 2]


def test_stages_whose_units_the_scores_decide_on(options: DistillOptions, capsys: pytest.CaptureFixture) -> None:
    """Blocks are of two sizes: a stage after one that had to remove more only trains."""
    blocks = replace(options, method="random", parts="blocks")
    note = distill(replace(blocks, stages=3, options={"seed": 1}, output=f"{options.output}3"))
    assert "stage 2 of 3 removes nothing, as the earlier ones removed enough\n" in capsys.readouterr().out
    assert [bool(stage["removed_blocks"]) for stage in note["stages"]] == [True, False, True]
    note = distill(replace(blocks, ratio=0.4, steps=2))
    assert [len(stage["heads"]) for stage in note["stages"]]


def test_a_killed_distillation_resumes_within_the_scores_of_a_stage(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """At the pass, in the first stage and in the second; progress is printed."""
    monkeypatch.setattr(score_store, "INTERVAL", 0.0)
    whole = replace(options, method="block_kl", ratio=0.5)
    again = replace(whole, output=str(tmp_path / "again"))
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch, Sums, "add")
        distill(whole)
    (passes,) = calls
    assert "step 1 of 1: scoring layers\n" in capsys.readouterr().out
    for kill in (1, passes - 2):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            counted(patch, Sums, "add", kill)
            distill(again)
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch, Sums, "add")
        distill(again)
    assert calls == [1]
    assert not (tmp_path / "again.distilling").exists()
    expected, actual = (load_pretrained(run_options.output).state_dict() for run_options in (whole, again))
    assert expected.keys() == actual.keys() and all(torch.equal(expected[key], x) for key, x in actual.items())
