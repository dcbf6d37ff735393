"""Tables of classes by name: those of this package, and those of installed packages that declare them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from functools import cached_property
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from lmeval_prune.errors import InputError, did_you_mean, first_line

logger = logging.getLogger(__name__)


class Registry(MutableMapping[str, str]):
    """Import paths, `MODULE:CLASS`, by name; a class is imported at first use.

    An installed package adds a class by an entry point of the registry's group, and a program by `registry[name] =
    CLASS`, or its import path. Names of this package and reserved ones cannot be taken: such an entry point is left
    out, with a warning.

    Args:
        group: group of the entry points.
        setting: the setting that takes these names, for messages.
        own: import paths of this package's classes by name.
    """

    def __init__(self, group: str, setting: str, own: Mapping[str, str]) -> None:
        self.group, self.setting = group, setting
        self.own = dict(own)
        self._added: dict[str, str] = {}
        self._reserved: set[str] = set()
        self._warned: set[str] = set()

    def reserve(self, names: Collection[str]) -> None:
        """Keep names of other settings from being taken."""
        self._reserved |= {*names} - self.own.keys()

    @cached_property
    def _declared(self) -> dict[str, dict[str, str]]:
        """Packages by the import paths that they declare for each name."""
        declared: dict[str, dict[str, str]] = {}
        for point in entry_points(group=self.group):
            path = point.value.partition("[")[0].strip()
            declared.setdefault(point.name, {}).setdefault(path, point.dist.name if point.dist else "unknown")
        return declared

    @property
    def _paths(self) -> dict[str, str]:
        others = {name: next(iter(packages)) for name, packages in self._declared.items()} | self._added
        problems = {name: problem for name in others if (problem := self._problem_of(name))}
        for name in sorted(problems.keys() - self._warned):
            self._warned.add(name)
            packages = " and ".join(self._declared.get(name, {}).values()) or "this program"
            logger.warning("%s has %r in %s, which %s; it is left out", packages, name, self.group, problems[name])
        return self.own | {name: path for name, path in others.items() if name not in problems}

    def _problem_of(self, name: str) -> str:
        """Return why a name cannot be taken; empty if it can."""
        if not name.isidentifier():
            return "is not a name like my_method"
        if name in self.own:
            return f"is {self.own[name]} already"
        return "is the name of another setting" if name in self._reserved else ""

    def __getitem__(self, name: str) -> str:
        return self._paths[name]

    def __setitem__(self, name: str, target: str | type) -> None:
        path = target if isinstance(target, str) else import_path(target)
        if problem := self._problem_of(name):
            raise InputError(f"{self.setting} {name!r} {problem}; give {path} another name")
        self._added[name] = path

    def __delitem__(self, name: str) -> None:
        del self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def check(self, name: str) -> None:
        """Raise `InputError` for an unknown name, without importing a class."""
        if name not in self:
            names = ", ".join(self)
            raise InputError(f"{self.setting}={name!r} is not known; use {names}{did_you_mean(name, self)}")

    def load(self, name: str) -> Any:
        """Import the class of a name; `InputError` if it is unknown, or declared by two packages."""
        self.check(name)
        packages = self._declared.get(name, {})
        if name not in {**self.own, **self._added} and len(packages) > 1:
            raise InputError(f"{self.setting}={name} is declared by {' and '.join(packages.values())}; uninstall one")
        return resolve_name(self[name])

    def classes(self) -> Iterator[tuple[str, Any]]:
        """Yield each name and its class; one that cannot be imported is left out, with a warning."""
        for name in self:
            try:
                yield name, self.load(name)
            except Exception as error:
                logger.warning("%s=%s is left out (%s)", self.setting, name, first_line(error))

    def name_of(self, kind: type, default: str) -> str:
        """Return the name of a class, or `default` if the registry lacks it."""
        return next((name for name, path in self._paths.items() if path == import_path(kind)), default)


def import_path(kind: type) -> str:
    """Return the import path of a class, `MODULE:CLASS`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_own(kind: type) -> bool:
    """Return whether a class is defined in this package."""
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def class_record(kind: type) -> dict[str, str]:
    """Return the import path of a class from elsewhere, for identities: its name may be another package's tomorrow."""
    return {} if is_own(kind) else {"class": import_path(kind)}
