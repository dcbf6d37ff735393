"""Attention calls: one attention function, registered with transformers, that runs handlers and stores.

A *handler* intercepts the attention of all layers after rotary embedding (a token filter, a probe). The last added
runs first. After the handlers runs the model's own attention or, in the decoding engine, a *store* of keys and values
that replaces it. So the same handler works with both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from lmeval_prune.architectures import AttentionLayer, ModelMap
from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.applied import changed_by

NAME = "lmeval_prune"  # of the attention function that calls a store; a store needs no masks of transformers
WRAPPABLE = ("sdpa", "eager")  # implementations that handlers can intercept


class UnsupportedAttention(Exception):  # noqa: N818 - a reason to fall back, not a failure
    """A model, or a method on it, needs a feature that the engine lacks; the message's subject is the model."""


Attended = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Packed:
    """Consecutive sequences of a packed batch (1, tokens)."""

    slots: Sequence[int]  # slot of each sequence in the store
    starts: Sequence[int]  # number of earlier tokens of each sequence
    counts: Sequence[int]  # number of new tokens of each sequence


class SlotState(Protocol):
    """State of a handler for the sequences in a store's slots; the store calls these methods."""

    def begin(self, slots: Sequence[int]) -> None:
        """Reset the slots for new sequences."""

    def move(self, source: int, target: int) -> None:
        """Move a sequence to another slot."""

    def snapshot(self, slot: int) -> Any:
        """Return a copy of a sequence's state."""

    def restore(self, slot: int, state: Any) -> None:
        """Continue a slot from a snapshot."""


State = TypeVar("State", bound=SlotState)


class Store(Protocol):
    """Keys and values of many sequences, with the attention over them; by default without what handlers store."""

    count: int = 0  # number of slots
    packed: Packed = Packed((), (), ())  # the sequences of the running pass

    def attend(self, call: AttentionCall) -> Attended:
        """Store the keys and values of new tokens, and compute their attention."""

    def state(self, call: AttentionCall, owner: Hashable, make: Callable[[], State]) -> State:
        """Return the state of the handler `owner` in the call's layer; `make` creates it at the first call.

        Slots of sequences that begin in this pass are reset.
        """
        raise UnsupportedAttention(
            "a method keeps a state of each text, and texts that share tokens are computed together"
        )


@dataclass
class AttentionCall:
    """A call of a layer's attention.

    Attributes:
        layer: the attention layer.
        module: the calling module: the layer's attention module, or in some families a part of it.
        query: (batch, heads, tokens, width).
        key, value: (batch, key-value heads, keys, width), after rotary embedding, as cached.
        mask: the model's own mask in its implementation's format (None may mean causal); always None with a store.
        options: `scaling`, `softcap`, `sliding_window`, `dropout` and the like.
        store: the engine's store, or None for the model's own attention. With a store the batch is packed.
        stored_mask: with a store, the new tokens to store, (tokens,); None: all. No token attends to the others. A
            layer sets it in all calls or in none.
        query_mask: with a store, the tokens that attend, (tokens,); None: all stored ones. The others get zeros.
    """

    layer: AttentionLayer
    module: Any
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


@dataclass(eq=False)
class _Wiring:
    """Handlers and stores of a model."""

    originals: list[tuple[Any, str]]  # configurations, and their attention implementations
    modules: list[nn.Module]
    handlers: list[Handler] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)


@dataclass(frozen=True)
class _Wire:
    """Attribute of each module of a wired model, which `torch.compile` can read; a copied module has none."""

    wiring: _Wiring
    layer: AttentionLayer | None  # that the module belongs to

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_ATTRIBUTE = "_lmeval_prune_attention"
_WIRINGS: list[_Wiring] = []


def intercept_attention(model_map: ModelMap, handler: Handler, stack: ExitStack) -> None:
    """Pass all attention calls of a model to `handler(call, attend)` until `stack` closes.

    The handler may change the call, skip `attend`, or change its result: attention outputs (batch, tokens, heads,
    width), and weights or None.
    """
    check_attention_calls(model_map)
    wiring = _wiring_of(model_map)
    _add(wiring, wiring.handlers, handler, stack)


def replace_attention(model_map: ModelMap, store: Store, stack: ExitStack) -> None:
    """Replace the attention of all layers, after the handlers, by a store until `stack` closes."""
    wiring = _wiring_of(model_map)
    _add(wiring, wiring.stores, store, stack)


def check_attention_calls(model_map: ModelMap) -> None:
    """Refuse a model whose attention cannot be intercepted; works on a model without weights, too."""
    model: Any = model_map.model
    model = getattr(model, "get_base_model", lambda: model)()  # PEFT
    if not type(model)._can_set_attn_implementation():
        raise InputError(f"{model_map.model_type} models do not compute attention through transformers' interface")
    implementation = model.config._attn_implementation
    if implementation not in (NAME, *WRAPPABLE, *map(_intercepted, WRAPPABLE)):
        raise InputError(f"attn_implementation={implementation} cannot be intercepted; use {' or '.join(WRAPPABLE)}")


def additive_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask to add to attention scores: the lowest number for hidden keys, and 0 for the others."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)


def valid_tokens(call: AttentionCall) -> torch.Tensor:
    """Return a mask of the new tokens that are not padding, (rows, tokens): those that attend to themselves."""
    rows, tokens = call.query.shape[0], call.query.shape[2]
    if call.mask is None:
        return torch.ones(rows, tokens, dtype=torch.bool, device=call.query.device)
    visible = call.mask[:, 0, :, -tokens:]
    if visible.dtype != torch.bool:
        added, visible = visible, visible > torch.finfo(visible.dtype).min / 2
        if tokens > 1 and added.masked_fill(~visible, 0).any():  # a mask that is more than a mask
            raise not_causal(call)
    valid = visible.diagonal(dim1=1, dim2=2).expand(rows, tokens)
    if tokens > 1:
        positions = torch.arange(tokens, device=visible.device)
        causal = (positions <= positions[:, None]) & valid[:, None]
        if (window := call.options.get("sliding_window")) is not None:
            causal &= positions > positions[:, None] - window
        if not torch.equal(visible & valid[..., None], causal & valid[..., None]):
            raise not_causal(call)
    return valid


def not_causal(call: AttentionCall) -> InputError:
    """Return the refusal of a layer whose tokens do not attend to all earlier ones, or to those in a known window."""
    kind = getattr(getattr(call.module, "config", None), "model_type", "this model")
    return InputError(
        f"{call.layer.label} of {kind}: this method needs causal attention to one text a row, whole or in a sliding "
        "window that the attention function is given; give packed texts row by row, and texts within other windows or "
        "chunks"
    )


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Use transformers' eager attention, which can return attention weights, inside the block."""
    with ExitStack() as stack:
        for config in reversed(_configs_of(model)):  # a configuration sets those within it, which come later
            stack.enter_context(replaced(config, _attn_implementation="eager"))
        yield


def _configs_of(model: nn.Module) -> list[Any]:
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]


def _wiring_of(model_map: ModelMap) -> _Wiring:
    wire: _Wire | None = getattr(model_map.attention[0].module, _ATTRIBUTE, None)
    if wire:
        return wire.wiring
    configs = _configs_of(model_map.model)
    wired = {id(config) for wiring in _WIRINGS for config, _ in wiring.originals}
    if wired & set(map(id, configs)):
        raise InputError(
            "another model with the same configuration object has its attention handled at the moment; build this "
            "one with a copy of the configuration (copy.deepcopy)"
        )
    # a copy of a wired configuration names this module's function
    originals = [(config, config._attn_implementation.removeprefix(f"{NAME}_")) for config in configs]
    wiring = _Wiring(originals, list(model_map.model.modules()))
    # in some families a submodule calls
    layers = {module: layer for layer in model_map.attention for module in layer.module.modules()}
    for module in wiring.modules:
        vars(module)[_ATTRIBUTE] = _Wire(wiring, layers.get(module))
    _WIRINGS.append(wiring)
    return wiring


def _add(wiring: _Wiring, items: list[Any], item: Any, stack: ExitStack) -> None:
    """Add a handler or a store, and register its removal."""

    def remove() -> None:
        del items[next(i for i in reversed(range(len(items))) if items[i] is item)]
        _name_implementation(wiring)
        if not wiring.handlers and not wiring.stores:
            _WIRINGS.remove(wiring)
            for module in wiring.modules:
                del vars(module)[_ATTRIBUTE]

    items.append(item)
    stack.callback(remove)
    _name_implementation(wiring)


def _name_implementation(wiring: _Wiring) -> None:
    for config, original in wiring.originals:
        handled = _intercepted(original) if wiring.handlers else original
        config._attn_implementation = NAME if wiring.stores else handled


def _intercepted(implementation: str) -> str:
    return f"{NAME}_{implementation}"


def _attend(
    implementation: str | None,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> Attended:
    """Answer a call of transformers, whose own function is `implementation` (None with a store)."""
    wire: _Wire | None = getattr(module, _ATTRIBUTE, None)
    if wire is None and implementation:  # another model with a copy of the configuration
        return _function(implementation, module)(module, query, key, value, attention_mask, **options)
    if wire is None or wire.layer is None:
        raise UnsupportedAttention("the model's attention is computed by modules that are not in the map of its heads")
    store = wire.wiring.stores[-1] if wire.wiring.stores else None
    attend: Attend = store.attend if store else _original_attention
    for handler in wire.wiring.handlers:
        attend = partial(_handled, handler, attend)
    return attend(AttentionCall(wire.layer, module, query, key, value, attention_mask, options, store))


def _handled(handler: Handler, attend: Attend, call: AttentionCall) -> Attended:
    outputs, weights = handler(call, attend)
    batch, heads, tokens, _ = call.query.shape
    return changed_by(handler, outputs, call.query, (batch, tokens, heads, call.value.shape[-1])), weights


def _original_attention(call: AttentionCall) -> Attended:
    function = _function(vars(call.module)[_ATTRIBUTE].wiring.originals[0][1], call.module)
    return function(call.module, call.query, call.key, call.value, call.mask, **call.options)


def _function(implementation: str, module: nn.Module) -> Callable[..., Attended]:
    family: Any = sys.modules[type(module).__module__]
    eager: Any = getattr(family, "eager_attention_forward", None)
    function: Callable[..., Attended] = AttentionInterface().get_interface(implementation, eager)
    return function


AttentionInterface.register(NAME, partial(_attend, None))
for _implementation in WRAPPABLE:
    AttentionInterface.register(_intercepted(_implementation), partial(_attend, _implementation))
    AttentionMaskInterface.register(_intercepted(_implementation), AttentionMaskInterface()[_implementation])
