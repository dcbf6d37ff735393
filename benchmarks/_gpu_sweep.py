"""A sweep, questions under several masks: the engine's static and eager loops, and `generate` mask by mask."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from _gpu_common import (
    NumberTokenizer,
    Report,
    WrongResultsError,
    check_static_step,
    clocks,
    head_masks,
    refuse_torch_kernels,
)
from _gpu_texts import (
    Answers,
    Prompt,
    best_batch,
    compare_texts,
    generated,
    loaded_model,
    new_tokens,
    question_prompts,
    rates,
    seconds_of,
)
from _gpu_trace import decode_traced

from lmeval_prune import map_model
from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding import Engine, Request, SamplingParams, Schedule
from lmeval_prune.interventions import HeadMask


def new_engine(model: Any, model_map: ModelMap, static: bool) -> Engine:
    """Create an engine with the static or the eager loop."""
    return Engine(model, NumberTokenizer(), model_map=model_map, schedule=Schedule(static=static))


def engine_requests(prompts: Sequence[Prompt], masks: Sequence[HeadMask | None], longest: int) -> list[Request]:
    """Ask each prompt under each mask."""
    return [Request(prompt, mask, SamplingParams(longest)) for prompt in prompts for mask in masks]


def engine_run(engine: Engine, requests: Sequence[Request], device: str) -> tuple[Answers, dict[str, Any]]:
    """Decode requests; return the answers and the measurements."""
    steps, rows = engine.statistics.steps, engine.statistics.step_rows
    answers, trace = decode_traced(engine, requests, device)
    out: Answers = {(request.prompt, request.mask): answer for request, answer in answers.items()}
    row = {**rates(out, trace.wall), "steps": engine.statistics.steps - steps}
    row["rows_a_step"] = (engine.statistics.step_rows - rows) / max(1, row["steps"])
    if engine.schedule.static:
        row |= trace.summary()
    return out, {**row, "clocks": clocks(device)}


class Sweep:
    """The same requests for all decoders, and the answers of the first of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, options.device
        self.model, tokenizer = loaded_model(options)
        self.model_map = map_model(self.model)
        self.prompts = question_prompts(options, self.model, tokenizer)
        self.masks = head_masks(self.model_map, 2 if options.tiny else options.masks)
        self.longest = new_tokens(options)
        self.requests = engine_requests(self.prompts, self.masks, self.longest)
        self.engines = {static: new_engine(self.model, self.model_map, static) for static in (True, False)}
        self.expected: Answers = {}
        self.batch = 0

    def precheck(self) -> dict[str, Any]:
        """Compare a few short texts of all decoders."""
        prompts, masks = self.prompts[:: max(1, len(self.prompts) // 4)][:4], self.masks[:3]
        requests = engine_requests(prompts, masks, min(24, self.longest))
        expected: Answers = {}
        for mask in masks:
            expected |= generated(self.model, prompts, mask, 4, min(24, self.longest))
        out = {}
        for static, engine in self.engines.items():
            answers = engine_run(engine, requests, self.device)[0]
            out["static" if static else "eager"] = compare_texts(self.model, answers, expected)
        return out

    def run_engine(self, static: bool) -> dict[str, Any]:
        """Decode the sweep with the engine; compare the texts with those of the first run."""
        answers, row = engine_run(self.engines[static], self.requests, self.device)
        self.expected = self.expected or answers
        return {**row, **compare_texts(self.model, answers, self.expected)}

    def choose_batch(self) -> dict[str, Any]:
        """Find the best batch size of `generate`."""
        self.batch, rates_by_batch = best_batch(self.model, self.prompts, self.options)
        return {"batch": self.batch, "tokens_per_second_by_batch": rates_by_batch}

    def run_generate(self, mask: HeadMask | None) -> dict[str, Any]:
        """Decode one mask's answers by `generate`; compare the texts with the engine's."""
        if not self.batch:
            raise WrongResultsError("no batch size of `generate` was measured")
        run = partial(generated, self.model, self.prompts, mask, self.batch, self.longest)
        answers, seconds = seconds_of(self.device, run)
        row = {"batch": self.batch, **rates(answers, seconds)}
        if self.expected:
            expected = {key: self.expected[key] for key in answers}
            row |= compare_texts(self.model, answers, expected)
        return row


def ratios(report: Report) -> dict[str, Any]:
    """Return median tokens a second of each decoder, and the static loop's ratio to the others."""
    by_decoder: dict[str, list[float]] = {}
    for row in report.results["rows"]:
        if row["kind"] == "sweep" and "tokens_per_second" in row:
            by_decoder.setdefault(row["decoder"], []).append(row["tokens_per_second"])
    medians = {name: statistics.median(values) for name, values in by_decoder.items()}
    static = medians.get("engine, static")
    out: dict[str, Any] = {"tokens_per_second": medians}
    if static:
        out["static_against"] = {name: static / rate for name, rate in medians.items() if name != "engine, static"}
    return out


def run(options: argparse.Namespace, report: Report) -> None:
    """Compare texts, then time the decoders in turn; `generate` is timed mask by mask."""
    sweep = Sweep(options)
    report.results |= {
        "weights": "real" if options.pretrained else "random",
        "prompts": len(sweep.prompts),
        "prompt_tokens": sum(map(len, sweep.prompts)),
        "masks": [str(mask) if mask else None for mask in sweep.masks],
        "longest_answer": sweep.longest,
    }
    report.check("static step", partial(check_static_step, sweep.model, sweep.model_map, options.device))
    report.check("kernels", partial(refuse_torch_kernels, options.device))
    report.check("texts", sweep.precheck)
    decoder = "decoder"
    report.row("sweep", {decoder: "engine, static"}, partial(sweep.run_engine, True))
    report.row("batch", {}, sweep.choose_batch)
    report.row("sweep", {decoder: "generate", "mask": None}, partial(sweep.run_generate, None))
    report.row("sweep", {decoder: "engine, eager"}, partial(sweep.run_engine, False))
    for _ in range(0 if options.tiny else options.rounds - 1):
        report.row("sweep", {decoder: "engine, static"}, partial(sweep.run_engine, True))
    for mask in sweep.masks[1:]:
        report.row("sweep", {decoder: "generate", "mask": str(mask)}, partial(sweep.run_generate, mask))
    report.results |= ratios(report)
