"""Train a student with a teacher by transformers' Trainer and the loss of eqs. 6 and 7."""

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
from lmeval_prune.distillation.host import SOLVED_THEN_LOSS, Host, TrainingExamples
from lmeval_prune.distillation.losses import Features, LayerMap
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.attention_call import eager_attention
from lmeval_prune.training.trainer import ACCURACY, ResumableTrainer, training_arguments

TERMS = ("response", "feature", "task")


class Student(nn.Module):
    """Wrapper of a host's model whose state dict has tied tensors once."""

    accepts_loss_kwargs = True  # the loss is normalised over the whole update

    def __init__(self, model: Any, backbone: Any) -> None:
        super().__init__()
        self.model = model
        self.gradient_checkpointing_enable = backbone.gradient_checkpointing_enable

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
        return self.model(**inputs)

    def state_dict(self, *args: Any, **settings: Any) -> Any:
        """Return the state dict with tied tensors under their first name only."""
        first_names = dict[int, str]()
        for name, tensor in super().state_dict(keep_vars=True).items():
            first_names.setdefault(id(tensor), name)
        state, names = super().state_dict(*args, **settings), {*first_names.values()}
        return {name: tensor for name, tensor in state.items() if name in names}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **settings: Any) -> Any:
        """Load a state dict that `state_dict` returned; tensors that it lacks are tied to others."""
        return super().load_state_dict({**super().state_dict(), **state_dict}, *args, **settings)


class PaddedOrder(Sampler[int]):
    """Another sampler's order, padded to `count` with indices of empty examples.

    Without padding, accelerate would repeat problems so that all processes have the same number.
    """

    def __init__(self, order: Any, count: int) -> None:
        self.order, self.count = order, count
        self.set_epoch = order.set_epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from self.order
        yield from range(len(self.order), self.count)


def padded(examples: Sequence[Any], batch: int) -> list[Any]:
    return [*examples, *[None] * (-len(examples) % batch)]


def collate_with_padding(host: Host, stand_in: Any, examples: Sequence[Any]) -> dict[str, Any]:
    """Collate a batch without None; a batch of None alone becomes `stand_in`, marked as `idle`."""
    real = [example for example in examples if example is not None]
    return host.collate(real) if real else {**host.collate([stand_in]), "idle": True}


class DistillTrainer(ResumableTrainer):
    """Trainer of a student with an optional teacher, of which `layers` are compared."""

    def __init__(
        self,
        host: Host,
        model: Any,
        teacher: Any,
        layers: LayerMap,
        examples: TrainingExamples,
        work: Path,
        stage: int = 1,
    ) -> None:
        self.host, self.student, self.teacher, self.examples = host, model, teacher, examples
        self.options = options = host.options
        self.features: Features | None = None
        self._training_sums: dict[str, Tensor] = {}  # of terms since the last log
        self._updates = 0
        self._validation_sums: dict[str, Tensor] = {}  # of terms and their divisors, (2,)
        validates = bool(examples.validation)
        arguments = distillation_arguments(options, work, stage, validates, host.best_by if validates else None)
        self.padded_train = padded(examples.train, arguments.train_batch_size * arguments.world_size)
        super().__init__(
            Student(model, host.backbone(model)),
            arguments,
            partial(collate_with_padding, host, examples.train[0]),
            self.padded_train,
            padded(examples.validation, arguments.eval_batch_size * arguments.world_size),
            examples.lengths,
            self.validation_metrics,
        )
        if teacher is not None:
            self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
            if options.uses_attention_maps:
                of_student, of_teacher = (map_model(host.backbone(network)) for network in (model, teacher))
                self.features = Features(layers, of_student, of_teacher, options.normalize == "teacher")

    def run(self) -> dict[str, Any]:
        """Train from the last complete checkpoint."""
        if self.args.n_gpu > 1:
            raise InputError("a process can use a single GPU: use `accelerate launch`, or set CUDA_VISIBLE_DEVICES")
        with ExitStack() as stack:
            if self.features is not None:
                for model in (self.student, self.teacher):
                    stack.enter_context(eager_attention(self.host.backbone(model)))
            return super().run()

    def counts(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the numbers of items and of real tokens, or their pairs, in the batches that are not idle."""
        batches = [batch for batch in batches if "idle" not in batch]
        power = 1 if self.options.normalize == "teacher" else 2
        items = sum(self.host.items(batch) for batch in batches)
        places = sum(int((batch["attention_mask"].sum(1) ** power).sum()) for batch in batches)
        return torch.tensor([items, places], dtype=torch.float64)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return the batches of an update and their counts over all processes, the divisors of the losses."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = self.counts(batches).to(device, torch.float32 if device.type == "mps" else torch.float64)
        self._updates += bool(batches)
        return batches, self._over_processes(counts)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a batch (eqs. 6 and 7)."""
        counts = num_items_in_batch if model.training else self.counts([inputs]).to(self.args.device)
        real_inputs = {name: value for name, value in inputs.items() if name != "idle"}
        outputs, terms = self.losses(model, real_inputs, counts.clamp(min=1))
        if "idle" in inputs:
            terms = {name: 0 * term for name, term in terms.items()}
        loss = self.total(terms)
        for name, term in terms.items():
            if model.training:
                self._training_sums[name] = self._training_sums.get(name, 0.0) + term.detach()
            else:
                count = counts[int(name == "feature")]
                sums = torch.stack([term.detach() * count, count])
                self._validation_sums[name] = self._validation_sums.get(name, 0.0) + sums
        if model.training:
            loss = loss * self.accelerator.num_processes  # because gradients are averaged over processes
        return (loss, outputs) if return_outputs else loss

    def losses(self, model: nn.Module, inputs: dict[str, Any], counts: Tensor) -> tuple[Any, dict[str, Tensor]]:
        """Return the student's outputs on a batch and the terms of the loss, divided by the counts."""
        options, features, target = self.options, self.features, None
        further = {} if features is None else {"output_attentions": True}
        outputs = model(**inputs, **further)
        if self.teacher is not None:
            with torch.no_grad(), self.accelerator.autocast():
                others = {name: value for name, value in inputs.items() if name != "labels"}
                target = self.teacher(**others, **further)
        sums = self.host.loss(outputs, inputs, target if "response" in options.terms else None)
        if "response" in sums:
            sums["response"] = options.temperature**2 * sums["response"]
        if features is not None:
            sums["feature"] = features.term(target, outputs, inputs["attention_mask"])
        return outputs, {name: total / counts[int(name == "feature")] for name, total in sums.items()}

    def total(self, terms: Mapping[str, Any]) -> Any:
        """Return λ₁·(response + feature) + λ₂·task of the available terms (eq. 6)."""
        distillation = sum(terms[name] for name in ("response", "feature") if name in terms)
        return self.options.task_weight * terms["task"] + self.options.distill_weight * distillation

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the terms of the loss as means over updates."""
        if "loss" in logs and self._training_sums:
            for name in TERMS:
                if name in self._training_sums:
                    logs[name] = float(self._over_processes(self._training_sums[name])) / self._updates
            logs["loss"] = self.total(logs)  # transformers rounds it to four digits
            self._training_sums, self._updates = {}, 0
        super().log(logs, start_time)

    def _over_processes(self, value: Tensor) -> Any:
        return self.accelerator.reduce(value, "sum") if self.args.world_size > 1 else value

    def validation_metrics(self) -> dict[str, float]:
        """Return the mean terms over the validation split, and the share of its problems solved, if that is counted."""
        sums = {name: self._over_processes(pair).tolist() for name, pair in self._validation_sums.items()}
        terms = {name: total / count for name, (total, count) in sums.items()}
        self._validation_sums = {}
        metrics = {f"eval_{name}": value for name, value in terms.items()} | {"eval_loss": self.total(terms)}
        problems, own = self.examples.problems, slice(self.args.process_index, None, self.args.world_size)
        count = self.host.count_solved(self.student.eval(), problems[own])
        if count is not None:
            solved = float(self._over_processes(torch.tensor(float(count), device=self.args.device)))
            order = solved_then_loss(solved, terms["task"], len(problems))
            metrics |= {ACCURACY: solved / len(problems), SOLVED_THEN_LOSS: order}
        return metrics

    def _get_train_sampler(self, train_dataset: Any = None) -> PaddedOrder:
        return PaddedOrder(super()._get_train_sampler(train_dataset), len(self.padded_train))


def solved_then_loss(solved: float, loss: float, problems: int) -> float:
    """Return a number that orders epochs by the number of solved problems, and equal ones by their loss, at least 0."""
    return (solved + 1 / (2 + loss)) / problems  # the loss adds less than one problem


# Arguments of transformers that have no effect here, or break the loss, the order of problems or resuming.
UNSUITABLE_ARGUMENTS = {
    *("accelerator_config", "max_steps", "save_only_model", "ignore_data_skip", "label_smoothing_factor"),
    *("group_by_length", "train_sampling_strategy", "length_column_name", "label_names", "prediction_loss_only"),
    *("neftune_noise_alpha", "auto_find_batch_size", "average_tokens_across_devices", "data_seed"),
    *("use_liger_kernel", "resume_from_checkpoint", "restore_callback_states_from_checkpoint"),
    # they upload the states of an unfinished training, and their values, a token too, would stand in the results
    *(field.name for field in fields(TrainingArguments) if field.name.startswith(("hub_", "push_to_hub"))),
}


def distillation_arguments(
    options: DistillOptions,
    work: Path,
    stage: int = 1,
    validates: bool = False,
    best_by: tuple[str, bool] | None = None,
) -> TrainingArguments:
    """Make transformers' arguments of a stage, with its own seed; `InputError` if one of `trainer` is unsuitable."""
    if unsuitable := UNSUITABLE_ARGUMENTS.intersection(options.trainer):
        raise InputError(f"trainer: {', '.join(sorted(unsuitable))} does not suit distillation")
    defaults = {"per_device_eval_batch_size": 16, "weight_decay": 0.01, "warmup_steps": 0.06, "max_grad_norm": 5.0}
    return training_arguments(
        work,
        validates,
        best_by,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch,
        learning_rate=options.rate,
        seed=1000 * stage + options.seed,
        **{**defaults, **options.trainer},
    )
