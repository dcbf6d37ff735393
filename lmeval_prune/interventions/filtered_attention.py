"""Attention in which some tokens are skipped, on stock models and with the engine's store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from lmeval_prune.architectures import AttentionLayer, ModelMap
from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.attention_call import (
    Attend,
    Attended,
    AttentionCall,
    Store,
    additive_mask,
    intercept_attention,
    not_causal,
    valid_tokens,
)
from lmeval_prune.interventions.base import change_output
from lmeval_prune.interventions.filtered_cache import FilteredCacheLayer
from lmeval_prune.kernels.decode_attention import ops as attention
from lmeval_prune.kernels.dispatch import on_device
from lmeval_prune.kernels.token_filter import ops as token_filter
from lmeval_prune.kernels.token_filter.state import COUNT, SKIPPED, THRESHOLD, Memory, Rule, fresh_states

SMALL_PASS = 64  # up to this number of tokens, projecting all costs less than selecting the tokens that stay
# Attention options that the decode kernel implements, or that do not change the result.
KERNEL_OPTIONS = {"scaling", "sliding_window", "softcap", "is_causal", "position_ids", "use_cache"}
KERNEL_OPTIONS |= {"output_hidden_states", "output_router_logits"}


@dataclass
class SlotMemory(Memory):
    """Memory of the sequences in a store's slots; a `SlotState`."""

    totals: torch.Tensor  # tokens and skipped tokens of the layer so far, (2,); updated in place

    @classmethod
    def fresh_slots(cls, slots: int, call: AttentionCall, totals: torch.Tensor) -> SlotMemory:
        """Return the memory of new sequences."""
        started, anchor_key, anchor_value, states = Memory.fresh(slots, call.key, call.value).tensors
        return cls(started, anchor_key, anchor_value, states, totals)

    def begin(self, slots: Sequence[int]) -> None:
        """Reset slots."""
        rows = list(slots)
        for tensor in self.tensors:
            tensor[rows] = 0
        self.states[rows, THRESHOLD] = 1

    def move(self, source: int, target: int) -> None:
        """Copy a sequence to another slot."""
        self.write(target, self.snapshot(source))

    def snapshot(self, slot: int) -> Memory:
        """Return a copy of a sequence's memory."""
        return Memory(*(tensor[slot].clone() for tensor in self.tensors))

    def restore(self, slot: int, state: Memory) -> None:
        """Continue a slot from a snapshot, and count its tokens again."""
        self.write(slot, state)
        self.totals += state.states[[COUNT, SKIPPED]].long()


class FilteredAttention:
    """Attention handler that decides which tokens skip; the other tokens attend.

    Args:
        rule: of all filtered layers.
        shared: use one threshold for all sequences of a layer.
        keep_skipped_kv: store the keys and values of skipped tokens, too.

    Attributes:
        totals: by layer, tokens and skipped tokens so far, (2,).
        skipped: by layer, decisions of the last pass, (rows, tokens).
    """

    def __init__(self, rule: Rule, shared: bool, keep_skipped_kv: bool) -> None:
        self.rule, self.keep_skipped_kv = rule, keep_skipped_kv
        self.totals: dict[str, torch.Tensor] = {}
        self.skipped: dict[str, torch.Tensor] = {}
        self._shared_states: dict[str, torch.Tensor] | None = {} if shared else None  # by layer
        self._unprojected: dict[str, torch.Tensor] = {}  # skipped tokens, for the output of a layer's running attention
        self._caches: dict[str, FilteredCacheLayer | None] = {}  # of the running pass, by layer
        self._last_valid: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # a mask and its valid tokens
        self._labels: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> FilteredAttention:
        """Return itself: a copied cache keeps its filter."""
        return self

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Restore counters and shared thresholds after the block."""
        records = [self.totals] if self._shared_states is None else [self.totals, self._shared_states]
        before = [[(label, tensor, tensor.clone()) for label, tensor in record.items()] for record in records]
        try:
            yield
        finally:
            for record, entries in zip(records, before, strict=True):
                record.clear()
                for label, tensor, numbers in entries:  # in place: the engine's slots refer to the same tensors
                    record[label] = tensor.copy_(numbers)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Skip tokens 5 and 10 (from 0) of each sequence, and no others up to 11, unless all tokens are equal."""
        # The threshold starts far below all similarities, so token 5 skips. Each step then adds `step_size` × (share of
        # skipped tokens − `share`): the sum of these differences, and with it the threshold, is far above 0 until token
        # 9, and far below 0 at token 10.
        rule = replace(self.rule, share=0.1325, step_size=1e12, warmup=5, initial=-1e9)
        with replaced(self, rule=rule):
            yield

    # ------------------------------------------------------------------ hooks on the model

    def attach(self, model_map: ModelMap, layers: Sequence[AttentionLayer], stack: ExitStack) -> None:
        """Filter these layers until `stack` closes."""
        intercept_attention(model_map, self.handle, stack)
        stack.callback(self._release_caches)
        self._labels = {layer.label for layer in layers}
        for layer in layers:
            hook = layer.module.register_forward_pre_hook(partial(self._find_cache, layer.label), with_kwargs=True)
            stack.callback(hook.remove)
            self._replace_projection(layer, stack)
            change_output(layer.module, partial(self._without_skipped, layer), stack)

    def _release_caches(self) -> None:
        """Drop the state of a pass that ended with an exception."""
        for layer in filter(None, self._caches.values()):
            layer.is_awaited = False
        self._caches.clear()
        self._unprojected.clear()

    def _find_cache(self, label: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the cache among the arguments of an attention module."""
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        self._caches[label] = None if cache is None else self._cache_layer(cache, module.layer_idx)

    def _cache_layer(self, cache: Cache, index: int) -> FilteredCacheLayer:
        """Return the filtered layer of a cache; a new `DynamicLayer` is replaced by one."""
        while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
        layer: Any = cache.layers[index]
        if (
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            and not cache.offloading
            and not layer.get_seq_length()
        ):
            layer = cache.layers[index] = FilteredCacheLayer(layer, self)
        if not isinstance(layer, FilteredCacheLayer) or layer.owner is not self:
            raise InputError(
                "a token filter needs a new DynamicCache, not another kind or one that was filled without it"
            )
        layer.is_awaited = True
        return layer

    def _replace_projection(self, layer: AttentionLayer, stack: ExitStack) -> None:
        """Replace `forward` of the output projection. Hooks on the module still see all tokens."""
        module: Any = layer.o_proj
        before = vars(module).get("forward")  # set by another library
        module.forward = partial(self._project, layer, module.forward)
        stack.callback(setattr, module, "forward", before) if before else stack.callback(delattr, module, "forward")

    def _project(self, layer: AttentionLayer, project: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
        """Project the outputs of tokens that are not skipped; zeros for the others, without the bias."""
        skipped = self._unprojected[layer.label]
        if x.is_cuda or skipped.numel() <= SMALL_PASS:  # on a GPU, selecting rows would wait for the device
            out = project(x)
            return out if getattr(layer.o_proj, "bias", None) is None else out.masked_fill(skipped[..., None], 0)
        is_computed = ~skipped
        projected = project(x[is_computed])
        out = projected.new_zeros(*x.shape[:-1], projected.shape[-1])
        out[is_computed] = projected
        return out

    def _without_skipped(self, layer: AttentionLayer, output: torch.Tensor) -> torch.Tensor:
        """Zero the output of skipped tokens, to which hooks on the output projection may have added a bias."""
        skipped = self._unprojected.pop(layer.label)
        return output.masked_fill(skipped[..., None], 0) if layer.o_proj._forward_hooks else output

    # ------------------------------------------------------------------ attention

    def handle(self, call: AttentionCall, attend: Attend) -> Attended:
        """Decide which new tokens skip, and compute the attention of the others; skipped tokens get zeros."""
        label = call.layer.label
        if label not in self._labels:
            return attend(call)
        if call.store is not None:
            return self._attend_in_store(call, call.store, attend)
        cache = self._caches.pop(label, None) or FilteredCacheLayer(DynamicLayer(), self)
        if call.options.get("sliding_window") is None and cache.tokens + call.key.shape[2] > cache.window:
            raise not_causal(call)  # a decode step may have no mask that shows it
        cache.is_awaited, memory, valid = False, cache.begin(call.key, call.value), self._valid_tokens(call)
        if self._shared_states is not None:
            memory = replace(memory, states=self._shared_states.setdefault(label, fresh_states(1, call.key.device)))
        absent = cache.store(call.key, call.value, valid, memory, self._totals(label, call.key.device))
        self.skipped[label] = self._unprojected[label] = absent & valid
        if valid.shape[1] == 1 and on_device(call.query) and _kernel_supports(call):
            return _decode(call, cache, absent[:, 0]), None
        rows = [(row, is_present.nonzero()[:, 0]) for row, is_present in enumerate(~absent)]
        outputs = [(row, chosen, _attend_row(call, attend, cache, row, chosen)) for row, chosen in rows if len(chosen)]
        shape = (*valid.shape, call.query.shape[1], call.value.shape[-1])
        out = (outputs[0][2] if outputs else call.value).new_zeros(shape)  # has autocast's dtype, too
        for row, chosen, output in outputs:
            out[row, chosen] = output
        return out, None

    def _attend_in_store(self, call: AttentionCall, store: Store, attend: Attend) -> Attended:
        """Decide for the packed sequences of the engine, and pass masks of the tokens that stay to its store."""
        totals = self._totals(call.layer.label, call.key.device)
        memory = store.state(call, self, lambda: SlotMemory.fresh_slots(store.count, call, totals))
        decisions, start = [], 0
        for count, sequences in groupby(zip(store.packed.slots, store.packed.counts, strict=True), key=itemgetter(1)):
            slots = torch.tensor([slot for slot, _ in sequences], device=call.key.device)
            tokens = slice(start, start + len(slots) * count)
            key, value = (x[0, :, tokens].unflatten(1, (-1, count)).transpose(0, 1) for x in (call.key, call.value))
            rows, valid = memory.rows(slots), torch.ones(len(slots), count, dtype=torch.bool, device=slots.device)
            decisions.append(token_filter.decide(key, value, valid, rows, self.rule).flatten())
            memory.write(slots, rows)
            start = tokens.stop
        skipped = torch.cat(decisions)
        totals += torch.stack([torch.ones_like(skipped).sum(), skipped.sum()])
        self.skipped[call.layer.label] = self._unprojected[call.layer.label] = skipped[None]
        query_mask = _and(~skipped, call.stored_mask if call.query_mask is None else call.query_mask)
        stored_mask = call.stored_mask if self.keep_skipped_kv else _and(~skipped, call.stored_mask)
        return attend(replace(call, stored_mask=stored_mask, query_mask=query_mask))

    @torch.inference_mode(False)  # an inference tensor could not be updated outside of inference mode
    def _totals(self, label: str, device: torch.device) -> torch.Tensor:
        if label not in self.totals:
            self.totals[label] = torch.zeros(2, dtype=torch.long, device=device)
        return self.totals[label]

    def _valid_tokens(self, call: AttentionCall) -> torch.Tensor:
        """Return `valid_tokens`, computed once for all layers of a decode step with the same mask."""
        shape = (call.query.shape[0], call.query.shape[2])
        mask, valid = self._last_valid
        if mask is not call.mask or valid is None or valid.shape != shape or valid.device != call.query.device:
            valid = valid_tokens(call)
            self._last_valid = (call.mask, valid) if shape[1] == 1 else (None, None)
        return valid


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


def _decode(call: AttentionCall, cache: FilteredCacheLayer, absent: torch.Tensor) -> torch.Tensor:
    """Compute the attention of one token per row by the kernel, (rows, 1, heads, width)."""
    scaling = call.options.get("scaling")
    return attention.decode(
        call.query[:, :, 0],
        cache.keys,
        cache.values,
        cache.lengths,
        call.query.shape[-1] ** -0.5 if scaling is None else scaling,
        skipped=absent,
        window=call.options.get("sliding_window"),
        positions=cache.positions,
        softcap=call.options.get("softcap") if _is_eager(call) else None,  # sdpa ignores it in unfiltered layers, too
    )[:, None]


def _kernel_supports(call: AttentionCall) -> bool:
    """Return whether the decode kernel implements all options of a call."""
    options = {name for name, value in call.options.items() if value is not None and value is not False}
    return options - ({"dropout"} if call.options.get("dropout") == 0 else set()) <= KERNEL_OPTIONS


def _and(condition: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    return condition if other is None else condition & other


def _is_eager(call: AttentionCall) -> bool:
    config = getattr(call.module, "config", None)
    return str(config and config._attn_implementation).endswith("eager")
