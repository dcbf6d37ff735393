"""Interventions on a model: recorded on the model itself, and protected from what would silently undo them.

While anything is applied, the `forward` of each module that is changed, or holds one that is, is a checked one. It runs
eagerly, since compiled code does not see hooks and what is compiled meanwhile would keep them; and it refuses to run
without a changed module. Copies and interventions of another thread are refused, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from threading import RLock, Thread, current_thread
from types import MethodType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.table import method_name

_ATTRIBUTE = "_lmeval_prune_applied"
_LOCK = RLock()

Link = tuple[nn.Module, str, nn.Module, bool]  # a module, a name in it, the module that has it, and if that is changed
Parents = Mapping[nn.Module, tuple[nn.Module, str] | None]  # of each module of a model: what holds it under which name


class Attachable(Protocol):
    """An intervention, as far as this module knows it."""

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Change the model, and leave in `stack` whatever undoes the change."""


@dataclass(eq=False)
class _Entry:
    """An intervention on a model.

    Attributes:
        thread: which may alone apply more; None: any.
        links: the ways from the model to the modules that it changes, by the module that calls.
    """

    intervention: Any
    thread: Thread | None
    links: Mapping[nn.Module, list[Link]] = field(default_factory=dict)


class _Record:
    """The interventions on a model, in order: an attribute of the modules that they change, and of those above."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.links: dict[nn.Module, tuple[Link, ...]] = {}  # of all entries
        self.forwards: dict[nn.Module, tuple[Any, Any]] = {}  # of an instance: the checked one, and what it replaces
        self.modules: set[nn.Module] = set()

    def add(self, entry: _Entry, changed: set[nn.Module]) -> None:
        """Record an intervention that changes these modules."""
        self.entries.append(entry)
        _LIVE.add(self)
        for module in changed.union(entry.links) - self.modules:
            self.modules.add(module)
            vars(module)[_ATTRIBUTE] = self
        self._update(entry)
        for module in entry.links:
            if module not in self.forwards:
                previous = vars(module).get("forward")  # another library's, if any
                vars(module)["forward"] = checked = _checked_forward(module, previous)
                self.forwards[module] = checked, previous

    def remove(self, entry: _Entry) -> None:
        """Forget an intervention, if it was recorded."""
        if entry not in self.entries:
            return
        self.entries.remove(entry)
        self._update(entry)
        if self.entries:
            return
        _LIVE.discard(self)
        for module, (checked, previous) in self.forwards.items():
            if vars(module).get("forward") is checked:
                del vars(module)["forward"]
                vars(module).update({"forward": previous} if previous else {})
        for module in self.modules:
            del vars(module)[_ATTRIBUTE]

    def _update(self, entry: _Entry) -> None:
        for module in entry.links:
            self.links[module] = tuple({link: None for each in self.entries for link in each.links.get(module, ())})

    def __str__(self) -> str:
        return ", ".join(method_name(type(entry.intervention)) for entry in self.entries)

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
        threads = {entry.thread for entry in self.entries} - {None, current_thread()}
        if any(thread and thread.is_alive() for thread in threads):
            raise InputError(f"another thread has {self} applied to this model; end that first, or load another model")

    def check_links(self, module: nn.Module) -> None:
        """Refuse to call a module when what is changed in it has been replaced, wrapped or deleted.

        What only holds changed modules may stand in a wrapper: they are called all the same.

        Raises:
            InputError: naming it.
        """
        for parent, name, child, is_changed in self.links[module]:
            current = parent._modules.get(name)
            if current is not child and (is_changed or current is None or child not in current.modules()):
                raise InputError(
                    f"{name} has been replaced, wrapped or deleted while something is applied to it ({self}); put it "
                    f"back, or end that first"
                )


_LIVE: set[_Record] = set()


def _checked_forward(module: nn.Module, previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a module's `forward` that runs eagerly, and refuses to run without a changed module in it.

    Code that was compiled for the class's `forward` is not run: Dynamo guards on whether an instance has one.
    """
    if previous is None:
        return MethodType(_checked(type(module).forward), module)

    @torch.compiler.disable
    @wraps(previous)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check(module)
        return previous(*args, **kwargs)

    return checked


@cache  # Dynamo guards on the function, too: code that calls it is compiled once, not for each block
def _checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable
    @wraps(forward)
    def checked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _check(module)
        return forward(module, *args, **kwargs)

    return checked


def _check(module: nn.Module) -> None:
    if record := vars(module).get(_ATTRIBUTE):
        record.check_links(module)


@contextmanager
def attached(intervention: Attachable, model_map: ModelMap, any_thread: bool) -> Iterator[None]:
    """Attach an intervention that fits a model inside a block, and record it.

    Args:
        intervention: resolved for the model.
        model_map: of the model.
        any_thread: other threads may apply more inside the block.

    Raises:
        InputError: another thread has some applied.
    """
    stack = ExitStack()
    try:
        with _LOCK:
            _attach(intervention, model_map, None if any_thread else current_thread(), stack)
        yield
    finally:
        with _LOCK:
            stack.close()


def _attach(intervention: Attachable, model_map: ModelMap, thread: Thread | None, stack: ExitStack) -> None:
    record = _record_on(model_map.model) or _Record()
    record.check_thread()
    parents = _parents_in(model_map.model)
    before = _hooks_in(parents)
    entry = _Entry(intervention, thread)
    stack.callback(record.remove, entry)  # after the model's own `forward`s are back
    intervention.attach(model_map, stack)
    changed = {module for module, hooks in _hooks_in(parents).items() if hooks != before.get(module)}
    changed = changed or {layer.module for layer in model_map.attention}  # it answers their attention calls
    entry.links = _links_to(changed, parents, model_map.model)
    record.add(entry, changed)


def _hooks_in(modules: Iterable[nn.Module]) -> dict[nn.Module, tuple[Any, ...]]:
    return {
        module: (tuple(module._forward_pre_hooks), tuple(module._forward_hooks), vars(module).get("forward"))
        for module in modules
        if module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module)
    }


def _parents_in(model: nn.Module) -> Parents:
    parents: dict[nn.Module, tuple[nn.Module, str] | None] = {model: None}
    modules = [model]
    for parent in modules:  # it grows
        for name, child in parent._modules.items():
            if child is not None and child not in parents:
                parents[child] = (parent, name)
                modules.append(child)
    return parents


def _links_to(changed: set[nn.Module], parents: Parents, model: nn.Module) -> dict[nn.Module, list[Link]]:
    """Return the ways to some modules, by the module whose `forward` goes there, and of the model itself."""
    links: dict[nn.Module, list[Link]] = {model: []}
    known = {model}
    for module in changed:
        while module not in known and (above := parents[module]):
            known.add(module)
            parent, name = caller, _ = above
            while type(caller).forward is nn.Module.forward and (over := parents[caller]):
                caller = over[0]  # a list of modules is not called
            links.setdefault(caller, []).append((parent, name, module, module in changed))
            module = parent
    return links


def _record_on(model: nn.Module) -> _Record | None:
    modules = model.modules() if _LIVE else ()
    return next((vars(module)[_ATTRIBUTE] for module in modules if _ATTRIBUTE in vars(module)), None)


def applied_on(model: nn.Module) -> list[Any]:
    """Return what is applied to a model, or to what it wraps, in the order in which it was applied."""
    record = _record_on(model)
    return [entry.intervention for entry in record.entries] if record else []
