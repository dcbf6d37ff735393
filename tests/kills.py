"""Processes that kill themselves, for tests of what a kill leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def killing_after(count: int) -> Callable[[Any], Any]:
    """A wrapper of functions: the count-th call of any of those that it wraps kills the process instead."""
    left = [count]

    def watched(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*args, **kwargs)

        return wrapper

    return watched
