"""The demo: its figures against plain passes, its page and table, and what it prints."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import preflight
from lmeval_prune.cli import COMMANDS, main
from lmeval_prune.demo import run
from lmeval_prune.demo.commands import next_steps
from lmeval_prune.demo.figures import curves
from lmeval_prune.interventions import HeadMask
from lmeval_prune.options import read_options
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
    assert cut["bytes"][0] == 4 * before and 4 * after <= cut["bytes"][1] < cut["bytes"][0]
    assert after < before and len(cut["accuracy"]) == 24 and (output / "cut" / "config.json").is_file()


def test_the_page_is_self_contained_and_has_every_head(output: Path) -> None:
    page = (output / "page.html").read_text()
    assert not re.search(r"<script|https?://|src=", page)
    assert re.findall(r"<h1>(.*?)</h1>", page) == ["tiny-llama with pruned heads"]  # without the folders of the machine
    results = strict_json(output / "demo.json")
    for layer, scores in enumerate(results["scores"].values()):
        for head, score in enumerate(scores):
            assert f"L{layer}H{head}: norm + entropy {score:.2f}, rank" in page
    framed = re.findall(r'class="cell first".*?<title>(L\d+H\d+): .*?; pruned from (\d+)% on<', page)
    least = {share: results["masks"][run.ranked_name(share)] for share in results["shares"]}
    assert sorted(name for name, _ in framed) == sorted(least[0.5])
    assert sorted(name for name, share in framed if share == "25") == sorted(least[0.25])
    assert all(item["question"] in page for item in results["answers"]["shown"])


def test_only_tables_and_next_commands_are_printed(output: Path) -> None:
    printed = (output / "printed.txt").read_text()
    assert len(printed.splitlines()) <= 40 and "page.html" in printed and (output / "demo.log").is_file()


def test_the_next_commands_suit_the_model(tiny_folder: Path, output: Path) -> None:
    """Their options can be read, and the heads that they name are heads of the model."""
    lines = (output / "printed.txt").read_text().splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("  lm")]
    assert [words[:2] for words in commands] == [
        ["lmeval-prune", "distance"],
        ["lm_eval", "--model"],
        ["lmeval-prune", "prune"],
    ]
    for _, name, *rest in commands[::2]:
        options = read_options(name, resolve_name(COMMANDS[name]), rest, COMMANDS)
        preflight.check(options)
    heads = commands[0][commands[0].index("--heads") + 1]
    arguments = commands[1][commands[1].index("--model_args") + 1]
    assert arguments == f"pretrained={tiny_folder},heads={heads}" and len(heads.split("+")) == 2


def test_the_next_commands_are_quoted() -> None:
    lines = next_steps("a folder/model", ["L0H1"]).splitlines()[1:]
    assert all(any("a folder/model" in word for word in shlex.split(line)) for line in lines)


def test_a_foreign_file_in_the_cut_model_is_found_before_the_work(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "notes.txt").write_text("mine")
    monkeypatch.setattr(run.Subject, "load", lambda *_: pytest.fail("the model is loaded"))
    assert main(["demo", "--pretrained", str(tiny_folder), "--output", str(tmp_path)]) == 2
    assert "holds files that do not belong to a checkpoint" in capsys.readouterr().err
