"""Card of a router."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lmeval_prune.cards.card import LIBRARY, Card, code, command_section, quoted, table
from lmeval_prune.cards.command import without_folders
from lmeval_prune.cards.origin import Origin
from lmeval_prune.checkpoints.embedded import MODELS
from lmeval_prune.reporting.documents import escape_markdown, inline_code

LIMITS = (
    "It chooses among the heads of the model whose answers it was fitted to; with another model it is refused. "
    "The validation questions are few, and of the same tasks: measure it on the test questions of yours, and against "
    "sampling with as many tries."
)


def router_card(name: str, method: str, encoder: str, pool: Sequence[str], about: Mapping[str, Any]) -> Card:
    """Return the card of a router.

    Args:
        name: of its folder.
        method: that fitted it.
        encoder: the sentence encoder, or `last_hidden_state`.
        pool: names of its variants.
        about: details of the fit, as in `router.json`.
    """
    origin = _origin(about)
    tasks = ", ".join(inline_code(task) for task in about.get("tasks", {})) or "tasks that are not recorded"
    reads_states = encoder == "last_hidden_state"
    embedded_by = "the last hidden states of the model" if reads_states else inline_code(without_folders(encoder))
    chosen = ", ".join(f"{key} = {value}" for key, value in about.get("chosen", {}).items())
    settings = f" ({escape_markdown(chosen)})" if chosen else ""
    method_text = (
        f"Method `{method}`{settings}; questions are embedded by {embedded_by}.\n\n"
        f"Fitted to {about.get('questions', 'some')} questions of {tasks}."
    )
    return Card(
        name,
        origin,
        "adapter",
        LIBRARY,
        ["router", "sprint", method],
        f"A router for {origin.text}: for each question it orders {len(pool)} variants of the model, most of them with "
        f"one attention head pruned, so that each of N tries is answered by another variant.",
        {
            "How it was made": command_section(method_text),
            "How to use it": _how_to_use(name, encoder),
            "Results": _results(about),
            "Limits": LIMITS,
        },
    )


def _origin(about: Mapping[str, Any]) -> Origin:
    """Return the origin of the swept model; sweeps of earlier versions recorded a short name only."""
    name = str(about.get("model", {}).get("name", ""))
    if "origin" in about:
        return Origin.recorded(name, about["origin"])
    return Origin.of(name) if name in MODELS else Origin(name)


def _how_to_use(name: str, encoder: str) -> str:
    arguments = f"pretrained=MODEL,router={shlex.quote(name)}"
    command = f"lm_eval --model pruned-hf --model_args {arguments} --tasks prune_gsm8k_pass8"
    text = f"{code('bash', command)}\n\nMODEL is the model above; the task is one of those that ask for several tries."
    if encoder == "last_hidden_state":
        return text
    program = (
        f"from lmeval_prune.sprint.router import Router\n\n"
        f"router = Router.load({quoted(name)})\n"
        f'print(router.order(["What is 3 + 4?"])[0][:8])  # heads to prune, in the order of the tries'
    )
    return f"{code('python', program)}\n\n{text}"


def _results(about: Mapping[str, Any]) -> str:
    """Return the share of validation questions that the first k tries solve."""
    passes = about.get("validation_pass")
    if not passes:
        return "No questions were held out for validation: nothing was measured."
    rows = [{"tries": key.removeprefix("pass@"), "solved": f"{value:.3f}"} for key, value in passes.items()]
    dense = about.get("validation_dense")
    against = f" The unpruned model solves {dense:.3f} with one try." if dense is not None else ""
    count = about.get("validation_questions", "the")
    return (
        f"Share of {count} validation questions that one of the first tries solves.{against}\n\n{table(rows, 'tries')}"
    )
