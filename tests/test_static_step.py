"""The static decoding step on a CPU against `generate` and against the engine's other loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_decoding import BY_GENERATE, Letters, alone, answers, model_of, some_requests
from tiny_models import CAUSAL, VOCABULARY
from torch.fx.experimental.proxy_tensor import make_fx

from lmeval_prune.decoding import Engine, SamplingParams, Schedule
from lmeval_prune.decoding.static_step import StaticStep
from lmeval_prune.interventions.token_filter import TokenFilter

FAMILIES = sorted(set(CAUSAL) - BY_GENERATE)
STATIC = Schedule(static=True)


def eager_reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Reasons why a step was not static."""
    return [record.message for record in caplog.records if record.name.startswith("lmeval_prune")]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_what_generate_gives(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(family)
    engine = Engine(model, Letters(), max_rows=5, schedule=STATIC)
    assert engine.is_static, eager_reasons(caplog)
    requests = some_requests(model, seed=1)
    result = answers(engine, requests)
    for request in requests:
        assert result[request.tag] == alone(model, request), request


class Recording:
    """A recorded step. Like a CUDA graph, it runs the same operations on the same tensors, with the same numbers."""

    def __init__(self, step: StaticStep, bucket: int) -> None:
        states = [step._columns, *step._stored_lengths.values()]
        states += [
            tensor for owners in step.cache.states.values() for state in owners.values() for tensor in state.tensors
        ]
        before = [tensor.clone() for tensor in states]
        self.graph = make_fx(lambda: step._run(bucket))()
        for tensor, content in zip(states, before, strict=True):  # recording runs the step, capturing does not
            tensor.copy_(content)
        self.logits: Any = torch.zeros(bucket, VOCABULARY, dtype=torch.float64)
        self.replays = 0

    def replay(self) -> None:
        self.logits.copy_(self.graph())
        self.replays += 1


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Record each bucket's second step, and replay it from then on."""
    recorded = []

    def capture(step: StaticStep, bucket: int) -> tuple[Recording, torch.Tensor]:
        recorded.append(Recording(step, bucket))
        return recorded[-1], recorded[-1].logits

    monkeypatch.setattr(StaticStep, "_capture", capture)
    monkeypatch.setattr(StaticStep, "capturing_devices", ("cpu",))
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad())  # which recording does not allow
    return recorded


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_gives_what_generate_gives(
    family: str, recordings: list[Recording], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that changes between steps is fixed in the recording: other slots, lengths, masks and ends are read."""
    model = model_of(family)
    engine = Engine(model, Letters(), max_rows=5, schedule=STATIC)
    assert engine.is_static, eager_reasons(caplog)
    requests = some_requests(model, seed=3)
    recordings.clear()
    result = answers(engine, requests)
    assert sum(recording.replays for recording in recordings) > engine.statistics.steps / 2
    for request in requests:
        assert result[request.tag] == alone(model, request), request


@pytest.mark.parametrize("window", [None, 6])
def test_a_filtered_step(window: int | None, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("mistral", sliding_window=window)
    requests = [replace(request, mask=None) for request in some_requests(model, seed=5, longest=20)]
    with TokenFilter(0.3, warmup=3).applied_to(model):
        engine = Engine(model, Letters(), max_rows=4, schedule=STATIC)
        assert engine.is_static, eager_reasons(caplog)
        result = answers(engine, requests)
        for request in requests:
            assert result[request.tag] == alone(model, request), request


SAMPLED = [
    SamplingParams(20, (2,), do_sample=True, temperature=0.7, top_k=12, top_p=0.9),
    SamplingParams(9, (), do_sample=True, temperature=0.7, top_k=12, top_p=0.9),
    SamplingParams(14, (2,), ("A",), do_sample=True, temperature=1.3, min_p=0.05),
    SamplingParams(14, (2,), do_sample=True, repetition_penalty=1.2),
    SamplingParams(14, (2,)),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("params", [SAMPLED, SAMPLED[:2], SAMPLED[2:4]], ids=["all", "drawn in the step", "two ways"])
def test_sampled_answers(params: list[SamplingParams], deterministic: bool) -> None:
    """They are those of the other loop, whether the step or the host draws the tokens."""
    model = model_of("qwen3")
    requests = [
        replace(request, params=params[i % len(params)], seed=i)
        for i, request in enumerate(some_requests(model, seed=8, prompts=6))
    ]
    expected = answers(Engine(model, Letters(), deterministic=deterministic), requests)
    engine = Engine(model, Letters(), max_rows=4, schedule=STATIC, deterministic=deterministic)
    assert engine.is_static
    assert answers(engine, requests) == expected


@pytest.mark.parametrize("family", ["llama", "gemma2", pytest.param("phi3", marks=pytest.mark.long)])
def test_a_compiled_step(family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The whole step is one graph, and the same for all numbers of rows."""
    graphs: list[Any] = []

    def compile_eagerly(function: Any, **options: Any) -> Any:
        return torch_compile(function, backend=lambda graph, _: (graphs.append(graph), graph)[1], **options)

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    model = model_of(family)
    engine = Engine(model, Letters(), max_rows=5, schedule=Schedule(static=True, compile=True))
    for seed in (4, 5, 6):
        requests = some_requests(model, seed=seed)
        result = answers(engine, requests)
        assert all(result[request.tag] == alone(model, request) for request in requests)
    assert not eager_reasons(caplog)
    assert 0 < len(graphs) <= 3
