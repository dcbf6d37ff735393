"""Parse names, counted from zero: `L5H3` is head 3 of layer 5, `L5.attention` its attention block, `L5` all blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from lmeval_prune.architectures.blocks import ATTENTION, FEED_FORWARD, Sublayer, has_absent, label_of
from lmeval_prune.artefacts import parse_json
from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from lmeval_prune.architectures.model_map import ModelMap

_STACK, _RANGE = r"(?:(?P<stack>encoder|decoder|cross)\.)?", r"\d{1,9}(?:-\d{1,9})?"
_HEAD = re.compile(rf"{_STACK}L(?P<layer>\*|{_RANGE})H(?P<head>\*|{_RANGE})", re.IGNORECASE)
_BLOCK = re.compile(rf"{_STACK}L(?P<layer>{_RANGE})(?:\.(?P<kind>{ATTENTION}|{FEED_FORWARD}))?", re.IGNORECASE)
_HEADS_HELP = "write heads as L5H3, L5H0-3 or L5H*, joined by +, e.g. heads=L5H3+L15H0"


class Head(NamedTuple):
    """One attention head; `stack` is empty in a model with a single stack."""

    stack: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer_label}H{self.head}"

    @property
    def layer_label(self) -> str:
        return label_of(self.stack, self.layer)

    @classmethod
    def named(cls, name: str) -> Head:
        """Parse the name of one head, `L5H3` or `encoder.L5H3`, without a model."""
        match = _HEAD.fullmatch(name)
        if not match or not (match["layer"].isdigit() and match["head"].isdigit()):
            raise InputError(f"{name!r} is not the name of one head, such as L5H3")
        return cls((match["stack"] or "").lower(), int(match["layer"]), int(match["head"]))

    @classmethod
    def parse(cls, heads: Any, model_map: ModelMap) -> tuple[Head, ...]:
        """Look up a user's heads in a model.

        Args:
            heads: `"L5H3+L15H0"`, `"L5H*"`, `"L5H0-3"`, or a list of such texts, of `[layer, head]` pairs or of `Head`.
            model_map: map of the model.

        Returns:
            The heads in model order, without duplicates.
        """
        chosen: set[Head] = set()
        for name in head_names(heads):
            match = _HEAD.fullmatch(name)
            assert match
            stack = match["stack"] or ""
            layers = {layer.index: layer for layer in model_map.attention if layer.stack == stack}
            numbers = [*layers] if match["layer"] == "*" else _numbers(match["layer"])
            missing = next((number for number in numbers if number not in layers), None)
            if missing is not None or not numbers:
                place = f"stack {stack!r}" if missing is None else f"layer {missing}"
                raise InputError(f"head {name}: no attention in {place}; `lmeval-prune heads` lists the heads")
            for number in numbers:
                count = layers[number].heads
                members = range(count) if match["head"] == "*" else _numbers(match["head"])
                if members[-1] >= count:
                    raise InputError(f"head {name}: layer {number} has {count} heads, 0 to {count - 1}")
                chosen |= {cls(stack, number, head) for head in members}
        order = {(layer.stack, layer.index): position for position, layer in enumerate(model_map.attention)}
        return tuple(sorted(chosen, key=lambda head: (order[head.stack, head.layer], head.head)))


def head_names(heads: Any) -> tuple[str, ...]:
    """Split a user's text or list into head names (`L5H3`, `L5H0-3`, `L5H*`) without duplicates; needs no model."""
    if isinstance(heads, str):
        with suppress(InputError):  # a list, as JSON or as lm-eval gives it
            heads = parse_json(heads, "heads") if heads.strip()[:1] == "[" else heads
    items = heads if isinstance(heads, list | tuple) else [heads]
    if isinstance(heads, str):
        items = list(filter(None, re.split(r"[\s+,;\[\]'\"]+", heads)))
    elif len(items) == 2 and all(isinstance(item, int) for item in items):
        items = [heads]
    names = []
    for item in items:
        is_pair = isinstance(item, list | tuple) and len(item) == 2
        for name in (f"L{item[0]}H{item[1]}" if is_pair else str(item)).split("+"):
            match = _HEAD.fullmatch(name.strip())
            if not match or not all(x == "*" or _numbers(x) for x in match.group("layer", "head")):
                raise InputError(f"head {name.strip()[:60]!r} cannot be read; {_HEADS_HELP}")
            names.append(f"{label_of((match['stack'] or '').lower(), match['layer'])}H{match['head']}")
    if not names:
        raise InputError(f"heads={heads!r} names no head; leave heads out to run the unpruned model, or {_HEADS_HELP}")
    return tuple(dict.fromkeys(names))


def _numbers(text: str) -> range:
    """Return the numbers of `3` or `3-5`; empty if the last one is before the first."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def block_names(blocks: Any) -> tuple[str, ...]:
    """Split a user's text or list into names of blocks (`L5`, `L5-7`, `L5.attention`) without duplicates."""
    items, names = [blocks] if isinstance(blocks, str) else blocks, []
    for name in (part.strip() for item in items for part in item.split("+")):
        match = _BLOCK.fullmatch(name)
        if not match or not _numbers(match["layer"]):
            raise InputError(f"block {name[:60]!r} cannot be read; write L5, L5-7 or L5.attention, joined by +")
        kind = (match["kind"] or "").lower()
        names.append(f"{label_of((match['stack'] or '').lower(), match['layer'])}{'.' * bool(kind)}{kind}")
    return tuple(dict.fromkeys(names))


def compact_names(blocks: Iterable[str]) -> str:
    """Return normalised names of blocks as one text that `block_names` reads: `L5-7+L9.attention`.

    Both blocks of a layer are the layer, and layers in a row are a range.
    """
    kinds: dict[tuple[str, int], set[str]] = {}
    for match in filter(None, map(_BLOCK.fullmatch, blocks)):
        for layer in _numbers(match["layer"]):
            both = {match["kind"]} if match["kind"] else {ATTENTION, FEED_FORWARD}
            kinds.setdefault((match["stack"] or "", layer), set()).update(both)
    runs: list[tuple[str, str, int, int]] = []
    for (stack, layer), removed in sorted(kinds.items()):
        for kind in [""] if len(removed) > 1 else removed:
            previous = runs[-1] if runs else None
            if previous and previous[:2] == (stack, kind) and previous[3] == layer - 1:
                runs[-1] = (stack, kind, previous[2], layer)
            else:
                runs.append((stack, kind, layer, layer))
    return "+".join(
        f"{label_of(stack, f'{first}-{last}' if last > first else first)}{'.' * bool(kind)}{kind}"
        for stack, kind, first, last in runs
    )


def named_sublayers(names: Iterable[str], model_map: ModelMap) -> list[Sublayer]:
    """Return the blocks of a model with these names, in order; a whole layer of a decoder has its cross-attention."""
    chosen: set[str] = set()
    for name in names:
        match = _BLOCK.fullmatch(name)
        assert match
        stack, kind = match["stack"] or "", match["kind"]
        for index in _numbers(match["layer"]):
            blocks = [x for x in model_map.sublayers if (x.stack, x.index) == (stack, index) and kind in (None, x.kind)]
            if blocks and kind is None:
                blocks = [x for x in model_map.sublayers if x.layer == blocks[0].layer]
                if all(x.kind == ATTENTION for x in blocks) and not has_absent(model_map.layers[blocks[0].label]):
                    blocks = []  # its feed-forward block is not known, nor was it removed earlier
            if not blocks:
                raise InputError(f"block {name}: layer {label_of(stack, index)} has no such block that is known")
            chosen |= set(map(str, blocks))
    return [sublayer for sublayer in model_map.sublayers if str(sublayer) in chosen]
