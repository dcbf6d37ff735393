"""The answer store (`responses=FOLDER`), also part of a sweep's folder.

lm-eval's cache keys an answer by prompt and generation settings only. This store keys it by everything that determines
it: the request's kind, prompt and settings, the model (weights, tokenizer, dtype, other arguments), the interventions
(of a routed attempt: its heads), the versions of the code and, if the answer is sampled, the seed. The task, the
attempt's number and the router are not in the key, so other runs with the same request find the answer. Answers of
other versions are counted in a warning and not used.

    answers.json      schema
    rank-*.jsonl      answers in the order of computation, one file per process
    answers.jsonl     answers of earlier runs, sorted by key
    answers.servers.json  of `pruned-server`: log-probabilities by which a server is known again

Each line ends in a digest of itself. A line without the right one was truncated or damaged, and is as if it had never
been written: its request is answered again.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from weakref import finalize

from annotated_types import Len, Lt
from filelock import Timeout

from lmeval_prune.artefacts import (
    NONFINITE_REMEDY,
    digest,
    file_lock,
    lock_path,
    open_append,
    read_artefact,
    validate_json,
    write_artefact,
    write_bytes,
)
from lmeval_prune.errors import InputError, disk_error, report_write_errors

logger = logging.getLogger(__name__)
SCHEMA = "lmeval-prune/answers"
SCHEMA_VERSION = 1
Likelihood = Annotated[float, Lt(float("inf"))]  # and not NaN
RESPONSE_TYPES: dict[str, Any] = {  # JSON types of responses by kind of request
    "generate_until": str,
    "loglikelihood": Annotated[list[Likelihood | bool], Len(2, 2)],
    "loglikelihood_rolling": Likelihood,
}
MIN_REPORTED_SHARE = 0.1  # of answers that were cut off: their accuracy measures the limit, not the model


# ---------------------------------------------------------------------- lengths of answers


class Ending(NamedTuple):
    """Length of an answer, and how it ended."""

    length: int  # tokens, with the EOS token
    cut_off: bool  # at `max_gen_toks`, without an EOS token or a stop string


def summarize_lengths(endings: Iterable[Ending | None], limit: int | None) -> dict[str, Any]:
    """Return the number of answers, that of `unknown` length, and of the others the share cut off and mean length."""
    endings = list(endings)
    known = [ending for ending in endings if ending is not None]
    return {
        "answers": len(endings),
        "unknown": len(endings) - len(known),
        "cut_off": sum(ending.cut_off for ending in known) / len(known) if known else None,
        "mean_tokens": sum(ending.length for ending in known) / len(known) if known else None,
        "max_gen_toks": limit,
    }


def merge_lengths(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = [part["answers"] - part["unknown"] for part in parts]
    total: dict[str, Any] = {name: sum(part[name] for part in parts) for name in ("answers", "unknown")}
    for name in ("cut_off", "mean_tokens"):
        weighted = sum((part[name] or 0) * count for part, count in zip(parts, counts, strict=True))
        total[name] = weighted / sum(counts) if sum(counts) else None
    return {**total, "max_gen_toks": max((part["max_gen_toks"] or 0 for part in parts), default=0) or None}


def cut_off_note(answers: Mapping[str, Any]) -> str:
    """Return a note on answers that were cut off; empty if they are few."""
    if (answers["cut_off"] or 0) < MIN_REPORTED_SHARE:
        return ""
    limit = f"{answers['max_gen_toks']} tokens" if answers["max_gen_toks"] else "the limit of tokens"
    return f"{answers['cut_off']:.0%} of the answers were cut off at {limit}"


# ---------------------------------------------------------------------- files


class AnswerStore:
    """Answers of one or more runs in a folder.

    Args:
        folder: created if it does not exist.
        rank: number of this process, which alone writes `rank-RANK.jsonl`. None: the first number without a writer.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int | None = 0) -> None:
        self.folder = Path(folder)
        header = self.folder / "answers.json"
        self._file: Any = None
        self.responses: dict[str, Any] = {}  # by key
        self.endings: dict[str, Ending] = {}  # by key, if stored
        self.versions: dict[str, dict[str, Any]] = {}  # of the code, by request (a digest, see `answer_requests`)
        with ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if header.exists():
                    read_artefact(header, SCHEMA, SCHEMA_VERSION)
                self.path = self._lock(rank, stack)
                if os.path.lexists(self.path):
                    open_append(self.path).close()
            except Timeout:
                raise InputError(
                    f"another run is writing to {self.folder}; wait for it, or give another folder"
                ) from None
            except OSError as error:
                raise disk_error(error, folder) or InputError(
                    f"responses={folder} cannot be used ({error}); give a writable folder"
                ) from error
            if not header.exists():  # several ranks may write the same content
                write_artefact(header, SCHEMA, SCHEMA_VERSION, {})
            for record in read_answers(self.folder):
                self._remember(record["key"], record["response"], record)
                if "request" in record:
                    self.versions[record["request"]] = record["versions"]
            self._release = finalize(self, stack.pop_all().close)  # also when the store is garbage-collected

    def _lock(self, rank: int | None, stack: ExitStack) -> Path:
        for number in itertools.count() if rank is None else [rank]:
            path = self.folder / f"rank-{number}.jsonl"
            try:
                stack.enter_context(file_lock(lock_path(path)))
                return path
            except Timeout:
                if rank is not None:
                    raise
        raise AssertionError

    def add(self, key: str, response: Any, columns: dict[str, Any]) -> None:
        """Write one answer and flush it to the system; `columns` are further fields of its record, as JSON."""
        try:
            body = json.dumps({"key": key, **columns, "response": response}, ensure_ascii=False)[:-1].encode()
            line, kind = _closed(body), RESPONSE_TYPES.get(columns.get("kind") or "", Any)
            validate_json(json.loads(line)["response"], kind, self.path)
        except (InputError, UnicodeEncodeError):  # half a character is not UTF-8
            raise InputError(
                f"the model's answer to a {columns.get('kind')} request of task {columns.get('task')!r} is "
                f"{str(response)[:60]}, which cannot be stored; if it is NaN, {NONFINITE_REMEDY}"
            ) from None
        try:
            with report_write_errors(self.path):
                if self._file is None:
                    content = self.path.read_bytes() if self.path.exists() else b""
                    self._file = open_append(self.path)
                    self._file.write("\n" if content and not content.endswith(b"\n") else "")
                self._file.write(line.decode())
                self._file.flush()
        except InputError:
            self._close_file()
            raise
        self._remember(key, response, columns)

    def _remember(self, key: str, response: Any, columns: dict[str, Any]) -> None:
        self.responses[key] = response
        if columns.get("length") is not None and columns.get("cut_off") is not None:
            self.endings[key] = Ending(columns["length"], columns["cut_off"])

    def close(self) -> None:
        self._close_file()
        self._release()

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # `add` has reported it
                self._file.close()
            self._file = None

    def compact(self) -> None:
        """Move the answers of this and of ended processes into `answers.jsonl`, sorted by key."""
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
            lines = {json.loads(line)["key"]: line for line in _whole_lines(self.folder)}
            write_bytes(self.folder / "answers.jsonl", b"".join(lines[key] for key in sorted(lines)))
            for path in paths:
                path.unlink()


def read_answers(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a store: `key`, `response`, and the columns that `AnswerStore.add` was given."""
    return map(json.loads, _whole_lines(folder))


def _whole_lines(folder: Path) -> Iterator[bytes]:
    for path in [*folder.glob("answers.jsonl"), *sorted(folder.glob("rank-*.jsonl"))]:
        with path.open("rb") as file:
            yield from (line for line in file if line == _closed(line[: -len(_closed(b""))]))


def _closed(body: bytes) -> bytes:
    """Return a line of the store: a JSON object, given without its closing brace, and the digest of what is given."""
    return b'%b, "digest": "%b"}\n' % (body, blake2b(body, digest_size=8).hexdigest().encode())


# ---------------------------------------------------------------------- requests


@dataclass
class PendingRequests:
    """Requests of one kind whose answers are not stored yet."""

    kind: str
    add: Callable[..., None]  # stores a response; called with a key, the response and further columns
    requests: Sequence[Any]
    keys: Sequence[Any]  # of the requests in the store; without a store their indices
    repeats: Sequence[int]  # for each request, the number of earlier requests for the same document

    @cached_property
    def _keys_by_arguments(self) -> dict[str, deque[Any]]:
        keys: dict[str, deque[Any]] = defaultdict(deque)
        for request, key in zip(self.requests, self.keys, strict=True):
            keys[_as_text(request.args)].append(key)
        return keys

    def part(self, indices: Sequence[int]) -> PendingRequests:
        columns = [[values[index] for index in indices] for values in (self.requests, self.keys, self.repeats)]
        return PendingRequests(self.kind, self.add, *columns)

    def answered(self, attr: str, args: Iterable[Any], response: Any, **columns: Any) -> None:
        """Store a response that lm-eval reports by a request's arguments, for the next request with these arguments.

        lm-eval reports all requests of a batch with the settings of the first, so there may be no such request.
        """
        queue = self._keys_by_arguments.get(_as_text(args)) if attr == self.kind else None
        if queue:
            self.add(queue.popleft(), response, **columns)


def _as_text(args: Iterable[Any]) -> str:
    return json.dumps(list(args), sort_keys=True, default=str)


def repeat_indices(requests: Iterable[Any]) -> list[int]:
    """Return for each request the number of earlier requests with the same task, document and index."""
    counts: Counter[tuple[Any, ...]] = Counter()
    indices = []
    for request in requests:
        document = (request.task_name, request.doc_id, request.idx)
        indices.append(counts[document])
        counts[document] += 1
    return indices


# Returns for a request and its repeat everything that determines the answer as JSON, including `versions` of the code,
# and the `head` that is stored beside the answer.
KeyParts = Callable[[Any, int], tuple[dict[str, Any], str]]


def answer_requests(
    store: AnswerStore,
    requests: Sequence[Any],
    kind: str,
    key_parts: KeyParts,
    run: Callable[[PendingRequests], list[Any]],
    any_rank: Callable[[bool], bool] = bool,
    is_grouped: Callable[[Any], bool] = lambda _: False,
    group_size: int = 1,
) -> tuple[list[Any], list[str]]:
    """Answer requests from the store, run the rest, and store each answer as soon as it is computed.

    Args:
        store, kind, key_parts: the store, the requests' kind, and what determines an answer.
        requests: lm-eval instances; the same instance occurs N times for N repeats.
        run: answers pending requests; may report answers earlier by `add` (with `is_answer=False` what is for this
            run only) or `answered`.
        any_rank: whether a flag is true on some rank: `hf` synchronises the ranks, so if one calls `run`, all do, if
            necessary with a stored request.
        is_grouped: whether a request is sampled from one stream of random numbers with others: `group_size` of them,
            which are all run if one lacks an answer, so that resuming does not change answers.

    Returns:
        Responses in the order of `requests`, and their keys.
    """
    repeats = repeat_indices(requests)
    keys: list[str] = []
    new_columns: dict[str, dict[str, Any]] = {}  # of answers that are not stored, by key
    outdated = 0
    prompt_digest = cache(digest)  # repeats of a request have the same
    for request, repeat in zip(requests, repeats, strict=True):
        parts, head = key_parts(request, repeat)
        versions = parts.pop("versions")
        request_digest = digest({"kind": kind, **parts})
        key = digest([request_digest, versions])
        keys.append(key)
        if key in store.responses or key in new_columns:
            continue
        new_columns[key] = {"request": request_digest, "versions": versions, "kind": kind, "task": request.task_name}
        new_columns[key] |= {"prompt": prompt_digest(request.args[0]), "head": head}
        outdated += store.versions.get(request_digest, versions) != versions
    if outdated:
        logger.warning("%d stored answers were made by other versions of the code; they are not used", outdated)
    if stored := sum(key in store.responses for key in keys):
        logger.info("%d of %d answers found in %s", stored, len(requests), store.folder)
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    grouped = [key for key, index in first.items() if is_grouped(requests[index])]
    groups = [grouped[i : i + group_size] for i in range(0, len(grouped), group_size)]
    rerun = {*new_columns, *(key for group in groups if not new_columns.keys().isdisjoint(group) for key in group)}
    indices = [index for key, index in first.items() if key in rerun]

    def add(key: str, response: Any, is_answer: bool = True, **columns: Any) -> None:
        if key in store.responses:  # of a group that is run again
            return
        if is_answer:
            store.add(key, response, {**new_columns[key], **columns})
        else:
            store.responses[key] = response

    if any_rank(bool(indices)):
        pending = PendingRequests(kind, add, requests, keys, repeats).part(indices or [0])
        for key, response in zip(pending.keys, run(pending), strict=True):
            add(key, response)
    responses = [store.responses[key] for key in keys]
    return [tuple(response) if isinstance(response, list) else response for response in responses], keys
