"""Last hidden states of a store's prompts, beside its outcomes.

hidden-states-RANK.safetensors    a tensor (width,) for each prompt, named by the digest of the prompt; the metadata
                                  has the schema, and digests of the model's identity and of the tensors
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lmeval_prune.artefacts import digest, read_tensors, write_bytes
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.models.hidden_states import LAST_HIDDEN_STATE, last_hidden_states
from lmeval_prune.sprint.outcomes import Outcomes

SCHEMA = "lmeval-prune/hidden-states 1"
PREFIX = "hidden-states-"
SECONDS = 20  # between two writes


def add_hidden_states(lm: Any, tasks: Mapping[str, Any], folder: Path, model: dict[str, Any]) -> None:
    """Compute and store the hidden states of this process's prompts that the folder lacks.

    Args:
        lm: a `PrunedHFLM`.
        tasks: tasks by name, with their requests.
        folder: the outcome store.
        model: identity of the model in the store.
    """
    stored_states = read_states(folder, model)
    requests = {digest(request.args[0]): request for task in tasks.values() for request in task.instances}
    missing = {prompt: request for prompt, request in requests.items() if prompt not in stored_states}
    path = folder / f"{PREFIX}{lm.rank}.safetensors"
    states = _read(path, model) if path.exists() else {}
    written = time.monotonic()
    computed = zip(missing, last_hidden_states(lm, list(missing.values())), strict=True)
    for prompt, state in computed:
        states[prompt] = state
        if time.monotonic() - written > SECONDS:
            _write(path, states, model)
            written = time.monotonic()
    if missing:
        _write(path, states, model)


def read_states(folder: Path, model: dict[str, Any]) -> dict[str, Tensor]:
    """Read all hidden states of a folder, by the digest of the prompt."""
    states: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{PREFIX}*.safetensors")):
        states |= _read(path, model)
    return states


def states_of(outcomes: Outcomes) -> Tensor:
    """Return the hidden states of the questions' prompts, shape (questions, width)."""
    states = read_states(outcomes.folder, outcomes.model) if outcomes.folder else {}
    missing = sum(row["prompt"] not in states for row in outcomes.questions)
    if missing or not states:
        raise InputError(
            f"{outcomes.folder or 'the store'} lacks {LAST_HIDDEN_STATE} of {missing} questions; run its sweep "
            f"again with --hidden_states (no answer is decoded again)"
        )
    return torch.stack([states[row["prompt"]] for row in outcomes.questions])


def _write(path: Path, states: Mapping[str, Tensor], model: dict[str, Any]) -> None:
    metadata = {"schema": SCHEMA, "model": _identity(model), "sha256": _content(states)}
    write_bytes(path, save(dict(states), metadata))


def _read(path: Path, model: dict[str, Any]) -> dict[str, Tensor]:
    remedy = "delete the file, and run the sweep again with --hidden_states"
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); {remedy}") from None
    if metadata.get("schema") != SCHEMA:
        raise InputError(f"{path} is not a file of hidden states; {remedy}")
    if metadata.get("model") != _identity(model):
        raise InputError(f"{path} has hidden states of another model than the store; {remedy}")
    states = read_tensors(path)
    if len({tuple(state.shape) for state in states.values()}) > 1 or any(s.ndim != 1 for s in states.values()):
        raise InputError(f"{path} has hidden states of different shapes; {remedy}")
    if metadata.get("sha256") != _content(states):
        raise InputError(f"{path} is damaged; {remedy}")
    return states


def _content(states: Mapping[str, Tensor]) -> str:
    """Return a digest of names and values."""
    state = hashlib.sha256()
    for name in sorted(states):
        state.update(f"{name}{states[name].dtype}{tuple(states[name].shape)}".encode())
        state.update(states[name].contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _identity(model: Mapping[str, Any]) -> str:
    """Return a digest of a store's model, without what may differ between runs."""
    return digest({name: value for name, value in model.items() if name not in ("name", "rounded", "adapters")})
