"""The demo: its figures against plain passes, its page and table, and what it prints."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune.cli import main
from lmeval_prune.demo import run
from lmeval_prune.demo.figures import curves
from lmeval_prune.interventions import HeadMask
from lmeval_prune.tasks import data
from tests.conftest import strict_json


@pytest.fixture(scope="module")
def output(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo of a tiny random model, on few problems."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        load = data.load
        patch.setattr(run.data, "load", lambda *names: load(*names).select(range(24)))
        patch.setattr(run, "SHARES", (0.25, 0.5))
        patch.setattr(run, "SHOWN", 0.5)
        patch.setattr(run, "NEW_TOKENS", 5)
        printed = io.StringIO()
        with redirect_stdout(printed):
            assert main(["demo", "--pretrained", str(tiny_folder), "--output", str(folder)]) == 0
    (folder / "printed.txt").write_text(printed.getvalue())
    return folder


def test_distances_and_accuracies_are_those_of_plain_passes(tiny_folder: Path, output: Path) -> None:
    results = strict_json(output / "demo.json")
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    problems = data.load("tiny_cloze", "test").to_list()[:24]

    def logits(text: str) -> torch.Tensor:
        return (
            model(torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits[0].double().log_softmax(-1)
        )

    assert len(results["masks"]) == 2 * (1 + run.DRAWS) and len(results["accuracy"]) == len(results["masks"]) + 1
    for name, heads in results["masks"].items():
        assert len(heads) == {"25": 2, "50": 4}[name[:2]]  # of eight heads
        divergences, solved = [], []
        for problem in problems:
            text = f"{problem['question']} {problem['choices'][problem['gold']]}."
            with torch.inference_mode():
                dense = logits(text)[:-1]
                with HeadMask("+".join(heads), allow_empty_layer=True).applied_to(model):
                    other = logits(text)[:-1]
                    start = len(tokenizer.encode(problem["question"], add_special_tokens=False))
                    values = []
                    for choice in problem["choices"]:
                        ids = torch.tensor(tokenizer.encode(f" {choice}", add_special_tokens=False))
                        rows = logits(f"{problem['question']} {choice}")[start - 1 : -1]
                        values.append(float(rows.gather(-1, ids[:, None]).sum()))
            divergences += (dense.exp() * (dense - other)).sum(-1).tolist()
            solved.append(max(range(4), key=values.__getitem__) == problem["gold"])
        mean = sum(divergences) / len(divergences)
        assert results["distances"][name]["mean_kld"] == pytest.approx(mean, abs=1e-5)
        assert results["accuracy"][name] == solved


def test_the_figures_of_the_curves_are_those_of_the_results(output: Path) -> None:
    results = strict_json(output / "demo.json")
    divergence, agreement, accuracy = curves(results)
    for share in results["shares"]:
        draws = [results["distances"][run.drawn_name(share, n)]["mean_kld"] for n in range(run.DRAWS)]
        point = divergence.random[share]
        assert (point.low, point.high) == (min(draws), max(draws)) and min(draws) <= point.value <= max(draws)
        right = results["accuracy"][run.ranked_name(share)]
        assert accuracy.ranked[share].value == sum(right) / len(right)
        assert agreement.ranked[share].value == results["distances"][run.ranked_name(share)]["same_top"]


def test_the_engine_gives_the_texts_of_generate(output: Path) -> None:
    answers = strict_json(output / "demo.json")["answers"]
    assert answers["identical"] == answers["texts"] == answers["prompts"] * answers["masks"] > 40


def test_the_cut_model_is_smaller_and_loads(output: Path) -> None:
    cut = strict_json(output / "demo.json")["cut"]
    before, after = cut["parameters"]
    assert after < before and len(cut["accuracy"]) == 24 and (output / "cut" / "config.json").is_file()


def test_the_page_is_self_contained_and_has_every_head(output: Path) -> None:
    page = (output / "page.html").read_text()
    assert not re.search(r"<script|https?://|src=", page)
    results = strict_json(output / "demo.json")
    for layer, scores in enumerate(results["scores"].values()):
        for head, score in enumerate(scores):
            assert f"L{layer}H{head}: norm + entropy {score:.2f}, rank" in page
    assert all(item["question"] in page for item in results["answers"]["shown"])


def test_only_tables_and_next_commands_are_printed(output: Path) -> None:
    printed = (output / "printed.txt").read_text()
    assert len(printed.splitlines()) <= 40 and "lmeval-prune distance" in printed and "page.html" in printed
    assert (output / "demo.log").is_file()
