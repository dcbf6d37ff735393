"""The one store of answers (`responses=FOLDER`); a sweep's folder is one, too.

lm-eval's own cache keys an answer by prompt and generation settings alone. Here it is keyed by all that it depends
on, and by nothing else: the request's kind, prompt and settings, the model (weights, tokenizer, type, other
arguments), what is applied to it (for a try under a head: that head), the versions of the code that computes it, and,
where it is drawn, the seed. Not by the task, the try's number, or the router that chose the head: whoever asks the same
finds it. What else has been asked the same under other versions is counted and said, and not used.

    answers.json      schema
    rank-*.jsonl      answers as they come, a file a process; a line that a kill cut short is ignored
    answers.parquet   answers of runs that have been compacted
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, NotRequired
from weakref import finalize

import pyarrow as pa
import pyarrow.parquet as parquet
from annotated_types import Len, Lt
from filelock import Timeout
from typing_extensions import TypedDict

from lmeval_prune import artefacts
from lmeval_prune.artefacts import (
    NONFINITE_REMEDY,
    create_folder,
    digest,
    file_lock,
    lock_path,
    open_append,
    parse_json,
    read_artefact,
    validate_json,
    write_artefact,
    write_bytes,
)
from lmeval_prune.errors import InputError, disk_error, report_write_errors
from lmeval_prune.models.identity import describe_version_change
from lmeval_prune.models.lengths import Ending

logger = logging.getLogger(__name__)
SCHEMA = "lmeval-prune/answers"
SCHEMA_VERSION = 1
Likelihood = Annotated[float, Lt(float("inf"))]  # and not NaN
RESPONSES: dict[str, Any] = {  # by kind of request, what lm-eval's model classes answer, in JSON
    "generate_until": str,
    "loglikelihood": Annotated[list[Likelihood | bool], Len(2, 2)],
    "loglikelihood_rolling": Likelihood,
}
FILES = ("answers.", "rank-")  # ours begin so

_TABLE = pa.schema(
    [
        ("key", pa.string()),
        ("request", pa.string()),  # a digest of all that the answer depends on but versions
        ("versions", pa.string()),  # JSON: versions
        ("kind", pa.string()),
        ("task", pa.string()),
        ("prompt", pa.string()),  # a digest
        ("head", pa.string()),
        ("response", pa.string()),  # JSON
        ("tokens", pa.list_(pa.uint32())),
        ("length", pa.int32()),  # in tokens
        ("cut_off", pa.bool_()),  # by `max_gen_toks`
    ]
)
_ADDED = {"request", "versions", "length", "cut_off"}  # columns that older stores lack


class Record(TypedDict):
    """Fields of a stored answer."""

    key: str
    request: NotRequired[str | None]
    versions: NotRequired[dict[str, Any] | None]
    kind: NotRequired[str | None]
    response: Any
    tokens: NotRequired[list[int] | None]
    length: NotRequired[int | None]
    cut_off: NotRequired[bool | None]


class AnswerStore:
    """Answers of one or more runs in a folder.

    Args:
        folder: made if it does not exist.
        rank: this process; it alone writes `rank-RANK.jsonl`. None: the first number that nobody writes to.

    Attributes:
        path: the file that it writes.
        known: key → response.
        endings: of each key, how the answer ended, where that is known.
        versions: of each request (a digest, see `answer`), the versions that answered it last; None where the answer
            does not say.

    Raises:
        InputError: the folder holds something else, or another run is writing to it.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int | None = 0) -> None:
        self.folder = Path(folder)
        about = self.folder / "answers.json"
        self._file: Any = None
        try:
            create_folder(self.folder)
            foreign = [p.name for p in self.folder.iterdir() if not p.name.startswith((".", *FILES))]
            if foreign and not about.exists():
                raise InputError(f"{folder} holds {foreign[0]} and is not an answer store; give a new folder")
            if about.exists():
                read_artefact(about, SCHEMA, SCHEMA_VERSION)
            with ExitStack() as stack:
                self.path = self._lock(rank, stack)
                if os.path.lexists(self.path):
                    open_append(self.path).close()
                self._release = finalize(self, stack.pop_all().close)  # when nobody has the store any more, too
        except Timeout:
            raise InputError(f"another run is writing to {self.folder}; wait for it, or give another folder") from None
        except OSError as error:
            raise disk_error(error, folder) or InputError(
                f"responses={folder} cannot be used ({error}); give a folder that can be written"
            ) from error
        self.known: dict[str, Any] = {}
        self.endings: dict[str, Ending] = {}
        self.versions: dict[str, dict[str, Any] | None] = {}
        try:
            if not about.exists():  # several ranks may do this at once; they write the same
                write_artefact(about, SCHEMA, SCHEMA_VERSION, {})
            for record in read_answers(self.folder):
                self._take(record["key"], record["response"], record)
                self.versions[record.get("request") or record["key"]] = record.get("versions")
        except BaseException:
            self._release()
            raise

    def _lock(self, rank: int | None, stack: ExitStack) -> Path:
        """Return the file that this process writes, and hold its lock."""
        for number in itertools.count() if rank is None else [rank]:
            path = self.folder / f"rank-{number}.jsonl"
            try:
                stack.enter_context(file_lock(lock_path(path)))
                return path
            except Timeout:
                if rank is not None:
                    raise
        raise AssertionError("there is always a next number")

    def add(self, key: str, response: Any, about: dict[str, Any]) -> None:
        """Write one answer; it is with the operating system when this returns.

        Raises:
            InputError: it is none that can be read again, e.g. NaN; the others stay.
            DiskError: the disk takes no more; the next run that opens the store goes on behind the last whole line.
        """
        line = json.dumps({"key": key, **about, "response": response}, ensure_ascii=False) + "\n"
        try:
            _record(parse_json(line, self.path), self.path)
        except InputError:
            raise InputError(
                f"the model's answer to a {about.get('kind')} request of task {about.get('task')!r} is "
                f"{str(response)[:60]}, which is not stored; where it is NaN, {NONFINITE_REMEDY}"
            ) from None
        try:
            with report_write_errors(self.path):
                if self._file is None:
                    cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")  # a line was cut short
                    self._file = open_append(self.path)
                    self._file.write("\n" if cut and self.path.stat().st_size else "")
                self._file.write(line)
                self._file.flush()
        except InputError:
            self._close_file()
            raise
        self._take(key, response, about)

    def _take(self, key: str, response: Any, about: dict[str, Any]) -> None:
        self.known[key] = response
        if about.get("length") is not None and about.get("cut_off") is not None:
            self.endings[key] = Ending(about["length"], about["cut_off"])

    def close(self) -> None:
        """Close the file and let other runs write."""
        self._close_file()
        self._release()

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what was not written is written again, and said where it was added
                self._file.close()
            self._file = None

    def compact(self) -> None:
        """Move the lines of all processes but those that still write into `answers.parquet`, by key."""
        with ExitStack() as stack:
            paths = []
            for path in self.folder.glob("rank-*.jsonl"):
                with suppress(Timeout):
                    if path != self.path:
                        stack.enter_context(file_lock(lock_path(path), timeout=0))
                    paths.append(path)
            if not paths:
                return
            self._close_file()
            records = {record["key"]: record for record in read_answers(self.folder)}
            rows = [_as_row(records[key]) for key in sorted(records)]
            write_table(self.folder / "answers.parquet", pa.Table.from_pylist(rows, _TABLE))
            for path in paths:
                path.unlink()


def _as_row(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with JSON where the table has texts."""
    versions = json.dumps(record["versions"]) if record.get("versions") else None
    return {**record, "versions": versions, "response": json.dumps(record["response"], ensure_ascii=False)}


def read_answers(folder: Path) -> Iterator[dict[str, Any]]:
    """Read all answers of a store, but lines that a kill cut short; `InputError` if a file is damaged."""
    table = folder / "answers.parquet"
    for row in read_table(table, _TABLE).to_pylist():
        versions = parse_json(row["versions"], table) if row["versions"] else None
        yield _record({**row, "response": parse_json(row["response"] or "", table), "versions": versions}, table)
    for path in sorted(folder.glob("rank-*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = parse_json(line, path)
                except InputError:  # a kill has cut it short
                    continue
                yield _record(record, path)


def _record(value: Any, path: Path) -> dict[str, Any]:
    record: dict[str, Any] = validate_json(value, Record, path)
    validate_json(record["response"], RESPONSES.get(record.get("kind") or "", Any), path)
    return record


def read_table(path: Path, schema: pa.Schema, columns: list[str] | None = None) -> pa.Table:
    """Read a parquet file of a store as an Arrow table; empty, if there is none; `InputError` if it is damaged."""
    try:
        return artefacts.read_table(path, "the store is damaged", columns, schema, _ADDED)
    except FileNotFoundError:
        return schema.empty_table()


def write_table(path: Path, table: pa.Table) -> None:
    """Write a parquet file atomically."""
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd", row_group_size=16384)
    write_bytes(path, buffer.getvalue())


class PendingRequests:
    """Requests whose answers are not stored yet, and what is run with them.

    Attributes:
        kind: of the requests.
        requests, keys: the requests and their keys in the store (without a store, their indices).
        repeats: of each, how many requests for the same document came before it.
        add: keeps a response; called with a key, the response and further columns.
    """

    def __init__(
        self, kind: str, add: Callable[..., None], requests: Sequence[Any], keys: Sequence[Any], repeats: Sequence[int]
    ) -> None:
        self.kind, self.requests, self.keys, self.repeats, self.add = kind, list(requests), keys, repeats, add
        self._waiting: dict[str, deque[Any]] = defaultdict(deque)
        for request, key in zip(requests, keys, strict=True):
            self._waiting[_text(request.args)].append(key)

    def answered(self, attr: str, args: Iterable[Any], response: Any, **columns: Any) -> None:
        """Add a response that lm-eval reports by a request's arguments: it is that of the next one that has them.

        lm-eval reports a batch by the settings of its first request, so that there may be no further one.
        """
        queue = self._waiting.get(_text(args)) if attr == self.kind else None
        if queue:
            self.add(queue.popleft(), response, **columns)


def _text(args: Iterable[Any]) -> str:
    return json.dumps(list(args), sort_keys=True, default=str)


def repeat_indices(requests: Iterable[Any]) -> list[int]:
    """Count, for each request, those for the same task, document and index that came before it."""
    seen: Counter[tuple[Any, ...]] = Counter()
    counts = []
    for request in requests:
        document = (request.task_name, request.doc_id, request.idx)
        counts.append(seen[document])
        seen[document] += 1
    return counts


def answer(
    store: AnswerStore,
    requests: Sequence[Any],
    kind: str,
    depends_on: Callable[[Any, int], tuple[dict[str, Any], str]],
    run: Callable[[PendingRequests], list[Any]],
    any_rank: Callable[[bool], bool] = bool,
    in_groups: Callable[[Any], bool] = lambda _: False,
    size: int = 1,
) -> tuple[list[Any], list[str]]:
    """Answer requests from the store, run the rest, and store each as it comes.

    Args:
        store: the store.
        requests: lm-eval Instances; the same Instance stands N times for N repeats.
        kind: `"generate_until"`, `"loglikelihood"` or `"loglikelihood_rolling"`.
        depends_on: of a request and its repeat, a JSON value of all that its answer depends on, among it under
            `versions` the versions of the code that computes it; and what is written beside the answer as `head`.
        run: answers the requests that are missing, no two with one key, and may report each as it is answered.
        any_rank: whether its argument is true on some rank. lm-eval's model classes synchronise the ranks
            inside a call, so while one rank has work, each makes the call (with a request it needs not).
        in_groups: whether a request is answered together with others: drawn by `generate` from one stream of random
            numbers. Such requests form groups in their order, and a group that lacks an answer is run as a whole, so
            that the answers are those of a run that was not killed.
        size: of a group.

    Returns:
        Responses in the order of `requests`, and their keys.
    """
    repeats = repeat_indices(requests)
    keys, columns_of = _look_up(store, requests, repeats, kind, depends_on)
    first = {key: index for index, key in reversed(list(enumerate(keys)))}
    grouped = [key for key in dict.fromkeys(keys) if in_groups(requests[first[key]])]
    run_again = _whole_groups(grouped, columns_of.keys(), size)
    indices = [first[key] for key in dict.fromkeys(keys) if key in run_again]

    def add(key: str, response: Any, **columns: Any) -> None:
        if key not in store.known:  # one of a group may be
            store.add(key, response, {**columns_of[key], **columns})

    if any_rank(bool(indices)):
        chosen = indices or [0]
        missing = PendingRequests(
            kind, add, [requests[i] for i in chosen], [keys[i] for i in chosen], [repeats[i] for i in chosen]
        )
        for key, response in zip(missing.keys, run(missing), strict=True):
            add(key, response)  # the model may not have reported this one on its own
    restore = tuple if kind == "loglikelihood" else lambda x: x
    return [restore(store.known[key]) for key in keys], keys


def _whole_groups(grouped: Sequence[str], missing: Collection[str], size: int) -> set[str]:
    """Return the missing keys, and all keys of groups that have one of them."""
    groups = [grouped[i : i + size] for i in range(0, len(grouped), size)]
    return {*missing, *(key for group in groups if not set(group).isdisjoint(missing) for key in group)}


def _look_up(
    store: AnswerStore,
    requests: Sequence[Any],
    repeats: Sequence[int],
    kind: str,
    depends_on: Callable[[Any, int], tuple[dict[str, Any], str]],
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the requests' keys; and of answers that are not stored, by key, what is written beside them."""
    keys: list[str] = []
    columns: dict[str, dict[str, Any]] = {}
    outdated: Counter[str] = Counter()
    for request, repeat in zip(requests, repeats, strict=True):
        parts, head = depends_on(request, repeat)
        versions = parts.pop("versions")
        request_digest = digest({"kind": kind, **parts})
        keys.append(key := digest([request_digest, versions]))
        if key in store.known or key in columns:
            continue
        columns[key] = {"request": request_digest, "versions": versions, "kind": kind, "task": request.task_name}
        columns[key] |= {"prompt": digest(request.args[0]), "head": head}
        if store.versions.get(request_digest, versions) != versions:
            outdated[describe_version_change(store.versions[request_digest], versions)] += 1
    for reason, count in outdated.items():
        logger.warning("%d kept answers %s; they are not used", count, reason)
    if stored := sum(key in store.known for key in keys):
        logger.info("%d of %d answers found in %s", stored, len(requests), store.folder)
    return keys, columns
