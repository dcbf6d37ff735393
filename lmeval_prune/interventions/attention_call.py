"""Attention calls: the function that is registered with transformers, and what stands before and behind it.

Whatever needs queries, keys and values after rotary embedding goes through it: *handlers* stand in front of a layer's
attention (a token filter, a probe of its entropy), the last one put in first; behind them, in place of the attention
itself, there may be a *store* of keys and values (the decoding engine's). So a handler works with the model's own
attention and with the engine's alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from lmeval_prune.architectures import AttentionLayer, ModelMap
from lmeval_prune.errors import InputError

NAME = "lmeval_prune"  # among transformers' attention functions; masks are the store's business
WRAPPABLE = ("sdpa", "eager")  # implementations that handlers can stand in front of

Attended = tuple[torch.Tensor, torch.Tensor | None]


class UnsupportedAttention(Exception):  # noqa: N818 - a reason to fall back, not a failure
    """A model's attention asks for something that is not done here."""


@dataclass(frozen=True)
class Packed:
    """Sequences of a packed batch (1, tokens), one after another.

    Attributes:
        slots: of each sequence, where a store has it.
        starts: how many of its tokens the store has seen; 0 for one that begins.
        counts: how many are new.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]


class SlotState(Protocol):
    """Memory of a handler about the sequences in a store, slot by slot; it moves with them."""

    def begin(self, slots: Sequence[int]) -> None:
        """Begin other sequences there."""

    def move(self, source: int, target: int) -> None:
        """Move a sequence to another slot."""

    def take(self, slot: int) -> Any:
        """Return a copy of what is remembered of a sequence."""

    def put(self, slot: int, taken: Any) -> None:
        """Let another sequence go on from a copy."""


State = TypeVar("State", bound=SlotState)


class Store(Protocol):
    """Keys and values of many sequences, and the attention over them, in place of the model's own.

    Attributes:
        count: how many slots it has.
        packed: what the pass that runs is about.
    """

    count: int
    packed: Packed

    def attend(self, call: AttentionCall) -> Attended:
        """Compute the attention of new tokens, and store their keys and values."""

    def state(self, call: AttentionCall, owner: Hashable, make: Callable[[], State]) -> State:
        """Return the memory of `owner` in a layer, made at first use; what begins in this pass is told to begin."""


@dataclass
class AttentionCall:
    """A call of an attention module.

    Attributes:
        layer: the attention layer that is computed.
        module: the calling module: the layer's attention module, or in some families a part of it.
        query: (batch, heads, tokens, width).
        key, value: (batch, key-value heads, keys, width), after rotary embedding, as they are cached.
        mask: the model's own mask, as its implementation takes it (None may mean causal); always None before a store.
        options: `scaling`, `softcap`, `sliding_window`, `dropout` and the like.
        store: the engine's store, which replaces the model's own attention, or None; with a store the batch is packed.
        stored_mask: for a store, the new tokens that it keeps, (tokens,); None: all. No token attends to the others. A
            layer sets it in all calls or in none.
        query_mask: for a store, the tokens that attend, (tokens,); None: all stored ones. The others get zeros.
    """

    layer: AttentionLayer
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]
    store: Store | None = None
    stored_mask: torch.Tensor | None = None
    query_mask: torch.Tensor | None = None


Attend = Callable[[AttentionCall], Attended]
Handler = Callable[[AttentionCall, Attend], Attended]


@dataclass
class _Wiring:
    """Handlers and stores that a model's attention modules call."""

    originals: list[tuple[Any, str]]  # configurations, and the implementations that they named
    handlers: list[Handler] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)

    @property
    def original(self) -> str:
        return self.originals[0][1]


# Of all modules of a model: what they were wired to, and which attention layer they belong to, if to any.
_WIRED: WeakKeyDictionary[nn.Module, tuple[_Wiring, AttentionLayer | None]] = WeakKeyDictionary()


def intercept_attention(model_map: ModelMap, handler: Handler, stack: ExitStack) -> None:
    """Let `handler(call, attend)` answer all attention calls of a model until `stack` closes.

    It may change the call, call `attend` or not, and change what comes back: attention outputs (batch, tokens, heads,
    width), and weights or None.

    Raises:
        InputError: the model does not call attention functions, or uses one that nothing can stand in front of.
    """
    check_attention_calls(model_map)
    wiring = _wiring_of(model_map)
    wiring.handlers.append(handler)
    stack.callback(_take_out, model_map, wiring, wiring.handlers, handler)
    _name_implementation(wiring)


def replace_attention(model_map: ModelMap, store: Store, stack: ExitStack) -> None:
    """Let `store` compute the attention of all layers, behind what stands in front, until `stack` closes."""
    wiring = _wiring_of(model_map)
    wiring.stores.append(store)
    stack.callback(_take_out, model_map, wiring, wiring.stores, store)
    _name_implementation(wiring)


def check_attention_calls(model_map: ModelMap) -> None:
    """Refuse a model whose attention cannot be handled; on a model without weights, too.

    Raises:
        InputError: saying why.
    """
    model: Any = model_map.model
    model = getattr(model, "get_base_model", lambda: model)()  # PEFT
    if not type(model)._can_set_attn_implementation():
        raise InputError(f"{model_map.model_type} models do not compute attention through transformers' interface")
    implementation = model.config._attn_implementation
    if implementation not in (NAME, *WRAPPABLE, *map(_in_front, WRAPPABLE)):
        raise InputError(f"attn_implementation={implementation} cannot be intercepted; use {' or '.join(WRAPPABLE)}")


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Let a model compute its attention by its plain formula inside the block, and give out its weights if asked."""
    implementations = [(config, config._attn_implementation) for config in _configs_of(model)]
    try:
        for config, _ in implementations:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in implementations:
            config._attn_implementation = implementation


def _configs_of(model: nn.Module) -> list[Any]:
    """Return the configurations of a model's modules that name an attention implementation, each once."""
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]


def _wiring_of(model_map: ModelMap) -> _Wiring:
    """Return the wiring of a model, or a new one of all its modules.

    Raises:
        InputError: another model with the same configuration object is wired.
    """
    if entry := _WIRED.get(model_map.attention[0].module):
        return entry[0]
    configs = _configs_of(model_map.model)
    wired = {id(config) for wiring, _ in list(_WIRED.values()) for config, _ in wiring.originals}
    if wired & set(map(id, configs)):
        raise InputError(
            "another model with the same configuration object has its attention handled at the moment; build this "
            "one with a copy of the configuration (copy.deepcopy)"
        )
    # a configuration that was copied while it was wired names this module's function
    wiring = _Wiring([(config, config._attn_implementation.removeprefix(f"{NAME}_")) for config in configs])
    for module in model_map.model.modules():
        _WIRED[module] = (wiring, None)
    for layer in model_map.attention:
        for module in layer.module.modules():  # in some families a part of it calls
            _WIRED[module] = (wiring, layer)
    return wiring


def _take_out(model_map: ModelMap, wiring: _Wiring, stack: list[Any], handler: Any) -> None:
    del stack[next(i for i in reversed(range(len(stack))) if stack[i] is handler)]
    if wiring.handlers or wiring.stores:
        _name_implementation(wiring)
        return
    for module in [module for module, (wired, _) in _WIRED.items() if wired is wiring]:
        del _WIRED[module]
    for config, implementation in wiring.originals:
        config._attn_implementation = implementation


def _in_front(original: str) -> str:
    return f"{NAME}_{original}"


def _name_implementation(wiring: _Wiring) -> None:
    for config, original in wiring.originals:
        config._attn_implementation = NAME if wiring.stores else _in_front(original)


def valid_tokens(call: AttentionCall) -> torch.Tensor:
    """Return which new tokens are no padding, (rows, tokens): those that see themselves.

    Raises:
        InputError: the mask is not a causal one of one text a row.
    """
    rows, tokens = call.query.shape[0], call.query.shape[2]
    if call.mask is None:
        return torch.ones(rows, tokens, dtype=torch.bool, device=call.query.device)
    seen = call.mask[:, 0, :, -tokens:]
    seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
    valid = seen.diagonal(dim1=1, dim2=2).expand(rows, tokens)
    if tokens > 1:
        positions = torch.arange(tokens, device=seen.device)
        causal = (positions <= positions[:, None]) & valid[:, None]
        if (window := call.options.get("sliding_window")) is not None:
            causal &= positions > positions[:, None] - window
        if not torch.equal(seen & valid[..., None], causal & valid[..., None]):
            raise InputError("this method needs causal attention to one text a row; give packed texts row by row")
    return valid


def _attend(
    implementation: str | None,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> Attended:
    """Answer transformers' call; `implementation` is the model's, if the name says it."""
    entry = _WIRED.get(module)
    if entry is None and implementation:  # another model, whose configuration is the same or a copy
        return _function(implementation, module)(module, query, key, value, attention_mask, **options)
    wiring, layer = entry or (None, None)
    if wiring is None or layer is None:
        raise UnsupportedAttention("its attention is computed by modules that are not known")
    store = wiring.stores[-1] if wiring.stores else None
    attend: Attend = store.attend if store else _original
    for handler in wiring.handlers:
        attend = _after(handler, attend)
    return attend(AttentionCall(layer, module, query, key, value, attention_mask, options, store))


def _after(handler: Handler, attend: Attend) -> Attend:
    return lambda call: handler(call, attend)


def _original(call: AttentionCall) -> Attended:
    """Compute the model's own attention."""
    function = _function(_WIRED[call.module][0].original, call.module)
    return function(call.module, call.query, call.key, call.value, call.mask, **call.options)


def _function(implementation: str, module: nn.Module) -> Callable[..., Attended]:
    family: Any = sys.modules[type(module).__module__]
    eager: Any = getattr(family, "eager_attention_forward", None)
    function: Callable[..., Attended] = AttentionInterface().get_interface(implementation, eager)
    return function


AttentionInterface.register(NAME, partial(_attend, None))
for _implementation in WRAPPABLE:
    AttentionInterface.register(_in_front(_implementation), partial(_attend, _implementation))
    AttentionMaskInterface.register(_in_front(_implementation), AttentionMaskInterface()[_implementation])
