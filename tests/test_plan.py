"""Plans as artefacts and in sequence; `test_surgery.py` tests what cut models compute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from lmeval_prune import Plan, load_pretrained, map_model
from lmeval_prune.interventions.plan import Channels
from lmeval_prune.pruners.calibration import read_calibration
from lmeval_prune.pruners.options import TextOptions
from lmeval_prune.surgery.cut import cut
from tests.conftest import run_command
from tests.tiny_models import output, tiny, tokens


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("first", "second"), [("b", "w"), ("w", "b"), ("wb", "w"), ("w", "wb"), ("wb", "wb")])
def test_plans_that_compensate_compose(family: str, first: str, second: str) -> None:
    """Nested, merged, and as a cut of a cut: biases add up, later weights replace earlier ones."""
    model = tiny(family)
    plans = []
    for seed, (kinds, heads, channels) in enumerate(((first, (), {}), (second, "L0H1", {"L1": "3-5"}))):
        tensors = {}
        for name, width in (("L0.o_proj", 32), ("L1.down", map_model(model).feed_forward[1].channels)):
            tensors |= {f"{name}.weight": drawn(32, width, seed=seed)} if "w" in kinds else {}
            tensors |= {f"{name}.bias": drawn(32, seed=seed + 7)} if "b" in kinds else {}
        plans.append(Plan(heads, channels, compensation=tensors))
    earlier, later = plans
    with earlier.applied_to(model), later.applied_to(model):
        nested = output(model, tokens())
    joined = earlier.merged_with(later)
    assert joined is not None
    with joined.applied_to(model):
        torch.testing.assert_close(output(model, tokens()), nested, rtol=0, atol=1e-9)
    twice = cut(cut(model, earlier).model, later).model
    torch.testing.assert_close(output(twice, tokens()), nested, rtol=0, atol=1e-9)


# --------------------------------------------------------------------------- the command


@pytest.fixture(scope="session")
def prunable(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a text, and scores of heads with and without scores of channels."""
    folder = tmp_path_factory.mktemp("prunable")
    (folder / "text.txt").write_text("\n\n".join(f"Ann has {n} apples and buys {n + 1} more." for n in range(60)))
    (folder / "model").symlink_to(tiny_folder)
    for name, more in (("heads", ()), ("both", ("--channels",))):
        assert run_command("importance", "--pretrained", tiny_folder, "--output", folder / f"{name}.json", *more,
                   "--text", folder / "text.txt", "--windows", 2, "--tokens", 16) == 0  # fmt: skip
    return folder


def prune(folder: Path, output: Path, *words: object) -> int:
    places = [
        folder / word if str(word).startswith(("both.json", "heads.json", "text.txt")) else word for word in words
    ]
    return run_command("prune", "--pretrained", folder / "model", "--output", output, *places)


@pytest.mark.parametrize("scores", ["heads.json", "both.json"])
def test_a_method_for_channels_scores_them_whatever_the_scores_have(
    scores: str, prunable: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    assert prune(prunable, path, "--ffn_ratio", 0.25, "--ffn_method", "random", "--ffn_options", "seed=3",
                 "--ratio", 0.25, "--budget", "heads", "--scores", scores) == 0  # fmt: skip
    plan = Plan.load(path)
    path.unlink()
    assert (
        prune(prunable, path, "--budget", "heads", "--ffn_ratio", 0.25, "--method", "random", "--options", "seed=3")
        == 0
    )
    assert plan.channels == Plan.load(path).channels
    assert plan.provenance["ffn_method"] == "random" and plan.provenance["ffn_options"] == {"seed": 3}
    assert plan.provenance["method"] == "norm_entropy" and plan.provenance["calibration"]["tokens"] == 32
    assert not plan.provenance["beside_scores"]


def test_a_method_for_channels_reads_a_text_of_its_own(prunable: Path, tmp_path: Path) -> None:
    words = ("--ffn_method", "norm_entropy", "--ratio", 0.25, "--scores", "heads.json")
    assert prune(prunable, tmp_path / "a.json", *words) == 2
    assert prune(prunable, tmp_path / "a.json", *words, "--text", "text.txt", "--windows", 2, "--tokens", 8) == 0
    provenance = Plan.load(tmp_path / "a.json").provenance
    assert (provenance["calibration"]["tokens"], provenance["beside_scores"]["tokens"]) == (32, 16)


def test_channels_go_by_the_second_papers_scores_only_where_that_is_said(
    prunable: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ("--method", "norm_entropy", "--ratio", 0.4, "--text", "text.txt", "--windows", 2, "--tokens", 16)
    for more, kinds in (((), "heads"), (("--parts", "both"), "heads and channels")):
        assert prune(prunable, tmp_path / f"{kinds}.json", *words, *more) == 0
        plan, shown = Plan.load(tmp_path / f"{kinds}.json"), capsys.readouterr().out
        assert plan.provenance["removes"] == f"40% of the parameters of {kinds}" and plan.provenance["removes"] in shown
        assert bool(plan.channels) == bool(more)


def test_a_plan_and_a_cut_say_how_far_they_are_from_the_dense_model(
    prunable: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model, tokenizer = load_pretrained(prunable / "model"), AutoTokenizer.from_pretrained(prunable / "model")
    text = read_calibration(tokenizer, TextOptions(text=str(prunable / "text.txt"), windows=6, tokens=16))
    ids = torch.cat([batch.ids for batch in text.batches])[2:]  # those after the windows that are read for the scores
    words, warned = ("--text", "text.txt", "--windows", 2, "--tokens", 16), set()
    for ratio in (0.05, 0.7):
        path = tmp_path / f"{ratio}.json"
        assert prune(prunable, path, "--ratio", ratio, *words) == 0
        shown = capsys.readouterr().out
        with torch.inference_mode():
            dense = model(ids).logits[:, :-1].double().log_softmax(-1)
            with Plan.load(path).applied_to(model):
                pruned = model(ids).logits[:, :-1].double().log_softmax(-1)
        kld, same = (dense.exp() * (dense - pruned)).sum(-1).mean(), dense.argmax(-1) == pruned.argmax(-1)
        same_top, factor = same.double().mean(), (dense - pruned).gather(-1, ids[:, 1:, None]).mean().exp()
        expected = (
            f"mean KLD {kld:.3f}, same top token {same_top:.0%}, perplexity × {factor:,.2f}, on 60 tokens of text"
        )
        assert expected in shown and ("warning" in shown) == (same_top < 0.5)
        warned.add("warning" in shown)
    assert warned == {False, True}
    assert prune(prunable, tmp_path / "random.json", "--method", "random", "--ratio", 0.4) == 0
    cut = ("cut", "--pretrained", prunable / "model", "--plan", tmp_path / "random.json", "--output", tmp_path / "cut")
    assert run_command(*cut) == 0
    of_plan, of_cut = re.findall("from the dense model.* packaged sentences", capsys.readouterr().out)
    assert of_plan == of_cut


def test_ranges_are_joined_as_sets_of_numbers_are() -> None:
    for text, same in (("3,5-9,4", "3-9"), ("7,7,7-8,1-2,2-3", "1-3,7-8"), ("0-9,2-3", "0-9"), ([4, 2, 3, 9], "2-4,9")):
        assert Plan(channels={"L0": text}).channels["L0"] == same
        assert Channels(text).numbers == Channels(same).numbers
    assert Plan(channels={"L0": "0-3"}).merged_with(Plan(channels={"L0": "2-5", "L1": "1"})).channels == {
        "L0": "0-5",
        "L1": "1",
    }
