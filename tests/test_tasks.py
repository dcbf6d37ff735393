"""Data loading, task YAMLs and their results functions."""

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from lm_eval.tasks import TaskManager

from lmeval_prune import InputError
from lmeval_prune.cli import main
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.plugin import registration
from lmeval_prune.tasks import data, loading, scored, scorers, splits
from lmeval_prune.tasks.loading import code_digest, load_task, load_tasks
from tests.conftest import ROOT, task_manager

SIZES = {
    ("gsm8k", "train"): 7473, ("gsm8k", "test"): 1319, ("math500", "test"): 500, ("asdiv", "test"): 2305, ("asdiv_a", "all"): 1218,
    ("math23k", "train"): 22160, ("math23k", "test"): 1000, ("tiny_words", "test"): 24, ("tiny_choice", "test"): 24,
    ("tiny_cloze", "train"): 114, ("tiny_cloze", "test"): 113,
}  # fmt: skip


def folder_of(name: str, request: pytest.FixtureRequest) -> Path | None:
    """Return the folder of a data set; None where it is packaged. Without the folder the test is skipped."""
    return None if name.startswith("tiny") else request.getfixturevalue("shared_data")


def test_sizes_and_fields(request: pytest.FixtureRequest) -> None:
    for (name, split), size in SIZES.items():
        rows = data.load(name, split, folder_of(name, request)).to_list()
        assert len(rows) == size, name
        assert all(row["question"].strip() and str(row.get("target", "x")).strip() for row in rows)


def test_metadata_that_would_be_passed_over_or_leak_is_refused() -> None:
    with pytest.raises(InputError, match="unknown metadata data_spilt; did you mean 'data_split'"):
        data.custom_dataset(prune_data="tiny_words", data_spilt="train")
    with pytest.raises(InputError, match="prun_test"):  # would score the test split
        data.custom_dataset(prune_data="tiny_words", prun_test="train")
    assert len(data.custom_dataset(prune_data="tiny_words", pretrained="x", dtype="float32")["test"]) == 24


def test_splits_are_added_and_sliced(shared_data: Path, caplog: pytest.LogCaptureFixture) -> None:
    def texts(split: str) -> list[str]:
        return list(data.load("asdiv_a", split, shared_data)["question"])

    first, second = texts("fold0"), texts("fold1")
    assert texts("fold0 + fold1") == first + second
    assert texts("fold1[:50%]") + texts("fold1[50%:]") == second
    assert abs(len(texts("fold1[:50%]")) - len(second) // 2) <= 1
    assert texts("fold0[3:5]+fold1[-2:]") == first[3:5] + second[-2:]
    assert texts("all")[:7] == texts("all[:7]")
    with pytest.raises(InputError, match="has no split 'fold7'; it has all, fold0"):
        texts("fold0+fold7[:2]")
    with pytest.raises(InputError, match="in common"):
        texts("fold0+all[:50%]")
    with pytest.raises(InputError, match="few-shot examples, which are of train"):
        data.custom_dataset(prune_data="tiny_cloze", prune_train="train", data_split="train[:3]+test")
    splits.warn_of_scored_splits("the sweep", "prune_gsm8k", ["train+test[:10]"], ["test"], "sweep train")
    [record] = caplog.records
    assert "questions of the split test, which prune_gsm8k scores" in record.getMessage()


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])  # of the rows
@pytest.mark.parametrize("name", ["gsm8k", "math500", "asdiv_a", "math23k", "tiny_words"])
def test_gold_scores_one_and_the_next_items_gold_zero(name: str, step: int, request: pytest.FixtureRequest) -> None:
    rows = data.load(name, "all" if name == "asdiv_a" else "test", folder_of(name, request)).to_list()[::step]
    score = scorers.mathematics if name == "math500" else scorers.number
    forms = ["\\boxed{%s}", "So it is\n#### %s"] + ([] if name == "math500" else ["The answer is %s."])
    missed = {r["target"] for r in rows for form in forms if score(r, [form % r["target"]])["exact_match"] != 1}
    print(f"{name}: {len(missed)} of {len(rows)} gold answers are not equal to themselves: {sorted(missed)[:20]}")
    assert not missed
    for row, other in itertools.pairwise(rows):
        actual = score(row, ["\\boxed{" + other["target"] + "}"])["exact_match"]
        try:
            gold, other_value = (float(text.replace(",", "")) for text in (row["target"], other["target"]))
            assert actual == (abs(gold - other_value) <= 1e-6), (row, other)
        except ValueError:
            plain = [text.replace("x=", "").replace(" ", "") for text in (row["target"], other["target"])]
            assert actual == (plain[0] == plain[1]), plain


def test_asdiv_is_read_from_its_authors_files(tmp_path: Path) -> None:
    (tmp_path / "nfolds" / "asdiv-a").mkdir(parents=True)
    for fold in range(5):
        (tmp_path / "nfolds" / "asdiv-a" / f"fold{fold}.txt").write_text("p-2\n" if fold == 3 else "\n")
    (tmp_path / "ASDiv.xml").write_text(
        "<Machine-Reading-Corpus-File><ProblemSet>"
        '<Problem ID="p-1" Grade="2" Source="s"><Body>A b.</Body><Question>C?</Question>'
        "<Solution-Type>Set</Solution-Type><Answer>3; 4</Answer><Formula></Formula></Problem>"
        '<Problem ID="p-2" Grade="1" Source="s"><Body>One and one.</Body><Question>Sum?</Question>'
        "<Solution-Type>Addition</Solution-Type><Answer>2 (apples)</Answer><Formula>1+1=2</Formula></Problem>"
        "</ProblemSet></Machine-Reading-Corpus-File>"
    )
    rows = list(data._asdiv_rows("test", str(tmp_path)))
    assert [row["asdiv_a_fold"] for row in rows] == [None, 3]
    assert data._asdiv_a(rows[0]) is None
    document = data._asdiv_a(rows[1])
    assert (document["question"], document["target"], document["grade"]) == ("One and one. Sum?", "2", 1)


def test_every_task_loads_and_builds_a_prompt(shared_data: Path) -> None:
    registration.register()
    manager = task_manager({"data_dir": str(shared_data), "pretrained": "x", "heads": "L0H0"})
    names = [name for name in manager.all_subtasks if name.startswith("prune_")]
    assert len(names) >= 7 and "prune_tiny" in manager.all_groups
    for name, task in manager.load(names)["tasks"].items():
        task.build_all_requests(limit=2)
        prompt = task.instances[0].args[0]
        is_sentence = name == "prune_tiny_cloze" or name.startswith("prune_tiny_endings")
        assert len(prompt) > 20 or is_sentence, name
        is_chat = "shot" not in name and name != "prune_tiny_choice" and not is_sentence
        assert ("boxed{}" in prompt) == is_chat
        if name == "prune_gsm8k_5shot":
            assert prompt.count("Question:") == 6 and prompt.count("####") == 5


@pytest.mark.parametrize(
    ("response", "target", "answer", "right"),
    [
        (" Rome, which is", "Rome", "Rome", 1), ("\nrome", "Rome", "rome", 1), (" Romeo", "Rome", "Romeo", 0),
        (" New York City", "New York", "New York", 1), (" the Rome", "Rome", "the", 0), (" ...", "Rome", "", 0),
    ],
)  # fmt: skip
def test_a_sentence_is_completed_by_its_first_words(response: str, target: str, answer: str, right: int) -> None:
    scores = scorers.ending({"target": target}, [response])
    assert (scores["extracted"], scores["exact_match"]) == (answer, right)
    assert scores["how"] == ("end" if answer else "none")


def test_part_figures_have_a_standard_error_and_a_count() -> None:
    part = scored.part_metrics("level_1")
    values = [1.0, None, 0.0, 1.0, None, 1.0]
    aggregated = {name: aggregate(values) for name, aggregate in part.items()}
    assert aggregated["level_1"] == 0.75 and aggregated["level_1_n"] == 4
    assert aggregated["level_1_stderr"] == pytest.approx(np.std([1, 0, 1, 1], ddof=1) / 2)
    assert part["level_1_stderr"]([None, 1.0]) == "N/A" and part["level_1_n"]([None]) == 0


def test_our_folder_comes_before_the_users_and_not_twice(tmp_path: Path) -> None:
    registration.register()
    registration.register()
    (tmp_path / "mine.yaml").write_text(
        json.dumps({"task": "prune_gsm8k", "output_type": "generate_until", "dataset_path": "mine"})
    )
    manager = TaskManager(include_path=str(tmp_path))
    assert manager._index["prune_gsm8k"].yaml_path.parent == tmp_path
    assert "prune_tiny" in manager._index
    assert "prune_tiny" not in TaskManager(include_defaults=False).all_groups


def test_commands_take_a_folder_of_ones_own_tasks(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tasks of the folder are gone after the command."""
    own = tmp_path / "tasks"
    own.mkdir()
    (own / "mine.yaml").write_text(f"include: {ROOT / 'tasks' / 'tiny' / 'prune_tiny_words.yaml'}\ntask: prune_mine\n")
    words = ["distance", str(tiny_folder), "--heads", "L0H1", "--task", "prune_mine", "--limit", "1"]
    words += ["--gen_kwargs", "max_gen_toks=2", "--output", str(tmp_path / "distance.json")]
    assert main([*words, "--include_path", str(own)]) == 0
    assert main(words) == 2
    assert "there is no task prune_mine " in capsys.readouterr().err
    grid = tmp_path / "grid.yaml"
    tasks = {"tasks": [{"task": "prune_mine", "limit": 1}], "measure": False, "gen_kwargs": {"max_gen_toks": 2}}
    grid.write_text(json.dumps({"model": {"pretrained": str(tiny_folder)}, "variants": {"dense": None}} | tasks))
    assert main(["grid", "run", str(grid), "--output", str(tmp_path / "grid"), "--include_path", str(own)]) == 0
    assert f"--include_path {own} " in GridFolder(tmp_path / "grid").read()["cells"][0]["command"]


def test_one_task_is_wanted_and_a_group_is_named() -> None:
    manager = task_manager()
    names = {name.rpartition("::")[2] for name in load_tasks(manager, ["prune_tiny"])}
    assert names == {"prune_tiny_choice", "prune_tiny_words"}
    assert load_task(manager, "prune_tiny_choice").config.task == "prune_tiny_choice"
    with pytest.raises(InputError, match=r"prune_tiny is a group of tasks; name one of them: .*prune_tiny_choice"):
        load_task(manager, "prune_tiny")
    path = next(Path(data.__file__).parent.rglob("prune_tiny_choice.yaml"))
    assert load_task(manager, str(path)).config.task == "prune_tiny_choice"
    with pytest.raises(InputError, match=r"there is no task prune_tinny .*; did you mean 'prune_tiny"):
        load_tasks(manager, ["prune_tiny", "prune_tinny"])


def test_lm_evals_index_is_read_only_where_a_name_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(f"include: {ROOT / 'tasks' / 'tiny' / 'prune_tiny_words.yaml'}\ntask: own\n")
    group = tmp_path / "group.yaml"
    group.write_text(json.dumps({"group": "both", "task": ["prune_tiny_words", "gsm8k"]}))

    class IndexRead(Exception):
        pass

    def index_read() -> None:
        raise IndexRead

    monkeypatch.setattr("lmeval_prune.tasks.manager._lm_eval_index", index_read)
    registration.register()
    for manager in (loading.task_manager({"data_dir": "x"}), TaskManager(metadata={"data_dir": "x"})):
        assert manager.metadata == {"data_dir": "x"}
        loaded = load_tasks(manager, ["prune_tiny", str(own)]).values()
        assert {"prune_tiny_words", "own"} <= {task.config.task for task in loaded}
        assert manager.match_tasks(["prune_tiny_words", "prune_tiny"]) == ["prune_tiny", "prune_tiny_words"]
        for name in ("gsm8k", "prune_commonsense", "prune_tinny"):
            with pytest.raises(InputError, match=rf"{name} cannot be loaded \(IndexRead"):
                manager.load([name])
        with pytest.raises(IndexRead):
            manager.match_tasks(["prune_*"])
        with pytest.raises(IndexRead):
            manager.list_all_tasks()
        with pytest.raises(InputError, match="cannot be loaded"):
            load_tasks(manager, [str(group)])


def test_a_tasks_code_is_the_files_beside_it_and_this_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So answers that were scored by other code are not taken from a grid's store."""
    (tmp_path / "judging.py").write_text("def judge(): ...\n")
    (tmp_path / "task.yaml").write_text("task: mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    judge, own = importlib.import_module("judging").judge, tmp_path / "own"
    (own / "words").mkdir(parents=True)
    monkeypatch.setattr(loading, "_OWN", [own])
    digests = [code_digest(None, {"process_results": judge})]
    changes = {"task.yaml": "task: yours\n", "judging.py": "import lmeval_prune\n", "own/words/en.yaml": ""}
    for file, text in changes.items():
        (tmp_path / file).write_text(text)
        digests.append(code_digest(None, {"process_results": judge}))
    assert len({*digests}) == 4
    assert code_digest(None, {"process_results": judge}, own=False) != digests[-1]
    assert code_digest(None, {"metric_list": [{"metric": sum}]}) == ""
