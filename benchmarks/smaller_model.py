"""A smaller model one would ship: dense and pruned models of SmolLM2 on all folds of ASDiv-A, by several seeds.

    python benchmarks/smaller_model.py problems                            # once, where lm-eval is
    python benchmarks/smaller_model.py estimate                            # seconds of a row of each recipe
    python benchmarks/smaller_model.py train --recipes layer_map [--rows 1]  # the next rows; again and again
    python benchmarks/smaller_model.py choose                              # by the validation problems alone
    python benchmarks/smaller_model.py train --recipes CHOSEN              # the rows that are missing
    python benchmarks/smaller_model.py speed                               # on an otherwise idle machine
    python benchmarks/smaller_model.py report                              # its first line: is the goal reached?

The experiment is smaller_model.yaml. A row is one model: a recipe, or the dense model, on one fold by one seed. It is
stored under --work when it is done and never made again; a row that was killed goes on where it was. Each row has the
model's answers to the validation problems of its training folds and to the test. `choose` scores those to the
validation problems only; the answers to the test are scored for the dense model and the chosen recipe only.
`gpu_rehearsal.sh` has the commands for a GPU machine without network.
"""

# ruff: noqa: E402 - a checkout that is not installed will do
from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import yaml
from _smaller import DENSE, Experiment, Row

from lmeval_prune.artefacts import output_lock
from lmeval_prune.errors import InputError, yaml_error_text

HERE = Path(__file__).parent
COMMANDS = ("problems", "estimate", "train", "collect", "choose", "speed", "report")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--experiment", type=Path, default=HERE / "smaller_model.yaml")
    parser.add_argument("--work", type=Path, default=Path("out/smaller_model"))
    parser.add_argument("--pretrained", default="smollm2-135m", help="the model that is fine-tuned")
    parser.add_argument("--recipes", nargs="+", default=[], help="default: all; choose: those that may be chosen")
    parser.add_argument("--folds", nargs="+", type=int, default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--rows", type=int, default=1 << 30, help="train: largest number of rows that are made")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="train: seconds; no row that would end later"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--changes", default="{}", help="options of all rows, for rehearsals: '{limit: 40, epochs: 1}'")
    parser.add_argument("--copy", type=Path, help="train: copy records to this folder; collect: take them from there")
    parser.add_argument(
        "--discard", action="store_true", help="train: delete models of recipes when they have answered"
    )
    parser.add_argument("--out", help="report: a name in benchmarks/results, or a path; default: smaller_model")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; leave out --device")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run a command; errors of the user are one line."""
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        experiment = Experiment(options.experiment, options.work, options.pretrained, changes_of(options.changes))
        experiment.check_same()
        return int(globals()[options.command](experiment, options) or 0)
    except InputError as error:
        print(f"smaller_model: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; run the same command again to resume {options.work}")
        return 130


def changes_of(text: str) -> dict[str, Any]:
    """Read options that replace those of all rows."""
    try:
        changes = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"--changes {text} is not YAML ({yaml_error_text(error)})") from None
    if not isinstance(changes, dict):
        raise InputError(f"--changes {text} must be a mapping, e.g. '{{limit: 40, epochs: 1}}'")
    return changes


def problems(experiment: Experiment, options: argparse.Namespace) -> None:
    """Write the problems of all folds as lm-eval renders them."""
    from _smaller_rows import write_problems

    print(f"written: {write_problems(experiment)}")


def estimate(experiment: Experiment, options: argparse.Namespace) -> None:
    """Print the seconds of a row of each recipe, estimated from one epoch of a few problems."""
    from _smaller_rows import estimated_seconds, write_problems

    experiment.check_names(options.recipes, options.folds)
    write_problems(experiment)
    folds, seeds = options.folds or experiment.settings["folds"], options.seeds or experiment.settings["seeds"]
    for name in (DENSE, *(options.recipes or experiment.settings["recipes"])):
        row = Row(name, folds[0], seeds[0])
        parts = estimated_seconds(experiment, row, options.work / "estimate", options.device)
        details = ", ".join(f"{part} {seconds:.0f}" for part, seconds in parts.items())
        total = sum(parts.values())
        share = None if name == DENSE else experiment.removed_share(name)
        removes = "" if share is None else f"removes {share:.1%} of the parameters in blocks, "
        print(
            f"{name}: {removes}about {total:.0f} s a row ({details}), {len(folds) * len(seeds) * total / 3600:.1f} h "
            f"for {len(folds)} folds and {len(seeds)} seeds",
            flush=True,
        )


def train(experiment: Experiment, options: argparse.Namespace) -> None:
    """Make the rows that are missing."""
    from _smaller_rows import make_row, write_problems

    write_problems(experiment)
    begin, longest, made = time.monotonic(), 0.0, 0
    for row in experiment.rows(options.recipes, options.folds, options.seeds):
        elapsed = time.monotonic() - begin
        if experiment.path(row).is_file():
            continue
        if made >= options.rows or elapsed + longest > options.budget:
            print(f"{made} rows made in {elapsed:.0f} s; the next is {row.key}")
            return
        with output_lock(experiment.path(row)):
            if experiment.path(row).is_file():
                continue
            record = make_row(experiment, row, options.device)
        if options.copy:
            experiment.give(row, options.copy)
        if options.discard and row.recipe != DENSE:
            shutil.rmtree(experiment.model(row))
        made, longest = made + 1, max(longest, record["seconds"])
        print(f"{row.key}: {record['seconds']:.0f} s, {time.monotonic() - begin:.0f} s in all", flush=True)
    print("all rows are made")


def collect(experiment: Experiment, options: argparse.Namespace) -> None:
    """Take the records that another machine made."""
    if not options.copy or not options.copy.is_dir():
        raise InputError("name the folder of the records: --copy FOLDER")
    print(f"{experiment.take(options.copy)} new rows in {options.work}")


def choose(experiment: Experiment, options: argparse.Namespace) -> None:
    """Choose a recipe by the pooled difference on the validation problems."""
    from smaller_model_report import choice

    print(choice(experiment, options.recipes))


def speed(experiment: Experiment, options: argparse.Namespace) -> None:
    """Measure tokens per second of each recipe's shape in turn with the dense model's."""
    from _smaller_speed import measure_speeds

    measure_speeds(experiment, options.recipes, options.device)


def report(experiment: Experiment, options: argparse.Namespace) -> None:
    """Write the results file and print the report."""
    from smaller_model_report import write_report

    print(write_report(experiment, options.out or "smaller_model"))


if __name__ == "__main__":
    sys.exit(main())
