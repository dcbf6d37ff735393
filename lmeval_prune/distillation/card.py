"""What the card of a distilled model says about its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from lmeval_prune.cards.card import table
from lmeval_prune.cards.checkpoint import Training
from lmeval_prune.cards.command import without_folders
from lmeval_prune.distance.summary import cells
from lmeval_prune.distillation.host import METRICS, BestBy
from lmeval_prune.distillation.options import FIRST, DistillOptions
from lmeval_prune.reporting.documents import escape_markdown
from lmeval_prune.reporting.tables import significant

SHOWN = ("epochs", "batch", "rate", "distill_weight", "task_weight", "temperature", "seed")
LABELS = {METRICS["loss"]: "task loss", METRICS["accuracy"]: "accuracy"}
VALUE: Mapping[BestBy, Callable[[Sequence[float]], float]] = {"accuracy": max, "loss": min, "none": itemgetter(-1)}
SENTENCE: Mapping[BestBy, str] = {
    "accuracy": "Of each stage, the epoch that solves most validation problems was kept.",
    "loss": "Of each stage, the epoch with the least validation loss was kept.",
    "none": "Of each stage, the last epoch was kept.",
}


def training_of(
    options: DistillOptions, note: Mapping[str, Any], best_by: BestBy, metric: str, datasets: Sequence[str]
) -> Training:
    """Return what a card says about a distillation.

    Args:
        options: of the distillation.
        note: fields of `distillation.json`.
        best_by: what chose the epoch whose weights are kept.
        metric: name in the log of the validation metric that is shown.
        datasets: names on the Hub of the training data.
    """
    is_trained = options.epochs > 0
    sections = {"Training": _training(options, note["material"], best_by)} if is_trained else {}
    return Training(
        {**sections, "Results": _results(note, best_by, metric)},
        is_trained and options.uses_teacher,
        datasets if is_trained else (),
        is_trained,
    )


def _training(options: DistillOptions, material: Mapping[str, Any], best_by: BestBy) -> str:
    terms = options.terms if options.distill_weight else ()
    learned = [*terms] + (["task"] if options.task_weight else [])
    sources = [f"the task `{options.task}`"] if options.task else []
    if options.prompts:
        sources.append(f"the prompts {escape_markdown(without_folders(options.prompts))}")
    data = material.get("splits", {}).get("data")
    source = " and ".join(sources) or (f"the data set `{data}`" if data else "texts")
    name = options.other_teacher
    teacher = "the unpruned model" if name is None else escape_markdown(without_folders(name))
    later = "" if options.stages == 1 else ", and each stage's model by the one before"
    later = ", as in all stages" if later and (name or options.teacher == FIRST) else later
    lines = [f"On {material['train']} texts of {source}, and {material['validation']} for validation."]
    if options.uses_teacher:
        lines.append(f"The first stage was taught by {teacher}{later}.")
    lines.append(f"Terms of the loss: {', '.join(learned)}.")
    if material["validation"]:
        lines.append(SENTENCE[best_by])
    settings: dict[str, Any] = {name: getattr(options, name) for name in SHOWN}
    rows = [{"option": name, "value": value} for name, value in settings.items()]
    return "\n\n".join([" ".join(lines), table(rows, "option"), "All options are in `distillation.json`."])


def _results(note: Mapping[str, Any], best_by: BestBy, metric: str) -> str:
    """Return a table of the stages: sizes, the validation, and the distance from the unpruned model."""
    rows: list[dict[str, Any]] = []
    for stage in note["stages"]:
        values = [entry[metric] for entry in stage.get("log", ()) if metric in entry]
        row: dict[str, Any] = {"stage": stage["stage"], "parameters": f"{stage['parameters']:,}"}
        if values:
            row[f"validation {LABELS[metric]}"] = significant(VALUE[best_by](values))
        distances = cells(stage["distance"]) if stage.get("distance") else {}
        rows.append(row | {key: distances[key] for key in ("mean KLD", "same top p (%)") if key in distances})
    explained = (
        " KLD is the mean Kullback-Leibler divergence of the next token's distribution from the unpruned model's, in "
        "nats; same top p is how often the likeliest token is the same."
        if any("mean KLD" in row for row in rows)
        else ""
    )
    where = "Measured on validation texts (on those for training, if there are none), on no benchmark."
    return f"{table(rows, 'stage')}\n\n{where}{explained}"
