"""Training of ATHENA by transformers' Trainer: killed at any moment, it goes on and ends with the same weights."""

from __future__ import annotations

import errno
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import Sampler
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from typing_extensions import TypedDict

from lmeval_prune.architectures import weights_fingerprint
from lmeval_prune.artefacts import alone, read_json, write_text
from lmeval_prune.athena import checkpoint
from lmeval_prune.athena.batches import Collator, Example
from lmeval_prune.athena.data import Grounded, Material, question_key
from lmeval_prune.athena.model import Athena, AthenaOutput
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.athena.solving import answers
from lmeval_prune.errors import InputError, disk_error
from lmeval_prune.reporting.plot_style import COLOURS, figure, save

ACCURACY = "eval_accuracy"
LITTLE = 2**30  # bytes that are free on a disk that a checkpoint did not fit


class _State(TypedDict):
    """What is read of a trainer's state."""

    global_step: int


def task_loss(outputs: AthenaOutput, labels: Tensor, items: Tensor | int | None = None) -> Tensor:
    """Cross-entropy of all judgements, reasons and answers alike, over their number.

    Args:
        outputs: of teacher forcing.
        labels: of all candidates, then of all kept thoughts.
        items: number to divide by; default theirs.
    """
    assert outputs.reason is not None and outputs.answer is not None
    logits = torch.cat([outputs.reason, outputs.answer])
    total = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
    return total / (len(labels) if items is None else items)


class ByLength(Sampler[int]):
    """Puts texts of about one length into a batch, so that little is padded; another order every epoch.

    Args:
        lengths: of the texts.
        batch: how many are read together.
        seed: of the order.
    """

    SPAN = 24  # batches among which lengths are sorted

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed, self.epoch = lengths, batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        draw = random.Random(f"{self.seed}:{self.epoch}")
        order = draw.sample(range(len(self)), len(self))
        span = self.SPAN * self.batch
        order = [place for i in range(0, len(order), span) for place in sorted(order[i : i + span], key=self._length)]
        batches = [order[i : i + self.batch] for i in range(0, len(order), self.batch)]
        last = batches.pop()  # it may be a smaller one
        draw.shuffle(batches)
        yield from (place for batch in [*batches, last] for place in batch)

    def _length(self, place: int) -> int:
        return self.lengths[place]


class AthenaTrainer(Trainer):
    """Trains by teacher forcing; validates by solving.

    Extend `compute_loss` for another loss: the outputs hold all logits, and the encoder's attention maps on demand.

    Args:
        model: to be trained.
        arguments: transformers'.
        train: examples.
        validation: problems whose share of right answers is `eval_accuracy`.
        head_rate: learning rate of all but the encoder.
        callbacks: transformers'.
    """

    def __init__(
        self,
        model: Athena,
        arguments: TrainingArguments,
        train: Sequence[Example],
        validation: Sequence[Grounded],
        head_rate: float,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.host, self.validation, self.head_rate = model, validation, head_rate
        self.lengths, settings = [len(example.problem.ids) for example in train], model.settings
        made = [one.example(model.tokenizer, settings.max_length, settings.constants) for one in validation]
        super().__init__(
            model,
            arguments,
            Collator(len(settings.constants), model.tokenizer.pad_token_id),
            train_dataset=list(train),
            eval_dataset=[example for example in made if example],
            callbacks=list(callbacks),
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """`task_loss` over the judgements of the whole accumulated batch, of all processes."""
        outputs = model(**inputs)
        loss = task_loss(outputs, inputs["labels"], num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over them
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, train_dataset: Any = None) -> ByLength:
        return ByLength(self.lengths, self.args.per_device_train_batch_size, self.args.seed)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with a learning rate of the encoder and one of the rest, no decay of norms and biases."""
        if self.optimizer is None:
            decayed = set(self.get_decay_parameter_names(self.host))
            groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
            for name, parameter in self.host.named_parameters():
                if parameter.requires_grad:
                    groups.setdefault((name.startswith("encoder."), name in decayed), []).append(parameter)
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args)
            own = [
                {
                    "params": parameters,
                    "lr": self.args.learning_rate if of_encoder else self.head_rate,
                    "weight_decay": self.args.weight_decay if decays else 0.0,
                }
                for (of_encoder, decays), parameters in groups.items()
            ]
            self.optimizer = kind(own, **settings)
        return self.optimizer

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Also solve the validation problems."""
        found = super().evaluation_loop(*args, **kwargs)
        return found._replace(metrics={**(found.metrics or {}), ACCURACY: share_solved(self.host, self.validation)})


def share_solved(model: Athena, problems: Sequence[Grounded]) -> float:
    """The share of problems that a model solves, which is in evaluation mode then."""
    texts = answers(model.eval(), [one.problem for one in problems])
    right = [one.is_solved_by(text) for one, text in zip(problems, texts, strict=True)]
    return sum(right) / len(right)


class Progress(TrainerCallback):
    """Prints a line an epoch, with an estimate of what is left, and records how long each epoch took."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start the clock."""
        self.begun, self.before = time.monotonic(), state.global_step
        if self.before:
            print(f"goes on after epoch {state.epoch:.0f}", flush=True)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start the epoch's clock."""
        self.epoch = time.monotonic(), time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Say how far it is."""
        row = state.log_history[-1]
        if "loss" in row:
            row["seconds"], row["processor_seconds"] = (
                round(now - then, 1)
                for now, then in zip((time.monotonic(), time.process_time()), self.epoch, strict=True)
            )
            rest = (time.monotonic() - self.begun) / (state.global_step - self.before) * (state.max_steps - row["step"])
            print(
                f"epoch {row['epoch']:.0f} of {args.num_train_epochs:.0f}: loss {row['loss']:.4f}, "
                f"{row['seconds']:.0f} s; about {rest / 60:.1f} min left",
                flush=True,
            )
        if ACCURACY in row:
            print(f"  validation: {row[ACCURACY]:.1%} right, loss {row['eval_loss']:.4f}", flush=True)


def arguments(options: TrainOptions, work: Path) -> TrainingArguments:
    """transformers' arguments for ours; checkpoints are kept in `work`."""
    each_epoch = "epoch" if options.validation else "no"
    return TrainingArguments(
        output_dir=str(work),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=32,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.encoder_rate,
        weight_decay=options.decay,
        lr_scheduler_type="linear",
        warmup_steps=options.warmup,
        max_grad_norm=options.clip,
        optim="adamw_torch_fused",
        seed=options.seed,
        eval_strategy=each_epoch,
        save_strategy="epoch",
        save_total_limit=2,
        logging_strategy="epoch",
        load_best_model_at_end=bool(options.validation),
        metric_for_best_model=ACCURACY,
        greater_is_better=True,
        restore_callback_states_from_checkpoint=bool(options.patience),
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=not sys.stderr.isatty(),
        report_to=[],
    )


def train(options: TrainOptions) -> Athena:
    """Train a model and write it, with a picture of its losses; a training that was interrupted goes on.

    Checkpoints are kept beside the output until it is there. A model that was trained with the same options is read.

    Raises:
        InputError: something cannot be used, or `output` was begun with other options.
    """
    target = Path(options.output)
    work = target.with_name(f"{target.name}.training")
    settings = json.loads(json.dumps(asdict(options)))
    del settings["output"], settings["data_dir"]  # where things are changes nothing
    if target.exists():
        refuse_other(settings, checkpoint.describe(target).get("options", {}), target)
    else:
        with alone(target), room_in(work):
            checkpoint.write(_train(options, settings, work), target)
    shutil.rmtree(work, ignore_errors=True)
    model = checkpoint.read(target)
    draw(model.about["log"], target / "training")
    return model


def refuse_other(settings: dict[str, Any], known: dict[str, Any], where: Path) -> None:
    """Refuse to go on with what was begun with other options.

    Raises:
        InputError: naming some of them.
    """
    differ = [name for name in settings if known.get(name) != settings[name]]
    if differ:
        shown = ", ".join(f"{name}={known.get(name)}" for name in differ[:3])
        raise InputError(f"{where} was made with other options ({shown}); name another output, or delete it")


def begun_with(path: Path) -> dict[str, Any]:
    """The options of a training that was begun.

    Raises:
        InputError: the file is damaged.
    """
    try:
        found: dict[str, Any] = read_json(path)
    except InputError as error:
        raise InputError(f"{error}; delete {path.parent} to begin anew") from error
    return found


@contextmanager
def room_in(work: Path) -> Iterator[None]:
    """A block that keeps checkpoints in a folder; torch and safetensors say in their own ways that a disk is full.

    Raises:
        InputError: it is.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if refusal := disk_error(error, work):
            raise refusal from error
        torn = any(word in str(error) for word in ("iostream", "inline_container"))  # of torch.save
        if not (torn and shutil.disk_usage(work).free < LITTLE):
            raise
        raise disk_error(OSError(errno.ENOSPC, ""), work) from error  # type: ignore[misc]


def _train(options: TrainOptions, settings: dict[str, Any], work: Path) -> Athena:
    begun = work / "options.json"
    if begun.is_file():
        refuse_other(settings, begun_with(begun), work)
    material = Material.of(options)
    set_seed(options.seed)
    model = checkpoint.begin(
        options.encoder,
        constants=material.constants,
        steps=max(one.steps(material.constants) for one in material.train),
        dropout=options.dropout,
        max_kept=options.max_kept,
    )
    write_text(begun, json.dumps(settings, indent=1) + "\n")
    made = [one.example(model.tokenizer, model.settings.max_length, material.constants) for one in material.train]
    examples = [example for example in made if example]
    print(
        f"{len(examples)} problems to train on, {len(material.validation)} to validate; left out: "
        f"{material.ungrounded} without an equation over their numbers, {material.repeated} that the test asks, too",
        flush=True,
    )
    callbacks: list[TrainerCallback] = [Progress()]
    if options.patience:
        callbacks.append(EarlyStoppingCallback(options.patience))
    given = arguments(options, work)
    trainer = AthenaTrainer(model, given, examples, material.validation, options.head_rate, callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=last_whole(work))
    state = trainer.state
    model.about = {
        "options": settings,
        "encoder_weights": weights_fingerprint(model.encoder),
        "problems": {
            "train": len(examples),
            "validation": len(material.validation),
            "ungrounded": material.ungrounded,
            "repeated": material.repeated,
        },
        "best_epoch": round((state.best_global_step or state.max_steps) / state.max_steps * options.epochs),
        "log": [row for row in state.log_history if "loss" in row or ACCURACY in row],
        "trained_on": sorted({question_key(one.document) for one in [*material.train, *material.validation]}),
        "validated_on": sorted({question_key(one.document) for one in material.validation}),
    }
    return model


def last_whole(work: Path) -> str | None:
    """The newest checkpoint that was written to its end; others are deleted. Its state is the last file of one."""
    whole: dict[int, Path] = {}
    for folder in work.glob("checkpoint-*"):
        try:
            whole[read_json(folder / "trainer_state.json", _State)["global_step"]] = folder
        except InputError:
            shutil.rmtree(folder)
    return str(whole[max(whole)]) if whole else None


def draw(log: Sequence[dict[str, Any]], stem: Path) -> None:
    """Draw losses and validation accuracy by epoch, as `stem.png` and `stem.svg`."""
    made, axes = figure(6, 3.2, "Training: loss a judgement")
    for name, key, colour in (("training", "loss", COLOURS[0]), ("validation", "eval_loss", COLOURS[1])):
        rows = [row for row in log if key in row]
        if rows:
            axes.plot([row["epoch"] for row in rows], [row[key] for row in rows], color=colour, label=name, marker=".")
    axes.set_xlabel("epoch")
    axes.set_yscale("log")
    if rows:
        right = axes.twinx()
        right.plot([r["epoch"] for r in rows], [100 * r[ACCURACY] for r in rows], color=COLOURS[2], ls="--", marker=".")
        right.set_ylabel("validation problems solved, % (dashed)", color=COLOURS[2])
        right.set_ylim(0, 100)
        right.spines[["top"]].set_visible(False)
    axes.legend(frameon=False)
    save(made, stem)
