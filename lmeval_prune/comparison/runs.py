"""Runs of `lm_eval --log_samples`: their results files, and the outcomes of a task."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

import numpy as np

from lmeval_prune.artefacts import digest
from lmeval_prune.comparison.distances import Response
from lmeval_prune.comparison.metrics import Metric, columns_of, known_metrics
from lmeval_prune.comparison.results_files import ResultsFile, find_results
from lmeval_prune.comparison.samples import NEXT_TRY, Answer, log_likelihoods, read_answer, shortened, values
from lmeval_prune.comparison.settings import Settings, different, model_of, seed_text, settings_of
from lmeval_prune.errors import InputError, first_few


class Question(NamedTuple):
    """What identifies a question of a task: its document. lm-eval's number of it (doc_id) depends on `--samples`."""

    hash: str
    repeat: int  # number of earlier questions with the same document


class Outcome(NamedTuple):
    """A question, and what a run answered to it."""

    number: int  # lm-eval's doc_id
    question: Question
    text_key: str  # see `samples.question_keys`
    prompt: str  # digest
    answer: Answer
    responses: tuple[Response, ...]  # one for each results file (seed)
    document: tuple[str | None, ...]  # the columns of its document that were asked for


@dataclass(frozen=True)
class Evaluation:
    """Outcomes of a run on a task."""

    outcomes: list[Outcome]
    values: dict[str, np.ndarray]  # of each outcome, by `METRIC,FILTER` and `WEIGHT`; NaN: no value
    metrics: dict[str, Metric]  # metrics of the task that are a function of a mean over questions, by `METRIC,FILTER`
    settings: Settings

    @property
    def questions(self) -> list[Question]:
        """Return the questions, which are all different."""
        return [outcome.question for outcome in self.outcomes]

    def of(self, questions: Iterable[Question]) -> Evaluation:
        """Return the outcomes of some questions, in their order."""
        position = {question: row for row, question in enumerate(self.questions)}
        rows = [position[question] for question in questions]
        own = {name: column[rows] for name, column in self.values.items()}
        return replace(self, outcomes=[self.outcomes[row] for row in rows], values=own)


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

    def read(self, task: str, columns: Sequence[str] = ()) -> Evaluation:
        """Read the outcomes of a task; of several results files (seeds), the mean of each question's values.

        Args:
            task: name of the task.
            columns: columns of the documents to read with the outcomes.
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
        return parts[0] if len(parts) == 1 else _mean(self.name, task, parts)


def _read(file: ResultsFile, task: str, columns: Sequence[str], settings: Settings) -> Evaluation:
    outcomes: dict[int, Outcome] = {}
    by_column: defaultdict[str, dict[int, float]] = defaultdict(dict)
    config = file.results["configs"][task] or {}
    for row in file.read_samples(task):
        number = row["doc_id"]
        for column, value in values(row).items():
            by_column[column][number] = value
        if number not in outcomes:
            outcomes[number] = _outcome(row, config, columns)
    order, repeats = sorted(outcomes), Counter[str]()
    for number in order:
        document = outcomes[number].question.hash
        outcomes[number] = outcomes[number]._replace(question=Question(document, repeats[document]))
        repeats[document] += 1
    own = {column: np.array([known.get(n, np.nan) for n in order]) for column, known in by_column.items()}
    metrics = known_metrics(own, file.results, task, file.samples[task])
    return Evaluation([outcomes[number] for number in order], own, metrics, settings)


def _outcome(row: dict[str, Any], config: dict[str, Any], columns: Sequence[str]) -> Outcome:
    answer, text_key = read_answer(row, config)
    texts = [[part for part in request if not isinstance(part, dict)] for request in row["arguments"]]
    prompt = intern(digest(json.dumps(texts)))
    response = Response(prompt, digest(answer.answer) if answer.answer else "", log_likelihoods(row))
    shown = Answer(*(intern(shortened(text)) for text in answer))  # runs that are compared have the same questions
    document = row["doc"] if isinstance(row["doc"], dict) else {}
    fields = [document.get(column) for column in columns]
    return Outcome(
        row["doc_id"],
        Question(intern(row["doc_hash"]), 0),
        intern(text_key),
        prompt,
        shown,
        (response,),
        tuple(str(value) if isinstance(value, str | int | float) else None for value in fields),
    )


def _mean(run: str, task: str, parts: list[Evaluation]) -> Evaluation:
    """Return the mean outcomes of each question over several repeats, and all of its answers."""
    first = parts[0]
    if any(set(part.questions) != set(first.questions) for part in parts):
        raise InputError(f"{run} has {task} {len(parts)} times with different questions; name a results file")
    parts = [part.of(first.questions) for part in parts]
    outcomes = []
    for repeats in zip(*(part.outcomes for part in parts), strict=True):
        answers = shortened(NEXT_TRY.join(filter(None, (outcome.answer.answer for outcome in repeats))))
        outcomes.append(
            repeats[0]._replace(
                prompt=" ".join(sorted({outcome.prompt for outcome in repeats})),
                answer=repeats[0].answer._replace(answer=answers),
                responses=tuple(response for outcome in repeats for response in outcome.responses),
            )
        )
    shared = [name for name in first.values if all(name in part.values for part in parts)]
    means = {
        name: np.mean([part.values[name] for part in parts], axis=0) for name in shared
    }  # one without a value: NaN
    metrics = {name: first.metrics[name] for name in columns_of(means) if all(name in p.metrics for p in parts)}
    return Evaluation(outcomes, means, metrics, first.settings)


def find_runs(words: Sequence[str]) -> list[Run]:
    """Return the runs that the words of a command name, `PATH` or `NAME=PATH`, each with a name.

    A path is a results file or a folder. The results below a folder are one run if the model and its arguments agree
    but for the seed; otherwise they are several.
    """
    paths = {word: word if Path(word).exists() else word.partition("=")[2] or word for word in words}
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
