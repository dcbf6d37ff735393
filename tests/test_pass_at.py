"""Results of our tasks with a fake model, and pass@N: exactly N responses, none collapsed, every document once."""

import copy
import json
import math
import re
from pathlib import Path

import pytest
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.config.task import TaskConfig
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from lmeval_prune import InputError
from lmeval_prune.plugin import registration
from lmeval_prune.scoring import equality
from lmeval_prune.scoring.verifier import Verifier
from lmeval_prune.tasks import compat, data, loading, scored, scorers
from lmeval_prune.tasks.tries import pass_unbiased
from tests.conftest import ROOT, task_manager


class Scripted(LM):
    """Answers the i-th try at a question by the i-th text of a script."""

    def __init__(self, script) -> None:
        super().__init__()
        self.script = script
        self.calls: dict[str, int] = {}

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        answers = []
        for request in requests:
            prompt = request.args[0]
            tries = self.calls[prompt] = self.calls.get(prompt, -1) + 1
            answers.append(self.script(request, tries))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def loglikelihood(self, requests):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError


def run(model, *names: str, limit: int | None = 6, predict_only: bool = False, **metadata):
    settings = {"limit": limit, "bootstrap_iters": 0, "predict_only": predict_only}
    return simple_evaluate(model=model, tasks=list(names), task_manager=loading.task_manager(metadata), **settings)


def figures(out, name: str) -> dict:
    return {
        k.removesuffix(",none"): v for k, v in out["results"][name].items() if k.endswith(",none") and "stderr" not in k
    }


def third_try_is_right(request, tries: int) -> str:
    return f"\\boxed{{{request.doc['target']}}}" if tries in (2, 3) else f"It is {90000 + tries}"


def test_metrics_of_a_script() -> None:
    """Right on tries 3 and 4 of 4, wrong answers all different."""
    out = run(Scripted(third_try_is_right), "prune_tiny_words_pass4")
    expected = {"pass@1": 0, "pass@2": 0, "pass@4": 1, "maj@4": 1, "distinct": 3, "extracted": 1, "how": 1 / 2}
    expected |= {"strict_match": 1 / 2, "unmarked": 1 / 2}
    expected |= {"pass@1_unbiased": 1 / 2, "pass@2_unbiased": 1 - 1 / 6, "pass@4_unbiased": 1}
    assert figures(out, "prune_tiny_words_pass4") == pytest.approx(expected)
    sample = out["samples"]["prune_tiny_words_pass4"][0]
    assert len(sample["extracted"]) == 4 and sample["extracted"][0] == "90000"
    assert sample["how"] == ["end", "end", "boxed", "boxed"]


def test_votes_are_counted_by_the_tasks_own_equality(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forms of a MATH answer are one answer; a timeout is a share of the responses."""

    def two_forms(request, tries: int) -> str:
        return [r"\boxed{p^2-q^2}", r"The answer is $(p-q)(p+q)$.", "7", "8"][tries % 4]

    out = run(Scripted(two_forms), "prune_math500_pass8", limit=2, data_dir=str(shared_data))
    sample = out["samples"]["prune_math500_pass8"][0]
    assert sample["distinct"] == 3 and sample["how"] == ["boxed", "phrase", "end", "end"] * 2
    scores = figures(out, "prune_math500_pass8")
    assert (scores["how"], scores["timeouts"]) == (0.5, 0)
    assert not out["higher_is_better"]["prune_math500_pass8"]["timeouts"]
    monkeypatch.setattr(equality, "_KNOWN", {})
    verdicts = lambda _, pairs: ["timeout" if "q" in answer else "different" for _, answer in pairs]  # noqa: E731
    monkeypatch.setattr(Verifier, "verify_many", verdicts)
    out = run(Scripted(two_forms), "prune_math500_pass8", limit=2, data_dir=str(shared_data))
    # the first answer is a pair, and no polynomial is compared with one; the second is p - q
    assert [sample["timeouts"] for sample in out["samples"]["prune_math500_pass8"]] == [0, 0.5]
    assert figures(out, "prune_math500_pass8")["timeouts"] == 0.25
    task = task_manager({"data_dir": str(shared_data)}).load(["prune_math500_pass8"])["tasks"]["prune_math500_pass8"]
    metrics = {name for name in task.aggregation() if not name.endswith("_stderr")}  # `figures` leaves these out
    assert set(scores) < metrics and set(task.higher_is_better()) == set(task.aggregation())


def test_pass_at_n_of_each_part(shared_data: Path) -> None:
    """The last of 8 tries is right where the level is 1 or the subject algebra."""

    def script(request, tries: int) -> str:
        good = tries == 7 and (request.doc["level"] == 1 or request.doc["subject"] == "Algebra")
        return f"\\boxed{{{request.doc['target'] if good else 77777}}}"

    out = run(Scripted(script), "prune_math500_pass8", limit=60, data_dir=str(shared_data))
    docs = [sample["doc"] for sample in out["samples"]["prune_math500_pass8"]]
    right = [doc["level"] == 1 or doc["subject"] == "Algebra" for doc in docs]
    scores = figures(out, "prune_math500_pass8")
    assert scores["pass@4"] == 0 and scores["pass@8"] == pytest.approx(sum(right) / 60)
    for name, kind, value in (("level_3", "level", 3), ("prealgebra", "subject", "Prealgebra")):
        part = [good for good, doc in zip(right, docs, strict=True) if doc[kind] == value]
        assert scores[f"pass@8_{name}"] == pytest.approx(sum(part) / len(part))
    assert scores["pass@8_level_1"] == scores["pass@8_algebra"] == 1 and "pass@8_counting_and_probability" in scores


def test_expressions_vote_by_value_and_words_by_spelling() -> None:
    same = {function.__name__: equality for function, equality in scorers.EQUALITIES.items()}
    assert same["equation"]("2*3", "1+5") and not same["equation"]("2*3", "7")
    assert same["equation"]("n0*2", "n0 * 2") and not same["equation"]("n0*2", "n0*3")
    assert same["text_or_number"]("the cat", "Cat") and not same["number"]("cat", "cat")


def test_copies_that_pad_short_ranks_are_dropped() -> None:
    """lm-eval pads a short rank with copies of its last request, which then has more than N responses."""
    task = loading.load_task(task_manager(), "prune_tiny_words_pass4")
    task.build_all_requests(limit=2)
    for instance in task.instances:
        instance.resps = [third_try_is_right(instance, i) for i in range(8)]
    task.apply_filters()
    for instance in task.instances:
        responses = instance.filtered_resps["none"]
        assert len(responses) == 4
        assert task.scores(instance.doc, responses)["pass@4_unbiased"] == 1


def test_any_n_is_one_line(tmp_path: Path, shared_data: Path) -> None:
    registration.register()
    folder = ROOT / "tasks"
    (tmp_path / "twelve.yaml").write_text(
        f"include: {folder / 'gsm8k' / 'prune_gsm8k_pass8.yaml'}\ntask: prune_gsm8k_pass12\nrepeats: 12\n"
    )
    path = folder / "tiny" / "prune_tiny_words_pass4.yaml"
    (tmp_path / "mine.yaml").write_text(f"include: {path}\ntask: mine_pass3\nrepeats: 3\n")
    metadata = {"data_dir": str(shared_data)}
    manager = TaskManager(include_path=[folder, tmp_path], include_defaults=False, metadata=metadata)
    twelve = manager.load(["prune_gsm8k_pass12"])["tasks"]["prune_gsm8k_pass12"]
    twelve.build_all_requests(limit=1)
    assert twelve.ks == [1, 2, 4, 8, 12] and twelve.instances[0].repeats == 12
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 1.0, "max_gen_toks": 512}
    assert sampling.items() <= twelve.instances[0].args[1].items() and "</s>" in twelve.instances[0].args[1]["until"]
    task = manager.load(["mine_pass3"])["tasks"]["mine_pass3"]
    assert task.ks == [1, 2, 3] and "maj@3" in task.aggregation()


def test_a_scoring_function_of_ones_own(tmp_path: Path) -> None:
    """It needs `exact_match` alone, and that only where answers are scored; with `extracted` there is a vote, too."""
    path = ROOT / "tasks" / "tiny" / "prune_tiny_words_pass4.yaml"
    text = f"include: {path}\ntask: mine_pass4\nrepeats: 4\nprocess_results: !function own.score\n"
    (tmp_path / "mine.yaml").write_text(text)

    def answer(_: object, tries: int) -> str:
        calls.append(tries)
        return "xy"[tries == 2]

    def measured(scores: str, **options: bool) -> dict:
        calls.clear()
        (tmp_path / "own.py").write_text(f"def score(doc, results): return {scores}\n")
        with loading.including(str(tmp_path)):
            return figures(run(Scripted(answer), "mine_pass4", **options), "mine_pass4")

    calls: list[int] = []

    right = "'exact_match': float(results[0] == 'y')"
    bare = measured(f"{{{right}}}")
    assert bare == {
        **{f"pass@{k}": float(k > 2) for k in (1, 2, 4)},
        **{f"pass@{k}_unbiased": pass_unbiased(4, 1, k) for k in (1, 2, 4)},
    }
    assert measured(f"{{{right}, 'extracted': results[0]}}") == {**bare, "maj@4": 0, "distinct": 2, "extracted": 1}
    assert measured("{'acc': 1.0}", predict_only=True) == {"bypass": 999} and calls
    assert measured("{'exact_match': float(results[0].split()[-1] == 'y')}") == bare


def test_results_are_valid_json(shared_data: Path) -> None:
    """One document a task: most levels and grades have none."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    names = ["prune_math500", "prune_asdiv_a", "prune_asdiv", "prune_math23k_equation", "prune_tiny_words_pass4"]
    out = run(Scripted(lambda *_: r"\boxed{1}"), *names, limit=1, data_dir=str(shared_data))
    text = json.dumps(out, default=handle_non_serializable)
    results = json.loads(text, parse_constant=refuse)["results"]
    assert {"complexity_low,none", "complexity_medium,none"} & {*results["prune_asdiv_a"]} == {"complexity_low,none"}
    assert all({"strict_match,none", "unmarked,none"} <= scores.keys() for scores in results.values())
    assert out["results"]["prune_math500"]["timeouts,none"] == 0
    assert copy.deepcopy(out["results"]) == out["results"]


def test_math_is_one_task_with_levels_and_subjects(shared_data: Path) -> None:
    """Every row once; the columns of the paper's tables, in lm-eval's table too."""

    def some(request, _: int) -> str:
        return f"\\boxed{{{request.doc['target']}}}" if len(request.doc["question"]) % 3 else "no idea"

    rows = data.load("math500", "test", shared_data).to_list()
    right = [bool(len(row["question"]) % 3) for row in rows]
    out = run(Scripted(some), "prune_math500", limit=None, data_dir=str(shared_data))
    scores = figures(out, "prune_math500")
    assert len(out["samples"]["prune_math500"]) == len(rows) == 500
    shares = [scores[name] for name in ("exact_match", "strict_match", "extracted", "how")]
    assert shares == pytest.approx([sum(right) / 500] * 4)
    parts = {f"level_{k}": ("level", k) for k in range(1, 6)}
    subjects = {row["subject"] for row in rows}
    parts |= {re.sub(r"\W+", "_", name.replace("&", "and")).lower(): ("subject", name) for name in subjects}
    assert {"algebra", "counting_and_probability", "precalculus"} <= set(parts) and len(parts) == 12
    counts = {f"{name}_n" for name in parts}
    assert set(scores) == {
        "exact_match", "strict_match", "unmarked", "extracted", "how", "timeouts", *parts, *counts
    }  # fmt: skip
    table = make_table(out)
    for name, (kind, value) in parts.items():
        part = [good for good, row in zip(right, rows, strict=True) if row[kind] == value]
        assert scores[name] == pytest.approx(sum(part) / len(part)) and scores[f"{name}_n"] == len(part)
        assert re.search(rf"\|\s*{name}\s*\|↑\s*\|\s*{scores[name]:.4f}\|±\s*\|\s*0\.\d+\|", table)


def test_another_split_is_asked_by_metadata(shared_data: Path) -> None:
    manager = task_manager({"data_dir": str(shared_data), "data_split": "fold3"})
    assert len(loading.load_task(manager, "prune_math23k").test_docs()) == 4632


def test_customary_score_is_acc_norm_where_there_is_one() -> None:
    base = loading.load_task(task_manager(), "prune_tiny_choice")
    ignored = ("fewshot_config", "filter_list", "tag")
    config = {k: v for k, v in vars(base.config).items() if v is not None and k not in ignored}
    doc = {"question": "?", "choices": ["aaaaaaaaaaaa", "b", "cc", "d"], "gold": 0}
    config |= {"class": scored.CustomaryTask, "custom_dataset": lambda **_: {"test": Dataset.from_list([doc])}}
    lls = {"aaaaaaaaaaaa": -3.0, "b": -1.0, "cc": -2.5, "d": -9.0}

    class Scorer(Scripted):
        def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return [(lls[request.args[1].strip()], False) for request in requests]

    def evaluate(metrics: list[dict]) -> dict:
        tasks = {"mine": scored.CustomaryTask({**config, "task": "mine", "metric_list": metrics})}
        out = simple_evaluate(Scorer(None), tasks=["mine"], task_manager=compat.LoadedTasks(tasks), bootstrap_iters=0)
        assert out["higher_is_better"]["mine"]["score"]
        return figures(out, "mine")

    assert evaluate(config["metric_list"]) == {"acc": 0.0, "acc_norm": 1.0, "score": 1.0}
    assert evaluate([m for m in config["metric_list"] if m["metric"] == "acc"]) == {"acc": 0.0, "score": 0.0}


def test_commonsense_is_seven_tasks_with_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built from lm-eval's own YAMLs, without their data."""

    def without_data(self, config) -> None:
        self._config = TaskConfig(**config)
        self._aggregation_list = {}

    monkeypatch.setattr("lm_eval.api.task.ConfigurableTask.__init__", without_data)
    built = loading.task_manager().load(["prune_commonsense"])["tasks"]
    assert len(built) == 7 and all(type(task) is scored.CustomaryTask for task in built.values())
    metrics = {task.config.task: {each["metric"] for each in task.config.metric_list} for task in built.values()}
    normed = {name for name, own in metrics.items() if "acc_norm" in own}
    assert normed == {"piqa", "hellaswag", "arc_easy", "arc_challenge", "openbookqa"}


def test_perplexity_at_sequence_length_128(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's wikitext, on a page of our own."""
    page = Dataset.from_list([{"page": "one two three"}])
    splits = dict.fromkeys(("train", "test"), page)
    monkeypatch.setattr(scored.WindowedTask, "download", lambda self, *_, **__: setattr(self, "dataset", splits))

    class Uniform(Scripted):
        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
            return [-6.0] * len(requests)

    out = run(Uniform(None), "prune_wikitext2_128", limit=None, max_length=128)
    (scores,) = (value for name, value in out["results"].items() if name.endswith("wikitext"))
    assert scores["word_perplexity,none"] == pytest.approx(math.exp(2))
    with pytest.raises(InputError):
        run(Uniform(None), "prune_wikitext2_128", limit=None, max_length=2048)
