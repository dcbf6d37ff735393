"""Which epoch's weights a distillation keeps: by the validation loss, or the last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmeval_prune import InputError, load_pretrained
from lmeval_prune.distillation.host import read_note
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill
from lmeval_prune.distillation.trainer import DistillTrainer, solved_then_loss
from tests.athena_hosts import language_options

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def options(tiny_folder: Path, tmp_path: Path) -> DistillOptions:
    """Three epochs without pruning and teacher."""
    return language_options(tiny_folder, tmp_path, ratio=0.0, distill_weight=0.0, epochs=3, rate=1e-2)


def values(folder: str, name: str) -> list[float]:
    return [row[name] for row in read_note(folder)["stages"][0]["log"] if name in row]


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def weights_of_epochs(patch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Return a list that is filled with the weights at each validation."""
    weights: list[dict[str, torch.Tensor]] = []
    original = DistillTrainer.validation_metrics
    patch.setattr(
        DistillTrainer, "validation_metrics", lambda self: weights.append(state_of(self.student)) or original(self)
    )
    return weights


@settings(max_examples=200)
@given(st.integers(0, 500), st.integers(0, 500), st.floats(0, 1e4), st.floats(0, 1e4))
def test_the_loss_only_decides_between_equal_numbers(solved: int, other: int, loss: float, other_loss: float) -> None:
    one, two = solved_then_loss(solved, loss, 500), solved_then_loss(other, other_loss, 500)
    if solved != other:
        assert (one > two) == (solved > other)
    elif abs(loss - other_loss) > 1e-3 * max(loss, other_loss, 1.0):
        assert (one > two) == (loss < other_loss)


@pytest.mark.parametrize("best_by", ["loss", "none"])
@pytest.mark.parametrize("from_epoch", [1, 2])
def test_weights_of_a_diverged_training_are_not_kept(
    options: DistillOptions,
    best_by: Any,
    from_epoch: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A loss that is NaN makes the weights NaN; those of an epoch before it are kept, if one was chosen."""
    kept, total = weights_of_epochs(monkeypatch), DistillTrainer.total

    def diverging(trainer: DistillTrainer, terms: Any) -> Any:
        is_step = torch.is_tensor(terms["task"]) and terms["task"].requires_grad
        return total(trainer, terms) * (torch.nan if is_step and (trainer.state.epoch or 0) >= from_epoch - 1 else 1)

    monkeypatch.setattr(DistillTrainer, "total", diverging)
    changed = replace(options, best_by=best_by)
    if best_by == "none" or from_epoch == 1:
        for _ in range(2):  # again, when it is resumed
            with pytest.raises(InputError, match="has diverged: weights are NaN or infinite; give a smaller --rate"):
                distill(changed)
        assert not Path(changed.output).exists()
        return
    distill(changed)
    assert capsys.readouterr().out.count("the training has diverged: the best weights before are kept") == 1
    assert read_note(changed.output)["stages"][0]["best_epoch"] == 1
    assert len(kept) == 1
    assert equal(state_of(load_pretrained(changed.output)), kept[0])


def test_the_last_epoch_is_kept_and_still_validated(options: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of_epochs(monkeypatch)
    last = replace(options, best_by="none")
    note = distill(last)
    assert note["stages"][0]["best_epoch"] == 3
    assert len(values(last.output, "eval_task")) == 3
    assert equal(load_pretrained(last.output).state_dict(), weights[-1])
