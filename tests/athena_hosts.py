"""A tiny random encoder, hosts over it, and problems of our own."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lmeval_prune.athena.batches import Example, make_examples
from lmeval_prune.athena.checkpoint import begin
from lmeval_prune.athena.model import Athena
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.athena.problems import GroundedProblem
from lmeval_prune.distillation.options import DistillOptions
from tests.tiny_models import tiny

PROBLEMS = [
    ("Ann has 3 red caps and 12 blue ones. Ben lost 4.", "How many caps has Ann?", "3+12=15"),
    ("There were twenty birds.", "If 7 flew off, how many are there?", "20-7=13"),
    ("A box holds 6 eggs.", "How many eggs are in 5 boxes?", "6*5=30"),
    ("24 pens go into 4 cups.", "How many pens are in a cup?", "24/4=6"),
    ("Tom had 30 nuts, ate 8 and gave away 5.", "How many are left?", "30-(8+5)=17"),
    ("Zoe reads 2 pages, then 9, then 14.", "How many pages is that?", "2+9+14=25"),
    ("Of 18 plums 3 are bad; the others go to 5 children.", "How many does each get?", "(18-3)/5=3"),
]


def encoder_folder(folder: Path, family: str = "bert", **changes: Any) -> Path:
    """Write a tiny encoder with a tokenizer of single letters."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    letters = [*string.ascii_lowercase, *".,?;$'-"]
    vocabulary = {token: i for i, token in enumerate([*special, *letters, *(f"##{item}" for item in letters)])}
    created = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    created.normalizer, created.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    created.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    mask = changes.pop("mask", "[MASK]")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=created, model_max_length=128, **names, **({"mask_token": mask} if mask else {})
    )
    tiny(family, vocab_size=len(vocabulary), **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def document(number: int) -> dict[str, Any]:
    """One of our problems as the tasks give it."""
    body, question, formula = PROBLEMS[number % len(PROBLEMS)]
    return {
        "question": f"{body} {question}",
        "formula": formula,
        "target": formula.partition("=")[2],
        "complexity": "low",
    }


def grounded() -> list[GroundedProblem]:
    """All our problems."""
    return [item for number in range(len(PROBLEMS)) if (item := GroundedProblem.of(document(number)))]


def host(encoder: Path, **settings: Any) -> Athena:
    """A random host in float64; weights large enough that thoughts differ."""
    torch.manual_seed(3)
    model = begin(str(encoder), **settings).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.startswith("encoder."):
                parameter.normal_(0, 0.3)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
    return model


def examples(model: Athena) -> list[Example]:
    """Our problems as examples of a host."""
    created = make_examples(grounded(), model.tokenizer, model.settings)
    assert len(created) == len(PROBLEMS)
    return created


def data_folder(folder: Path, rows: int = 30) -> Path:
    """Write `asdiv.jsonl` with our problems, told apart by a word each, in five folds."""
    lines = []
    for number in range(rows):
        body, question, formula = PROBLEMS[number % len(PROBLEMS)]
        name = "".join(string.ascii_lowercase[int(digit)] for digit in str(number))
        row = {
            "id": f"own-{number}",
            "grade": 1,
            "source": "own",
            "body": f"{name}: {body}",
            "question": question,
            "solution_type": "Own",
            "answer": f"{formula.partition('=')[2]} (things)",
            "formula": formula,
            "asdiv_a_fold": number % 5,
        }
        lines.append(json.dumps(row) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asdiv.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def train_options(folder: Path, **changes: Any) -> TrainOptions:
    """An ATHENA's training on 20 problems; 4 for validation, 6 for the test."""
    encoder, data = encoder_folder(folder / "encoder", dtype=torch.float32), data_folder(folder / "data")
    paths = {"output": str(folder / "host"), "encoder": str(encoder), "data_dir": str(data)}
    return TrainOptions(**{**paths, "validation": 0.2, "seed": 1, **changes})


def language_options(model: str | Path, folder: Path, **changes: Any) -> DistillOptions:
    """One stage of one epoch over six problems, with two for validation."""
    settings = {
        "pretrained": str(model),
        "output": str(folder / "student"),
        "data_dir": str(data_folder(folder / "problems")),
        "task": "prune_asdiv_a_equation",
        "test": "fold0",
        "limit": 8,
        "validation": 0.25,
        "answer": "\\boxed{{}}",
        "ratio": 0.5,
        "pruning": {"unit": "balanced"},
        "stages": 1,
        "epochs": 1,
        "batch": 3,
        "calibration": 4,
        "rate": 1e-3,
    }
    return DistillOptions(**{**settings, **changes})


@contextmanager
def quick_training() -> Iterator[None]:
    """Draw no pictures, which take as long as the rest, and let transformers' collections pass over what is there."""
    import pytest

    from lmeval_prune.athena import training
    from lmeval_prune.distillation import recursion
    from tests.conftest import freeze

    freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recursion, "draw", lambda *_: None)
        patch.setattr(training, "draw", lambda *_: None)
        yield
