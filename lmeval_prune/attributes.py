"""Set attributes of an object for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside the block, and restore them after it; those of its class are its class's."""
    before = {name: getattr(owner, name) for name in values}
    inherited = values.keys() - vars(owner).keys()
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if name in inherited and name in vars(owner):
                delattr(owner, name)
            else:
                setattr(owner, name, value)
