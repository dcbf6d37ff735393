"""The static step in CUDA graphs against `generate` on the same device, in float32 with tiny random models.

`LMEVAL_PRUNE_TEST_DEVICE=cpu` runs the same tests without graphs and kernels, as a rehearsal.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lmeval_prune import HeadMask, map_model
from lmeval_prune.decoding import Engine, Request, SamplingParams, Schedule
from lmeval_prune.decoding.static_step import StaticStep
from lmeval_prune.interventions.token_filter import TokenFilter
from lmeval_prune.kernels import dispatch
from tests.tiny_models import VOCABULARY, Letters, tiny

DEVICE = os.environ.get("LMEVAL_PRUNE_TEST_DEVICE", "cuda")
IS_GPU = DEVICE == "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_GPU and not torch.cuda.is_available(), reason="no CUDA device"),
]
FAMILIES = {"llama": {}, "qwen3": {}, "mistral": {"sliding_window": 6}, "gemma2": {"sliding_window": 5}}
NEAR = 1e-3  # logits this close may fall in either order
STATIC, EAGER = Schedule(static=True), Schedule(static=False)


def model_of(family: str, **changes: Any) -> Any:
    model: Any = tiny(family, dtype=torch.float32, num_hidden_layers=4, **{**FAMILIES.get(family, {}), **changes})
    model.generation_config.pad_token_id = 0
    return model.to(DEVICE)


class Rerun:
    """What stands for a graph on a CPU: a replay runs the step."""

    def __init__(self, step: StaticStep, bucket: int) -> None:
        self.step, self.bucket = step, bucket
        self.logits = torch.zeros(bucket, VOCABULARY)

    def replay(self) -> None:
        self.logits.copy_(self.step._run(self.bucket))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Buckets in the order in which they are captured. On a GPU, attention must run in its kernel alone."""
    buckets: list[int] = []
    capture = StaticStep._capture

    def counted(step: StaticStep, bucket: int) -> Any:
        buckets.append(bucket)
        rerun = Rerun(step, bucket)
        return capture(step, bucket) if IS_GPU else (rerun, rerun.logits)

    monkeypatch.setattr(StaticStep, "_capture", counted)
    monkeypatch.setattr(StaticStep, "capturing_devices", (DEVICE,))
    dispatch.DISPATCHED.clear()
    yield buckets
    assert buckets
    if IS_GPU:
        assert dispatch.DISPATCHED["decode attention: triton"]
        assert not any(name.endswith("torch") for name in dispatch.DISPATCHED), dispatch.DISPATCHED


def some_requests(model: nn.Module, seed: int, count: int = 12, longest: int = 14, **params: Any) -> list[Request]:
    """Draw prompts, masks of up to two heads, stop texts and lengths; some prompts are equal."""
    rng = random.Random(seed)
    layers = map_model(model).attention
    prompts = [tuple(rng.choices(range(3, VOCABULARY), k=rng.randint(1, longest))) for _ in range(count // 3)]
    requests = []
    for number in range(count):
        heads = [f"{layer.label}H{rng.randrange(layer.heads)}" for layer in rng.choices(layers, k=rng.randrange(3))]
        stop = rng.choice([(), ("A",), ("BC", "Z")])
        settings = SamplingParams(rng.choice([1, 2, 7, 30]), (2,), stop, **params)
        mask = HeadMask("+".join(heads)) if heads else None
        requests.append(Request(rng.choice(prompts), mask, settings, seed=number, tag=number))
    return requests


def generated(model: Any, request: Request) -> list[int]:
    """Decode one request by `generate`."""
    ids = torch.tensor([request.prompt], device=DEVICE)
    ends = list(request.params.eos or ()) or None
    with request.mask.applied_to(model) if request.mask else nullcontext():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.params.max_new_tokens, do_sample=False,
            eos_token_id=ends,
        )  # fmt: skip
    answer = out[0, ids.shape[1] :].tolist()
    for end in range(1, len(answer) + 1):
        if any(stop in Letters().decode(answer[:end]) for stop in request.params.stop):
            return answer[:end]
    return answer


def assert_same(model: Any, request: Request, answer: list[int], expected: list[int]) -> None:
    """Two answers are equal, or differ first at a near-tie of the model's logits."""
    if answer == expected:
        return
    i = next(i for i, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b)
    with torch.inference_mode(), request.mask.applied_to(model) if request.mask else nullcontext():
        ids = torch.tensor([[*request.prompt, *expected[:i]]], device=DEVICE)
        logits = model(ids, use_cache=False).logits[0, -1]
    assert float(logits.max() - logits[[answer[i], expected[i]]].min()) < NEAR, request


def decoded(
    model: Any, requests: list[Request], schedule: Schedule = STATIC, max_rows: int = 5
) -> dict[int, list[int]]:
    engine = Engine(model, Letters(), max_rows=max_rows, schedule=schedule)
    assert engine.unsupported is None
    assert engine.is_static == bool(schedule.static)
    return {request.tag: answer for request, answer in engine.decode(requests)}


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_what_generate_gives(family: str, captured: list[int]) -> None:
    model = model_of(family)
    requests = some_requests(model, seed=1)
    answers = decoded(model, requests)
    assert len(answers) == len(requests)
    for request in requests:
        assert_same(model, request, answers[request.tag], generated(model, request))


def test_a_smaller_bucket_continues_the_rows_of_a_larger_one(captured: list[int]) -> None:
    """Rows end one after another, so the engine goes from the bucket of 12 rows through all smaller ones."""
    model = model_of("llama")
    requests = [Request((5 + row, 9, 4), None, SamplingParams(4 * row + 4, ()), tag=row) for row in range(12)]
    answers = decoded(model, requests, max_rows=12)
    for request in requests:
        assert len(answers[request.tag]) == request.params.max_new_tokens
        assert_same(model, request, answers[request.tag], generated(model, request))
    assert captured[-5:] == [12, 8, 4, 2, 1]


def test_each_row_has_its_mask(captured: list[int]) -> None:
    """Each head of each layer is pruned in one row; all rows have the same prompt."""
    model = model_of("qwen3")
    layers = map_model(model).attention
    masks = [None, *(HeadMask(f"{layer.label}H{head}") for layer in layers for head in range(layer.heads))]
    requests = [Request((7, 8, 9, 10), mask, SamplingParams(12, ()), tag=i) for i, mask in enumerate(masks)]
    answers = decoded(model, requests, max_rows=len(masks))
    for request in requests:
        assert_same(model, request, answers[request.tag], generated(model, request))
    assert len(set(map(tuple, answers.values()))) > 2  # masks change answers


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"repetition_penalty": 1.3}])
def test_sampled_answers_are_those_of_the_eager_loop(settings: dict[str, Any], captured: list[int]) -> None:
    model = model_of("llama")
    requests = some_requests(model, seed=4, do_sample=True, temperature=0.7, **settings)
    assert decoded(model, requests) == decoded(model, requests, EAGER)


@pytest.mark.parametrize("window", [None, 6])
def test_filtered_rows_give_what_generate_gives(window: int | None, captured: list[int]) -> None:
    model = model_of("mistral", sliding_window=window)
    requests = [replace(request, mask=None) for request in some_requests(model, seed=5, longest=20)]
    with TokenFilter(0.3, warmup=3).applied_to(model):
        answers = decoded(model, requests, max_rows=4)
        different = [request for request in requests if answers[request.tag] != generated(model, request)]
    assert len(different) <= 1  # rounding may decide a similarity near its threshold


def test_deterministic_answers_do_not_depend_on_the_number_of_rows(captured: list[int]) -> None:
    model = model_of("gemma2")
    requests = some_requests(model, seed=6)
    answers = []
    for rows in (1, 3, 8):
        engine = Engine(model, Letters(), max_rows=rows, schedule=STATIC, deterministic=True)
        answers.append({request.tag: answer for request, answer in engine.decode(requests)})
    assert answers[0] == answers[1] == answers[2]
