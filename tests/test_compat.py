"""What stands in for functions that not every supported lm-eval has gives what the installed lm-eval gives."""

import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
from lm_eval import evaluator_utils, simple_evaluate
from lm_eval.models.huggingface import HFLM

from lmeval_prune.tasks import compat
from tests.conftest import ROOT, task_manager
from tests.test_pass_at import Scripted


@pytest.mark.parametrize("limit", [None, 1, 3, 9, 0.01, 0.5, 0.99, 1.0, 2.0])
def test_a_limit_selects_as_many_documents_as_in_lm_eval(limit: float | None) -> None:
    task = SimpleNamespace(eval_docs=range(7))
    name = "_get_sample_size" if compat.HAS_SCORERS else "get_sample_size"
    assert compat.sample_size(task, limit) == getattr(evaluator_utils, name)(task, limit)


def test_the_context_length_is_that_of_hf(tiny_folder: Path) -> None:
    lm = HFLM(str(tiny_folder), device="cpu")
    assert compat.max_length(lm.config, lm.tokenizer) == lm.max_length == 512
    tokenizer = SimpleNamespace(model_max_length=99)
    assert compat.max_length(SimpleNamespace(n_positions=7), tokenizer) == 7
    assert compat.max_length(SimpleNamespace(), tokenizer) == 99
    assert compat.max_length(SimpleNamespace(), SimpleNamespace(model_max_length=int(1e30))) == 2048


def test_means_have_standard_errors_and_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval 0.5 would draw 100,000 samples for each figure that is no mean."""
    monkeypatch.setattr("random.Random.choices", lambda *_, **__: pytest.fail("drawn"))

    def script(request, _: int) -> str:
        return f"\\boxed{{{request.doc['target'] if request.doc_id % 3 else 90_000}}}"

    out = simple_evaluate(Scripted(script), tasks=["prune_tiny_words"], task_manager=task_manager(), limit=6)
    figures = out["results"]["prune_tiny_words"]
    right = [0, 1, 1, 0, 1, 1]
    assert figures["exact_match,none"] == pytest.approx(statistics.mean(right))
    assert figures["exact_match_stderr,none"] == pytest.approx(statistics.stdev(right) / len(right) ** 0.5)
    assert figures["how_stderr,none"] == figures["extracted_stderr,none"] == "N/A"
    assert out["n-samples"]["prune_tiny_words"]["effective"] == 6


def test_a_scored_task_has_the_metrics_of_its_own_alone() -> None:
    """lm-eval 0.5 would add the default metrics of its type of requests."""
    task = task_manager().load(["prune_tiny_words_pass4"])["tasks"]["prune_tiny_words_pass4"]
    assert "exact_match" not in task.aggregation() and not list(compat.metrics(task))


def test_requests_are_built_by_one_function() -> None:
    """lm-eval's class of requests takes other arguments in 0.4 than in 0.5."""
    folders = ("benchmarks", "lmeval_prune", "tasks", "tests")
    paths = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    built = {path.resolve() for path in paths if re.search(r"\bInstance\(", path.read_text())}
    assert built == {(ROOT / "tasks" / "compat.py").resolve()}
