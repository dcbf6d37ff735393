"""A batch whose common prefix is run once has the losses and gradients of the batch run whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmeval_prune.distillation import trainer as trainer_module
from lmeval_prune.distillation.trainer import LENGTH, DistillTrainer, common_prefix, forward_in_parts, runs_in_parts
from tests.athena_hosts import language_options, quick_training
from tests.test_distillation import trainer_of
from tests.tiny_models import CAUSAL, distinct, tiny

SHARED = 7
UNSUITED = {"cohere2", "gemma2", "gemma3_text", "gpt_oss", "mistral", "olmo3", "starcoder2"}  # to be seen


def batch() -> dict[str, Any]:
    """Three texts of up to 12 tokens; the first seven are the same."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (3, 12), generator=generator)
    ids[:, :SHARED] = ids[0, :SHARED]
    mask = (torch.arange(12) < torch.tensor([12, 10, 9])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "logits_to_keep": torch.tensor([8, 10, 11])}


def outputs_and_gradients(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Logits of real tokens, gradients of their squares' sum."""
    model.zero_grad()
    real = inputs["attention_mask"].bool()
    logits = forward_in_parts(model, inputs).logits[real[:, inputs["logits_to_keep"]]]
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Compare tensors up to 1e-5: norms and rotary embeddings of most families are in float32.

    Gradients that are zero but for rounding are compared relative to a hundredth of the largest.
    """
    least = 0.01 * max(float(x.norm()) for x in expected)
    for tensor, reference in zip(actual, expected, strict=True):
        assert float((tensor - reference).norm()) < 1e-5 * max(float(reference.norm()), least)


@pytest.mark.parametrize("family", distinct(CAUSAL))
def test_logits_and_gradients_are_those_of_the_whole_batch(family: str) -> None:
    model = tiny(family, dtype=torch.float64).train()
    for module in model.modules():  # no dropout
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or isinstance(module, torch.nn.Dropout)):
                setattr(module, name, 0.0)
    if not runs_in_parts(model):
        assert family in UNSUITED
        return
    whole, parts = (outputs_and_gradients(model, {**batch(), LENGTH: length}) for length in (0, SHARED))
    assert len(whole) > 3
    assert_same(parts, whole)


def test_dropout_and_windows_need_whole_texts() -> None:
    assert runs_in_parts(tiny("llama"))
    assert not runs_in_parts(tiny("llama", attention_dropout=0.1))
    assert not runs_in_parts(tiny("gpt2"))  # its default dropout is 0.1
    assert not runs_in_parts(tiny("mistral", sliding_window=4))
    model = tiny("llama").train()
    model.gradient_checkpointing_enable()
    assert not runs_in_parts(model)


@pytest.mark.parametrize(
    "rows,first,length",
    [
        ([[5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 9, 2]], 6, 5),
        ([[5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 9, 2]], 4, 4),  # not beyond the first token whose logits are needed
        ([[5, 6, 7, 8, 9, 1], [5, 6, 7, 8, 9, 2]], 3, 0),  # too short to pay
        ([[5, 6, 7, 8, 9, 1], [4, 6, 7, 8, 9, 1]], 6, 0),
        ([[5, 6, 7, 8, 9, 1]], 6, 0),  # a single text
    ],
)
def test_length_of_a_common_prefix(rows: list[list[int]], first: int, length: int) -> None:
    assert common_prefix(torch.tensor(rows), first) == length


@pytest.fixture
def trainer(tiny_folder: Path, tmp_path: Path) -> Iterator[DistillTrainer]:
    """A trainer in float64 with the response term, whose student differs from the teacher."""
    options = language_options(tiny_folder, tmp_path, chat=True, terms=("response",))
    with quick_training():
        trainer = trainer_of(options, tmp_path / "work")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in trainer.student.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
        yield trainer


def test_training_runs_the_template_once_with_the_same_losses(
    trainer: DistillTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "LEAST", 1)
    inputs = trainer.host.collate(trainer.examples.train[:3])
    assert inputs[LENGTH] > 0  # the user's turn begins alike
    counts, lengths, results = trainer.counts([inputs]), list[int](), []
    trainer.student.register_forward_pre_hook(
        lambda module, args, named: lengths.append(named["input_ids"].numel()), with_kwargs=True
    )
    for is_whole in (True, False):
        trainer.__dict__["runs_in_parts"] = not is_whole
        trainer.model.train()
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=counts)
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in trainer.student.parameters())])
    saved = 2 * inputs[LENGTH]
    assert lengths[0] == inputs["input_ids"].numel() and sum(lengths[1:]) == lengths[0] - saved
    assert_same(*results)


def test_attention_maps_need_whole_texts(trainer: DistillTrainer) -> None:
    assert trainer.runs_in_parts
    del trainer.__dict__["runs_in_parts"]
    trainer.options = replace(trainer.options, terms=("feature",))
    assert not trainer.runs_in_parts
