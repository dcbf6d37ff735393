"""The attention of layers in which some tokens are skipped, on stock models and in front of the engine's store."""

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
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.attention_call import Attend, AttentionCall, Store, intercept_attention, valid_tokens
from lmeval_prune.interventions.filtered_cache import FilteredLayer
from lmeval_prune.kernels.dispatch import on_device
from lmeval_prune.kernels.filtered_attention import ops as attention
from lmeval_prune.kernels.token_filter import ops as token_filter
from lmeval_prune.kernels.token_filter.state import SEEN, SKIPPED, THRESHOLD, Memory, Rule, fresh_states

SMALL_PASS = 64  # tokens, up to which projecting all of them costs less than picking those that are not skipped
# Options of attention that the decode kernel serves, or that say nothing about what is computed.
KERNEL_OPTIONS = {"scaling", "sliding_window", "softcap", "is_causal", "position_ids", "use_cache"}
KERNEL_OPTIONS |= {"output_hidden_states", "output_router_logits"}


@dataclass
class SlotMemory(Memory):
    """Memory of the sequences in a store's slots; a `SlotState`.

    Attributes:
        totals: tokens and skipped ones of the layer so far, (2,); written.
    """

    totals: torch.Tensor

    @classmethod
    def fresh_slots(cls, slots: int, call: AttentionCall, totals: torch.Tensor) -> SlotMemory:
        """Return the memory of new sequences for the keys and values of a call."""
        memory = Memory.fresh(slots, call.key, call.value)
        return cls(memory.begun, memory.anchor_key, memory.anchor_value, memory.states, totals)

    def begin(self, slots: Sequence[int]) -> None:
        """Forget the sequences that were in these slots."""
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
        """Continue a copied sequence in a slot; its tokens are counted again."""
        self.write(slot, state)
        self.totals += state.states[[SEEN, SKIPPED]].long()


class FilteredAttention:
    """Handler in front of the attention of some layers: decides about each token, and lets the others attend.

    Args:
        rule: of all layers.
        shared: whether a layer has one threshold for all sequences.
        keep_skipped_kv: whether later tokens see skipped ones.

    Attributes:
        totals: by layer, tokens and skipped ones so far, (2,).
        skipped: by layer, decisions of the last pass, (rows, tokens).
    """

    def __init__(self, rule: Rule, shared: bool, keep_skipped_kv: bool) -> None:
        self.rule, self.keep_skipped_kv = rule, keep_skipped_kv
        self.totals: dict[str, torch.Tensor] = {}
        self.skipped: dict[str, torch.Tensor] = {}
        self._shared: dict[str, torch.Tensor] | None = {} if shared else None  # states by layer
        self._unprojected: dict[str, torch.Tensor] = {}  # skipped tokens, for the output projection that follows
        self._caches: dict[str, FilteredLayer | None] = {}
        self._last_valid: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._labels: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> FilteredAttention:
        """Return itself: copies of a cache are filled by the same filter."""
        return self

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Count nothing inside the block, and move no threshold that all sequences share."""
        records = [self.totals] if self._shared is None else [self.totals, self._shared]
        before = [[(label, tensor, tensor.clone()) for label, tensor in record.items()] for record in records]
        try:
            yield
        finally:
            for record, entries in zip(records, before, strict=True):
                record.clear()
                for label, tensor, numbers in entries:  # in place: the engine's slots count in them, too
                    record[label] = tensor.copy_(numbers)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Skip a sequence's tokens 5 and 10 (from 0) inside the block, and no others up to 11, if not all are equal."""
        rule = self.rule
        # the threshold begins far below all similarities; steps so large take it far above them while the sum of
        # skipped / tokens − share since the warm-up is positive, and below them where it is not: before token 10
        self.rule = replace(rule, share=0.1325, step_size=1e12, warmup=5, first=-1e9)
        try:
            yield
        finally:
            self.rule = rule

    # ------------------------------------------------------------------ hooks on the model

    def attach(self, model_map: ModelMap, layers: Sequence[AttentionLayer], stack: ExitStack) -> None:
        """Handle the attention of these layers until `stack` closes."""
        intercept_attention(model_map, self.handle, stack)
        stack.callback(self._forget)
        self._labels = {layer.label for layer in layers}
        for layer in layers:
            hook = layer.module.register_forward_pre_hook(partial(self._find_cache, layer.label), with_kwargs=True)
            stack.callback(hook.remove)
            self._project_through(layer, stack)

    def _forget(self) -> None:
        """Leave no cache waiting, as an exception in the middle of a pass would."""
        for layer in filter(None, self._caches.values()):
            layer.is_awaited = False
        self._caches.clear()
        self._unprojected.clear()

    def _find_cache(self, label: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See which cache the layer is about to use, and put a `FilteredLayer` into it."""
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        self._caches[label] = None if cache is None else self._layer_of(cache, module.layer_idx)

    def _layer_of(self, cache: Cache, index: int) -> FilteredLayer:
        while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
        layer: Any = cache.layers[index]
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and not cache.offloading:
            if layer.get_seq_length():
                raise InputError("a token filter cannot go on with a cache that was filled without it; begin a new one")
            layer = cache.layers[index] = FilteredLayer(layer, self)
        if not isinstance(layer, FilteredLayer):
            raise InputError(
                f"a token filter needs a DynamicCache, not {type(layer).__name__} in {type(cache).__name__}"
            )
        if layer.owner is not self:
            raise InputError("this cache was filled under another token filter; begin a new one")
        layer.is_awaited = True
        return layer

    def _project_through(self, layer: AttentionLayer, stack: ExitStack) -> None:
        """Let a layer's output projection leave out skipped tokens; hooks on it see all tokens, in whatever order."""
        module: Any = layer.o_proj
        before = vars(module).get("forward")  # another library's, if any
        module.forward = partial(self._project, layer, module.forward)
        stack.callback(setattr, module, "forward", before) if before else stack.callback(delattr, module, "forward")

    def _project(self, layer: AttentionLayer, project: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
        """Project the outputs of tokens that are not skipped; zeros for the others, without the bias."""
        skipped = self._unprojected.pop(layer.label)
        if x.is_cuda or skipped.numel() <= SMALL_PASS:  # picking rows would wait for a GPU
            out = project(x)
            return out if getattr(layer.o_proj, "bias", None) is None else out.masked_fill(skipped[..., None], 0)
        kept = ~skipped
        part = project(x[kept])
        out = part.new_zeros(*x.shape[:-1], part.shape[-1])
        out[kept] = part
        return out

    # ------------------------------------------------------------------ attention

    def handle(self, call: AttentionCall, attend: Attend) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the attention of the tokens that are not skipped; zeros for the others."""
        label = call.layer.label
        if label not in self._labels:
            return attend(call)
        totals = self._totals(label, call.key.device)
        if call.store is not None:
            return self._in_store(call, call.store, totals, attend)
        cache = self._caches.pop(label, None) or FilteredLayer(DynamicLayer(), self)
        cache.is_awaited, memory, valid = False, cache.begin(call.key, call.value), self._valid(call)
        if self._shared is not None:
            memory = replace(memory, states=self._shared.setdefault(label, fresh_states(1, call.key.device)))
        absent = cache.store(call.key, call.value, valid, self.rule, memory, totals, self.keep_skipped_kv)
        self.skipped[label] = self._unprojected[label] = absent & valid
        if valid.shape[1] == 1 and on_device(call.query) and _serves(call):
            return _decode(call, cache, absent[:, 0]), None
        rows = [(row, kept.nonzero()[:, 0]) for row, kept in enumerate(~absent)]
        outputs = [(row, chosen, _row(call, attend, cache, row, chosen)) for row, chosen in rows if len(chosen)]
        shape = (*valid.shape, call.query.shape[1], call.value.shape[-1])
        out = (outputs[0][2] if outputs else call.value).new_zeros(shape)  # autocast's type, too
        for row, chosen, output in outputs:
            out[row, chosen] = output
        return out, None

    def _in_store(
        self, call: AttentionCall, store: Store, totals: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do the same for packed sequences, whose keys and values the store holds."""
        memory = store.state(call, self, lambda: SlotMemory.fresh_slots(store.count, call, totals))
        parts, start = [], 0
        for count, sequences in groupby(zip(store.packed.slots, store.packed.counts, strict=True), key=itemgetter(1)):
            slots = torch.tensor([slot for slot, _ in sequences], device=call.key.device)
            tokens = slice(start, start + len(slots) * count)
            key, value = (x[0, :, tokens].unflatten(1, (-1, count)).transpose(0, 1) for x in (call.key, call.value))
            rows, valid = memory.rows(slots), torch.ones(len(slots), count, dtype=torch.bool, device=slots.device)
            parts.append(token_filter.decide(key, value, valid, rows, self.rule).flatten())
            memory.write(slots, rows)
            start = tokens.stop
        skipped = torch.cat(parts)
        totals += torch.stack([torch.ones_like(skipped).sum(), skipped.sum()])
        self.skipped[call.layer.label] = self._unprojected[call.layer.label] = skipped[None]
        query_mask = _both(~skipped, call.stored_mask if call.query_mask is None else call.query_mask)
        stored_mask = call.stored_mask if self.keep_skipped_kv else _both(~skipped, call.stored_mask)
        return attend(replace(call, stored_mask=stored_mask, query_mask=query_mask))

    @torch.inference_mode(False)  # a normal tensor can be written in any mode
    def _totals(self, label: str, device: torch.device) -> torch.Tensor:
        if label not in self.totals:
            self.totals[label] = torch.zeros(2, dtype=torch.long, device=device)
        return self.totals[label]

    def _valid(self, call: AttentionCall) -> torch.Tensor:
        """`valid_tokens`, once for all layers of a decode step that share a mask."""
        shape = (call.query.shape[0], call.query.shape[2])
        mask, valid = self._last_valid
        if mask is not call.mask or valid is None or valid.shape != shape or valid.device != call.query.device:
            valid = valid_tokens(call)
            self._last_valid = (call.mask, valid) if shape[1] == 1 else (None, None)
        return valid


def _row(call: AttentionCall, attend: Attend, cache: FilteredLayer, row: int, chosen: torch.Tensor) -> torch.Tensor:
    """Compute the attention of chosen tokens of a row over what it has stored, (tokens, heads, width)."""
    length, tokens, window = int(cache.lengths[row]), call.query.shape[2], call.options.get("sliding_window")
    query = call.query[row : row + 1, :, chosen]
    key, value = cache.keys[row : row + 1, :, :length], cache.values[row : row + 1, :, :length]
    is_last = len(chosen) == 1 and int(chosen[0]) + 1 == tokens  # it sees all
    is_causal = len(chosen) == length and not _is_eager(call)  # every key is a query: the function masks by itself
    mask = None
    if window is not None or not (is_last or is_causal):
        positions, query_positions = cache.positions[row, :length], chosen[:, None] + (cache.tokens - tokens)
        hidden = positions > query_positions
        if window is not None:
            hidden |= positions <= query_positions - window
        mask = query.new_zeros(hidden.shape).masked_fill_(hidden, torch.finfo(query.dtype).min)[None, None]
    return attend(replace(call, query=query, key=key, value=value, mask=mask))[0][0]


def _decode(call: AttentionCall, cache: FilteredLayer, absent: torch.Tensor) -> torch.Tensor:
    """Compute the attention of one token a row by the kernel, (rows, 1, heads, width)."""
    scaling = call.options.get("scaling")
    return attention.decode(
        call.query[:, :, 0],
        cache.keys,
        cache.values,
        cache.lengths,
        absent,
        call.query.shape[-1] ** -0.5 if scaling is None else scaling,
        call.options.get("sliding_window"),
        cache.positions,
        call.options.get("softcap") if _is_eager(call) else None,  # as in layers without a filter
    )[:, None]


def _serves(call: AttentionCall) -> bool:
    """Return whether the decode kernel knows all options of this attention."""
    options = {name for name, value in call.options.items() if value is not None and value is not False}
    return options - ({"dropout"} if call.options.get("dropout") == 0 else set()) <= KERNEL_OPTIONS


def _both(condition: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """Join two conditions; None is true everywhere."""
    return condition if other is None else condition & other


def _is_eager(call: AttentionCall) -> bool:
    module: Any = call.module
    return str(getattr(module, "config", None) and module.config._attn_implementation).endswith("eager")
