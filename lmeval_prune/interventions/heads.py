"""Naming heads: `L5H3` is head 3 of layer 5, both counted from zero."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmeval_prune.architectures import AttentionLayer, AttentionMap
from lmeval_prune.errors import InputError

_RANGE = r"(?:\*|\d+(?:-\d+)?)"
_SELECTOR = re.compile(rf"(?:(encoder|decoder|cross)\.)?L({_RANGE})H({_RANGE})", re.IGNORECASE)
_HELP = "write heads as L5H3, L5H0-3 or L5H*, joined by +, e.g. heads=L5H3+L15H0"


class Head(NamedTuple):
    """One attention head; `stack` is empty in a model that has one stack."""

    stack: str
    layer: int
    head: int

    def __str__(self) -> str:
        prefix = f"{self.stack}." if self.stack else ""
        return f"{prefix}L{self.layer}H{self.head}"


@dataclass(frozen=True)
class Selector:
    """Heads of layers, each given by a number, a range `(first, last)` or None for all."""

    stack: str
    layers: tuple[int, int] | None
    heads: tuple[int, int] | None

    def __str__(self) -> str:
        prefix = f"{self.stack}." if self.stack else ""
        return f"{prefix}L{_range_text(self.layers)}H{_range_text(self.heads)}"

    def expand(self, attention: AttentionMap) -> list[Head]:
        """Heads of this model that are meant.

        Raises:
            InputError: a stack, layer or head does not exist there.
        """
        if self.stack not in attention.stacks:
            several = attention.stacks != ("",)
            fix = f"name the stack, e.g. {attention.stacks[0]}.L0H0" if several else "write it without a stack"
            has = f"this model's stacks are {', '.join(attention.stacks)}" if several else "this model has one stack"
            raise InputError(f"head {self}: {has}; {fix}")
        layers = [layer for layer in attention if layer.stack == self.stack]
        wanted = self.layers or (layers[0].index, layers[-1].index)
        chosen = [layer for layer in layers if wanted[0] <= layer.index <= wanted[1]]
        if self.layers and len(chosen) != wanted[1] - wanted[0] + 1:
            present = {layer.index for layer in chosen}
            missing = next(i for i in range(wanted[0], wanted[1] + 1) if i not in present)
            known = f"{layers[0].index} to {layers[-1].index}"
            raise InputError(
                f"head {self}: the model has no attention in layer {missing} (layers {known}, counted from 0)"
            )
        return [head for layer in chosen for head in self._in_layer(layer)]

    def _in_layer(self, layer: AttentionLayer) -> list[Head]:
        first, last = self.heads or (0, layer.heads - 1)
        if last >= layer.heads:
            raise InputError(f"head {self}: layer {layer.index} has {layer.heads} heads, 0 to {layer.heads - 1}")
        return [Head(self.stack, layer.index, head) for head in range(first, last + 1)]


def _range_text(bounds: tuple[int, int] | None) -> str:
    if bounds is None:
        return "*"
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]}-{bounds[1]}"


def _range(text: str, whole: str) -> tuple[int, int] | None:
    if text == "*":
        return None
    first, _, last = text.partition("-")
    bounds = (int(first), int(last or first))
    if bounds[0] > bounds[1]:
        raise InputError(f"head {whole!r}: the range {text} runs backwards; {_HELP}")
    return bounds


def parse_selectors(value: Any) -> tuple[Selector, ...]:
    """Read heads from `"L5H3+L15H0"`, from a list of such texts, or from a list of `[layer, head]`.

    Raises:
        InputError: the text is malformed, or names nothing.
    """
    if isinstance(value, str):
        text = value.strip()
        if text[:1] == "[":
            import json

            try:
                return parse_selectors(json.loads(text))
            except json.JSONDecodeError:
                text = text.strip("[]").replace("'", "").replace('"', "")
        pieces: Iterable[Any] = re.split(r"\s*[+,;]\s*|\s+", text)
    elif isinstance(value, list | tuple) and value and all(isinstance(x, int) for x in value) and len(value) == 2:
        pieces = [value]
    elif isinstance(value, list | tuple):
        pieces = value
    else:
        raise InputError(f"heads={value!r} cannot be read; {_HELP}")
    selectors: list[Selector] = []
    for piece in pieces:
        selectors += _parse_piece(piece)
    if not selectors:
        raise InputError(f"heads={value!r} names no head; leave heads out to run the unpruned model, or {_HELP}")
    return tuple(dict.fromkeys(selectors))


def _parse_piece(piece: Any) -> list[Selector]:
    if isinstance(piece, list | tuple):
        if len(piece) != 2 or not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in piece):
            raise InputError(f"head {piece!r} is not a [layer, head] pair; {_HELP}")
        return [Selector("", (piece[0], piece[0]), (piece[1], piece[1]))]
    if not isinstance(piece, str):
        raise InputError(f"head {piece!r} cannot be read; {_HELP}")
    if not piece:
        raise InputError(f"an empty name stands between the heads; {_HELP}")
    if "+" in piece:
        return [selector for part in piece.split("+") for selector in _parse_piece(part.strip())]
    found = _SELECTOR.fullmatch(piece)
    if not found:
        raise InputError(f"head {piece!r} cannot be read; {_HELP}")
    stack, layers, heads = found.groups()
    return [Selector((stack or "").lower(), _range(layers, piece), _range(heads, piece))]
