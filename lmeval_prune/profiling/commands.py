"""`lmeval-prune profile`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lmeval_prune.errors import InputError


def say(line: str) -> None:
    """Show a line of progress in the place of the last one."""
    print(f"\r{line:70}\r", end="", file=sys.stderr, flush=True)


def profile(
    names: tuple[str, ...],
    output: str = "out/profile",
    prompt: int = 128,
    new: int = 32,
    batches: tuple[int, ...] = (1, 8),
    rounds: int = 5,
    threads: int = 1,
    clock: str = "wall",
) -> int:
    """Measure what models cost, side by side: parameters, arithmetic, speed and memory.

    Args:
        names: models, the first is what the others are compared with; as words: `profile A B …`
        output: folder for the table, the picture and `profile.json`
        prompt: tokens of a prompt
        new: tokens decoded after it
        batches: prompts at once
        rounds: how often each model has its turn; medians are shown
        threads: of the processor
        clock: wall, or processor (what this process had of it; for a busy machine, with one thread)
    """
    if len(names) < 1 or min((prompt - 1, new, rounds, threads, *batches), default=0) < 1 or not batches:
        raise InputError(
            "name models (`lmeval-prune profile A B …`); prompt, new, batches, rounds, threads are above 0"
        )
    if clock not in ("wall", "processor"):
        raise InputError(f"clock={clock!r} is not known; use wall or processor")
    if len(set(names)) < len(names):
        raise InputError("a model is named twice; name each once")
    from lmeval_prune.artefacts import CREATED_BY, check_writable, write_text

    folder = Path(output)
    check_writable(folder / "profile.json")
    import torch

    from lmeval_prune.checkpoints.pruned import load_pretrained
    from lmeval_prune.profiling.costs import costs, counted_flops
    from lmeval_prune.profiling.speed import Workload, check_length, measure, peak_memory
    from lmeval_prune.profiling.table import draw, table

    torch.set_num_threads(threads)
    work = Workload(prompt, new, batches, rounds, clock)
    for name in names:
        check_length(name, work)
    rows: dict[str, dict[str, Any]] = {}
    memory = {}
    for name in names:  # first, while this process, with which the one that is measured begins, is small
        say(f"memory: {name}")
        memory[name] = round(peak_memory(name, work), 1)
    models = {name: load_pretrained(name) for name in names}
    for name, model in models.items():
        found = costs(model, prompt)
        rows[name] = {**vars(found), "flops_counted": counted_flops(model, prompt)}
    speeds = measure(models, work, say)
    for name in names:
        rows[name] |= {**speeds[name], "peak_memory_mib": memory[name]}
    say("")
    text = table(rows)
    about = {"created_by": CREATED_BY, "workload": vars(work), "threads": threads, "dtype": "as in each checkpoint"}
    write_text(folder / "profile.json", json.dumps({**about, "models": rows}, indent=1) + "\n")
    write_text(folder / "profile.md", text)
    draw(rows, folder / "profile")
    print(f"{text}\n{folder}/profile.json, .md, .png")
    return 0
