"""`lmeval-prune sweep` on tiny models: any order, any interruption, several ranks; and what it refuses."""

from __future__ import annotations

import os
import random
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import HeadMask, InputError
from lmeval_prune.artefacts import digest
from lmeval_prune.models import answer_store as answer_store_module
from lmeval_prune.models import identity as identity_module
from lmeval_prune.models.answer_store import AnswerStore, read_answers
from lmeval_prune.sprint import outcomes as outcomes_module
from lmeval_prune.sprint.options import SweepOptions
from lmeval_prune.sprint.outcomes import OutcomeStore
from lmeval_prune.sprint.sweep import run_sweep
from tests.conftest import file_contents, task_manager
from tests.kills import killing_after
from tests.test_command_line import call

POOL = ["dense", "L0H0", "L0H1", "L0H2", "L0H3", "L1H2"]


def sweep(folder: Path, output: Path, **options: Any) -> Any:
    arguments = {"pretrained": str(folder), "dtype": "float64", "device": "cpu", **options.pop("model_args", {})}
    settings = {"heads": "L0H*+L1H2", "limit": 5, "gen_kwargs": {"max_gen_toks": 10}, **options}
    return run_sweep(SweepOptions(arguments, settings.pop("tasks", ("prune_tiny_words",)), str(output), **settings))


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps") / "whole"
    sweep(tiny_folder, folder)
    return folder


def test_each_cell_equals_generate_with_that_head_pruned(tiny_folder: Path, whole: Path) -> None:
    outcomes = OutcomeStore(whole).read()
    assert outcomes.pool == POOL and outcomes.z.shape == (5, 6) and outcomes.observed.all()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    rows = {row["doc_id"]: row for row in outcomes.questions}
    task = task_manager().load(["prune_tiny_words"])["tasks"]["prune_tiny_words"]
    for cell in OutcomeStore(whole).cells():
        doc = task.eval_docs[cell["doc_id"]]
        assert rows[cell["doc_id"]]["question"] == doc["question"]
        prompt = tokenizer(task.doc_to_text(doc), return_tensors="pt")
        with nullcontext() if cell["attempt"] == "dense" else HeadMask(cell["attempt"]).applied_to(plain):
            out = plain.generate(**prompt, max_new_tokens=10, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert cell["tokens"] == out.tolist()
        assert cell["outcome"] == bool(task.scores(doc, cell["text"])["exact_match"])


def kill_after(count: int) -> None:
    """Kill this process at the count-th stored answer, written file or removed file."""
    watched = killing_after(count)
    AnswerStore.add = watched(AnswerStore.add)
    for module, name in (
        (outcomes_module, "write_table"),
        (outcomes_module, "write_artefact"),
        (answer_store_module, "write_artefact"),
    ):
        setattr(module, name, watched(getattr(module, name)))
    Path.unlink = watched(Path.unlink)


def test_killed_sweeps_resume_to_identical_files(tiny_folder: Path, whole: Path, tmp_path: Path) -> None:
    """SIGKILL at ten random moments; the final files are those of an uninterrupted run."""
    output, moments = tmp_path / "killed", random.Random(0)
    states = []
    killed = 0
    for _ in range(10):
        moment = moments.randint(0, 7)
        child = os.fork()
        if child == 0:
            try:
                kill_after(moment)
                sweep(tiny_folder, output)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        states.append(len({record["key"] for record in read_answers(output)}))
    assert killed >= 8 and len(set(states)) > 3  # runs went on from where others were killed
    sweep(tiny_folder, output)
    assert file_contents(output) == file_contents(whole)


def test_extended_sweep_decodes_nothing_twice(
    tiny_folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = []
    add = AnswerStore.add
    monkeypatch.setattr(AnswerStore, "add", lambda self, *args: (run.append(args[0]), add(self, *args)))
    sweep(tiny_folder, tmp_path / "s", heads="L0H1", limit=3)
    sweep(tiny_folder, tmp_path / "s", heads="L0H*+L1H2", limit=3)
    sweep(tiny_folder, tmp_path / "s")
    assert file_contents(tmp_path / "s") == file_contents(whole)
    assert len(run) == len(set(run)) == 30
    sweep(tiny_folder, tmp_path / "s")
    assert len(run) == 30


def test_two_ranks_write_the_same_files_as_one(tiny_folder: Path, whole: Path, tmp_path: Path) -> None:
    command = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "lmeval_prune", "sweep"]
    command += ["--model_args", f"pretrained={tiny_folder},dtype=float64", "--tasks", "prune_tiny_words"]
    command += ["--heads", "L0H*+L1H2", "--limit", "5", "--gen_kwargs", "max_gen_toks=10"]
    done = call(*command, "--output", str(tmp_path / "two"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert file_contents(tmp_path / "two") == file_contents(whole)


def test_few_shot_prompts_are_lm_evals_own(tiny_folder: Path, tmp_path: Path) -> None:
    task = few_shot(tmp_path)
    arguments = {"pretrained": str(tiny_folder), "dtype": "float64", "device": "cpu"}
    for chat in (False, True):
        reference = simple_evaluate(
            task_manager=task_manager(),
            model="pruned-hf",
            model_args=arguments,
            tasks=[task],
            num_fewshot=2,
            apply_chat_template=chat,
            log_samples=True,
        )
        prompts = {sample["doc_id"]: sample["arguments"][0][0] for sample in reference["samples"]["mine"]}
        options = {"tasks": (task,), "num_fewshot": 2, "heads": "L0H0", "gen_kwargs": {}, "apply_chat_template": chat}
        measured = sweep(tiny_folder, tmp_path / f"s{chat}", limit=2, **options)
        assert {row["doc_id"]: row["prompt"] for row in measured.questions} == {
            row["doc_id"]: digest(prompts[row["doc_id"]]) for row in measured.questions
        }
        assert len(sweep(tiny_folder, tmp_path / f"s{chat}", limit=4, **options).questions) == 4


def test_random_prompts_are_the_same_in_a_resumed_sweep(tiny_folder: Path, tmp_path: Path) -> None:
    task = Path(few_shot(tmp_path))
    (tmp_path / "drawing.py").write_text(
        "import random\nimport numpy as np\n"
        "def prompt(doc): return f'{doc[\"ask\"]} {random.random()} {np.random.rand()}'\n"
    )
    text = task.read_text().replace('doc_to_text: "{{ask}}"', "doc_to_text: !function drawing.prompt")
    task.write_text(text)
    options = {"tasks": (str(task),), "heads": "L0H0", "gen_kwargs": {}, "limit": 2}
    first = sweep(tiny_folder, tmp_path / "s", **options)
    random.seed(), np.random.seed(7)
    again = sweep(tiny_folder, tmp_path / "s", **options)  # refuses other prompts
    assert again.questions == first.questions and len({row["prompt"] for row in first.questions}) == 2


def few_shot(folder: Path) -> str:
    """A user's own YAML: two filters, another name for the question, two splits."""
    for name in ("train", "held"):
        lines = [f'{{"ask": "{name} {i}+{i}?", "gold": "{2 * i}."}}\n' for i in range(4)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "mine.yaml").write_text(
        f"""
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/train.jsonl, held: {folder}/held.jsonl}}}}
output_type: generate_until
test_split: held
fewshot_split: train
doc_to_text: "{{{{ask}}}}"
doc_to_target: "{{{{gold}}}}"
generation_kwargs: {{until: ["\n"], max_gen_toks: 4, do_sample: false}}
metadata: {{version: 1, question_field: ask}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
filter_list:
  - {{name: first, filter: [{{function: regex, regex_pattern: '(\\d)'}}, {{function: take_first}}]}}
  - {{name: all, filter: [{{function: take_first}}]}}
"""
    )
    return str(folder / "mine.yaml")


def test_a_question_is_not_its_own_exemplar(tiny_folder: Path, tmp_path: Path) -> None:
    """lm-eval leaves a question out of its exemplars only where the split of these is named."""
    task = Path(few_shot(tmp_path))
    options = {"tasks": (str(task),), "split": "train", "heads": "L0H0", "gen_kwargs": {}, "limit": None}
    task.write_text(task.read_text().replace("fewshot_split: train", "training_split: train"))
    with pytest.raises(InputError):
        sweep(tiny_folder, tmp_path / "s", num_fewshot=3, **options)
    sweep(tiny_folder, tmp_path / "without", **options)
    task.write_text(task.read_text().replace("training_split: train", "fewshot_split: train"))
    sweep(tiny_folder, tmp_path / "s", num_fewshot=3, **options)  # of four


def test_a_users_folder_of_tasks_may_be_moved(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    task = Path(few_shot(tmp_path / "tasks"))
    (task.parent / "own.py").write_text("def score(doc, results): return {'exact_match': 1}\n")
    task.write_text(task.read_text() + "process_results: !function own.score\n")
    options = {"heads": "L0H0", "gen_kwargs": {}, "limit": 2}
    first = sweep(tiny_folder, tmp_path / "s", tasks=(str(task),), **options)
    shutil.copytree(task.parent, tmp_path / "moved")
    assert (
        sweep(tiny_folder, tmp_path / "s", tasks=(str(tmp_path / "moved" / task.name),), **options).z == first.z
    ).all()
    other = tmp_path / "moved" / task.name
    other.write_text(other.read_text().replace("own.score", "own.another"))
    (tmp_path / "moved" / "own.py").write_text("def another(doc, results): return {'exact_match': 1}\n")
    with pytest.raises(InputError):
        sweep(tiny_folder, tmp_path / "s", tasks=(str(other),), **options)


def test_a_store_of_another_model_setting_or_version_is_refused(
    tiny_folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "other")
    before = file_contents(whole)
    for folder, options in (
        (tmp_path / "other", {}),
        (tiny_folder, {"gen_kwargs": {"max_gen_toks": 11}}),
        (tiny_folder, {"system_instruction": "Be brief."}),
    ):
        with pytest.raises(InputError):
            sweep(folder, whole, **options)
    monkeypatch.setattr(identity_module, "ANSWERING", 2)  # the version of the method
    identity_module.code_versions.cache_clear()
    with pytest.raises(InputError):
        sweep(tiny_folder, whole)
    identity_module.code_versions.cache_clear()
    assert file_contents(whole) == before


@pytest.mark.parametrize(
    "options",
    [
        {"tasks": ("prune_tiny_choice",)},
        {"tasks": ("prune_tiny_words_pass4",)},
        {"gen_kwargs": {"do_sample": True, "temperature": 0.7}},
        {"metric": "acc"},
        {"heads": "L9H0"},
    ],
    ids=str,
)
def test_sweeps_whose_outcomes_would_mean_something_else_are_refused(
    tiny_folder: Path, tmp_path: Path, options: dict
) -> None:
    with pytest.raises(InputError):
        sweep(tiny_folder, tmp_path / "s", **options)


def test_any_generative_task_of_lm_eval_can_be_swept(tiny_folder: Path, tmp_path: Path) -> None:
    options = {"tasks": (few_shot(tmp_path),), "heads": "L0H0", "gen_kwargs": {}, "limit": None}
    result = sweep(tiny_folder, tmp_path / "s", **options)
    assert result.texts == [f"held {i}+{i}?" for i in range(4)]
    assert result.tasks["mine"]["metric"] == "exact_match,first" and result.tasks["mine"]["question_field"] == "ask"
    assert result.tasks["mine"]["scored_splits"] == ["held"]
    assert np.isin(result.z, [0, 1]).all()
    more = sweep(tiny_folder, tmp_path / "s", split="train", **options)
    assert more.texts == [*result.texts, *(f"train {i}+{i}?" for i in range(4))] and more.observed.all()
    assert more.tasks["mine"]["scored_splits"] == ["held"]  # whichever split was swept
