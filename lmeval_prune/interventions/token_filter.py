"""Token Filtering: a token whose keys and values resemble those before it skips the attention of a layer.

A layer keeps exponential moving averages of the keys (after rotary embedding) and values of the tokens so far, its
*anchors*. A token whose similarity `S` to them is above a threshold `T` skips: attention adds nothing to it, and later
tokens do not see it. `T` follows the share of tokens skipped so far. Formulas: `kernels/token_filter/naive.py`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Self

from lmeval_prune.architectures import AttentionLayer, ModelMap
from lmeval_prune.errors import InputError, first_few
from lmeval_prune.interventions.attention_call import check_attention_calls
from lmeval_prune.interventions.base import Intervention
from lmeval_prune.interventions.filtered_attention import FilteredAttention
from lmeval_prune.kernels.token_filter.state import COLUMNS

logger = logging.getLogger(__name__)
CHOICES = {
    "focus": ("tail", "uniform", "head"),
    "similarity": ("kv", "key", "value"),
    "fusion": ("inverse_variance", "as_printed"),
    "state": ("request", "run"),
}


@dataclass(frozen=True)
class TokenFilter(Intervention):
    """Skips the attention of redundant tokens in some layers.

    Attributes:
        ratio: share of tokens × layers of the whole model to be skipped: `P_global` in the paper's eq. 3.
        tail: share of the layers that filter: `Y` in eq. 3. Each of them skips `ratio / tail` of its tokens.
        focus: `tail`, the last layers; `head`, the first ones; `uniform`, all (then `tail` means nothing).
        similarity: of keys, of values, or of both fused (`kv`).
        fusion: `inverse_variance` gives the steadier of both more weight, as the paper's text says; `as_printed` is
            its eq. 1.
        state: `request`, thresholds begin afresh with each sequence; `run`, a layer has one for all that it ever sees,
            so that answers depend on their order.
        step_size: of the threshold's feedback, eq. 4.
        smoothing: of the anchors.
        warmup: so many tokens at the beginning never skip; their similarities give the first threshold.
        keep_skipped_kv: later tokens see a skipped token; the cache is then as large as without a filter.
        counts: of an applied filter, by layer, `tokens` and `skipped` ones so far.
        skipped: of an applied filter, by layer, the last pass's decisions, (rows, tokens).
        attention: of an applied filter, what handles the attention.

    Raises:
        InputError: a value is none of these, or out of its range.
    """

    by_sequence = True
    ratio: float
    tail: float = 0.5
    focus: str = "tail"
    similarity: str = "kv"
    fusion: str = "inverse_variance"
    state: str = "request"
    step_size: float = 0.05
    smoothing: float = 0.9
    warmup: int = 16
    keep_skipped_kv: bool = False
    counts: dict[str, Counter[str]] = field(default_factory=dict, init=False, compare=False, repr=False)
    skipped: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    attention: FilteredAttention | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise InputError(f"token_filter.{name}={getattr(self, name)} is unknown; use {', '.join(known)}")
        for name in ("ratio", "tail", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"token_filter.{name}={getattr(self, name)} must be from 0 to 1")
        if self.tail == 0:
            raise InputError("token_filter.tail=0 leaves no layer to filter; give ratio=0 for none, or a larger tail")
        if not 0 < self.step_size < math.inf:
            raise InputError(f"token_filter.step_size={self.step_size} must be above 0")
        if self.warmup < 1:
            raise InputError(f"token_filter.warmup={self.warmup} must be 1 or more: the first token has no anchor")
        object.__setattr__(self, "tokenwise", self.ratio == 0)  # then nothing looks at the tokens before

    def layers(self, model_map: ModelMap) -> tuple[AttentionLayer, ...]:
        """The layers that filter."""
        every = model_map.attention
        if self.focus == "uniform":
            return every
        count = max(1, round(self.tail * len(every)))
        return every[-count:] if self.focus == "tail" else every[:count]

    def share(self, model_map: ModelMap) -> float:
        """Share of its tokens that each of these layers shall skip, eq. 3."""
        return min(1.0, self.ratio * len(model_map.attention) / len(self.layers(model_map)))

    def resolve(self, model_map: ModelMap) -> Self:
        """Refuse models without causal attention that can be handled; see the base class."""
        parts = (part for layer in model_map.attention for part in layer.module.modules())
        if model_map.stacks != ("",) or not all(getattr(part, "is_causal", True) for part in parts):
            raise InputError(f"token_filter is for causal models; {model_map.model_type} is none")
        check_attention_calls(model_map)
        count, every = len(self.layers(model_map)), len(model_map.attention)
        if self.ratio * every / count > 1 + 1e-9:
            raise InputError(
                f"token_filter: {self.ratio:.0%} of all tokens cannot be skipped in {count} of {every} layers; "
                f"give ratio up to {math.floor(100 * count / every) / 100}, or a larger tail"
            )
        return replace(self)  # with counts of its own

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Put the filter in front of the attention of these layers; see the base class."""
        if self.ratio == 0:
            return
        share = self.share(model_map)
        quantile = -NormalDist().inv_cdf(share) if share < 1 else -math.inf
        kind = CHOICES["similarity"].index(self.similarity)
        rule = (share, self.step_size, self.smoothing, self.warmup, quantile, kind, self.fusion == "as_printed")
        if self.needs_order:
            logger.warning("token_filter.state=run: answers depend on the order in which they are asked for")
        alone = [layer.label for layer in self.layers(model_map) if layer.kv_heads == 1]
        if alone and self.similarity == "kv":
            logger.warning(
                "token_filter.fusion=%s: keys and values weigh the same in %s: one key-value head has no variance",
                self.fusion,
                first_few(alone),
            )
        attention = FilteredAttention(rule, self.needs_order, self.keep_skipped_kv, self.counts, self.skipped)
        attention.attach(model_map, self.layers(model_map), stack)
        object.__setattr__(self, "attention", attention)

    def slot_bytes(self, model_map: ModelMap, length: int) -> int:
        """Anchors, a state, and the places of tokens that stay; see the base class."""
        if self.ratio == 0:
            return 0
        layers = self.layers(model_map)
        anchors = sum(layer.kv_heads * (layer.query_dim + layer.head_dim) for layer in layers)
        places = 0 if self.keep_skipped_kv else 8 + 4 * length
        return 8 * anchors + len(layers) * (8 * COLUMNS + 1 + places)

    def uncounted(self) -> AbstractContextManager[None]:
        """What runs inside the block is not counted; see the base class."""
        return self.attention.uncounted() if self.attention else nullcontext()

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Chosen tokens skip, and no others: similarity and threshold may be close; see the base class."""
        with self.uncounted(), self.attention.skipping() if self.attention else nullcontext():
            yield

    @property
    def needs_order(self) -> bool:
        """Whether answers depend on those before them."""
        return self.state == "run" and self.ratio > 0

    def joined(self, other: Intervention) -> None:
        """Refuse a second filter: the two would decide about each other's tokens."""
        if isinstance(other, TokenFilter):
            raise InputError("two token filters cannot be applied at once; give one")

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        """Its fields, and what has been skipped since it was applied; not of stored answers.

        A prompt that several requests of the engine share is counted for each, as if each had run it.
        """
        found = super().report(model_map)
        counts = {label: (int(one["tokens"]), int(one["skipped"])) for label, one in self.counts.items()}
        tokens, skipped = (sum(column) for column in zip((0, 0), *counts.values(), strict=True))
        layers = len(self.layers(model_map)) / len(model_map.attention)
        found["token_filter_skipped"] = {
            "target": self.ratio,
            "realised": skipped / tokens * layers if tokens else None,
            "target_by_layer": self.share(model_map),
            "realised_by_layer": {label: skips / seen for label, (seen, skips) in counts.items() if seen},
            "tokens": tokens // max(1, len(counts)),
        }
        return found
