"""Draws what the decoding engine does over time: which row is in which slot at each forward pass.

    python benchmarks/decoding_picture.py

Six of the packaged word problems, each dense and with four heads pruned, in ten slots, on the embedded model.
Writes docs/pictures/decoding.png.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from matplotlib.patches import Patch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune.architectures import map_model
from lmeval_prune.checkpoints import embedded
from lmeval_prune.decoding import Request, SamplingParams, Schedule, Stopping
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.model_runner import ModelRunner
from lmeval_prune.decoding.sampling import Sampler
from lmeval_prune.decoding.scheduler import Scheduler, Statistics
from lmeval_prune.decoding.sequence import prompt_groups
from lmeval_prune.interventions import HeadMask
from lmeval_prune.tasks import data

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "decoding.png"
HEADS = ["L5H4", "L15H2", "L20H3", "L25H5"]
Bar = tuple[int, int, int, str, float]  # pass, slot, question, kind, share of the layers that run


class Traced(Scheduler):
    """A scheduler that notes what every forward pass does."""

    def trace(self, names: dict[int, int]) -> list[Bar]:
        self.bars: list[Bar] = []
        self.passes, self.names = 0, names
        for _ in self.answers():
            pass
        return self.bars

    def _forward(self, rows: Any, tokens: Any, skips: Any = None, *args: Any) -> torch.Tensor:
        start = args[0] if args else 0
        for row, new in zip(rows, tokens, strict=True):
            kind = "follow" if start else "prompt" if len(new) > 1 and not row.answer else "decode"
            share = 1 - start / self.runner.layers
            self.bars.append((self.passes, row.slot, self.names[id(row.group)], kind, share))
        self.passes += 1
        return super()._forward(rows, tokens, skips, *args)


def main() -> None:
    folder = embedded.resolve("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model_map = map_model(model)
    params = SamplingParams(max_new_tokens=48, eos=(tokenizer.eos_token_id,))
    requests = []
    for question in data.load("tiny_words")["question"][:6]:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = tuple(tokenizer.encode(text))
        requests += [Request(prompt, HeadMask(head) if head else None, params) for head in (None, *HEADS)]
    groups, masks = prompt_groups(requests, model_map, share=True, context=8192)
    cache = KVCache(10, max(len(r.prompt) for r in requests) + 48)
    with ModelRunner.attached(model_map, cache, masks) as runner:
        sampler = Sampler(model, Stopping())
        run = Traced(runner, deque(groups), sampler, Statistics(), Schedule(drafts=0), False, len(requests))
        bars = run.trace({id(group): number for number, group in enumerate(groups)})
    figure, axes = pyplot.subplots(figsize=(11, 3.6), dpi=140)
    colours = pyplot.get_cmap("Set2").colors
    for at, slot, question, kind, share in bars:
        height = 0.86 * share if kind == "follow" else 0.86
        edge = {"prompt": "black", "follow": "black", "decode": "none"}[kind]
        axes.bar(at, height, 1.0, slot + 0.07, color=colours[question], edgecolor=edge, linewidth=0.8, align="edge")
    axes.set_xlim(0, run.passes)
    axes.set_ylim(10, 0)
    axes.set_yticks([i + 0.5 for i in range(10)], [str(i) for i in range(10)])
    axes.set_xlabel("forward pass")
    axes.set_ylabel("slot")
    axes.set_title(
        "Colour: question. Framed: a prompt (full height), or followers checking the leader's answer\n"
        "(height: share of the layers that run). Plain: one more token.",
        fontsize=9,
        loc="left",
    )
    patches = [Patch(color=colours[i], label=f"question {i + 1}") for i in range(len(groups))]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE)
    print(f"written: {PICTURE}; {run.statistics}")


if __name__ == "__main__":
    main()
