"""Cards of everything that is written as a model: front matter, what is said of the parent, programs that run."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from lmeval_prune import InputError, load_pretrained
from lmeval_prune.athena import checkpoint
from lmeval_prune.athena.card import athena_card
from lmeval_prune.cards import hub
from lmeval_prune.cards.card import Card, code, is_unchanged, quoted
from lmeval_prune.cards.checkpoint import plans, without
from lmeval_prune.cards.command import command_line, remembered
from lmeval_prune.cards.origin import Origin
from lmeval_prune.checkpoints.pruned import save_checkpoint
from lmeval_prune.cli import main
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.surgery.cut import cut, cut_to
from lmeval_prune.tasks.hub import HubDataset, dataset_revision, hub_dataset
from tests.athena_hosts import data_folder, encoder_folder, host, quick_training
from tests.test_grid_comparison import write_grid
from tests.tiny_models import tiny

RELATIONS = {"adapter", "merge", "quantized", "finetune"}  # of the Hub's documentation
CARD = """---
license: other
license_name: tiny-license
license_link: LICENSE
language: [en, de]
base_model: someone/tiny-base
tags: [theirs]
---

# Their own words
"""


@pytest.fixture(scope="module")
def parent(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local model with a card of its own."""
    folder = tmp_path_factory.mktemp("parents") / "tiny-parent"
    shutil.copytree(tiny_folder, folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return folder


def words_of_cut(parent: Path, folder: Path) -> list[str]:
    return ["--pretrained", str(parent), "--plan", str(folder / "mask.json"), "--output", str(folder / "cut")]


def write_cut(parent: Path, folder: Path) -> Path:
    """Cut two heads of every layer: a stock class."""
    main(["mask", "--pretrained", str(parent), "--heads", "L0H0-1+L1H0-1", "--output", str(folder / "mask.json")])
    assert main(["cut", *words_of_cut(parent, folder)]) == 0
    return folder / "cut" / "README.md"


def write_uneven(parent: Path, folder: Path) -> Path:
    """Prune with a method, and cut by a plan whose layers differ: a class of our own."""
    words = ["--method", "magnitude", "--parts", "channels", "--ratio", "0.2", "--allocation", "global"]
    output = folder / "uneven"
    plan = str(folder / "plan.json")
    assert main(["prune", "--pretrained", str(parent), *words, "--output", plan, "--cut", str(output)]) == 0
    assert json.loads((output / "config.json").read_text())["architectures"][0].startswith("Pruned")
    return output / "README.md"


def write_distilled(parent: Path, folder: Path) -> Path:
    """Distil one stage of one epoch."""
    output = folder / "student"
    data = data_folder(folder / "data")
    words = ["--task", "prune_asdiv_a_equation", "--test", "fold0", "--limit", "8", "--validation", "0.25"]
    words += ["--ratio", "0.5", "--unit", "balanced", "--stages", "1", "--epochs", "1", "--calibration", "4"]
    words += ["--data_dir", str(data), "--trainer", "report_to=none"]
    with quick_training():
        assert main(["distill", "--pretrained", str(parent), *words, "--output", str(output)]) == 0
    return output / "README.md"


def write_adapter(parent: Path, folder: Path) -> Path:
    output = folder / "adapters"
    assert (
        main(["export", "adapter", "--pretrained", str(parent), "--heads", "L0H1+L1H2", "--output", str(output)]) == 0
    )
    (output / parent.name).symlink_to(parent)  # the program of the card loads it by its name
    return output / "L0H1+L1H2" / "README.md"


def write_gguf(parent: Path, folder: Path) -> Path:
    bare = folder / "tiny-parent"
    shutil.copytree(parent, bare, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja", "special*"))
    words = ["--format", "gguf", "--dtype", "float32", "--heads", "L0H0-1", "--output", str(folder / "model.gguf")]
    assert main(["export", "model", "--pretrained", str(bare), *words]) == 0
    return folder / "model.README.md"


def write_athena(parent: Path, folder: Path) -> Path:
    encoder = encoder_folder(folder / "encoder", dtype=torch.float32)
    shutil.copy(parent / "README.md", encoder)
    about = {"options": {"encoder": str(encoder), "data": "asdiv_a", "epochs": 1}, "log": [{"eval_accuracy": 0.25}]}
    model = host(encoder)
    with remembered(["athena", "train"]):
        checkpoint.write(model, folder / "athena", add_files=athena_card("athena", about).write)
    return folder / "athena" / "README.md"


KINDS: dict[str, Callable[[Path, Path], Path]] = {
    "cut": write_cut,
    "uneven": write_uneven,
    "distilled": write_distilled,
    "adapter": write_adapter,
    "gguf": write_gguf,
    "athena": write_athena,
}
NO_PROGRAM = {"gguf"}  # llama.cpp loads it: `make test-llamacpp`


@pytest.fixture(scope="module", params=KINDS)
def written(request: pytest.FixtureRequest, parent: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A kind of output and its card."""
    return request.param, KINDS[request.param](parent, tmp_path_factory.mktemp(request.param))


def read(path: Path) -> ModelCard:
    return ModelCard(path.read_text(encoding="utf-8"))


def test_front_matter_is_what_the_hub_reads(written: tuple[str, Path]) -> None:
    _, path = written
    data = read(path).data.to_dict()
    assert ModelCard(read(path).content).data.to_dict() == data
    assert data["library_name"] in ("transformers", "peft", "gguf", "lmeval-prune")
    assert "lmeval-prune" in data["tags"] and "theirs" not in data["tags"]
    assert data["base_model_relation"] in RELATIONS and data["base_model"] == "someone/tiny-base"
    assert (data["license"], data["license_name"]) == ("other", "tiny-license")
    assert "license_link" not in data  # a file of a local model, which no link reaches
    assert data["language"] == ["en", "de"]


def test_a_card_is_ours_and_says_what_a_stranger_needs(written: tuple[str, Path], parent: Path) -> None:
    _, path = written
    text = path.read_text(encoding="utf-8")
    assert "Their own words" not in text and (parent / "README.md").read_text(encoding="utf-8") == CARD
    assert str(parent.parent) not in text and str(path.parent.parent) not in text
    for heading in ("How it was made", "Limits", "License"):
        assert f"\n## {heading}\n" in text
    assert "lmeval-prune " in text.partition("## How it was made")[2].partition("## ")[0]
    assert "tiny-license" in text.partition("## License")[2]
    assert "nan" not in text.casefold().split() and "None" not in text and "--tasks TASK" not in text


def test_the_program_of_a_card_runs(
    written: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, path = written
    monkeypatch.chdir(path.parent.parent)
    programs = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    assert len(programs) == (kind not in NO_PROGRAM)
    for program in programs:
        exec(compile(program, "README.md", "exec"), {})
        assert capsys.readouterr().out.strip()


def test_a_distilled_model_says_what_it_learned_from(parent: Path, tmp_path: Path) -> None:
    card = read(write_distilled(parent, tmp_path))
    assert {"pruned", "distilled", "norm_entropy"} <= set(card.data.tags) and card.data.datasets is None
    assert "prune_asdiv_a_equation" in card.text and "mean KLD" in card.text and "validation task loss" in card.text


def test_a_gguf_file_of_a_trained_model_does_not_say_that_nothing_was_trained(parent: Path, tmp_path: Path) -> None:
    """It does of a cut of a trained model, which was not trained since."""
    plan = Plan("L0H0-1")
    smaller = cut(load_pretrained(parent), plan)
    folders = {True: tmp_path / "trained", False: tmp_path / "cut"}
    save_checkpoint(folders[True], smaller.model, {**smaller.manifest, "trained_on": ["0123456789abcdef"]})
    cut_to(folders[False], load_pretrained(folders[True]), Plan("L1H0-1"))
    for trained, folder in folders.items():
        words = ["--format", "gguf", "--dtype", "float32", "--output", str(tmp_path / f"{trained}.gguf")]
        assert main(["export", "model", "--pretrained", str(folder), *words]) == 0
        text = (tmp_path / f"{trained}.README.md").read_text()
        assert ("Nothing was trained" in text, "trained further" in text) == (not trained, trained)


@pytest.mark.parametrize("name", ["smollm2-135m", "", "nowhere/at-all"])
def test_the_record_of_an_origin_gives_it_again(name: str) -> None:
    origin = Origin.of(name)
    assert Origin.recorded(origin.name, json.loads(json.dumps(origin.record))) == origin


def test_sizes_are_those_of_the_files(tmp_path: Path, parent: Path) -> None:
    from safetensors import safe_open

    path = write_cut(parent, tmp_path)
    with safe_open(path.with_name("model.safetensors"), "pt") as file:
        stored = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    rows = dict(re.findall(r"^\| *([\w -]+?) *\| *[\d,]+ *\| *([\d,]+) *\|", path.read_text(), re.M))
    assert int(rows["parameters"].replace(",", "")) == stored
    assert rows["attention heads"] == "4" and rows["key-value heads"] == "2"


# ---------------------------------------------------------------------- what is known of the parent


def test_an_embedded_model_has_the_origin_that_its_package_names() -> None:
    origin = Origin.of("smollm2-135m")
    assert origin.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct" and origin.license == {"license": "apache-2.0"}
    assert "QuantFactory" in origin.text


@pytest.mark.parametrize(
    ("card", "base_model", "license"),
    [
        ("---\nlicense: mit\n---\n", None, {"license": "mit"}),
        ("no front matter", None, {}),
        ("---\nlicense: [a, b\n---\n", None, {}),
        ("---\n- a\n- b\n---\n", None, {}),
        ("---\nbase_model: [a/b, c/d]\n---\n", ["a/b", "c/d"], {}),
        ("---\nbase_model: ../../x y\nlicense: 3\n---\n", None, {}),
    ],
)
def test_a_parents_card_is_believed_as_far_as_it_can_be_read(
    card: str, base_model: Any, license: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(card)
    origin = Origin.of(str(tmp_path))
    assert origin.base_model == base_model and origin.license == license
    assert ("No license is named" in origin.license_text) == (not license)
    assert f"of the local model `{tmp_path.name}`" in origin.license_text


def test_a_snapshot_of_the_hub_has_its_name_and_its_license_file(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--some-model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: other\nlicense_link: LICENSE.md\n---\n")
    origin = Origin.of(str(folder))
    assert origin.base_model == "org/some-model"
    assert origin.license["license_link"] == "https://huggingface.co/org/some-model/blob/main/LICENSE.md"


def test_a_model_that_was_never_saved_has_no_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text(CARD)  # of the folder in which the program runs
    cut_to(tmp_path / "out", tiny("llama"), Plan(heads=["L0H0", "L0H1", "L1H0", "L1H1"]))
    card = read(tmp_path / "out" / "README.md")
    assert card.data.base_model is None and card.data.license is None
    assert "base_model_relation" not in card.data.to_dict()
    assert "No license is named" in card.text and "By a Python program" in card.text


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["cut", "org/name", "--plan", "/home/me/x/plan.json"], "cut org/name --plan plan.json"),
        (["cut", "--plan=/a/b.json", "out/x"], "cut --plan=b.json out/x"),
        (["x", "name=/a/b,other=~/c/d"], "x name=b,other=d"),
        (["x", "https://host/a/b"], "x https://host/a/b"),
        (["x", "two words", "1/2", "and/or", "a / b"], "x 'two words' 1/2 and/or 'a / b'"),
        (["x", '{"a":"/home/me/b","c":["/d/e"]}'], """x '{"a":"b","c":["e"]}'"""),
        (["x", "[/home/me/b,/c/d]", "/a/b.json+/c/d.json", "mask:/a/b"], "x '[b,d]' b.json+d.json mask:b"),
        (["x", "file:///home/me/b", "~me/a/b", "a=C:\\Users\\me\\b"], "x b b a=b"),
        (["x", "./a/b", "../a/b", "http://host:80/v1", "s3://a/b"], "x ./a/b ../a/b http://host:80/v1 s3://a/b"),
        (["x", "see /home/me/b"], "x 'see b'"),
    ],
)
def test_a_command_is_shown_without_the_folders_of_a_machine(words: list[str], shown: str) -> None:
    with remembered(words):
        assert command_line() == f"lmeval-prune {shown}"
    assert command_line() == ""


# ---------------------------------------------------------------------- any text


TEXT = st.text(max_size=30)
NAMES = st.from_regex(r"[a-z]{1,6}/[a-zA-Z0-9]{1,8}", fullmatch=True)


@settings(max_examples=60, deadline=None)
@given(title=TEXT, name=TEXT, license=TEXT, ancestors=st.lists(NAMES, max_size=2), tags=st.lists(TEXT, max_size=3))
def test_front_matter_of_any_text_is_read_as_it_was_meant(
    title: str, name: str, license: str, ancestors: list[str], tags: list[str]
) -> None:
    origin = Origin(name, "", tuple(ancestors), {"license": license} if license else {})
    card = Card(title, origin, "finetune", "transformers", tags, "It.", {"Limits": "Some."})
    data = ModelCard(card.text).data
    assert data.license == (license or None) and data.tags == list(dict.fromkeys(["lmeval-prune", *tags]))
    assert data.base_model == origin.base_model
    assert data.get("base_model_relation") == ("finetune" if ancestors else None)


def test_a_readme_that_is_not_a_card_or_was_changed_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside a router or a GGUF file; the tags of a card do not make it ours again."""
    path, origin = tmp_path / "README.md", Origin("m")
    first, second = (Card(title, origin, "adapter", "lmeval-prune", [], "It.", {}) for title in ("first", "second"))
    path.write_text("my notes")
    first.write(tmp_path)
    assert path.read_text() == "my notes" and f"{path} is not replaced" in caplog.text
    path.unlink()
    first.write(tmp_path)
    caplog.clear()
    second.write(tmp_path)
    assert "# second" in path.read_text() and not caplog.text
    changed = path.read_text().replace("It.", "It is for counting sheep.")
    path.write_text(changed)
    first.write_file(path)
    assert path.read_text() == changed and "is not replaced" in caplog.text


def test_a_changed_card_of_a_gguf_file_stays(parent: Path, tmp_path: Path) -> None:
    card = write_gguf(parent, tmp_path)
    card.write_text(card.read_text().replace("## Limits", "## My limits"))
    shutil.rmtree(tmp_path / "tiny-parent")
    assert write_gguf(parent, tmp_path) == card and "## My limits" in card.read_text()


# ---------------------------------------------------------------------- texts of strangers


HOSTILE = "a`` b` <script>x</script> ](javascript:alert(1)) [t](u)\n# Heading"


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("https://example.org/a (b) <c>", "https://example.org/a%20%28b%29%20%3Cc%3E"),
        ("javascript://x/%0aalert(1)", None),
        ("javascript:alert(1)", None),
        ("//[not an address", None),
        ("LICENSE", None),
    ],
)
def test_a_link_to_a_license_is_an_address_or_left_out(link: str, shown: str | None, tmp_path: Path) -> None:
    fields = yaml.safe_dump({"license": "other", "license_name": HOSTILE, "license_link": link})
    (tmp_path / "README.md").write_text(f"---\n{fields}---\n")
    origin = Origin.of(str(tmp_path))
    assert origin.license.get("license_link") == shown
    assert_harmless(origin.license_text, {shown} if shown else set())


def assert_harmless(markdown: str, links: set[str]) -> None:
    """There are no tags and no headings in it, and only these links."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown)
    inline = [child for token in tokens for child in token.children or ()]
    assert {str(child.attrs["href"]) for child in inline if child.type == "link_open"} == links
    assert not [token for token in (*tokens, *inline) if token.type in ("html_block", "html_inline", "heading_open")]


def test_the_record_of_an_origin_may_be_a_strangers() -> None:
    license = {"license": "other", "license_name": HOSTILE, "license_link": "javascript://x"}
    record: Any = {"hub_id": HOSTILE, "ancestors": [HOSTILE], "license": license, "conversion": HOSTILE}
    origin = Origin.recorded(HOSTILE, record)
    assert origin.base_model is None
    assert_harmless(f"{origin.text}\n\n{origin.license_text}", set())
    assert_harmless(Origin.recorded("m", {**record, "hub_id": "org/m"}).text, {"https://huggingface.co/org/m"})


def test_texts_of_a_plan_are_only_shown() -> None:
    stage = {"plan": {"made": {"method": HOSTILE, "removes": HOSTILE, "calibration": {"text": HOSTILE}}}}
    assert_harmless(plans({"stages": [stage, stage]}), set())


def test_a_stage_that_only_trained_removed_nothing() -> None:
    parent = {"name": "m", "revision": ""}
    counts = {"heads": 0, "kv_heads": 0, "channels": 0}
    trained = {"plan": {"made": {}}, "parent": parent, "removed": counts, "notes": []}
    masked = {**trained, "removed": {**counts, "heads": 2}}
    manifest: Any = {"class": "C", "stages": [trained]}
    assert plans(manifest).startswith("Nothing was removed.\n")
    told = plans({**manifest, "stages": [trained, masked]})
    assert told.startswith("1. Stage 1: nothing was removed.\n2. Stage 2: chosen by hand.\n")


def test_no_text_ends_a_block_of_code() -> None:
    (token,) = MarkdownIt("commonmark").parse(code("bash", "echo '\n```\n````x\n# Heading'"))
    assert token.type == "fence" and token.content == "echo '\n```\n````x\n# Heading'\n"


def test_the_name_of_a_folder_may_be_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    card = Card(name, Origin(name), "finetune", "transformers", [name], "It.", {"Load": quoted(name)})
    card.write(tmp_path)
    assert is_unchanged(tmp_path / "README.md") and "# caf" in (tmp_path / "README.md").read_text(encoding="utf-8")


# ---------------------------------------------------------------------- upload


class StubApi:
    """The two calls of huggingface_hub that an upload makes."""

    calls: list[tuple[str, Any]] = []  # noqa: RUF012 - emptied by the test
    options: dict[str, Any] = {}  # noqa: RUF012 - of the last upload
    error: Exception | None = None

    def create_repo(self, repo_id: str, exist_ok: bool) -> Any:
        self.calls.append(("create", repo_id))
        return type("Url", (), {"repo_id": f"me/{repo_id}" if "/" not in repo_id else repo_id})

    def upload_folder(self, repo_id: str, folder_path: str, **options: Any) -> Any:
        if self.error:
            raise self.error
        self.options.update(options)
        self.calls.append(("upload", (repo_id, sorted(path.name for path in Path(folder_path).iterdir()))))
        return type("Commit", (), {"commit_url": "https://hub/commit"})


def test_an_upload_is_one_folder_and_a_failed_one_loses_nothing(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "HfApi", StubApi)
    monkeypatch.setattr(StubApi, "calls", [])
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_token", lambda: "token")
    path = write_cut(parent, tmp_path)
    words = ["cut", *words_of_cut(parent, tmp_path)]
    assert main([*words, "--push_to_hub", "me/cut"]) == 0
    (_, created), (_, (uploaded, files)) = StubApi.calls
    assert created == uploaded == "me/cut" and {"README.md", "config.json", "model.safetensors"} <= set(files)
    assert "uploaded: https://hub/commit" in capsys.readouterr().out
    monkeypatch.setattr(StubApi, "error", ConnectionError("no route\nto the Hub"))
    assert main([*words, "--push_to_hub", "me/cut"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "is complete, but could not be uploaded to me/cut" in error and "hf upload me/cut" in error
    assert path.is_file() and path.with_name("model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "offline", "token", "message"),
    [
        ("a b", False, "t", "is no name on the Hub"),
        ("me/x", True, "t", "HF_HUB_OFFLINE is set"),
        ("me/x", False, None, "needs a login"),
    ],
)
def test_what_cannot_be_uploaded_is_said_before_the_work(
    name: str, offline: bool, token: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(hub, "get_token", lambda: token)
    with pytest.raises(InputError, match=message):
        hub.check_push(name)


# ---------------------------------------------------------------------- results for the Hub


GSM8K = {"dataset_path": "openai/gsm8k", "dataset_name": "main", "test_split": "test"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GSM8K, HubDataset("openai/gsm8k", "main", "test")),
        ({"dataset_path": "cais/hle", "dataset_kwargs": {"revision": "ab"}}, HubDataset("cais/hle", None, None, "ab")),
        ({"dataset_kwargs": {"prune_data": "gsm8k"}}, HubDataset("openai/gsm8k", "main", "test")),
        ({"dataset_kwargs": {"prune_data": "math500"}}, HubDataset("HuggingFaceH4/MATH-500", None, "test")),
        ({"dataset_kwargs": {"prune_data": "tiny_words"}}, None),
        ({"dataset_kwargs": {"prune_data": "asdiv_a", "prune_test": "fold0"}}, None),
        ({"dataset_path": "json", "dataset_kwargs": {"data_files": "x.jsonl"}}, None),
        ({"dataset_path": "org/x", "dataset_kwargs": {"data_files": "x.jsonl"}}, None),
        ({"dataset_path": "/data/mine"}, None),
        ({}, None),
    ],
)
def test_the_data_set_of_a_task(config: dict[str, Any], expected: HubDataset | None) -> None:
    assert hub_dataset(config) == expected


def test_the_revision_is_that_of_the_files_that_were_read() -> None:
    def task(*files: str) -> Any:
        info = type("Info", (), {"download_checksums": dict.fromkeys(files)})
        return type("Task", (), {"dataset": {"test": type("Split", (), {"info": info})}})

    first, second = (f"hf://datasets/openai/gsm8k@{letter * 40}/main/test.parquet" for letter in "ab")
    assert dataset_revision(task(first)) == "a" * 40
    assert dataset_revision(task(first, second)) is None
    assert dataset_revision(task("/local/test.parquet")) is None
    assert dataset_revision(object()) is None


def grid_for_the_hub(
    path: Path,
    config: dict[str, Any],
    effective: int = 4,
    value: float = 0.75,
    entry: dict[str, Any] | None = None,
    **cell: Any,
) -> Path:
    """Write a grid whose task has this configuration, with what lm-eval writes of a run."""
    write_grid(
        path, {"dense": {"gsm": [1, 0, 1, 0]}, "cut": {"gsm": [1, 1, 1, 0]}}, **({"cut": entry} if entry else {})
    )
    for variant, mean in (("dense", 0.5), ("cut", value)):
        folder = path / "cells" / f"{variant}-gsm"
        results = json.loads((folder / "results.json").read_text())
        results["results"]["gsm"] = {"alias": "gsm", "exact_match,none": mean}
        results["configs"]["gsm"] = config
        results |= {"n-samples": {"gsm": {"original": 4, "effective": effective}}, "n-shot": {"gsm": 5}}
        results |= {"date": 1.7e9, "lm_eval_version": "0.4.13"}
        (folder / "results.json").write_text(json.dumps(results))
        content = json.loads((folder / "cell.json").read_text())
        (folder / "cell.json").write_text(json.dumps({**content, **cell}))
    return path


def test_results_of_a_variant_are_written_as_the_hub_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = grid_for_the_hub(tmp_path / "grid", GSM8K, revisions={"gsm": "a" * 40})
    assert main(["grid", "compare", str(path), "--eval_results", f"cut={tmp_path / 'model'}"]) == 0
    file = tmp_path / "model" / ".eval_results" / "lmeval_prune_gsm.yaml"
    printed = capsys.readouterr().out
    assert str(file) in printed and "task_id 'main' is a guess" in printed
    (entry,) = parse_eval_result_entries(yaml.safe_load(file.read_text()))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/gsm8k", "main", 0.75)
    assert entry.dataset_revision == "a" * 40 and entry.date == "2023-11-14T22:13:20Z"
    assert entry.notes == "lm-evaluation-harness 0.4.13, task gsm, exact_match, 5-shot"


def test_the_id_of_a_task_is_that_of_the_benchmarks_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmeval_prune.grid import eval_results

    file = tmp_path / "eval.yaml"
    tasks = [{"id": "gsm8k", "config": "main", "split": "test"}, {"id": "other", "config": "socratic"}]
    file.write_text(yaml.safe_dump({"name": "GSM8K", "tasks": tasks}))
    monkeypatch.setattr(eval_results, "try_to_load_from_cache", lambda *_, **__: str(file))
    source = HubDataset("openai/gsm8k", "main", "test")
    assert eval_results._task_id(source, None) == ("gsm8k", True)
    for broken in ("tasks: 3", "[", "tasks: [{id: a}, {id: b}]"):
        file.write_text(broken)
        assert eval_results._task_id(source, None) == ("main", False)


@pytest.mark.parametrize(
    ("config", "effective", "value", "note"),
    [
        ({"dataset_path": "json", "dataset_kwargs": {"data_files": "x"}}, 4, 0.5, "its data set is not on the Hub"),
        (GSM8K, 2, 0.5, "2 of its 4 questions were asked"),
        (GSM8K, 4, math.nan, "its compared metric is no figure"),
    ],
)
def test_what_is_no_result_for_the_hub_is_left_out_with_one_line(
    config: dict[str, Any], effective: int, value: float, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = grid_for_the_hub(tmp_path / "grid", config, effective, value)
    assert main(["grid", "compare", str(path), "--eval_results", f"cut={tmp_path / 'model'}"]) == 0
    printed = capsys.readouterr().out
    assert note in printed and "nothing is written" in printed and not (tmp_path / "model").exists()


def test_results_of_another_model_than_that_of_the_folder_are_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another folder, and of a mask, a preparation or a router, which the model in the folder does not have."""
    own = str(tmp_path / "model")
    for number, (arguments, prepare, shown) in enumerate(
        [
            ({"pretrained": own, "dtype": "float32"}, {}, ""),
            ({"pretrained": "other"}, {}, "pretrained=other"),
            ({"pretrained": own, "heads": "L0H1"}, {}, f"pretrained={own}, heads=L0H1"),
            ({"pretrained": own}, {"random_heads": {"share": 0.1}}, f"pretrained={own}, random_heads="),
        ]
    ):
        path = grid_for_the_hub(tmp_path / f"grid{number}", GSM8K, entry={"model_args": arguments, "prepare": prepare})
        assert main(["grid", "compare", str(path), "--eval_results", f"cut={own}"]) == 0
        printed = capsys.readouterr().out
        assert ("see to it that" in printed) == bool(shown) and f"was evaluated with {shown}" * bool(shown) in printed


@pytest.mark.parametrize("text", ["cut", "=folder", "cut=", "none=folder"])
def test_a_target_that_names_no_variant_or_folder_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = grid_for_the_hub(tmp_path / "grid", GSM8K)
    assert main(["grid", "compare", str(path), "--eval_results", text]) == 2
    assert "VARIANT=FOLDER" in (error := capsys.readouterr().err) or "there is no variant" in error


# ---------------------------------------------------------------------- trackers


class Tracker(types.ModuleType):
    """What lm-eval's loggers use of wandb and trackio; `logged` has what arrives."""

    __version__ = "0.20.0"
    run = None

    def __init__(self, name: str, logged: list[Any], error: Exception | None = None) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.logged, self.error, self.config, self.summary = logged, error, {}, {}

    def init(self, **arguments: Any) -> Tracker:
        if self.error:
            raise self.error
        self.logged.append(("init", arguments))
        return self

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.logged.append(("log", values))

    def log_artifact(self, artifact: Any) -> None:
        self.logged.append(("artifact", artifact.name))

    def finish(self) -> None:
        self.logged.append("finished")

    class Table:
        def __init__(self, columns: list[str]) -> None:
            self.columns, self.rows = columns, list[tuple[Any, ...]]()

        def add_data(self, *row: Any) -> None:
            self.rows.append(row)

    class Artifact:
        def __init__(self, name: str, type: str) -> None:
            self.name = name

        def new_file(self, *_: Any, **__: Any) -> io.StringIO:
            return io.StringIO()

    class Trace(dict[str, Any]):
        def __init__(self, **fields: Any) -> None:
            super().__init__(fields)


def install_tracker(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception | None = None) -> list[Any]:
    """Put a tracker in the place of a package; return what will be logged to it."""
    from lm_eval.loggers import wandb_logger

    logged: list[Any] = []
    monkeypatch.setitem(sys.modules, name, Tracker(name, logged, error))
    monkeypatch.setattr(wandb_logger, "get_wandb_printer", lambda: None)
    return logged


GENERATED = {**GSM8K, "output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}


def test_cells_are_logged_to_wandb_by_lm_evals_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = install_tracker(monkeypatch, "wandb")
    path = grid_for_the_hub(tmp_path / "grid", GENERATED)
    assert main(["grid", "compare", str(path), "--wandb_args", "project=mine"]) == 0
    assert [entry[1] for entry in logged if entry[0] == "init"] == [
        {"name": f"{variant} on gsm", "project": "mine"} for variant in ("dense", "cut")
    ]
    values = {key: value for entry in logged if entry[0] == "log" for key, value in entry[1].items()}
    assert values["gsm/exact_match"] == 0.75 and list(values["gsm_eval_results"]["exact_match"]) == [1, 1, 1, 0]
    assert logged.count("finished") == 2


def test_cells_are_logged_to_trackio_by_lm_evals_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = install_tracker(monkeypatch, "trackio")
    path = grid_for_the_hub(tmp_path / "grid", GENERATED)
    assert main(["grid", "compare", str(path), "--trackio_args", "project=mine"]) == 0
    values = [entry[1] for entry in logged if entry[0] == "log"]
    assert [value["gsm/exact_match"] for value in values if "gsm/exact_match" in value] == [0.5, 0.75]
    traces = [value["gsm/sample"] for value in values if "gsm/sample" in value]
    assert len(traces) == 8 and traces[0]["messages"][0]["content"] == "prompt 0"
    assert logged.count("finished") == 2


def test_samples_that_the_logger_cannot_read_are_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A task with a metric of some questions only, as prune_math500 has them by subject."""
    logged = install_tracker(monkeypatch, "wandb")
    config = {**GENERATED, "metric_list": [{"metric": "exact_match"}, {"metric": "algebra"}]}
    path = grid_for_the_hub(tmp_path / "grid", config)
    assert main(["grid", "compare", str(path), "--wandb_args", "project=mine"]) == 0
    assert "dense on gsm: the samples are not logged to wandb (KeyError: 'algebra')" in caplog.text
    assert logged.count("finished") == 2 and [entry for entry in logged if entry[0] == "log"]


def test_a_tracker_that_refuses_is_one_line_after_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_tracker(monkeypatch, "wandb", RuntimeError("no API key\nconfigured"))
    path = grid_for_the_hub(tmp_path / "grid", GENERATED)
    assert main(["grid", "compare", str(path), "--wandb_args", "project=mine"]) == 2
    printed = capsys.readouterr()
    assert "page.html" in printed.out and "dense on gsm could not be logged" in printed.err
    assert len(printed.err.strip().splitlines()) == 1


def test_a_tracker_that_is_not_installed_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = grid_for_the_hub(tmp_path / "grid", GSM8K)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["grid", "compare", str(path), "--wandb_args", "project=mine"]) == 2
    assert "needs the package wandb" in capsys.readouterr().err and not (path / "compare").exists()


@pytest.mark.parametrize(
    ("blocks", "heads", "words"),
    [
        (["L1"], "", ", without 1 layer: in all 2 blocks, 4 attention heads and 48 feed-forward channels"),
        (["L1.attention"], "L0H0-1", ", without 1 block: in all 6 attention heads"),
        ([], "L0H0-1", ", without 2 attention heads"),
    ],
)
def test_what_goes_with_a_layer_is_not_counted_beside_it(blocks: list[str], heads: str, words: str) -> None:
    assert without(cut(tiny("llama", num_hidden_layers=3), Plan(heads, blocks=blocks)).manifest) == words
