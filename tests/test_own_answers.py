"""Own answers: those of `generate`, sampled by a seed, from the store after a kill, as calibration text and lessons."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import Plan
from lmeval_prune.cli import main
from lmeval_prune.decoding import Engine
from lmeval_prune.models.answer_store import AnswerStore, read_answers
from lmeval_prune.planning.own_answers import Answerer, OwnText, Question
from lmeval_prune.pruners.calibration import read_calibration
from lmeval_prune.pruners.options import TextOptions
from lmeval_prune.tasks.prompts import (
    answer_delimiter,
    exemplar_seed,
    prompt_of,
    question_of,
    target_of,
    training_documents,
)

LENGTH = 12


def task_file(folder: Path, answers: dict[int, str] | None = None, **changes: Any) -> str:
    """Write a task with 20 training questions and return its path; `answers` replaces the answer of some."""
    folder.mkdir(exist_ok=True)
    rows = [
        {"question": f"What is {n} + {n}?", "answer": (answers or {}).get(n, str(2 * n)), "n": n} for n in range(20)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(folder / "rows.jsonl"), "cache_dir": str(folder)},
        "training_split": "train",
        "test_split": "train",
        "output_type": "generate_until",
        "doc_to_text": "Asked: {{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\u0000"], "max_gen_toks": LENGTH, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
        **changes,
    }
    path = folder / "sums.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return str(path)


@pytest.fixture
def sums(tmp_path: Path) -> str:
    return task_file(tmp_path / "task")


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64).eval()


def own_text(folder: Path, name: str, model: Any, tokenizer: Any = None, **options: Any) -> OwnText:
    settings = TextOptions(calibrate_on="own", task=name, windows=options.pop("windows", 6), **options)
    return OwnText(model, tokenizer, settings, folder, None)


def answerer(tiny_folder: Path, folder: Path, name: str, **sampling: Any) -> tuple[Answerer, list[Question]]:
    task, documents = training_documents(name)
    questions = [Question(n, document, prompt_of(task, document)) for n, document in enumerate(documents)]
    return Answerer(task, AutoTokenizer.from_pretrained(tiny_folder), folder, **sampling), questions


def generated(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """Return what `generate` answers greedily."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        tokens = model.generate(ids, max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
    return tokens[0, len(prompt) :].tolist()


def test_greedy_answers_are_those_of_generate(tiny_folder: Path, sums: str, tmp_path: Path, model: Any) -> None:
    """In the task's prompts, with the chat template and without."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    for chat in (False, True):
        own = own_text(tmp_path / "store", sums, model, tokenizer, apply_chat_template=chat)
        text = own.of(model)
        (ids, real, _), *_ = text.batches
        expected = []
        for question in own.questions:
            prompt = f"Asked: What is {question.document['n']} + {question.document['n']}?"
            tokens = tokenizer.encode(f"u: {prompt}\na:" if chat else prompt)
            expected.append([*tokens, *generated(model, tuple(tokens))])
        assert [row[mask].tolist() for row, mask in zip(ids, real.bool(), strict=True)] == sorted(expected, key=len)
    assert len({question.number for question in own.questions}) == 6
    about = text.record()
    assert about["text"].startswith("own answers to training questions of") and about["windows"] == 6
    assert about["own_answers"]["questions"] == 6 and about["own_answers"]["temperature"] == 0


@pytest.mark.parametrize("sampler", ["default", "first_n"])
@pytest.mark.parametrize("further", [{}, {"question_too": 1}])
def test_a_training_question_is_not_its_own_exemplar(tmp_path: Path, sampler: str, further: dict[str, Any]) -> None:
    """Also one with further fields; other exemplars are drawn as lm-eval draws them."""
    name = task_file(tmp_path / "task", num_fewshot=4, fewshot_config={"sampler": sampler})
    task, documents = training_documents(name)
    lm_eval_task, _ = training_documents(name)
    own, changed, equal = [], 0, 0
    for document in documents:
        lm_eval_task.set_fewshot_seed(exemplar_seed({**document, **further}))
        text, expected = prompt_of(task, {**document, **further}), lm_eval_task.fewshot_context(document, 4)
        own.append(text.count(document["question"]))
        assert text.count("Asked:") == 5
        changed += expected.count(document["question"]) == 2
        equal += text == expected
    assert set(own) == {1}
    assert changed and changed + equal == len(documents)


def test_a_document_has_the_same_exemplars_in_every_run(tmp_path: Path) -> None:
    """In any order, and by a task that is loaded again; other documents have others."""
    name = task_file(tmp_path / "task", num_fewshot=2)
    task, documents = training_documents(name)
    prompts = [prompt_of(task, document) for document in documents]
    assert prompts == [prompt_of(training_documents(name)[0], document) for document in documents]
    assert prompts[::-1] == [prompt_of(task, document) for document in reversed(documents)]
    assert len({prompt.rpartition("Asked")[0] for prompt in prompts}) > len(prompts) // 2


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("prefix", [None, "That is ", "Twice {{n}} is"])
@pytest.mark.parametrize("shots", [0, 2])
def test_prompts_are_those_of_an_evaluation(
    tiny_folder: Path, tmp_path: Path, chat: bool, prefix: str | None, shots: int
) -> None:
    """With the begin of the answer, and exemplars as turns of their own, as by `lm_eval --apply_chat_template`."""
    further = {"gen_prefix": prefix} if prefix else {}
    more = {"num_fewshot": shots, "fewshot_config": {"sampler": "first_n"}, "description": "Add. ", **further}
    task, documents = training_documents(task_file(tmp_path / "task", **more))
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)

    def as_chat(messages: Any, add_generation_prompt: bool = True) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=bool(prefix)))

    settings = {"apply_chat_template": True, "fewshot_as_multiturn": True, "chat_template": as_chat} if chat else {}
    task.build_all_requests(limit=None, rank=0, world_size=1, **settings)
    expected = [instance.args[0] for instance in task.instances][5:]
    prompts = [prompt_of(task, document, tokenizer if chat else None) for document in documents[5:]]
    assert prompts == expected and prompts[0].count("Asked:") == 1 + shots
    assert {answer_delimiter(task, document, chat) for document in documents} == {
        "" if (chat and not prefix) or prefix == "That is " else " "
    }


@pytest.mark.parametrize("prefix", [None, "That is ", "It is"])
@pytest.mark.parametrize(
    ("kind", "chat"), [("multiple_choice", False), ("multiple_choice", True), ("loglikelihood", False)]
)
def test_answers_stand_where_an_evaluation_scores_them(
    tmp_path: Path, kind: str, prefix: str | None, chat: bool
) -> None:
    further: dict[str, Any] = {"gen_prefix": prefix} if prefix else {}
    if kind == "multiple_choice":
        further |= {"doc_to_choice": ["no", "yes"], "doc_to_target": 1}
    further |= {"output_type": kind, "generation_kwargs": None, "metric_list": [{"metric": "acc"}]}
    task, documents = training_documents(task_file(tmp_path / "task", **further))
    scored = task.construct_requests(documents[0], "", apply_chat_template=chat, doc_id=0, metadata=("task", 0, 1))
    last = scored[-1] if isinstance(scored, list) else scored
    assert answer_delimiter(task, documents[0], chat) + target_of(task, documents[0]) == last.args[1]


def test_a_question_is_the_same_with_and_without_exemplars(tmp_path: Path) -> None:
    task, documents = training_documents(task_file(tmp_path / "task", num_fewshot=2))
    assert [question_of(task, document) for document in documents] == [
        f"Asked: {document['question']}" for document in documents
    ]


def test_choices_in_the_text_of_a_document(tiny_folder: Path, tmp_path: Path) -> None:
    """As of Winogrande: the text with the right choice, and what follows it, is what is learned and read."""
    further = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{n % 2}}",
        "doc_to_choice": "{{['Even ' ~ n, 'Odd ' ~ n]}}",
        "doc_to_target": "is its kind",
        "metric_list": [{"metric": "acc"}],
        "generation_kwargs": None,
    }
    name = task_file(tmp_path / "task", **further)
    task, documents = training_documents(name)
    expected = [f"{'Odd' if n % 2 else 'Even'} {n}" for n in range(20)]
    assert [prompt_of(task, document) for document in documents] == expected
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert prompt_of(task, documents[3], tokenizer) == "u: Odd 3\na:"
    rows = [json.loads(line) for line in (tmp_path / "task" / "rows.jsonl").read_text().splitlines()]
    (tmp_path / "task" / "rows.jsonl").write_text("\n".join(json.dumps({"n": row["n"], "answer": "1"}) for row in rows))
    for chat in (False, True):
        text = read_calibration(tokenizer, TextOptions(task=name, windows=2, tokens=60, apply_chat_template=chat))
        written = "".join(tokenizer.decode(ids[real.bool()]) for ids, real, _ in text.batches)
        pattern = r"u: (Odd \d*[13579]|Even \d*[02468])\na: is its kind" if chat else r"(Odd|Even) \d+ is its kind\n"
        assert len(re.findall(pattern, written)) >= 2, written


@pytest.mark.parametrize(
    ("target", "choices", "text"),
    [
        (None, None, ""),
        ([], None, ""),
        (["7", "8"], None, "7"),
        (5, None, "5"),
        (1, ["no", "yes"], "yes"),
        (-1, ["no", "yes"], ""),
        ([1, 0], ["no", "yes"], "yes"),
        ("no", ["no", "yes"], "no"),
    ],
)
def test_the_target_of_a_document(target: Any, choices: Any, text: str) -> None:
    """A document without a target or label has an empty one, which is not learned."""
    config = {"doc_to_choice": choices}
    task = SimpleNamespace(doc_to_target=lambda _: target, doc_to_choice=lambda _: choices, get_config=config.get)
    assert target_of(task, {}) == text


def test_only_tokens_of_answers_count_if_asked_for(tiny_folder: Path, sums: str, tmp_path: Path, model: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    every = own_text(tmp_path / "store", sums, model, tokenizer).of(model)
    own = own_text(tmp_path / "store", sums, model, tokenizer, prompts_count=False)
    answers = own.of(model)
    for whole, part in zip(every.batches, answers.batches, strict=True):
        assert torch.equal(whole.ids, part.ids) and torch.equal(whole.real, part.real)
        assert torch.equal(whole.counted, whole.real)
        prompts = [tokenizer.encode(question.prompt) for question in own.questions]
        for ids, real, counted in zip(*part, strict=True):
            start = next(len(prompt) for prompt in prompts if ids[: len(prompt)].tolist() == prompt)
            assert counted[:start].sum() == 0
            assert torch.equal(counted[start:], real[start:])
    assert every.record()["sha256"] != answers.record()["sha256"]


def test_samples_are_drawn_by_the_seed_and_found_again(
    tiny_folder: Path, sums: str, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(store: str, seed: int) -> list[Any]:
        settings = {"temperature": 2.0, "max_gen_toks": 8, "seed": seed}
        own, questions = answerer(tiny_folder, tmp_path / store, sums, **settings)
        return own.answers(model, questions[:5])

    first, other = answers("a", 1), answers("a", 2)
    assert len(first) == 5 and all(len(answer.tokens) <= 8 for answer in first)
    assert first != other and answers("b", 1) == first
    monkeypatch.setattr(Engine, "decode", lambda *_: pytest.fail("answers were decoded again"))
    assert answers("a", 1) == first  # all from the store, by the key of any evaluation


def test_answers_that_the_engine_did_not_generate_are_tokenised(
    tiny_folder: Path, sums: str, tmp_path: Path, model: Any
) -> None:
    """As `hf` stores them: a text without tokens."""
    own, questions = answerer(tiny_folder, tmp_path / "store", sums)
    (answer,) = own.answers(model, questions[:1])
    (tmp_path / "store" / "answers.jsonl").unlink()
    store = AnswerStore(tmp_path / "store")
    key = next(iter(_keys(own, model, questions[:1])))
    store.add(key, "It is 7.", {"kind": "generate_until", "task": "sums", "length": 9, "cut_off": False})
    store.close()
    (again,) = own.answers(model, questions[:1])
    assert again.text == "It is 7." and again.prompt == answer.prompt
    assert list(again.tokens) == [*own.tokenizer.encode("It is 7."), own.tokenizer.eos_token_id]


def test_a_stop_text_is_replaced_by_the_end_token(tiny_folder: Path, tmp_path: Path, model: Any) -> None:
    """What precedes it stays as generated; a text that ends within a token is tokenised again."""
    for seed in range(20):
        settings = {"temperature": 1.5, "seed": seed}
        own, questions = answerer(tiny_folder, tmp_path / "store", task_file(tmp_path / "a"), **settings)
        end, whole = own.tokenizer.eos_token_id, own.answers(model, questions)
        found = [
            (number, start)
            for number, answer in enumerate(whole)
            for start in range(1, len(answer.text) - 1)
            if own.tokenizer.encode(answer.text[: start + 2]) == list(answer.tokens[: start + 2])
            and answer.text.find(answer.text[start : start + 2]) == start
        ]
        if found:
            break
    number, start = found[0]
    stop = whole[number].text[start : start + 2]
    task = task_file(tmp_path / "b", generation_kwargs={"until": [stop], "max_gen_toks": LENGTH, "do_sample": False})
    own, questions = answerer(tiny_folder, tmp_path / "store", task, **settings)
    answer = own.answers(model, questions)[number]
    assert (answer.text, answer.tokens) == (whole[number].text[:start], (*whole[number].tokens[:start], end))


def _keys(own: Answerer, model: Any, questions: list[Question]) -> set[str]:
    folder = own.responses.with_name("keys")
    replace(own, responses=folder).answers(model, questions)
    return {record["key"] for record in read_answers(folder)}


# --------------------------------------------------------------------------- pruning


def prune(tiny_folder: Path, output: Path, name: str, *words: str) -> int:
    command = ["prune", "--pretrained", str(tiny_folder), "--ratio", "0.3", "--task", name, "--calibrate_on", "own"]
    return main([*command, "--windows", "5", "--output", str(output), *words])


@pytest.mark.parametrize("method", ["slimgpt", "gisp", "norm_entropy"])
def test_the_command_prunes_on_own_answers(tiny_folder: Path, sums: str, tmp_path: Path, method: str) -> None:
    assert prune(tiny_folder, tmp_path / "plan.json", sums, "--method", method, "--prompts_count", "false") == 0
    plan = Plan.load(tmp_path / "plan.json")
    about = plan.provenance["calibration"]
    assert about["own_answers"]["prompts_count"] is False and about["windows"] == 5
    assert len(list(read_answers(tmp_path / "plan.responses"))) == 5
    assert main(["importance", "--pretrained", str(tiny_folder), "--task", sums, "--calibrate_on", "own", "--windows",
                 "5", "--responses", str(tmp_path / "plan.responses"), "--output", str(tmp_path / "s.json")]) == 0  # fmt: skip
    assert len(list(read_answers(tmp_path / "plan.responses"))) == 5  # shared


@pytest.mark.parametrize(("regenerate", "texts"), [(1, 3), (2, 2), (0, 1)])
def test_the_model_pruned_so_far_answers_again(
    tiny_folder: Path, sums: str, tmp_path: Path, regenerate: int, texts: int
) -> None:
    words = ["--method", "flap", "--steps", "3", "--regenerate", str(regenerate)]
    assert prune(tiny_folder, tmp_path / "plan.json", sums, *words) == 0
    plan = Plan.load(tmp_path / "plan.json")
    hashes = [plan.provenance["calibration"]["sha256"]]
    hashes += [stage["calibration"]["sha256"] for stage in plan.provenance["stages"] if "calibration" in stage]
    assert len(hashes) == texts == len({*hashes})


def test_answers_of_a_pruned_model_are_those_of_its_plan(
    tiny_folder: Path, sums: str, tmp_path: Path, model: Any
) -> None:
    """Also with the biases that make up for what was removed."""
    plan = Plan("L0H0+L0H1", {"L1": "0-9"}, compensation={"L0.o_proj.bias": torch.ones(32, dtype=torch.float64)})
    own, questions = answerer(tiny_folder, tmp_path / "store", sums)
    dense = own.answers(model, questions[:4])
    with plan.applied_to(model):
        pruned = own.answers(model, questions[:4])
        for answer, other in zip(pruned, dense, strict=True):
            assert list(answer.tokens) == generated(model, answer.prompt)
            assert answer.prompt == other.prompt
    assert pruned != dense
