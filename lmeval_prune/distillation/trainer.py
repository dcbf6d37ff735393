"""One stage: transformers' Trainer with the loss of eqs. 6 and 7."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.athena.training import ByLength
from lmeval_prune.distillation.host import Host, Material, check_found
from lmeval_prune.distillation.losses import attention_distance
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError, first_line, nearest
from lmeval_prune.interventions.attention_call import eager_attention

TERMS = ("response", "feature", "task")
_OTHER_DROPOUT = ("resid", "hidden", "output")  # in attention modules, but not of their maps


class Student(nn.Module):
    """A model as the trainer sees it, whatever its kind.

    Args:
        model: to be trained.
        part: the transformers model in it.
    """

    accepts_loss_kwargs = True  # the loss is divided by what the whole update counts

    def __init__(self, model: Any, part: Any) -> None:
        super().__init__()
        self.model = model
        object.__setattr__(self, "part", part)  # no second name of its weights

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
        """The model's outputs; labels are for the loss alone."""
        return self.model(**inputs)

    def state_dict(self, *args: Any, **settings: Any) -> Any:
        """Each tensor once, so that tied ones can be written."""
        firsts = self._firsts()
        found = super().state_dict(*args, **settings)
        return {name: tensor for name, tensor in found.items() if firsts.get(name, name) == name}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **settings: Any) -> Any:
        """Tied tensors under all their names."""
        found = {name: state_dict[first] for name, first in self._firsts().items() if first in state_dict}
        return super().load_state_dict({**state_dict, **found}, *args, **settings)

    def _firsts(self) -> dict[str, str]:
        """Of each tensor's name the first one that it has."""
        named, firsts = super().state_dict(keep_vars=True), dict[int, str]()
        return {name: firsts.setdefault(id(tensor), name) for name, tensor in named.items()}

    def gradient_checkpointing_enable(self, **settings: Any) -> None:
        """Of the transformers model."""
        part: Any = self.part
        part.gradient_checkpointing_enable(**settings)


class Filled(Sampler[int]):
    """Another sampler's order, and numbers that stand for nobody at its end.

    Else several processes would get problems twice, so that all of them have equally many.

    Args:
        order: the sampler.
        count: numbers in all.
    """

    def __init__(self, order: ByLength, count: int) -> None:
        self.order, self.count = order, count

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch."""
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from self.order
        yield from range(len(self.order), self.count)


def filled(examples: Sequence[Any], batch: int) -> list[Any]:
    """Examples, and Nones up to whole batches of all processes."""
    return [*examples, *[None] * (-len(examples) % batch)]


def collated(host: Host, stand_in: Any, examples: Sequence[Any]) -> dict[str, Any]:
    """The arguments for a batch without its Nones; of nothing else, those for `stand_in`, with `nobody`."""
    there = [one for one in examples if one is not None]
    return host.collate(there) if there else {**host.collate([stand_in]), "nobody": True}


class DistillTrainer(Trainer):
    """Trains a student under a teacher.

    Args:
        host: of both.
        model: the student.
        teacher: None: nobody teaches.
        heads: of each layer, for each of the student's heads the teacher's that it was.
        material: what is learned.
        work: folder of the trainer's checkpoints.
        stage: number of this one, from 1.
        callbacks: transformers'.
    """

    def __init__(
        self,
        host: Host,
        model: Any,
        teacher: Any,
        heads: Sequence[Sequence[int]],
        material: Material,
        work: Path,
        stage: int = 1,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.host, self.student, self.teacher, self.heads, self.material = host, model, teacher, heads, material
        self.options = host.options
        model_map = map_model(host.part(model))
        self.layers, self.kind = [layer.heads for layer in model_map.attention], model_map.model_type
        self._parts: dict[str, Tensor] = {}
        self._logged_at: int | None = None
        self._validated: dict[str, Any] = {}
        given = arguments(self.options, work, stage, (host.metric, host.greater) if material.validation else None)
        self.filled = filled(material.train, given.train_batch_size * given.world_size)
        super().__init__(
            Student(model, host.part(model)),
            given,
            partial(collated, host, material.train[0]),
            train_dataset=self.filled,
            eval_dataset=filled(material.validation, given.eval_batch_size * given.world_size) or None,
            callbacks=list(callbacks),
        )
        self.remove_callback(PrinterCallback)
        if teacher is not None:
            self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
            if self.options.looks_at_maps:
                attend_without_dropout(model_map)

    # ------------------------------------------------------------------ the loss

    def counts(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Items, and pairs of real positions, of some batches; none of what stands for nobody."""
        batches = [batch for batch in batches if "nobody" not in batch]
        items = sum(self.host.items(batch) for batch in batches)
        pairs = sum(int(batch["attention_mask"].sum(1).square().sum()) for batch in batches)
        return torch.tensor([items, pairs], dtype=torch.float64)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The batches of one update, and what its losses are divided by: counts over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = self.counts(batches).to(device, torch.float32 if device.type == "mps" else torch.float64)
        return batches, self.accelerator.reduce(counts, "sum") if self.args.world_size > 1 else counts

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """λ₁·(response + feature) + λ₂·task (eqs. 6 and 7)."""
        counts = num_items_in_batch if model.training else self.counts([inputs]).to(self.args.device)
        own = {name: value for name, value in inputs.items() if name != "nobody"}
        outputs, parts = self.losses(model, own, counts.clamp(min=1))
        if "nobody" in inputs:
            parts = {name: 0 * part for name, part in parts.items()}
        loss = self.total(parts)
        self._record(parts, counts, model.training)
        if model.training:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over them
        return (loss, outputs) if return_outputs else loss

    def losses(self, model: nn.Module, inputs: dict[str, Any], counts: Tensor) -> tuple[Any, dict[str, Tensor]]:
        """The student's outputs on a batch, and the terms of the loss by name, divided by the counts.

        Raises:
            InputError: attention maps are to be compared, and there are none.
        """
        asked, (items, pairs) = self.options, counts
        maps = {"output_attentions": True} if asked.looks_at_maps and self.teacher is not None else {}
        outputs = model(**inputs, **maps)
        parts = {"task": self.host.task_loss(outputs, inputs) / items}
        if self.teacher is None:
            return outputs, parts
        given = {name: value for name, value in inputs.items() if name != "labels"}
        with torch.no_grad(), self.accelerator.autocast():
            taught = self.teacher(**given, **maps)
        if asked.response:
            parts["response"] = asked.temperature**2 * self.host.response_loss(taught, outputs, inputs) / items
        if maps:
            check_found(outputs.attentions, self.kind, self.layers)
            distance = attention_distance(taught.attentions, outputs.attentions, self.heads, inputs["attention_mask"])
            parts["feature"] = distance / pairs
        return outputs, parts

    def total(self, parts: Mapping[str, Any]) -> Any:
        """Eq. 6 of the terms that there are."""
        asked = self.options
        taught = [parts[name] for name in ("response", "feature") if name in parts]
        return asked.task_weight * parts["task"] + asked.distill_weight * sum(taught)

    # ------------------------------------------------------------------ what is logged

    def _record(self, parts: Mapping[str, Tensor], counts: Tensor, training: bool) -> None:
        if training and self._logged_at is None:
            self._logged_at = self.state.global_step
        for name, part in parts.items():
            if training:
                self._parts[name] = self._parts.get(name, 0.0) + part.detach()
            else:
                count = counts[1 if name == "feature" else 0]
                total, over = self._validated.get(name, (0.0, 0.0))
                self._validated[name] = (total + part.detach() * count, over + count)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Also the terms of the loss, as means over updates."""
        if "loss" in logs and self._parts:
            updates = self.state.global_step - (self._logged_at or 0)
            for name in TERMS:
                if name in self._parts:
                    logs[name] = self._over_processes(self._parts[name]) / updates
            logs["loss"] = self.total(logs)  # transformers rounds it to four digits
            self._parts, self._logged_at = {}, self.state.global_step
        super().log(logs, start_time)

    def _over_processes(self, value: Tensor) -> float:
        return float(self.accelerator.reduce(value, "sum") if self.args.world_size > 1 else value)

    def evaluation_loop(self, *args: Any, **settings: Any) -> Any:
        """Also the terms over the whole split, and what the host says of it."""
        self._validated = {}
        found = super().evaluation_loop(*args, **settings)
        sums = {
            name: self._over_processes(total) / self._over_processes(over)
            for name, (total, over) in self._validated.items()
        }
        own = {f"eval_{name}": value for name, value in sums.items()} | {"eval_loss": self.total(sums)}
        self.student.eval()
        return found._replace(
            metrics={**(found.metrics or {}), **own, **self.host.validated(self.student, self.material)}
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Filled:
        order = ByLength(self.material.lengths, self.args.per_device_train_batch_size, self.args.seed)
        return Filled(order, len(self.filled))


def attend_without_dropout(model_map: ModelMap) -> None:
    """Turn off the dropout of attention maps; that of residual streams stays.

    Families give out their maps after it, so that the feature term would compare what was drawn.
    """
    for layer in model_map.attention:
        for path, module in layer.module.named_modules():
            if any(other in path for other in _OTHER_DROPOUT):
                continue
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name, value in vars(module).items():
                of_maps = "drop" in name and not any(other in name for other in _OTHER_DROPOUT)
                if of_maps and isinstance(value, float):
                    setattr(module, name, 0.0)


class Progress(TrainerCallback):
    """Prints how far all stages are, with an estimate of what is left.

    Args:
        stage: number of this one, from 1.
        stages: how many there are.
        prepared: seconds that scoring, cutting and reading took.
    """

    def __init__(self, stage: int, stages: int, prepared: float) -> None:
        self.stage, self.stages, self.prepared = stage, stages, prepared

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start the clock."""
        self.begun, self.before = time.monotonic(), state.global_step
        if self.before and state.is_world_process_zero:
            print(f"stage {self.stage} of {self.stages} goes on after epoch {state.epoch:.2f}", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Say how far it is."""
        row = state.log_history[-1]
        if not state.is_world_process_zero:
            return
        if "loss" in row and "task" in row:
            left = state.max_steps - row["step"] + (self.stages - self.stage) * state.max_steps
            took = round(time.monotonic() - self.begun, 1)
            rest = took / max(1, state.global_step - self.before) * left
            minutes = (rest + (self.stages - self.stage) * self.prepared) / 60
            row["seconds"] = took
            terms = ", ".join(f"{name} {row[name]:.4f}" for name in TERMS if name in row)
            print(
                f"stage {self.stage} of {self.stages}, epoch {row['epoch']:.2f} of {args.num_train_epochs:.0f}: {terms}"
                f"; at most about {minutes:.1f} min left in all stages",
                flush=True,
            )
        elif "eval_loss" in row:
            shown = [
                f"{name.removeprefix('eval_')} {row[name]:.4f}"
                for name in ("eval_accuracy", "eval_task", "eval_loss")
                if name in row
            ]
            print(f"  validation: {', '.join(shown)}", flush=True)


OURS = {
    *("output_dir", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate"),
    *("weight_decay", "warmup_steps", "max_grad_norm", "seed", "eval_strategy", "save_strategy", "logging_strategy"),
    *("eval_steps", "save_steps", "logging_steps", "load_best_model_at_end", "metric_for_best_model"),
    *("greater_is_better", "restore_callback_states_from_checkpoint", "remove_unused_columns", "accelerator_config"),
}
UNSUITABLE = {  # what our loss, our order of problems or going on after a kill would ignore, or break on
    *("max_steps", "save_only_model", "ignore_data_skip", "label_smoothing_factor", "group_by_length"),
    *("train_sampling_strategy", "length_column_name", "label_names", "prediction_loss_only", "neftune_noise_alpha"),
    *(
        "auto_find_batch_size",
        "average_tokens_across_devices",
        "data_seed",
        "use_liger_kernel",
        "resume_from_checkpoint",
    ),
}


def check_arguments(options: DistillOptions) -> None:
    """Refuse further arguments that transformers has not, or that are set by options of ours, or do nothing here.

    Raises:
        InputError: naming it.
    """
    known = {one.name for one in fields(TrainingArguments)} - OURS - UNSUITABLE
    for name, value in options.trainer.items():
        if name in OURS:
            raise InputError(f"trainer: {name} follows from the other options; leave it out")
        if name in UNSUITABLE:
            raise InputError(f"trainer: {name} does not suit distillation; leave it out")
        if name not in known:
            raise InputError(f"trainer: TrainingArguments of transformers has no {name!r}{nearest(name, known)}")
        if isinstance(getattr(TrainingArguments, name, None), bool) and not isinstance(value, bool):
            raise InputError(f"trainer: {name}={value} is neither true nor false")
    try:
        found = arguments(options, Path(options.output))
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise InputError(f"trainer: transformers refuses {options.trainer} ({first_line(error)})") from error
    if found.per_device_eval_batch_size < 1:
        raise InputError("trainer: per_device_eval_batch_size must be at least 1")


def arguments(
    options: DistillOptions, work: Path, stage: int = 1, best_by: tuple[str, bool] | None = None
) -> TrainingArguments:
    """transformers' arguments for ours.

    Args:
        options: ours.
        work: folder of the trainer's checkpoints.
        stage: number of this one, from 1.
        best_by: metric that chooses the best epoch, and whether more of it is better; None: the last one is taken.
    """
    when = "steps" if options.save_steps else "epoch"
    every = max(1, options.save_steps)
    metric, greater = best_by or (None, None)
    return TrainingArguments(
        **{
            "optim": "adamw_torch_fused",
            "lr_scheduler_type": "linear",
            "per_device_eval_batch_size": 16,
            "save_total_limit": 2,
            "dataloader_pin_memory": torch.cuda.is_available(),
            "use_cpu": not torch.accelerator.is_available(),
            "disable_tqdm": not sys.stderr.isatty(),
            "report_to": [],
            **options.trainer,
        },
        output_dir=str(work),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.rate,
        weight_decay=options.decay,
        warmup_steps=options.warmup,
        max_grad_norm=options.clip,
        seed=1000 * stage + options.seed,  # order and dropout are drawn anew in each stage
        eval_strategy=when if best_by else "no",
        save_strategy=when,
        logging_strategy=when,
        eval_steps=every,
        save_steps=every,
        logging_steps=every,
        load_best_model_at_end=best_by is not None,
        metric_for_best_model=metric,
        greater_is_better=greater,
        restore_callback_states_from_checkpoint=bool(options.patience),
        remove_unused_columns=False,
    )


def train(
    host: Host,
    model: Any,
    teacher: Any,
    heads: Sequence[Sequence[int]],
    material: Material,
    work: Path,
    stage: int,
    prepared: float,
    begin_from: Callable[[Path], str | None],
) -> dict[str, Any]:
    """Train a student; one that was interrupted goes on.

    Args:
        host, model, teacher, heads, material: see `DistillTrainer`.
        work: folder of the trainer's checkpoints.
        stage: number of this one, from 1.
        prepared: seconds that scoring, cutting and reading took.
        begin_from: finds the checkpoint to go on from.

    Returns:
        The losses, and the best epoch.

    Raises:
        InputError: attention maps are to be compared, and there are none; or one process has several GPUs.
    """
    options = host.options
    callbacks: list[TrainerCallback] = [Progress(stage, options.stages, prepared)]
    if options.patience:
        callbacks.append(EarlyStoppingCallback(options.patience))
    trainer = DistillTrainer(host, model, teacher, heads, material, work, stage, callbacks)
    if trainer.args.n_gpu > 1:
        raise InputError(
            "several GPUs take a process each: use `accelerate launch -m lmeval_prune distill`, or set "
            "CUDA_VISIBLE_DEVICES to one"
        )
    with ExitStack() as stack:
        if options.looks_at_maps:
            stack.enter_context(eager_attention(host.part(model)))
            stack.enter_context(eager_attention(host.part(teacher)))
        trainer.train(resume_from_checkpoint=begin_from(work))
    state = trainer.state
    wanted = ("loss", "eval_loss")
    best = state.best_global_step or state.global_step
    return {
        "best_epoch": round(best / state.max_steps * options.epochs, 2),
        "log": [row for row in state.log_history if any(name in row for name in wanted)],
    }
