"""The attention of layers that some tokens skip, on stock models: decisions, a cache without them, the rest.

A filtered layer of a `DynamicCache` holds its own tokens: of each row those that later tokens see, without gaps, with
their place in the text. Rotary positions stay those of the text, since keys are rotated before they come here.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from lmeval_prune.architectures import AttentionLayer, ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.attention_call import Attend, AttentionCall, Store, put_in_front
from lmeval_prune.interventions.filter_in_store import SlotStates, array
from lmeval_prune.interventions.filter_on_device import DeviceFilter, DeviceSequences, can_attend
from lmeval_prune.kernels.token_filter.state import fresh

FEW = 64  # tokens: to project those that do not skip pays for more


@dataclass
class Sequences:
    """What a filtered layer knows of the rows of a batch.

    Attributes:
        keys, values: of tokens that later ones see, (rows, key-value heads, capacity, width).
        places: of these tokens in their row, padding counted, (rows, capacity).
        lengths: how many there are of each row.
        anchors: of keys and of values, (rows, key-value heads, width) in float64.
        begun: whether a row has had a token that is no padding.
        states: (rows, columns), see `state`; None if the layer has one for all.
        tokens: length of the rows so far, padding counted.
    """

    keys: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor
    lengths: list[int]
    anchors: tuple[np.ndarray, np.ndarray]
    begun: np.ndarray
    states: np.ndarray
    tokens: int = 0

    @classmethod
    def like(cls, key: torch.Tensor, value: torch.Tensor) -> Sequences:
        """Empty ones, for keys and values of this shape (rows, key-value heads, …, width)."""
        rows, heads = key.shape[:2]
        anchors = np.zeros((rows, heads, key.shape[-1])), np.zeros((rows, heads, value.shape[-1]))
        places = torch.zeros(rows, 0, dtype=torch.long, device=key.device)
        states = fresh(rows).numpy()
        return cls(key[:, :, :0], value[:, :, :0], places, [0] * rows, anchors, np.zeros(rows, dtype=bool), states)

    def append(self, key: torch.Tensor, value: torch.Tensor, kept: torch.Tensor) -> None:
        """Store the tokens (rows, heads, tokens, width) where `kept` (rows, tokens) is true."""
        counts = kept.sum(1).tolist()
        self._make_room(max(old + new for old, new in zip(self.lengths, counts, strict=True)))
        rows, tokens = kept.nonzero(as_tuple=True)
        offset = torch.tensor(self.lengths, device=key.device)[:, None] - 1
        slots = (kept.cumsum(1) + offset)[rows, tokens]
        self.keys[rows, :, slots] = key[rows, :, tokens]
        self.values[rows, :, slots] = value[rows, :, tokens]
        self.places[rows, slots] = tokens + self.tokens
        self.lengths = [old + new for old, new in zip(self.lengths, counts, strict=True)]
        self.tokens += kept.shape[1]

    def _make_room(self, needed: int) -> None:
        capacity = self.places.shape[1]
        if needed <= capacity:
            return
        # the first time (a prompt) as much as it needs, then a little more, so that appending costs little
        more = (needed if not capacity else max(needed, capacity + max(16, capacity // 16))) - capacity
        self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, more))
        self.values = torch.nn.functional.pad(self.values, (0, 0, 0, more))
        self.places = torch.nn.functional.pad(self.places, (0, more))

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows only; one may stand several times."""
        chosen = rows.tolist()
        rows = rows.to(self.keys.device)
        self.keys, self.values, self.places = self.keys[rows], self.values[rows], self.places[rows]
        self.lengths = [self.lengths[row] for row in chosen]
        self.anchors = self.anchors[0][chosen], self.anchors[1][chosen]
        self.begun, self.states = self.begun[chosen], self.states[chosen]


def sequences_like(key: torch.Tensor, value: torch.Tensor) -> Sequences | DeviceSequences:
    """Empty ones: on a GPU those that stay there, for its kernels; else for the loop and the model's own attention."""
    return DeviceSequences.like(key, value) if key.is_cuda else Sequences.like(key, value)


class FilteredLayer(CacheLayerMixin):
    """Takes a layer's place in a `DynamicCache`. Its `update` gives back the new tokens alone; the filter stores them.

    Attributes:
        replaced: the cache layer whose place it has: masks are as long as it would make them.
        filter: what fills it.
        sequences: what it holds.
        is_awaited: whether the filter is about to take what `update` is given.
    """

    def __init__(self, replaced: Any, owner: FilteredAttention) -> None:
        super().__init__()
        self.replaced = replaced
        self.is_sliding = replaced.is_sliding
        self.filter = owner
        self.sequences: Sequences | DeviceSequences | None = None
        self.is_awaited = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See the base class. What is stored is known when attention is asked for: some families cache latents."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new tokens as they are.

        Raises:
            InputError: the filter that began this cache is not applied any more.
        """
        if not self.is_awaited:
            raise InputError("this cache was filled under a token filter that is not applied now; begin a new one")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens of the text so far, skipped ones and padding too."""
        return self.sequences.tokens if self.sequences else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As the layer that it replaces."""
        if not isinstance(self.replaced, DynamicSlidingWindowLayer):
            return self.get_seq_length() + query_length, 0
        self.replaced.cumulative_length = self.get_seq_length()
        return self.replaced.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        """As the layer that it replaces."""
        return int(self.replaced.get_max_length())

    def reset(self) -> None:
        """Forget everything."""
        self.sequences, self.is_initialized = None, False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Rows of the beams that go on."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        if self.sequences:
            self.sequences.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times."""
        if self.sequences:
            self.sequences.select(torch.arange(len(self.sequences.lengths)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: what a threshold has seen cannot be taken back.

        Raises:
            InputError: always, but for 0 tokens.
        """
        if tokens_to_remove:
            raise InputError("a token filter cannot take tokens back; leave out assisted decoding and prompt lookup")


class FilteredAttention:
    """In front of the attention of some layers: decides about each token, and lets the others attend.

    Args:
        rule: the last arguments of `compiled.decide`.
        shared: whether a layer has one threshold for all sequences.
        keep_skipped_kv: whether later tokens see skipped ones.
        counts: by layer, `tokens` and `skipped`; written.
        skipped: by layer, decisions of the last pass; written.
    """

    def __init__(
        self,
        rule: tuple[Any, ...],
        shared: bool,
        keep_skipped_kv: bool,
        counts: dict[str, Counter[str]],
        skipped: dict[str, torch.Tensor],
    ) -> None:
        self.rule, self.keep_skipped_kv, self.counts, self.skipped = rule, keep_skipped_kv, counts, skipped
        self.on_device = DeviceFilter(rule, shared, keep_skipped_kv, counts)
        self._shared: dict[str, np.ndarray] | None = {} if shared else None
        self._attended: dict[str, torch.Tensor] = {}  # what skipped, for the output projection that follows
        self._caches: dict[str, FilteredLayer | None] = {}
        self._last: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self.labels: set[str] = set()

    def __deepcopy__(self, memory: dict[int, Any]) -> FilteredAttention:
        """Itself: copies of a cache are filled by what fills the cache."""
        return self

    def _forget(self) -> None:
        """Leave no cache waiting, as an exception in the middle of a pass would."""
        for place in self._caches.values():
            if place:
                place.is_awaited = False
        self._caches.clear()
        self._attended.clear()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What runs inside the block is not counted, and moves no threshold that all sequences share."""
        device = self.on_device  # at once, since counts may show its totals
        before = copy.deepcopy((self.counts, self._shared, device.states, device.totals))
        try:
            yield
        finally:
            counts, self._shared, device.states, device.totals = before
            self.counts.update(counts)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Inside the block a sequence's tokens 5 and 10 (from 0) skip, and no others up to 11, if not all are equal."""
        rule = self.rule
        # the threshold begins far below all similarities; steps so large take it far above them while the sum of
        # skipped / tokens − share since the warm-up is positive, and below them where it is not: before token 10
        self.rule = self.on_device.rule = (0.1325, 1e12, rule[2], 5, -1e9, *rule[5:])
        try:
            yield
        finally:
            self.rule = self.on_device.rule = rule

    def attach(self, model_map: ModelMap, layers: Sequence[AttentionLayer], stack: ExitStack) -> None:
        """Handle the attention of these layers until `stack` closes."""
        put_in_front(model_map, self.handle, stack)
        stack.callback(self._forget)
        self.labels = {layer.label for layer in layers}
        for layer in layers:
            self.counts[layer.label] = Counter()
            watch = layer.module.register_forward_pre_hook(self._watching(layer), with_kwargs=True)
            stack.callback(watch.remove)
            self._project_through(layer, stack)

    def _watching(self, layer: AttentionLayer) -> Any:
        """See which cache the layer is about to use, and have a place of our own in it."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cache = next((one for one in (*args, *kwargs.values()) if isinstance(one, Cache)), None)
            self._caches[layer.label] = None if cache is None else self._place_in(cache, module.layer_idx)

        return hook

    def _place_in(self, cache: Cache, index: int) -> FilteredLayer:
        while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
        found: Any = cache.layers[index]
        if type(found) in (DynamicLayer, DynamicSlidingWindowLayer) and not cache.offloading:
            if found.get_seq_length():
                raise InputError("a token filter cannot go on with a cache that was filled without it; begin a new one")
            found = cache.layers[index] = FilteredLayer(found, self)
        if not isinstance(found, FilteredLayer):
            raise InputError(
                f"a token filter needs a DynamicCache, not {type(found).__name__} in {type(cache).__name__}"
            )
        if found.filter is not self:
            raise InputError("this cache was filled under another token filter; begin a new one")
        found.is_awaited = True
        return found

    def _project_through(self, layer: AttentionLayer, stack: ExitStack) -> None:
        """Let a layer's output projection leave out what skips; hooks on it see all tokens, in whatever order."""
        module: Any = layer.o_proj
        before = vars(module).get("forward")  # another library's, if any
        module.forward = partial(self._project, layer, module.forward)
        stack.callback(setattr, module, "forward", before) if before else stack.callback(delattr, module, "forward")

    def _project(self, layer: AttentionLayer, project: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
        """The output projection of tokens that do not skip; zeros for the others, without its bias."""
        skipped = self._attended.pop(layer.label)
        if x.is_cuda or skipped.numel() <= FEW:  # a GPU would be waited for
            out = project(x)
            return out if getattr(layer.o_proj, "bias", None) is None else out.masked_fill(skipped[..., None], 0)
        kept = ~skipped
        part = project(x[kept])
        out = part.new_zeros(*x.shape[:-1], part.shape[-1])
        out[kept] = part
        return out

    # ------------------------------------------------------------------ attention

    def handle(self, call: AttentionCall, attend: Attend) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The attention of the tokens that do not skip; zeros for the others."""
        label = call.layer.label
        if label not in self.labels:
            return attend(call)
        if call.store is not None:
            return self._in_store(call, call.store, attend)
        place = self._caches.pop(label, None)
        sequences = (place.sequences if place else None) or sequences_like(call.key, call.value)
        if place:
            place.sequences, place.is_awaited = sequences, False
        valid = self._valid_of(call)
        if isinstance(sequences, DeviceSequences):
            by_kernel = can_attend(call)
            before = [] if by_kernel else sequences.lengths.tolist()
            absent = self.on_device.decide(label, call, sequences, valid)
            self.skipped[label] = self._attended[label] = absent & valid
            if by_kernel:
                softcap = call.options.get("softcap") if _is_eager(call) else None  # as in layers without a filter
                return self.on_device.attend(call, sequences, valid, absent, softcap), None
            kept = ~absent
        else:
            before = list(sequences.lengths)
            skipped = torch.from_numpy(self._decide(label, call, sequences, valid)).to(call.query.device)
            self.skipped[label] = self._attended[label] = skipped
            kept = valid & ~skipped
            sequences.append(call.key, call.value, valid if self.keep_skipped_kv else kept)
        found = {
            row: self._row(call, attend, sequences, row, tokens, before[row])
            for row, tokens in enumerate(kept)
            if tokens.any()
        }
        shape = (*call.query.shape[:1], call.query.shape[2], call.query.shape[1], call.value.shape[-1])
        out = next(iter(found.values()), call.value).new_zeros(shape)  # autocast's type, too
        for row, attended in found.items():
            out[row, kept[row]] = attended
        return out, None

    def _in_store(self, call: AttentionCall, store: Store, attend: Attend) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same for packed sequences, whose keys and values the store has."""
        label, key, value = call.layer.label, call.key, call.value
        count = partial(self._count, label, key.device)
        states = store.state(call, self, lambda: SlotStates(store.count, key, value, count))
        skipped = states.decide(store.packed, key, value, self.rule)
        count(len(skipped), skipped.sum())
        self.skipped[label] = self._attended[label] = skipped[None]
        asks = _both(~skipped, call.stays if call.asks is None else call.asks)
        return attend(
            replace(call, stays=call.stays if self.keep_skipped_kv else _both(~skipped, call.stays), asks=asks)
        )

    def _count(self, label: str, device: torch.device, tokens: int | torch.Tensor, skipped: torch.Tensor) -> None:
        if device.type == "cuda":  # which is not waited for
            totals = self.on_device.totals_of(label, device)
            totals[0] += tokens
            totals[1] += skipped
        else:
            self.counts[label].update(tokens=int(tokens), skipped=int(skipped))

    def _valid_of(self, call: AttentionCall) -> torch.Tensor:
        """`valid_tokens`, once for all layers of a decode step that are given the same mask."""
        shape = (call.query.shape[0], call.query.shape[2])
        mask, valid = self._last
        if mask is not call.mask or valid is None or valid.shape != shape or valid.device != call.query.device:
            valid = valid_tokens(call)
            self._last = (call.mask, valid) if shape[1] == 1 else (None, None)
        return valid

    def _decide(self, label: str, call: AttentionCall, sequences: Sequences, valid: torch.Tensor) -> np.ndarray:
        from lmeval_prune.kernels.token_filter import compiled

        states = sequences.states if self._shared is None else self._shared.setdefault(label, fresh(1).numpy())
        key, value = (array(tensor) for tensor in (call.key, call.value))
        is_token = valid.cpu().numpy()
        skipped = compiled.decide(key, value, is_token, sequences.begun, *sequences.anchors, states, *self.rule)
        self.counts[label].update(tokens=int(is_token.sum()), skipped=int(skipped.sum()))
        found: np.ndarray = skipped
        return found

    def _row(
        self,
        call: AttentionCall,
        attend: Attend,
        sequences: Sequences | DeviceSequences,
        row: int,
        tokens: torch.Tensor,
        before: int,
    ) -> torch.Tensor:
        """The attention of a row's tokens that do not skip, (tokens, heads, width)."""
        length = int(sequences.lengths[row])
        chosen = tokens.nonzero()[:, 0]
        query = call.query[row : row + 1, :, chosen]
        here = slice(row, row + 1)
        key, value = sequences.keys[here, :, :length], sequences.values[here, :, :length]
        window = call.options.get("sliding_window")
        causal = query.shape[2] == length and before == 0  # every key is a query: its own mask does it
        mask = None
        if (
            window is not None
            or not (causal or (query.shape[2] == 1 and int(chosen[0]) + 1 == len(tokens)))
            or (_is_eager(call) and query.shape[2] > 1)
        ):
            seen = sequences.places[row, :length]
            asks = chosen + (sequences.tokens - len(tokens))
            hidden = seen > asks[:, None]
            if window is not None:
                hidden |= seen <= asks[:, None] - window
            mask = query.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(query.dtype).min)[None, None]
        return attend(replace(call, query=query, key=key, value=value, mask=mask))[0][0]


def _both(one: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """Where both are true; None is true everywhere."""
    return one if other is None else one & other


def valid_tokens(call: AttentionCall) -> torch.Tensor:
    """Which new tokens are no padding, (rows, tokens): those that see themselves."""
    rows, tokens = call.query.shape[0], call.query.shape[2]
    if call.mask is None:
        return torch.ones(rows, tokens, dtype=torch.bool, device=call.query.device)
    seen = call.mask[:, 0, :, -tokens:]
    seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
    valid = seen.diagonal(dim1=1, dim2=2).expand(rows, tokens)
    if tokens > 1:
        places = torch.arange(tokens, device=seen.device)
        causal = (places <= places[:, None]) & valid[:, None]
        if (window := call.options.get("sliding_window")) is not None:
            causal &= places > places[:, None] - window
        if not torch.equal(seen & valid[..., None], causal & valid[..., None]):
            raise InputError("this method needs causal attention to one text a row; give packed texts row by row")
    return valid


def _is_eager(call: AttentionCall) -> bool:
    module: Any = call.module
    return str(getattr(module, "config", None) and module.config._attn_implementation).endswith("eager")
