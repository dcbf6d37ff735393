"""Train ATHENA with transformers' Trainer; an interrupted training resumes and ends with the same weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, cat, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import EarlyStoppingCallback, set_seed

from lmeval_prune.architectures import weights_fingerprint
from lmeval_prune.artefacts import Work, check_same, digest, output_lock
from lmeval_prune.athena import checkpoint
from lmeval_prune.athena.batches import collate, make_examples
from lmeval_prune.athena.model import Athena, AthenaOutput
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.athena.problems import GroundedProblem, ProblemSplit
from lmeval_prune.athena.solving import answers
from lmeval_prune.checkpoints.loading import checkpoint_identity, configuration_digests
from lmeval_prune.reporting.plot_style import COLOURS
from lmeval_prune.training.trainer import (
    ACCURACY,
    ResumableTrainer,
    draw,
    result_settings,
    training_arguments,
)

DECAY = 0.01  # of weights but norms and biases
# curves of the plot: key in the log, and label, colour and line style
LINES = {"loss": ("training", COLOURS[0], "-"), "eval_loss": ("validation", COLOURS[1], "-")}


def task_loss(outputs: AthenaOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Return the binary cross-entropy of all `reason` and `answer` logits: their sum over the items, or their mean."""
    assert outputs.reason is not None and outputs.answer is not None
    logits = cat([outputs.reason, outputs.answer])
    total = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def count_solved(model: Athena, problems: Sequence[GroundedProblem]) -> int:
    texts = answers(model.eval(), [grounded.problem for grounded in problems])
    return sum(grounded.is_solved_by(text) for grounded, text in zip(problems, texts, strict=True))


def train(options: TrainOptions) -> Athena:
    """Train an ATHENA model, and write it with a plot of its losses; resume an interrupted training.

    Checkpoints are in `OUTPUT.training` until the output is complete. If the output is already complete, it is read
    instead of trained again.
    """
    target = Path(options.output)
    work = target.with_name(f"{target.name}.training")
    settings, split = result_settings(options), ProblemSplit.load(options)
    contents = {
        "encoder_checkpoint": digest([checkpoint_identity(options.encoder), configuration_digests(options.encoder)]),
        "problems": split.digest,
    }
    if target.exists():
        about = checkpoint.describe(target)
        check_same({**about.get("options", {}), **about.get("contents", {})}, settings | contents, target)
    else:
        with output_lock(target):
            model = _trained(options, split, Work(work, settings | contents))
            model.about |= {"options": settings, "contents": contents}
            checkpoint.write(model, target)
    shutil.rmtree(work, ignore_errors=True)
    model = checkpoint.read(target)
    draw([{"log": model.about["log"]}], LINES, "Training: loss per judgement", target / "training")
    return model


def _trained(options: TrainOptions, split: ProblemSplit, progress: Work) -> Athena:
    """Train a model with teacher forcing; the validation metric is the accuracy."""
    set_seed(options.seed)
    model = checkpoint.begin(
        options.encoder,
        constants=split.constants,
        steps=max(problem.steps(split.constants) for problem in split.train),
        dropout=options.dropout,
        max_kept=options.max_kept,
    )
    train, validation = (
        make_examples(part, model.tokenizer, model.settings) for part in (split.train, split.validation)
    )
    problems = {"train": len(train), "validation": len(split.validation)}
    print(
        f"{problems['train']} training problems, {problems['validation']} validation problems; left out: "
        f"{split.ungrounded} without an equation over their numbers, {split.repeated} that are also in the test",
        flush=True,
    )
    best_by = (ACCURACY, True) if options.validation else None  # metric of the best epoch, and whether higher is better
    arguments = training_arguments(
        progress.folder, best_by is not None, best_by, num_train_epochs=options.epochs, seed=options.seed,
        per_device_train_batch_size=options.batch, per_device_eval_batch_size=32,
        learning_rate=options.encoder_rate, weight_decay=DECAY, warmup_steps=0.06, max_grad_norm=5.0,
        restore_callback_states_from_checkpoint=bool(options.patience),
    )  # fmt: skip
    trainer = ResumableTrainer(
        model,
        arguments,
        partial(collate, constants=len(model.settings.constants), padding=model.tokenizer.pad_token_id),
        train,
        validation,
        [len(example.problem.ids) for example in train],
        lambda: {ACCURACY: count_solved(model, split.validation) / len(split.validation)},
        compute_loss_func=task_loss,
    )
    if options.patience:
        trainer.add_callback(EarlyStoppingCallback(options.patience))
    # AdamW with separate learning rates for encoder and head
    decayed, groups = set(trainer.get_decay_parameter_names(model)), dict[tuple[float, float], list[nn.Parameter]]()
    for name, parameter in model.named_parameters():
        rate = options.encoder_rate if name.startswith("encoder.") else options.head_rate
        groups.setdefault((rate, DECAY if name in decayed else 0.0), []).append(parameter)
    parameters = [{"params": group, "lr": rate, "weight_decay": decay} for (rate, decay), group in groups.items()]
    optimizer, settings = trainer.get_optimizer_cls_and_kwargs(arguments)
    trainer.optimizer = optimizer(parameters, **settings)
    progress.begin()
    training = trainer.run()
    model.about = {
        "encoder_weights": weights_fingerprint(model.encoder),
        "problems": {**problems, "ungrounded": split.ungrounded, "repeated": split.repeated},
        **training,
        "best_epoch": round(training["best_epoch"]),
        **split.questions.to_artefact(),
    }
    return model
