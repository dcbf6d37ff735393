"""Resumable transformers Trainer on batches of similar length."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from lmeval_prune.architectures.precision import fast_products
from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError
from lmeval_prune.training.resuming import last_checkpoint


class BatchesByLength(Sampler[int]):
    """Random order in which the texts of a batch have similar lengths, drawn by seed and epoch.

    With transformers' own sampler, which draws from torch's generator, a resumed epoch would have another order.
    """

    SPAN = 24  # number of batches whose texts are sorted by length

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed, self.epoch = lengths, batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = random.Random(f"{self.seed}:{self.epoch}")
        order = generator.sample(range(len(self)), len(self))
        span, length = self.SPAN * self.batch, self.lengths.__getitem__
        order = [index for i in range(0, len(order), span) for index in sorted(order[i : i + span], key=length)]
        batches = [order[i : i + self.batch] for i in range(0, len(order), self.batch)]
        last = batches.pop()  # may be smaller
        generator.shuffle(batches)
        yield from (index for batch in [*batches, last] for index in batch)


class Progress(TrainerCallback):
    """Callback that prints the remaining time at each log; each log gets the elapsed time.

    Args:
        name: prefix of each line.
        following: number of trainings of the same length that follow.
    """

    LOSSES = ("loss", "response", "feature", "task")  # that a row of a training step may have
    VALIDATION_METRICS = ("eval_accuracy", "eval_task", "eval_loss")

    def __init__(self, name: str = "", following: int = 0) -> None:
        self.name, self.following = name, following

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start the clock."""
        self.start, self.first_step = time.monotonic(), state.global_step
        if self.first_step:
            self._print(f"{self.name}resumes after epoch {state.epoch:.2f}", state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start the clocks of an epoch: elapsed time and processor time."""
        self.clocks = time.monotonic(), time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Print the latest row of the log."""
        row = state.log_history[-1]
        if "loss" in row:
            clocks = time.monotonic(), time.process_time()
            row["seconds"], row["processor_seconds"] = (
                round(now - then, 1) for now, then in zip(clocks, self.clocks, strict=True)
            )
            self.clocks = clocks
            losses = _format_row(row, self.LOSSES)
            position = f"{self.name}epoch {state.epoch:.2f} of {args.num_train_epochs:.0f}"
            text = f"{position}: {losses}, {row['seconds']:.0f} s; {self._remaining_time(state)}"
        elif "eval_loss" in row:
            text = f"  validation: {_format_row(row, self.VALIDATION_METRICS)}"
            self.clocks = time.monotonic(), time.process_time()  # validation is no part of the next row
        else:
            return
        self._print(text, state)

    def _remaining_time(self, state: Any) -> str:
        """Return an estimate of the remaining time."""
        steps = state.max_steps * (1 + self.following) - state.global_step
        per_step = (time.monotonic() - self.start) / max(1, state.global_step - self.first_step)
        return f"at most about {per_step * steps / 60:.1f} min left"

    def _print(self, text: str, state: Any) -> None:
        """Print a line, in one of the processes."""
        if state.is_world_process_zero:
            print(text, flush=True)


class Divergence(TrainerCallback):
    """Callback that ends a training whose weights are NaN or infinite: no step makes them numbers again.

    They are neither validated nor kept as a checkpoint.
    """

    has_diverged = False

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Look at the weights."""
        if not self.has_diverged and not _has_finite_weights(model):  # transformers logs again at the end
            self.has_diverged = True
            control.should_training_stop, control.should_evaluate, control.should_save = True, False, False
            if state.is_world_process_zero and state.best_global_step:
                print("the training has diverged: the best weights before are kept", flush=True)


def _has_finite_weights(model: Any) -> bool:
    return all(bool(weight.isfinite().all()) for weight in model.parameters() if weight.requires_grad)


def _format_row(row: dict[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name.removeprefix('eval_')} {row[name]:.4f}" for name in names if name in row)


class ResumableTrainer(Trainer):
    """Trainer on batches of similar length; a subclass can add validation metrics.

    `lengths` are the numbers of tokens of the training examples. Training stops after `patience` validations without
    improvement (0: never).
    """

    def __init__(
        self,
        model: Any,
        arguments: TrainingArguments,
        collator: Any,
        train: Sequence[Any],
        validation: Sequence[Any],
        lengths: Sequence[int],
        progress: Progress,
        patience: int = 0,
    ) -> None:
        self.lengths = lengths
        stop: list[TrainerCallback] = [EarlyStoppingCallback(patience)] if patience else []
        super().__init__(
            model,
            arguments,
            collator,
            train_dataset=list(train),
            eval_dataset=list(validation) or None,
            callbacks=[progress, Divergence(), *stop],
        )
        self.remove_callback(PrinterCallback)

    def further_metrics(self) -> dict[str, float]:
        """Return additional validation metrics by their names in the log."""
        return {}

    def evaluation_loop(self, *args: Any, **settings: Any) -> Any:
        """Evaluate a split, and add `further_metrics` to the metrics."""
        output = super().evaluation_loop(*args, **settings)
        return output._replace(metrics={**(output.metrics or {}), **self.further_metrics()})

    def run(self) -> dict[str, Any]:
        """Train from the last complete checkpoint, if there is one; return `best_epoch` and the `log` with losses.

        Afterwards the model has the weights of the best epoch (of the last, without a metric that chooses).
        """
        with fast_products():
            self.train(resume_from_checkpoint=last_checkpoint(Path(str(self.args.output_dir))))
        if not _has_finite_weights(self.model):
            raise InputError("the training has diverged: weights are NaN or infinite; give a smaller --rate")
        best = self.state.best_global_step or self.state.global_step
        return {
            "best_epoch": round(best / self.state.max_steps * self.args.num_train_epochs, 2),
            "log": [row for row in self.state.log_history if "loss" in row or "eval_loss" in row],
        }

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler, without warmup for a single update, whose learning rate would be 0."""
        with replaced(self.args, warmup_steps=self.args.warmup_steps if num_training_steps > 1 else 0):
            return super().create_scheduler(num_training_steps, optimizer)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return BatchesByLength(self.lengths, self.args.per_device_train_batch_size, self.args.seed)


def training_arguments(
    checkpoints: Path, validates: bool, best_by: tuple[str, bool] | None, **arguments: Any
) -> TrainingArguments:
    """Return the `TrainingArguments` for transformers' Trainer.

    Args:
        checkpoints: folder of the checkpoints.
        validates: whether there is a validation split.
        best_by: metric that chooses the best epoch, and whether higher is better; None: keep the last epoch.
        arguments: fields of `TrainingArguments`; `save_steps` are updates between checkpoints, validations and logs,
            by default an epoch.
    """
    save_steps = arguments.pop("save_steps", 0)
    interval, steps = "steps" if save_steps else "epoch", max(1, save_steps)
    metric, greater = best_by or (None, None)
    return TrainingArguments(
        **{
            "optim": "adamw_torch_fused",
            "lr_scheduler_type": "linear",
            "save_total_limit": 2,
            "dataloader_pin_memory": torch.cuda.is_available(),
            "use_cpu": not torch.accelerator.is_available(),
            "disable_tqdm": not sys.stderr.isatty(),
            "report_to": [],
            **arguments,
        },
        output_dir=str(checkpoints),
        eval_strategy=interval if validates else "no",
        save_strategy=interval,
        logging_strategy=interval,
        eval_steps=steps,
        save_steps=steps,
        logging_steps=steps,
        load_best_model_at_end=best_by is not None,
        metric_for_best_model=metric,
        greater_is_better=greater,
        remove_unused_columns=False,
    )
