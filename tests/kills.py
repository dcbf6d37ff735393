"""Processes that kill themselves, for tests of what a kill leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest


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


def run_killed(owner: Any, name: str, count: int, run: Callable[[], Any]) -> None:
    """Run something in a process that kills itself instead of the count-th call of a function, and see that it did."""
    child = os.fork()
    if child == 0:
        setattr(owner, name, killing_after(count)(getattr(owner, name)))
        run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


class Killed(BaseException):
    """Ends a run at once, within this process."""


def counted(patch: pytest.MonkeyPatch, owner: Any, name: str, kill_at: int = -1) -> list[int]:
    """Count the calls of a function, and raise `Killed` instead of the call of this number, from zero."""
    calls, function = [0], getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if calls[0] == kill_at:
            raise Killed
        calls[0] += 1
        return function(*args, **kwargs)

    patch.setattr(owner, name, wrapper)
    return calls
