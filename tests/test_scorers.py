"""The filter, metrics and aggregations for tasks of others, named in YAML files; lm-eval's own tasks with local data."""

import inspect
import itertools
import json
import random
import tomllib
from pathlib import Path

import lm_eval
import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.api import registry
from lm_eval.api.registry import get_aggregation, get_filter

from lmeval_prune.errors import InputError
from lmeval_prune.plugin import registration
from lmeval_prune.scoring import same_text
from lmeval_prune.tasks import scorers
from lmeval_prune.tasks.manager import LazyTaskManager
from tests.conftest import ROOT
from tests.test_pass_at import Scripted

LM_EVAL_TASKS = Path(lm_eval.__file__).parent / "tasks"
CONFIG = """
group: my_gsm8k
task:
  - task: gsm8k
    filter_list:
      - name: answer
        filter: [{function: prune_answer}, {function: take_first}]
    metric_list:
      - {metric: prune_equal, aggregation: mean, higher_is_better: true}
"""


def evaluate(folder: Path, config: str, local: dict, script, others: str, limit: int = 6) -> dict:
    """Evaluate the tasks of a user's YAML, which change tasks in a folder of lm-eval's, with local data."""
    entry = yaml.safe_load(config)
    for task in entry["task"]:
        task |= {"dataset_path": "json", "dataset_name": None, **local}
    (folder / "mine.yaml").write_text(yaml.safe_dump(entry))
    manager = LazyTaskManager(include_path=[str(LM_EVAL_TASKS / others), str(folder)])
    model = Scripted(script)
    out = simple_evaluate(model=model, tasks=[entry["group"]], task_manager=manager, limit=limit, bootstrap_iters=0)
    (scores,) = (scores for name, scores in out["results"].items() if name != entry["group"])
    return scores


def gsm8k(shared_data: Path) -> dict:
    files = {"train": str(shared_data / "gsm8k_train.jsonl.gz"), "test": str(shared_data / "gsm8k_test.jsonl")}
    return {"dataset_kwargs": {"data_files": files}}


def of_kind(kind: str, task: str) -> str:
    config = CONFIG.replace("my_gsm8k", "mine").replace("task: gsm8k", f"task: {task}")
    config = config.replace("{function: prune_answer}", f"{{function: prune_answer, kind: {kind}, gold: answer}}")
    return config.replace("{metric: prune_equal,", f"{{metric: prune_equal, kind: {kind},")


def gold(request) -> str:
    return request.doc["answer"].rpartition("####")[2].strip()


def test_gsm8k_of_lm_eval_by_ten_lines(shared_data: Path, tmp_path: Path) -> None:
    def script(request, tries: int) -> str:
        return f"So she pays ${gold(request)}.00 in all." if request.doc_id % 3 else "I do not know."

    scores = evaluate(tmp_path, CONFIG, gsm8k(shared_data), script, "gsm8k")
    assert scores["prune_equal,answer"] == pytest.approx(4 / 6)
    assert "exact_match,flexible-extract" not in scores


def test_pass_and_majority_over_the_repeats_of_gsm8k(shared_data: Path, tmp_path: Path) -> None:
    config = CONFIG.replace(", {function: take_first}", "").replace("filter_list", "repeats: 4\n    filter_list")
    config += "".join(
        f"      - {{metric: {name}, aggregation: mean, higher_is_better: true}}\n"
        for name in ("prune_pass", "prune_maj")
    )

    def script(request, tries: int) -> str:
        right = tries in {0: (1,), 1: (2, 3), 2: ()}[request.doc_id % 3]
        return f"The answer is {gold(request) if right else 90_000 + tries}."

    scores = evaluate(tmp_path, config, gsm8k(shared_data), script, "gsm8k")
    figures = {name.removesuffix(",answer"): value for name, value in scores.items() if name.endswith(",answer")}
    thirds = {"prune_equal": (1 / 4, 2 / 4, 0), "pass@1": (0, 0, 0), "pass@2": (1, 0, 0), "pass@4": (1, 1, 0)}
    thirds |= {"pass@1_unbiased": (1 / 4, 2 / 4, 0), "pass@2_unbiased": (1 / 2, 5 / 6, 0), "pass@4_unbiased": (1, 1, 0)}
    thirds |= {"maj@4": (0, 1, 0), "distinct": (4, 3, 4)}
    for name, values in thirds.items():
        assert figures.pop(name) == pytest.approx(sum(values) / 3), name
    assert not [name for name in figures if "stderr" not in name]


def test_minerva_math_of_lm_eval_by_our_equality(shared_data: Path, tmp_path: Path) -> None:
    config = of_kind("mathematics", "minerva_math500\n    process_results: null")
    rows = [line for line in (shared_data / "math500_test.jsonl").read_text().splitlines() if r"\\frac" in line][:6]
    (tmp_path / "math.jsonl").write_text("\n".join(rows))

    def script(request, tries: int) -> str:
        answer = request.doc["answer"].replace("frac", "dfrac")
        return f"Hence the answer is ${answer}$." if request.doc_id % 2 else "It is $\\sqrt[7]{91}$."

    data = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "math.jsonl")}}}
    scores = evaluate(tmp_path, config, data, script, "minerva_math")
    assert scores["prune_equal,answer"] == 0.5


def test_gpqa_of_lm_eval_by_the_letters_of_choices(tmp_path: Path) -> None:
    """Gold answers are `(A)` to `(D)`, drawn by its own function; answers name the letter in any form."""
    wrong = {f"Incorrect Answer {number}": f"wrong {number}" for number in (1, 2, 3)}
    rows = [{"Question": f"Question {number}?", "Correct Answer": "right", **wrong} for number in range(6)]
    (tmp_path / "gpqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = of_kind("text", "gpqa_main_generative_n_shot")
    forms = (
        "The answer is {0}.",
        "So the correct choice is {1}.",
        "Answer: {1}",
        "The best answer is {0} right.",
        "{0}",
    )

    def script(request, tries: int) -> str:
        letter = request.doc["answer"]
        if request.doc_id == 5:
            letter = "(A)" if letter != "(A)" else "(B)"
        return forms[request.doc_id % 5].format(letter, letter[1])

    data = {"dataset_kwargs": {"data_files": {"train": str(tmp_path / "gpqa.jsonl")}}}
    assert evaluate(tmp_path, config, data, script, "gpqa")["prune_equal,answer"] == pytest.approx(5 / 6)


def test_the_letter_of_a_choice_in_any_form_and_no_other() -> None:
    for answer in ("C", "(C)", "c", "option C", "(C) helium", "C. helium", "C) helium"):
        assert same_text(answer, "(C)") and same_text(answer, "C") and not same_text(answer, "(B)"), answer
    for answer in ("B", "(B) or (C)", "C and D", "cat", "Carl", "", "12", "(B), not (C)"):
        assert not same_text(answer, "(C)") and not same_text(answer, "C"), answer


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{function: prune_answer}", "{function: prune_answer, kind: text}"),
        ("{metric: prune_equal,", "{metric: prune_equal, kind: text,"),
        ("{function: prune_answer}", "{function: prune_answer, kind: text, gold: answer}"),
        ("task: gsm8k", "task: gsm8k\n    doc_to_target: a {{question}}"),
    ],
)
def test_a_mistake_in_the_yaml_is_refused_before_any_answer(
    old: str, new: str, shared_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="gsm8k"):
        evaluate(tmp_path, CONFIG.replace(old, new), gsm8k(shared_data), lambda *_: pytest.fail("generated"), "gsm8k")


def test_a_task_of_numbers_without_one_is_refused_before_any_answer(tmp_path: Path) -> None:
    lines = (
        f"include: {ROOT}/tasks/_chat_answer",
        "task: mine",
        "dataset_kwargs: {prune_data: tiny_cloze}",
        "process_results: !function lmeval_prune.tasks.scorers.number",
    )
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    with pytest.raises(InputError):
        LazyTaskManager(include_path=[str(tmp_path)]).load(["mine"])


# --------------------------------------------------------------------------- formulas


def call(metric, golds: list, answers: list, **arguments) -> dict:
    """The scores of a metric, whatever lm-eval makes of it."""
    return inspect.unwrap(getattr(metric, "fn", metric))(golds, answers, **arguments)


def literal(right: list[bool], k: int) -> float:
    """pass@k by drawing every subset of k answers."""
    subsets = list(itertools.combinations(right, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


def test_pass_and_majority_beside_every_subset_of_random_answers() -> None:
    random.seed(4)
    lists = []
    for _ in range(40):
        answers = [random.choice(["3", "4", "5", "", "3.0"]) for _ in range(8)]
        right = [answer in ("3", "3.0") for answer in answers]
        lists.append(right)
        scores = call(scorers.pass_at_ks, ["so it is\n#### 3"], answers)
        for k in (1, 2, 4, 8):
            assert scores[f"pass@{k}_unbiased"] == pytest.approx(literal(right, k))
            assert scores[f"pass@{k}"] == any(right[:k])
        assert call(scorers.equal, ["3"], answers) == {"prune_equal": sum(right) / 8}
        votes = {value: sum(answer == value for answer in map(norm, answers)) for value in map(norm, answers) if value}
        most = [value for value in votes if votes[value] == max(votes.values())]
        first = min(most, key=list(map(norm, answers)).index)
        majority = call(scorers.majority_at_n, ["3"], answers)
        assert majority == {"maj@8": float(first == "3"), "distinct": len(votes)}
    for k in (1, 2, 4, 8):
        expected = sum(literal(right, k) for right in lists) / len(lists)
        assert get_aggregation(f"prune_pass_at_{k}")(lists) == pytest.approx(expected)


def norm(answer: str) -> str:
    return answer.removesuffix(".0")


def test_several_gold_answers_take_the_main_score() -> None:
    assert call(scorers.pass_at_ks, ["3"], ["4", "3"])["prune_pass"] == 1.0
    assert call(scorers.majority_at_n, ["3"], ["4", "3"])["prune_maj"] == 0.0
    assert call(scorers.equal, ["5", "3"], ["4", "3", "5", ""]) == {"prune_equal": 0.5}


# --------------------------------------------------------------------------- names


def test_entry_points_and_the_bridge_register_the_same() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, registered in (
        ("models", registration.MODELS),
        ("filters", registration.FILTERS),
        ("metrics", registration.METRICS),
        ("aggregations", registration.AGGREGATIONS),
    ):
        assert points[f"lm_eval.{group}"] == registered
    assert get_filter("prune_answer") is scorers.AnswerFilter
    for name in registration.METRICS:
        assert registry.is_higher_better(name) and registry.get_metric_aggregation(name)([1, 0]) == 0.5
    assert [get_aggregation(name) for name in registration.AGGREGATIONS] == [*scorers.PASS_AT.values()]
