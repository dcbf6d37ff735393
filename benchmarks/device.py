"""A GPU in twelve minutes: tests, the engine's texts against `generate`, a sweep timed against it.

    python benchmarks/device.py [--pretrained FOLDER] [--texts FILE] [--budget 700] [--out device]
    python benchmarks/device.py --tiny --device cpu    # a rehearsal

Runs from a checkout, without lm_eval; without `--pretrained` with random weights of SmolLM2-135M's shape. Texts are
compared before anything is timed, and every difference must start where two logits are nearly equal. The results file
is written after each row; a row that may not end within the budget is skipped.
"""

# ruff: noqa: E402 - a checkout that is not installed will do
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from _record import environment, write
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lmeval_prune import HeadMask, map_model
from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.decoding.request import end_tokens
from lmeval_prune.decoding.sampling import near_tied_argmax
from lmeval_prune.kernels import dispatch

TESTS = ("tests/gpu", "tests/test_kernels.py")
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "rope_theta": 100000.0,
    "initializer_range": 0.06,  # with smaller random weights each text repeats one token
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "initializer_range": 0.15,
}  # fmt: skip
MEAN_PROMPT = 109  # tokens of a GSM8K question with its frame
Prompt = tuple[int, ...]
Answers = dict[tuple[Prompt, HeadMask | None], list[int]]


class Sweep:
    """Questions under several masks, by the engine and by `generate`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, dtype = options.device, getattr(torch, options.dtype)
        if options.pretrained:
            self.model = AutoModelForCausalLM.from_pretrained(options.pretrained, dtype=dtype).eval().to(self.device)
        else:
            config = LlamaConfig(**{**SMOLLM2, **(TINY if options.tiny else {})}, pad_token_id=0, eos_token_id=None)
            torch.manual_seed(0)
            with torch.device(self.device):
                self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        if self.model.generation_config.pad_token_id is None:
            self.model.generation_config.pad_token_id = 0
        count = 4 if options.tiny else options.questions
        if options.pretrained and options.texts:
            encode = AutoTokenizer.from_pretrained(options.pretrained).encode
            lines = Path(options.texts).read_text().splitlines()[:count]
            prompts = [tuple(encode(f"Question: {json.loads(line)['question']}\nAnswer:")) for line in lines]
        else:  # lengths are spread like those of GSM8K's questions
            rng = np.random.default_rng(0)
            mean = 12 if options.tiny else MEAN_PROMPT
            lengths = np.maximum(2, rng.gamma(5.7, mean / 5.7, count)).astype(int)
            prompts = [tuple(rng.integers(3, self.model.config.vocab_size, length).tolist()) for length in lengths]
        self.prompts = sorted(set(prompts), key=len, reverse=True)
        self.model_map = map_model(self.model)
        layers, masks = self.model_map.attention, 2 if options.tiny else options.masks
        places = ((layers[i * (len(layers) - 1) // max(1, masks - 2)], i) for i in range(masks - 1))
        self.masks = [None, *(HeadMask(f"{layer.label}H{i % layer.heads}") for layer, i in places)]
        self.longest = 5 if options.tiny else options.new_tokens
        self.ends = set(end_tokens(self.model.generation_config))

    def by_engine(self, prompts: Sequence[Prompt], longest: int) -> Answers:
        engine = Engine(self.model, model_map=self.model_map)
        assert engine.unsupported is None, engine.unsupported
        settings = SamplingParams(longest, tuple(self.ends))
        requests = [Request(prompt, mask, settings) for prompt in prompts for mask in self.masks]
        return {(request.prompt, request.mask): answer for request, answer in engine.decode(requests)}

    @torch.inference_mode()
    def by_generate(
        self, prompts: Sequence[Prompt], longest: int, batch: int, masks: Sequence[HeadMask | None]
    ) -> Answers:
        """Decode a mask at a time in batches that are padded on the left."""
        out: Answers = {}
        for mask in masks:
            with mask.applied_to(self.model, self.model_map) if mask else nullcontext():
                for begin in range(0, len(prompts), batch):
                    part = prompts[begin : begin + batch]
                    width = max(map(len, part))
                    padding = self.model.generation_config.pad_token_id
                    ids = torch.tensor([[padding] * (width - len(p)) + list(p) for p in part], device=self.device)
                    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part], device=self.device)
                    answers = self.model.generate(
                        input_ids=ids, attention_mask=seen, max_new_tokens=longest, do_sample=False
                    )
                    for prompt, answer in zip(part, answers[:, width:].tolist(), strict=True):
                        stop = next((i + 1 for i, token in enumerate(answer) if token in self.ends), len(answer))
                        out[prompt, mask] = answer[:stop]
        return out

    @torch.inference_mode()
    def is_near_tie(self, prompt: Prompt, mask: HeadMask | None, answer: list[int], other: list[int]) -> bool:
        """Return whether two answers part where the logits of both tokens are near the largest."""
        i = next((i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b), None)
        if i is None:  # one ends before the other without an end token
            return False
        with mask.applied_to(self.model, self.model_map) if mask else nullcontext():
            ids = torch.tensor([[*prompt, *answer[:i]]], device=self.device)
            logits = self.model(ids, use_cache=False).logits[0, -1]
        pair = logits[[answer[i], other[i]]]
        return bool(near_tied_argmax(torch.stack([logits.max(), pair.min()])[None])[0])  # as if these were all tokens

    def compare(self, answers: Answers, expected: Answers) -> dict[str, Any]:
        assert answers.keys() >= expected.keys(), "answers are missing"
        different = [key for key in expected if answers[key] != expected[key]]
        wrong = [key for key in different if not self.is_near_tie(*key, answers[key], expected[key])]
        assert not wrong, f"{len(wrong)} of {len(expected)} texts differ, first under {wrong[0][1]}"
        return {"texts": len(expected), "identical": len(expected) - len(different), "near_ties": len(different)}

    def timed(self, decode: Callable[[], Answers]) -> tuple[Answers, dict[str, float]]:
        begin = time.perf_counter()
        out = decode()  # tokens are on the host, so that the device has finished
        seconds, tokens = time.perf_counter() - begin, sum(map(len, out.values()))
        return out, {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="shrink all shapes: a rehearsal on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=700, help="seconds; tests have at most half of them")
    parser.add_argument("--out", default="device", help="a name in benchmarks/results, or a path")
    parser.add_argument("--pretrained", help="a folder of a model, instead of random weights")
    parser.add_argument("--texts", help="with --pretrained: a file of JSON lines with a field 'question'")
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--masks", type=int, default=9, help="the first of them prunes nothing")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=128, help="of `generate`")
    options = parser.parse_args()
    begun, results = time.perf_counter(), {**environment(), "options": vars(options)}

    def row(name: str, measure: Callable[[], dict[str, Any]], least: float = 0) -> None:
        left = options.budget - (time.perf_counter() - begun)
        try:
            results[name] = measure() if left > least else {"skipped": f"{left:.0f} s left"}
        except Exception as error:  # time on a device is short: other rows go on, and the program fails at its end
            results[name] = {"failed": f"{type(error).__name__}: {error}"[:3000]}
        results["seconds"] = time.perf_counter() - begun
        write(options.out, results, quiet=True)
        print(f"{results['seconds']:6.1f} s {name}: {results[name]}", flush=True)

    def tests() -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *TESTS]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=options.budget / 2)
        if done.returncode:
            raise RuntimeError(done.stdout[-2900:])
        return {"passed": done.stdout.splitlines()[-1]}

    row("tests", tests)
    sweep, answers = Sweep(options), dict[tuple[Prompt, HeadMask | None], list[int]]()
    few, short = sweep.prompts[:: max(1, len(sweep.prompts) // 4)][:4], min(24, sweep.longest)
    row("texts", lambda: sweep.compare(sweep.by_engine(few, short), sweep.by_generate(few, short, 4, sweep.masks)))
    if "texts" in results["texts"]:

        def engine() -> dict[str, Any]:
            out, rates = sweep.timed(lambda: sweep.by_engine(sweep.prompts, sweep.longest))
            answers.update(out)
            return rates

        def generate(mask: HeadMask | None) -> dict[str, Any]:
            out, rates = sweep.timed(lambda: sweep.by_generate(sweep.prompts, sweep.longest, options.batch, [mask]))
            return {**rates, **sweep.compare(answers, out)}

        row("engine", engine)
        slowest = 0.0
        for mask in sweep.masks:
            row(f"generate, {mask or 'dense'}", lambda mask=mask: generate(mask), slowest)
            slowest = max(slowest, results[f"generate, {mask or 'dense'}"].get("seconds", 0))
    results["operations"] = dict(dispatch.DISPATCHED)  # which kernels ran
    results["passed"] = not any("failed" in value for value in results.values() if isinstance(value, dict))
    write(options.out, results)
    sys.exit(not results["passed"])


if __name__ == "__main__":
    main()
