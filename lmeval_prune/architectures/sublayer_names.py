"""Parse names of blocks: `L5.attention` is the attention block of layer 5, `L5` all blocks of the layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from lmeval_prune.architectures.blocks import has_absent, label_of
from lmeval_prune.architectures.heads import STACK, range_bounds
from lmeval_prune.architectures.model_map import ModelMap
from lmeval_prune.architectures.sublayers import ATTENTION, FEED_FORWARD, Sublayer
from lmeval_prune.errors import InputError

_RANGE = r"\d{1,9}(?:-\d{1,9})?"
_NAME = re.compile(
    rf"{STACK}L(?P<layers>{_RANGE})(?:\.(?P<kind>{ATTENTION}|{FEED_FORWARD}))?",
    re.IGNORECASE,
)
_HELP = "write blocks as L5, L5-7, L5.attention or L5.feed_forward, joined by +"


def block_names(blocks: Any) -> tuple[str, ...]:
    """Split a user's text or list into normalised names of blocks; needs no model."""
    items = [blocks] if isinstance(blocks, str) else blocks
    return tuple(dict.fromkeys(_normalised(name.strip()) for item in items for name in item.split("+")))


def compact_names(blocks: Iterable[str]) -> str:
    """Return normalised names of blocks as one text that `block_names` reads: `L5-7+L9.attention`.

    Both blocks of a layer are the layer, and layers in a row are a range.
    """
    kinds: dict[tuple[str, int], set[str]] = {}
    for match in filter(None, map(_NAME.fullmatch, blocks)):
        first, last = range_bounds(match["layers"])
        for layer in range(first, last + 1):
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


def _normalised(name: str) -> str:
    match = _NAME.fullmatch(name)
    if not match:
        raise InputError(f"block {name[:60]!r} cannot be read; {_HELP}")
    kind = (match["kind"] or "").lower()
    return f"{label_of((match['stack'] or '').lower(), match['layers'])}{'.' * bool(kind)}{kind}"


def named_sublayers(names: Iterable[str], model_map: ModelMap) -> list[Sublayer]:
    """Return the blocks of a model with these names, in order, without duplicates."""
    chosen = {str(sublayer) for name in names for sublayer in _expanded(name, model_map)}
    return [sublayer for sublayer in model_map.sublayers if str(sublayer) in chosen]


def _expanded(name: str, model_map: ModelMap) -> list[Sublayer]:
    """Return the blocks that a name stands for; a whole layer of a decoder includes its cross-attention."""
    match = _NAME.fullmatch(name)
    assert match
    stack, kind = match["stack"] or "", match["kind"]
    selected: list[Sublayer] = []
    first, last = range_bounds(match["layers"])
    for index in range(first, max(first, last) + 1):
        blocks = [sublayer for sublayer in model_map.sublayers if (sublayer.stack, sublayer.index) == (stack, index)]
        if blocks and kind is None:
            blocks = [sublayer for sublayer in model_map.sublayers if sublayer.layer == blocks[0].layer]
        chosen = [sublayer for sublayer in blocks if kind in (None, sublayer.kind)]
        if last < first or not chosen or (kind is None and not _is_whole(chosen, model_map)):
            raise InputError(f"block {name}: layer {label_of(stack, index)} has no such block that is known")
        selected += chosen
    return selected


def _is_whole(blocks: Sequence[Sublayer], model_map: ModelMap) -> bool:
    """Return whether the feed-forward block of a layer is known, too, or was removed earlier."""
    has_feed_forward = any(sublayer.kind == FEED_FORWARD for sublayer in blocks)
    return has_feed_forward or has_absent(model_map.model.get_submodule(blocks[0].layer))
