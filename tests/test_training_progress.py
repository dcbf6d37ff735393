"""Lines that a training prints: at each log, and in between if an epoch is long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmeval_prune.training import trainer
from lmeval_prune.training.trainer import Progress


@pytest.mark.parametrize(
    ("has_bar", "is_first", "lines"),
    [
        (False, True, ["epoch 0.70 of 2; at most about 2.2 min left"]),
        (True, True, []),  # a bar of transformers shows the same
        (False, False, []),  # another process prints
    ],
)
def test_a_long_epoch_prints_a_line_each_minute(
    has_bar: bool,
    is_first: bool,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two epochs of ten steps of ten seconds."""
    now = 0.0
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: now, process_time=lambda: now))
    progress, args = Progress(), SimpleNamespace(disable_tqdm=not has_bar, num_train_epochs=2)
    state = SimpleNamespace(
        global_step=0, epoch=0.0, max_steps=20, is_world_process_zero=is_first, log_history=list[dict[str, float]]()
    )
    progress.on_train_begin(args, state, None)
    progress.on_epoch_begin(args, state, None)
    for step in range(1, 11):
        now, state.global_step, state.epoch = 10.0 * step, step, step / 10
        progress.on_step_end(args, state, None)
    assert capsys.readouterr().out.splitlines() == lines
    state.log_history.append({"loss": 0.5, "step": 10, "epoch": 1.0})
    progress.on_log(args, state, None)
    expected = "epoch 1.00 of 2: loss 0.5000, 100 s; at most about 1.7 min left\n"
    assert capsys.readouterr().out == (expected if is_first else "")
