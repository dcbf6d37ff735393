"""Results and samples files that `lm_eval --log_samples` wrote, of version 0.4.7 and later."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NotRequired, cast

from annotated_types import Interval, Len
from typing_extensions import TypedDict

from lmeval_prune.artefacts import file_name, read_json, read_lines
from lmeval_prune.comparison.metrics import Results
from lmeval_prune.errors import InputError, check_exists


class _RunConfig(TypedDict, total=False):
    model: str | None
    model_args: str | dict[str, Any] | None
    random_seed: int | None
    numpy_seed: int | None
    torch_seed: int | None
    fewshot_seed: int | None


class RunResults(Results):
    """Fields of lm-eval's results that describe a run."""

    config: NotRequired[_RunConfig | None]
    group_subtasks: NotRequired[dict[str, list[str]] | None]
    versions: NotRequired[dict[str, Any] | None]
    lm_eval_version: NotRequired[str | None]
    date: NotRequired[Annotated[float, Interval(ge=0, lt=1e11)]]


_Request = Annotated[list[Any], Len(1)] | Annotated[dict[str, Any], Len(1)]


class Sample(TypedDict):
    """Fields of a sample that are read."""

    doc_id: int
    doc: Any
    target: Any
    arguments: Annotated[list[_Request], Len(1)] | Annotated[dict[str, _Request], Len(1)]
    resps: list[Any]
    filter: str
    metrics: list[str]
    doc_hash: str


@dataclass(frozen=True)
class ResultsFile:
    """A results file and its samples files."""

    path: Path

    @cached_property
    def results(self) -> dict[str, Any]:
        """Return lm-eval's results."""
        return cast(dict[str, Any], read_json(self.path, RunResults))

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
        paths: dict[str, Path] = {}
        for task in self.results.get("configs") or {}:
            names = (f"samples_{task}_{date}.jsonl", f"samples_{file_name(task)}.jsonl")  # the latter of a grid's cell
            existing = [path for path in map(self.path.with_name, names) if path.is_file()]
            if existing:
                paths[task] = existing[0]
        return paths

    def read_samples(self, task: str) -> list[dict[str, Any]]:
        """Read the samples of a task, with `arguments` as a list of lists.

        Refuse more or fewer questions than the results say, and a question twice.
        """
        path = self.samples[task]
        rows: list[dict[str, Any]] = read_lines(path, Sample)
        for row in rows:
            requests = row["arguments"].values() if isinstance(row["arguments"], dict) else row["arguments"]
            row["arguments"] = [
                list(request.values()) if isinstance(request, dict) else request for request in requests
            ]
        keys = Counter((row["doc_id"], row["filter"]) for row in rows)
        (key, most), *_ = keys.most_common(1)
        if most > 1:
            raise InputError(f"{path} has question {key[0]} {most} times; delete it and evaluate again")
        number = len({doc_id for doc_id, _ in keys})
        expected = self.results["results"].get(task, {}).get("sample_len")
        if expected is not None and number != expected:
            raise InputError(f"{path} has {number} questions, {self.path.name} was computed from {expected}; run again")
        return rows


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
