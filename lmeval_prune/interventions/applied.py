"""What is applied to a model: a list, an attribute of all its modules.

While there is such a list, compiled code does not run: it ignores later hooks and keeps those from its compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import RLock, Thread, current_thread
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError

_ATTRIBUTE = "_lmeval_prune_applied"
_LOCK = RLock()
T = TypeVar("T")


class _Applied(list[tuple[Any, Thread | None]]):
    """Interventions, first applied first, each with the only thread that may apply more (None: any thread may)."""

    models: ClassVar[int] = 0  # with something applied
    stance: ClassVar[ExitStack] = ExitStack()  # while it is open, PyTorch ignores `torch.compile`

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not _Applied.models:
            _Applied.stance.enter_context(torch.compiler.set_stance("force_eager"))  # raises inside a compiled function
            _Applied.stance.enter_context(replaced(torch._dynamo, set_stance=_set_stance))
        _Applied.models += 1
        self.modules = list(model.modules())
        for module in self.modules:
            vars(module)[_ATTRIBUTE] = self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError("a copy of a model would keep what is applied to it; copy or save it outside of the block")

    def drop(self, entry: tuple[Any, Thread | None]) -> None:
        self[:] = [other for other in self if other is not entry]
        if not self:
            for module in self.modules:
                del vars(module)[_ATTRIBUTE]
            _Applied.models -= 1
            if not _Applied.models:
                _Applied.stance.close()


def _set_stance(stance: str = "default", **_: Any) -> AbstractContextManager[None]:
    """Refuse, in place of `torch.compiler.set_stance`, to let compiled code run while something is applied."""
    if stance == "force_eager":
        return nullcontext()
    raise InputError(f"compiled code ignores what is applied to a model; set the stance {stance} outside of the block")


@contextmanager
def attached(intervention: Any, model_map: ModelMap, any_thread: bool) -> Iterator[None]:
    """Attach and record a resolved intervention inside a block; `any_thread`: other threads may apply more."""
    stack = ExitStack()
    try:
        with _LOCK:
            applied = _applied_to(model_map.model)
            others = {thread for _, thread in applied or ()} - {None, current_thread()}
            if any(thread and thread.is_alive() for thread in others):
                raise InputError("another thread has something applied to this model; end that, or load another model")
            applied = _Applied(model_map.model) if applied is None else applied
            entry = (intervention, None if any_thread else current_thread())
            stack.callback(applied.drop, entry)  # runs last, when the intervention has undone its own changes
            intervention.attach(model_map, stack)
            applied.append(entry)
        yield
    finally:
        with _LOCK:
            stack.close()


def _applied_to(model: nn.Module) -> _Applied | None:
    return next((vars(module)[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in vars(module)), None)


def applied_on(model: nn.Module) -> list[Any]:
    """Return what is applied to a model or the model that it wraps, first applied first."""
    return [intervention for intervention, _ in _applied_to(model) or ()]


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore the state of all interventions on a model after a block of trial passes."""
    with ExitStack() as stack:
        for intervention in applied_on(model):
            stack.enter_context(intervention.preserve_state())
        yield


def combined(interventions: Iterable[T]) -> tuple[T, ...]:
    """Merge interventions that can be merged (head masks: their union), in order."""
    result: list[Any] = []
    later: Any
    for later in interventions:
        for position, earlier in enumerate(result):
            if (union := earlier.merged_with(later) or later.merged_with(earlier)) is not None:
                result[position] = union
                break
        else:
            result.append(later)
    return tuple(result)


def changed_by(
    change: Callable[..., Any], result: Any, tensor: torch.Tensor, shape: Sequence[int] = ()
) -> torch.Tensor:
    """Return what `change` made of a tensor; `InputError` for another type or shape, which could be broadcast.

    Under autocast the type may be another floating one: operations choose it, and the next module converts it.
    """
    shape, device = tuple(shape or tensor.shape), tensor.device.type
    if isinstance(result, torch.Tensor) and result.shape == shape:
        if result.dtype == tensor.dtype:
            return result
        is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if is_autocast and result.is_floating_point():
            return result
    found = f"{tuple(result.shape)} in {result.dtype}" if isinstance(result, torch.Tensor) else type(result).__name__
    name = f"{getattr(change, '__module__', '')}.{getattr(change, '__qualname__', change)}"
    raise InputError(f"{name} returned {found}, not a tensor {shape} in {tensor.dtype}; mend the method")
