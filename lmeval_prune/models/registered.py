"""Who has registered us with lm-eval in this process, by name, so that another process of a run can do the same."""

from __future__ import annotations

from pkgutil import resolve_name

_BY: list[str] = []


def register(target: str) -> None:
    """Remember `MODULE:NAME`, a function that registers us."""
    _BY[:] = [target]


def registrars() -> tuple[str, ...]:
    """What has been remembered, for `repeat` in another process."""
    return tuple(_BY)


def repeat(targets: tuple[str, ...]) -> None:
    """Register us as another process did."""
    for target in targets:
        resolve_name(target)()
