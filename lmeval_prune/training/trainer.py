"""Resumable transformers Trainer on batches of similar length; loss curves."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from lmeval_prune.architectures.precision import fast_products
from lmeval_prune.artefacts import read_json
from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError
from lmeval_prune.reporting.plot_style import COLOURS, figure, save

ACCURACY = "eval_accuracy"


def result_settings(options: Any) -> dict[str, Any]:
    """Return the options that the result depends on, as JSON: all except paths."""
    settings = json.loads(json.dumps(asdict(options)))
    return {name: value for name, value in settings.items() if name not in ("output", "data_dir")}


# ---------------------------------------------------------------------- trainer


class BatchesByLength(Sampler[int]):
    """Random order in which the texts of a batch have similar lengths, drawn by seed and epoch.

    With transformers' own sampler, which draws from torch's generator, a resumed epoch would have another order.
    """

    SPAN = 24  # number of batches whose texts are sorted by length

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed, self.epoch = lengths, batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
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


class StopDiverged(TrainerCallback):
    """Ends a training whose weights are NaN or infinite, which no step makes numbers again.

    Such weights are neither validated nor kept as a checkpoint.
    """

    has_diverged = False

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if not self.has_diverged and not _has_finite_weights(model):  # transformers logs again at the end
            self.has_diverged = True
            control.should_training_stop, control.should_evaluate, control.should_save = True, False, False
            if state.best_global_step and state.is_world_process_zero:
                print("the training has diverged: the best weights before are kept", flush=True)


def _has_finite_weights(model: Any) -> bool:
    return all(bool(weight.isfinite().all()) for weight in model.parameters() if weight.requires_grad)


class ResumableTrainer(Trainer):
    """Trainer on batches of similar length.

    `lengths` are numbers of tokens of the training examples; `score` returns further validation metrics, by their names
    in the log; `settings` are further arguments of transformers' Trainer.
    """

    def __init__(
        self,
        model: Any,
        arguments: TrainingArguments,
        collator: Any,
        train: Sequence[Any],
        validation: Sequence[Any],
        lengths: Sequence[int],
        score: Callable[[], dict[str, float]],
        **settings: Any,
    ) -> None:
        self.lengths, self.score = lengths, score
        super().__init__(
            model,
            arguments,
            collator,
            train_dataset=list(train),
            eval_dataset=list(validation) or None,
            callbacks=[StopDiverged()],
            **settings,
        )

    def evaluation_loop(self, *args: Any, **settings: Any) -> Any:
        output = super().evaluation_loop(*args, **settings)
        return output._replace(metrics={**(output.metrics or {}), **self.score()})

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


def last_checkpoint(checkpoints: Path) -> str | None:
    """Return the newest complete checkpoint, and delete those from which no training resumes.

    `trainer_state.json` is the last file of a checkpoint that transformers writes, also without optimizer states.
    """
    complete: dict[int, Path] = {}
    for folder in checkpoints.glob("checkpoint-*"):
        try:
            step = read_json(folder / "trainer_state.json")["global_step"]
        except InputError:
            step = None
        if step is None or not any(folder.glob("optimizer*")):
            shutil.rmtree(folder)
        else:
            complete[step] = folder
    return str(complete[max(complete)]) if complete else None


def training_arguments(
    checkpoints: Path, validates: bool, best_by: tuple[str, bool] | None, **arguments: Any
) -> TrainingArguments:
    """Return the `TrainingArguments` of a training with checkpoints, validations and logs each epoch, or `save_steps`.

    `best_by` is the metric that chooses the best epoch, and whether higher is better; None: the last epoch is kept.
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


# ---------------------------------------------------------------------- loss curves


def draw(
    stages: Sequence[Mapping[str, Any]], lines: Mapping[str, tuple[str, str, str]], title: str, stem: Path
) -> None:
    """Draw losses and validation accuracy by epoch; `lines` are label, colour and line style of losses in the logs."""
    picture, axes = figure(7, 3.4, title)
    right = axes.twinx() if any(ACCURACY in row for stage in stages for row in stage["log"]) else None
    start, labels = 0.0, set[str]()
    for stage in stages:
        log = stage["log"]
        for name, (label, colour, style) in lines.items():
            rows = [row for row in log if row.get(name, 0) > 0 and ("eval_loss" in row) == name.startswith("eval_")]
            if rows:
                points = [start + row["epoch"] for row in rows], [row[name] for row in rows]
                axes.plot(*points, color=colour, ls=style, marker=".", label=None if label in labels else label)
                labels.add(label)
        if right is not None and (rows := [row for row in log if ACCURACY in row]):
            points = [start + row["epoch"] for row in rows], [100 * row[ACCURACY] for row in rows]
            right.plot(*points, color=COLOURS[3], ls=":", marker=".")
        end = start + max((row["epoch"] for row in log), default=0.0)
        if "removed" in stage:
            axes.axvspan(start, end, color="#f2f2f2" if stage["stage"] % 2 else "white", zorder=-1, lw=0)
            text = f" stage {stage['stage']}"
            axes.annotate(text, (start, 0.98), xycoords=("data", "axes fraction"), fontsize=7, va="top")
        start = end
    axes.set_xlabel("epoch, over all stages" if len(stages) > 1 else "epoch")
    if labels:
        axes.set_yscale("log")
        picture.legend(frameon=False, fontsize=7, ncols=len(labels), loc="outside lower center")
    if right is not None:
        right.set_ylabel("validation accuracy, % (dotted)", color=COLOURS[3], fontsize=8)
        right.set_ylim(0, 100)
        right.spines[["top"]].set_visible(False)
    save(picture, stem)
