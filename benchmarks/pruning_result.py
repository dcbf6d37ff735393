"""What a percentage of heads is worth: quality, parameters, arithmetic and time of SmolLM2 cut by each score and unit.

    python benchmarks/pruning_result.py [--tokens 1024] [--threads 1] [--work out/pruning] [--report]

Heads (and, where it says so, as large a share of feed-forward channels) are removed at once, without any training.
Perplexity by token on GSM8K's test text, windows of 512 tokens. Speed is that of the shapes, which all scores share, so
that it is measured once for each unit and ratio, in turn with the unpruned model, medians, by processor time; it is of
float32 on the processor named in the results. Parameters and arithmetic are counted on a model that is cut there, by
closed formulas elsewhere (the tests hold them against each other). What was measured is kept under --work and not
measured again; each row says in which environment (commit, processor, threads, versions, load) it was measured, by
number, null if it is older than that. Writes `results/pruning.json`, and a table and a picture under
`docs/results/pruning/`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _measures import expected, perplexity, texts
from _record import RESULTS, environment, write
from transformers import AutoTokenizer

from lmeval_prune import Plan, load_pretrained, map_model
from lmeval_prune.artefacts import write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.profiling.costs import counted_flops, parameters
from lmeval_prune.profiling.speed import Workload, measure
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.calibration import read_calibration
from lmeval_prune.pruners.options import PruneOptions, TextOptions
from lmeval_prune.pruners.parts import HEADS, KINDS, parts_of
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.reporting.plot_style import COLOURS, save
from lmeval_prune.surgery.cut import cut

RATIOS = (0.1, 0.2, 0.3)
UNITS = ("group", "balanced", "head")
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "norm + entropy": ("norm_entropy", {}),
    "random": ("random", {"seed": 0}),
    "norm": ("global_threshold", {}),
    "entropy": ("norm_entropy", {"alpha": 0.0}),
    "magnitude": ("magnitude", {}),
    "confidence": ("confidence", {}),
}
SEEDS = {f"random, seed {seed}": ("random", {"seed": seed}) for seed in range(1, 5)}  # random is seed 0
WORK = Workload(prompt=128, new=8, batches=(1, 4), rounds=6, clock="processor")
PROMPT = 128  # tokens whose arithmetic is counted
OUTPUT = RESULTS.parent.parent / "docs/results/pruning"


def rows() -> Iterator[tuple[str, str, float, bool]]:
    """Yield method, unit, ratio, and whether as many channels go, too; what matters most first."""
    with_channels = [name for name in METHODS if name not in ("confidence", "norm")]
    first = [("random", True), ("norm + entropy", True), ("magnitude", False), ("entropy", True), ("magnitude", True)]
    order = [(name, False) for name in list(METHODS)[:4]] + first + [("confidence", False)]
    assert {*order} == {*((name, False) for name in METHODS), *((name, True) for name in with_channels)}
    for method, channels in order:
        for unit in UNITS if not channels else ("group",):
            for ratio in RATIOS:
                yield method, unit, ratio, channels
    for method in SEEDS:
        for unit in UNITS:
            yield method, unit, RATIOS[-1], False


def key_of(method: str, unit: str, ratio: float, channels: bool) -> str:
    return f"{method}, {unit} {ratio:.0%}{' + channels' if channels else ''}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", default="out/pruning")
    parser.add_argument("--report", action="store_true", help="measure nothing, write what is known")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    machine = environment()
    folder = embedded.resolve("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = read_calibration(tokenizer, TextOptions(task="prune_gsm8k", windows=32))
    path = Path(options.work) / f"{options.tokens}.json"
    stored_rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if options.report:
        finish(machine, options.tokens, text.record(), stored_rows)
        return
    model = load_pretrained(folder, dtype=torch.float32)
    model_map, windows = map_model(model), texts(tokenizer, options.tokens)["GSM8K"]
    if "dense" not in stored_rows:
        all_, without = parameters(model)
        counts = {"parameters": all_, "without_embeddings": without, "flops": counted_flops(model, PROMPT)}
        stored_rows["dense"] = {**counts, "perplexity": perplexity(model, windows), "environment": machine}
    scores: dict[tuple[str, bool], dict[str, torch.Tensor]] = {}
    planned = list(rows())
    for number, (method, unit, ratio, channels) in enumerate(planned, 1):
        key = key_of(method, unit, ratio, channels)
        if key in stored_rows:
            continue
        name, method_options = {**METHODS, **SEEDS}[method]
        pruner = make_pruner(name, method_options)
        if (method, channels) not in scores:
            kinds = KINDS if channels else [HEADS]
            scores[method, channels] = pruner.scores(model_map, text, parts_of(model_map, kinds), {}).values
        prune_options = PruneOptions(
            ratio, unit, budget="heads", ffn_ratio=ratio if channels else 0.0, allocation="global"
        )
        (plan,) = stages(pruner, model_map, prune_options, text, scores=scores[method, channels])
        with plan.applied_to(model, model_map):
            quality = perplexity(model, windows)
        row: dict[str, Any] = {
            "perplexity": quality,
            "heads_masked": len(plan.heads),
            **expected(model_map, plan, PROMPT),
        }
        saved = f"{key.replace(' ', '_').replace('%', '')}.json"
        plan.save(Path(options.work) / saved, model_map)
        stored_rows[key] = {**row, "plan": saved, "environment": machine}
        write_text(path, json.dumps(stored_rows))
        print(f"{number} of {len(planned)}: {key}: {quality:.2f}, {row['parameters'] / 1e6:.2f} million", flush=True)
    finish(machine, options.tokens, text.record(), stored_rows)
    for row in [stored_rows[key_of(*settings)] for settings in planned if settings[0] == "norm + entropy"]:
        if "speed" not in row:
            smaller = cut(model, Plan.load(Path(options.work) / row["plan"])).model
            counted = (*parameters(smaller), counted_flops(smaller, PROMPT))
            assert counted == (row["parameters"], row["without_embeddings"], row["flops"])
            row |= {"speed": measure({"dense": model, "cut": smaller}, WORK), "load": os.getloadavg()[0]}
            row["speed_environment"] = machine
            write_text(path, json.dumps(stored_rows))
            print(f"{row['plan']}: {row['speed']}", flush=True)
            finish(machine, options.tokens, text.record(), stored_rows)


def finish(machine: dict[str, Any], tokens: int, calibration: dict[str, Any], stored_rows: dict[str, Any]) -> None:
    """Write what is known, each row with the run that measured it."""
    measured = [key_of(*row) for row in rows() if key_of(*row) in stored_rows]
    environments: list[dict[str, Any]] = []
    results = {key: _numbered(stored_rows[key], environments) for key in ("dense", *measured)}
    content = {"written": machine, "environments": environments, "tokens": tokens, "calibration": calibration}
    write("pruning", {**content, "workload": vars(WORK), "results": results})
    report(results)


def _numbered(row: dict[str, Any], environments: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row with the numbers of its environments in a list; null if it was measured before that was kept."""
    numbered = dict(row)
    for name in ("environment", *(["speed_environment"] if "speed" in row else [])):
        machine = row.get(name)
        if machine is not None and machine not in environments:
            environments.append(machine)
        numbered[name] = None if machine is None else environments.index(machine)
    return numbered


def report(results: dict[str, Any]) -> None:
    """Write the table and the picture."""
    dense = results["dense"]
    lines = [
        "| removed by | unit | share | perplexity | heads cut | parameters | without embeddings | FLOPs "
        "| prefill, batch 1 / 4 | decode, batch 1 / 4 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        f"| nothing | | | {dense['perplexity']:.2f} | 0 | {dense['parameters'] / 1e6:.1f} M | "
        f"{dense['without_embeddings'] / 1e6:.1f} M | {dense['flops'] / 1e9:.2f} G | | |",
    ]
    for method, unit, ratio, channels in rows():
        row = results.get(key_of(method, unit, ratio, channels))
        if row is None:
            continue
        shares = (f"−{1 - row[name] / dense[name]:.1%}" for name in ("parameters", "without_embeddings", "flops"))
        speed = ["", ""]
        if "speed" in row:
            faster = {name: row["speed"]["cut"][name] / row["speed"]["dense"][name] for name in row["speed"]["cut"]}
            speed = [f"{faster[f'{kind}_1']:.2f} / {faster[f'{kind}_4']:.2f}" for kind in ("prefill", "decode")]
        share = f"{ratio:.0%} of heads{' and channels' if channels else ''}"
        cells = [method, unit, share, f"{row['perplexity']:.2f}", str(row["removed"]["heads"]), *shares, *speed]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("\nSpeeds are those of the unpruned model times the figure, measured in turn; of one score a shape.")
    write_text(OUTPUT / "table.md", "\n".join(lines) + "\n")
    draw(results)


def draw(results: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 3.8), layout="constrained")
    panels = picture.subplots(1, 4, sharey=True)
    percent = [100 * ratio for ratio in RATIOS]
    for axes, (unit, channels) in zip(panels, [*((unit, False) for unit in UNITS), ("group", True)], strict=True):
        for colour, method in zip(COLOURS, METHODS, strict=False):
            keys = [key_of(method, unit, ratio, channels) for ratio in RATIOS]
            if not all(key in results for key in keys):
                continue
            values = [results[key]["perplexity"] for key in keys]
            axes.plot(
                percent, values, color=colour, marker="o", ms=4, ls="--" if method == "random" else "-", label=method
            )
        axes.axhline(results["dense"]["perplexity"], color="black", lw=0.8, ls=":")
        axes.set_yscale("log")
        axes.set_xticks(percent)
        axes.set_title(f"unit={unit}{', and channels' if channels else ''}", fontsize=9, loc="left")
        axes.set_xlabel("per cent removed")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("perplexity by token, GSM8K")
    panels[0].legend(fontsize=7, frameon=False)
    save(picture, OUTPUT / "perplexity")


if __name__ == "__main__":
    main()
