"""Run the whole experiment of smaller_model.py: the rows of the choice, the choice, and the rows of the verdict."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from _smaller import DENSE, Experiment, Row
from _smaller_choice import choice
from _smaller_estimate import expected_seconds
from _smaller_plan import chosen_entries, chosen_recipes
from _smaller_rows import make_row

from lmeval_prune.artefacts import output_lock
from lmeval_prune.errors import BusyError, InputError, first_line

POLL = 1.0  # seconds between looks at what other processes have made
REPORT = 30.0  # seconds between lines of progress
FAILURES = 5  # rows of a process without enough memory, after which it ends


class Workshop:
    """Makes rows one after another, as long as the budget lasts."""

    def __init__(self, experiment: Experiment, options: argparse.Namespace) -> None:
        self.experiment, self.options = experiment, options
        self.begin, self.longest, self.count = time.monotonic(), 0.0, 0
        self.is_late = False  # no further row fits
        self.failures = 0  # rows for which the GPU, which others use too, had too little memory

    def make(self, row: Row) -> bool:
        """Make a row if it is missing; return whether it has to wait for another process."""
        experiment, options = self.experiment, self.options
        if experiment.record(row):
            return False
        if row.recipe != DENSE and experiment.record(row.dense) is None:
            return True
        elapsed = time.monotonic() - self.begin
        seconds = expected_seconds(experiment, row, options.device) or self.longest
        if self.count == options.rows or elapsed + seconds > options.budget:
            self.is_late = True
            print(f"{self.count} rows made in {elapsed:.0f} s; the next is {row.key}, of about {seconds:.0f} s")
            return False
        try:
            with output_lock(experiment.path(row)):
                if experiment.record(row):
                    return False
                record = make_row(experiment, row, options.device, options.volatile)
        except torch.OutOfMemoryError as error:
            self.failures += 1
            if self.failures == FAILURES:
                raise
            print(f"{row.key} is tried again later: {first_line(error)}", flush=True)
            return True
        except BusyError as error:
            if options.command == "train":
                print(f"{row.key} is left: {error.problem}", flush=True)
            return True
        finally:
            torch.cuda.empty_cache()
        if options.copy:
            experiment.give(row, options.copy)
        if options.discard and row.recipe != DENSE:
            shutil.rmtree(experiment.model(row))
        self.count, self.longest = self.count + 1, max(self.longest, record["seconds"])
        print(f"{row.key}: {record['seconds']:.0f} s, {time.monotonic() - self.begin:.0f} s in all", flush=True)
        return False


def run_all(experiment: Experiment, options: argparse.Namespace) -> None:
    """Make all rows, and choose as soon as the rows of the choice are there; other processes may do the same."""
    workshop = Workshop(experiment, options)
    while not workshop.is_late:
        waits, rows = False, list(_planned(experiment, options))
        for row in rows:
            waits |= workshop.make(row)
            if workshop.is_late:
                return
        if not waits and not chosen_entries(experiment):
            try:
                with output_lock(experiment.work / "choice"):
                    if not chosen_entries(experiment):
                        print(choice(experiment, options.recipes, options.folds), flush=True)
                if not chosen_entries(experiment):
                    raise InputError("no recipe can be chosen (above); add recipes to the YAML file")
                continue
            except BusyError:
                waits = True
        if not waits:
            print("all rows are made")
            return
        time.sleep(POLL)


def _planned(experiment: Experiment, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the choice, the dense models of the verdict, and its other rows when the recipe is chosen."""
    settings = experiment.settings
    yield from experiment.rows(options.recipes, settings["choice_seeds"], options.folds)
    yield from experiment.rows([DENSE], settings["seeds"], options.folds)
    if chosen := chosen_recipes(experiment):
        yield from experiment.rows(chosen, settings["seeds"], options.folds)


def run_processes(experiment: Experiment, options: argparse.Namespace) -> int:
    """Let several processes run the experiment; report how many rows there are, and return 1 if a process failed."""
    logs = experiment.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("smaller_model.py")), *options.words, "--processes", "1"]
    names = [logs / f"{number}.log" for number in range(options.processes)]
    processes = []
    for name in names:
        with name.open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    begin = shown = time.monotonic()
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(POLL)
            if time.monotonic() - shown >= REPORT:
                shown = time.monotonic()
                rows = list(_planned(experiment, options))
                count = sum(experiment.path(row).is_file() for row in rows)
                print(f"{shown - begin:.0f} s: {count} of {len(rows)} rows", flush=True)
    finally:
        for process in processes:
            process.terminate()
    failed = [name for name, process in zip(names, processes, strict=True) if process.wait()]
    for name in failed:
        print(f"failed, {name}:\n{name.read_text()[-2000:]}", file=sys.stderr)
    return int(bool(failed))
