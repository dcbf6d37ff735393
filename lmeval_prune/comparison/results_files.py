"""Results and samples files that `lm_eval --log_samples` wrote, of all versions since 0.4.0."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NotRequired, cast

from annotated_types import Interval, Len
from pydantic import AfterValidator
from typing_extensions import TypedDict

from lmeval_prune.artefacts import file_name, parse_json, read_json, validate_json
from lmeval_prune.comparison.metrics import Results
from lmeval_prune.comparison.samples import is_generated, log_likelihood
from lmeval_prune.errors import InputError, check_exists

# keys of a sample that are no metrics; before 0.4.7, samples do not list their metrics
_SAMPLE_KEYS = {
    "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash", "prompt_hash",
    "target_hash", "scores_per_repeat",
}  # fmt: skip


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
    """Fields of a sample: those that all versions write, and later ones."""

    doc_id: int
    doc: Any
    target: Any
    arguments: Annotated[list[_Request], Len(1)] | Annotated[dict[str, _Request], Len(1)]
    resps: list[Any]
    filter: NotRequired[str]
    metrics: NotRequired[list[str]]
    doc_hash: NotRequired[str]


@functools.cache
def _with_requests(requests: int, parts: int, is_generated: bool) -> Any:
    """Return the type of a sample with so many requests of so many parts, each with at least one response."""
    response = str if is_generated else Annotated[Any, AfterValidator(log_likelihood)]
    responses = Annotated[list[Annotated[list[response], Len(1)]], Len(requests, requests)]  # type: ignore[valid-type]
    fields = {"arguments": list[Annotated[list[Any], Len(parts, parts)]], "resps": responses}
    return TypedDict("Requests", fields)  # type: ignore[operator]


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
        arguments = self.config.get("model_args") or ""
        old = re.sub("/|=", "__", arguments) if isinstance(arguments, str) else ""
        paths: dict[str, Path] = {}
        for task in self.results.get("configs") or {}:
            # of 0.4.3 and later, of a grid's cell, of 0.4.0 to 0.4.2
            names = (f"samples_{task}_{date}.jsonl", f"samples_{file_name(task)}.jsonl", f"{old}_{task}.jsonl")
            existing = [path for path in map(self.path.with_name, names) if path.is_file()]
            if existing:
                paths[task] = existing[0]
        return paths

    def read_samples(self, task: str) -> list[dict[str, Any]]:
        """Read the samples of a task in the layout of today's lm-eval, with `arguments` as a list of lists."""
        filters = _filters(self.results, task)
        rows: list[dict[str, Any]] = []
        sample_counts: Counter[int] = Counter()
        for name, row in _rows(self.samples[task]):
            validate_json(row, Sample, name)
            if "filter" not in row:
                if sample_counts[row["doc_id"]] >= len(filters):
                    raise InputError(f"{name}: a second sample of question {row['doc_id']}; it was evaluated twice")
                row["filter"] = filters[sample_counts[row["doc_id"]]]
                sample_counts[row["doc_id"]] += 1
            row.setdefault("metrics", [key for key in row if key not in _SAMPLE_KEYS])
            if isinstance(row["arguments"], dict):
                row["arguments"] = list(row["arguments"].values())
            row["arguments"] = [
                list(request.values()) if isinstance(request, dict) else request for request in row["arguments"]
            ]
            requests = row["arguments"]
            validate_json(row, _with_requests(len(requests), len(requests[0]), is_generated(row)), name)
            row.setdefault("doc_hash", _hash(row["doc"]))
            rows.append(row)
        self._check_count(task, rows)
        return rows

    def _check_count(self, task: str, rows: list[dict[str, Any]]) -> None:
        """Refuse samples files with more or fewer questions than the results say, or with a question twice."""
        path, keys = self.samples[task], Counter((row["doc_id"], row["filter"]) for row in rows)
        if not keys:
            raise InputError(f"{path} has no samples")
        (key, most), *_ = keys.most_common(1)
        if most > 1:
            raise InputError(f"{path} has question {key[0]} {most} times; delete it and evaluate again")
        number = len({doc_id for doc_id, _ in keys})
        expected = self.results["results"].get(task, {}).get("sample_len")  # older versions lack it
        if expected is not None and number != expected:
            raise InputError(f"{path} has {number} questions, {self.path.name} was computed from {expected}; run again")


def find_results(path: Path) -> list[ResultsFile]:
    """Return the results files with samples in a folder and those below it, or the results file that is named."""
    check_exists(path)
    paths = [path] if path.is_file() else sorted(file for file in path.rglob("*.json") if file.is_file())
    files = [ResultsFile(file) for file in paths if _is_results(file)]
    if with_samples := [file for file in files if file.samples]:
        return with_samples
    raise InputError(f"{path} has no results of `lm_eval --log_samples`")


def _is_results(path: Path) -> bool:
    """Return whether a file begins as lm-eval's results do."""
    with path.open("rb") as file:
        return re.match(rb'\s*\{\s*"results"\s*:', file.read(80)) is not None


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the samples of a file with names for messages: JSON Lines, or a list as 0.4.0 to 0.4.2 wrote."""
    with path.open("rb") as file:
        if file.read(1) == b"[":
            content = parse_json(path.read_bytes(), path)
            yield from ((f"sample {number} of {path}", row) for number, row in enumerate(content, 1))
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if line.strip():
                name = f"line {number} of {path}"
                yield name, parse_json(line, name)


def _filters(results: Mapping[str, Any], task: str) -> list[str]:
    """Return the names of a task's filters in their order; samples before 0.4.7 do not name theirs."""
    columns = [key.partition(",") for key in results["results"].get(task, {})]
    return list(dict.fromkeys(name for _, comma, name in columns if comma)) or ["none"]


def _hash(doc: Any) -> str:
    return hashlib.sha256(json.dumps(doc, indent=2, ensure_ascii=False).encode()).hexdigest()
