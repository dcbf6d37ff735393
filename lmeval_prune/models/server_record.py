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
Signature = list[tuple[str, float]]  # a text's tokens and log-probabilities


class _Content(TypedDict):
    signatures: dict[str, list[list[str | Finite]]]  # pairs, by a digest of what else is known of the model


def check_record(path: Path, identity: Any, dtype: str, signature: Signature, is_empty: bool, url: str) -> None:
    """Refuse a server with other log-probabilities than those of the answers in a folder; write down the first ones.

    Args:
        path: file with signatures.
        identity: what is known of the model otherwise.
        dtype: type in which the server computes, or an empty string.
        signature: of the server's unpruned model.
        is_empty: whether no answers are stored yet, so that a signature in the file does not count.
        url: address of the server.
    """
    key, tolerance = digest(identity), TOLERANCES.get(dtype, TOLERANCE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(lock_path(path)):
        signatures: dict[str, Any] = {}
        if path.exists():
            signatures = read_artefact(path, SCHEMA, VERSION, _Content)[0]["signatures"]
        if is_empty or key not in signatures:
            write_artefact(path, SCHEMA, VERSION, {"signatures": {**signatures, key: signature}})
        elif (difference := distance(signatures[key], signature)) > tolerance:
            raise InputError(
                f"{url} gives other log-probabilities than the server that gave the answers in {path.parent}: they "
                f"differ by {difference:.2g}, more than the {tolerance:g} of rounding, so it has other weights or "
                f"another type. Start it with the same model; for another one give another folder, or delete {path} "
                f"if no answers are stored (probe=false leaves this check out)"
            )


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
