"""Names of heads: `L5H3` is head 3 of layer 5, both counted from zero."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from lmeval_prune.architectures.blocks import label_of
from lmeval_prune.artefacts import parse_json
from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from lmeval_prune.architectures.model_map import ModelMap

_RANGE = r"(?:\*|\d{1,18}(?:-\d{1,18})?)"
_NAME = re.compile(rf"(?:(?P<stack>encoder|decoder|cross)\.)?L(?P<layer>{_RANGE})H(?P<head>{_RANGE})", re.IGNORECASE)
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
        match = _NAME.fullmatch(name)
        if not match or not (match["layer"].isdigit() and match["head"].isdigit()):
            raise InputError(f"{name!r} is not the name of one head, such as L5H3")
        return cls((match["stack"] or "").lower(), int(match["layer"]), int(match["head"]))

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
        parsed = {head for name in head_names(heads) for head in _expand(name, model_map)}
        order = {(layer.stack, layer.index): position for position, layer in enumerate(model_map.attention)}
        return tuple(sorted(parsed, key=lambda head: (order[head.stack, head.layer], head.head)))


def head_names(heads: Any) -> tuple[str, ...]:
    """Return the names (`L5H3`, `L5H0-3`, `L5H*`) that a user wrote, each once; they are checked without a model.

    Raises:
        InputError: the text is malformed, or names nothing.
    """
    pieces: Iterable[Any]
    if isinstance(heads, str):
        text = heads.strip()
        if text[:1] == "[":
            try:
                listed = parse_json(text, "heads")
            except InputError:
                text = text.strip("[]").replace("'", "").replace('"', "")
            else:
                return head_names(listed)
        pieces = re.split(r"\s*[+,;]\s*|\s+", text)
    elif not isinstance(heads, list | tuple):
        raise InputError(f"heads={heads!r} cannot be read; {_HELP}")
    else:
        pieces = [heads] if len(heads) == 2 and all(isinstance(item, int) for item in heads) else heads
    names = tuple(dict.fromkeys(name for piece in pieces for name in _names(piece)))
    if not names:
        raise InputError(f"heads={heads!r} names no head; leave heads out to run the unpruned model, or {_HELP}")
    return names


def _names(piece: Any) -> list[str]:
    if isinstance(piece, Head):
        return [str(piece)]
    if isinstance(piece, list | tuple):
        if len(piece) != 2 or not all(type(number) is int and number >= 0 for number in piece):
            raise InputError(f"head {piece!r} is not a [layer, head] pair; {_HELP}")
        piece = f"L{piece[0]}H{piece[1]}"
    if not isinstance(piece, str):
        raise InputError(f"head {piece!r} cannot be read; {_HELP}")
    if not piece:
        raise InputError(f"an empty name stands between the heads; {_HELP}")
    if "+" in piece:
        return [name for part in piece.split("+") for name in _names(part.strip())]
    match = _NAME.fullmatch(piece)
    if not match:
        raise InputError(f"head {piece[:60]!r} cannot be read; {_HELP}")
    for numbers in (match["layer"], match["head"]):
        first, _, last = numbers.partition("-")
        if last and int(first) > int(last):
            raise InputError(f"head {piece!r}: the range {numbers} runs backwards; {_HELP}")
    return [f"{match['stack'].lower() + '.' if match['stack'] else ''}L{match['layer']}H{match['head']}"]


def _expand(name: str, model_map: ModelMap) -> list[Head]:
    """Return the heads of a model that a name means."""
    match = _NAME.fullmatch(name)
    assert match
    stack = match["stack"] or ""
    layers = {layer.index: layer for layer in model_map.attention if layer.stack == stack}
    if not layers:
        stacks = model_map.stacks
        if stacks == ("",):
            raise InputError(f"head {name}: this model has one stack; write it without a stack")
        raise InputError(
            f"head {name}: this model's stacks are {', '.join(stacks)}; name the stack, e.g. {stacks[0]}.L0H0"
        )
    first, last = min(layers), max(layers)
    begin, end = _bounds(match["layer"], first, last)
    if match["layer"] != "*":
        missing = next((i for i in range(begin, end + 1) if i not in layers), None)
        if missing is not None:
            raise InputError(
                f"head {name}: the model has no attention in layer {missing} (layers {first} to {last}, counted from 0)"
            )
    heads = []
    for index in (index for index in layers if begin <= index <= end):
        lowest, highest = _bounds(match["head"], 0, layers[index].heads - 1)
        if highest >= layers[index].heads:
            raise InputError(
                f"head {name}: layer {index} has {layers[index].heads} heads, 0 to {layers[index].heads - 1}"
            )
        heads += [Head(stack, index, head) for head in range(lowest, highest + 1)]
    return heads


def _bounds(text: str, lowest: int, highest: int) -> tuple[int, int]:
    """Return the first and last number of `*`, `3` or `3-5`."""
    if text == "*":
        return lowest, highest
    first, _, last = text.partition("-")
    return int(first), int(last or first)
