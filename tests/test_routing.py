"""`router=` in `pruned-hf`: each try under its own head, in the router's order, greedily."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import HeadMask, InputError
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.sprint.options import FitOptions, SweepOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.sprint.router import Router, fit
from lmeval_prune.sprint.sweep import run_sweep
from tests.conftest import task_manager

TASK = "prune_tiny_words_pass4"


@pytest.fixture(scope="module")
def store(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outcomes of six questions under the unpruned model and all heads of one layer."""
    folder = tmp_path_factory.mktemp("routing") / "store"
    arguments = {"pretrained": str(tiny_folder), "dtype": "float64", "device": "cpu"}
    run_sweep(SweepOptions(arguments, ("prune_tiny_words",), str(folder), heads="L0H*", gen_kwargs={"max_gen_toks": 8}))
    return folder


def taught(store: Path) -> Outcomes:
    """The store's questions with informative outcomes (a random model solves nothing)."""
    outcomes = OutcomeStore(store).read()
    z = np.random.default_rng(0).integers(0, 2, outcomes.z.shape).astype(np.float32)
    return Outcomes(z, outcomes.pool, outcomes.questions, outcomes.model, outcomes.tasks)


@pytest.fixture(scope="module")
def router(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routing") / "router"
    fit(taught(store), "all-minilm-l6-v2", FitOptions(epochs=5)).save(folder)
    return folder


def evaluate(folder: Path, task: str = TASK, **arguments: Any) -> tuple[dict, dict]:
    """Run lm-eval; return the results and, by document, the texts and heads of the tries."""
    settings = {"pretrained": str(folder), "dtype": "float64", "device": "cpu", **arguments}
    result = simple_evaluate(
        task_manager=task_manager(),
        model="pruned-hf", model_args=settings, tasks=[task], limit=3, gen_kwargs={"max_gen_toks": 8}, log_samples=True,
        random_seed=None, numpy_random_seed=None, torch_random_seed=None,
    )  # fmt: skip
    samples = {
        s["doc_id"]: (s["doc"], s["resps"][0], s["arguments"][0][1].get("attempts")) for s in result["samples"][task]
    }
    return result, samples


def test_each_try_is_the_greedy_answer_under_its_head(tiny_folder: Path, router: Path) -> None:
    results, samples = evaluate(tiny_folder, router=str(router))
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    expected = Router.load(router).order([doc["question"] for doc, _, _ in samples.values()])
    for (doc, texts, heads), order in zip(samples.values(), expected, strict=True):
        assert heads == order[:4] and len(set(heads)) == 4
        prompt = tokenizer(
            f"{doc['question']}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
            return_tensors="pt",
        )
        for head, text in zip(heads, texts, strict=True):
            with nullcontext() if head == DENSE else HeadMask(head).applied_to(plain):
                out = plain.generate(**prompt, max_new_tokens=8, do_sample=False)
            assert text == tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    info = results["config"]["pruning"]["router"]
    assert info["policy"] == "router" and info["question_field"] == "question" and len(info["pool"]) == 5


def test_a_routed_run_answers_as_the_sweep_did(tiny_folder: Path, store: Path, router: Path) -> None:
    _, samples = evaluate(tiny_folder, router=str(router))
    cells = {(c["doc_id"], c["attempt"]): c["text"] for c in OutcomeStore(store).cells()}
    for number, (_, texts, heads) in samples.items():
        assert texts == [cells[number, head] for head in heads]


@pytest.mark.parametrize("policy", ["random", "random_top", "best", "oracle"])
def test_baselines_order_the_pool(tiny_folder: Path, store: Path, policy: str) -> None:
    results, samples = evaluate(tiny_folder, router=policy, router_store=str(store), router_seed=3)
    assert all(len(set(heads)) == 4 for _, _, heads in samples.values())
    info = results["config"]["pruning"]["router"]
    assert info["policy"] == policy and ("not a method" in info.get("note", "")) == (policy == "oracle")
    assert ("outcomes" in info) == (policy == "oracle")  # by which `compare` tells two oracles from seeds of one
    if policy == "random":
        assert len({tuple(heads) for _, _, heads in samples.values()}) > 1
        again = evaluate(tiny_folder, router=policy, router_store=str(store), router_seed=3)[1]
        other = evaluate(tiny_folder, router=policy, router_pool="L0H*+dense", router_seed=4)[1]
        assert again == samples != other


def test_questions_that_a_policy_was_made_from_are_no_test(
    tiny_folder: Path, store: Path, router: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The evaluation asks three of the six; another router was fitted to the last of these three and the others."""
    fit(taught(store).rows(range(2, 6)), "all-minilm-l6-v2", FitOptions(epochs=5)).save(tmp_path / "other")
    expected = {str(router): 3, str(tmp_path / "other"): 1, "best": 3, "random": 0, "oracle": 0}
    for source, count in expected.items():
        caplog.clear()
        settings = {} if Path(source).is_dir() else {"router_store": str(store)}
        results, _ = evaluate(tiny_folder, router=source, **settings)
        assert results["config"]["pruning"]["router"].get("training_questions", 0) == count
        warned = f"router={source} was made from the outcomes of {count} of the 3 questions: this is no test of it"
        assert [record.getMessage() for record in caplog.records if "no test" in record.getMessage()] == (
            [warned] if count else []
        )


def test_unsuitable_tasks_and_models_are_refused(tiny_folder: Path, router: Path, store: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        evaluate(tiny_folder, "prune_tiny_choice", router=str(router))
    other = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "other")
    for arguments in ({"router": str(router)}, {"router": "best", "router_store": str(store)}):
        with pytest.raises(InputError):
            PrunedHFLM(str(tmp_path / "other"), dtype="float64", device="cpu", **arguments)
    PrunedHFLM(str(tmp_path / "other"), dtype="float64", device="cpu", router=str(router), allow_other_model=True)


def test_router_accepts_its_model_in_a_smaller_dtype(tiny_folder: Path, router: Path, store: Path) -> None:
    for arguments in ({"router": str(router)}, {"router": "best", "router_store": str(store)}):
        for dtype in ("float32", "bfloat16", "float16"):
            PrunedHFLM(str(tiny_folder), dtype=dtype, device="cpu", **arguments)
        for other in ({"heads": "L1H0"}, {"token_filter": 0.3}):
            with pytest.raises(InputError):
                PrunedHFLM(str(tiny_folder), dtype="bfloat16", device="cpu", **other, **arguments)
