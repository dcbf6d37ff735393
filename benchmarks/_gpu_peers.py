"""Tokens a second without masks: the engine beside `generate`, a compiled static cache, and `generate_batch`."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _gpu_common import Report, WrongResultsError, check_static_step, clocks, refuse_torch_kernels
from _gpu_sweep import engine_requests, engine_run, new_engine
from _gpu_texts import (
    Answers,
    best_batch,
    compare_texts,
    generated,
    loaded_model,
    new_tokens,
    question_prompts,
    rates,
    seconds_of,
)
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

from lmeval_prune import map_model
from lmeval_prune.decoding.request import end_tokens


class Peers:
    """The same prompts for all decoders; the engine's answers are compared with those of `generate` alone."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, options.device
        self.model, tokenizer = loaded_model(options)
        self.model_map = map_model(self.model)
        self.prompts = question_prompts(options, self.model, tokenizer)
        self.longest = new_tokens(options)
        self.width = max(map(len, self.prompts))
        self.engine = new_engine(self.model, self.model_map, static=True)
        self.requests = engine_requests(self.prompts, [None], self.longest)
        self.expected: Answers = {}
        self.batch = len(self.prompts)

    def precheck(self) -> dict[str, Any]:
        """Compare a few short texts of the engine with those of `generate`."""
        prompts, longest = self.prompts[:: max(1, len(self.prompts) // 4)][:4], min(24, self.longest)
        answers = engine_run(self.engine, engine_requests(prompts, [None], longest), self.device)[0]
        return compare_texts(self.model, answers, generated(self.model, prompts, None, 4, longest))

    def choose_batch(self) -> dict[str, Any]:
        """Find the best batch size of `generate`."""
        self.batch, rates_by_batch = best_batch(self.model, self.prompts, self.options)
        return {"batch": self.batch, "tokens_per_second_by_batch": rates_by_batch}

    def run_engine(self) -> dict[str, Any]:
        """Decode with the engine's static loop."""
        answers, row = engine_run(self.engine, self.requests, self.device)
        return {**row, **self._compared(answers, refuse=True)}

    def run_generate(self) -> dict[str, Any]:
        """Decode by `generate` with its dynamic cache, at its best batch size."""
        return self._timed(partial(generated, self.model, self.prompts, None, self.batch, self.longest), refuse=True)

    def run_static_cache(self) -> dict[str, Any]:
        """Decode by `generate` with a static cache and a compiled forward pass, all prompts padded to one width.

        The first run compiles and is not timed. On a CPU nothing is compiled.
        """
        settings: dict[str, Any] = {"cache_implementation": "static", "width": self.width}
        if self.device == "cuda" and self.options.compile:
            settings["compile_config"] = CompileConfig(mode="reduce-overhead", fullgraph=False, dynamic=False)
        else:
            settings["disable_compile"] = True
        run = partial(generated, self.model, self.prompts, None, self.batch, self.longest, **settings)
        warm = partial(generated, self.model, self.prompts[: self.batch], None, self.batch, self.longest, **settings)
        try:
            warm_up = seconds_of(self.device, warm)[1]
            return {"warm_up_seconds": warm_up, "compiled": "compile_config" in settings, **self._timed(run)}
        finally:
            torch.compiler.reset()
            for name in ("_compiled_call", "_cache"):  # what `generate` keeps on the model
                vars(self.model).pop(name, None)

    def run_generate_batch(self) -> dict[str, Any]:
        """Decode by transformers' continuous batching, over sdpa since flash attention is not there.

        A first run with short answers captures its graphs and is not timed.
        """
        attention, generation = self.model.config._attn_implementation, self.model.generation_config
        ends = list(end_tokens(generation))
        config = GenerationConfig(max_new_tokens=self.longest, do_sample=False, eos_token_id=ends or -1, pad_token_id=0)
        sizes = {"num_blocks": 16, "max_batch_tokens": 64} if self.options.tiny else {}
        batching = ContinuousBatchingConfig(**sizes)

        def run(longest: int) -> Answers:
            out = self.model.generate_batch(
                inputs=[list(prompt) for prompt in self.prompts],
                generation_config=config,
                continuous_batching_config=batching,
                persistent_manager=True,
                max_new_tokens=longest,
            )
            results = list(out.values())
            if len(results) != len(self.prompts) or any(result.error for result in results):
                errors = sorted({str(result.error) for result in results if result.error})
                raise WrongResultsError(f"generate_batch answered {len(results)} prompts; errors: {errors[:3]}")
            return {(tuple(result.prompt_ids), None): list(result.generated_tokens) for result in results}

        self.model.set_attn_implementation("paged|sdpa")
        try:
            warm_up = seconds_of(self.device, partial(run, min(4, self.longest)))[1]
            return {"warm_up_seconds": warm_up, **self._timed(partial(run, self.longest))}
        finally:
            self.model.destroy_cached_continuous_batching_manager()
            self.model.set_attn_implementation(attention)

    def _timed(self, run: Callable[[], Answers], refuse: bool = False) -> dict[str, Any]:
        answers, seconds = seconds_of(self.device, run)
        row = {"batch": self.batch, **rates(answers, seconds), "clocks": clocks(self.device)}
        return {**row, **self._compared(answers, refuse)}

    def _compared(self, answers: Answers, refuse: bool) -> dict[str, Any]:
        """Compare texts with the first decoder's; count differences of other decoders instead of refusing them."""
        if not self.expected:
            self.expected = answers
        if refuse:
            return compare_texts(self.model, answers, self.expected)
        same = sum(answers.get(key) == answer for key, answer in self.expected.items())
        return {"texts": len(self.expected), "identical": same}


def run(options: argparse.Namespace, report: Report) -> None:
    """Compare texts, then time the decoders in turn."""
    peers = Peers(options)
    report.results |= {"prompts": len(peers.prompts), "prompt_tokens": sum(map(len, peers.prompts))}
    report.check("static step", partial(check_static_step, peers.model, peers.model_map, options.device))
    report.check("kernels", partial(refuse_torch_kernels, options.device))
    report.check("texts", peers.precheck)
    report.row("batch", {}, peers.choose_batch)
    decoders: dict[str, Callable[[], dict[str, Any]]] = {
        "engine, static": peers.run_engine,
        "generate": peers.run_generate,
        "generate_batch": peers.run_generate_batch,
        "generate, static cache, compiled": peers.run_static_cache,
    }
    for name, decode in decoders.items():
        for _ in range(1 if options.tiny else options.rounds):
            report.row(name, {"decoder": name}, decode)
    medians = {
        name: statistics.median(
            row["tokens_per_second"] for row in report.results["rows"] if row.get("seconds") and row["kind"] == name
        )
        for name in decoders
        if any(row.get("seconds") and row["kind"] == name for row in report.results["rows"])
    }
    report.results["tokens_per_second"] = medians
