"""The static decoding step on a CPU against `generate` and against the engine's other loop."""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoding import alone, answers, model_of, some_requests
from tiny_models import BY_GENERATE, CAUSAL, VOCABULARY, Letters, quick
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding import Engine, Request, SamplingParams, Schedule, Stopping, static_step
from lmeval_prune.decoding.memory import available_memory
from lmeval_prune.decoding.sampling import uniforms
from lmeval_prune.decoding.scheduler import Statistics
from lmeval_prune.decoding.static_step import StaticStep, bucket_sizes
from lmeval_prune.interventions import HeadMask, Intervention, Plan, interventions_on
from lmeval_prune.interventions.base import change_output
from lmeval_prune.interventions.token_filter import TokenFilter
from lmeval_prune.kernels.decode_attention import ops
from tests.covers import crossed

WAITING = {"gpt2", "deepseek_v3", "granitemoe", "mixtral", "qwen2_moe", "qwen3_moe"}  # their code waits for the device
FAMILIES = sorted(set(CAUSAL) - BY_GENERATE)
STATIC = Schedule(static=True)


def eager_reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Reasons why a step was not static."""
    records = [record for record in caplog.records if record.levelname == "WARNING"]
    return [record.message for record in records if record.name.startswith("lmeval_prune")]


@pytest.mark.parametrize("family", quick(FAMILIES))
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
    # PyTorch keeps one of each operation
    monkeypatch.setattr(traceback, "extract_stack", lambda *_, **__: traceback.StackSummary())
    return recorded


@pytest.mark.parametrize("family", quick(sorted(set(FAMILIES) - WAITING)))
def test_a_recorded_step_gives_what_generate_gives(
    family: str, recordings: list[Recording], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that changes between steps is fixed in the recording: other slots, lengths, masks and ends are read."""
    model = model_of(family, layers=2)
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
    SamplingParams(25, (2,), do_sample=True, temperature=1.5),
    SamplingParams(14, (2,)),
]


WAYS = {"all": SAMPLED, "top_p": SAMPLED[:2], "two ways": SAMPLED[2:4], "temperature": SAMPLED[4:]}


@crossed({"deterministic": [False, True], "way": WAYS})
def test_sampled_answers(way: str, deterministic: bool) -> None:
    """They are those of the other loop, whether the step or the host draws the tokens."""
    model, params = model_of("qwen3"), WAYS[way]
    requests = [
        replace(request, params=params[i % len(params)], seed=i)
        for i, request in enumerate(some_requests(model, seed=8, prompts=6))
    ]
    expected = answers(Engine(model, Letters(), deterministic=deterministic), requests)
    engine = Engine(model, Letters(), max_rows=4, schedule=STATIC, deterministic=deterministic)
    assert engine.is_static
    assert answers(engine, requests) == expected


@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "phi3"))]
)
def test_a_compiled_step(family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The whole step is one graph, and the same for all numbers of rows."""
    graphs: list[Any] = []

    def compile_eagerly(function: Any, **options: Any) -> Any:
        return torch_compile(function, backend=lambda graph, _: (graphs.append(graph), graph)[1], **options)

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    model = model_of(family, layers=2)
    engine = Engine(model, Letters(), max_rows=5, schedule=Schedule(static=True, compile=True))
    for seed in (4, 5, 6):
        requests = some_requests(model, seed=seed)
        result = answers(engine, requests)
        assert all(result[request.tag] == alone(model, request) for request in requests)
    assert not eager_reasons(caplog)
    assert 0 < len(graphs) <= 3


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_a_model_that_waits_for_the_device_is_decoded_by_the_other_loop(
    family: str, recordings: list[Recording], caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(family)
    engine = Engine(model, Letters(), max_rows=5, schedule=STATIC)
    assert not engine.is_static and "without a static step" in eager_reasons(caplog)[0]
    requests = some_requests(model, seed=3)
    result = answers(engine, requests)
    assert all(result[request.tag] == alone(model, request) for request in requests)


@dataclass(frozen=True)
class Doubled(Intervention):
    """Doubles attention outputs; it does not say that it can be captured."""

    tokenwise = True

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        for layer in model_map.attention:
            change_output(layer.o_proj, lambda x: 2 * x, stack)


def test_a_method_that_is_not_capturable_is_decoded_by_the_other_loop(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("llama")
    requests = some_requests(model, seed=3)
    with Doubled().applied_to(model):
        engine = Engine(model, Letters(), max_rows=5, schedule=STATIC)
        result = answers(engine, requests)
        assert not engine.is_static and "Doubled is not capturable" in eager_reasons(caplog)[0]
        assert all(result[request.tag] == alone(model, request) for request in requests)
    assert engine.is_static  # the same engine, without the method


@pytest.mark.parametrize("plan", [Plan("L0H1+L1H0-1", channels={"L1": "3-9"}), HeadMask("L1H2")], ids=["plan", "mask"])
def test_permanent_changes_are_captured(plan: Any, recordings: list[Recording]) -> None:
    model = model_of("llama", layers=2)
    requests = some_requests(model, seed=4)
    with plan.applied_to(model):
        engine = Engine(model, Letters(), max_rows=5, schedule=STATIC)
        assert engine.is_static
        result = answers(engine, requests)
        assert all(result[request.tag] == alone(model, request) for request in requests)
    assert sum(recording.replays for recording in recordings) > 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_that_differ_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    """A step that attends to another row's slot does not pass the check."""
    decode = ops.decode
    monkeypatch.setattr(ops, "decode", lambda *args, slots, **kwargs: decode(*args, slots=slots.flip(0), **kwargs))
    engine = Engine(copy.deepcopy(model_of("llama")).to(dtype), Letters(), schedule=STATIC)
    assert not engine.is_static and "logits would differ" in eager_reasons(caplog)[0]


@pytest.mark.parametrize("factor", [1.0, 0.95, 1.05])
def test_a_deep_model_in_half_precision_is_checked_in_float32(
    factor: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its roundings move the logits by more than a twentieth of the largest, and so do small errors of attention."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=24, vocab_size=256, initializer_range=0.3, pad_token_id=0)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    decode = ops.decode
    monkeypatch.setattr(ops, "decode", lambda *args, **kwargs: factor * decode(*args, **kwargs))
    engine = Engine(model, Letters(), schedule=STATIC)
    caplog.set_level(logging.INFO)
    assert engine.unsupported is None
    assert engine.is_static == (factor == 1.0)
    assert "checking the engine again in float32" in caplog.text
    assert all(
        value.dtype == torch.bfloat16 and value.equal(weights[name]) for name, value in model.state_dict().items()
    )


def test_an_error_in_the_middle_leaves_the_model_as_it_was() -> None:
    model = model_of("qwen2")
    layers = list(model.model.layers)

    class Broken(Letters):
        def decode(self, tokens: list[int]) -> str:
            raise RuntimeError("broken")

    requests = [Request((5, 6), None, SamplingParams(9, (), stop=("x",)))]
    with pytest.raises(RuntimeError, match="broken"):
        list(Engine(model, Broken(), schedule=STATIC).decode(requests))
    assert list(model.model.layers) == layers and model.config._attn_implementation == "sdpa"
    assert (
        len(answers(Engine(model, Letters(), schedule=STATIC), [replace(requests[0], params=SamplingParams(9))])) == 1
    )


def test_results_are_copied_as_whole_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch copies a part of a buffer to the host by way of unpinned memory, and waits for the device."""
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.copy_.default:
                copied.append(args[:2])
            return function(*args, **(kwargs or {}))

    steps: list[StaticStep] = []
    start = StaticStep.start

    def watched(step: StaticStep, rows: int) -> Any:
        steps.append(step)
        with Copies():
            return start(step, rows)

    monkeypatch.setattr(StaticStep, "start", watched)
    model = model_of("llama")
    answers(Engine(model, Letters(), max_rows=5, schedule=STATIC), some_requests(model, seed=1))
    buffers = {buffer.untyped_storage().data_ptr() for step in steps for buffer in step._host_results}
    to_host = [pair for pair in copied if pair[0].untyped_storage().data_ptr() in buffers]
    assert len(to_host) == len(steps) > 5
    assert all(target.is_contiguous() and source.is_contiguous() for target, source in to_host)


def test_steps_run_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and events belong to the current device, which need not be the model's."""
    entered: list[torch.device] = []

    @contextmanager
    def launch_on(tensor: torch.Tensor) -> Iterator[None]:
        entered.append(tensor.device)
        yield
        entered.pop()

    run = StaticStep._run

    def inside(step: StaticStep, bucket: int) -> torch.Tensor:
        assert entered == [step._device]
        return run(step, bucket)

    monkeypatch.setattr(static_step, "launch_on", launch_on)
    monkeypatch.setattr(StaticStep, "_run", inside)
    engine = Engine(model_of("llama"), Letters(), schedule=STATIC)
    assert engine.is_static
    assert len(answers(engine, [Request((5, 6), None, SamplingParams(3, ()))])) == 1


def test_a_model_that_waits_is_not_captured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A failed capture would leave PyTorch's allocator in a state of capturing."""

    class Refused(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
                raise RuntimeError("called a synchronizing operation")
            return function(*args, **(kwargs or {}))

    captured: list[int] = []
    monkeypatch.setattr(static_step, "_waiting_refused", lambda device: Refused(), raising=False)
    monkeypatch.setattr(StaticStep, "capturing_devices", ("cpu",))
    monkeypatch.setattr(StaticStep, "_capture", lambda step, bucket: captured.append(bucket))
    engine = Engine(model_of("mixtral"), Letters(), schedule=STATIC)
    assert not engine.is_static and not captured
    assert "synchronizing" in eager_reasons(caplog)[0]


def test_counters_are_those_of_the_other_loop() -> None:
    """They count no tokens that are dropped; a filter counts at most one of each answer that a stop text ends."""
    model, params = model_of("mistral"), SamplingParams(30, ())
    requests = [replace(request, mask=None, params=params) for request in some_requests(model, seed=5, longest=20)]
    stopped = requests[::4]
    counts, statistics = [], []
    for schedule in (Schedule(static=False, follow=0, drafts=0), STATIC):
        with TokenFilter(0.3, warmup=3).applied_to(model):
            engine = Engine(model, Letters(), schedule=schedule)
            if not counts:  # the fourth token, or an earlier one like it, is to end some answers
                result = answers(engine, requests)
                stops = {request.tag: (Letters().decode(result[request.tag][3:4]),) for request in stopped}
            mixed = [replace(request, params=replace(params, stop=stops.get(request.tag, ()))) for request in requests]
            interventions_on(model)[0].attention.totals.clear()
            engine.statistics = Statistics()
            answers(engine, mixed)
            counts.append(interventions_on(model)[0].counts)
            statistics.append(engine.statistics)
    for layer, expected in counts[0].items():
        assert expected["tokens"] <= counts[1][layer]["tokens"] <= expected["tokens"] + len(stopped)
    for name in ("step_rows", "step_tokens", "layer_tokens", "head_tokens", "answer_tokens"):
        assert getattr(statistics[0], name) == getattr(statistics[1], name), name


def test_memory_that_pytorch_keeps_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of an earlier run is free memory of PyTorch, not of the device."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2000, 10000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    assert available_memory(torch.device("cuda", 0)) == 6000


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 700))
def test_bucket_sizes(capacity: int) -> None:
    """They grow, end at the capacity, and waste less than half of the rows."""
    sizes = bucket_sizes(capacity)
    assert sizes == sorted(set(sizes)) and sizes[-1] == capacity
    for rows in range(1, capacity + 1):
        assert next(size for size in sizes if size >= rows) < 2 * rows


class Words:
    """A tokenizer like SentencePiece's: a space before a word is part of it, but dropped at the beginning of a text."""

    clean_up_tokenization_spaces = False
    pieces = ("▁the", "▁", "end", "s", "▁end", ".", "▁\n", "<0xE2>", "<0x80>", "<0xA6>", "!")

    def decode(self, tokens: Sequence[int]) -> str:
        data = b"".join(
            bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
            for piece in (self.pieces[token] for token in tokens)
        )
        return data.decode("utf-8", errors="replace").removeprefix(" ")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [0] * 12


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(Words.pieces) - 1), min_size=1, max_size=12),
    st.lists(st.sampled_from(["end", "ends", " ", "the end", "…", ".", "\n", "s "]), min_size=1, max_size=2),
)
def test_stop_texts_are_searched_for_when_the_last_token_may_complete_one(tokens: list[int], stop: list[str]) -> None:
    stopping, decode, texts = Stopping(Words()), Words().decode, tuple(stop)
    for end in range(1, len(tokens) + 1):
        expected = any(each in decode(tokens[:end]) for each in stop)
        assert stopping.has_stop_text(tokens[:end], texts) == expected
        if expected:
            break


def test_few_answers_are_decoded_in_search_of_a_stop_text() -> None:
    class Counting(Letters):
        calls = 0

        def decode(self, tokens: list[int]) -> str:
            self.calls += 1
            return super().decode(tokens)

    tokenizer = Counting()
    stopping = Stopping(tokenizer)
    answer = [5] * 400
    assert not any(stopping.has_stop_text(answer[:end], ("ABC",)) for end in range(1, 401))
    assert tokenizer.calls == 1


@pytest.mark.parametrize("seed", [0, 3, 2**63])
def test_random_numbers_of_an_answer_are_those_of_its_tokens(seed: int) -> None:
    """They are the first of each block of numpy's generator."""
    expected = [numpy.random.Generator(numpy.random.Philox(key=seed, counter=i)).random() for i in range(40)]
    assert uniforms(seed, 0, 40).tolist() == expected and uniforms(seed, 7, 3).tolist() == expected[7:10]
