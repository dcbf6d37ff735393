"""Token Filtering: a token whose key and value resemble those of earlier tokens skips the attention of a layer.

A layer keeps *anchors*: exponential moving averages of the keys (after rotary embedding) and values of the tokens so
far. A token skips if its similarity `S` to the anchors is above a threshold `T`: it gets zeros from attention, and
later tokens do not attend to it. `T` is adjusted by the share of tokens skipped so far. The decisions are
`kernels/token_filter.py`; their formulas, token by token, `tests/literal_filter.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal, Self

import torch
from annotated_types import Interval
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from lmeval_prune.architectures import AttentionLayer, ModelMap
from lmeval_prune.attributes import replaced
from lmeval_prune.config import Count, Positive, Seed, Share
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.attention_call import (
    Attend,
    Attended,
    AttentionCall,
    Store,
    additive_mask,
    check_attention_calls,
    intercept_attention,
    not_causal,
    valid_tokens,
)
from lmeval_prune.interventions.base import Intervention, change_output
from lmeval_prune.kernels import token_filter as kernels
from lmeval_prune.kernels.dispatch import launch_on, needs_gradients, on_device, too_wide, unsupported_types, use_kernel
from lmeval_prune.kernels.token_filter_memory import COLUMNS, COUNT, SKIPPED, THRESHOLD, Memory, Rule, fresh_states

logger = logging.getLogger(__name__)
# Attention options that the decode kernel implements, or that do not change the result.
KERNEL_OPTIONS = {"scaling", "sliding_window", "softcap", "is_causal", "position_ids", "use_cache"}
KERNEL_OPTIONS |= {"output_hidden_states", "output_router_logits"}
BLOCK = 16  # capacities of caches are multiples of it


@dataclass(frozen=True)
class TokenFilter(Intervention):
    """Skip the attention of redundant tokens in some layers.

    Attributes:
        ratio: share of tokens × layers of the whole model to skip: `P_global` in the paper's eq. 3.
        tail: share of the layers that filter: `Y` in eq. 3. Each skips `ratio / tail` of its tokens.
        focus: layers that filter: the last (`tail`), the first (`head`), or all (`uniform`; `tail` has no effect).
        similarity: of keys (`key`), of values (`value`), or of keys and values fused (`kv`); or a normal random number
            by layer and position (`random`), the method's control at the same target share.
        fusion: `inverse_variance`: the similarity with the smaller variance over heads weighs more, as in the paper's
            text; `as_printed`: its eq. 1.
        state: `request`: each sequence has its own threshold; `run`: all sequences of a layer share one, so that
            answers depend on their order.
        step_size: of the threshold's feedback, eq. 4.
        smoothing: weight of the old anchor in the moving average.
        warmup: number of first tokens that never skip; their similarities set the first threshold.
        phase: `all` tokens can skip; `decode`: only tokens that are decoded one by one, so that the prompt is kept. The
            prompt is then the warm-up, and `ratio` is the share of the answer's tokens.
        seed: of `random`.
        keep_skipped_kv: later tokens attend to skipped tokens; the cache is then as large as without a filter.
        attention: the attention handler of an applied filter.
    """

    by_sequence = True
    ratio: Share
    tail: Annotated[float, Interval(gt=0, le=1)] = 0.5
    focus: Literal["tail", "uniform", "head"] = "tail"
    similarity: Literal["kv", "key", "value", "random"] = "kv"
    fusion: Literal["inverse_variance", "as_printed"] = "inverse_variance"
    state: Literal["request", "run"] = "request"
    step_size: Positive = 0.05
    smoothing: Share = 0.9
    warmup: Count = 16
    phase: Literal["all", "decode"] = "all"
    seed: Seed = 0
    keep_skipped_kv: bool = False
    attention: FilteredAttention | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tokenwise", self.ratio == 0)  # then no decision depends on earlier tokens

    def layers(self, model_map: ModelMap) -> tuple[AttentionLayer, ...]:
        layers = model_map.attention
        count = max(1, round(self.tail * len(layers)))
        return {"uniform": layers, "tail": layers[-count:], "head": layers[:count]}[self.focus]

    def share(self, model_map: ModelMap) -> float:
        """Return the target share of skipped tokens in each layer that filters, eq. 3."""
        return min(1.0, self.ratio * len(model_map.attention) / len(self.layers(model_map)))

    def resolve(self, model_map: ModelMap) -> Self:
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
        if self.ratio == 0:
            return
        if self.needs_order:
            logger.warning("token_filter.state=run: answers depend on the order of requests")
        names = ("similarity", "fusion", "step_size", "smoothing", "warmup", "phase", "seed")
        rule = Rule(self.share(model_map), **{name: getattr(self, name) for name in names})
        attention = FilteredAttention(rule, self.needs_order, self.keep_skipped_kv)
        attention.attach(model_map, self.layers(model_map), stack)
        object.__setattr__(self, "attention", attention)

    def slot_bytes(self, model_map: ModelMap, length: int) -> int:
        if self.ratio == 0:
            return 0
        layers = self.layers(model_map)
        anchors = sum(layer.kv_heads * (layer.key_dim + layer.head_dim) for layer in layers)
        positions = 0 if self.keep_skipped_kv else 8 + 4 * length
        return 8 * anchors + len(layers) * (8 * COLUMNS + 1 + positions)

    def preserve_state(self) -> AbstractContextManager[None]:
        """Restore counters and shared thresholds after the block."""
        attention: Any = self.attention
        if not attention:
            return nullcontext()
        totals, states = (
            {label: tensor.clone() for label, tensor in record.items()}
            for record in (attention.totals, attention.states)
        )
        return replaced(attention, totals=totals, states=states)

    @contextmanager
    def fixed_decisions(self) -> Iterator[None]:
        """Skip fixed tokens inside the block: rounding could change decisions near the threshold.

        Tokens 5 and 10 (from 0) of each sequence skip, and no others up to 11, unless all tokens are equal.
        """
        # The threshold starts far below all similarities, so token 5 skips. Each step then adds `step_size` × (share of
        # skipped tokens − `share`): the sum of these differences, and with it the threshold, is far above 0 until token
        # 9, and far below 0 at token 10.
        fixed = {"share": 0.1325, "step_size": 1e12, "warmup": 5, "initial": -1e9, "phase": "all", "similarity": "kv"}
        attention: Any = self.attention
        with (
            self.preserve_state(),
            replaced(attention, rule=replace(attention.rule, **fixed)) if attention else nullcontext(),
        ):
            yield

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        totals = self.attention.totals if self.attention else {}
        return {label: dict(zip(("tokens", "skipped"), total.tolist(), strict=True)) for label, total in totals.items()}

    @property
    def needs_order(self) -> bool:
        return self.state == "run" and self.ratio > 0

    def merged_with(self, other: Intervention) -> None:
        if isinstance(other, TokenFilter):
            raise InputError("two token filters cannot be applied at once; give one")

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        """Return the settings, and the skipped shares since the filter was applied.

        Stored answers do not count. A prompt that several requests of the engine share counts for each of them.
        """
        counts = self.counts
        tokens, skipped = (sum(count[name] for count in counts.values()) for name in ("tokens", "skipped"))
        filtered = len(self.layers(model_map)) / len(model_map.attention)
        realised = skipped / max(tokens, 1) * filtered if counts else None  # 0 if no pass had tokens that may skip
        if realised is not None and realised < self.ratio / 2:
            logger.warning(
                "token_filter: %.1f%% of tokens × layers skipped attention instead of %.1f%%: texts may be too short "
                "(none of their first %d tokens skips: warmup; with phase=decode, none that is read at once), or the "
                "threshold adapts too slowly (step_size=%g)",
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


# ---------------------------------------------------------------------- attention


class FilteredAttention:
    """Attention handler that decides which tokens skip; the other tokens attend.

    Args:
        rule: of all filtered layers.
        shared: use one threshold for all sequences of a layer.
        keep_skipped_kv: store the keys and values of skipped tokens, too.

    Attributes:
        is_applied: whether a model runs with it.
        totals: by layer, tokens and skipped tokens so far, (2,).
        states: by layer, the threshold of all sequences if they are `shared`.
        skipped: by layer, decisions of the last pass, (rows, tokens).
    """

    def __init__(self, rule: Rule, shared: bool, keep_skipped_kv: bool) -> None:
        self.rule, self.shared, self.keep_skipped_kv, self.is_applied = rule, shared, keep_skipped_kv, False
        self.totals: dict[str, torch.Tensor] = {}
        self.skipped: dict[str, torch.Tensor] = {}
        self.states: dict[str, torch.Tensor] = {}
        self._caches: dict[str, FilteredCacheLayer | None] = {}  # of the running pass, by layer

    def __deepcopy__(self, memo: dict[int, Any]) -> FilteredAttention:
        """Return itself: a copied cache keeps its filter."""
        return self

    def attach(self, model_map: ModelMap, layers: Sequence[AttentionLayer], stack: ExitStack) -> None:
        intercept_attention(model_map, partial(self.handle, {layer.label for layer in layers}), stack)
        self.is_applied = True
        stack.callback(setattr, self, "is_applied", False)
        for layer in layers:
            hook = layer.module.register_forward_pre_hook(partial(self._find_cache, layer.label), with_kwargs=True)
            stack.callback(hook.remove)
            change_output(layer.module, partial(self._without_skipped, layer.label), stack)

    def _find_cache(self, label: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._caches[label] = None
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        if cache is None:
            return
        while cache.layer_class_to_replicate is not None and len(cache.layers) <= module.layer_idx:
            cache.layers.append(cache.layer_class_to_replicate())
        layer: Any = cache.layers[module.layer_idx]
        is_dynamic = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and not cache.offloading
        if is_dynamic and not layer.get_seq_length():
            layer = cache.layers[module.layer_idx] = FilteredCacheLayer(layer, self)
        if not isinstance(layer, FilteredCacheLayer) or layer.owner is not self:
            raise InputError(
                "a token filter needs a new DynamicCache, not another kind or one that was filled without it"
            )
        layer.is_awaited = True
        self._caches[label] = layer

    def _without_skipped(self, label: str, output: torch.Tensor) -> torch.Tensor:
        # the projection, or hooks on it, may have added a bias
        return output.masked_fill(self.skipped[label][..., None], 0)

    def handle(self, labels: set[str], call: AttentionCall, attend: Attend) -> Attended:
        """Decide which new tokens skip, and compute the attention of the others; skipped tokens get zeros."""
        label = call.layer.label
        if label not in labels:
            return attend(call)
        if call.store is not None:
            return self._attend_in_store(call, call.store, attend)
        cache = self._caches.pop(label, None) or FilteredCacheLayer(DynamicLayer(), self)
        if call.options.get("sliding_window") is None and cache.tokens + call.key.shape[2] > cache.window:
            raise not_causal(call)  # a decode step may have no mask that shows it
        cache.is_awaited, memory, valid = False, cache.begin(call.key, call.value), valid_tokens(call)
        if self.shared:
            memory = replace(memory, states=self.states.setdefault(label, fresh_states(1, call.key.device)))
        totals = self._totals(label, call.key.device)
        absent = cache.store(call.key, call.value, valid, memory, totals, self._rule(call))
        self.skipped[label] = absent & valid
        if valid.shape[1] == 1 and _uses_kernel(call, cache):
            return _decode(call, cache, absent[:, 0]), None
        rows = [(row, is_present.nonzero()[:, 0]) for row, is_present in enumerate(~absent)]
        outputs = [(row, chosen, _attend_row(call, attend, cache, row, chosen)) for row, chosen in rows if len(chosen)]
        shape = (*valid.shape, call.query.shape[1], call.value.shape[-1])
        out = (outputs[0][2] if outputs else call.value).new_zeros(shape)  # has autocast's dtype, too
        for row, chosen, output in outputs:
            out[row, chosen] = output
        return out, None

    def _attend_in_store(self, call: AttentionCall, store: Store, attend: Attend) -> Attended:
        totals = self._totals(call.layer.label, call.key.device)
        fresh = partial(Memory.fresh, store.count, call.key, call.value)
        memory = store.state(call, self, lambda: SlotMemory(totals=totals, **vars(fresh())))
        decisions, start = [], 0
        for count, sequences in groupby(zip(store.packed.slots, store.packed.counts, strict=True), key=itemgetter(1)):
            slots = torch.tensor([slot for slot, _ in sequences], device=call.key.device)
            tokens = slice(start, start + len(slots) * count)
            key, value = (x[0, :, tokens].unflatten(1, (-1, count)).transpose(0, 1) for x in (call.key, call.value))
            rows, valid = memory.rows(slots), torch.ones(len(slots), count, dtype=torch.bool, device=slots.device)
            decisions.append(kernels.decide(key, value, valid, rows, self._rule(call)).flatten())
            if self.rule.may_skip(count):
                totals += torch.stack([valid.sum(), decisions[-1].sum()])
            memory.write(slots, rows)
            start = tokens.stop
        skipped = torch.cat(decisions)
        self.skipped[call.layer.label] = skipped[None]
        query_mask = _and(~skipped, call.stored_mask if call.query_mask is None else call.query_mask)
        stored_mask = call.stored_mask if self.keep_skipped_kv else _and(~skipped, call.stored_mask)
        return attend(replace(call, stored_mask=stored_mask, query_mask=query_mask))

    def _rule(self, call: AttentionCall) -> Rule:
        return replace(self.rule, layer=call.layer.index)

    @torch.inference_mode(False)  # an inference tensor could not be updated outside of inference mode
    def _totals(self, label: str, device: torch.device) -> torch.Tensor:
        if label not in self.totals:
            self.totals[label] = torch.zeros(2, dtype=torch.long, device=device)
        return self.totals[label]


def _and(condition: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    return condition if other is None else condition & other


def _attend_row(
    call: AttentionCall, attend: Attend, cache: FilteredCacheLayer, row: int, chosen: torch.Tensor
) -> torch.Tensor:
    """Compute the attention of chosen tokens of a row over its stored tokens, (chosen tokens, heads, width)."""
    length, tokens, window = int(cache.lengths[row]), call.query.shape[2], call.options.get("sliding_window")
    query = call.query[row : row + 1, :, chosen]
    key, value = cache.keys[row : row + 1, :, :length], cache.values[row : row + 1, :, :length]
    is_last = len(chosen) == 1 and int(chosen[0]) + 1 == tokens  # attends to all stored tokens
    is_causal = len(chosen) == length and not _is_eager(call)  # queries and keys match: sdpa applies a causal mask
    mask = None
    if window is not None or not (is_last or is_causal):
        positions, query_positions = cache.positions[row, :length], chosen[:, None] + (cache.tokens - tokens)
        hidden = positions > query_positions
        if window is not None:
            hidden |= positions <= query_positions - window
        mask = additive_mask(hidden, query.dtype)[None, None]
    return attend(replace(call, query=query, key=key, value=value, mask=mask))[0][0]


def _uses_kernel(call: AttentionCall, cache: FilteredCacheLayer) -> bool:
    """Return whether the decode kernel runs here, and implements all options of a call."""
    if not on_device(call.query):
        return False
    options = {name for name, value in call.options.items() if value is not None and value is not False}
    options -= {"dropout"} if call.options.get("dropout") == 0 else set()
    tensors = call.query, cache.keys, cache.values
    obstacles = unsupported_types(*tensors), needs_gradients(*tensors), too_wide(*(x.shape[-1] for x in tensors))
    return options <= KERNEL_OPTIONS and use_kernel("decode attention", call.query, *obstacles)


def _decode(call: AttentionCall, cache: FilteredCacheLayer, absent: torch.Tensor) -> torch.Tensor:
    from lmeval_prune.kernels import decode_attention_triton

    scaling = call.options.get("scaling")
    with launch_on(call.query):
        return decode_attention_triton.decode(
            call.query[:, :, 0],
            cache.keys,
            cache.values,
            cache.lengths,
            call.query.shape[-1] ** -0.5 if scaling is None else scaling,
            skipped=absent,
            window=call.options.get("sliding_window"),
            positions=cache.positions,
            softcap=call.options.get("softcap") if _is_eager(call) else None,  # sdpa ignores it in other layers, too
        )[:, None]


def _is_eager(call: AttentionCall) -> bool:
    config = getattr(call.module, "config", None)
    return str(config and config._attn_implementation).endswith("eager")


# ---------------------------------------------------------------------- memory of the engine's slots, and caches


@dataclass
class SlotMemory(Memory):
    """Memory of the sequences in a store's slots; a `SlotState`."""

    totals: torch.Tensor  # tokens and skipped tokens of the layer so far, (2,); updated in place

    def begin(self, slots: Sequence[int]) -> None:
        rows = list(slots)
        for tensor in self.tensors:
            tensor[rows] = 0
        self.states[rows, THRESHOLD] = 1

    def move(self, source: int, target: int) -> None:
        self.write(target, self.snapshot(source))

    def snapshot(self, slot: int) -> Memory:
        return Memory(*(tensor[slot].clone() for tensor in self.tensors))

    def restore(self, slot: int, state: Memory) -> None:
        """Continue a slot from a snapshot, and count its tokens again."""
        self.write(slot, state)
        self.totals += state.states[[COUNT, SKIPPED]].long()


class FilteredCacheLayer(CacheLayerMixin):
    """A layer of a `DynamicCache` that does not store every token.

    Each row stores its tokens without gaps, with their positions in the text, so rows have different lengths. Keys are
    rotated before they are stored, so rotary positions are those of the text. `update` returns the new tokens only; the
    filter stores tokens when attention is called.

    Attributes:
        replaced: the replaced cache layer, which determines the length of masks.
        owner: the filter that fills the cache.
        is_awaited: whether the filter will store the tokens of the next `update`.
        memory: anchors and thresholds of the rows; None before the first token.
        keys, values: (rows, key-value heads, capacity, width).
        positions: text positions of stored tokens, including padding, (rows, capacity).
        lengths: number of stored tokens of each row, (rows,).
        tokens: length of the text so far, including padding.
        window: largest number of tokens that a mask of the replaced layer lets a token attend to.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, replaced: Any, owner: Any) -> None:
        super().__init__()
        self.replaced, self.owner, self.is_sliding = replaced, owner, replaced.is_sliding
        self.window = replaced.sliding_window if isinstance(replaced, DynamicSlidingWindowLayer) else math.inf
        self.is_awaited = False
        self.memory: Memory | None = None
        self.tokens = self.longest = 0  # `longest`: upper bound of `lengths`, known without waiting for the device

    def begin(self, key: torch.Tensor, value: torch.Tensor) -> Memory:
        """Return the rows' memory; before the first tokens, create it and the storage.

        Called at attention, not at `update`, which gets latents in some families.
        """
        if self.memory is None:
            rows, heads = key.shape[:2]
            self.keys, self.values = (x.new_empty(rows, heads, 0, x.shape[-1]) for x in (key, value))
            self.positions = torch.zeros(rows, 0, dtype=torch.long, device=key.device)
            self.lengths = torch.zeros(rows, dtype=torch.int32, device=key.device)
            self.memory = Memory.fresh(rows, key, value)
        return self.memory

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor,
        memory: Memory,
        totals: torch.Tensor,
        rule: Rule,
    ) -> torch.Tensor:
        """Decide about new tokens, and store those that later tokens attend to.

        `key` and `value` are (rows, key-value heads, tokens, width), `valid` is (rows, tokens), false for padding.
        Updates `memory` and `totals`, (2,). Returns (rows, tokens), true for skipped tokens and padding.
        """
        keep_skipped, absent = self.owner.keep_skipped_kv, None
        if valid.shape[1] == 1:
            self._reserve(1)
            store = self.keys, self.values, self.positions, self.lengths, totals
            options = {"store": store, "position": self.tokens, "keep_skipped": keep_skipped}
            absent = kernels.decide_and_store(key, value, valid, memory, rule, **options)
        if absent is None:
            skipped = kernels.decide(key, value, valid, memory, rule)
            if rule.may_skip(valid.shape[1]):
                totals += torch.stack([valid.sum(), skipped.sum()])
            absent = skipped | ~valid
            is_stored = valid if keep_skipped else ~absent
            rows, tokens = is_stored.nonzero(as_tuple=True)
            offsets = (is_stored.cumsum(1) - 1 + self.lengths[:, None])[rows, tokens]
            self.lengths = self.lengths + is_stored.sum(1, dtype=torch.int32)
            self.longest = 0
            self._reserve(int(self.lengths.max()))
            self.keys[rows, :, offsets] = key[rows, :, tokens].to(self.keys.dtype)
            self.values[rows, :, offsets] = value[rows, :, tokens].to(self.values.dtype)
            self.positions[rows, offsets] = tokens + self.tokens
        self.tokens += valid.shape[1]
        return absent

    def _reserve(self, tokens: int) -> None:
        """Make room for this many tokens per row; wait for the device only if the room may be exhausted."""
        capacity = self.positions.shape[1]
        if self.longest and self.longest + tokens > capacity:
            self.longest = int(self.lengths.max())
        self.longest += tokens
        if self.longest > capacity:  # exact for a prompt, later by a sixteenth
            extra = -(-max(self.longest, capacity + capacity // 16) // BLOCK) * BLOCK - capacity
            self.keys, self.values = pad(self.keys, (0, 0, 0, extra)), pad(self.values, (0, 0, 0, extra))
            self.positions = pad(self.positions, (0, extra))

    # ------------------------------------------------------------------ transformers' interface

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_awaited or not self.owner.is_applied:
            raise InputError("this cache was filled under a token filter that is not applied now; begin a new one")
        self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if not isinstance(self.replaced, DynamicSlidingWindowLayer):
            return self.tokens + query_length, 0
        self.replaced.cumulative_length = self.tokens
        return self.replaced.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return int(self.replaced.get_max_length())

    def reset(self) -> None:
        self.memory, self.tokens, self.longest, self.is_initialized = None, 0, 0, False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.memory:
            rows = beam_idx.to(self.keys.device)
            self.keys, self.values, self.positions = self.keys[rows], self.values[rows], self.positions[rows]
            self.lengths, self.memory = self.lengths[rows], self.memory.rows(rows)
