"""Lengths of answers, and how many were cut off by `max_gen_toks`: their accuracy is the limit's, not the model's."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Interval
from typing_extensions import TypedDict

logger = logging.getLogger(__name__)
MANY = 0.1  # a share of answers that is worth a word
# a task whose answers end at these alone expects a chat: nothing else ends a turn
_ENDS_OF_TURNS = {"<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>"}


class Lengths(TypedDict):
    """Lengths of answers; see `lengths`."""

    answers: Annotated[int, Ge(0)]
    unknown: Annotated[int, Ge(0)]
    cut_off: Annotated[float, Interval(ge=0, le=1)] | None
    mean_tokens: Annotated[float, Interval(ge=0, lt=math.inf)] | None
    max_gen_toks: int | None


class Ending(NamedTuple):
    """The end of an answer."""

    length: int  # its tokens, an end token included
    cut_off: bool  # whether there was no room for more, and neither an end token nor a stop text


def lengths(endings: Iterable[Ending | None], limit: int | None) -> dict[str, Any]:
    """Return the share of answers that were cut off at `limit` tokens and their mean number of tokens, as JSON."""
    endings = list(endings)
    known = [ending for ending in endings if ending is not None]
    return {
        "answers": len(endings),
        "unknown": len(endings) - len(known),
        "cut_off": sum(ending.cut_off for ending in known) / len(known) if known else None,
        "mean_tokens": sum(ending.length for ending in known) / len(known) if known else None,
        "max_gen_toks": limit,
    }


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the lengths of several parts of the answers as those of all."""
    known = [part["answers"] - part["unknown"] for part in parts]
    total: dict[str, Any] = {name: sum(part[name] for part in parts) for name in ("answers", "unknown")}
    for name in ("cut_off", "mean_tokens"):
        weighted = sum((part[name] or 0) * count for part, count in zip(parts, known, strict=True))
        total[name] = weighted / sum(known) if sum(known) else None
    return {**total, "max_gen_toks": max((part["max_gen_toks"] or 0 for part in parts), default=0) or None}


def cut_off(answers: Mapping[str, Any]) -> str:
    """Say how many answers were cut off, if they are many; empty otherwise."""
    if (answers["cut_off"] or 0) < MANY:
        return ""
    limit = f"{answers['max_gen_toks']} tokens" if answers["max_gen_toks"] else "the limit of tokens"
    return f"{answers['cut_off']:.0%} of the answers were cut off at {limit}"


def by_task(requests: Sequence[Any], endings: Sequence[Ending | None], usual: int) -> dict[str, dict[str, Any]]:
    """Return the lengths of the answers of each task; `usual` is the limit where a task does not say."""
    by_name: dict[str, list[Ending | None]] = {}
    limits: dict[str, int] = {}
    for request, ending in zip(requests, endings, strict=True):
        settings, name = request.args[1], str(request.task_name)
        limit = next((settings[key] for key in ("max_gen_toks", "max_new_tokens", "max_tokens") if key in settings), 0)
        by_name.setdefault(name, []).append(ending)
        limits[name] = max(limits.get(name, 0), int(limit or usual))
    return {name: lengths(several, limits[name]) for name, several in by_name.items()}


def warn_without_template(requests: Sequence[Any], tokenizer: Any) -> None:
    """Log a line for each task that expects a chat and is asked without the model's chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return
    mark = "\x00"
    try:
        chat = [{"role": "user", "content": mark}]
        before, _, after = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).partition(
            mark
        )
    except Exception:  # a template that takes other messages
        return
    for name, request in {str(request.task_name): request for request in requests}.items():
        prompt, until = request.args[0], request.args[1].get("until") or []
        ends = {until} if isinstance(until, str) else set(until)
        templated = not isinstance(prompt, str) or bool(
            (before and prompt.startswith(before)) or (after and prompt.endswith(after))
        )
        if ends and ends <= _ENDS_OF_TURNS and not templated:
            logger.warning(
                "%s expects a chat, and is asked without this model's chat template: many models then end at once and "
                "score 0; give --apply_chat_template",
                name,
            )
