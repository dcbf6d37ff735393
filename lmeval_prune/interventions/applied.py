"""The list of interventions on a model, an attribute of its modules.

It refuses to be copied or pickled, because the copy of a model would keep the hooks. While something is applied,
modules run eagerly: compiled code ignores later hooks and keeps those from its compilation. Another thread may apply
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import RLock, Thread, current_thread
from types import MethodType
from typing import Any

import torch
from torch import nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError

_ATTRIBUTE = "_lmeval_prune_applied"
_LOCK = RLock()


class _Applied:
    """The interventions on a model, first applied first."""

    def __init__(self, model: nn.Module) -> None:
        self.entries: list[tuple[Any, Thread | None]] = []  # with the only thread that may apply more; None: any
        self.modules = list(model.modules())
        self.forwards: dict[nn.Module, tuple[Any, Any]] = {}  # the eager one, and the instance's own before or None
        for module in self.modules:
            vars(module)[_ATTRIBUTE] = self
            previous = vars(module).get("forward")  # set by another library
            if module._modules and (previous or type(module).forward is not nn.Module.forward):
                eager = (
                    torch.compiler.disable(previous) if previous else MethodType(_eager(type(module).forward), module)
                )
                self.forwards[module] = eager, previous
                vars(module)["forward"] = eager

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError("a copy of a model would keep what is applied to it; copy or save it outside of the block")

    def remove(self, entry: tuple[Any, Thread | None]) -> None:
        """Remove an intervention; with the last one, restore the modules."""
        self.entries = [other for other in self.entries if other is not entry]
        if self.entries:
            return
        for module, (eager, previous) in self.forwards.items():
            if vars(module).get("forward") is eager:
                del vars(module)["forward"]
                vars(module).update({"forward": previous} if previous else {})
        for module in self.modules:
            del vars(module)[_ATTRIBUTE]


@cache  # Dynamo guards on the function, and whether an instance has one: code compiled for the class is not used
def _eager(forward: Callable[..., Any]) -> Callable[..., Any]:
    eager: Callable[..., Any] = torch.compiler.disable(forward)
    return eager


@contextmanager
def attached(intervention: Any, model_map: ModelMap, any_thread: bool) -> Iterator[None]:
    """Attach and record a resolved intervention inside a block; `any_thread`: other threads may apply more."""
    stack = ExitStack()
    try:
        with _LOCK:
            applied = _applied_to(model_map.model) or _Applied(model_map.model)
            entry = (intervention, None if any_thread else current_thread())
            stack.callback(applied.remove, entry)  # runs last, when the intervention has undone its own changes
            threads = {thread for _, thread in applied.entries} - {None, current_thread()}
            if any(thread and thread.is_alive() for thread in threads):
                raise InputError("another thread has something applied to this model; end that, or load another model")
            intervention.attach(model_map, stack)
            applied.entries.append(entry)
        yield
    finally:
        with _LOCK:
            stack.close()


def _applied_to(model: nn.Module) -> _Applied | None:
    return next((vars(module)[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in vars(module)), None)


def applied_on(model: nn.Module) -> list[Any]:
    """Return the interventions on a model or the model that it wraps, first applied first."""
    applied = _applied_to(model)
    return [intervention for intervention, _ in applied.entries] if applied else []
