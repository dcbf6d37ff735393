"""The demo: its figures against plain passes, its page and table, and what it prints."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune.cli import main
from lmeval_prune.demo import run
from lmeval_prune.demo.commands import YOURS
from lmeval_prune.interventions import HeadMask
from lmeval_prune.tasks import data
from tests.conftest import strict_json
from tests.test_command_line import lm_eval


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
        printed, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(printed), redirect_stderr(errors):
            assert main(["demo", "--pretrained", str(tiny_folder), "--output", str(folder)]) == 0
    (folder / "printed.txt").write_text(printed.getvalue())
    (folder / "errors.txt").write_text(errors.getvalue())
    return folder


def test_distances_and_accuracies_are_those_of_plain_passes(tiny_folder: Path, output: Path) -> None:
    results = strict_json(output / "demo.json")
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    problems = data.load("tiny_cloze", "test").to_list()[:24]

    def logits(text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        return model(ids).logits[0].double().log_softmax(-1)

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
    points = run.curves(results).set_index(["quantity", "heads", "share"])
    for share in results["shares"]:
        draws = [results["distances"][run.drawn_name(share, n)]["mean_kld"] for n in range(run.DRAWS)]
        point = points.loc["KL, nats", "random", share]
        assert (point.low, point.high) == (min(draws), max(draws)) and min(draws) <= point.value <= max(draws)
        least, right = run.ranked_name(share), results["accuracy"][run.ranked_name(share)]
        assert points.loc["solved", "least", share].value == sum(right) / len(right)
        assert points.loc["same top", "least", share].value == results["distances"][least]["same_top"]


def test_the_engine_gives_the_texts_of_generate_and_the_cut_model_is_smaller(output: Path) -> None:
    results = strict_json(output / "demo.json")
    answers, cut = results["answers"], results["cut"]
    assert answers["identical"] == answers["texts"] == answers["prompts"] * answers["masks"] == 4 + 4 * run.DRAWS + 2
    before, after = cut["parameters"]
    assert after < before and len(cut["accuracy"]) == 24 and (output / "cut" / "config.json").is_file()


def test_the_page_is_self_contained_and_has_its_figures(output: Path) -> None:
    page = (output / "page.html").read_text()
    assert not re.search(r"<script|https?://", page) and all(x[:5] == "data:" for x in re.findall(r'src="(.*?)"', page))
    assert re.findall(r"<h1>(.*?)</h1>", page) == ["tiny-llama with pruned heads"]  # without the folders of the machine
    assert page.count("<img ") == 4 and page.count("<table>") == 2
    results = strict_json(output / "demo.json")
    assert all(item["question"] in page for item in results["answers"]["shown"])
    assert ", ".join(results["masks"][run.ranked_name(results["shares"][0])]) in page


def test_the_next_commands_run(
    tiny_folder: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are printed, without a hub and without data."""
    printed = (output / "printed.txt").read_text().splitlines()
    same = [shlex.split(line) for line in printed if line.startswith("  lm") and YOURS not in line]
    begins = [["lmeval-prune", "distance"], ["lm_eval", "--model"], ["lmeval-prune", "prune"]]
    assert [words[:2] for words in same] == begins
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMEVAL_PRUNE_DATA", raising=False)
    for program, *words in same:
        assert (lm_eval(*words, cwd=tmp_path) if program == "lm_eval" else main(words)) == 0
    assert (tmp_path / same[2][same[2].index("--cut") + 1] / "config.json").is_file()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_phone(browser: Any, output: Path, width: int) -> None:
    """What is too wide scrolls by itself."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((output / "page.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
