"""Tables of classes by name: those of this package, and those of installed packages that declare them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from lmeval_prune.errors import InputError, did_you_mean

logger = logging.getLogger(__name__)


class Registry(Mapping[str, str]):
    """Import paths, `MODULE:CLASS`, by name; a class is imported at first use.

    An installed package adds a class by an entry point of the registry's group, and a program by `registry[name] =
    CLASS`, or its import path. Names of this package (`own`) and reserved ones cannot be taken: such an entry point is
    left out, with a warning. Messages name the `setting` that takes these names.
    """

    def __init__(self, group: str, setting: str, own: Mapping[str, str]) -> None:
        self.group, self.setting, self.own = group, setting, own
        self._added: dict[str, str] = {}
        self._reserved: set[str] = set()

    def reserve(self, names: Collection[str]) -> None:
        """Keep names of other settings from being taken."""
        self._reserved |= {*names} - self.own.keys()
        vars(self).pop("_declared", None)

    @cached_property
    def _declared(self) -> dict[str, dict[str, str]]:
        """Packages by the import paths that they declare for each name."""
        declared: dict[str, dict[str, str]] = {}
        for point in entry_points(group=self.group):
            package = point.dist.name if point.dist else "unknown"
            if self._can_be_taken(point.name):
                declared.setdefault(point.name, {}).setdefault(point.value.partition("[")[0].strip(), package)
            else:
                where = f"{point.name!r} in {self.group}"
                logger.warning("%s has %s, which is taken, or no name like my_method; it is left out", package, where)
        return declared

    def _can_be_taken(self, name: str) -> bool:
        return name.isidentifier() and name not in {*self.own, *self._reserved}

    @property
    def _paths(self) -> dict[str, str]:
        declared = {name: next(iter(packages)) for name, packages in self._declared.items()}
        return {**self.own, **declared, **self._added}

    def __getitem__(self, name: str) -> str:
        return self._paths[name]

    def __setitem__(self, name: str, target: str | type) -> None:
        if not self._can_be_taken(name):
            raise InputError(f"{self.setting} {name!r} is taken, or no name like my_method; give {target} another name")
        self._added[name] = target if isinstance(target, str) else import_path(target)

    def __delitem__(self, name: str) -> None:
        del self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def load(self, name: str) -> Any:
        """Import the class of a name; `InputError` if it is unknown, or declared by two packages."""
        if name not in self:
            names = ", ".join(self)
            raise InputError(f"{self.setting}={name!r} is not known; use {names}{did_you_mean(name, self)}")
        packages = {} if name in self._added else self._declared.get(name, {})
        if len(packages) > 1:
            raise InputError(f"{self.setting}={name} is declared by {' and '.join(packages.values())}; uninstall one")
        return resolve_name(self[name])

    def name_of(self, kind: type, default: str) -> str:
        return next((name for name, path in self._paths.items() if path == import_path(kind)), default)


def import_path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def class_record(kind: type) -> dict[str, str]:
    """Return the import path of a class from elsewhere, for identities: its name may be another package's tomorrow."""
    return {} if is_own(kind) else {"class": import_path(kind)}
