"""Figures of what methods and pruners compute, kept by their versions in `arithmetic.json`.

`python -m tests.arithmetic` writes figures of what is new, or has a version that was raised; others it leaves alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmeval_prune import map_model
from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.identity import ANSWERING
from lmeval_prune.pruners.base import PRUNERS, make_pruner
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import stages
from tests.methods import ROWS
from tests.tiny_models import output, tiny, tokens

FILE = Path(__file__).with_name("arithmetic.json")
NAMES = [*(f"method {row.name}" for row in ROWS if row.value is not None), *(f"pruner {name}" for name in PRUNERS)]
NAMES.append("answering")


def figures(name: str) -> dict[str, Any]:
    """Return the version of what is named, and some figures of what it computes on tiny models in float64."""
    kind, _, own = name.partition(" ")
    if kind == "method":
        (row,) = (row for row in ROWS if row.name == own)
        (method,) = Arguments.of({own: row.value}).interventions
        model = tiny("llama")
        with method.applied_to(model):
            return {"version": method.version, "figures": _summary({"output": output(model, tokens())})}
    if kind == "pruner":
        return _of_pruner(own)
    prompts = [tuple(sequence.tolist()) for sequence in tokens(4, 9)]
    sampled = SamplingParams(max_new_tokens=12, do_sample=True, temperature=2.0)
    requests = [Request(prompt, None, params, 7) for prompt in prompts for params in (SamplingParams(12), sampled)]
    answers = Engine(tiny("llama"), deterministic=True).decode(requests)
    by_index = sorted((requests.index(request), answer) for request, answer in answers)
    return {"version": ANSWERING, "figures": [token for _, answer in by_index for token in answer]}


def _of_pruner(name: str) -> dict[str, Any]:
    """Return figures of a plan that removes a quarter of the parameters that the pruner scores."""
    model_map = map_model(tiny("llama", num_hidden_layers=4))
    options = {"alpha": 0.5} if name == "norm_entropy" else {}
    pruner = make_pruner(name, options)
    text = CalibrationText.from_windows("test", tokens(8, 16), 2)
    parts: Any = "blocks" if pruner.depth_only else "heads" if pruner.heads_only else "both"
    *_, plan = stages(pruner, model_map, PruneOptions(0.25, parts=parts), text)
    removed = {"heads": list(plan.heads), "channels": dict(plan.channels)}
    removed |= {"blocks": list(plan.blocks)} if plan.blocks else {}
    figures = _summary({**plan.scores, **plan.compensation})
    return {"version": pruner.version, "removed": removed, "figures": figures}


def _summary(tensors: Mapping[str, Tensor]) -> list[float]:
    """Three weighted means of all numbers, in the order of their names, that a change of any of them moves."""
    numbers = torch.cat([torch.zeros(1), *(tensors[name].double().flatten() for name in sorted(tensors))])
    places = torch.arange(len(numbers), dtype=torch.float64)
    return [round(float((numbers * torch.cos(places * step)).mean()), 9) for step in (0.0, 0.1, 1.7)]


def kept() -> dict[str, Any]:
    """Return the figures that are kept."""
    return dict(json.loads(FILE.read_text())) if FILE.is_file() else {}


if __name__ == "__main__":
    before = kept()
    now = {name: figures(name) for name in NAMES}
    raised = {name: now[name] for name in NAMES if name not in before or before[name]["version"] < now[name]["version"]}
    FILE.write_text(json.dumps({name: {**before, **raised}[name] for name in NAMES}, indent=1) + "\n")
    print(", ".join(raised) or "no version was raised")
