"""Our resumable store of model responses, the alternative to `--use_cache` (`responses=FOLDER`).

lm-eval's cache keys a response by prompt and generation settings alone. Here a response is keyed by task,
document, repeat, request type, prompt, generation settings, sampling seed and everything that shapes the
model (weights, tokenizer, pruned heads, other settings), and is handed to the operating system as soon as
it exists.

Each rank appends to its own JSON-lines file; readers merge them all, so a run may go on with another
number of ranks. A line that a kill cut short is ignored.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import digest, read_artefact, write_artefact
from lmeval_prune.errors import InputError
from lmeval_prune.journal import Journal, read_journals

logger = logging.getLogger(__name__)
SCHEMA = "lmeval-prune/responses"
SCHEMA_VERSION = 1
Answered = Callable[[str, tuple[Any, ...], Any], None]


class ResponseStore:
    """Responses of one or more runs in a folder.

    Args:
        folder: made if it does not exist.
        rank: this process; it alone writes `rank-RANK.jsonl`.

    Raises:
        InputError: the folder holds something else, or another run is writing to it.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int = 0) -> None:
        self.folder = Path(folder)
        about = self.folder / "store.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            foreign = [
                p.name for p in self.folder.iterdir() if not p.name.lstrip(".").startswith(("store.json", "rank-"))
            ]
            if foreign and not about.exists():
                raise InputError(
                    f"responses={folder} holds {foreign[0]} and is not a response store; give a new folder"
                )
            if about.exists():
                read_artefact(about, SCHEMA, SCHEMA_VERSION)
            else:  # several ranks may do this at once; they write the same
                write_artefact(about, SCHEMA, SCHEMA_VERSION, {})
            self._journal = Journal(self.folder, rank)
        except OSError as error:
            raise InputError(
                f"responses={folder} cannot be used ({error}); give a folder that can be written"
            ) from error
        self.known: dict[str, Any] = {
            record["key"]: record["response"]
            for record in read_journals(self.folder)
            if isinstance(record.get("key"), str) and "response" in record
        }

    def add(self, key: str, response: Any, about: dict[str, Any]) -> None:
        """Write one response; it is with the operating system when this returns."""
        self.known[key] = response
        self._journal.add({"key": key, **about, "response": response})

    def close(self) -> None:
        """Close the file and let other runs write."""
        self._journal.close()


class Recorder:
    """A cache hook (lm-eval's word) that stores each response when the model reports it.

    lm-eval's model class calls `add_partial(attr, args, response)` as soon as a request is answered.
    """

    def __init__(self, inner: Any, answered: Answered) -> None:
        self.inner = inner
        self.answered = answered

    def add_partial(self, attr: str, req: Iterable[Any], res: Any) -> None:
        """Pass a response on to the store and to lm-eval's own hook."""
        self.answered(attr, tuple(req), res)
        self.inner.add_partial(attr, req, res)


@dataclass(frozen=True)
class Missing:
    """Requests whose responses are not stored yet.

    Attributes:
        requests, keys: the requests and their keys in the store.
        repeats: of each, how many requests for the same document came before it.
        answered: to be called as lm-eval's cache hook is, as soon as some request has its response.
        record: to be called with a key and its response, where it is known which request was answered.
    """

    requests: list[Any]
    keys: list[str]
    repeats: list[int]
    answered: Answered
    record: Callable[[str, Any], None]


def occurrences(requests: Iterable[Any]) -> list[int]:
    """Of each request, how many for the same task, document and index came before it."""
    seen: dict[tuple[Any, ...], int] = defaultdict(int)
    found = []
    for request in requests:
        place = (request.task_name, request.doc_id, request.idx)
        found.append(seen[place])
        seen[place] += 1
    return found


def answer(
    store: ResponseStore,
    requests: Sequence[Any],
    kind: str,
    context: Callable[[Any, int], dict[str, Any]],
    run: Callable[[Missing], list[Any]],
    any_rank: Callable[[bool], bool] = bool,
) -> list[Any]:
    """Answer requests from the store, run the rest, and store each as it comes.

    Args:
        store: the store.
        requests: lm-eval Instances; the same Instance stands N times for N repeats.
        kind: `"generate_until"`, `"loglikelihood"` or `"loglikelihood_rolling"`.
        context: of a request and its repeat, a JSON value of everything outside it that its response depends on.
        run: answers the requests it is given, whose keys are its second argument; calls its third
            argument for each as it is answered.
        any_rank: whether its argument is true on some rank. lm-eval's model classes synchronise the ranks
            inside a call, so while one rank has work, each makes the call (with a request it needs not).

    Returns:
        Responses in the order of `requests`.
    """
    repeats = occurrences(requests)
    keys: list[str] = []
    about: dict[str, dict[str, Any]] = {}
    for request, repeat in zip(requests, repeats, strict=True):
        where = {"task": request.task_name, "doc_id": request.doc_id, "idx": request.idx, "repeat": repeat}
        where["kind"] = kind
        key = digest({**where, "args": list(request.args), "context": context(request, repeat)})
        keys.append(key)
        about[key] = where
    missing = [i for i, key in enumerate(keys) if key not in store.known]
    if len(missing) < len(requests):
        logger.info("%d of %d responses found in %s", len(requests) - len(missing), len(requests), store.folder)
    pending: dict[str, deque[str]] = defaultdict(deque)
    for i in missing:
        pending[_text(requests[i].args)].append(keys[i])

    def answered(attr: str, args: tuple[Any, ...], response: Any) -> None:
        queue = pending.get(_text(args))
        if attr == kind and queue:
            key = queue.popleft()
            store.add(key, response, about[key])

    def record(key: str, response: Any) -> None:
        store.add(key, response, about[key])

    def part(places: Sequence[int], *reports: Any) -> Missing:
        return Missing([requests[i] for i in places], [keys[i] for i in places], [repeats[i] for i in places], *reports)

    if any_rank(bool(missing)) and not missing:
        run(part([0], lambda *_: None, lambda *_: None))
    if missing:
        responses = run(part(missing, answered, record))
        for i, response in zip(missing, responses, strict=True):
            if keys[i] not in store.known:  # the model did not report this one on its own
                store.add(keys[i], response, about[keys[i]])
    restore = tuple if kind == "loglikelihood" else lambda x: x
    return [restore(store.known[key]) for key in keys]


def _text(args: Iterable[Any]) -> str:
    return json.dumps(list(args), sort_keys=True, default=str)
