"""How heads are named: `L5H3` is head 3 of layer 5, both counted from zero."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from lmeval_prune.architectures.blocks import AttentionLayer, label_of
from lmeval_prune.artefacts import from_json
from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from lmeval_prune.architectures.model_map import ModelMap

_RANGE = r"(?:\*|\d{1,18}(?:-\d{1,18})?)"
_NAME = re.compile(rf"(?:(encoder|decoder|cross)\.)?L({_RANGE})H({_RANGE})", re.IGNORECASE)
_HELP = "write heads as L5H3, L5H0-3 or L5H*, joined by +, e.g. heads=L5H3+L15H0"


class Head(NamedTuple):
    """One attention head; `stack` is empty in a model that has one stack."""

    stack: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer_label}H{self.head}"

    @property
    def layer_label(self) -> str:
        """`"L5"`, or `"encoder.L5"` in a model with several stacks."""
        return label_of(self.stack, self.layer)

    @classmethod
    def named(cls, name: str) -> Head:
        """Read the name of one head, `L5H3` or `encoder.L5H3`, without a model.

        Raises:
            InputError: it is not the name of one head.
        """
        found = _NAME.fullmatch(name)
        if not found or not (found[2].isdigit() and found[3].isdigit()):
            raise InputError(f"{name!r} is not the name of one head, such as L5H3")
        return cls((found[1] or "").lower(), int(found[2]), int(found[3]))

    @classmethod
    def parse(cls, heads: Any, model_map: ModelMap) -> tuple[Head, ...]:
        """Read heads as a user writes them, and find them in a model.

        Args:
            heads: `"L5H3+L15H0"`, `"L5H*"`, `"L5H0-3"`, a list of such texts or of `[layer, head]`, or heads.
            model_map: the model that they are heads of.

        Returns:
            The heads in the model's order, each once.

        Raises:
            InputError: the text is malformed, or a stack, layer or head does not exist in the model.
        """
        found = {head for name in head_names(heads) for head in _expand(name, model_map)}
        place = {key: i for i, key in enumerate(model_map.by_key)}
        return tuple(sorted(found, key=lambda head: (place[head.stack, head.layer], head.head)))


def head_names(heads: Any) -> tuple[str, ...]:
    """Names (`L5H3`, `L5H0-3`, `L5H*`) in what a user wrote, each once, checked as far as that goes without a model.

    Raises:
        InputError: the text is malformed, or names nothing.
    """
    if isinstance(heads, str):
        text = heads.strip()
        if text[:1] == "[":
            try:
                listed = from_json(text, "heads")
            except InputError:
                text = text.strip("[]").replace("'", "").replace('"', "")
            else:
                return head_names(listed)
        pieces: Iterable[Any] = re.split(r"\s*[+,;]\s*|\s+", text)
    elif isinstance(heads, list | tuple) and len(heads) == 2 and all(isinstance(x, int) for x in heads):
        pieces = [heads]
    elif isinstance(heads, list | tuple):
        pieces = heads
    else:
        raise InputError(f"heads={heads!r} cannot be read; {_HELP}")
    names = tuple(dict.fromkeys(name for piece in pieces for name in _names(piece)))
    if not names:
        raise InputError(f"heads={heads!r} names no head; leave heads out to run the unpruned model, or {_HELP}")
    return names


def _names(piece: Any) -> list[str]:
    if isinstance(piece, Head):
        return [str(piece)]
    if isinstance(piece, list | tuple):
        if len(piece) != 2 or not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in piece):
            raise InputError(f"head {piece!r} is not a [layer, head] pair; {_HELP}")
        return [f"L{piece[0]}H{piece[1]}"]
    if not isinstance(piece, str):
        raise InputError(f"head {piece!r} cannot be read; {_HELP}")
    if not piece:
        raise InputError(f"an empty name stands between the heads; {_HELP}")
    if "+" in piece:
        return [name for part in piece.split("+") for name in _names(part.strip())]
    found = _NAME.fullmatch(piece)
    if not found:
        raise InputError(f"head {piece!r} cannot be read; {_HELP}")
    for text in found.groups()[1:]:
        first, _, last = text.partition("-")
        if last and int(first) > int(last):
            raise InputError(f"head {piece!r}: the range {text} runs backwards; {_HELP}")
    return [f"{found[1].lower() + '.' if found[1] else ''}L{found[2]}H{found[3]}"]


def _expand(name: str, model_map: ModelMap) -> list[Head]:
    """Heads of a model that a name means."""
    found = _NAME.fullmatch(name)
    assert found
    stack = found[1] or ""
    if stack not in model_map.stacks:
        several = model_map.stacks != ("",)
        fix = f"name the stack, e.g. {model_map.stacks[0]}.L0H0" if several else "write it without a stack"
        has = f"this model's stacks are {', '.join(model_map.stacks)}" if several else "this model has one stack"
        raise InputError(f"head {name}: {has}; {fix}")
    layers = [layer for layer in model_map.attention if layer.stack == stack]
    first, last = _bounds(found[2], layers[0].index, layers[-1].index)
    chosen = [layer for layer in layers if first <= layer.index <= last]
    if found[2] != "*" and len(chosen) != last - first + 1:
        present = {layer.index for layer in chosen}
        missing = next(i for i in range(first, last + 1) if i not in present)
        known = f"{layers[0].index} to {layers[-1].index}"
        raise InputError(f"head {name}: the model has no attention in layer {missing} (layers {known}, counted from 0)")
    return [head for layer in chosen for head in _in_layer(name, found[3], layer)]


def _in_layer(name: str, text: str, layer: AttentionLayer) -> list[Head]:
    first, last = _bounds(text, 0, layer.heads - 1)
    if last >= layer.heads:
        raise InputError(f"head {name}: layer {layer.index} has {layer.heads} heads, 0 to {layer.heads - 1}")
    return [Head(layer.stack, layer.index, head) for head in range(first, last + 1)]


def _bounds(text: str, lowest: int, highest: int) -> tuple[int, int]:
    """First and last number of `*`, `3` or `3-5`."""
    if text == "*":
        return lowest, highest
    first, _, last = text.partition("-")
    return int(first), int(last or first)
