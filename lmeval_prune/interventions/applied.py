"""The record of interventions on a model, and checks that nothing silently disables them.

While an intervention is applied, each changed module, and each module above it, has a checked `forward`. It runs
eagerly, because compiled code ignores later hooks and keeps those from its compilation. It refuses to run if a changed
module was replaced. Copies of the model and interventions from another thread are refused, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from threading import RLock, Thread, current_thread
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.table import method_name

_ATTRIBUTE = "_lmeval_prune_applied"
_LOCK = RLock()

Parents = Mapping[nn.Module, tuple[nn.Module, str] | None]  # parent of each module of a model, and its name there


class Link(NamedTuple):
    """A child on the way from the model to a changed module."""

    parent: nn.Module
    name: str
    child: nn.Module
    is_changed: bool


@dataclass(eq=False)
class _Entry:
    """An applied intervention."""

    intervention: Any
    thread: Thread | None  # the only thread that may apply more; None: any thread
    links: Mapping[nn.Module, list[Link]] = field(default_factory=dict)  # by the calling module


class _Record:
    """The interventions on a model: an attribute of the changed modules and of those above them."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.uncopyable = RLock()  # a copy of the model would keep the hooks
        self.links: dict[nn.Module, tuple[Link, ...]] = {}  # of all entries
        self.forwards: dict[nn.Module, tuple[Any, Any]] = {}  # checked forward, and the instance's previous one or None
        self.modules: set[nn.Module] = set()

    def add(self, entry: _Entry, changed: set[nn.Module]) -> None:
        """Record an intervention that changes these modules."""
        self.entries.append(entry)
        _RECORDS.add(self)
        for module in changed.union(entry.links) - self.modules:
            self.modules.add(module)
            vars(module)[_ATTRIBUTE] = self
        self._update_links(entry)
        for module in entry.links:
            if module not in self.forwards:
                previous = vars(module).get("forward")  # set by another library
                vars(module)["forward"] = checked = _checked_forward(module, previous)
                self.forwards[module] = checked, previous

    def remove(self, entry: _Entry) -> None:
        """Remove an intervention; with the last one, restore the modules."""
        if entry not in self.entries:
            return
        self.entries.remove(entry)
        self._update_links(entry)
        if self.entries:
            return
        _RECORDS.discard(self)
        for module, (checked, previous) in self.forwards.items():
            if vars(module).get("forward") is checked:
                del vars(module)["forward"]
                vars(module).update({"forward": previous} if previous else {})
        for module in self.modules:
            del vars(module)[_ATTRIBUTE]

    def _update_links(self, entry: _Entry) -> None:
        for module in entry.links:
            self.links[module] = tuple(
                {link: None for applied in self.entries for link in applied.links.get(module, ())}
            )

    def __str__(self) -> str:
        return ", ".join(method_name(type(entry.intervention)) for entry in self.entries)

    def check_thread(self) -> None:
        """Refuse an intervention while another thread has one: both threads would run under both."""
        threads = {entry.thread for entry in self.entries} - {None, current_thread()}
        if any(thread and thread.is_alive() for thread in threads):
            raise InputError(f"another thread has {self} applied to this model; end that first, or load another model")

    def check_links(self, module: nn.Module) -> None:
        """Refuse to run a module if a changed module in it was replaced, wrapped or deleted.

        Unchanged modules in between may be wrapped.
        """
        for parent, name, child, is_changed in self.links[module]:
            current = parent._modules.get(name)
            if current is not child and (is_changed or current is None or child not in current.modules()):
                raise InputError(
                    f"{name} has been replaced, wrapped or deleted while something is applied to it ({self}); put it "
                    f"back, or end that first"
                )


_RECORDS: set[_Record] = set()


def _checked_forward(module: nn.Module, previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return an eager `forward` for an instance that first checks the links below it.

    Dynamo guards on whether an instance has a `forward`, so code compiled for the class is not used.
    """
    if previous is None:
        return MethodType(_checked(type(module).forward), module)

    @torch.compiler.disable
    @wraps(previous)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check(module)
        return previous(*args, **kwargs)

    return checked


@cache  # Dynamo guards on the function, too: with a new one for each block it would compile again
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
def attached(intervention: Any, model_map: ModelMap, any_thread: bool) -> Iterator[None]:
    """Attach and record a resolved intervention inside a block; `any_thread`: other threads may apply more."""
    stack = ExitStack()
    try:
        with _LOCK:
            _attach(intervention, model_map, None if any_thread else current_thread(), stack)
        yield
    finally:
        with _LOCK:
            stack.close()


def _attach(intervention: Any, model_map: ModelMap, thread: Thread | None, stack: ExitStack) -> None:
    record = _record_on(model_map.model) or _Record()
    record.check_thread()
    parents = _parents_in(model_map.model)
    before = _hooks_in(parents)
    entry = _Entry(intervention, thread)
    stack.callback(record.remove, entry)  # runs last, when the intervention has restored its own `forward`s
    intervention.attach(model_map, stack)
    changed = {module for module, hooks in _hooks_in(parents).items() if hooks != before.get(module)}
    changed = changed or {layer.module for layer in model_map.attention}  # an attention handler leaves no hooks
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
    queue = [model]
    for parent in queue:
        for name, child in parent._modules.items():
            if child is not None and child not in parents:
                parents[child] = (parent, name)
                queue.append(child)
    return parents


def _links_to(changed: set[nn.Module], parents: Parents, model: nn.Module) -> dict[nn.Module, list[Link]]:
    """Return the links from the model to changed modules, by the module whose `forward` calls the child."""
    links: dict[nn.Module, list[Link]] = {model: []}
    visited = {model}
    for module in changed:
        while module not in visited and (entry := parents[module]):
            visited.add(module)
            parent, name = entry
            caller = parent
            while type(caller).forward is nn.Module.forward and (above := parents[caller]):
                caller = above[0]  # a ModuleList is not called itself
            links.setdefault(caller, []).append(Link(parent, name, module, module in changed))
            module = parent
    return links


def _record_on(model: nn.Module) -> _Record | None:
    modules = model.modules() if _RECORDS else ()
    return next((vars(module)[_ATTRIBUTE] for module in modules if _ATTRIBUTE in vars(module)), None)


def applied_on(model: nn.Module) -> list[Any]:
    """Return the interventions on a model or the model that it wraps, first applied first."""
    record = _record_on(model)
    return [entry.intervention for entry in record.entries] if record else []
