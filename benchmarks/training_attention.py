"""Time a training step by eager attention and by SDPA on a CPU in bfloat16, by the length of the texts.

    OMP_NUM_THREADS=1 python benchmarks/training_attention.py

About as many tokens of each length are learned by both in turn; the first text of a batch is shorter, as in training,
so that attention has a mask. The losses of both must agree. `EAGER_TOKENS` of the distillation's trainer follows from
the results.
"""

# ruff: noqa: E402 - a checkout that is not installed will do
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
from _record import environment, seconds_in_turn, write
from torch.nn.functional import cross_entropy

from lmeval_prune.checkpoints.loading import load_pretrained

IMPLEMENTATIONS = ("eager", "sdpa")
LENGTHS = (64, 128, 256, 512, 1024)
TOKENS, ROUNDS = 1024, 3
PADDING, LEARNED = 8, 16  # tokens that the first text is shorter; tokens at the end of each text whose loss counts
AGREEMENT = 0.02  # relative difference of the losses; both are in bfloat16


def step(model: Any, implementation: str, ids: torch.Tensor) -> tuple[float, float]:
    """Return the loss of a training step by an attention implementation, and its seconds."""
    model.set_attn_implementation(implementation)
    begin = time.perf_counter()
    mask = torch.ones_like(ids)
    mask[0, -PADDING:] = 0
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=LEARNED).logits[1:, :-1]
        loss = cross_entropy(logits.flatten(0, 1).float(), ids[1:, 1 - LEARNED :].flatten())
    loss.backward()
    seconds = time.perf_counter() - begin
    model.zero_grad()
    return float(loss.detach()), seconds


def measured(model: Any, length: int) -> dict[str, Any]:
    """Return the seconds of steps of both implementations in turn, after one of each that does not count."""
    ids = torch.randint(10, 40000, (max(2, TOKENS // length), length), generator=torch.Generator().manual_seed(0))
    losses = {name: step(model, name, ids)[0] for name in IMPLEMENTATIONS}
    if abs(losses["eager"] / losses["sdpa"] - 1) > AGREEMENT:
        raise SystemExit(f"the losses of texts of {length} tokens differ: {losses}")
    steps: dict[str, Callable[[], float]] = {
        name: lambda name=name: step(model, name, ids)[1] for name in IMPLEMENTATIONS
    }
    return {"texts": len(ids), "losses": losses, **seconds_in_turn(steps, ROUNDS)}


def main() -> None:
    """Measure all lengths and write the results."""
    torch.set_num_threads(1)
    model = load_pretrained("smollm2-135m").float().train()
    results = {}
    for length in LENGTHS:
        results[str(length)] = entry = measured(model, length)
        low, high = min(entry["ratios"]), max(entry["ratios"])
        print(
            f"{length} tokens a text: eager is {entry['ratio']:.2f} times as fast ({low:.2f} to {high:.2f})", flush=True
        )
    write("training_attention", {**environment(), "model": "smollm2-135m", "lengths": results})


if __name__ == "__main__":
    main()
