"""A smaller model one would ship: dense and pruned models of SmolLM2 on all folds of ASDiv-A, by several seeds.

    python benchmarks/smaller_model.py problems                            # once, where lm-eval is
    python benchmarks/smaller_model.py estimate                            # seconds of a row of each recipe
    python benchmarks/smaller_model.py train --recipes width [--rows 1]  #     the next rows; again and again
    python benchmarks/smaller_model.py choose                              # by the validation problems alone
    python benchmarks/smaller_model.py train --recipes CHOSEN              # its rows by the seeds of the verdict
    python benchmarks/smaller_model.py speed                               # on an otherwise idle machine
    python benchmarks/smaller_model.py report                              # its first line: is the goal reached?
    python benchmarks/smaller_model.py run --recipes A B [--processes 8]   # train, choose, train; again after a kill

The experiment is smaller_model.yaml. A row is one model: a recipe, or the dense model, on one fold by one seed. It is
stored under --work when it is done and never made again; a row that was killed goes on where it was. Each row has the
model's answers to the validation problems of its training folds and to the test. `choose` scores those to the
validation problems, of rows by `choice_seeds`. Of the answers to the test, only those of the chosen recipe and its
dense models by the other seeds are scored. `gpu_rehearsal.sh` has the commands for a GPU machine without network.
"""

# ruff: noqa: E402 - a checkout that is not installed will do
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import yaml
from _smaller import DENSE, Experiment
from _smaller_plan import check_plan

from lmeval_prune.errors import InputError, first_line
from lmeval_prune.reporting.quiet import silence_libraries

HERE = Path(__file__).parent
COMMANDS = ("problems", "estimate", "train", "collect", "choose", "speed", "report", "run")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--experiment", type=Path, default=HERE / "smaller_model.yaml")
    parser.add_argument("--work", type=Path, default=Path("out/smaller_model"))
    parser.add_argument("--pretrained", default="smollm2-135m", help="the model that is fine-tuned")
    parser.add_argument("--recipes", nargs="+", default=[], help="default: all")
    parser.add_argument("--folds", nargs="+", type=int, default=[])
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[], help="run: these alone, recipe after recipe, without a choice"
    )
    parser.add_argument(
        "--then",
        nargs="+",
        default=[],
        help="run: recipes that follow, by the first of --seeds or of the choice",
    )
    parser.add_argument(
        "--rows", type=int, help="train: make at most so many; speed: measure so many of each recipe, default 1"
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="train: seconds; no row that would end later"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="but for speed, whose threads are the goal's")
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="train in bfloat16, dense and pruned models alike: for processors with avx512_bf16 or AMX",
    )
    parser.add_argument("--changes", default="{}", help="options of all rows, for rehearsals: '{limit: 40, epochs: 1}'")
    parser.add_argument(
        "--recipe_changes",
        default="{}",
        help="options of the rows of recipes alone: '{epochs: 0}' removes, and trains nothing",
    )
    parser.add_argument("--copy", type=Path, help="train, speed: copy records to this folder; collect: take them")
    parser.add_argument("--results", type=Path, help="collect: take the rows of a results file of `report`")
    parser.add_argument(
        "--discard", action="store_true", help="train: delete models of recipes when they have answered"
    )
    parser.add_argument(
        "--no-resume",
        dest="resumable",
        action="store_false",
        help="train, run: begin killed rows again; writes a third as much",
    )
    parser.add_argument("--processes", type=int, default=1, help="run: processes beside each other")
    parser.add_argument("--out", help="report: a name in benchmarks/results, or a path; default: smaller_model")
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; leave out --device")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run a command; errors of the user are one line."""
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    silence_libraries()
    try:
        changes = [changes_of(name, getattr(options, name)) for name in ("changes", "recipe_changes")]
        experiment = Experiment(options.experiment, options.work, options.pretrained, *changes, options.bf16)
        check_plan(experiment)
        return int(globals()[options.command](experiment, options) or 0)
    except InputError as error:
        print(f"smaller_model: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; run the same command again to resume {options.work}")
        return 130


def changes_of(name: str, text: str) -> dict[str, Any]:
    """Read the options of rows that an argument replaces."""
    try:
        changes = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"--{name} {text} is not YAML ({first_line(error)})") from None
    if not isinstance(changes, dict):
        raise InputError(f"--{name} {text} must be a mapping, e.g. '{{limit: 40, epochs: 1}}'")
    return changes


def problems(experiment: Experiment, options: argparse.Namespace) -> None:
    """Write the problems of all folds as lm-eval renders them."""
    from _smaller_rows import write_problems, write_prompts

    write_prompts(experiment, options.recipes)
    print(f"written: {write_problems(experiment)}")


def estimate(experiment: Experiment, options: argparse.Namespace) -> None:
    """Print the seconds of a row of each recipe, estimated from one epoch of a few problems, and the hours of all."""
    from _smaller_estimate import estimated_seconds, removed_share, trains_dense
    from _smaller_rows import write_problems, write_prompts

    seeds = options.seeds or experiment.settings["choice_seeds"]
    names = options.recipes or [*experiment.settings["recipes"]]
    rows = list(experiment.rows(names, seeds, options.folds))
    write_problems(experiment)
    write_prompts(experiment, options.recipes)
    seconds = dict[str, float]()
    for name in dict.fromkeys(row.recipe for row in rows):
        parts = estimated_seconds(experiment, next(row for row in rows if row.recipe == name), options.device)
        details = ", ".join(f"{part} {duration:.0f}" for part, duration in parts.items())
        seconds[name] = sum(parts.values())
        share = None if name == DENSE else removed_share(experiment, name)
        removes = "" if share is None else f"removes {share:.1%} of the parameters in blocks, "
        print(f"{name}: {removes}about {seconds[name]:.0f} s a row ({details})", flush=True)
    anew = {row.dense for row in rows if trains_dense(experiment, row)}
    lacking = [row for row in rows if not experiment.path(row).is_file()]
    total = sum(seconds[row.recipe] for row in lacking) + len(anew) * seconds[DENSE]
    print(
        f"all: {total / 3600:.1f} h for {len(lacking)} rows that are missing, and {len(anew)} dense models that "
        f"have a row but are not on this machine"
    )


def train(experiment: Experiment, options: argparse.Namespace) -> None:
    """Make the rows that are missing; go on with the next if another process makes one."""
    from _smaller_plan import planned_rows
    from _smaller_rows import write_problems, write_prompts
    from _smaller_run import RowMaker

    rows = list(planned_rows(experiment, options.recipes, options.folds, options.seeds))
    write_problems(experiment)
    write_prompts(experiment, options.recipes)
    maker, waiting = RowMaker(experiment, options), 0
    for row in rows:
        waiting += maker.make(row)
        if maker.is_late:
            return
    print(f"{waiting} rows wait for other processes; run the command again" if waiting else "all rows are made")


def run(experiment: Experiment, options: argparse.Namespace) -> int:
    """Make the rows of the choice, choose, and make the rows of the verdict, in one or several processes."""
    from _smaller_rows import write_problems, write_prompts
    from _smaller_run import run_all, run_processes

    write_problems(experiment)
    write_prompts(experiment, [*options.recipes, *options.then] if options.recipes else [])
    if options.processes > 1:
        return run_processes(experiment, options)
    run_all(experiment, options)
    return 0


def collect(experiment: Experiment, options: argparse.Namespace) -> None:
    """Take the records and speeds of another machine, or of a results file."""
    from _smaller_results import take_results
    from _smaller_speed import read_speeds, take_speeds

    if options.results:
        rows, left = take_results(experiment, options.results)
        lacking = f"; {left} are left: {options.results} lacks their test, or their dense models' answers"
        print(f"{rows} new rows in {options.work}" + (lacking if left else ""))
        return
    if not options.copy or not options.copy.is_dir():
        raise InputError("name the folder of the records, --copy FOLDER, or a results file, --results FILE")
    rows, speeds = experiment.take(options.copy), take_speeds(experiment, read_speeds(options.copy))
    print(f"{rows} new rows in {options.work}" + (f", and {speeds} speeds" if speeds else ""))


def choose(experiment: Experiment, options: argparse.Namespace) -> None:
    """Choose a recipe by the pooled difference on the validation problems."""
    from _smaller_choice import choice

    print(choice(experiment, options.recipes, options.folds))


def speed(experiment: Experiment, options: argparse.Namespace) -> None:
    """Measure tokens per second of each recipe's shape in turn with the dense model's."""
    from _smaller_speed import measure_speeds

    count = 1 if options.rows is None else options.rows
    measure_speeds(experiment, options.recipes, options.device, count, options.copy)


def report(experiment: Experiment, options: argparse.Namespace) -> None:
    """Write the results file and print the report."""
    from smaller_model_report import write_report

    print(write_report(experiment, options.out or "smaller_model"))


if __name__ == "__main__":
    sys.exit(main())
