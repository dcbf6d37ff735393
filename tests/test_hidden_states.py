"""Routers that embed a question by the model's last hidden state of its prompt: swept, fitted, reported, routed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import HeadMask, InputError
from lmeval_prune.artefacts import digest
from lmeval_prune.models import hidden_states as models_states
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.hidden_states import LAST_HIDDEN_STATE
from lmeval_prune.sprint import hidden_states
from lmeval_prune.sprint.fit import fit
from lmeval_prune.sprint.options import FitOptions, ReportOptions, SweepOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.sprint.report import write_report
from lmeval_prune.sprint.router import Router
from lmeval_prune.sprint.sweep import Sweep
from tests.test_routing import evaluate

PROMPT = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def sweep(folder: Path, store: Path, **options: Any) -> Outcomes:
    arguments = {"pretrained": str(folder), "dtype": "float64", "device": "cpu", **options.pop("arguments", {})}
    settings = {"heads": "L0H*", "gen_kwargs": {"max_gen_toks": 8}, "hidden_states": True, **options}
    outcomes = Sweep(SweepOptions(arguments, ("prune_tiny_words",), str(store), **settings)).run()
    assert outcomes is not None
    return outcomes


@pytest.fixture(scope="module")
def store(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states") / "store"
    sweep(tiny_folder, folder)
    return folder


@pytest.fixture(scope="module")
def router(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router of outcomes that teach something (a random model solves nothing)."""
    folder, outcomes = tmp_path_factory.mktemp("states") / "router", OutcomeStore(store).read()
    z = np.random.default_rng(0).integers(0, 2, outcomes.z.shape).astype(np.float32)
    options = FitOptions(router="knn", options={"k": 3, "weighting": "distance", "prior": 1}, holdout=0.3)
    fit(replace(outcomes, z=z), LAST_HIDDEN_STATE, options).save(folder)
    return folder


def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prompts whose hidden states are computed from now on."""
    prompts: list[str] = []
    original = models_states.last_hidden_states

    def spy(lm: Any, requests: Any) -> Any:
        for request, state in zip(requests, original(lm, requests), strict=True):
            prompts.append(digest(request.args[0]))
            yield state

    monkeypatch.setattr(hidden_states, "last_hidden_states", spy)
    return prompts


def test_a_sweep_stores_what_transformers_computes(tiny_folder: Path, store: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)

    def literal(question: str) -> torch.Tensor:
        with torch.no_grad():
            output = model(**tokenizer(PROMPT.format(question), return_tensors="pt"), output_hidden_states=True)
        return output.hidden_states[-1][0, -1].float()

    outcomes = OutcomeStore(store).read()
    torch.testing.assert_close(hidden_states.states_of(outcomes), torch.stack([*map(literal, outcomes.texts)]))
    pruned = sweep(tiny_folder, tmp_path / "pruned", limit=2, arguments={"heads": "L1H2"})
    with HeadMask("L1H2").applied_to(model):
        expected = torch.stack([*map(literal, pruned.texts)])
    torch.testing.assert_close(hidden_states.states_of(pruned), expected)
    assert not torch.allclose(expected, torch.stack([*map(literal, pruned.texts)]))


def test_a_killed_sweep_computes_only_what_is_missing(
    tiny_folder: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = sweep(tiny_folder, tmp_path / "s", hidden_states=False)
    with pytest.raises(InputError, match=r"lacks last_hidden_state of \d+ questions; run its sweep again"):
        fit(outcomes, LAST_HIDDEN_STATE)
    whole = hidden_states.read_states(store, outcomes.model)
    part = dict(list(whole.items())[:4])
    hidden_states._write(tmp_path / "s" / "hidden-states-0.safetensors", part, outcomes.model)
    prompts = computed(monkeypatch)
    again = hidden_states.read_states(tmp_path / "s", sweep(tiny_folder, tmp_path / "s").model)
    assert again.keys() == whole.keys() and all(torch.equal(again[name], whole[name]) for name in whole)
    assert sorted(prompts) == sorted(whole.keys() - part.keys())
    prompts.clear()
    sweep(tiny_folder, tmp_path / "s")
    assert not prompts

    def killed(lm: Any, requests: Any) -> Any:
        for number, state in enumerate(models_states.last_hidden_states(lm, requests)):
            if number == 3:
                raise KeyboardInterrupt
            yield state

    monkeypatch.setattr(hidden_states, "last_hidden_states", killed)
    monkeypatch.setattr(hidden_states, "SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        sweep(tiny_folder, tmp_path / "killed")
    assert len(hidden_states.read_states(tmp_path / "killed", outcomes.model)) == 3


def test_a_routed_run_and_a_report_order_as_the_store_says(
    tiny_folder: Path, store: Path, router: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # not installed
    results, samples = evaluate(tiny_folder, router=str(router))
    outcomes = OutcomeStore(store).read()
    expected = Router.load(router).reading(outcomes).order([doc["question"] for doc, *_ in samples.values()])
    assert len({tuple(order) for order in expected}) > 1
    assert [heads for *_, heads in samples.values()] == [order[:4] for order in expected]
    assert results["config"]["pruning"]["router"]["encoder"] == LAST_HIDDEN_STATE
    options = {"router": str(router), "n": 2, "shortlist": 2}
    assert write_report(ReportOptions(str(store), str(tmp_path / "report"), **options))[0].is_file()


def test_unsuitable_stores_models_and_tasks_are_refused(
    tiny_folder: Path, store: Path, router: Path, tmp_path: Path
) -> None:
    outcomes = OutcomeStore(store).read()
    with pytest.raises(InputError, match="hidden states of another model"):
        hidden_states.states_of(replace(outcomes, model={**outcomes.model, "weights": "other"}))
    with pytest.raises(InputError, match="the store lacks"):
        Router.load(router).reading(replace(outcomes, folder=None))
    arguments = {"pretrained": str(tiny_folder)}
    options: dict[str, Any] = {"server": "http://localhost:1", "hidden_states": True}
    with pytest.raises(InputError, match="servers give no hidden states"):
        Sweep(SweepOptions(arguments, ("prune_tiny_words",), str(tmp_path / "s"), **options)).run()
    routing = Arguments.of({"pretrained": str(tiny_folder), "router": str(router)}).router
    requests = [
        SimpleNamespace(doc={"question": "How many?"}, args=(prompt, {}), task_name="t", repeats=2) for prompt in "ab"
    ]
    with pytest.raises(InputError, match="by another prompt than an earlier task"):
        routing.prepare(requests, None)
    with pytest.raises(InputError, match="servers give no hidden states: use pruned-hf"):
        routing.prepare(requests[:1], SimpleNamespace(model="served"))
