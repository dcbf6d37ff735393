"""Parse head names: `L5H3` is head 3 of layer 5, both counted from zero."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from lmeval_prune.architectures.blocks import label_of
from lmeval_prune.artefacts import parse_json
from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from lmeval_prune.architectures.model_map import ModelMap

STACK = r"(?:(?P<stack>encoder|decoder|cross)\.)?"  # beginning of the name of a head or block
_RANGE = r"(?:\*|\d{1,18}(?:-\d{1,18})?)"
_NAME = re.compile(rf"{STACK}L(?P<layer>{_RANGE})H(?P<head>{_RANGE})", re.IGNORECASE)
_HELP = "write heads as L5H3, L5H0-3 or L5H*, joined by +, e.g. heads=L5H3+L15H0"


class Head(NamedTuple):
    """One attention head; `stack` is empty in a model with a single stack."""

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
        """Parse the name of one head, `L5H3` or `encoder.L5H3`, without a model."""
        match = _NAME.fullmatch(name)
        if not match or not (match["layer"].isdigit() and match["head"].isdigit()):
            raise InputError(f"{name!r} is not the name of one head, such as L5H3")
        return cls((match["stack"] or "").lower(), int(match["layer"]), int(match["head"]))

    @classmethod
    def parse(cls, heads: Any, model_map: ModelMap) -> tuple[Head, ...]:
        """Parse a user's head names and look the heads up in a model.

        Args:
            heads: `"L5H3+L15H0"`, `"L5H*"`, `"L5H0-3"`, or a list of such texts, of `[layer, head]` pairs or of `Head`.
            model_map: map of the model.

        Returns:
            The heads in model order, without duplicates.
        """
        parsed = {head for name in head_names(heads) for head in _expand(name, model_map)}
        order = {(layer.stack, layer.index): position for position, layer in enumerate(model_map.attention)}
        return tuple(sorted(parsed, key=lambda head: (order[head.stack, head.layer], head.head)))


def head_names(heads: Any) -> tuple[str, ...]:
    """Split a user's text or list into head names (`L5H3`, `L5H0-3`, `L5H*`) without duplicates; needs no model."""
    items: Iterable[Any]
    if isinstance(heads, str):
        text = heads.strip()
        if text[:1] == "[":
            try:
                parsed = parse_json(text, "heads")
            except InputError:
                text = text.strip("[]").replace("'", "").replace('"', "")
            else:
                return head_names(parsed)
        items = re.split(r"\s*[+,;]\s*|\s+", text)
    else:
        heads = heads if isinstance(heads, list | tuple) else [heads]
        items = [heads] if len(heads) == 2 and all(isinstance(item, int) for item in heads) else heads
    names = tuple(dict.fromkeys(name for item in items for name in _item_names(item)))
    if not names:
        raise InputError(f"heads={heads!r} names no head; leave heads out to run the unpruned model, or {_HELP}")
    return names


def _item_names(item: Any) -> list[str]:
    """Return the normalised head names in one list item: a text, a `[layer, head]` pair or a `Head`."""
    if isinstance(item, Head):
        return [str(item)]
    if isinstance(item, list | tuple) and len(item) == 2:
        return [_normalised(f"L{item[0]}H{item[1]}")]
    return [_normalised(name.strip()) for name in str(item).split("+")]


def _normalised(name: str) -> str:
    """Check the syntax of one head name and write its letters in their usual case."""
    match = _NAME.fullmatch(name)
    ranges = [numbers for numbers in match.group("layer", "head") if numbers != "*"] if match else []
    if not match or any(operator.gt(*range_bounds(numbers)) for numbers in ranges):
        raise InputError(f"head {name[:60]!r} cannot be read; {_HELP}")
    return f"{label_of((match['stack'] or '').lower(), match['layer'])}H{match['head']}"


def _expand(name: str, model_map: ModelMap) -> list[Head]:
    match = _NAME.fullmatch(name)
    assert match
    stack = match["stack"] or ""
    layers = {layer.index: layer for layer in model_map.attention if layer.stack == stack}
    first, last = range_bounds(match["layer"].replace("*", "0"))
    numbers = [*layers] if match["layer"] == "*" else range(first, last + 1)
    missing = next((number for number in numbers if number not in layers), None)
    if missing is not None or not numbers:
        place = f"stack {stack!r}" if missing is None else f"layer {missing}"
        raise InputError(f"head {name}: the model has no attention in {place}; `lmeval-prune heads` lists its heads")
    heads: list[Head] = []
    for layer in (layers[number] for number in numbers):
        begin, end = (0, layer.heads - 1) if match["head"] == "*" else range_bounds(match["head"])
        if end >= layer.heads:
            raise InputError(f"head {name}: layer {layer.index} has {layer.heads} heads, 0 to {layer.heads - 1}")
        heads += [Head(stack, layer.index, head) for head in range(begin, end + 1)]
    return heads


def range_bounds(numbers: str) -> tuple[int, int]:
    """Return the first and last number of `3` or `3-5`."""
    first, _, last = numbers.partition("-")
    return int(first), int(last or first)
