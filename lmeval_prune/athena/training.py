"""Train ATHENA with transformers' Trainer; an interrupted training resumes and ends with the same weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import TrainingArguments, set_seed

from lmeval_prune.architectures import weights_fingerprint
from lmeval_prune.artefacts import Work, digest, output_lock
from lmeval_prune.athena import checkpoint
from lmeval_prune.athena.batches import Collator, Example, make_examples
from lmeval_prune.athena.data import GroundedProblem, ProblemSplit
from lmeval_prune.athena.model import Athena, AthenaOutput
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.athena.solving import answers
from lmeval_prune.checkpoints.loading import checkpoint_identity, configuration_digests
from lmeval_prune.reporting.plot_style import COLOURS
from lmeval_prune.training.curves import ACCURACY, draw
from lmeval_prune.training.resuming import (
    ENCODER,
    PROBLEMS,
    check_contents,
    check_resumable,
    check_settings,
    result_settings,
)
from lmeval_prune.training.trainer import Progress, ResumableTrainer, training_arguments

# curves of the plot: key in the log, and label, colour and line style
LINES = {"loss": ("training", COLOURS[0], "-"), "eval_loss": ("validation", COLOURS[1], "-")}


def task_loss(outputs: AthenaOutput, labels: Tensor, items: Tensor | int | None = None) -> Tensor:
    """Return the binary cross-entropy of all `reason` and `answer` logits: their sum over `items`, or their mean."""
    assert outputs.reason is not None and outputs.answer is not None
    logits = torch.cat([outputs.reason, outputs.answer])
    total = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
    return total / (len(labels) if items is None else items)


def count_solved(model: Athena, problems: Sequence[GroundedProblem]) -> int:
    """Return how many problems a model solves; the model stays in evaluation mode."""
    texts = answers(model.eval(), [grounded.problem for grounded in problems])
    return sum(grounded.is_solved_by(text) for grounded, text in zip(problems, texts, strict=True))


class AthenaTrainer(ResumableTrainer):
    """Trainer with teacher forcing; the validation metric is the accuracy, `eval_accuracy`.

    Override `compute_loss` for another loss: the outputs have all logits and, if requested, the encoder's attention
    maps.

    Args:
        model: the model.
        arguments: training arguments of transformers; their learning rate is the encoder's.
        train: training examples.
        validation: validation problems.
        head_rate: learning rate of all parameters above the encoder.
        patience: validations without improvement before training stops; 0: no early stopping.
    """

    def __init__(
        self,
        model: Athena,
        arguments: TrainingArguments,
        train: Sequence[Example],
        validation: Sequence[GroundedProblem],
        head_rate: float,
        patience: int = 0,
    ) -> None:
        self.host, self.validation, self.head_rate = model, validation, head_rate
        collator = Collator(len(model.settings.constants), model.tokenizer.pad_token_id)
        validation_examples = make_examples(validation, model.tokenizer, model.settings)
        lengths = [len(example.problem.ids) for example in train]
        super().__init__(model, arguments, collator, train, validation_examples, lengths, Progress(), patience)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return `task_loss`, averaged over the accumulated batch of all processes."""
        outputs = model(**inputs)
        loss = task_loss(outputs, inputs["labels"], num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # because gradients are averaged over processes
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create AdamW with separate learning rates for encoder and head; norms and biases have no weight decay."""
        if self.optimizer is None:
            decayed_names = set(self.get_decay_parameter_names(self.host))
            groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
            for name, parameter in self.host.named_parameters():
                if parameter.requires_grad:
                    groups.setdefault((name.startswith("encoder."), name in decayed_names), []).append(parameter)
            optimizer_class, settings = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = optimizer_class(
                [
                    {
                        "params": parameters,
                        "lr": self.args.learning_rate if in_encoder else self.head_rate,
                        "weight_decay": self.args.weight_decay if is_decayed else 0.0,
                    }
                    for (in_encoder, is_decayed), parameters in groups.items()
                ],
                **settings,
            )
        return self.optimizer

    def further_metrics(self) -> dict[str, float]:
        """Return the validation accuracy."""
        return {ACCURACY: count_solved(self.host, self.validation) / len(self.validation)}


def train(options: TrainOptions) -> Athena:
    """Train an ATHENA model, and write it with a plot of its losses; resume an interrupted training.

    Checkpoints are in `OUTPUT.training` until the output is complete. If the output is already complete, it is read
    instead of trained again.
    """
    target = Path(options.output)
    work = target.with_name(f"{target.name}.training")
    settings = result_settings(options)
    if target.exists():
        about = checkpoint.describe(target)
        check_settings(settings, about.get("options", {}), target)
        read = {ENCODER: lambda: _encoder_digest(options.encoder), PROBLEMS: lambda: ProblemSplit.load(options).digest}
        check_contents(read, about.get("contents", {}), target)
    else:
        with output_lock(target):
            trained = _train_model(options, settings, work)
            checkpoint.write(trained, target)
    shutil.rmtree(work, ignore_errors=True)
    model = checkpoint.read(target)
    draw([{"log": model.about["log"]}], LINES, "Training: loss per judgement", target / "training")
    return model


def _encoder_digest(encoder: str) -> str:
    return digest([checkpoint_identity(encoder), configuration_digests(encoder)])


def _train_model(options: TrainOptions, settings: dict[str, Any], work: Path) -> Athena:
    """Train a model with checkpoints in `work`."""
    check_resumable(work, settings)
    split = ProblemSplit.load(options)
    contents = {ENCODER: _encoder_digest(options.encoder), PROBLEMS: split.digest}
    checkpoints = Work(work, settings | contents)
    set_seed(options.seed)
    model = checkpoint.begin(
        options.encoder,
        constants=split.constants,
        steps=max(problem.steps(split.constants) for problem in split.train),
        dropout=options.dropout,
        max_kept=options.max_kept,
    )
    examples = make_examples(split.train, model.tokenizer, model.settings)
    problems = {"train": len(examples), "validation": len(split.validation)}
    print(
        f"{problems['train']} training problems, {problems['validation']} validation problems; left out: "
        f"{split.ungrounded} without an equation over their numbers, {split.repeated} that are also in the test",
        flush=True,
    )
    best_by = (ACCURACY, True) if options.validation else None  # metric of the best epoch, and whether higher is better
    arguments = training_arguments(
        work, best_by is not None, best_by, num_train_epochs=options.epochs, per_device_train_batch_size=options.batch,
        seed=options.seed, per_device_eval_batch_size=32, gradient_accumulation_steps=options.accumulate,
        learning_rate=options.encoder_rate, weight_decay=options.decay, warmup_steps=options.warmup,
        max_grad_norm=options.clip, restore_callback_states_from_checkpoint=bool(options.patience),
    )  # fmt: skip
    trainer = AthenaTrainer(model, arguments, examples, split.validation, options.head_rate, options.patience)
    checkpoints.begin()
    training = trainer.run()
    model.about = {
        "options": settings,
        "contents": contents,
        "encoder_weights": weights_fingerprint(model.encoder),
        "problems": {**problems, "ungrounded": split.ungrounded, "repeated": split.repeated},
        **training,
        "best_epoch": round(training["best_epoch"]),
        **split.questions.to_artefact(),
    }
    return model
