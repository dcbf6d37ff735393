"""Plans as artefacts and in sequence; `test_surgery.py` tests what cut models compute."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lmeval_prune import InputError, Plan, load_pretrained, map_model
from lmeval_prune.interventions.channels import Channels
from lmeval_prune.pruners.calibration import read_calibration
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


def test_saving_a_plan_deletes_its_own_old_tensors_and_no_other_file(tmp_path: Path) -> None:
    model_map = map_model(tiny("llama"))
    user_files = [tmp_path / name for name in ("model.finetune.safetensors", "model.0a1b2c3d.safetensors")]
    for file in user_files:
        file.write_bytes(b"mine")
    path = tmp_path / "model.json"
    written: list[set[str]] = []
    for seed in (0, 1, None):
        scores = {} if seed is None else {"heads.L0": drawn(4, seed=seed)}
        Plan("L0H1", scores=scores).save(path, model_map)
        assert Plan.load(path).scores.keys() == scores.keys()
        written.append({file.name for file in tmp_path.glob("*.safetensors")} - {file.name for file in user_files})
    assert [len(names) for names in written] == [1, 1, 0] and written[0] != written[1]
    assert all(file.read_bytes() == b"mine" for file in user_files)


@pytest.mark.parametrize("file", ["mine.safetensors", "../mine.safetensors", 3, None])
def test_a_json_that_names_a_file_of_others_does_not_delete_it(file: object, tmp_path: Path) -> None:
    model_map, path = map_model(tiny("llama")), tmp_path / "sub" / "plan.json"
    Plan("L0H1", scores={"heads.L0": drawn(4, seed=0)}).save(path, model_map)
    content = json.loads(path.read_text())
    content["tensors"]["file"] = file
    path.write_text(json.dumps(content))
    for user_file in (tmp_path / "mine.safetensors", path.with_name("mine.safetensors")):
        user_file.write_bytes(b"mine")
    Plan("L0H2").save(path, model_map)
    assert (tmp_path / "mine.safetensors").exists() and path.with_name("mine.safetensors").exists()


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
    assert "ffn_calibration" not in plan.provenance


def test_a_method_for_channels_reads_a_text_of_its_own(prunable: Path, tmp_path: Path) -> None:
    words = ("--ffn_method", "norm_entropy", "--ratio", 0.25, "--scores", "heads.json")
    assert prune(prunable, tmp_path / "a.json", *words) == 2
    assert prune(prunable, tmp_path / "a.json", *words, "--text", "text.txt", "--windows", 2, "--tokens", 8) == 0
    provenance = Plan.load(tmp_path / "a.json").provenance
    assert (provenance["calibration"]["tokens"], provenance["ffn_calibration"]["tokens"]) == (32, 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--ratio", 0.25, "--parts", "both", "--scores", "heads.json"),
            "needs a calibration text",
        ),
        (
            ("--ratio", 0.25, "--ffn_ratio", 0.25, "--method", "random"),
            "--ffn_ratio and --ffn_multiple need --budget heads",
        ),
        (("--ratio", 0.25), "needs a calibration text"),
        (("--ratio", 0.25, "--steps", 2, "--scores", "both.json"), "for a single step"),
        (("--method", "random"), "nothing would be removed; give --ratio"),
        (("--method", "confidence", "--budget", "heads", "--ffn_ratio", 0.25), "heads only"),
        (
            ("--method", "confidence", "--ratio", 0.2, "--parts", "both", "--text", "text.txt"),
            "scores heads only",
        ),
        (("--method", "flap", "--ratio", 0.2, "--text", "text.txt", "--tokens", 600), "at most 512 positions"),
        (("--method", "random", "--ratio", 0.25, "--device", "gpu"), "device=gpu cannot be used here; use cpu or cuda"),
        (("--method", "random", "--ratio", 0.25, "--device", "cuda:99"), "device=cuda:99 does not exist"),
        (
            ("--method", "random", "--ratio", 0.25, "--device", "meta"),
            "device=meta cannot be used here; use cpu or cuda",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_is_loaded(
    words: tuple[object, ...],
    message: str,
    prunable: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("lmeval_prune.checkpoints.skeleton.with_weights", loaded)
    monkeypatch.chdir(tmp_path)
    assert prune(prunable, tmp_path / "plan.json", *words) == 2
    messages = capsys.readouterr().err.strip().splitlines()
    assert message in messages[-1] and messages[-1].startswith("lmeval-prune: error: ")
    assert not list(tmp_path.iterdir())


def test_channels_go_by_the_second_papers_scores_only_where_that_is_said(
    prunable: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ("--method", "norm_entropy", "--ratio", 0.4, "--text", "text.txt", "--windows", 2, "--tokens", 16)
    for more, kinds in (((), "heads"), (("--parts", "both"), "heads and channels")):
        assert prune(prunable, tmp_path / f"{kinds}.json", *words, *more) == 0
        plan, shown = Plan.load(tmp_path / f"{kinds}.json"), capsys.readouterr().out
        assert plan.provenance["removes"] == f"40% of the parameters of {kinds}" and plan.provenance["removes"] in shown
        assert bool(plan.channels) == bool(more)
    channels = ("--budget", "heads", "--ffn_ratio", 0.2, "--ffn_method", "random")
    assert prune(prunable, tmp_path / "channels.json", *channels) == 0
    assert "as no --method is given" not in capsys.readouterr().out


def test_a_plan_and_a_cut_say_how_far_they_are_from_the_dense_model(
    prunable: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model, tokenizer = load_pretrained(prunable / "model"), AutoTokenizer.from_pretrained(prunable / "model")
    text = read_calibration(tokenizer, str(prunable / "text.txt"), None, windows=6, tokens=16)
    ids = torch.cat([ids for ids, _ in text.batches])[2:]  # those after the windows that are read for the scores
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


@pytest.mark.parametrize(
    ("command", "more"), [("importance", ()), ("prune", ("--ratio", 0.25))], ids=["importance", "prune"]
)
def test_the_model_is_put_on_the_device(
    command: str, more: tuple, prunable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[torch.device] = []
    to = torch.nn.Module.to

    def spied(self: torch.nn.Module, *where: Any, **options: Any) -> torch.nn.Module:
        put.extend(value for value in where if isinstance(value, torch.device))
        return to(self, *where, **options)

    monkeypatch.setattr(torch.nn.Module, "to", spied)
    words = ("--method", "magnitude", "--device", "cpu:0", *more)
    assert run_command(command, "--pretrained", prunable / "model", "--output", tmp_path / "plan.json", *words) == 0
    assert torch.device("cpu:0") in put


def test_what_other_settings_made_is_not_replaced(
    prunable: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Neither the plan nor the checkpoint, nor files of others; with the same settings, both are."""
    plan, folder = tmp_path / "plan.json", tmp_path / "cut"
    words = ("--method", "magnitude", "--ratio", 0.25)
    for _ in range(2):
        assert prune(prunable, plan, *words, "--cut", folder) == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = ("--method", "magnitude", "--ratio", 0.5)
    option = "was made with other options (ratio=0.25); name another output, or delete it"
    shutil.copy(prunable / "heads.json", tmp_path / "scores.json")
    (tmp_path / "mine.json").write_text("{}")
    capsys.readouterr()
    for name, more, message in (
        ("plan.json", other, f"plan.json {option}"),
        ("other.json", (*other, "--cut", folder), f"cut {option}"),
        ("plan.json", ("--method", "random", "--ratio", 0.25), "(method={'method': 'magnitude'"),
        ("mine.json", words, "mine.json was not made by `prune`, and would be lost; name another output"),
        ("scores.json", words, "scores.json was not made by `prune`, and would be lost; name another output"),
    ):
        assert prune(prunable, tmp_path / name, *more) == 2
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1
    assert {path: path.read_bytes() for path in files} == files and not (tmp_path / "other.json").exists()


def test_scores_of_other_settings_are_not_replaced(
    prunable: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ("importance", "--pretrained", prunable / "model", "--output")
    scores = tmp_path / "scores.json"
    for _ in range(2):
        assert run_command(*words, scores, "--method", "magnitude") == 0
    before = scores.read_bytes()
    (tmp_path / "mine.json").write_text("{}")
    assert prune(prunable, tmp_path / "plan.json", "--method", "magnitude", "--ratio", 0.25) == 0
    capsys.readouterr()
    for name, more, message in (
        ("scores.json", ("--method", "random"), "made with other options (method={'method': 'magnitude'"),
        ("scores.json", ("--method", "magnitude", "--channels"), "made with other options (scores=heads);"),
        ("mine.json", ("--method", "magnitude"), "mine.json was not made by `importance`, and would be lost"),
        ("plan.json", ("--method", "magnitude"), "plan.json was not made by `importance`, and would be lost"),
    ):
        assert run_command(*words, tmp_path / name, *more) == 2
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1
    assert scores.read_bytes() == before


def test_a_changed_configuration_makes_another_model(
    prunable: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Neither plan nor scores are replaced by those of the same weights in another configuration."""
    shutil.copytree(prunable / "model", tmp_path / "model")
    config, words = tmp_path / "model" / "config.json", ("--method", "magnitude")
    commands = (
        ("prune", "--pretrained", tmp_path / "model", "--output", tmp_path / "plan.json", "--ratio", 0.25),
        ("importance", "--pretrained", tmp_path / "model", "--output", tmp_path / "scores.json"),
    )
    text = config.read_text()
    for theta in (10000.0, 100.0, 10000.0):
        config.write_text(text.replace('"rope_theta": 10000.0', f'"rope_theta": {theta}'))
        for command in commands:
            capsys.readouterr()
            assert run_command(*command, *words) == (0 if theta == 10000.0 else 2)
            shown = capsys.readouterr().err
            if theta == 100.0:
                assert "was made with other data (the model's config.json); name" in shown and shown.count("\n") == 1


def test_a_checkpoint_of_another_cut_is_not_replaced(
    prunable: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """That of the same model and plan is; one of another plan, another model, or of a training is not."""
    folder, model = tmp_path / "cut", prunable / "model"
    shutil.copytree(model, tmp_path / "other")
    for share in (0.25, 0.5):
        assert prune(prunable, tmp_path / f"{share}.json", "--method", "magnitude", "--ratio", share) == 0
    words = ("--plan", tmp_path / "0.25.json", "--output", folder)
    for command in ("cut", "cut", "export model"):
        assert run_command(*command.split(), "--pretrained", model, *words) == 0
    weights = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    capsys.readouterr()
    another = ("--plan", tmp_path / "0.5.json", "--output", folder)
    for parent, more, message in (
        (model, another, "cut was cut by another plan; name another output, or delete it"),
        (tmp_path / "other", words, "cut was cut from model; name another output, or delete it"),
    ):
        for command in ("cut", "export model"):
            assert run_command(*command.split(), "--pretrained", parent, *more) == 2
            shown = capsys.readouterr().err
            assert message in shown and shown.count("\n") == 1
    manifest = json.loads((folder / "lmeval_prune.json").read_text())
    files = {name: value for name, value in manifest["files"].items() if name != "plan.json"}  # a training writes none
    (folder / "plan.json").unlink()
    (folder / "lmeval_prune.json").write_text(json.dumps({**manifest, "files": files, "trained_on": []}))
    assert run_command("cut", "--pretrained", model, *words) == 2
    assert "holds a trained checkpoint, which would be lost" in capsys.readouterr().err
    assert weights and {path: path.read_bytes() for path in weights} == weights


def test_scores_of_several_steps_are_refused(prunable: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ("--ratio", 0.5, "--method", "random")
    assert prune(prunable, tmp_path / "steps.json", *words, "--steps", 2) == 0
    assert prune(prunable, tmp_path / "plan.json", *words, "--scores", tmp_path / "steps.json") == 2
    assert "of the unpruned model" in capsys.readouterr().err


def test_importance_refuses_channels_of_a_method_without(
    prunable: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run_command("importance", "--pretrained", prunable / "model", "--output", tmp_path / "s.json", "--channels",
               "--method", "confidence", "--text", prunable / "text.txt", "--tokens", 16) == 2  # fmt: skip
    assert "confidence scores heads only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"channels": {"L0": "0-9999999"}}, "channel 9999999 of layer L0"),
        ({"channels": {"L0": f"3,7-{10**12}"}}, f"channel {10**12} of layer L0"),
        ({"channels": {"L0": f"{10**12},0-{10**15}"}}, f"channel {10**15} of layer L0"),
        ({"channels": {"L0": "0-" + "9" * 5000}}, "cannot be read"),
        ({"channels": {"L0": [10**12]}}, f"channel {10**12} of layer L0"),
        ({"heads": "L0H0-99999999999"}, "layer 0 has 4 heads"),
        ({"heads": "L0-99999999999H0"}, "no attention in layer 2"),
        ({"heads": f"L{10**12}-{10**15}H0"}, f"no attention in layer {10**12}"),
        ({"heads": "L0H" + "9" * 5000}, "cannot be read"),
        ({"heads": [[0, 10**12]]}, "layer 0 has 4 heads"),
        ({"heads": [[10**20, 0]]}, "cannot be read"),
        ({"heads": "[[0, " + "9" * 5000 + "]]"}, "cannot be read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_ranges_are_compared_with_the_model_before_they_are_expanded(
    fields: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No huge range is ever iterated, alone or merged with another plan."""
    model_map = map_model(tiny("llama"))

    def short(*ends: int) -> range:
        numbers = range(*ends)
        if numbers.start >= 0 and numbers.stop - numbers.start > 10**6:
            iterated.append(numbers)
        return numbers

    iterated: list[range] = []
    monkeypatch.setattr("lmeval_prune.interventions.plan.range", short, raising=False)
    with pytest.raises(InputError, match=reason) as error:
        plan = Plan(**fields)
        for candidate in (plan, Plan(channels={"L0": "1-2"}).merged_with(plan), plan.merged_with(Plan("L1H0"))):
            with pytest.raises(InputError, match=reason):
                candidate.resolve(model_map)
        plan.resolve(model_map)
    assert not iterated and len(str(error.value)) < 300


def test_ranges_are_joined_as_sets_of_numbers_are() -> None:
    for text, same in (("3,5-9,4", "3-9"), ("7,7,7-8,1-2,2-3", "1-3,7-8"), ("0-9,2-3", "0-9"), ([4, 2, 3, 9], "2-4,9")):
        assert Plan(channels={"L0": text}).channels["L0"] == same
        assert Channels(text).numbers == Channels(same).numbers
    assert Plan(channels={"L0": "0-3"}).merged_with(Plan(channels={"L0": "2-5", "L1": "1"})).channels == {
        "L0": "0-5",
        "L1": "1",
    }
