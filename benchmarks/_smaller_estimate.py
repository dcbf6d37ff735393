"""Estimate what a recipe of smaller_model.py removes, and the seconds of a row."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _smaller import DENSE, Experiment, Row
from _smaller_rows import PROBLEMS, PackedHost, answering, answers, device_name, shape
from typing_extensions import override

from lmeval_prune.architectures import map_model
from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.checkpoints.loading import load_pretrained
from lmeval_prune.checkpoints.skeleton import skeleton_of
from lmeval_prune.distillation.corpus import Prompt
from lmeval_prune.distillation.host import TrainingExamples
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill
from lmeval_prune.distillation.stages import make_pruners
from lmeval_prune.profiling.costs import parameters
from lmeval_prune.pruners.allocation import COMPOSITION, Budget, unit_pools
from lmeval_prune.pruners.schedule import resolve_options, smallest_removal

FEW = 48  # training problems of an estimate
ANSWERED = 16  # answers that are timed


def removed_share(experiment: Experiment, recipe: str) -> float | None:
    """Return the share of the parameters in blocks that a recipe removes, from shapes alone; no weights are read.

    Which units go depends on scores; how many does not, but for a composition, which removes at least so much; None
    for a budget of latency. Norms are not counted.
    """
    model_map = map_model(skeleton_of(experiment.pretrained))
    options = experiment.options(Row(recipe, 0, 0))
    if not options.ratio and not options.ffn_ratio:
        return 0.0
    heads, channels = make_pruners(options, 1)
    once: Any = {"p_min": 0.0, "growth": 1.0, "steps": 1}
    pruning = resolve_options(replace(options.pruning(), **once), heads, model_map, channels)
    if pruning.budget == "latency":
        return None
    counting = replace(pruning, budget="parameters")
    pools = unit_pools(model_map, Budget(pruning.kinds, pruning.ratio, "", counting))
    if pruning.allocation == COMPOSITION:
        lost = pruning.ratio * sum(pool.total for pool in pools)
    else:
        (removal,) = smallest_removal(model_map, pruning, {"heads": heads, "channels": channels})
        lost = sum(pool.cost * len(removal.removed.get(pool.key, ())) / len(pool.units[0]) for pool in pools)
    return float(lost / parameters(model_map.model)[1])


class TimedHost(PackedHost):
    """Counts the seconds of what takes longer with more problems, beside training.

    Attributes:
        scoring: seconds from reading calibration text until the cut model is written.
        asking: seconds of the teacher's answers.
    """

    scoring, asking, begin = 0.0, 0.0, 0.0

    @override
    def calibration(self, examples: TrainingExamples, model: Any, answering: str | None) -> Any:
        self.begin = time.monotonic()
        return super().calibration(examples, model, answering)

    @override
    def write(self, model: Any, manifest: dict[str, Any], folder: Path, add_files: Any = None) -> None:
        if self.begin:
            self.scoring, self.begin = self.scoring + time.monotonic() - self.begin, 0.0
        super().write(model, manifest, folder, add_files)

    @override
    def ask_teacher(self, examples: TrainingExamples, work: Path, device: Any) -> None:
        begin = time.monotonic()
        super().ask_teacher(examples, work, device)
        self.asking += time.monotonic() - begin


def estimated_seconds(experiment: Experiment, row: Row, device: str) -> dict[str, float]:
    """Estimate the seconds of a row from one epoch of a few problems, by a model of the same shape.

    What grows with a number of problems or texts is scaled to that of the row. The sum is kept for `train --budget`,
    and what was removed, so that `speed` can measure the shape before anything is trained.

    Returns:
        Seconds of training, of scoring, of the teacher's answers, of answering, and of the rest (reading and writing).
    """
    folder = experiment.work / "estimate"
    whole = replace(experiment.options(row), pretrained=experiment.pretrained)
    few = replace(whole, output=str(folder / row.key), epochs=min(1, whole.epochs), limit=min(FEW, whole.limit or FEW))
    if whole.corpus:
        few = replace(few, corpus_texts=min(FEW, whole.corpus_texts))
    hosts = [TimedHost(options, experiment.work / PROBLEMS) for options in (few, whole)]
    examples = [host.examples() for host in hosts]
    shutil.rmtree(few.output, ignore_errors=True)
    begin, host = time.monotonic(), hosts[0]
    note = distill(few, host)
    trained = sum(log.get("seconds", 0.0) for stage in note["stages"] for log in stage["log"])
    rest = time.monotonic() - begin - trained - host.scoring - host.asking
    text_ratio, question_ratio, token_ratio = (
        _ratio([count(data) for data in examples])
        for count in (
            lambda data: min(whole.calibration, len(data.questions)),
            lambda data: _question_count(whole, data),
            lambda data: sum(data.lengths),
        )
    )
    model = load_pretrained(few.output).float().to(device)
    parts = {
        "training": trained * token_ratio * whole.epochs,
        "scoring": host.scoring * text_ratio,
        "teacher": host.asking * question_ratio,
        "answering": _answering_seconds(experiment, hosts[1], model, len(examples[1].problems)),
        "rest": rest,
    }
    record = {
        **asdict(row),
        "settings": experiment.digest(row),
        "device": device_name(device),
        "seconds": sum(parts.values()),
        **shape(few.output, model),
    }
    write_text(folder / f"{row.key}.json", json.dumps(record) + "\n")
    shutil.rmtree(few.output)
    return parts


def _question_count(options: DistillOptions, examples: TrainingExamples) -> int:
    """Return how many problems and prompts a teacher or the pruned model answers."""
    prompts = sum(isinstance(text, Prompt) for text in examples.train)
    answers_problems = options.train_on == "teacher" or options.calibrate_on == "own"
    return prompts + (len(examples.questions) + len(examples.problems) if answers_problems else 0)


def _ratio(counts: list[int]) -> float:
    """Return how many times as many problems the row has."""
    few, whole = counts
    return whole / few if few else 1.0


def _answering_seconds(experiment: Experiment, host: PackedHost, model: Any, validated: int) -> float:
    """Return the seconds of a model's greedy and sampled answers, from those to a few problems."""
    greedy, drawn = answering(experiment)
    documents, samples = host.rows().test, experiment.settings["samples"]
    total = 0.0
    for params, number, count in ((greedy, 1, len(documents) + validated), (drawn, samples, validated)):
        timed = documents[: max(1, ANSWERED // number)]
        begin = time.monotonic()
        answers(host, model, timed, params, number)
        total += (time.monotonic() - begin) / len(timed) * count
    return total


def trains_dense(experiment: Experiment, row: Row) -> bool:
    """Return whether a row's dense model has a row, but must be trained anew on this machine."""
    return row.recipe != DENSE and experiment.path(row.dense).is_file() and not experiment.model(row.dense).is_dir()


def expected_seconds(experiment: Experiment, row: Row, device: str) -> float | None:
    """Return the longest seconds of the recipe's rows on a device, or else of its estimates there; None without both.

    If the row's dense model must be trained anew, its seconds are added.
    """
    measured, estimated = list[float](), list[float]()
    for other, record in [*experiment.records().items(), *read_estimates(experiment).items()]:
        if other.recipe == row.recipe and record["device"] == device_name(device):
            (measured if "test" in record else estimated).append(record["seconds"])
    own = max(measured or estimated, default=None)
    if own is None or measured or not trains_dense(experiment, row):
        return own
    return own + (expected_seconds(experiment, row.dense, device) or 0.0)


def read_estimates(experiment: Experiment) -> dict[Row, Any]:
    """Read the estimates of the present recipes, with what they removed."""
    estimates: dict[Row, Any] = {}
    for path in sorted((experiment.work / "estimate").glob("*.json")):
        record = read_json(path)
        row = Row(record["recipe"], record["fold"], record["seed"])
        known = row.recipe in (DENSE, *experiment.settings["recipes"])
        if known and "seconds" in record and record["settings"] == experiment.digest(row):
            estimates[row] = record
    return estimates
