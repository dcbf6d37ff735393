"""Results and samples files that `lm_eval --log_samples` wrote, of version 0.4.7 and later."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import file_name, parse_json, read_json
from lmeval_prune.errors import InputError, check_exists


@dataclass(frozen=True)
class ResultsFile:
    """A results file and its samples files.

    Attributes:
        path: the results file.
        name: name of its only task in a comparison, or of all its tasks together (each is `NAME::TASK` then); empty:
            lm-eval's names.
    """

    path: Path
    name: str = ""

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
        """Return the settings of the run: model, model_args, seeds, …"""
        return self.results.get("config") or {}

    @property
    def model_args(self) -> dict[str, Any]:
        """Return the arguments of the model."""
        arguments = self.config.get("model_args") or {}
        if isinstance(arguments, str):
            pairs = (pair.partition("=") for pair in arguments.split(",") if pair)
            return {name: value for name, _, value in pairs}
        return dict(arguments)

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


def find_results(path: Path) -> list[ResultsFile]:
    """Return the results files with samples in a folder and those below it, or the results file that is named."""
    check_exists(path)
    paths = [path] if path.is_file() else sorted(file for file in path.rglob("*.json") if file.is_file())
    files = []
    for file in paths:
        with file.open("rb") as content:
            if re.match(rb'\s*\{\s*"results"\s*:', content.read(80)):
                files.append(ResultsFile(file))
    if with_samples := [file for file in files if file.samples]:
        return with_samples
    raise InputError(f"{path} has no results of `lm_eval --log_samples`")
