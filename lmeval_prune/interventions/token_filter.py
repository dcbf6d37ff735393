"""Token Filtering: a token whose key and value resemble those of earlier tokens skips the attention of a layer.

A layer keeps *anchors*: exponential moving averages of the keys (after rotary embedding) and values of the tokens so
far. A token skips if its similarity `S` to the anchors is above a threshold `T`: it gets zeros from attention, and
later tokens do not attend to it. `T` is adjusted by the share of tokens skipped so far.

`kernels/token_filter/naive.py` has the formulas, `filtered_attention.py` the attention, `filtered_cache.py` the cache.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from annotated_types import Interval

from lmeval_prune.architectures import AttentionLayer, ModelMap
from lmeval_prune.config import Count, Positive, Share
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.attention_call import check_attention_calls
from lmeval_prune.interventions.base import Intervention
from lmeval_prune.interventions.filtered_attention import FilteredAttention
from lmeval_prune.kernels.token_filter.state import COLUMNS, Rule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenFilter(Intervention):
    """Skip the attention of redundant tokens in some layers.

    Attributes:
        ratio: share of tokens × layers of the whole model to skip: `P_global` in the paper's eq. 3.
        tail: share of the layers that filter: `Y` in eq. 3. Each skips `ratio / tail` of its tokens.
        focus: layers that filter: the last (`tail`), the first (`head`), or all (`uniform`; `tail` has no effect).
        similarity: of keys (`key`), of values (`value`), or of keys and values fused (`kv`).
        fusion: `inverse_variance`: the similarity with the smaller variance over heads weighs more, as in the paper's
            text; `as_printed`: its eq. 1.
        state: `request`: each sequence has its own threshold; `run`: all sequences of a layer share one, so that
            answers depend on their order.
        step_size: of the threshold's feedback, eq. 4.
        smoothing: weight of the old anchor in the moving average.
        warmup: number of first tokens that never skip; their similarities set the first threshold.
        keep_skipped_kv: later tokens attend to skipped tokens; the cache is then as large as without a filter.
        attention: the attention handler of an applied filter.
    """

    by_sequence = True
    ratio: Share
    tail: Annotated[float, Interval(gt=0, le=1)] = 0.5
    focus: Literal["tail", "uniform", "head"] = "tail"
    similarity: Literal["kv", "key", "value"] = "kv"
    fusion: Literal["inverse_variance", "as_printed"] = "inverse_variance"
    state: Literal["request", "run"] = "request"
    step_size: Positive = 0.05
    smoothing: Share = 0.9
    warmup: Count = 16
    keep_skipped_kv: bool = False
    attention: FilteredAttention | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tokenwise", self.ratio == 0)  # then no decision depends on earlier tokens

    def layers(self, model_map: ModelMap) -> tuple[AttentionLayer, ...]:
        """Return the layers that filter."""
        layers = model_map.attention
        count = max(1, round(self.tail * len(layers)))
        return {"uniform": layers, "tail": layers[-count:], "head": layers[:count]}[self.focus]

    def share(self, model_map: ModelMap) -> float:
        """Return the target share of skipped tokens in each layer that filters, eq. 3."""
        return min(1.0, self.ratio * len(model_map.attention) / len(self.layers(model_map)))

    def resolve(self, model_map: ModelMap) -> Self:
        """Refuse models without causal attention that can be intercepted, and ratios that do not fit `tail`."""
        if not model_map.is_causal:
            raise InputError(f"token_filter is for causal models; {model_map.model_type} is none")
        check_attention_calls(model_map)
        count, total = len(self.layers(model_map)), len(model_map.attention)
        if self.ratio * total / count > 1 + 1e-9:
            raise InputError(
                f"token_filter: {self.ratio:.0%} of all tokens cannot be skipped in {count} of {total} layers; "
                f"give ratio up to {math.floor(100 * count / total) / 100}, or a larger tail"
            )
        return replace(self)  # each application has its own handler

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Intercept the attention of the layers that filter."""
        if self.ratio == 0:
            return
        if self.needs_order:
            logger.warning("token_filter.state=run: answers depend on the order of requests")
        layers = self.layers(model_map)
        rule = Rule(self.share(model_map), self.similarity, self.fusion, self.step_size, self.smoothing, self.warmup)
        attention = FilteredAttention(rule, self.needs_order, self.keep_skipped_kv)
        attention.attach(model_map, layers, stack)
        object.__setattr__(self, "attention", attention)

    def slot_bytes(self, model_map: ModelMap, length: int) -> int:
        """Return the bytes of a sequence's anchors, state, and positions of stored tokens."""
        if self.ratio == 0:
            return 0
        layers = self.layers(model_map)
        anchors = sum(layer.kv_heads * (layer.key_dim + layer.head_dim) for layer in layers)
        positions = 0 if self.keep_skipped_kv else 8 + 4 * length
        return 8 * anchors + len(layers) * (8 * COLUMNS + 1 + positions)

    def preserve_state(self) -> AbstractContextManager[None]:
        """Restore counters and shared thresholds after the block."""
        return self.attention.preserve_state() if self.attention else nullcontext()

    @contextmanager
    def fixed_decisions(self) -> Iterator[None]:
        """Skip fixed tokens inside the block: rounding could change decisions near the threshold."""
        with self.preserve_state(), self.attention.skipping() if self.attention else nullcontext():
            yield

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Numbers of tokens and skipped tokens so far, by layer."""
        totals = self.attention.totals if self.attention else {}
        return {label: dict(zip(("tokens", "skipped"), total.tolist(), strict=True)) for label, total in totals.items()}

    @property
    def skipped(self) -> dict[str, Any]:
        """Decisions of the last pass, by layer, (rows, tokens)."""
        return self.attention.skipped if self.attention else {}

    @property
    def needs_order(self) -> bool:
        """Return whether answers depend on earlier answers."""
        return self.state == "run" and self.ratio > 0

    def merged_with(self, other: Intervention) -> None:
        """Refuse a second filter."""
        if isinstance(other, TokenFilter):
            raise InputError("two token filters cannot be applied at once; give one")

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        """Return the settings, and the skipped shares since the filter was applied.

        Stored answers do not count. A prompt that several requests of the engine share counts for each of them.
        """
        counts = self.counts
        tokens, skipped = (sum(count[name] for count in counts.values()) for name in ("tokens", "skipped"))
        layers = len(self.layers(model_map)) / len(model_map.attention)
        realised = skipped / tokens * layers if tokens else None
        if realised is not None and realised < self.ratio / 2:
            logger.warning(
                "token_filter: %.1f%% of tokens × layers skipped attention instead of %.1f%%: texts may be too short "
                "(none of their first %d tokens skips: warmup), or the threshold adapts too slowly (step_size=%g)",
                *(100 * realised, 100 * self.ratio, self.warmup, self.step_size),
            )
        statistics = {
            "target": self.ratio,
            "realised": realised,
            "target_by_layer": self.share(model_map),
            "realised_by_layer": {
                label: count["skipped"] / count["tokens"] for label, count in counts.items() if count["tokens"]
            },
            "tokens": tokens // max(1, len(counts)),
        }
        return {**super().report(model_map), "token_filter_skipped": statistics}
