"""`lmeval-prune profile`."""

from __future__ import annotations

import json
import sys
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
    """Measure what models cost, side by side: parameters, arithmetic, speed and memory.

    Args:
        names: models, the first is what the others are compared with; as words: `profile A B …`
        output: folder for the table, the picture and `profile.json`
        prompt: tokens of a prompt
        new: tokens decoded after it
        batches: prompts at once
        rounds: number of times that each model is timed; medians are shown
        threads: of the processor
        clock: wall, or processor (the time in which this process had one; for a busy machine, with one thread)
    """
    if not names:
        raise InputError("name models: `lmeval-prune profile A B …`")
    if len(set(names)) < len(names):
        raise InputError("a model is named twice; name each once")
    from lmeval_prune.artefacts import CREATED_BY, check_writable, write_text

    folder = Path(output)
    check_writable(folder / "profile.json")
    import torch

    from lmeval_prune.architectures import map_model
    from lmeval_prune.checkpoints.loading import load_pretrained
    from lmeval_prune.profiling.costs import counted_flops, formula_flops, parameters
    from lmeval_prune.profiling.speed import Workload, check_length, measure, peak_memory
    from lmeval_prune.profiling.table import draw_bars, table

    torch.set_num_threads(threads)
    work = Workload(prompt, new, batches, rounds, clock)
    for name in names:
        check_length(name, work)
    memory = {}
    for name in names:  # first, while this process, from which the measured one starts, is small
        _show_progress(f"memory: {name}")
        memory[name] = round(peak_memory(name, work), 1)
    models = {name: load_pretrained(name) for name in names}
    rows: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        total, without_embeddings = parameters(model)
        rows[name] = {"parameters": total, "without_embeddings": without_embeddings, "tokens": prompt}
        rows[name] |= {"flops": formula_flops(map_model(model), prompt), "flops_counted": counted_flops(model, prompt)}
    speeds = measure(models, work, _show_progress)
    for name in names:
        rows[name] |= {**speeds[name], "peak_memory_mib": memory[name]}
    _show_progress("")
    text = table(rows)
    origin = {"created_by": CREATED_BY, "workload": vars(work), "threads": threads, "dtype": "as in each checkpoint"}
    write_text(folder / "profile.json", json.dumps({**origin, "models": rows}, indent=1) + "\n")
    write_text(folder / "profile.md", text)
    draw_bars(rows, folder / "profile")
    print(f"{text}\n{folder}/profile.json, .md, .png")
    return 0


def _show_progress(line: str) -> None:
    print(f"\r{line:70}\r", end="", file=sys.stderr, flush=True)
