"""Training of a student under its teacher by transformers' Trainer, with the loss of eqs. 6 and 7."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import TrainingArguments

from lmeval_prune.architectures import map_model
from lmeval_prune.distillation.attention_maps import check_maps, turn_off_map_dropout
from lmeval_prune.distillation.host import Host, TrainingExamples
from lmeval_prune.distillation.losses import attention_distance
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError, did_you_mean, first_line
from lmeval_prune.interventions.attention_call import eager_attention
from lmeval_prune.training.trainer import Progress, ResumableTrainer, training_arguments

TERMS = ("response", "feature", "task")


class Student(nn.Module):
    """A model of any kind for the trainer, which writes each of its tensors once."""

    accepts_loss_kwargs = True  # the loss is divided by counts over the whole update

    def __init__(self, model: Any, backbone: Any) -> None:
        super().__init__()
        self.model = model
        self.gradient_checkpointing_enable = backbone.gradient_checkpointing_enable

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
        """Return the model's outputs; labels are for the loss alone."""
        return self.model(**inputs)

    def state_dict(self, *args: Any, **settings: Any) -> Any:
        """Return tied tensors under their first name."""
        first_names = self._first_names()
        state = super().state_dict(*args, **settings)
        return {name: tensor for name, tensor in state.items() if first_names.get(name, name) == name}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **settings: Any) -> Any:
        """Load tied tensors under all their names."""
        tied = {name: state_dict[first] for name, first in self._first_names().items() if first in state_dict}
        return super().load_state_dict({**state_dict, **tied}, *args, **settings)

    def _first_names(self) -> dict[str, str]:
        """Map the names of each tensor to its first one."""
        tensors, first_names = super().state_dict(keep_vars=True), dict[int, str]()
        return {name: first_names.setdefault(id(tensor), name) for name, tensor in tensors.items()}


class PaddedOrder(Sampler[int]):
    """Another sampler's order, padded to `count` indices by such that stand for no problem.

    Else several processes would get some problems twice, so that all of them have equally many.
    """

    def __init__(self, order: Any, count: int) -> None:
        self.order, self.count = order, count

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch."""
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from self.order
        yield from range(len(self.order), self.count)


def padded(examples: Sequence[Any], batch: int) -> list[Any]:
    """Pad examples with Nones up to whole batches of all processes."""
    return [*examples, *[None] * (-len(examples) % batch)]


def collate_padded(host: Host, stand_in: Any, examples: Sequence[Any]) -> dict[str, Any]:
    """Collate a batch without its Nones; of Nones alone collate `stand_in`, marked as `idle`."""
    real = [example for example in examples if example is not None]
    return host.collate(real) if real else {**host.collate([stand_in]), "idle": True}


class DistillTrainer(ResumableTrainer):
    """Trains a student under a teacher, or under none.

    Args:
        host, model, teacher: of both models, the student and its teacher.
        heads: of each layer, for each of the student's heads the teacher's that it was.
        examples: of training and validation.
        work: folder of the trainer's checkpoints.
        stage: number of the stage, from 1.
        preparation: seconds that scoring, cutting and reading took.
    """

    def __init__(
        self,
        host: Host,
        model: Any,
        teacher: Any,
        heads: Sequence[Sequence[int]],
        examples: TrainingExamples,
        work: Path,
        stage: int = 1,
        preparation: float = 0.0,
    ) -> None:
        self.host, self.student, self.teacher, self.heads, self.examples = host, model, teacher, heads, examples
        self.options = options = host.options
        model_map = map_model(host.backbone(model))
        self.layers, self.model_type = [layer.heads for layer in model_map.attention], model_map.model_type
        self._training_sums: dict[str, Tensor] = {}
        self._updates = 0
        self._validation_sums: dict[str, Any] = {}
        best_by = (host.metric, host.greater) if examples.validation else None
        arguments = distillation_arguments(options, work, stage, best_by)
        self.padded_train = padded(examples.train, arguments.train_batch_size * arguments.world_size)
        super().__init__(
            Student(model, host.backbone(model)),
            arguments,
            partial(collate_padded, host, examples.train[0]),
            self.padded_train,
            padded(examples.validation, arguments.eval_batch_size * arguments.world_size),
            examples.lengths,
            Progress(f"stage {stage} of {options.stages}, ", options.stages - stage, preparation),
            options.patience,
        )
        if teacher is not None:
            self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
            if options.compares_maps:
                turn_off_map_dropout(model_map)

    def run(self) -> dict[str, Any]:
        """Train from the last whole checkpoint on, with plain attention where maps are compared.

        Raises:
            InputError: attention maps are to be compared, and there are none; or one process has several GPUs.
        """
        if self.args.n_gpu > 1:
            raise InputError(
                "several GPUs take a process each: use `accelerate launch -m lmeval_prune distill`, or set "
                "CUDA_VISIBLE_DEVICES to one"
            )
        with ExitStack() as stack:
            if self.options.compares_maps:
                for model in (self.student, self.teacher):
                    stack.enter_context(eager_attention(self.host.backbone(model)))
            return super().run()

    # ------------------------------------------------------------------ the loss

    def counts(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Count items, and pairs of real positions, of some batches; idle ones have none."""
        batches = [batch for batch in batches if "idle" not in batch]
        items = sum(self.host.items(batch) for batch in batches)
        pairs = sum(int(batch["attention_mask"].sum(1).square().sum()) for batch in batches)
        return torch.tensor([items, pairs], dtype=torch.float64)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return the batches of one update, and their counts over all processes, which divide the losses."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = self.counts(batches).to(device, torch.float32 if device.type == "mps" else torch.float64)
        self._updates += bool(batches)
        return batches, self.accelerator.reduce(counts, "sum") if self.args.world_size > 1 else counts

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return λ₁·(response + feature) + λ₂·task (eqs. 6 and 7)."""
        counts = num_items_in_batch if model.training else self.counts([inputs]).to(self.args.device)
        real_inputs = {name: value for name, value in inputs.items() if name != "idle"}
        outputs, terms = self.losses(model, real_inputs, counts.clamp(min=1))
        if "idle" in inputs:
            terms = {name: 0 * term for name, term in terms.items()}
        loss = self.total(terms)
        self._record(terms, counts, model.training)
        if model.training:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over them
        return (loss, outputs) if return_outputs else loss

    def losses(self, model: nn.Module, inputs: dict[str, Any], counts: Tensor) -> tuple[Any, dict[str, Tensor]]:
        """Return the student's outputs on a batch, and the terms of the loss by name, divided by the counts.

        Raises:
            InputError: attention maps are to be compared, and there are none.
        """
        options, (items, pairs) = self.options, counts
        maps = {"output_attentions": True} if options.compares_maps and self.teacher is not None else {}
        outputs = model(**inputs, **maps)
        terms = {"task": self.host.task_loss(outputs, inputs) / items}
        if self.teacher is None:
            return outputs, terms
        with torch.no_grad(), self.accelerator.autocast():
            taught = self.teacher(**{name: value for name, value in inputs.items() if name != "labels"}, **maps)
        if options.response:
            terms["response"] = options.temperature**2 * self.host.response_loss(taught, outputs, inputs) / items
        if maps:
            check_maps(outputs.attentions, self.model_type, self.layers)
            distance = attention_distance(taught.attentions, outputs.attentions, self.heads, inputs["attention_mask"])
            terms["feature"] = distance / pairs
        return outputs, terms

    def total(self, terms: Mapping[str, Any]) -> Any:
        """Add up the terms that there are (eq. 6)."""
        taught = [terms[name] for name in ("response", "feature") if name in terms]
        return self.options.task_weight * terms["task"] + self.options.distill_weight * sum(taught)

    # ------------------------------------------------------------------ what is logged

    def _record(self, terms: Mapping[str, Tensor], counts: Tensor, training: bool) -> None:
        for name, term in terms.items():
            if training:
                self._training_sums[name] = self._training_sums.get(name, 0.0) + term.detach()
            else:
                count = counts[1 if name == "feature" else 0]
                total, total_count = self._validation_sums.get(name, (0.0, 0.0))
                self._validation_sums[name] = (total + term.detach() * count, total_count + count)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the terms of the loss, too, as means over updates."""
        if "loss" in logs and self._training_sums:
            for name in TERMS:
                if name in self._training_sums:
                    logs[name] = self._over_processes(self._training_sums[name]) / self._updates
            logs["loss"] = self.total(logs)  # transformers rounds it to four digits
            self._training_sums, self._updates = {}, 0
        super().log(logs, start_time)

    def _over_processes(self, value: Tensor) -> float:
        return float(self.accelerator.reduce(value, "sum") if self.args.world_size > 1 else value)

    def further_metrics(self) -> dict[str, float]:
        """Return the terms over the whole validation split, and the figures of the host."""
        terms = {
            name: self._over_processes(total) / self._over_processes(count)
            for name, (total, count) in self._validation_sums.items()
        }
        self._validation_sums = {}
        self.student.eval()
        figures = {f"eval_{name}": value for name, value in terms.items()} | {"eval_loss": self.total(terms)}
        return figures | self.host.figures(self.student, self.examples)

    def _get_train_sampler(self, train_dataset: Any = None) -> PaddedOrder:
        return PaddedOrder(super()._get_train_sampler(train_dataset), len(self.padded_train))


# Arguments of transformers that follow from options of distillation.
RESERVED_ARGUMENTS = {
    *("output_dir", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate"),
    *("weight_decay", "warmup_steps", "max_grad_norm", "seed", "eval_strategy", "save_strategy", "logging_strategy"),
    *("eval_steps", "save_steps", "logging_steps", "load_best_model_at_end", "metric_for_best_model"),
    *("greater_is_better", "restore_callback_states_from_checkpoint", "remove_unused_columns", "accelerator_config"),
}
# Arguments that the loss, the order of problems or resuming would ignore, or break on.
UNSUITABLE_ARGUMENTS = {
    *("max_steps", "save_only_model", "ignore_data_skip", "label_smoothing_factor", "group_by_length"),
    *("train_sampling_strategy", "length_column_name", "label_names", "prediction_loss_only", "neftune_noise_alpha"),
    *("auto_find_batch_size", "average_tokens_across_devices", "data_seed", "use_liger_kernel"),
    "resume_from_checkpoint",
}


def check_arguments(options: DistillOptions) -> None:
    """Refuse further arguments that transformers does not have, that options set, or that do nothing here.

    Raises:
        InputError: naming one of them.
    """
    known = {field.name for field in fields(TrainingArguments)} - RESERVED_ARGUMENTS - UNSUITABLE_ARGUMENTS
    for name, value in options.trainer.items():
        if name in RESERVED_ARGUMENTS:
            raise InputError(f"trainer: {name} follows from the other options; leave it out")
        if name in UNSUITABLE_ARGUMENTS:
            raise InputError(f"trainer: {name} does not suit distillation; leave it out")
        if name not in known:
            raise InputError(f"trainer: TrainingArguments of transformers has no {name!r}{did_you_mean(name, known)}")
        if isinstance(getattr(TrainingArguments, name, None), bool) and not isinstance(value, bool):
            raise InputError(f"trainer: {name}={value} is neither true nor false")
    try:
        arguments = distillation_arguments(options, Path(options.output))
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise InputError(f"trainer: transformers refuses {options.trainer} ({first_line(error)})") from error
    if arguments.per_device_eval_batch_size < 1:
        raise InputError("trainer: per_device_eval_batch_size must be at least 1")


def distillation_arguments(
    options: DistillOptions, work: Path, stage: int = 1, best_by: tuple[str, bool] | None = None
) -> TrainingArguments:
    """Make transformers' arguments of a stage; each has an order and dropout of its own."""
    others = {"per_device_eval_batch_size": 16, **options.trainer}
    seed = 1000 * stage + options.seed
    return training_arguments(options, work, options.rate, seed, best_by, options.save_steps, others)
