"""Estimate how long a task still takes, and tell it in lines."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL = 30.0  # seconds between two lines, at least


class Estimate:
    """Sends lines with the share of a task that is complete and the minutes that are left.

    The first share is where the task begins, e.g. what a killed run had completed; a smaller one begins another task.

    Args:
        task: what the lines begin with.
        send: receives the lines.
        later: number of later steps, each as long as this task; lines tell their minutes, too.
    """

    def __init__(self, task: str = "", send: Callable[[str], None] = lambda _: None, later: int = 0) -> None:
        self.task, self.send, self.later = task, send, later
        self.first: tuple[float, float] | None = None  # share and time of the begin
        self.last = self.sent = 0.0

    def __call__(self, share: float) -> None:
        """Send a line, if the last one is `INTERVAL` seconds ago and there is an estimate."""
        minutes, now = self.minutes(share), time.monotonic()
        if minutes is None:
            self.sent = now
        elif now - self.sent >= INTERVAL:
            self.sent = now
            line = f"{self.task}: {share:.0%} complete, about {minutes:.1f} min left"
            if self.later and share < 1:
                line += f", {minutes * (1 + self.later / (1 - share)):.1f} with later steps"
            self.send(line)

    def minutes(self, share: float) -> float | None:
        """Return the minutes that are left if this share, from 0 to 1, is complete; None at the begin."""
        now = time.monotonic()
        if self.first is None or share < self.last:
            self.first = share, now
        self.last = share
        begin, since = self.first
        return (now - since) / (share - begin) * (1 - share) / 60 if share > begin else None
