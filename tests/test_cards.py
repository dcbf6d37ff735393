"""Cards of what is written as a model: front matter, what was removed, programs and commands that run."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from lmeval_prune import Plan
from lmeval_prune.cli import main
from lmeval_prune.surgery.card import MARKER, write_card
from lmeval_prune.surgery.cut import cut_to
from tests.athena_hosts import data_folder, quick_training
from tests.tiny_models import tiny

PARENT_CARD = """---
license: other
license_name: tiny-license
base_model: someone/tiny-base
tags: [theirs]
---

# Their own words
"""
# command, path of its card, library, tags
WRITTEN: dict[str, tuple[str, str, str, set[str]]] = {
    "cut": ("cut --plan mask.json --output out", "out/README.md", "transformers", {"pruned"}),
    "uneven": (
        "prune --method magnitude --parts channels --ratio 0.2 --allocation global --output plan.json --cut out",
        *("out/README.md", "transformers", {"pruned", "magnitude", "custom_code"}),
    ),
    "distilled": (
        "distill --task prune_asdiv_a_equation --test fold0 --limit 8 --validation 0.25 --data_dir data --ratio 0.5 "
        "--pruning unit=balanced --stages 1 --epochs 1 --calibration 4 --trainer report_to=none --output out",
        *("out/README.md", "transformers", {"pruned", "norm_entropy", "distilled"}),
    ),
    "adapter": (
        "export adapter --heads L0H1+L1H2 --output .",
        *("L0H1+L1H2/README.md", "peft", {"pruned", "lora"}),
    ),
    "gguf": (
        "export model --format gguf --dtype float32 --heads L0H0-1 --output out.gguf",
        *("out.README.md", "gguf", {"pruned", "gguf"}),
    ),
}


@pytest.fixture
def parent(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A local model with a card of its own, a mask for it and data to train on, in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "parent")
    Path("parent", "README.md").write_text(PARENT_CARD, encoding="utf-8")
    data_folder(tmp_path / "data")
    main(["mask", "--pretrained", "parent", "--heads", "L0H0-1+L1H0-1", "--output", "mask.json"])
    with quick_training():
        yield Path("parent")


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_card_has_what_the_hub_reads_and_runs(kind: str, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, path, library, tags = WRITTEN[kind]
    if kind == "gguf":
        for file in parent.glob("tokenizer*"):  # llama.cpp has no name for its pre-tokenizer
            file.unlink()
    monkeypatch.setattr(sys, "argv", ["/bin/lmeval-prune", *words.split(), "--pretrained", "parent"])
    assert main() == 0
    card = ModelCard.load(path)
    data = card.data.to_dict()
    assert (data["library_name"], set(data["tags"])) == (library, {"lmeval-prune", *tags})
    assert (data["base_model"], data["license_name"]) == ("someone/tiny-base", "tiny-license")
    assert data["pipeline_tag"] == "text-generation" and "Their own words" not in card.text
    assert ("Nothing was trained" in card.text) == (kind != "distilled") == ("mean KLD" not in card.text)
    assert ("parameters are left" in card.text) == (kind != "adapter")
    blocks = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    assert len(blocks) == (kind != "gguf")
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    commands = dict(re.findall(r"```bash\n([\w-]+) (.*?)\n```", card.text))
    if kind != "gguf":
        assert main(["run", *shlex.split(commands["lm_eval"]), "--limit", "1", "--device", "cpu"]) == 0
    Path("out.gguf").unlink(missing_ok=True)
    assert main(shlex.split(commands["lmeval-prune"])) == 0


def test_a_file_that_is_not_ours_stays(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: dict[str, Any] = {"auto_class": "", "is_adapter": False}
    path = Path("out.README.md")
    for text, is_ours in (("my notes", False), (f"old card\n{MARKER}\n", True)):
        path.write_text(text)
        write_card(path, "out.gguf", ("parent", None), "gguf", [], [], None, **words)
        assert (path.read_text() != text) == is_ours


def test_a_model_that_was_never_saved_has_no_base(parent: Path, tmp_path: Path) -> None:
    Path("README.md").write_text(PARENT_CARD)  # of the folder in which the program runs
    cut_to(tmp_path / "out", tiny("llama"), Plan(heads=["L0H0", "L0H1", "L1H0", "L1H1"]))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model is None and card.data.license is None and "How it was made" not in card.text
