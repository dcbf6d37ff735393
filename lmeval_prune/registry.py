"""Tables of classes by name: those of this package, and those of installed packages that declare them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any

from lmeval_prune.errors import InputError, check_known, first_line

logger = logging.getLogger(__name__)


class Registry(MutableMapping[str, str]):
    """Import paths, `MODULE:CLASS`, by name; a class is imported at first use.

    An installed package adds a class by an entry point of the registry's group, and a program by `registry[name] =
    "MODULE:CLASS"`. A name of this package is not replaced by an entry point: a warning says so.

    Args:
        group: group of the entry points.
        setting: the setting that takes these names, for messages.
        base: import path of the class that all derive from.
        own: import paths of this package's classes by name.
    """

    def __init__(self, group: str, setting: str, base: str, own: Mapping[str, str]) -> None:
        self.group, self.setting, self.base = group, setting, base
        self._own = dict(own)

    @cached_property
    def _paths(self) -> dict[str, str]:
        """Own import paths and those of the entry points, which are read once."""
        paths = dict(self._own)
        for point in entry_points(group=self.group):
            path = f"{point.module}:{point.attr}"
            if not point.name.isidentifier():
                self._warn(point, "is not a name like my_method")
            elif paths.setdefault(point.name, path) != path:
                self._warn(point, f"is {paths[point.name]} already")
        return paths

    def _warn(self, point: EntryPoint, problem: str) -> None:
        package = point.dist.name if point.dist else "unknown"
        text = "the package %s declares %r in %s, which %s; it is left out"
        logger.warning(text, package, point.name, self.group, problem)

    def __getitem__(self, name: str) -> str:
        return self._paths[name]

    def __setitem__(self, name: str, path: str) -> None:
        self._paths[name] = path

    def __delitem__(self, name: str) -> None:
        del self._paths[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def check(self, name: str) -> None:
        """Raise `InputError` for an unknown name, without importing a class."""
        check_known(self.setting, name, self)

    def load(self, name: str) -> Any:
        """Import the class of a name.

        Raises:
            InputError: the name is unknown, or a class from elsewhere cannot be imported or is no such class.
        """
        self.check(name)
        path = self[name]
        if self._own.get(name) == path:
            return resolve_name(path)
        try:
            kind = resolve_name(path)
        except Exception as error:
            raise InputError(
                f"{self.setting}={name}: {path} cannot be imported ({first_line(error)}); mend or uninstall its package"
            ) from error
        if problem := _problem(kind, resolve_name(self.base)):
            raise InputError(f"{self.setting}={name}: {path} {problem}")
        return kind

    def classes(self) -> Iterator[tuple[str, Any]]:
        """Yield each name and its class; one that `load` refuses is left out, with a warning."""
        for name in self:
            try:
                yield name, self.load(name)
            except InputError as error:
                logger.warning("%s; it is left out", error)

    def name_of(self, kind: type, default: str) -> str:
        """Return the name of a class, or `default` if the registry lacks it."""
        path = f"{kind.__module__}:{kind.__qualname__}"
        return next((name for name, target in self.items() if target == path), default)


def _problem(kind: Any, base: type) -> str:
    """Return what keeps an object from being a class that derives from `base`; empty if nothing does."""
    if not isinstance(kind, type) or not issubclass(kind, base):
        return f"is no subclass of {base.__module__}.{base.__qualname__}"
    if "__dataclass_fields__" not in vars(kind):
        return "is no dataclass; decorate it with @dataclass(frozen=True)"
    if inspect.isabstract(kind):
        missing = [name for name in dir(kind) if getattr(getattr(kind, name, None), "__isabstractmethod__", False)]
        return f"does not implement {', '.join(missing)}"
    return ""
