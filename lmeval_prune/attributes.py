"""Set attributes of an object for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside the block, and restore them after it."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
