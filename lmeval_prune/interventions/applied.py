"""What is applied to a model, kept on the model itself, and what would go wrong beside it without a word.

While anything is applied: compiled code runs eagerly, since hooks are not seen in it, and would stay in what is
compiled meanwhile; copies, replaced modules and interventions of another thread are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock, Thread, current_thread
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.table import method_name

_ATTRIBUTE = "_lmeval_prune_applied"
_LOCK = RLock()


class Attachable(Protocol):
    """An intervention, as far as it matters here."""

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Change the model, and leave in `stack` whatever undoes the change."""


class _Record:
    """The interventions on a model, in order: an attribute of the modules that they change."""

    def __init__(self) -> None:
        self.interventions: list[Any] = []
        self.threads: list[Thread | None] = []  # of each, which may alone apply more; None: any
        self.modules: set[nn.Module] = set()

    def add(self, one: Attachable, thread: Thread | None, modules: set[nn.Module]) -> None:
        """Take in an intervention that changes these modules."""
        self.interventions.append(one)
        self.threads.append(thread)
        self.modules |= modules
        for module in modules:
            vars(module)[_ATTRIBUTE] = self

    def remove(self, one: Attachable) -> None:
        """Forget the last that is this one."""
        index = next(i for i in reversed(range(len(self.interventions))) if self.interventions[i] is one)
        del self.interventions[index], self.threads[index]
        if not self.interventions:
            for module in self.modules:
                del vars(module)[_ATTRIBUTE]

    def __str__(self) -> str:
        return ", ".join(method_name(type(one)) for one in self.interventions)

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled with the model: its hooks would stay in the copy.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"a model cannot be copied or pickled while something is applied to it ({self}); end that first"
        )

    def check_thread(self) -> None:
        """Refuse the interventions of two threads at once: both would run under both.

        Raises:
            InputError: another thread has applied some.
        """
        if any(thread and thread is not current_thread() and thread.is_alive() for thread in self.threads):
            raise InputError(f"another thread has {self} applied to this model; end that first, or load another model")


class _Eager:
    """Runs all that is compiled eagerly, as long as it is needed."""

    count = 0
    stance: Any = None

    def begin(self) -> None:
        if not self.count:
            self.stance = torch.compiler.set_stance("force_eager")
        self.count += 1

    def end(self) -> None:
        self.count -= 1
        if not self.count:
            self.stance.__exit__(None, None, None)


_EAGER = _Eager()


@contextmanager
def attached(one: Attachable, model_map: ModelMap, any_thread: bool) -> Iterator[None]:
    """Attach an intervention that fits a model inside a block, and record it.

    Args:
        one: the intervention, resolved for the model.
        model_map: of the model.
        any_thread: other threads may apply more inside the block.

    Raises:
        InputError: another thread has some applied.
    """
    stack = ExitStack()
    try:
        with _LOCK:
            _attach(one, model_map, None if any_thread else current_thread(), stack)
        yield
    finally:
        with _LOCK:
            stack.close()


def _attach(one: Attachable, model_map: ModelMap, thread: Thread | None, stack: ExitStack) -> None:
    record: _Record = vars(model_map.attention[0].module).get(_ATTRIBUTE) or _Record()
    record.check_thread()
    _EAGER.begin()
    stack.callback(_EAGER.end)
    before = {module: _hooks_of(module) for module in model_map.model.modules()}
    one.attach(model_map, stack)
    changed = {module for module, hooks in before.items() if _hooks_of(module) != hooks}
    changed |= {layer.module for layer in model_map.attention}
    handle = register_module_module_registration_hook(_refuse_replacing(model_map.model, changed, record))
    stack.callback(handle.remove)
    record.add(one, thread, changed)
    stack.callback(record.remove, one)


def _hooks_of(module: nn.Module) -> tuple[Any, ...]:
    return tuple(module._forward_pre_hooks), tuple(module._forward_hooks), vars(module).get("forward")


def _refuse_replacing(model: nn.Module, changed: set[nn.Module], record: _Record) -> Callable[..., None]:
    """A hook that is called wherever a module is put into another, and refuses to lose those that are changed."""
    inside = {
        (parent, name): (child, changed & {*child.modules()})
        for parent in model.modules()
        for name, child in parent.named_children()
    }

    def hook(parent: nn.Module, name: str, new: nn.Module | None) -> None:
        child, lost = inside.get((parent, name), (None, set()))
        if new is child or not lost:
            return
        if child in lost or new is None or lost - {*new.modules()}:
            raise InputError(f"{name} cannot be replaced while something is applied to it ({record}); end that first")

    return hook


def applied_on(model: nn.Module) -> list[Any]:
    """What is applied to a model, or to what it wraps, at the moment, in the order in which it was applied."""
    modules = model.modules() if _EAGER.count else ()
    record = next((vars(module)[_ATTRIBUTE] for module in modules if _ATTRIBUTE in vars(module)), None)
    return record.interventions if record else []
