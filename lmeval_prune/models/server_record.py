"""Log-probabilities by which a served model is known again, in another run or on another server.

Nothing that a server lists tells one training from another: a file can be replaced, and a path on another machine can
hold other weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from lmeval_prune.artefacts import digest, file_lock, lock_path, read_artefact, write_artefact
from lmeval_prune.config import Finite
from lmeval_prune.errors import InputError

RECORD = "answers.servers.json"  # in the folder of an answer store
SCHEMA, VERSION = "lmeval-prune/servers", 1
# Largest root mean square difference of log-probabilities that an engine and its hardware explain.
TOLERANCES = {"float32": 0.01, "float64": 0.01}
TOLERANCE = 0.15  # in other types
Signature = list[tuple[str, float]]  # the probe text's tokens and log-probabilities


class _Content(TypedDict):
    signatures: dict[str, list[list[str | Finite]]]  # pairs, by a digest of what else is known of the model


class ServerRecord:
    """The signature of the unpruned model that answers of a folder come from.

    Args:
        path: file with signatures; None: of this run alone.
        identity: what is known of the model otherwise.
        dtype: type in which the servers compute, or an empty string.
        is_empty: whether no answers are stored yet, so that a signature in the file does not count.
    """

    def __init__(self, path: Path | None, identity: Any, dtype: str, is_empty: bool) -> None:
        self.path, self.key, self.tolerance = path, digest(identity), TOLERANCES.get(dtype, TOLERANCE)
        self._before = self._read().get(self.key)
        self._signature = None if is_empty else self._before
        self._source = f"the server that gave the answers in {path.parent}" if path else ""
        self._is_new = self._signature is None

    def check(self, url: str, signature: Signature) -> None:
        """Refuse a signature that differs from the known one by more than rounding; remember the first."""
        if self._signature is None:
            self._signature, self._source = signature, url
        elif (difference := distance(self._signature, signature)) > self.tolerance:
            stored = "" if self._is_new else f", or delete {self.path} if no answers are stored"
            raise InputError(
                f"{url} gives other log-probabilities than {self._source}: they differ by {difference:.2g}, more than "
                f"the {self.tolerance:g} of rounding, so it has other weights or another type. Start it with the same "
                f"model; for another one give another folder{stored} (probe=false leaves this check out)"
            )

    def save(self) -> None:
        """Write a new signature, when all checks have passed; that of another process, if it was first, is compared."""
        if not self.path or not self._is_new or self._signature is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(lock_path(self.path)):
            signatures, measured = self._read(), self._signature
            if signatures.get(self.key) != self._before:
                self._signature, self._is_new = signatures[self.key], False
                self.check(self._source, measured)
            else:
                write_artefact(self.path, SCHEMA, VERSION, {"signatures": {**signatures, self.key: measured}})

    def _read(self) -> dict[str, Any]:
        if not self.path or not self.path.exists():
            return {}
        signatures: dict[str, Any] = read_artefact(self.path, SCHEMA, VERSION, _Content)[0]["signatures"]
        return signatures


def distance(first: Signature, second: Signature, mismatch: float | None = None) -> float:
    """Return the root mean square difference of log-probabilities up to the first different token.

    `mismatch` is the difference of two tokens. By default that of their log-probabilities: two tokens that are nearly
    as probable can change places by rounding.
    """
    squares = []
    for (token, value), (other_token, other_value) in zip(first, second, strict=False):
        difference = value - other_value if token == other_token or mismatch is None else mismatch
        squares.append(difference * difference)  # `**` raises an error for a very large one
        if token != other_token:
            break
    return math.sqrt(sum(squares) / len(squares))
