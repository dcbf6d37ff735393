"""The decoding engine on a GPU: tests, milliseconds of a step, sweeps, its peers, and the token filter.

    python benchmarks/gpu_engine.py --part steps [--budget 450] [--out NAME]
    python benchmarks/gpu_engine.py --part steps --tiny --device cpu    # a rehearsal

Runs from a checkout, without lm_eval and without a model's files. Each part first compares results with the model's
own, and times nothing if they differ. The results file is complete after each row. `benchmarks/gpu_rehearsal.sh` has
the commands of a whole run.
"""

# ruff: noqa: E402 - a checkout that is not installed will do
from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
from _gpu_common import SHAPES, Report, results_path

PARTS = {
    "tests": "_gpu_tests",
    "steps": "_gpu_steps",
    "sweep": "_gpu_sweep",
    "peers": "_gpu_peers",
    "filter": "_gpu_filter",
}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--tiny", action="store_true", help="shrink all shapes: a rehearsal on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=450, help="seconds; what would end later is skipped")
    parser.add_argument("--out", help="a name in benchmarks/results, or a path; default: gpu_engine_PART")
    parser.add_argument("--models", nargs="+", help="steps: names such as llama-3-8b-bfloat16; default: all")
    parser.add_argument("--rows", type=int, nargs="+", help="steps: numbers of rows")
    parser.add_argument("--keys", type=int, nargs="+", help="steps, filter: numbers of keys, the gate's first")
    parser.add_argument("--layers", type=int, help="number of layers instead of the shape's")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="nothing by torch.compile")
    parser.add_argument("--pretrained", help="sweep, peers: a folder of SmolLM2, instead of random weights")
    parser.add_argument("--texts", help="sweep, peers: a file of JSON lines with a field 'question'")
    parser.add_argument("--questions", type=int, default=256, help="sweep, peers")
    parser.add_argument("--new-tokens", type=int, default=256, help="sweep, peers: largest number in an answer")
    parser.add_argument("--masks", type=int, default=9, help="sweep: the first of them prunes nothing")
    parser.add_argument("--shape", default="smollm2-135m", help="sweep, peers: of random weights")
    parser.add_argument("--dtype", default="float32", help="sweep, peers")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256], help="sweep, peers: of `generate`")
    parser.add_argument("--rounds", type=int, default=2, help="sweep, peers, filter")
    parser.add_argument("--files", nargs="+", help="tests: files or names of tests")
    options = parser.parse_args(arguments)
    if options.shape not in SHAPES:
        parser.error(f"--shape {options.shape}: choose from {', '.join(SHAPES)}")
    for name in options.models or ():
        if name.rpartition("-")[0] not in SHAPES:
            parser.error(
                f"--models {name}: a shape and a dtype, such as llama-3-8b-bfloat16; shapes: {', '.join(SHAPES)}"
            )
    if options.texts and not Path(options.texts).is_file():
        parser.error(f"--texts {options.texts}: no such file")
    return options


def main(arguments: list[str] | None = None) -> Path:
    """Run a part; return the path of its results."""
    options = parsed(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; rehearse with --tiny --device cpu")
    name = options.out or f"gpu_engine_{options.part}"
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    report = Report(name, options.device, options.budget, {"part": options.part, "options": settings})
    import_module(PARTS[options.part]).run(options, report)
    report.write()
    print(f"written: {results_path(name)}")
    if report.has_failed:
        sys.exit("some rows have failed, see the results")
    return Path(results_path(name))


if __name__ == "__main__":
    main()
