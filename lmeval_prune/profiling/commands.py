"""`lmeval-prune profile`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Len

from lmeval_prune.errors import InputError
from lmeval_prune.settings import Count


def profile(
    names: tuple[str, ...],
    output: str = "out/profile",
    prompt: Annotated[int, Ge(2)] = 128,
    new: Count = 32,
    batches: Annotated[tuple[Count, ...], Len(1)] = (1, 8),
    rounds: Count = 5,
    threads: Count = 1,
    clock: Literal["wall", "processor"] = "wall",
) -> int:
    """Compare the costs of models: parameters, FLOPs, speed and memory.

    Args:
        names: models, the first one is the reference: `profile A B …`
        output: folder for the table, the plot and `profile.json`
        prompt: tokens of a prompt
        new: tokens decoded after it
        batches: batch sizes
        rounds: measurements of each model; medians are shown
        threads: number of CPU threads
        clock: wall, or processor (CPU time of this process, for busy machines, with one thread)
    """
    if not names:
        raise InputError("name models: `lmeval-prune profile A B …`")
    if len(set(names)) < len(names):
        raise InputError("a model is named twice; name each once")
    from lmeval_prune.artefacts import check_writable

    folder = Path(output)
    check_writable(folder / "profile.json")
    import torch

    from lmeval_prune.profiling.speed import Workload

    torch.set_num_threads(threads)
    work = Workload(prompt, new, batches, rounds, clock)
    _write(folder, _measure(names, work), {"workload": vars(work), "threads": threads})
    return 0


def _measure(names: Sequence[str], work: Any) -> dict[str, dict[str, Any]]:
    """Return the measured values by model."""
    from lmeval_prune.architectures import map_model
    from lmeval_prune.checkpoints.loading import load_pretrained
    from lmeval_prune.profiling.costs import counted_flops, formula_flops, parameters
    from lmeval_prune.profiling.speed import check_length, measure, peak_memory

    for name in names:
        check_length(name, work)
    memory = {}
    for name in names:  # first, because the measured process starts from this one, which is still small
        _show_progress(f"memory: {name}")
        memory[name] = round(peak_memory(name, work), 1)
    models = {name: load_pretrained(name) for name in names}
    rows: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        total, without_embeddings = parameters(model)
        flops, counted = formula_flops(map_model(model), work.prompt), counted_flops(model, work.prompt)
        rows[name] = {"parameters": total, "without_embeddings": without_embeddings, "tokens": work.prompt}
        rows[name] |= {"flops": flops, "flops_counted": counted}
    speeds = measure(models, work, _show_progress)
    _show_progress("")
    return {name: {**row, **speeds[name], "peak_memory_mib": memory[name]} for name, row in rows.items()}


def _write(folder: Path, rows: dict[str, dict[str, Any]], settings: dict[str, Any]) -> None:
    from lmeval_prune.artefacts import CREATED_BY, write_text
    from lmeval_prune.profiling.table import draw_bars, table

    text = table(rows)
    origin = {"created_by": CREATED_BY, **settings, "dtype": "as in each checkpoint"}
    write_text(folder / "profile.json", json.dumps({**origin, "models": rows}, indent=1) + "\n")
    write_text(folder / "profile.md", text)
    draw_bars(rows, folder / "profile")
    print(f"{text}\n{folder}/profile.json, .md, .png")


def _show_progress(line: str) -> None:
    print(f"\r{line:70}\r", end="", file=sys.stderr, flush=True)
