"""Keys and values of many answers, stored once and read in place, and the attention over them.

The cache takes the place of the model's own attention (`interventions/attention_call.py`). The model runs on a
packed batch (1, tokens): rows of any length, one after another, no padding. In each layer the new keys and values
are written into their slots, and attention reads the slots. Key-value heads are never repeated: the G query heads
of a group are G queries to one head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from lmeval_prune.interventions.attention_call import AttentionCall, UnsupportedAttention


@dataclass(frozen=True)
class Span:
    """Neighbouring slots, each with the same number of new tokens.

    Attributes:
        slot: the first slot.
        starts: how many tokens each slot holds already.
        tokens: new tokens of each.
    """

    slot: int
    starts: tuple[int, ...]
    tokens: int

    @property
    def end(self) -> int:
        """Tokens in the longest slot, the new ones included."""
        return max(self.starts) + self.tokens


@dataclass
class Layout:
    """Where the tokens of a packed batch belong: the tokens of the first span's first slot, of its second, …"""

    spans: Sequence[Span]
    device: torch.device
    slots: torch.Tensor = field(init=False)  # (tokens,)
    positions: torch.Tensor = field(init=False)  # (tokens,)
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        slots: list[int] = []
        positions: list[int] = []
        for span in self.spans:
            for row, start in enumerate(span.starts):
                slots += [span.slot + row] * span.tokens
                positions += range(start, start + span.tokens)
        both = torch.tensor([slots, positions]).to(self.device)
        self.slots, self.positions = both[0], both[1]

    def mask(self, number: int, share: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask of a span: 0 where a query sees a key, else the lowest number.

        Shape (slots, 1, share · tokens, keys), `share` query heads a key-value head; with one token a slot
        (slots, 1, 1, keys).
        """
        key = (number, share, window, dtype)
        if key not in self._masks:
            span = self.spans[number]
            starts = torch.tensor(span.starts, device=self.device)
            query = starts[:, None, None] + torch.arange(span.tokens, device=self.device)[:, None]
            seen = torch.arange(span.end, device=self.device)
            hidden = seen > query
            if window is not None:
                hidden |= seen <= query - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
            mask.masked_fill_(hidden, torch.finfo(dtype).min)
            self._masks[key] = (mask.repeat(1, share, 1) if span.tokens > 1 else mask)[:, None]
        return self._masks[key]


class KVCache:
    """Storage for `count` answers of at most `length` tokens each.

    Attention runs block by block, each of `block` slots and as long as the longest of them.

    A layer's storage, (count, key-value heads, length, width) for keys and for values, is made when that
    layer first runs, with its own head counts and widths.
    """

    def __init__(self, count: int, length: int, block: int = 1 << 30) -> None:
        self.count = count
        self.length = length
        self.block = block
        self.layout: Layout | None = None  # of the pass that runs; None: attend within the batch, store nothing
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """The attention of new tokens, whose keys and values are stored.

        Args:
            call: of a packed batch (1, heads, tokens, width); its module's `layer_idx` names the storage.

        Returns:
            (1, tokens, heads, width of values), and None for the weights.

        Raises:
            UnsupportedAttention: the module asks for attention sinks, a bias, or dropout.
        """
        module: Any = call.module
        query, key, value, options = call.query, call.key, call.value, call.options
        sliding_window: int | None = options.get("sliding_window")
        for name in ("s_aux", "position_bias", "attention_bias", "head_mask"):
            if options.get(name) is not None:
                raise UnsupportedAttention(name)
        kinds = getattr(getattr(module, "config", None), "layer_types", None)
        if kinds and kinds[module.layer_idx] == "sliding_attention" and sliding_window is None:
            raise UnsupportedAttention("its attention modules do not say how wide their window is")
        if options.get("dropout") or query.shape[0] != 1 or call.mask is not None:
            raise UnsupportedAttention("dropout, a padded batch or a ready-made mask")
        scaling = options.get("scaling")
        rule = _Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("softcap"))
        heads, share = query.shape[1], query.shape[1] // key.shape[1]  # query heads a key-value head
        if self.layout is None:
            alone = Layout([Span(0, (0,), query.shape[2])], query.device)
            mask = alone.mask(0, share, sliding_window, query.dtype)
            folded = query.reshape(1, key.shape[1], -1, query.shape[-1])
            out = rule.attend(folded, key, value, mask).reshape(1, heads, -1, value.shape[-1])
            return out.transpose(1, 2), None
        layout = self.layout
        keys, values = self._storage(int(module.layer_idx), key, value)
        keys[layout.slots, :, layout.positions] = key[0].transpose(0, 1)
        values[layout.slots, :, layout.positions] = value[0].transpose(0, 1)
        parts = []
        at = 0
        for number, span in enumerate(layout.spans):
            rows, tokens = len(span.starts), span.tokens
            q = query[0, :, at : at + rows * tokens].reshape(-1, share, rows, tokens, query.shape[-1])
            q = q.permute(2, 0, 1, 3, 4).reshape(rows, key.shape[1], share * tokens, query.shape[-1])
            near = slice(span.slot, span.slot + rows)
            mask = layout.mask(number, share, sliding_window, query.dtype)
            out = rule.attend(q, keys[near, :, : span.end], values[near, :, : span.end], mask)
            out = out.reshape(rows, heads, tokens, -1).transpose(1, 2)  # heads stand together again
            parts.append(out.reshape(rows * tokens, heads, -1))
            at += rows * tokens
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None

    def _storage(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.keys:
            for storage, new in ((self.keys, key), (self.values, value)):
                # zeros, not what lay there: a masked position must hold a finite number
                storage[layer] = new.new_zeros(self.count, new.shape[1], self.length, new.shape[-1])
        return self.keys[layer], self.values[layer]

    @contextmanager
    def laid_out(self, layout: Layout) -> Iterator[None]:
        """Forward passes inside the block are over tokens that lie so, and are stored."""
        self.layout = layout
        try:
            yield
        finally:
            self.layout = None

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for storage in (*self.keys.values(), *self.values.values()):
            storage[target, :, :length] = storage[source, :, :length]

    def take(self, slot: int, length: int, layers: int) -> list[torch.Tensor]:
        """Copies of a slot's keys and values in the layers below `layers`, each (heads, length, width)."""
        return [
            storage[layer][slot, :, :length].clone() for layer in range(layers) for storage in (self.keys, self.values)
        ]

    def put(self, slot: int, taken: Sequence[torch.Tensor], length: int, layers: int) -> None:
        """Write the first `length` tokens of what `take` gave into a slot, in the layers below `layers`."""
        for layer in range(layers):
            for storage, part in ((self.keys, taken[2 * layer]), (self.values, taken[2 * layer + 1])):
                storage[layer][slot, :, :length] = part[:, :length]


@dataclass(frozen=True)
class _Rule:
    scaling: float
    softcap: float | None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.softcap is None:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling)
        scores = torch.tanh(q @ k.transpose(-1, -2) * self.scaling / self.softcap) * self.softcap
        return (scores + mask).softmax(-1) @ v
