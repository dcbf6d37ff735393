"""Runs of `lm_eval --log_samples`, of version 0.4.7 and later: results files, settings, and the outcomes of a task."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

import numpy as np

from lmeval_prune.artefacts import digest, file_name, parse_json, read_json, without_addresses
from lmeval_prune.comparison.distance import Response
from lmeval_prune.comparison.samples import (
    NEXT_TRY,
    Answer,
    Metric,
    columns_of,
    known_metrics,
    log_likelihoods,
    read_answer,
    shortened,
    values,
)
from lmeval_prune.errors import InputError, brief, check_exists, first_few
from lmeval_prune.models.answer_store import merge_lengths

# entries of a task's configuration that its questions and prompts show, or that say nothing about its evaluation
_IGNORED = {
    "_qualified_name", "alias", "custom_dataset", "dataset_kwargs", "dataset_name", "dataset_path", "fewshot_split",
    "group", "metadata", "should_decontaminate", "doc_to_decontamination_query", "tag", "task", "task_alias",
    "test_split", "training_split", "validation_split", "process_docs", "unsafe_code", "use_prompt", "version",
}  # fmt: skip
# entries that change nothing but prompts: what differs explains prompts that differ
_PROMPT = {
    "description", "doc_to_choice", "doc_to_text", "fewshot_config", "fewshot_delimiter", "gen_prefix", "num_fewshot",
    "target_delimiter", "doc_to_audio", "doc_to_image",
}  # fmt: skip
# what lm-eval writes of the model that was loaded: another one can have been saved under the same name
_MODEL = ("model_dtype", "model_num_parameters", "peft_sha", "delta_sha")
# what this package writes of what was pruned: a file of masks can have been written again under the same name
_PRUNING = (
    *("weights_fingerprint", "heads", "mask_fingerprint", "file_sha256", "plan", "adapters", "lora", "checkpoint"),
    "router",
)


@dataclass(frozen=True)
class ResultsFile:
    """A results file and its samples files."""

    path: Path
    name: str = ""  # of its only task, or of all tasks together (each is `NAME::TASK` then); empty: lm-eval's names

    @cached_property
    def results(self) -> dict[str, Any]:
        """Return lm-eval's results, by the names of tasks in a comparison."""
        results: dict[str, Any] = read_json(self.path)
        if self.name:
            tasks = list(results.get("configs") or {})
            results["task_names"] = {f"{self.name}::{task}" if len(tasks) > 1 else self.name: task for task in tasks}
            results["group_subtasks"] = {self.name: list(results["task_names"])} if len(tasks) > 1 else {}
            for part in ("results", "configs", "versions", "higher_is_better"):
                own = results.get(part) or {}
                results[part] = {name: own[task] for name, task in results["task_names"].items() if task in own}
        return results

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.results.get("config") or {}

    @property
    def model_args(self) -> dict[str, Any]:
        """Return the arguments of the model."""
        arguments = self.config.get("model_args") or {}
        if isinstance(arguments, str):
            pairs = (pair.partition("=") for pair in arguments.split(",") if pair)
            return {name: value for name, _, value in pairs}
        return dict(arguments)

    @property
    def other_args(self) -> dict[str, Any]:
        return {name: value for name, value in self.model_args.items() if name != "seed"}

    @property
    def seeds(self) -> str:
        """Return lm-eval's four seeds, or one number if they are equal, and the seed among the model's arguments."""
        numbers = [self.config.get(f"{name}_seed") for name in ("random", "numpy", "torch", "fewshot")]
        shown = numbers if len(set(numbers)) > 1 else numbers[:1]
        texts = ["/".join(map(str, shown))] if shown != [None] else []
        return " and ".join([*texts, *(f"seed={value}" for name, value in self.model_args.items() if name == "seed")])

    @property
    def model(self) -> dict[str, Any]:
        """Return what is said of the model's weights; without a digest of them also the revision on the Hub."""
        weights = self.pruning.get("weights_fingerprint")
        names = _MODEL if weights else (*_MODEL, "model_sha")  # which changes with any file of the repository
        return _flat({**{name: self.config.get(name) for name in names}, "weights of the model": weights})

    @property
    def pruning(self) -> dict[str, Any]:
        """Return what this package writes of the weights and of what was pruned, without the seed of a router."""
        found = self.config.get("pruning")
        if not isinstance(found, Mapping):
            return {}
        router = {name: value for name, value in (found.get("router") or {}).items() if name != "seed"}
        return _flat({name: router if name == "router" else found[name] for name in _PRUNING if name in found})

    @cached_property
    def samples(self) -> dict[str, Path]:
        """Return the samples files that exist, by task."""
        date = self.path.stem.rpartition("_")[2]
        names = self.results.get("task_names", {})
        paths = {
            task: self.path.with_name(f"samples_{file_name(names.get(task, task))}_{date}.jsonl")
            for task in self.results.get("configs") or {}
        }
        return {task: path for task, path in paths.items() if path.is_file()}

    def settings(self, task: str) -> Settings:
        config = {name: value for name, value in self.results["configs"][task].items() if name not in _IGNORED}
        prompt = {
            "system_instruction": self.results.get("system_instruction"),
            "apply_chat_template": self.results.get("chat_template_sha") is not None,
            "fewshot_as_multiturn": bool(self.results.get("fewshot_as_multiturn")),
            "fewshot_seed": self.config.get("fewshot_seed"),
            **{name: value for name, value in config.items() if name in _PROMPT},
        }
        other = {name: value for name, value in config.items() if name not in _PROMPT}
        other["version of the task"] = (self.results.get("versions") or {}).get(task)
        return Settings(_flat(prompt), _flat(other), self.results.get("lm_eval_version"))

    def lengths(self, task: str) -> Any:
        """Return the lengths of a task's answers, see `summarize_lengths`; None if the run did not note them."""
        name = self.results.get("task_names", {}).get(task, task)
        return ((self.config.get("pruning") or {}).get("answers") or {}).get(name)

    def read_samples(self, task: str) -> Iterator[dict[str, Any]]:
        """Yield the samples of a task, with `arguments` as a list of lists.

        Refuse more or fewer questions than the results say, and a question twice.
        """
        path = self.samples[task]
        seen: defaultdict[str, set[int]] = defaultdict(set)  # by filter
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = parse_json(line, f"line {number} of {path}")
                if row["doc_id"] in (known := seen[row["filter"]]):
                    raise InputError(f"{path} has question {row['doc_id']} twice; delete it and evaluate again")
                known.add(row["doc_id"])
                requests = row["arguments"].values() if isinstance(row["arguments"], dict) else row["arguments"]
                row["arguments"] = [
                    list(request.values()) if isinstance(request, dict) else request for request in requests
                ]
                yield row
        count = len(set().union(*seen.values()))
        expected = self.results["results"].get(task, {}).get("sample_len")
        if not count or (expected is not None and count != expected):
            raise InputError(f"{path} has {count} questions, {self.path.name} was computed from {expected}; run again")


# ---------------------------------------------------------------------- settings


class Settings(NamedTuple):
    """Settings of a task that have to agree in runs that are compared, by name."""

    prompt: dict[str, Any]  # of its prompts
    other: dict[str, Any]  # of generation, filters and metrics
    lm_eval: str | None  # lm-eval's version


def different(first: Mapping[str, Any], second: Mapping[str, Any], has_same_version: bool) -> list[str]:
    """Return `NAME: VALUE and VALUE` of the settings that differ.

    Settings that only one of two versions of lm-eval writes are not compared.
    """
    return [
        f"{name}: {' and '.join(brief(str(own.get(name, 'not set')), 40) for own in (first, second))}"
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name) and (has_same_version or (name in first and name in second))
    ]


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by names with dots; addresses in the texts of functions are left out."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        elif value is not None and value is not False and value not in ("", []):  # these are the same as not set
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
            flat[prefix + name] = without_addresses(text) if isinstance(text, str) else text
    return flat


# ---------------------------------------------------------------------- outcomes of a task


# What identifies a question of a task, as lm-eval's number of it (doc_id) depends on `--samples`: the hash of its
# document, and the number of earlier questions with the same.
Question = tuple[str, int]


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
        return [outcome.question for outcome in self.outcomes]

    def of(self, questions: Iterable[Question]) -> Evaluation:
        position = {question: row for row, question in enumerate(self.questions)}
        rows = [position[question] for question in questions]
        own = {name: column[rows] for name, column in self.values.items()}
        return replace(self, outcomes=[self.outcomes[row] for row in rows], values=own)


def _read(file: ResultsFile, task: str, columns: Sequence[str], settings: Settings) -> Evaluation:
    outcomes: dict[int, Outcome] = {}
    by_column: defaultdict[str, dict[int, float]] = defaultdict(dict)
    config = file.results["configs"][task] or {}
    for row in file.read_samples(task):
        number = row["doc_id"]
        for column, value in values(row).items():
            by_column[column][number] = value
        if number in outcomes:
            continue
        answer, text_key = read_answer(row, config)
        texts = [[part for part in request if not isinstance(part, dict)] for request in row["arguments"]]
        prompt = intern(digest(json.dumps(texts)))
        response = Response(prompt, digest(answer.answer) if answer.answer else "", log_likelihoods(row))
        shown = Answer(*(intern(shortened(text)) for text in answer))  # runs that are compared have the same questions
        fields = [row["doc"].get(column) if isinstance(row["doc"], dict) else None for column in columns]
        document = tuple(str(value) if isinstance(value, str | int | float) else None for value in fields)
        question = intern(row["doc_hash"]), 0
        outcomes[number] = Outcome(number, question, intern(text_key), prompt, shown, (response,), document)
    order, repeats = sorted(outcomes), Counter[str]()
    for number in order:
        document_hash, _ = outcomes[number].question
        outcomes[number] = outcomes[number]._replace(question=(document_hash, repeats[document_hash]))
        repeats[document_hash] += 1
    own = {column: np.array([known.get(n, np.nan) for n in order]) for column, known in by_column.items()}
    metrics = known_metrics(own, file.results, task, file.samples[task])
    return Evaluation([outcomes[number] for number in order], own, metrics, settings)


def _mean(run: str, task: str, parts: list[Evaluation]) -> Evaluation:
    """Return the mean outcomes of each question over several repeats, and all of its answers."""
    first = parts[0]
    if any(set(part.questions) != set(first.questions) for part in parts):
        raise InputError(f"{run} has {task} {len(parts)} times with different questions; name a results file")
    parts = [part.of(first.questions) for part in parts]
    outcomes = [
        repeats[0]._replace(
            prompt=" ".join(sorted({outcome.prompt for outcome in repeats})),
            answer=repeats[0].answer._replace(
                answer=shortened(NEXT_TRY.join(filter(None, (outcome.answer.answer for outcome in repeats))))
            ),
            responses=tuple(response for outcome in repeats for response in outcome.responses),
        )
        for repeats in zip(*(part.outcomes for part in parts), strict=True)
    ]
    shared = [name for name in first.values if all(name in part.values for part in parts)]
    means = {name: np.mean([part.values[name] for part in parts], axis=0) for name in shared}  # without a value: NaN
    metrics = {name: first.metrics[name] for name in columns_of(means) if all(name in p.metrics for p in parts)}
    return Evaluation(outcomes, means, metrics, first.settings)


# ---------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Run:
    """A model that was evaluated on some tasks, each once or with several seeds."""

    name: str
    files: list[ResultsFile]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for file in self.files for task in file.samples))

    def files_of(self, task: str) -> list[ResultsFile]:
        return [file for file in self.files if task in file.samples]

    @property
    def groups(self) -> dict[str, list[str]]:
        return {
            name: members
            for file in self.files
            for name, members in (file.results.get("group_subtasks") or {}).items()
            if members and name not in (file.results.get("configs") or {})
        }

    @property
    def is_pruned(self) -> bool:
        """Return whether this package has written that something of the model was pruned."""
        found = self.files[0].config.get("pruning") or {}
        return bool(found.get("heads") or found.keys() - {"created_by", "weights_fingerprint", "heads", "answers"})

    def about(self) -> str:
        """Describe the run in a line."""
        first = self.files[0]
        arguments = ",".join(f"{name}={value}" for name, value in first.other_args.items())
        seeds = [text for text in dict.fromkeys(file.seeds for file in self.files) if text]
        dates = sorted(file.results["date"] for file in self.files if "date" in file.results)
        parts = [f"{first.config.get('model', 'a model')} ({arguments})"]
        parts += [f"seed {'; '.join(seeds)}"] if seeds else []
        parts += [f"lm_eval {version}"] if (version := first.results.get("lm_eval_version")) else []
        parts += [f"{datetime.fromtimestamp(dates[0], UTC):%Y-%m-%d}"] if dates else []
        return ", ".join([*parts, first_few(file.path for file in self.files)])

    def lengths(self, tasks: Sequence[str]) -> dict[str, Any]:
        """Return the lengths of the answers to tasks together; empty if one's are unknown."""
        parts = [file.lengths(task) for task in tasks for file in self.files_of(task)]
        return merge_lengths(parts) if parts and all(parts) else {}

    def read(self, task: str, columns: Sequence[str] = ()) -> Evaluation:
        """Read the outcomes of a task, and `columns` of its documents; of several results files (seeds), the mean."""
        files = self.files_of(task)
        settings = [file.settings(task) for file in files]
        for file, other in zip(files[1:], settings[1:], strict=True):
            before, after = ({**each.prompt, **each.other, "fewshot_seed": None} for each in (settings[0], other))
            reasons = different(before, after, settings[0].lm_eval == other.lm_eval)
            # lm-eval leaves out what it could not find out
            reasons += different(files[0].model, file.model, has_same_version=False)
            both = bool(files[0].pruning and file.pruning)
            if reasons := reasons + different(files[0].pruning, file.pruning, both):
                raise InputError(
                    f"{self.name} has {task} twice with different settings: {first_few(reasons, most=3)}; name the "
                    f"results file to compare, {files[0].path} or {file.path}"
                )
        parts = [_read(file, task, columns, setting) for file, setting in zip(files, settings, strict=True)]
        return parts[0] if len(parts) == 1 else _mean(self.name, task, parts)


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
        runs += _runs_of(name, Path(path))
    names = [run.name for run in runs]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise InputError(f"there are several runs {twice[0]!r}; name them: NAME=PATH")
    return runs


def _runs_of(label: str, path: Path) -> list[Run]:
    """Return the runs in a folder and those below it, or in a results file, with names from what differs."""
    check_exists(path)
    by_model: dict[str, list[ResultsFile]] = {}  # whose model and arguments agree but for the seed
    for candidate in [path] if path.is_file() else sorted(file for file in path.rglob("*.json") if file.is_file()):
        with candidate.open("rb") as content:
            is_results = re.match(rb'\s*\{\s*"results"\s*:', content.read(80))
        if is_results and (file := ResultsFile(candidate)).samples:
            identity = [str(file.path.parent), file.config.get("model"), file.other_args]
            by_model.setdefault(json.dumps(identity, sort_keys=True, default=str), []).append(file)
    groups = list(by_model.values())
    if not groups:
        raise InputError(f"{path} has no results of `lm_eval --log_samples`")
    if len(groups) == 1:
        return [Run(label, groups[0])]
    group_arguments = [{"--model": group[0].config.get("model")} | group[0].other_args for group in groups]
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
