"""What a student learns by and from: terms of the loss, teachers, tasks, prompts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lmeval_prune import InputError, load_pretrained, map_model
from lmeval_prune.checkpoints.loading import kept_layers
from lmeval_prune.cli import main
from lmeval_prune.distillation import language_host
from lmeval_prune.distillation.losses import LayerMap
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill, make_host
from lmeval_prune.distillation.trainer import DistillTrainer
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.planning.own_answers import Answerer, OwnAnswer
from lmeval_prune.pruners.calibration import encode, encode_continuation
from lmeval_prune.surgery.cut import cut_to
from lmeval_prune.training.questions import QuestionSearch, split_by_question
from tests.athena_hosts import language_options
from tests.test_distillation import losses
from tests.test_own_answers import task_file
from tests.tiny_models import tiny

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def options(tiny_folder: Path, tmp_path: Path) -> DistillOptions:
    """By the response term."""
    return language_options(tiny_folder, tmp_path, terms=("response",))


# ---------------------------------------------------------------- layers and heads


def test_a_map_follows_the_stages() -> None:
    """Heads are those of the model before the first stage, also of layers that moved when others went."""
    first = {"kept_heads": {"L0": [0, 2, 3], "L1": [1], "L2": [0, 1]}}
    second = {"kept_heads": {"L0": [1], "L2": [1]}, "kept_layers": {"L0": "L0", "L1": "L2"}}
    assert LayerMap.of([first]).layers == {"L0": "L0", "L1": "L1", "L2": "L2"}
    both = LayerMap.of([first, second])
    assert both == LayerMap({"L0": "L0", "L1": "L2"}, {"L0": [2], "L1": [1]})
    third = {"kept_heads": {"L1": [0]}, "kept_layers": {"L0": "L0", "L1": "L1"}}  # L0 has no attention any more
    assert LayerMap.of([first, second, third]) == LayerMap({"L0": "L0", "L1": "L2"}, {"L1": [1]})
    assert kept_layers(first) == {"L0": "L0", "L1": "L1", "L2": "L2"}


@pytest.mark.parametrize("teachers", ["previous", "first"])
def test_students_are_compared_with_the_parts_of_their_teacher(
    options: DistillOptions, monkeypatch: pytest.MonkeyPatch, teachers: Any
) -> None:
    """At the start of each stage, query weights of student heads equal those of their teacher heads."""
    counts: list[tuple[int, int]] = []

    def compared(self: DistillTrainer) -> Any:
        assert self.features is not None
        student, teacher = (map_model(model).attention for model in (self.student, self.teacher))
        for layer, heads, position in zip(student, self.features.heads, self.features.teacher_numbers, strict=True):
            for index, head in enumerate(heads):
                student_rows, teacher_rows = layer.rows("q", index), teacher[position].rows("q", head)
                rows = (
                    student_rows.module.weight[student_rows.start : student_rows.stop],
                    teacher_rows.module.weight[teacher_rows.start : teacher_rows.stop],
                )
                assert torch.equal(*rows)
        counts.append((sum(x.heads for x in student), sum(x.heads for x in teacher)))
        return {"best_epoch": 0, "log": []}

    monkeypatch.setattr(DistillTrainer, "run", compared)
    distill(replace(options, stages=2, terms=("feature",), teacher=teachers))
    assert counts == [(6, 8), (4, 6 if teachers == "previous" else 8)]


def test_a_cut_model_is_taught_by_the_model_before_its_cuts(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compensation first: the cut model is the student, and the whole model the teacher of its heads."""
    whole = load_pretrained(options.pretrained)
    tokenizer = AutoTokenizer.from_pretrained(options.pretrained)
    cut_to(tmp_path / "once", whole, Plan(("L0H0", "L0H2"), {"L0": "0-9"}), tokenizer)
    cut_to(tmp_path / "twice", load_pretrained(str(tmp_path / "once")), Plan(("L1H1", "L1H3")), tokenizer)
    seen: list[Any] = []
    monkeypatch.setattr(DistillTrainer, "run", lambda self: seen.append(self.features) or {"best_epoch": 0, "log": []})
    taught = replace(options, ratio=0.0, terms=("feature",), teacher=options.pretrained)
    for name, heads in (("once", [[1, 3], [0, 1, 2, 3]]), ("twice", [[1, 3], [0, 2]])):
        distill(replace(taught, pretrained=str(tmp_path / name), output=str(tmp_path / f"of_{name}")))
        assert seen[-1].heads == heads and seen[-1].teacher_numbers == [0, 1]


# ---------------------------------------------------------------- lengths


def test_lessons_are_at_most_as_long_as_the_positions(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher with more positions than the student: its longer answers are left out."""

    def answers(answerer: Answerer, model: Any, questions: Any) -> list[OwnAnswer]:
        prompts = [tuple(answerer.tokenizer(question.prompt)["input_ids"]) for question in questions]
        counts = itertools.cycle((249, 250, 251, 330))
        return [OwnAnswer(p, (6,) * (next(counts) - len(p) - 1) + (2,), "", False) for p in prompts]

    monkeypatch.setattr(Answerer, "answers", answers)
    monkeypatch.setattr(Answerer, "outcomes", lambda self, questions, answers: [True] * len(questions))
    short, tokenizer = str(tmp_path / "short"), AutoTokenizer.from_pretrained(options.pretrained)
    tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=250).save_pretrained(short)
    tokenizer.save_pretrained(short)
    taught = {"train_on": "teacher", "max_gen_toks": 100}
    whole = replace(options, pretrained=short, teacher=options.pretrained, epochs=1, **taught)
    note = distill(whole)["material"]["lessons"]["train"]
    assert note["kept"] + note["too_long"] == note["questions"] and note["kept"] and note["too_long"]


# ---------------------------------------------------------------- tasks of one's own


def sums_with_a_test(folder: Path) -> str:
    """Write a task with 20 training questions and a test question."""
    folder.mkdir()
    (folder / "test.jsonl").write_text(json.dumps({"question": "What is 1 + 2?", "answer": "3"}))
    files = {"train": str(folder / "rows.jsonl"), "test": str(folder / "test.jsonl")}
    return task_file(folder, dataset_kwargs={"data_files": files, "cache_dir": str(folder)}, test_split="test")


def test_a_task_of_ones_own_has_its_splits_in_its_file(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe's split is refused, and the last line evaluates the task as it stands."""
    sums_with_a_test(tmp_path / "own tasks")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "distill: {test: fold0, ratio: 0.5, pruning: {unit: balanced}, stages: 1, epochs: 0, terms: [response]}"
    )
    words = ["distill", "--config", str(recipe), "--pretrained", str(tiny_folder), "--output", str(tmp_path / "out")]
    words += ["--task", "sums", "--include_path", str(tmp_path / "own tasks"), "--best_by", "none"]
    assert main(words) == 2
    assert "--test" in capsys.readouterr().err
    assert main([*words, "--test", ""]) == 0
    assert f"--tasks sums --include_path '{tmp_path / 'own tasks'}'\n" in capsys.readouterr().out


def test_problems_that_ask_the_same_are_on_one_side(options: DistillOptions, tmp_path: Path) -> None:
    """Else the best epoch would be that of problems that are learned."""
    name = sums_with_a_test(tmp_path / "own")
    rows = [{"question": f"What is {n % 5} + {n % 5}?", "answer": str(n)} for n in range(20)]
    (tmp_path / "own" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for seed in range(4):
        own = replace(options, task=name, test=None, limit=None, validation=0.2, seed=seed)
        examples = make_host(own).examples()
        train, validation = (
            {problem.question.prompt for problem in part} for part in (examples.train, examples.validation)
        )
        assert len(examples.validation) == 4 and len(examples.train) == 16
        assert len(validation) == 1 and len(train) == 4 and not train & validation
    (tmp_path / "own" / "rows.jsonl").write_text("\n".join([json.dumps(rows[0])] * 20))
    with pytest.raises(InputError, match="are too few to train and validate"):
        make_host(own).examples()


def test_the_file_of_a_task_may_not_change(options: DistillOptions, tmp_path: Path) -> None:
    """Of a distillation that is complete; what nothing is learned from may."""
    path = Path(sums_with_a_test(tmp_path / "own"))
    own = replace(options, task=str(path), test=None, epochs=0)
    distill(own)
    before = json.loads(path.read_text())
    for changes in ({"doc_to_text": "Now: {{question}}"}, {"target_delimiter": "\n"}):
        path.write_text(json.dumps(before | changes))
        with pytest.raises(InputError, match=r"student\S* was made with task_prompts="):
            distill(own)
    path.write_text(json.dumps(before | {"metadata": {"version": 2}}))
    assert len(distill(own)["stages"]) == 1


def test_a_teacher_with_more_rows_teaches_the_rows_of_the_student(options: DistillOptions, tmp_path: Path) -> None:
    """The vocabularies of a family's models are padded to different numbers of rows."""
    teacher = load_pretrained(options.pretrained)
    teacher.resize_token_embeddings(teacher.config.vocab_size + 5)
    teacher.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(options.pretrained).save_pretrained(tmp_path / "teacher")
    taught = replace(options, teacher=str(tmp_path / "teacher"), output=str(tmp_path / "taught"))
    for each in (options, taught):
        distill(each)
    assert losses(taught.output) == losses(options.output)


@pytest.mark.parametrize(
    ("questions", "count", "first"),
    [
        ("aabcd", 2, [0, 1]),
        ("abbbc", 2, [0, 4]),  # three of one question are more than are left
        ("aaabb", 1, [3, 4]),  # each question has more
        ("aaa", 1, [0, 1, 2]),
        ("abc", 0, []),
    ],
)
def test_problems_of_a_question_that_are_more_than_are_split_off(questions: str, count: int, first: list[int]) -> None:
    split, others = split_by_question(range(len(questions)), questions, count)
    assert split == first and sorted(others + split) == [*range(len(questions))]


def test_questions_that_differ_in_spaces_or_case_are_the_same(options: DistillOptions, tmp_path: Path) -> None:
    name = sums_with_a_test(tmp_path / "own")
    with (tmp_path / "own" / "rows.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"question": " what IS  1 + 2?\n", "answer": "3"}))
    own = replace(options, task=name, test=None, limit=None)
    (tmp_path / "own" / "test.jsonl").write_text(
        "\n".join(json.dumps({"question": f"What is 1 + {n}?", "answer": "3"}) for n in range(2, 6))
    )
    examples = make_host(own).examples()
    assert examples.note["repeated"] == 1 and examples.note["train"] + examples.note["validation"] == 20


def test_a_question_without_a_field_is_the_same_in_a_chat(options: DistillOptions, tmp_path: Path) -> None:
    """So that a model that was trained on it in a chat template is known to be, without one, too."""
    folder = tmp_path / "own"
    name = sums_with_a_test(folder)
    settings = json.loads(Path(name).read_text()) | {"doc_to_text": "Asked: {{asked}}", "num_fewshot": 2}
    Path(name).write_text(json.dumps(settings))
    for path in (folder / "rows.jsonl", folder / "test.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{"asked": row["question"], "answer": row["answer"]} for row in rows]
        path.write_text("\n".join(map(json.dumps, rows)))
    keys = [
        make_host(replace(options, task=name, test=None, limit=None, chat=chat)).examples().note["trained_on"]
        for chat in (False, True)
    ]
    assert keys[0] == keys[1] and len(keys[0]) == 20


@pytest.mark.parametrize("scheme", ["always", "first", "never", "normalizer"])
def test_an_answer_follows_its_prompt_without_a_further_space(tiny_folder: Path, scheme: str) -> None:
    """Also by tokenizers that put a space before a text, as those of SentencePiece."""
    text = "Question: What is 4 plus 2?\nAnswer: 42 43 a"
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if scheme == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if scheme != "never" else []))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    backend.train_from_iterator([text] * 3, trainers.BpeTrainer(vocab_size=200, special_tokens=[*special.values()]))
    spaced = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    for tokenizer in (spaced, AutoTokenizer.from_pretrained(tiny_folder)):
        for prompt, answer in (
            ("Question: What is 4 plus 2?\nAnswer:", " 42"),
            ("Answer:\n", "42"),
            ("plus 2?", "\n4"),
        ):
            answered = [*encode(tokenizer, prompt), *encode_continuation(tokenizer, answer)]
            assert tokenizer.decode(answered, clean_up_tokenization_spaces=False) == prompt + answer


# ---------------------------------------------------------------- prompts


def test_prompts_with_test_questions_are_left_out(options: DistillOptions, tmp_path: Path) -> None:
    question = "Ann has 3 red caps and 12 blue ones. Ben lost 4. How many caps has Ann?"
    search = QuestionSearch([question, "How much money is it now, all in all?"])
    assert search.is_in("They say: ann has 3 red caps, and 12 blue ones; Ben lost 4. How many?")
    assert search.is_in("… how much money is it now, all in all …")
    assert not search.is_in("Ann has 3 red caps and 13 blue ones. Ben lost 4.")
    assert not search.is_in("How much money is it?") and not QuestionSearch([]).is_in("anything at all")
    path = tmp_path / "prompts.jsonl"
    rows = [f"{question} " * 3, "Other words are here.", "More words are here."]
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    host = make_host(replace(options, prompts=str(path), task=None, test=None, answer="{}"))
    prompts, counts = host.prompts([{"question": question}])  # type: ignore[attr-defined]
    assert counts["with_test_questions"] == 1 and counts["documents"] == 3
    assert {prompt.question.prompt for prompt in prompts if prompt.question} == {*rows[1:]}


@pytest.mark.parametrize("question", ["", "???", " \n", "Why?", "What is the capital of France?", "多少?"])
def test_a_question_of_few_words_excludes_no_texts(question: str) -> None:
    search = QuestionSearch([question])
    texts = ("", "unrelated words", f"He asked: {question} Nobody knew the capital of France.", "???")
    assert not any(search.is_in(text) for text in texts if text != question)
    assert search.is_in(question) == any(map(str.isalnum, question))


def test_characters_of_chinese_questions_are_words() -> None:
    search = QuestionSearch(["小明有3个苹果，买了5个，一共有多少？"])
    assert search.is_in("第一题。小明有3个苹果，买了5个，一共有多少？答：8个。")
    assert not search.is_in("小明有3个苹果，买了6个，一共有多少？")


def test_a_short_test_question_in_the_task_s_words_is_left_out(options: DistillOptions, tmp_path: Path) -> None:
    """A prompt with the task's instructions is not the question alone."""
    path, host = tmp_path / "a.jsonl", make_host(options)
    test = [{**row, "question": "How many are left?"} for row in host.rows.test[:1]]
    written = host.task.doc_to_text(test[0])
    assert written != "How many are left?"
    path.write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in (written, f"{written.upper()} \n", f"{written} Now?"))
    )
    host = make_host(replace(options, prompts=str(path)))
    assert host.prompts(test)[1]["with_test_questions"] == 2


def test_problems_without_an_answer_are_left_out(options: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any prompt: the answer is empty, or so is the prompt before a single token, which nothing predicts."""
    host = make_host(replace(options, answer="{}"))
    answers = {0: "", 1: "5", 2: "56"}
    numbers = iter(range(8))
    monkeypatch.setattr(type(host), "prompt", lambda *_: "")
    monkeypatch.setattr(language_host, "target_of", lambda *_: answers.get(next(numbers), "78"))
    monkeypatch.setattr(host.task.config, "target_delimiter", "")
    examples = host.examples()
    assert examples.note["empty"] == 2 and examples.note["train"] + examples.note["validation"] == 6
    for example in (*examples.train, *examples.validation):
        assert host.items(host.collate([example])) == 2
