"""The scorers with some of their rules switched off.

A rule is an entry of a word list of `lmeval_prune/scoring`, or a pattern that its modules hold compiled. Rules are
discovered: any YAML file of the package, and any pattern that a module holds, also in lists, classes and defaults.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import shutil
import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

PACKAGE, RESULTS, VERIFIER = "lmeval_prune.scoring", "lmeval_prune.tasks.results", "lmeval_prune.scoring.verifier"
NEVER = "(?!)"  # before a pattern: it never matches, and has its groups
Entry = tuple[str, tuple[str | int, ...]]  # a file of words and the keys that lead to an entry of it
Pattern = tuple[str, int]  # the name of what holds a pattern, and its number in there
Rule = Entry | Pattern

# --------------------------------------------------------------------------- word lists


def entries(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the entries of word lists: items of lists (of a list of pairs, the pairs), and keys with one value."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict) or (isinstance(value, list) and not (isinstance(node, list) and path)):
            yield from entries(value, (*path, key))
        elif isinstance(value, list):
            yield (*path, key), value[0]
        else:
            yield (*path, key), key if isinstance(node, dict) else value


def never(pattern: str) -> str:
    """Return a pattern with the same groups, and no word of a list, that matches nothing."""
    return f"{NEVER}(?:{pattern})"


def without(node: Any, paths: Iterable[tuple[str | int, ...]]) -> Any:
    """Return word lists in which some entries match nothing; their number and order stay."""
    by_key: dict[str | int, list[tuple[str | int, ...]]] = defaultdict(list)
    for path in paths:
        by_key[path[0]].append(path[1:])

    def changed(key: str | int, value: Any) -> Any:
        inner = by_key.get(key)
        if inner is None:
            return value
        if inner != [()]:
            return without(value, inner)
        return [never(value[0]), *value[1:]] if isinstance(value, list) else never(value)

    if isinstance(node, dict):
        hidden = {key for key, inner in by_key.items() if inner == [()]}
        return {
            (never(str(key)) if key in hidden else key): value if key in hidden else changed(key, value)
            for key, value in node.items()
        }
    return [changed(key, value) for key, value in enumerate(node)]


# --------------------------------------------------------------------------- patterns


def patterns(value: Any, depth: int = 6) -> Iterator[re.Pattern[str]]:
    """Yield the compiled patterns that a value holds, in order."""
    if isinstance(value, re.Pattern):
        yield value
    elif depth:
        for inner in _held(value):
            yield from patterns(inner, depth - 1)


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return value
    return [getattr(value, name) for name in _attributes(value)]


def _attributes(value: Any) -> list[str]:
    """Name what a class of the package holds, or a data class."""
    if isinstance(value, type):
        return [name for name in vars(value) if value.__module__.startswith(PACKAGE) and not name.startswith("__")]
    return [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []


def exchanged(value: Any, new: Iterator[Any], depth: int = 6) -> Any:
    """Return a value with other patterns, in the order of `patterns`; what can be changed is changed in its place."""
    if isinstance(value, re.Pattern):
        return next(new)
    if not depth:
        return value
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[key] = exchanged(inner, new, depth - 1)
    elif isinstance(value, tuple):
        items = [exchanged(item, new, depth - 1) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    else:
        change = type.__setattr__ if isinstance(value, type) else object.__setattr__
        for name in _attributes(value):
            if any(patterns(getattr(value, name), depth - 1)):
                change(value, name, exchanged(getattr(value, name), new, depth - 1))
    return value


def exchange(module: types.ModuleType, name: str, new: list[Any]) -> None:
    """Put other patterns in a value of a module, and in the functions of the package that have them as defaults."""
    old = list(patterns(vars(module)[name]))
    setattr(module, name, exchanged(vars(module)[name], iter(new)))
    changed = {id(before): after for before, after in zip(old, new, strict=True)}
    for value in [value for other in modules() for value in vars(other).values()]:
        if isinstance(value, types.FunctionType) and value.__defaults__:
            value.__defaults__ = tuple(changed.get(id(default), default) for default in value.__defaults__)


def modules() -> list[types.ModuleType]:
    """Return the loaded modules of the package, but not that of its worker processes."""
    return [module for name, module in sorted(sys.modules.items()) if _in_package(name)]


def _in_package(name: str) -> bool:
    return name != VERIFIER and (name == PACKAGE or name.startswith(f"{PACKAGE}."))


def switched_off(pattern: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(never(pattern.pattern), pattern.flags)


class Recorder:
    """A pattern that notes what it is asked of, and whether it matched."""

    subjects: set[str]
    matched: set[Pattern]

    def __init__(self, pattern: re.Pattern[str], rule: Pattern) -> None:
        self.inner, self.rule = pattern, rule

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        if not callable(attribute):
            return attribute

        def recorded(*arguments: Any, **named: Any) -> Any:
            subject = named.get("string") or next(item for item in reversed(arguments) if isinstance(item, str))
            Recorder.subjects.add(subject)
            if self.rule not in Recorder.matched and self.inner.search(subject):
                Recorder.matched.add(self.rule)
            return attribute(*arguments, **named)

        return recorded


# --------------------------------------------------------------------------- the scorers without some rules


class Scorers:
    """The project's scorers, loaded from a copy of their package in which rules are switched off."""

    def __init__(self, folder: Path) -> None:
        import lm_eval.api.registry

        import lmeval_prune

        source = Path(importlib.import_module(PACKAGE).__path__[0])
        self.copy = folder / "scoring"
        shutil.copytree(source, self.copy, ignore=shutil.ignore_patterns("__pycache__"))
        loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
        self.lists = {
            str(path.relative_to(source)): yaml.load(path.read_text("utf-8"), loader) for path in source.rglob("*.yaml")
        }
        lmeval_prune.__path__.insert(0, str(folder))
        lm_eval.api.registry.register_filter = lambda name: lambda decorated: decorated  # each load registers it again
        re._MAXCACHE = 1_000_000  # type: ignore[attr-defined]
        self._remember_comparisons()

    @staticmethod
    def _remember_comparisons() -> None:
        """Keep one pool of workers, and the verdict of each pair."""
        verifier = importlib.import_module(VERIFIER).Verifier
        ask, verdicts = verifier.verify_many, {}

        def verify_many(self: Any, pairs: list[tuple[str, str]]) -> list[str]:
            new = [pair for pair in dict.fromkeys(pairs) if pair not in verdicts]
            verdicts.update(zip(new, ask(self, new), strict=True) if new else ())
            return [verdicts[pair] for pair in pairs]

        verifier.verify_many = verify_many

    def load(self, rules: Iterable[Rule] = ()) -> None:
        """Load the scorers without some rules."""
        off: dict[str, list[Any]] = defaultdict(list)
        for name, position in rules:
            off[name].append(position)
        for name, lists in self.lists.items():
            changed = without(lists, off[name]) if name in off else lists
            (self.copy / name).write_text(yaml.safe_dump(changed, allow_unicode=True, sort_keys=False), "utf-8")
        for name in list(sys.modules):
            if name == RESULTS or _in_package(name):
                del sys.modules[name]
        importlib.import_module(RESULTS)
        for holder, module, name in list(self.holders()):
            if holder in off:
                held = enumerate(patterns(vars(module)[name]))
                exchange(module, name, [switched_off(old) if i in off[holder] else old for i, old in held])

    def holders(self) -> Iterator[tuple[str, types.ModuleType, str]]:
        """Yield the names of a package's modules that hold patterns; what one imports from another has one name."""
        names: dict[tuple[str, int], str] = {}
        for module in modules():
            for name, value in list(vars(module).items()):
                held = list(patterns(value))
                if held and not name.startswith("__"):
                    yield names.setdefault((name, id(held[0])), f"{module.__name__}.{name}"), module, name

    def rules(self) -> dict[Rule, str]:
        """Return all rules, each with its pattern or word."""
        compiled: dict[Rule, str] = {
            (holder, i): pattern.pattern
            for holder, module, name in self.holders()
            for i, pattern in enumerate(patterns(vars(module)[name]))
        }
        words = {(name, path): text for name, lists in self.lists.items() for path, text in entries(lists)}
        alone = set(compiled.values())  # an entry that is compiled alone is one rule, not two
        return compiled | {entry: text for entry, text in words.items() if text not in alone}

    def record(self) -> None:
        """Let all patterns note what they are asked and whether they match."""
        for holder, module, name in list(self.holders()):
            held = enumerate(patterns(vars(module)[name]))
            exchange(module, name, [Recorder(pattern, (holder, i)) for i, pattern in held])
