"""Run the whole experiment of smaller_model.py: the rows of the choice, the choice, and the rows of the verdict."""

from __future__ import annotations

import argparse
import gc
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from _smaller import DENSE, Experiment, Row
from _smaller_choice import choice
from _smaller_estimate import expected_seconds
from _smaller_plan import chosen_entries, planned_rows
from _smaller_rows import make_row

from lmeval_prune.artefacts import output_lock
from lmeval_prune.distillation.recursion import lessons_file
from lmeval_prune.errors import BusyError, InputError, first_line

POLL = 1.0  # seconds between looks at the rows of other processes
REPORT = 30.0  # seconds between lines of progress
FAILURES = 5  # rows of a process without enough memory, after which it ends
PAUSE = 15.0  # seconds after the first of them, doubled after each: other processes may end, or need less memory


class RowMaker:
    """Makes rows one after another, as long as the budget lasts.

    Attributes:
        is_late: whether a row was not begun, because it would end after the budget.
    """

    def __init__(self, experiment: Experiment, options: argparse.Namespace) -> None:
        self.experiment, self.options = experiment, options
        self.begin, self.longest, self.count = time.monotonic(), 0.0, 0
        self.is_late = False
        self._known: set[Row] = set()  # rows whose records were read and are right
        self._failures = 0  # rows for which the GPU, which others use too, had too little memory

    def has(self, row: Row) -> bool:
        """Return whether a row is there; its record is read and checked once."""
        if row not in self._known and self.experiment.record(row):
            self._known.add(row)
        return row in self._known

    def make(self, row: Row) -> bool:
        """Make a row if it is missing; return whether it has to wait for another process."""
        experiment, options = self.experiment, self.options
        if self.has(row):
            return False
        if row.recipe != DENSE and not self.has(row.dense):
            return True
        pause = 0.0
        try:
            with output_lock(experiment.path(row)):
                if self.has(row) or self._is_too_late(row):
                    return False
                record = make_row(experiment, row, options.device, options.resumable)
        except torch.OutOfMemoryError as error:
            pause = PAUSE * 2**self._failures
            self._failures += 1
            if self._failures == FAILURES:
                raise
            print(f"{row.key} is tried again in {pause:.0f} s: {first_line(error)}", flush=True)
        except BusyError as error:
            if options.command == "train":
                print(f"{row.key} is left: {error.problem}", flush=True)
            return True
        finally:
            torch.cuda.empty_cache()
        if pause:
            gc.collect()  # tensors of the row that failed
            torch.cuda.empty_cache()
            time.sleep(pause)
            return True
        if options.copy:
            experiment.give(row, options.copy)
        if options.discard and row.recipe != DENSE:
            folder = experiment.model(row)
            shutil.rmtree(folder)
            lessons_file(folder).unlink(missing_ok=True)
        self.count, self.longest = self.count + 1, max(self.longest, record["seconds"])
        print(f"{row.key}: {record['seconds']:.0f} s, {time.monotonic() - self.begin:.0f} s in all", flush=True)
        return False

    def _is_too_late(self, row: Row) -> bool:
        """Return whether a row would end after the budget or exceed the number of rows; print that the first time."""
        elapsed = time.monotonic() - self.begin
        seconds = expected_seconds(self.experiment, row, self.options.device) or self.longest
        if self.count != self.options.rows and elapsed + seconds <= self.options.budget:
            return False
        if not self.is_late:
            print(f"{self.count} rows made in {elapsed:.0f} s; the next is {row.key}, of about {seconds:.0f} s")
        self.is_late = True
        return True


def run_all(experiment: Experiment, options: argparse.Namespace) -> None:
    """Make all rows, and choose as soon as the rows of the choice are there; other processes may do the same.

    Nothing is chosen if seeds are given.
    """
    maker = RowMaker(experiment, options)
    while not maker.is_late:
        waits = False
        for row in _planned(experiment, options):
            waits |= maker.make(row)
            if options.seeds or chosen_entries(experiment):
                continue
            if all(map(maker.has, _rows_of_choice(experiment, options))):
                waits |= _choose(experiment, options)
        if maker.is_late:
            return
        if not waits:
            print("all rows are made")
            return
        time.sleep(POLL)


def _choose(experiment: Experiment, options: argparse.Namespace) -> bool:
    """Choose a recipe, unless another process does; return whether there are further rows to make."""
    try:
        with output_lock(experiment.work / "choice"):
            if not chosen_entries(experiment):
                print(choice(experiment, options.recipes, options.folds), flush=True)
    except BusyError:
        return True
    if not chosen_entries(experiment):
        raise InputError("no recipe can be chosen (above); add recipes to the YAML file")
    return True


def _rows_of_choice(experiment: Experiment, options: argparse.Namespace) -> Iterator[Row]:
    return experiment.rows(options.recipes, experiment.settings["choice_seeds"], options.folds)


def _planned(experiment: Experiment, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the choice, the dense models of the verdict, and its other rows when the recipe is chosen.

    Of seeds that are given, the dense models and then one recipe after the other. `then` comes last.
    """
    seeds = options.seeds or experiment.settings["choice_seeds"]
    if options.seeds:
        for name in (DENSE, *(options.recipes or experiment.settings["recipes"])):
            yield from experiment.rows_of(name, seeds, options.folds)
    else:
        yield from _rows_of_choice(experiment, options)
        yield from experiment.rows([DENSE], experiment.settings["seeds"], options.folds)
        yield from planned_rows(experiment, options.recipes, options.folds, ())
    for name in options.then:
        yield from experiment.rows_of(name, seeds[:1], options.folds)


def run_processes(experiment: Experiment, options: argparse.Namespace) -> int:
    """Let several processes run the experiment; report how many rows there are, and return 1 if a process failed."""
    folder = experiment.work / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    script = str(Path(__file__).with_name("smaller_model.py"))
    logs = [folder / f"{number}.log" for number in range(options.processes)]
    processes = []
    for log in logs:
        with log.open("w") as file:
            command = [sys.executable, script, *options.arguments, "--processes", "1"]
            processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes are ended, too
    begin = shown = time.monotonic()
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(POLL)
            if time.monotonic() - shown >= REPORT:
                shown = time.monotonic()
                rows = set(_planned(experiment, options))
                count = sum(experiment.path(row).is_file() for row in rows)
                print(f"{shown - begin:.0f} s: {count} of {len(rows)} rows", flush=True)
    finally:
        for process in processes:
            process.terminate()
    failed = [log for log, process in zip(logs, processes, strict=True) if process.wait()]
    for log in failed:
        print(f"failed, {log}:\n{log.read_text()[-2000:]}", file=sys.stderr)
    return int(bool(failed))
