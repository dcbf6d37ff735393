"""Runs of `lm_eval --log_samples`: their results files, and the outcomes of a task."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lmeval_prune.artefacts import digest
from lmeval_prune.comparison.distances import Response
from lmeval_prune.comparison.metrics import Metric, known_metrics
from lmeval_prune.comparison.page import shortened
from lmeval_prune.comparison.results_files import ResultsFile, find_results
from lmeval_prune.comparison.samples import NEXT_TRY, QUESTION, log_likelihoods, tables
from lmeval_prune.comparison.settings import Settings, different, model_of, seed_text, settings_of
from lmeval_prune.comparison.tables import questions_of
from lmeval_prune.errors import InputError, first_few

DOCUMENT = "document: "  # prefix of columns of documents


class Evaluation(NamedTuple):
    """Outcomes of a run on a task."""

    outcomes: pd.DataFrame  # see `samples.tables`; also `prompt`, a digest, and columns of the documents
    answers: pd.DataFrame
    """See `samples.tables`; also `responses`, a list of `Response`, one for each results file (seed)."""
    metrics: dict[str, Metric]  # metrics of the task that are a function of a mean over questions, by `METRIC,FILTER`
    settings: Settings
    fields: frozenset[str]  # of its first document


@dataclass(frozen=True)
class Run:
    """A model that was evaluated on some tasks, each once or with several seeds."""

    name: str
    files: list[ResultsFile]

    @property
    def tasks(self) -> list[str]:
        """Return the tasks with samples."""
        return list(dict.fromkeys(task for file in self.files for task in file.samples))

    def files_of(self, task: str) -> list[ResultsFile]:
        """Return the results files with samples of a task."""
        return [file for file in self.files if task in file.samples]

    @property
    def groups(self) -> dict[str, list[str]]:
        """Return the members of groups, by group."""
        return {
            name: members
            for file in self.files
            for name, members in (file.results.get("group_subtasks") or {}).items()
            if members and name not in (file.results.get("configs") or {})
        }

    def about(self) -> str:
        """Describe the run in a line."""
        first = self.files[0]
        arguments = ",".join(f"{name}={value}" for name, value in _arguments(first).items())
        seeds = [text for text in dict.fromkeys(map(seed_text, self.files)) if text]
        dates = sorted(file.results["date"] for file in self.files if "date" in file.results)
        parts = [f"{first.config.get('model', 'a model')} ({arguments})"]
        parts += [f"seed {'; '.join(seeds)}"] if seeds else []
        parts += [f"lm_eval {version}"] if (version := first.results.get("lm_eval_version")) else []
        parts += [f"{datetime.fromtimestamp(dates[0], UTC):%Y-%m-%d}"] if dates else []
        return ", ".join([*parts, first_few(file.path for file in self.files)])

    def read(self, task: str, columns: Sequence[str]) -> Evaluation:
        """Read the outcomes of a task; of several results files (seeds), the mean of each question's values.

        Args:
            task: name of the task.
            columns: columns of the documents to add to the outcomes.
        """
        files = self.files_of(task)
        settings = [settings_of(file, task) for file in files]
        for file, other in zip(files[1:], settings[1:], strict=True):
            has_same_version = settings[0].lm_eval == other.lm_eval
            reasons = different(settings[0].of_repeats, other.of_repeats, has_same_version)
            # lm-eval leaves out what it could not find out
            if reasons := reasons + different(model_of(files[0]), model_of(file), has_same_version=False):
                raise InputError(
                    f"{self.name} has {task} twice with different settings: {first_few(reasons, most=3)}; name the "
                    f"results file to compare, {files[0].path} or {file.path}"
                )
        parts = [_read(file, task, columns, setting) for file, setting in zip(files, settings, strict=True)]
        for part in parts:
            part.outcomes["task"] = part.answers["task"] = task
        return parts[0] if len(parts) == 1 else _mean(self.name, task, parts)


def _read(file: ResultsFile, task: str, columns: Sequence[str], settings: Settings) -> Evaluation:
    rows = file.read_samples(task)
    outcomes, answers = tables({task: rows}, file.results["configs"])
    metrics = known_metrics(outcomes, file.results, file.samples[task])[task]  # type: ignore[arg-type]
    first = {int(row["doc_id"]): row for row in reversed(rows)}
    ordered = [first[number] for number in outcomes["doc_id"]]
    outcomes["prompt"] = [digest(json.dumps(_texts(row["arguments"]))) for row in ordered]
    for column in columns:
        outcomes[DOCUMENT + column] = [_field(row["doc"], column) for row in ordered]
    keys = [digest(text) if text else "" for text in answers["answer"]]
    columns_of_responses = zip(outcomes["prompt"], keys, map(log_likelihoods, ordered), strict=True)
    answers["responses"] = [[Response(*values)] for values in columns_of_responses]
    for column in ("question", "target", "answer"):
        answers[column] = answers[column].map(shortened)
    doc = ordered[0]["doc"]
    return Evaluation(outcomes, answers, metrics, settings, frozenset(doc if isinstance(doc, dict) else ()))


def _texts(arguments: list[list[Any]]) -> list[list[Any]]:
    return [[part for part in request if not isinstance(part, dict)] for request in arguments]


def _field(doc: Any, column: str) -> str | None:
    value = doc.get(column) if isinstance(doc, dict) else None
    return str(value) if isinstance(value, str | int | float) else None


def numbered_as(base: Evaluation, other: Evaluation) -> Evaluation:
    """Return an evaluation with another's numbers of questions: `--samples` out of order changes lm-eval's doc_id.

    A document that a task has several times keeps its number if it has one in both.
    """
    same = {*questions_of(base.outcomes)} & {*questions_of(other.outcomes)}
    free: defaultdict[str, list[int]] = defaultdict(list)
    for question in questions_of(base.outcomes):
        if question not in same:
            free[question[2]].append(question[1])
    numbers = [
        free[question[2]].pop(0) if question not in same and free[question[2]] else question[1]
        for question in questions_of(other.outcomes)
    ]
    return other._replace(outcomes=other.outcomes.assign(doc_id=numbers), answers=other.answers.assign(doc_id=numbers))


def _mean(run: str, task: str, parts: list[Evaluation]) -> Evaluation:
    """Return the mean outcomes of each question over several repeats, and all of its answers."""
    first = parts[0]
    parts = [first, *(numbered_as(first, part) for part in parts[1:])]
    questions = [set(questions_of(part.outcomes)) for part in parts]
    if any(other != questions[0] for other in questions):
        raise InputError(f"{run} has {task} {len(parts)} times with different questions; name a results file")
    outcomes = pd.concat([part.outcomes for part in parts])
    metrics = [name for name in outcomes if "," in name]
    grouped = outcomes.groupby(QUESTION, sort=False)
    merged = first.outcomes.set_index(QUESTION).drop(columns=metrics, errors="ignore")
    merged["prompt"] = grouped["prompt"].agg(lambda prompts: " ".join(sorted(set(prompts))))
    # a value that a repeat lacks stays unknown
    merged = merged.join(grouped[metrics].mean().where(grouped[metrics].count() == len(parts))).reset_index()
    answers = first.answers.set_index(["task", "doc_id"])
    repeats = pd.concat([part.answers for part in parts]).groupby(["task", "doc_id"], sort=False)
    answers["answer"] = repeats["answer"].agg(lambda texts: shortened(NEXT_TRY.join(filter(None, texts))))
    answers["responses"] = repeats["responses"].agg(
        lambda lists: [response for responses in lists for response in responses]
    )
    shared_metrics = {
        column: metric for column, metric in first.metrics.items() if all(column in part.metrics for part in parts)
    }
    return Evaluation(merged, answers.reset_index(), shared_metrics, first.settings, first.fields)


def find_runs(words: Sequence[str]) -> list[Run]:
    """Return the runs that the words of a command name, `PATH` or `NAME=PATH`, each with a name.

    A path is a results file or a folder. The results below a folder are one run if the model and its arguments agree
    but for the seed; otherwise they are several.
    """
    paths = {word: word if Path(word).exists() else word.partition("=")[2] or word for word in words}
    if repeated := [word for word in paths if list(words).count(word) > 1]:
        raise InputError(f"{repeated[0]} is named twice; name each run once")
    unnamed = [path for word, path in paths.items() if path == word]
    start = os.path.commonpath([Path(path).absolute().parent for path in unnamed]) if len(unnamed) > 1 else None
    runs: list[Run] = []
    for word, path in paths.items():
        name = word.partition("=")[0] if path != word else os.path.relpath(path, start) if start else str(Path(path))
        runs += _runs_of(name, find_results(Path(path)), Path(path))
    names = [run.name for run in runs]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise InputError(f"there are several runs {twice[0]!r}; name them: NAME=PATH")
    return runs


def _runs_of(label: str, files: list[ResultsFile], path: Path) -> list[Run]:
    """Return the runs in a folder, with names from what differs."""
    by_model: dict[str, list[ResultsFile]] = {}  # whose model and arguments agree but for the seed
    for file in files:
        identity = [str(file.path.parent), file.config.get("model"), _arguments(file)]
        by_model.setdefault(json.dumps(identity, sort_keys=True, default=str), []).append(file)
    groups = list(by_model.values())
    if len(groups) == 1:
        return [Run(label, groups[0])]
    group_arguments = [{"--model": group[0].config.get("model")} | _arguments(group[0]) for group in groups]
    names = dict.fromkeys(name for arguments in group_arguments for name in arguments)
    varying = [name for name in names if len({str(arguments.get(name)) for arguments in group_arguments}) > 1]
    folders = [str(group[0].path.parent.relative_to(path)) for group in groups]
    runs = []
    for folder, group, arguments in zip(folders, groups, group_arguments, strict=True):
        parts = [label] if folder == "." else [f"{label}/{folder}"]
        if folders.count(folder) > 1:
            parts += [f"{name}={arguments[name]}" for name in varying if name in arguments] or ["no further arguments"]
        runs.append(Run(" ".join(parts), group))
    return runs


def _arguments(file: ResultsFile) -> dict[str, Any]:
    return {name: value for name, value in file.model_args.items() if name != "seed"}
