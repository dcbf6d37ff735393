"""The progress of the demo: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

STAGES = {"scores of heads": 2, "distances": 21, "accuracy": 11, "answers": 29, "cut": 22}  # rough seconds
INTERVAL = 15.0  # seconds between two lines, at least


class Steps:
    """The stages of the demo, one after another, whose weights are rough seconds.

    Args:
        show: called with the name of the stage and the share of the whole demo that is complete, from 0 to 1.
    """

    def __init__(self, show: Callable[[str, float], None]) -> None:
        self._show = show
        self._stage = "loading"
        self._done = self._weight = self._began = 0.0
        self.seconds: dict[str, float] = {}  # of each complete stage
        self.advance(0)

    def begin(self, stage: str) -> None:
        """Show the name of a stage."""
        self._stage, self._began, self._weight = stage, time.perf_counter(), STAGES[stage]
        self.advance(0)

    def advance(self, share: float) -> None:
        """Set the share of the stage that is complete."""
        self._show(self._stage, (self._done + share * self._weight) / sum(STAGES.values()))
        if share >= 1:
            self._done += self._weight
            self.seconds[self._stage] = round(time.perf_counter() - self._began, 1)


@contextmanager
def show_steps(console: Console, bar: bool) -> Iterator[Steps]:
    """Show progress as a bar that goes away at the end, or as lines that are `INTERVAL` seconds apart."""
    if not bar:
        yield Steps(lines(console))
        return
    columns = (TextColumn("{task.description:<16}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield Steps(lambda stage, share: progress.update(task, description=stage, completed=share))


def lines(console: Console, clock: Callable[[], float] = time.monotonic) -> Callable[[str, float], None]:
    """Return a function that prints the stage, the share and the time, at most once in `INTERVAL` seconds."""
    start = clock()
    printed: list[float] = []

    def show(stage: str, share: float) -> None:
        now = clock()
        if not printed or now - printed[-1] >= INTERVAL:
            printed.append(now)
            console.print(f"{now - start:4.0f} s {share:4.0%}  {stage}", highlight=False)

    return show
