"""The grid on tiny models: cells equal lm-eval alone, hashes, kills, two runners, failures, and what is refused."""

from __future__ import annotations

import functools
import json
import os
import random
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.utils import sanitize_list
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune.architectures import map_model
from lmeval_prune.checkpoints.loading import load_pretrained
from lmeval_prune.cli import main
from lmeval_prune.grid import cells as cells_module
from lmeval_prune.grid import worker as worker_module
from lmeval_prune.grid.cells import cells_of
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.preparations import Prune, RandomHeads
from lmeval_prune.grid.run import run
from lmeval_prune.interventions import HeadMask
from lmeval_prune.models import identity as identity_module
from lmeval_prune.models.answer_store import AnswerStore, read_answers
from lmeval_prune.pruners.baselines import Magnitude
from tests.conftest import ROOT, task_manager
from tests.kills import killing_after, run_killed
from tests.test_command_line import lm_eval

RANDOM = {"prepare": {"random_heads": {"share": 0.4, "seed": {"each": [0, 1]}}}}


def described(folder: Path, **changes: Any) -> dict[str, Any]:
    """A grid as its YAML would have it."""
    return {
        "model": {"pretrained": str(folder), "dtype": "float64"},
        "variants": {
            "dense": {},
            "head {heads}": {"heads": {"each": ["L0H1", "L1H2"]}},
            "random {seed}": RANDOM,
            "filter": {"token_filter": {"ratio": 0.4, "warmup": 3}},
        },
        "tasks": [{"task": "prune_tiny_words", "gen_kwargs": {"max_gen_toks": 8}}, "prune_tiny_choice"],
        "limit": 4,
        "batch_size": 4,
        "device": "cpu",
        "measure": False,
        "baseline": "dense",
        **changes,
    }


def results_of(folder: Path, key: str) -> dict[str, Any]:
    return dict(json.loads(GridFolder(folder).results(key).read_text())["results"])


def outcomes(folder: Path) -> dict[str, Any]:
    """Read everything of a grid's cells that must not depend on how it was run."""
    cells = {}
    for path in sorted((folder / "cells").iterdir()):
        if not path.name.startswith("."):
            files = {file.name: file.read_bytes() for file in path.glob("samples_*.jsonl")}
            cells[path.name] = {**files, "results": results_of(folder, path.name)}
    return cells


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grids") / "whole"
    summary = run(Grid.of(described(tiny_folder)), str(folder))
    assert summary.failed == [] and summary.cells == summary.new == 12
    return folder


def test_a_cell_is_lm_eval_alone(tiny_folder: Path, whole: Path, tmp_path: Path) -> None:
    for entry in GridFolder(whole).read()["cells"]:
        about = json.loads((whole / "cells" / entry["key"] / "cell.json").read_text())
        arguments = {**entry["model_args"], "device": "cpu", "batch_size": 4}
        if entry["prepare"]:
            arguments["mask"] = str(whole / "prepared" / about["prepared"] / "mask.json")
        alone = simple_evaluate(
            model="pruned-hf", model_args=arguments, task_manager=task_manager(), **about["evaluation"]
        )
        (rows,) = alone["samples"].values()
        (path,) = (whole / "cells" / entry["key"]).glob("samples_*.jsonl")
        stored = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["resps"] for row in stored] == json.loads(json.dumps([sanitize_list(row["resps"]) for row in rows]))
        assert results_of(whole, entry["key"]) == json.loads(json.dumps(alone["results"]))


def test_sampled_tries_of_masks_share_a_pass_too(tiny_folder: Path, tmp_path: Path) -> None:
    variants = {"dense": {}, "head": {"heads": "L1H2"}, "other seed": {"seed": 5}}
    tasks = [{"task": "prune_tiny_words_pass4", "gen_kwargs": {"max_gen_toks": 6}}]
    assert run(Grid.of(described(tiny_folder, variants=variants, tasks=tasks, limit=3)), str(tmp_path / "g")).new == 3
    tries = {}
    for path in (tmp_path / "g").glob("cells/*/cell.json"):
        about = json.loads(path.read_text())
        (samples,) = path.parent.glob("samples_*.jsonl")
        tries[about["variant"]] = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
        assert about["ran"]["variants_in_this_pass"] == {"dense": 2, "head": 1, "other seed": 1}[about["variant"]]
        arguments = {**about["model_args"], "engine": "batched", "device": "cpu"}
        torch.manual_seed(about["seed"])
        seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"), about["seed"])
        evaluation = {**about["evaluation"], **seeds, "task_manager": task_manager()}
        alone = simple_evaluate(model="pruned-hf", model_args=arguments, **evaluation)
        (rows,) = alone["samples"].values()
        assert tries[about["variant"]] == [row["resps"] for row in rows]
    assert len({str(responses) for responses in tries.values()}) == 3


def test_variants_differ_and_masks_shared_a_pass(whole: Path) -> None:
    responses, passes = {}, {}
    for entry in GridFolder(whole).read()["cells"]:
        about = json.loads((whole / "cells" / entry["key"] / "cell.json").read_text())
        passes[entry["variant"], entry["task"]] = about["ran"]["variants_in_this_pass"]
        if entry["task"] == "prune_tiny_words":
            (path,) = (whole / "cells" / entry["key"]).glob("samples_*.jsonl")
            responses[entry["variant"]] = str([json.loads(line)["resps"] for line in path.read_text().splitlines()])
    assert len(set(responses.values())) == len(responses) == 6
    assert passes["dense", "prune_tiny_words"] == 5 and passes["filter", "prune_tiny_words"] == 1
    computed = [json.loads(p.read_text())["ran"]["answers_computed"] for p in whole.glob("cells/*/cell.json")]
    assert sum(computed) == 12 * 4 + 6 * 12  # 4 questions; 4 with 4 choices: nothing twice
    masks = [json.loads(path.read_text())["settings"]["heads"] for path in whole.glob("prepared/*/mask.json")]
    assert [len(heads) for heads in masks] == [3, 3] and masks[0] != masks[1]  # 40% of 8 heads, made once


# ---------------------------------------------------------------------- resumed, killed, shared


def answers_stored(folder: Path) -> int:
    return len({record["key"] for file in folder.glob("answers/*") for record in read_answers(file)})


def test_a_grid_that_is_there_runs_nothing(tiny_folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.glob("cells/*/*")}
    monkeypatch.setattr(AnswerStore, "add", lambda *_: pytest.fail("something was computed"))
    assert run(Grid.of(described(tiny_folder)), str(whole)).new == 0
    assert {path: path.stat().st_mtime_ns for path in whole.glob("cells/*/*")} == before


def kill_after(count: int) -> None:
    """Let this process kill itself at the count-th answer stored, text written, file or folder moved into its place."""
    watched = killing_after(count)
    AnswerStore.add = watched(AnswerStore.add)
    Path.replace = watched(Path.replace)


@pytest.mark.parametrize("times", [3, pytest.param(9, marks=pytest.mark.long)])
def test_it_can_be_killed_at_any_moment(tiny_folder: Path, whole: Path, tmp_path: Path, times: int) -> None:
    """SIGKILL at the very first moment and at random ones; the end is that of an undisturbed run."""
    output, moments, killed, states = tmp_path / "killed", random.Random(1), 0, []
    for moment in (0, *(moments.randint(0, 25) for _ in range(times))):
        child = os.fork()
        if child == 0:
            try:
                kill_after(moment)
                run(Grid.of(described(tiny_folder)), str(output))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        cells = [path for path in output.glob("cells/*") if not path.name.startswith(".")]
        states.append((answers_stored(output), len(cells)))
    assert killed >= times - 1 and len(set(states)) > times // 2, states
    assert run(Grid.of(described(tiny_folder)), str(output)).failed == []
    assert outcomes(output) == outcomes(whole)
    assert not list(output.glob("cells/.*"))  # no half is left


def test_two_runners_share_a_folder(tiny_folder: Path, whole: Path, tmp_path: Path) -> None:
    """Two processes at once: no cell is evaluated twice, and the end is that of one."""
    output, children = tmp_path / "two", []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = int(bool(run(Grid.of(described(tiny_folder)), str(output)).failed))
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert outcomes(output) == outcomes(whole)
    lines = [line for path in output.glob("answers/*/rank-*.jsonl") for line in path.read_text().splitlines()]
    assert lines and len(lines) == len({json.loads(line)["key"] for line in lines})


def test_a_failed_cell_is_recorded_and_tried_again_on_request(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "grid.yaml"
    content = described(tiny_folder, variants={"dense": {}, "head": {"heads": "L0H1"}}, tasks=["prune_tiny_choice"])
    path.write_text(json.dumps(content))
    tried = []

    def broken(self: Any, requests: list[Any], **_: Any) -> Any:
        tried.append(len(requests))
        raise RuntimeError("no room\nleft")

    from lmeval_prune.grid.worker import VariantLM

    command = ["grid", "run", str(path), "--output", str(tmp_path / "g")]
    with monkeypatch.context() as patch:
        patch.setattr(VariantLM, "loglikelihood", broken)
        assert main(command) == 1
        assert main(command) == 1 and len(tried) == 2  # not tried again
    assert main([*command, "--retry-failed"]) == 0
    assert not list((tmp_path / "g" / "failed").iterdir())


def test_a_cell_whose_samples_were_not_written_is_not_done(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval's writer only logs its errors."""
    write = EvaluationTracker.save_results_samples
    with monkeypatch.context() as patch:
        patch.setattr(
            EvaluationTracker,
            "save_results_samples",
            lambda *args, samples, **kwargs: write(*args, samples=samples[:-1], **kwargs),
        )
        assert len(run(Grid.of(described(tiny_folder, **SMALL)), str(tmp_path / "g")).failed) == 2
    assert run(Grid.of(described(tiny_folder, **SMALL)), str(tmp_path / "g"), retry_failed=True).new == 2


def test_cells_fail_with_their_preparation(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = described(tiny_folder, variants={"dense": {}, "random {seed}": RANDOM}, tasks=["prune_tiny_choice"])
    with monkeypatch.context() as patch:
        patch.setattr(RandomHeads, "make", lambda *_: 1 / 0)
        summary = run(Grid.of(content), str(tmp_path / "g"))
    assert summary.new == 1 and len(summary.failed) == 2
    assert run(Grid.of(content), str(tmp_path / "g"), retry_failed=True).failed == []


VERSIONED: list[tuple[Any, str, dict[str, Any]]] = [
    (HeadMask, "version", {"heads": "L0H1"}),
    (RandomHeads, "version", {"prepare": {"random_heads": {"share": 0.4}}}),
    (Prune, "version", {"prepare": {"prune": {"method": "magnitude", "ratio": 0.3}}}),
    (Magnitude, "version", {"prepare": {"prune": {"method": "magnitude", "ratio": 0.3}}}),
    (identity_module, "ANSWERING", {}),
]


@pytest.mark.parametrize(("owner", "name", "variant"), VERSIONED)
def test_a_cell_depends_on_the_versions_of_what_computes_it(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, variant: dict[str, Any]
) -> None:
    def cell() -> Any:
        identity_module.code_versions.cache_clear()
        variants = {"v": variant}
        (cell,) = cells_of(Grid.of(described(tiny_folder, **{**SMALL, "variants": variants, "baseline": None})))
        return cell

    before = cell()
    monkeypatch.setattr(owner, name, getattr(owner, name) + 1)
    after = cell()
    assert before.key != after.key and (not before.prepared or before.prepared != after.prepared)
    monkeypatch.undo()
    assert cell().key == before.key


SMALL: dict[str, Any] = {"variants": {"dense": {}, "head": {"heads": "L0H1"}}, "tasks": ["prune_tiny_choice"]}


def test_costs_are_measured_in_the_end(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it measures, or asked for only when all cells are done."""
    grid = Grid.of(described(tiny_folder, **SMALL, measure=True))
    monkeypatch.setattr(worker_module, "measure", lambda _: {"parameters": 1})
    run_killed(worker_module, "measure", 0, lambda: run(grid, str(tmp_path / "killed")))
    assert run(grid, str(tmp_path / "killed")).new == 0  # both cells were done
    assert run(Grid.of(described(tiny_folder, **SMALL)), str(tmp_path / "later")).new == 2
    assert run(grid, str(tmp_path / "later")).new == 0
    for name in ("killed", "later"):
        folder = GridFolder(tmp_path / name)
        assert all(folder.costs(cell["costs"]) for cell in folder.read()["cells"])


def test_a_model_that_was_changed_after_its_cells_were_named_is_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens and its type are those of the hash, under arguments of the tokenizer, too."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    variants = {"bos": {"add_bos_token": True}, "slow": {"use_fast_tokenizer": False}, "head": {"heads": "L0H1"}}
    settings = {"variants": variants, "tasks": ["prune_tiny_choice"], "baseline": None, "limit": 1}
    grid = Grid.of(described(folder, **settings))
    assert run(grid, str(tmp_path / "g")).failed == []
    cells = cells_of(grid)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0, "rope_parameters": None}))
    monkeypatch.setattr("lmeval_prune.grid.run.cells_of", lambda _: cells)
    failed = run(grid, str(tmp_path / "h")).failed
    assert len(failed) == 3


def test_files_that_change_after_cells_were_named_change_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask, a calibration text, and the code and the data of a task."""
    model_map = map_model(load_pretrained(str(tiny_folder)))
    mask, text = tmp_path / "mask.json", tmp_path / "text.txt"

    def write(number: int) -> None:
        HeadMask(f"L{number}H1").save(mask, model_map)
        text.write_text("\n\n".join(f"Ann {number} has {n * number + n} apples." for n in range(40)))
        (tmp_path / "task").mkdir(exist_ok=True)
        question = {"question": f"{number} and 2", "answer": "4"}
        (tmp_path / "data.jsonl").write_text(json.dumps(question))
        shutil.rmtree(tmp_path / "json", ignore_errors=True)
        (tmp_path / "task" / "mine.yaml").write_text(TASK.replace("DATA", str(tmp_path / "data.jsonl")))
        code = PROMPTS.replace("from helper import NUMBER", "NUMBER = '4'").replace('"?"', f'"?{number}"')
        (tmp_path / "task" / "prompts.py").write_text(code)

    prune = {"method": "flap", "ratio": 0.3, "text": str(text), "windows": 4, "tokens": 16}
    variants: Any = {"mask": {"mask": str(mask)}, "plan": {"prepare": {"prune": prune}}}
    variants |= {"both": {**variants["mask"], **variants["plan"]}}
    tasks = [str(tmp_path / "task" / "mine.yaml")]
    grid = Grid.of(described(tiny_folder, variants=variants, tasks=tasks, baseline=None, distance=1))
    write(0)
    assert run(grid, str(tmp_path / "before")).failed == []
    cells = cells_of(grid)
    write(1)
    assert {cell.key for cell in cells}.isdisjoint(cell.key for cell in cells_of(grid))
    monkeypatch.setattr("lmeval_prune.grid.run.cells_of", lambda _: cells)
    assert run(grid, str(tmp_path / "after")).failed == []
    plans = [
        json.loads(next((tmp_path / name).glob("prepared/*/plan.json")).read_text()) for name in ("before", "after")
    ]
    assert plans[0] == plans[1] and outcomes(tmp_path / "before") == outcomes(tmp_path / "after")


# ---------------------------------------------------------------------- the hash


BASE: dict[str, Any] = {"variants": {"v": {"heads": "L0H1"}}, "tasks": ["prune_tiny_words"]}
CHANGES_ANSWERS: list[dict[str, Any]] = [
    {"variants": {"v": {}}},
    {"variants": {"v": {"heads": "L0H2"}}},
    {"variants": {"v": {"heads": "L0H1", "token_filter": 0.2}}},
    {"variants": {"v": {"token_filter": {"ratio": 0.2, "warmup": 4}}}},
    {"variants": {"v": {"heads": "L0H1", "dtype": "float32"}}},
    {"variants": {"v": {"heads": "L0H1", "max_length": 100}}},
    {"variants": {"v": {"heads": "L0H1", "add_bos_token": True}}},
    {"variants": {"v": {"prepare": {"random_heads": {"share": 0.4}}}}},
    {"variants": {"v": {"prepare": {"random_heads": {"share": 0.4, "seed": 1}}}}},
    {"variants": {"v": {"seed": 5, "prepare": {"random_heads": {"share": 0.4}}}}},
    {"variants": {"v": {"prepare": {"random_heads": {"share": 0.5}}}}},
    {"variants": {"v": {"router": "random", "router_pool": "L0H1+dense"}}},
    {"variants": {"v": {"router": "random", "router_pool": "L0H1+dense", "router_seed": 1}}},
    {"limit": 3},
    {"limit": None},
    {"tasks": ["prune_tiny_choice"]},
    {"tasks": [{"task": "prune_tiny_words", "gen_kwargs": {"max_gen_toks": 7}}]},
    {"tasks": [{"task": "prune_tiny_words", "gen_kwargs": {"do_sample": True, "temperature": 0.5}}]},
    {"tasks": [{"task": "prune_tiny_words", "gen_kwargs": {"do_sample": True, "temperature": 0.5}}], "seed": 7},
    {"tasks": ["prune_tiny_words_pass4"]},
    {"apply_chat_template": True},
    {"system_instruction": "Be brief."},
    {"variants": {"v": {"heads": "L0H1", "deterministic": False, "engine": "batched"}}},
]
HALF: dict[str, Any] = {"heads": "L0H1", "dtype": "bfloat16"}
CHANGES_ANSWERS_IN_HALF_PRECISION: list[dict[str, Any]] = [
    {"batch_size": 1},
    {"variants": {"v": {**HALF, "engine": "generate"}}},
    {"variants": {"v": {**HALF, "engine": "batched", "engine_rows": 3}}},
    {"variants": {"v": {**HALF, "engine": "batched", "deterministic": False}}},
    {"variants": {"v": {"heads": "L0H1", "dtype": "float32", "mixed_precision_dtype": "bfloat16"}}},
]
CHANGES_NOTHING: list[dict[str, Any]] = [
    {"batch_size": 1},
    {"device": None},
    {"title": "Another"},
    {"together": 1},
    {"measure": True},
    {"seed": 7},  # nothing is drawn
    {"baseline": "v"},
    {"variants": {"another name": {"heads": "L0H1"}}},
    {"variants": {"v": {"heads": ["L0H1"]}}},
    {"variants": {"v": {"heads": {"heads": "L0H1", "allow_empty_layer": True}}}},
    {"variants": {"v": {"heads": "L0H1", "engine": "generate"}}},
    {"variants": {"v": {"heads": "L0H1", "engine": "batched", "engine_rows": 3}}},
    {"variants": {"v": {"heads": "L0H1", "selected_on": ["prune_tiny_words"]}}},
    {"variants": {"v": {"heads": "L0H1", "dtype": "auto"}}},  # the checkpoint's own is float64
    {"tasks": [{"task": "prune_tiny_words", "name": "other", "metric": "exact_match"}]},
    {"tasks": [{"task": "prune_tiny_words", "num_fewshot": 2}]},  # the task says 0, and lm-eval keeps that
    {"limit": 4.0},
]


def cell_of(folder: Path, **changes: Any) -> Any:
    (cell,) = cells_of(Grid.of(described(folder, **{"baseline": None, **BASE, **changes})))
    return cell


def key_of(folder: Path, **changes: Any) -> str:
    return str(cell_of(folder, **changes).key)


def test_the_hash_changes_with_what_changes_answers_and_with_nothing_else(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of(tiny_folder)
    others = [key_of(tiny_folder, **change) for change in CHANGES_ANSWERS]
    assert len({key, *others}) == 1 + len(CHANGES_ANSWERS)
    for change in CHANGES_NOTHING:
        assert key_of(tiny_folder, **change) == key, change

    copy = tmp_path / "elsewhere"
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model.save_pretrained(copy)
    tokenizer.save_pretrained(copy)
    assert key_of(copy) == key  # where it lies does not count
    model.generation_config.repetition_penalty = 1.5
    model.save_pretrained(copy)
    changed = key_of(copy)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    model.save_pretrained(copy)
    assert len({key, changed, key_of(copy)}) == 3
    monkeypatch.setattr(cells_module, "versions", lambda served: {"lm_eval": "9"})
    assert key_of(tiny_folder) != key


def test_in_half_precision_the_hash_covers_how_it_is_computed(tiny_folder: Path) -> None:
    cell = functools.partial(cell_of, tiny_folder)
    half = {"variants": {"v": HALF}}
    cells = [cell(**half), *(cell(**{**half, **change}) for change in CHANGES_ANSWERS_IN_HALF_PRECISION)]
    assert len({entry.key for entry in cells}) == len(cells)
    assert len({entry.answers for entry in cells}) == len(cells)  # nor does one find the answers of another
    assert {cell(**half, **change).key for change in ({"together": 1}, {"device": None})} == {cells[0].key}
    assert cell(variants={"v": {**HALF, "dtype": "half"}}).key == cell(variants={"v": {**HALF, "dtype": "float16"}}).key


def test_a_type_that_only_the_weights_know_is_not_taken_for_another(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    named = key_of(folder, model={"pretrained": str(folder), "dtype": "auto"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": None}))
    auto, *others = (
        key_of(folder, model={"pretrained": str(folder), "dtype": dtype}) for dtype in ("auto", "bfloat16", "float32")
    )
    assert named in others and auto not in others
    assert key_of(folder, model={"pretrained": str(folder)}) == auto


TASK = """
task: prune_of_my_own
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: !function prompts.prompt
doc_to_target: answer
process_results: !function prompts.score
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
PROMPTS = """
def tail():
    return "?"
def prompt(doc):
    return doc["question"] + tail()
def right(answer):
    from helper import NUMBER
    return answer == NUMBER
def score(doc, results):
    return {"exact_match": float(right(results[0]))}
"""


def test_a_task_counts_by_its_prompts_and_by_all_files_beside_its_code(tiny_folder: Path, tmp_path: Path) -> None:
    """Also where a function that its functions call is changed, or a file that they import; not by its own place."""

    def key(name: str, data: str = "answer", prompts: str = PROMPTS, helper: str = "NUMBER = '4'", **more: str) -> str:
        folder = tmp_path / name  # of its own: modules are not read again
        folder.mkdir()
        question = json.dumps({"question": "2 and 2", "answer": "4", data: "4"})
        source = tmp_path / "data.jsonl"  # not beside the task, whose YAML file would name its own folder
        source.write_text(question)
        texts = {"prompts.py": prompts, "helper.py": helper, "notes.txt": "", **more}
        for file, text in texts.items():
            (folder / file).write_text(text)
        (folder / "mine.yaml").write_text(TASK.replace("DATA", str(source)))
        return key_of(tiny_folder, tasks=[str(folder / "mine.yaml")])

    first = key("first")
    assert key("again") == key("beside", **{"notes.txt": "x = 1"}) == first
    changed = [
        key("prompts", prompts=PROMPTS.replace('"?"', '" ?"')),
        key("scores", prompts=PROMPTS.replace("answer == NUMBER", "answer in NUMBER")),
        key("imported", helper="NUMBER = '5'"),
        key("data", data="hint"),
    ]
    assert len({first, *changed}) == 5


def test_a_mask_counts_by_its_heads_and_a_router_by_its_content(tiny_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    HeadMask("L0H1").save(tmp_path / "mask.json", map_model(model))
    assert key_of(tiny_folder, variants={"v": {"mask": str(tmp_path / "mask.json")}}) == key_of(tiny_folder)


# ---------------------------------------------------------------------- the YAML


def test_axes_are_multiplied_and_named(tiny_folder: Path) -> None:
    variants = {
        "a {heads}": {"heads": {"each": ["L0H1", "L0H2"]}, "dtype": {"each": ["float32", "float64"]}},
        "b": {"token_filter": {"ratio": {"each": [0.1, 0.2]}}, "seed": 3},
        "c": None,
    }
    grid = Grid.of(described(tiny_folder, variants=variants, baseline=None))
    assert [variant.name for variant in grid.variants] == [
        *("a L0H1 dtype=float32", "a L0H1 dtype=float64", "a L0H2 dtype=float32", "a L0H2 dtype=float64"),
        *("b ratio=0.1", "b ratio=0.2", "c"),
    ]
    assert grid.variants[4].model_args["token_filter"] == {"ratio": 0.1} and grid.variants[4].seed == 3


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "grid").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_can_be_read(path: Path) -> None:
    grid = Grid.read(str(path))
    assert {task.task for task in grid.tasks} <= set(task_manager().all_tasks)
    assert grid.baseline in {variant.name for variant in grid.variants}


def test_the_command_of_a_cell_does_the_same(tiny_folder: Path, whole: Path, tmp_path: Path) -> None:
    entry = next(cell for cell in GridFolder(whole).read()["cells"] if cell["variant"] == "filter")
    program, *words = shlex.split(entry["command"])
    assert program == "lm_eval" and lm_eval(*words, cwd=tmp_path) == 0
    (path,) = tmp_path.rglob("results_*.json")
    assert json.loads(path.read_text())["results"] == results_of(whole, entry["key"])


# ---------------------------------------------------------------------- what it stands on
