"""The GPU benchmark, rehearsed on a CPU with tiny models: every part runs, and its results have all fields."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import _choice
import _gpu_common
import _gpu_filter
import _gpu_steps
import _gpu_tests
import _gpu_texts
import _gpu_trace
import gpu_engine
import pytest
import torch

from lmeval_prune import HeadMask
from lmeval_prune.decoding.static_step import StaticStep

TIMES = {"eager_ms", "graph_ms", "rounds_ms", "limit_ms", "products_ms", "limit_at_shapes_ms", "tokens_per_second"}
LOOP = {"host_ms", "host_wait_ms", "loop_steps", "steady_ms", "busy_share", "step_share_of_run"}
RATES = {"seconds", "tokens", "tokens_per_second", "texts", "identical"}


def rehearse(part: str, folder: Path) -> dict[str, Any]:
    path = gpu_engine.main([*f"--part {part} --tiny --device cpu --no-compile --out".split(), str(folder / part)])
    results: dict[str, Any] = json.loads(path.read_text())
    assert not list(folder.glob("*.tmp"))
    assert {"commit", "device", "versions", "seconds", "options", "operations"} <= results.keys()
    assert not any("failed" in row or "skipped" in row for row in results["rows"])
    return results


def rows_of(results: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["kind"] == kind]


def test_steps(tmp_path: Path) -> None:
    results = rehearse("steps", tmp_path)
    assert {row["model"] for row in rows_of(results, "step")} == set(_gpu_steps.MODELS)
    for row in rows_of(results, "step"):
        assert TIMES | {"share_of_limit", "compiled_ms"} <= row.keys() and row["graph_ms"] > 0
        assert row["limit_ms"] == max(row["gemm_ms"], row["weights_ms"]) + row["key_value_ms"]
    for row in rows_of(results, "loop"):
        assert row.keys() >= LOOP and 0 < row["busy_share"] <= 1
    assert all(row["kernels"] > 0 for row in rows_of(results, "kernels"))
    for check in results["checks"].values():
        assert check.get("largest_difference", 0) < 1


def test_sweep(tmp_path: Path) -> None:
    results = rehearse("sweep", tmp_path)
    rows = rows_of(results, "sweep")
    assert [row["decoder"] for row in rows] == ["engine, static", "generate", "engine, eager", "generate"]
    for row in rows:
        assert row.keys() >= RATES and row["identical"] == row["texts"]
    assert rows[0]["texts"] == sum(row["texts"] for row in rows if row["decoder"] == "generate")
    assert set(results["static_against"]) == {"generate", "engine, eager"}


def test_peers(tmp_path: Path) -> None:
    results = rehearse("peers", tmp_path)
    names = {"engine, static", "generate", "generate_batch", "generate, static cache, compiled"}
    assert set(results["tokens_per_second"]) == names
    for name in names:
        assert all(row.keys() >= RATES and row["identical"] == row["texts"] for row in rows_of(results, name))


def test_filter(tmp_path: Path) -> None:
    results = rehearse("filter", tmp_path)
    shares = {(row["keys"], row["ratio"]): row["stored_share"] for row in rows_of(results, "filter")}
    for keys in {keys for keys, _ in shares}:
        assert shares[keys, 0.0] == 1 > shares[keys, 0.3] > shares[keys, 0.5]
    assert all("time_against_unfiltered" in row for row in rows_of(results, "filter"))


def test_the_part_of_tests_reads_outcomes(tmp_path: Path) -> None:
    """The tests themselves take longer; here one passes, one fails and one is skipped."""
    file = tmp_path / "test_three.py"
    file.write_text(
        "import os, pytest\n"
        "def test_good(): assert os.environ['LMEVAL_PRUNE_TEST_DEVICE'] == 'cpu'\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_left(): pytest.skip()\n"
    )
    with pytest.raises(SystemExit):
        gpu_engine.main(["--part", "tests", "--device", "cpu", "--out", str(tmp_path / "out"), "--files", str(file)])
    results = json.loads((tmp_path / "out.json").read_text())
    (row,) = results["rows"]
    assert row["outcomes"] == {"passed": 1, "failure": 1, "skipped": 1} and not results["passed"]
    assert [name.rpartition(".")[2] for name in row["failures"]] == ["test_bad"]
    root = Path(_gpu_tests.__file__).parents[1]
    assert all((root / name.partition("::")[0]).is_file() for name in (*_gpu_tests.FILES, *_gpu_tests.TINY))


def test_what_does_not_fit_the_budget_is_skipped(tmp_path: Path) -> None:
    report = _gpu_common.Report(str(tmp_path / "out"), "cpu", budget=0)
    row = report.row("step", {"rows": 1}, lambda: pytest.fail("was measured"))
    assert row["skipped"] == "budget of 0 s"
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["rows"] == 1


def test_a_case_without_memory_or_with_an_error_leaves_the_others(tmp_path: Path) -> None:
    report = _gpu_common.Report(str(tmp_path / "out"), "cpu", budget=100)

    def fail(error: Exception) -> Any:
        raise error

    report.row("step", {}, lambda: fail(torch.OutOfMemoryError("no memory")))
    assert not report.has_failed
    report.row("step", {}, lambda: fail(ValueError("a mistake")))
    report.row("step", {}, lambda: {"graph_ms": 1.0})
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row.get("skipped") or row.get("failed") or row["graph_ms"] for row in rows] == [
        "out of memory: no memory",
        "ValueError: a mistake",
        1.0,
    ]
    assert report.has_failed


@pytest.mark.parametrize("fault", ["early", "nan"])
def test_nothing_is_timed_if_logits_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    run = StaticStep._run

    def wrong(step: StaticStep, *args: Any) -> Any:
        if fault == "nan":
            return run(step, *args) * torch.nan
        step._columns[_gpu_common.LENGTH, :1] -= 1  # one token too early
        return run(step, *args)

    monkeypatch.setattr(StaticStep, "_run", wrong)
    with pytest.raises(SystemExit, match="results are wrong"):
        rehearse("steps", tmp_path)
    results = json.loads((tmp_path / "steps.json").read_text())
    assert not results["rows"] and "differ" in results["failed"]


def test_a_difference_that_is_nan_is_not_lost() -> None:
    values = [[(0.0, True), (float("nan"), True)]]
    assert math.isnan(_choice.largest_difference(values, values))


@pytest.mark.parametrize("tied", [False, True])
def test_texts_may_differ_at_near_ties_only(tied: bool) -> None:
    model = _gpu_common.causal_model("smollm2-135m", "float32", "cpu", tiny=True)
    prompt, mask = (5, 6, 7), HeadMask("L0H0")
    (answer,) = _gpu_texts.generated(model, [prompt], mask, 1, 4).values()
    other = [*answer[:2], (answer[2] + 1) % 256, answer[3]]
    if tied:  # equal rows of the output projection
        with torch.no_grad():
            model.lm_head.weight[other[2]] = model.lm_head.weight[answer[2]]
    expected = {(prompt, mask): answer}
    if not tied:
        with pytest.raises(_gpu_common.WrongResultsError, match="1 of 1 texts differ"):
            _gpu_texts.compare_texts(model, {(prompt, mask): other}, expected)
        return
    counts = _gpu_texts.compare_texts(model, {(prompt, mask): other}, expected)
    assert counts == {"texts": 1, "identical": 0, "near_ties": 1}


def test_the_hosts_time_is_that_between_steps_without_waits_and_prompts() -> None:
    """Steps of 10 ms start every 12 ms after 1 ms of waiting; prompts run before the sixth step, other rows follow."""
    trace = _gpu_trace.Trace("cpu", wall=1.0)
    begin = 0.0
    for number in range(12):
        begin += 0.5 if number == 5 else 0.012
        rows = 4 if number < 10 else 2
        step = _gpu_trace.StepTrace(
            rows, int(number >= 5), number if rows == 4 else number - 10, begin, 0.001 * number, begin
        )
        step.last, step.started = begin + 0.010, 0.010
        trace.steps.append(step)
    summary = trace.summary()
    assert summary["steady_steps"] == 5  # from the fourth on, but not to the sixth, and not to other rows
    assert summary["host_ms"] == pytest.approx(1.0) and summary["host_wait_ms"] == pytest.approx(1.0)
    assert summary["steady_ms"] == pytest.approx(12.0) and summary["busy_share"] == pytest.approx(10 / 12)
    assert summary["step_share_of_run"] == pytest.approx(0.12)


def test_layers_of_the_filters_model_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    options = gpu_engine.parsed(["--part", "filter"])
    for free, layers in ((139, 32), (40, 19)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free << 30, 0))
        assert _gpu_filter.fitting_layers(options, 8192) == layers


def test_the_roofline_is_that_of_the_design() -> None:
    """128 rows of 300 keys of the 8B shape, at 780 TFLOP/s and 4.3 TB/s: 4.66 ms."""
    roofline = object.__new__(_gpu_steps.Roofline)
    roofline.weights, roofline.token_bytes = 7504658432, 131072
    roofline.weight_bytes = 2 * roofline.weights
    roofline.flops_ms, roofline.bytes_ms = 780e9, 4.3e9
    roofline._products_ms = {128: 4.0, 256: 6.0}
    assert roofline.limit(128, 300)["limit_ms"] == pytest.approx(4.66, abs=0.01)
    assert roofline.limit(256, 300)["limit_ms"] == pytest.approx(7.26, abs=0.02)  # products take longer than weights
    assert roofline.limit(256, 300)["limit_at_shapes_ms"] == pytest.approx(6.0 + 2.34, abs=0.01)
    shape = _gpu_common.causal_model("llama-3-8b", "bfloat16", "meta")
    linear = [module for module in shape.modules() if isinstance(module, torch.nn.Linear)]
    assert sum(module.weight.numel() for module in linear) == roofline.weights
