"""pass@N and grouped results with a fake model: exactly N responses, none collapsed, every document once."""

import json
import re
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from lmeval_prune import InputError, plugin
from lmeval_prune.tasks import data, results


class Scripted(LM):
    """Answers the i-th try at a question by the i-th text of a script."""

    def __init__(self, script) -> None:
        super().__init__()
        self.script = script
        self.asked: dict[str, int] = {}

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        answers = []
        for request in requests:
            prompt = request.args[0]
            tries = self.asked[prompt] = self.asked.get(prompt, -1) + 1
            answers.append(self.script(request, tries))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def loglikelihood(self, requests):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError


def run(model, *names: str, limit: int | None = 6, cache: str | None = None, **metadata):
    plugin.register()
    manager = TaskManager(metadata=metadata)
    return simple_evaluate(
        model=model, tasks=list(names), task_manager=manager, limit=limit, bootstrap_iters=0, use_cache=cache
    )


def third_try_is_right(request, tries: int) -> str:
    return f"\\boxed{{{request.doc['target']}}}" if tries in (2, 3) else f"It is {90000 + tries}"


def test_metrics_of_a_script() -> None:
    """Right on tries 3 and 4 of 4, wrong answers all different."""
    out = run(Scripted(third_try_is_right), "prune_tiny_words_pass4")
    metrics = out["results"]["prune_tiny_words_pass4"]
    expected = {"pass@1": 0, "pass@2": 0, "pass@4": 1, "maj@4": 1, "distinct": 3, "extracted": 1}
    expected |= {"pass@1_unbiased": 1 / 2, "pass@2_unbiased": 1 - 1 / 6, "pass@4_unbiased": 1}
    assert {
        k.removesuffix(",none"): v for k, v in metrics.items() if k.endswith(",none") and "stderr" not in k
    } == pytest.approx(expected)
    sample = out["samples"]["prune_tiny_words_pass4"][0]
    assert len(sample["extracted"]) == 4 and sample["extracted"][0] == "90000"


def test_copies_that_pad_short_ranks_are_dropped() -> None:
    """lm-eval pads a short rank with copies of its last request, which then has more than N responses."""
    plugin.register()
    tasks = TaskManager().load(["prune_tiny_words_pass4"])
    task = tasks["tasks"]["prune_tiny_words_pass4"]
    task.build_all_requests(limit=2)
    for instance in task.instances:
        instance.resps = [third_try_is_right(instance, i) for i in range(8)]
    task.apply_filters()
    for instance in task.instances:
        responses = instance.filtered_resps["none"]
        assert len(responses) == 4
        assert task.process_results(instance.doc, [responses])["pass@4_unbiased"] == 1


def test_a_cache_collapses_nothing(tmp_path: Path) -> None:
    """Sampled repeats are never read from `--use_cache`: the second run asks again, N times, and scores the same."""
    outs = []
    for _ in range(2):
        model = Scripted(third_try_is_right)
        out = run(model, "prune_tiny_words_pass4", cache=str(tmp_path / "cache"))
        outs.append(out["results"]["prune_tiny_words_pass4"])
        assert set(model.asked.values()) == {3}
    assert list(tmp_path.glob("cache*.db"))
    assert outs[0] == outs[1] and outs[0]["distinct,none"] == 3


def test_the_default_filter_would_have_kept_one_response_and_ours_keeps_all() -> None:
    plugin.register()
    names = [n for n in TaskManager().all_subtasks if re.fullmatch(r"prune_.*_pass\d+", n)]
    assert {n.rpartition("_pass")[0] for n in names} >= {
        "prune_gsm8k",
        "prune_asdiv_a",
        "prune_math23k",
        "prune_math500",
    }
    task = TaskManager().load(["prune_tiny_words_pass4"])["tasks"]["prune_tiny_words_pass4"]
    task.build_all_requests(limit=1)
    task.instances[0].resps = list("abcd")
    task.apply_filters()
    assert task.instances[0].filtered_resps["none"] == list("abcd")


def test_any_n_is_one_line_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    plugin.register()
    path = plugin.task_folder() / "tiny" / "prune_tiny_words_pass4.yaml"
    (tmp_path / "mine.yaml").write_text(f"include: {path}\ntask: mine_pass3\nrepeats: 3\n")
    task = TaskManager(include_path=str(tmp_path)).load(["mine_pass3"])["tasks"]["mine_pass3"]
    assert task.ks == [1, 2, 3] and "maj@3" in task.aggregation()
    (tmp_path / "mine.yaml").write_text(f"include: {path}\ntask: mine_pass3\nrepeats: 0\n")
    with pytest.raises(InputError, match="repeats must be a whole number above 0, not 0"):
        TaskManager(include_path=str(tmp_path)).load(["mine_pass3"])


def test_math_group_pools_levels_over_subjects(shared_data: Path) -> None:
    """Every row once; a level's accuracy counts each problem once, whatever its subject."""
    odd = lambda request, _: f"\\boxed{{{request.doc['target']}}}" if request.doc["level"] % 2 else "no idea"  # noqa: E731
    out = run(Scripted(odd), "prune_math500", limit=None, data_dir=str(shared_data))
    group = {k.removesuffix(",none"): v for k, v in out["results"]["prune_math500"].items() if "stderr" not in k}
    rows = data.load("math500", "test", shared_data)
    assert sum(len(s) for name, s in out["samples"].items() if name.startswith("prune_math500_")) == 500
    share = sum(level % 2 for level in rows["level"]) / 500
    assert group["exact_match"] == pytest.approx(share) == group["strict_match"]
    assert [group[f"level_{k}"] for k in range(1, 6)] == [1, 0, 1, 0, 1]
    few = run(Scripted(odd), "prune_math500", limit=1, data_dir=str(shared_data))["results"]
    assert "NaN" not in json.dumps(few) and few["prune_math500_algebra"]["level_5,none"] in (1.0, "N/A")
    some = lambda request, _: f"\\boxed{{{request.doc['target']}}}" if len(request.doc["question"]) % 3 else "?"  # noqa: E731
    group = run(Scripted(some), "prune_math500", limit=None, data_dir=str(shared_data))["results"]["prune_math500"]
    for k in range(1, 6):
        level = [row for row in rows if row["level"] == k]
        expected = sum(bool(len(row["question"]) % 3) for row in level) / len(level)
        assert group[f"level_{k},none"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["prune_asdiv_a", "prune_asdiv_a_equation", "prune_math23k", "prune_math23k_equation"])
def test_answer_and_equation_tasks_report_complexity(name: str, shared_data: Path) -> None:
    def gold(request, _) -> str:
        doc = request.doc
        if name.endswith("_equation"):
            return f"\\boxed{{{doc.get('formula') or doc['equation']}}}"
        return f"I think so. Answer: {doc['target']}"

    out = run(Scripted(gold), name, limit=60, data_dir=str(shared_data))["results"][name]
    assert out["exact_match,none"] == 1.0 and out["strict_match,none"] == 1.0
    assert out["complexity_low,none"] == 1.0 and out["extracted,none"] == 1.0
    if "asdiv" in name:
        assert out["grade_1,none"] == 1.0


def test_another_split_is_asked_by_metadata(shared_data: Path) -> None:
    plugin.register()
    manager = TaskManager(metadata={"data_dir": str(shared_data), "data_split": "fold3"})
    assert len(manager.load(["prune_math23k"])["tasks"]["prune_math23k"].test_docs()) == 4632
    with pytest.raises(InputError, match="no split 'fold9'; it has all, train, test, fold0"):
        TaskManager(metadata={"data_dir": str(shared_data), "data_split": "fold9"}).load(["prune_math23k"])


def test_customary_score_is_acc_norm_where_there_is_one() -> None:
    from lmeval_prune.tasks.customary import CustomaryTask

    plugin.register()
    base = TaskManager().load(["prune_tiny_choice"])["tasks"]["prune_tiny_choice"]
    config = {k: v for k, v in vars(base.config).items() if v is not None and k != "fewshot_config"}
    task = CustomaryTask({**config, "class": CustomaryTask})
    lls = [(-3.0, False), (-1.0, False), (-2.5, False), (-9.0, False)]
    doc = {"question": "?", "choices": ["aaaaaaaaaaaa", "b", "cc", "d"], "gold": 0}
    assert task.process_results(doc, lls) == {"acc": 0.0, "acc_norm": 1.0, "score": 1.0}
    plain = [m for m in config["metric_list"] if m["metric"] == "acc"]
    assert CustomaryTask({**config, "metric_list": plain}).process_results(doc, lls) == {"acc": 0.0, "score": 0.0}
    assert "score" in task.aggregation() and task.higher_is_better()["score"]


def test_paper_groups_are_found() -> None:
    plugin.register()
    manager = TaskManager()
    assert {"prune_commonsense", "prune_wikitext2_128", "prune_math500", "prune_math500_4shot"} <= set(
        manager.all_groups
    )
    for name in ("boolq", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa", "wikitext"):
        assert name in manager.all_subtasks


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("3; 4", "3; 4", True), ("3, 4", "3; 4", True), ("3 and 4", "3; 4", True), ("4; 3", "3; 4", False), ("3", "3; 4", False),
        ("Mrs. Hilt", "Mrs. Hilt", True), ("yes", "Yes", True), ("5:45", "5:45", True), ("5:46", "5:45", False), ("", "Yes", False),
        ("6:8", "3:4", False),
    ],
)  # fmt: skip
def test_answers_that_are_not_one_number(answer: str, gold: str, same: bool) -> None:
    assert results.same_text(answer, gold) == same
