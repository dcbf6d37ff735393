"""Sweeps and routed runs over pools of any variants, greedy and sampled: each cell is what `generate` gives."""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from lm_eval import simple_evaluate
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import InputError, Plan, map_model
from lmeval_prune.models.answer_store import AnswerStore
from lmeval_prune.models.attempts import Attempt, short_label
from lmeval_prune.models.variants import Variant
from lmeval_prune.sprint import policies
from lmeval_prune.sprint.mixes import Mix
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from tests.adapters import adapter
from tests.conftest import file_contents, task_manager
from tests.test_routing import evaluate
from tests.test_sweep import kill_after, sweep

PASS = "prune_tiny_words_pass4"
SAMPLED = ("dense@1.5#0-3", "each@1.2#0", "L0H1+L1H0@1.2#0-1")


def options(folder: Path, files: Path) -> dict[str, Any]:
    """A pool with every kind of variant."""
    plan = files / "plan.json"
    if not plan.exists():
        model_map = map_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
        Plan(heads="L0H1+L1H2", channels={"L1": "3-30"}).save(plan, model_map)
    variants = {
        "filter": {"token_filter": {"ratio": 0.4, "focus": "uniform", "warmup": 3}},
        "filter and head": {"heads": "L0H1", "token_filter": {"ratio": 0.4, "focus": "uniform", "warmup": 3}},
        "probe": {"probe_pruning": {"ratio": 0.3, "skip_first": 0}},
        "plan": {"plan": str(plan)},
        "adapter": {"lora": adapter()},
    }
    return {"heads": "L0H0+L1H2", "variants": variants, "random_sets": ("2x2", "3x1"), "sampled": SAMPLED, "limit": 3}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pools") / "whole"
    sweep(tiny_folder, folder, likelihood=True, **options(tiny_folder, files))
    return folder


def test_each_greedy_cell_is_generate_under_its_variant(tiny_folder: Path, whole: Path) -> None:
    outcomes = OutcomeStore(whole).read()
    greedy = outcomes.greedy().pool
    assert len(greedy) == 1 + 2 + 3 + 5 and outcomes.observed.all()
    labels = {outcomes.label(name) for name in greedy}
    assert {"dense", "L0H0", "filter", "plan", "adapter", "probe", "2 random heads #0", "3 random heads #0"} <= labels
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    model_map = map_model(plain)
    texts = {row["doc_id"]: row["question"] for row in outcomes.questions}
    seen: dict[str, list[list[int]]] = {}
    for cell in OutcomeStore(whole).cells():
        attempt = Attempt.named(cell["attempt"])
        if attempt.is_sampled:
            continue
        variant = Variant.named(attempt.variant, model_map, outcomes.variants.get(attempt.variant))
        text = texts[cell["doc_id"]] + "\nPlease reason step by step, and put your final answer within \\boxed{}."
        prompt = tokenizer(text, return_tensors="pt")
        with ExitStack() as stack:
            for intervention in variant.interventions:
                stack.enter_context(intervention.applied_to(plain, model_map))
            out = plain.generate(**prompt, max_new_tokens=10, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert cell["tokens"] == out.tolist(), short_label(cell["attempt"])
        seen.setdefault(attempt.variant, []).append(cell["tokens"])
    dense = seen.pop("dense")
    assert all(answers != dense for name, answers in seen.items() if "+" in name or name.startswith("{"))


def test_log_probabilities_are_those_of_the_unpruned_model(tiny_folder: Path, whole: Path) -> None:
    outcomes = OutcomeStore(whole).read()
    assert np.isfinite(outcomes.logprobs).all()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    texts = {row["doc_id"]: row["question"] for row in outcomes.questions}
    for cell in OutcomeStore(whole).cells()[::7]:
        text = texts[cell["doc_id"]] + "\nPlease reason step by step, and put your final answer within \\boxed{}."
        prompt = tokenizer(text)["input_ids"]
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *cell["tokens"]]])).logits[0]
        literal = [float(logits[len(prompt) - 1 + i].log_softmax(-1)[token]) for i, token in enumerate(cell["tokens"])]
        assert cell["logprob"] == pytest.approx(sum(literal) / len(literal), abs=1e-9)


def test_a_killed_sweep_of_any_pool_resumes_to_identical_files(
    tiny_folder: Path, files: Path, whole: Path, tmp_path: Path
) -> None:
    output, moments, killed = tmp_path / "killed", random.Random(1), 0
    for _ in range(5):
        moment = moments.randint(0, 40)
        child = os.fork()
        if child == 0:
            try:
                kill_after(moment)
                sweep(tiny_folder, output, likelihood=True, **options(tiny_folder, files))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed >= 4
    sweep(tiny_folder, output, likelihood=True, **options(tiny_folder, files))
    assert file_contents(output) == file_contents(whole)


def test_extending_a_pool_decodes_nothing_twice_and_keeps_log_probabilities(
    tiny_folder: Path, files: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[str] = []
    add = AnswerStore.add
    monkeypatch.setattr(AnswerStore, "add", lambda self, *args: (run.append(args[0]), add(self, *args)))
    some = options(tiny_folder, files)
    few = {**some, "variants": {"plan": some["variants"]["plan"]}, "random_sets": ()}
    sweep(tiny_folder, tmp_path / "s", likelihood=True, **few)
    assert np.isfinite(OutcomeStore(tmp_path / "s").read().logprobs).all()
    sweep(tiny_folder, tmp_path / "s", **some)
    partly = OutcomeStore(tmp_path / "s").read().logprobs
    assert np.isfinite(partly).any() and not np.isfinite(partly).all()
    sweep(tiny_folder, tmp_path / "s", likelihood=True, **some)
    assert len(run) == len(set(run)) and file_contents(tmp_path / "s") == file_contents(whole)


def as_rounded(cell: dict[str, Any]) -> dict[str, Any]:
    """Compare a cell but for the rounding of its log-probability, which other requests beside it may change."""
    return cell | {"logprob": pytest.approx(cell["logprob"], rel=1e-12)}


def attempts_of(whole: Path) -> dict[str, list[str]]:
    """Draw other attempts at each question, greedy and sampled, of the unpruned model and of every kind of variant."""
    outcomes, generator = OutcomeStore(whole).read(), random.Random(2)
    return {text: generator.sample(outcomes.pool, 4 + i) for i, text in enumerate(outcomes.texts[:2])}


def test_each_question_is_asked_its_own_attempts(
    tiny_folder: Path, files: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells are those of a sweep over the whole pool, and nothing else is decoded; so after a kill."""
    some, attempts = options(tiny_folder, files) | {"likelihood": True}, attempts_of(whole)
    add, run = AnswerStore.add, []
    monkeypatch.setattr(AnswerStore, "add", lambda self, *args: (run.append(args[2]["kind"]), add(self, *args)))
    outcomes = sweep(tiny_folder, tmp_path / "s", **some, attempts=attempts)
    assert set(outcomes.pool) == {name for names in attempts.values() for name in names}
    assert set(outcomes.texts) == attempts.keys() and run.count("generate_until") == sum(map(len, attempts.values()))
    expected = {(cell["doc_id"], cell["attempt"]): cell for cell in OutcomeStore(whole).cells()}
    cells = OutcomeStore(tmp_path / "s").cells()
    assert len(cells) == sum(map(len, attempts.values()))
    assert cells == [as_rounded(expected[cell["doc_id"], cell["attempt"]]) for cell in cells]
    for row, names in zip(outcomes.z, (attempts[text] for text in outcomes.texts), strict=True):
        assert {name for name, value in zip(outcomes.pool, row, strict=True) if not np.isnan(value)} == {*names}
    child = os.fork()
    if child == 0:
        try:
            kill_after(5)
            sweep(tiny_folder, tmp_path / "killed", **some, attempts=attempts)
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    sweep(tiny_folder, tmp_path / "killed", **some, attempts=attempts)
    assert file_contents(tmp_path / "killed") == file_contents(tmp_path / "s")
    sweep(tiny_folder, tmp_path / "s", **some)  # the rest
    assert OutcomeStore(tmp_path / "s").cells() == [as_rounded(cell) for cell in OutcomeStore(whole).cells()]
    assert (tmp_path / "s/store.json").read_bytes() == (whole / "store.json").read_bytes()


def test_some_questions_can_be_asked_the_whole_pool(tiny_folder: Path, tmp_path: Path) -> None:
    texts = [row["question"] for row in sweep(tiny_folder, tmp_path / "a", heads="L0H0").questions]
    some = {texts[1]: [], texts[3]: ["dense", "L1H1@0.7#1"]}
    outcomes = sweep(tiny_folder, tmp_path / "b", heads="L0H0", attempts=some)
    assert outcomes.pool == ["dense", "L0H0", "L1H1@0.7#1"]
    known = dict(zip(outcomes.texts, outcomes.observed.tolist(), strict=True))
    assert known == {texts[1]: [True, True, True], texts[3]: [True, False, True]}


def routed(folder: Path, outcomes: Outcomes, **arguments: Any) -> tuple[dict, dict]:
    """Evaluate the store's questions; return the results, and texts and settings of the tries by document."""
    settings = {"pretrained": str(folder), "dtype": "float64", "device": "cpu", **arguments}
    results = simple_evaluate(
        "pruned-hf", settings, tasks=[PASS], samples={PASS: [row["doc_id"] for row in outcomes.questions]},
        gen_kwargs={"max_gen_toks": 10}, log_samples=True, task_manager=task_manager(), bootstrap_iters=0,
    )  # fmt: skip
    return results, {row["doc_id"]: (row["resps"][0], row["arguments"][0][1]) for row in results["samples"][PASS]}


@pytest.mark.parametrize("mix", ["dense|next", "next@1.2", "next+dense@1.5", "dense@1.5"])
def test_a_routed_run_gives_the_answers_of_the_sweep(tiny_folder: Path, whole: Path, mix: str) -> None:
    """In lm-eval, by name of each attempt."""
    outcomes = OutcomeStore(whole).read()
    results, samples = routed(tiny_folder, outcomes, router="cover", router_store=str(whole), router_mix=mix)
    cells = {(cell["doc_id"], cell["attempt"]): cell["text"] for cell in OutcomeStore(whole).cells()}
    policy, compared = policies.cover(outcomes.greedy()), 0
    for number, (texts, settings) in samples.items():
        assert settings["attempts"] == [str(attempt) for attempt in Mix.parse(mix).attempts(policy.pool, 4)]
        for name, text in zip(settings["attempts"], texts, strict=True):
            compared += (number, name) in cells
            assert cells.get((number, name), text) == text
    assert compared >= 2 * len(samples) and results["config"]["pruning"]["router"]["mix"] == mix
    accuracy = dict(zip(policy.pool, outcomes.columns(policy.pool).accuracy(), strict=True))
    weights = [accuracy[Attempt.named(name).variant] for name in settings["attempts"]]
    assert settings["weights"] == pytest.approx(weights, abs=1e-6) and len(settings["lengths"]) == 4


def test_stores_of_version_2_are_read_and_extended(tiny_folder: Path, tmp_path: Path) -> None:
    """As lmeval-prune wrote them before pools had other variants than single heads."""
    sweep(tiny_folder, tmp_path / "new", heads="L0H*", limit=2)
    sweep(tiny_folder, tmp_path / "old", heads="L0H*", limit=2)
    store = json.loads((tmp_path / "old/store.json").read_text())
    for task in store["tasks"].values():
        del task["scoring"]
    (tmp_path / "old/store.json").write_text(json.dumps({**store, "schema_version": 2}))
    cells = parquet.read_table(tmp_path / "old/cells.parquet").drop_columns(["logprob"])
    names = ["head" if name == "attempt" else name for name in cells.column_names]
    parquet.write_table(cells.rename_columns(names), tmp_path / "old/cells.parquet")
    old, new = (OutcomeStore(tmp_path / name).read() for name in ("old", "new"))
    assert old.pool == new.pool and np.array_equal(old.z, new.z) and np.array_equal(old.tokens, new.tokens)
    _, samples = evaluate(tiny_folder, router="best", router_store=str(tmp_path / "old"))
    assert all(len(set(attempts)) == 4 for _, _, attempts in samples.values())
    sweep(tiny_folder, tmp_path / "old", heads="L0H*", limit=2)
    assert file_contents(tmp_path / "old") == file_contents(tmp_path / "new")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"random_sets": ("4",)}, "random_sets='4' must be HEADSxSETS"),
        ({"random_sets": ("8x1",)}, "8 random heads cannot be pruned: the model has 8; give 1 to 6"),
        ({"sampled": ("dense@0.6",)}, "must be VARIANT@TEMPERATURE#FIRST-LAST"),
        ({"sampled": ("dense@0#1",)}, "the temperature 0 must be a number above 0"),
        ({"sampled": ("dense@1#3-1",)}, "must be VARIANT@TEMPERATURE#FIRST-LAST"),
        ({"variants": {"x": {"filter": 1}}}, "a variant has no setting 'filter'"),
        ({"variants": {"x": {"token_filter": 9}}}, "token_filter"),
        ({"cover": "nowhere"}, "nowhere is not an outcome store"),
        ({"layers": (7,)}, "no attention in layer 7"),
        (
            {"likelihood": True, "heads": "L0H0", "model_args": {"probe_pruning": {"ratio": 0.3, "skip_first": 0}}},
            "leave out likelihood",
        ),
    ],
)
def test_wrong_pools_are_one_line(tiny_folder: Path, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        sweep(tiny_folder, tmp_path / "s", **{"heads": None, **changes})
    assert "\n" not in str(error.value)


def test_a_pool_that_covers_is_chosen_from_a_store(tiny_folder: Path, whole: Path, tmp_path: Path) -> None:
    trained = OutcomeStore(whole).read().greedy()
    outcomes = sweep(tiny_folder, tmp_path / "s", heads=None, cover=str(whole), cover_size=3, limit=1)
    assert set(outcomes.pool) == {"dense", *(trained.pool[j] for j in policies.greedy_cover(trained.z, 3))}
