"""Kernels against their twins: in Triton's interpreter, or compiled where there is a CUDA device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton (pip install lmeval-prune[kernels])")

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lmeval_prune import map_model
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import filtered_cache, interventions_on
from lmeval_prune.interventions.filtered_cache import FilteredCacheLayer
from lmeval_prune.interventions.token_filter import TokenFilter
from lmeval_prune.kernels import dispatch
from lmeval_prune.kernels.filtered_attention import naive as naive_attention
from lmeval_prune.kernels.filtered_attention import ops as attention
from lmeval_prune.kernels.token_filter import compiled, naive, ops, parallel
from lmeval_prune.kernels.token_filter.state import Memory, Rule, fresh_states
from tests.tiny_models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the relative RMS error


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is NaN, or true."""
    empty = torch.empty

    def poison(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan if made.is_floating_point() else 1)

    monkeypatch.setattr(torch, "empty", poison)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run, on a CPU in the interpreter."""
    monkeypatch.setattr(dispatch, "KERNELS_ON_CPU", True)


@contextmanager
def only(way: str, operation: str) -> Iterator[None]:
    """Nothing but `operation` runs, and that `way`: in its kernel (`triton`) or its twin (`torch`)."""
    dispatch.DISPATCHED.clear()
    yield
    assert set(dispatch.DISPATCHED) == {f"{operation}: {way}"}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def is_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30)
    assert not found.isnan().any()
    assert error <= TOLERANCES[found.dtype], error


def doubles(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.double() for tensor in tensors]


# ---------------------------------------------------------------------- filtered decode attention

LENGTHS = [[37, 1, 0], [5, 64, 33]]


def stored(heads: int, capacity: int, width: int, width_v: int, lengths: torch.Tensor, dtype: torch.dtype) -> Any:
    """Keys and values with NaN behind each row's length, and places with gaps but in the first row."""
    rows = len(lengths)
    keys, values = (
        random(rows, heads, capacity, width, dtype=dtype),
        random(rows, heads, capacity, width_v, dtype=dtype),
    )
    behind = (torch.arange(capacity, device=DEVICE) >= lengths[:, None])[:, None, :, None]
    places = (random(rows, capacity).abs() * 3).long().add(1).cumsum(1)
    places[0] = torch.arange(capacity, device=DEVICE)  # nothing was skipped
    return keys.masked_fill(behind, torch.nan), values.masked_fill(behind, torch.nan), places


SHAPES = [(4, 2, 16, 16), (3, 3, 20, 12), (10, 2, 40, 64)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "width_v", "dtype"),
    [
        pytest.param(*shape, dtype, marks=[] if i == j else pytest.mark.long)
        for i, shape in enumerate(SHAPES)
        for j, dtype in enumerate(TYPES)
    ],
)
def test_decode_is_its_twin(heads: int, kv_heads: int, width: int, width_v: int, dtype: torch.dtype) -> None:
    for some, splits in product(LENGTHS, (1, 4)):
        lengths = torch.tensor(some, device=DEVICE, dtype=torch.int32)
        skipped = torch.tensor([False, False, False], device=DEVICE)
        query = random(3, heads, width, dtype=dtype)
        keys, values, _ = stored(kv_heads, 64, width, width_v, lengths, dtype)
        with only("triton", "filtered decode"):
            found = attention.decode(query, keys, values, lengths, skipped, 0.3, splits=splits)
        expected = naive_attention.decode(*doubles(query, keys, values), lengths, skipped, 0.3)
        is_close(found, expected)
        assert not found[lengths == 0].any()


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("window", "softcap"), [(9, None), (200, None), (None, 2.0), (30, 5.0)])
def test_decode_with_a_window_a_softcap_and_skipped_rows(
    window: int | None, softcap: float | None, splits: int
) -> None:
    lengths = torch.tensor([50, 7, 33, 0], device=DEVICE)
    skipped = torch.tensor([False, False, True, True], device=DEVICE)
    query = random(4, 6, 24)
    keys, values, positions = stored(2, 50, 24, 24, lengths, torch.float32)
    keys[2:], values[2:] = torch.nan, torch.nan  # of a skipped row nothing is read
    with only("triton", "filtered decode"):
        found = attention.decode(query, keys, values, lengths, skipped, 0.2, window, positions, softcap, splits)
    expected = naive_attention.decode(*doubles(query, keys, values), lengths, skipped, 0.2, window, positions, softcap)
    is_close(found, expected)
    assert not found[2:].any()


@pytest.mark.parametrize(("window", "keep"), [(None, False), (4, False), (4, True), (None, True)])
def test_the_twin_is_the_literal_attention(window: int | None, keep: bool) -> None:
    skips = [False, True, False, False, True, True, False, False, True, False]
    query, key, value = random(4, 10, 6).double(), random(2, 10, 6, seed=1).double(), random(2, 10, 5).double()
    expected = naive.attention(query, key, value, skips, 0.4, window, keep)
    for t in range(10):
        stored = [u for u in range(t + 1) if keep or not skips[u]]
        lengths, skipped = torch.tensor([len(stored)], device=DEVICE), torch.tensor([skips[t]], device=DEVICE)
        positions = torch.tensor([stored], device=DEVICE)
        found = naive_attention.decode(
            query[None, :, t], key[None, :, stored], value[None, :, stored], lengths, skipped, 0.4, window, positions
        )
        torch.testing.assert_close(found[0], expected[t], rtol=0, atol=1e-12)


# ---------------------------------------------------------------------- decisions


def rule(share: float = 0.4, **settings: Any) -> Rule:
    return Rule(share, **{"warmup": 4, **settings})


RULES = {
    "kv": rule(),
    "as printed": rule(fusion="as_printed"),
    "key": rule(similarity="key"),
    "value": rule(similarity="value"),
    "none": rule(share=0),
    "all": rule(share=1),
    "last": rule(smoothing=0.0),
    "first": rule(smoothing=1.0),
    "short": rule(warmup=1),
    "long": rule(warmup=11, smoothing=0.5),
}


QUICK = {("kv", False), ("as printed", False), ("value", False), ("all", False), ("short", False), ("long", True)}


def text(rows: int = 3, heads: int = 3, tokens: int = 24, width: int = 5, width_v: int = 7) -> Any:
    """Keys, values, and which tokens are no padding: on the left, on the right, anywhere, nowhere."""
    key = random(rows, heads, tokens, width).double() + 1
    value = random(rows, heads, tokens, width_v).double() + 0.5
    valid = torch.ones(rows, tokens, dtype=torch.bool, device=DEVICE)
    valid[0, :3] = False
    valid[1, random(tokens) > 0.7] = False
    valid[1, -2:] = False
    return key, value, valid


def fresh(key: torch.Tensor, value: torch.Tensor, shared: bool = False, single: bool = False) -> Memory:
    memory = Memory.fresh(len(key), key, value)
    if single:  # as on a GPU
        memory.anchor_key, memory.anchor_value = memory.anchor_key.float(), memory.anchor_value.float()
    elif DEVICE == "cuda":
        memory.anchor_key, memory.anchor_value = memory.anchor_key.double(), memory.anchor_value.double()
    if shared:
        memory.states = fresh_states(1, DEVICE)
    return memory


def literal(key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor, of: Rule, shared: bool) -> torch.Tensor:
    """By the formulas; with one threshold for all, rows take turns."""
    states = [naive.State() for _ in key]
    skipped = torch.zeros_like(valid)
    for t, row in product(range(key.shape[2]), range(len(key))):
        if valid[row, t]:
            skipped[row, t] = naive.decide(key[row, :, t], value[row, :, t], states[row], of)
            if shared:
                for other in states:
                    for name in ("threshold", "count", "skipped", "warmup_scores"):
                        setattr(other, name, getattr(states[row], name))
    return skipped


def same_memory(found: Memory, expected: Memory, tolerance: float = 1e-9) -> None:
    assert found.started.tolist() == expected.started.tolist()
    for tensor, other in zip(found.tensors[1:], expected.tensors[1:], strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        pytest.param(name, shared, marks=[] if (name, shared) in QUICK else pytest.mark.long)
        for shared, names in ((False, RULES), (True, ("kv", "all", "last", "long")))
        for name in names
    ],
)
def test_decisions_are_the_literal_ones(name: str, shared: bool) -> None:
    """Token by token in one launch each, all at once, and a part after another."""
    key, value, valid = text()
    expected = literal(key, value, valid, RULES[name], shared)
    assert expected.any() == (name != "none")
    by_token, at_once, in_parts = (fresh(key, value, shared) for _ in range(3))
    with only("triton", "decide"):
        steps = [
            ops.decide(key[:, :, t : t + 1], value[:, :, t : t + 1], valid[:, t : t + 1], by_token, RULES[name])
            for t in range(key.shape[2])
        ]
    assert torch.cat(steps, 1).tolist() == expected.tolist()
    found = ops.decide(key, value, valid, at_once, RULES[name])
    parts = [
        ops.decide(key[:, :, part], value[:, :, part], valid[:, part], in_parts, RULES[name])
        for part in (slice(0, 5), slice(5, 19), slice(19, 24))
    ]
    assert found.tolist() == torch.cat(parts, 1).tolist() == expected.tolist()
    same_memory(at_once, by_token)
    same_memory(in_parts, by_token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decisions_in_single_precision(dtype: torch.dtype) -> None:
    key, value, valid = text(heads=4, width=16, width_v=16)
    key, value = key.to(dtype), value.to(dtype)
    expected = literal(*doubles(key, value), valid, RULES["kv"], False)
    by_token, at_once = (fresh(key, value, single=True) for _ in range(2))
    steps = [
        ops.decide(key[:, :, t : t + 1], value[:, :, t : t + 1], valid[:, t : t + 1], by_token, RULES["kv"])
        for t in range(key.shape[2])
    ]
    assert torch.cat(steps, 1).tolist() == expected.tolist()
    assert ops.decide(key, value, valid, at_once, RULES["kv"]).tolist() == expected.tolist()
    same_memory(at_once, by_token, 1e-5)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 150])
def test_similarities_in_chunks_are_the_loop(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    key, value, valid = text(tokens=tokens)
    key[~valid[:, None].expand(-1, key.shape[1], -1)] = torch.nan  # padding is not looked at
    for smoothing in (0.0, 0.3, 0.9, 1.0):
        of, found, again, expected = rule(smoothing=smoothing), *(fresh(key, value) for _ in range(3))
        arrays = [tensor.cpu().numpy() for tensor in (key, value, valid, *expected.tensors[:3])]
        literal_scores = compiled.similarities(*arrays, smoothing, of.kind, of.as_printed)
        scores = parallel.similarities(key, value, valid, found, of)
        with monkeypatch.context() as patch:
            patch.setattr(parallel, "SLICE", 1)  # rows one after another
            by_row = parallel.similarities(key, value, valid, again, of)
        torch.testing.assert_close(by_row[valid], scores[valid], rtol=0, atol=1e-12, equal_nan=True)
        np.testing.assert_allclose(scores[valid].cpu(), literal_scores[arrays[2]], rtol=0, atol=1e-9)
        for tensor, array in zip(found.tensors, arrays[3:], strict=False):
            np.testing.assert_allclose(tensor.cpu(), array, rtol=0, atol=1e-9)


@pytest.mark.parametrize("keep_skipped", [False, True])
def test_tokens_that_stay_are_stored_in_the_same_launch(keep_skipped: bool) -> None:
    key, value, valid = text()
    skipped = literal(key, value, valid, RULES["kv"], False)
    stays = valid if keep_skipped else valid & ~skipped
    for way in ("triton", "torch"):
        memory = fresh(key, value)
        shape = (3, 3, 25)
        store = (
            torch.zeros(*shape, 5, dtype=torch.float64, device=DEVICE),
            torch.zeros(*shape, 7, dtype=torch.float64, device=DEVICE),
            torch.zeros(3, 25, dtype=torch.long, device=DEVICE),
            torch.zeros(3, dtype=torch.int32, device=DEVICE),
            torch.zeros(2, dtype=torch.long, device=DEVICE),
        )
        for t in range(key.shape[2]):
            one = key[:, :, t : t + 1], value[:, :, t : t + 1], valid[:, t : t + 1]
            with pytest.MonkeyPatch.context() as patch:
                if way == "torch":
                    patch.setattr(ops, "use_kernel", lambda *_: False)
                absent = ops.decide_and_store(
                    *one, memory, RULES["kv"], store=store, position=t + 100, keep_skipped=keep_skipped
                )
            assert absent[:, 0].tolist() == (skipped | ~valid)[:, t].tolist()
        keys, values, positions, lengths, totals = store
        assert lengths.tolist() == stays.sum(1).tolist()
        assert totals.tolist() == [int(valid.sum()), int(skipped.sum())]
        for row in range(3):
            at = stays[row].nonzero()[:, 0]
            torch.testing.assert_close(keys[row, :, : len(at)], key[row, :, at])
            torch.testing.assert_close(values[row, :, : len(at)], value[row, :, at])
            assert positions[row, : len(at)].tolist() == (at + 100).tolist()


# ---------------------------------------------------------------------- which way is taken


def test_what_a_kernel_cannot_do_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._warn_once.cache_clear()
    lengths, skipped = torch.tensor([3], device=DEVICE), torch.tensor([False], device=DEVICE)
    cases: dict[str, tuple[int, torch.dtype, bool]] = {
        "not float64": (8, torch.float64, False),
        "300 wide": (300, torch.float32, False),
        "no gradients": (8, torch.float32, True),
    }
    for words, (width, dtype, needs_gradient) in cases.items():
        query, keys = random(1, 2, width, dtype=dtype), random(1, 1, 3, width, dtype=dtype)
        query.requires_grad_(needs_gradient)
        with caplog.at_level(logging.WARNING), only("torch", "filtered decode"):
            for _ in range(2):
                attention.decode(query, keys, keys, lengths, skipped, 1.0)
        assert sum(words in message for message in caplog.messages) == 1


def test_a_cpu_takes_the_twin_and_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "KERNELS_ON_CPU", False)
    dispatch.DISPATCHED.clear()
    key, value, valid = (tensor.cpu() for tensor in text())
    memory = Memory.fresh(len(key), key, value)
    steps = [
        ops.decide(key[:, :, t : t + 1], value[:, :, t : t + 1], valid[:, t : t + 1], memory, RULES["kv"])
        for t in range(key.shape[2])
    ]
    assert torch.cat(steps, 1).tolist() == literal(key, value, valid, RULES["kv"], False).tolist()
    assert not dispatch.DISPATCHED and not caplog.messages


def test_empty_batches() -> None:
    keys, none = random(0, 2, 4, 8), torch.zeros(0, dtype=torch.long, device=DEVICE)
    assert attention.decode(random(0, 4, 8), keys, keys, none, none.bool(), 1.0).shape == (0, 4, 8)
    some, counts = random(2, 2, 4, 8), torch.zeros(2, dtype=torch.long, device=DEVICE)
    assert not attention.decode(random(2, 4, 8), some[:, :, :0], some[:, :, :0], counts, counts.bool(), 1.0).any()
    key, value, valid = text()
    assert ops.decide(key[:0], value[:0], valid[:0], fresh(key[:0], value[:0]), RULES["kv"]).shape == (0, 24)


def test_wrong_input_is_one_line() -> None:
    query, keys = random(2, 4, 8), random(2, 2, 6, 8)
    lengths, skipped = torch.tensor([1, 6], device=DEVICE), torch.tensor([False, False], device=DEVICE)
    with pytest.raises(InputError, match="whole groups"):
        attention.decode(random(2, 3, 8), keys, keys, lengths, skipped, 1.0)
    with pytest.raises(InputError, match="needs the positions"):
        attention.decode(query, keys, keys, lengths, skipped, 1.0, window=3)


# ---------------------------------------------------------------------- the filter on models


def logits(model: Any, filtered: TokenFilter, pieces: list[int], mask: torch.Tensor, on_device: bool) -> Any:
    """Of a text fed in such pieces, with the counts of tokens and skips."""
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), filtered.applied_to(model):
        patch.setattr(dispatch, "KERNELS_ON_CPU", on_device)
        cache, found, begin = DynamicCache(config=model.config), [], 0
        for piece in pieces:
            end = begin + piece
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
            part = model(ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache)
            found.append(part.logits)
            begin = end
        report = interventions_on(model)[0].report(map_model(model))["token_filter_skipped"]
        lengths = [layer.lengths.tolist() for layer in cache.layers]
    return torch.cat(found, 1), report, lengths


def padded(tokens: int = 14) -> torch.Tensor:
    mask = torch.ones(3, tokens, dtype=torch.long, device=DEVICE)
    mask[1, :4] = 0
    mask[2, :1] = 0
    return mask


FILTERS = [
    ("llama", {}),
    ("llama", {"state": "run"}),
    ("llama", {"similarity": "key"}),
    *(
        (family, {"keep_skipped_kv": keep})
        for family in ("mistral", "gemma2", "starcoder2", "gpt_oss")
        for keep in (0, 1)
    ),
]


@pytest.mark.parametrize(("family", "options"), FILTERS, ids=str)
def test_a_filter_on_the_device_is_the_one_on_the_cpu(family: str, options: dict[str, Any]) -> None:
    """In double precision: the decisions' kernels, and the twins of attention; a window, a bias, sinks."""
    others: dict[str, Any] = {"mistral": {"sliding_window": 5}, "gemma2": {"sliding_window": 4}}.get(family, {})
    model = tiny(family, **others).to(DEVICE).eval()
    filtered = TokenFilter(0.4, focus="uniform", warmup=3, step_size=0.05, **options)
    mask, real = padded(), padded().bool()
    for pieces in ([9, 1, 1, 3], [14]):
        expected, report, lengths = logits(model, filtered, pieces, mask, on_device=False)
        dispatch.DISPATCHED.clear()
        found, by_device, stored_lengths = logits(model, filtered, pieces, mask, on_device=True)
        assert bool(dispatch.DISPATCHED["decide: triton"]) == (1 in pieces)
        assert by_device == report and report["realised"] > 0
        assert stored_lengths == lengths
        # gemma2 is eager here, whose weights are in single precision
        tolerance = 1e-5 if family == "gemma2" else 1e-9
        torch.testing.assert_close(found[real], expected[real], rtol=0, atol=tolerance)


@pytest.mark.parametrize("state", ["request", "run"])
def test_trials_on_the_device_are_not_counted(state: str) -> None:
    model, mask = tiny("llama").to(DEVICE).eval(), torch.ones(2, 12, dtype=torch.long, device=DEVICE)
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    filtered = TokenFilter(0.4, focus="uniform", warmup=3, step_size=0.05, state=state)

    def run(trial: bool) -> tuple[torch.Tensor, Any]:
        with torch.no_grad(), filtered.applied_to(model) as model_map:
            model(ids, use_cache=False)
            (live,) = interventions_on(model)
            if trial:
                with live.preserve_state():
                    model(ids.flip(1), use_cache=False)
            return model(ids, use_cache=False).logits, live.report(model_map)["token_filter_skipped"]

    (expected, counted), (found, tried) = run(False), run(True)
    assert tried == counted and counted["tokens"] == 48
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_a_filter_on_the_device_in_single_precision() -> None:
    """Single tokens by kernels alone."""
    model = tiny("llama").float().to(DEVICE).eval()
    filtered = TokenFilter(0.4, focus="uniform", warmup=3, step_size=0.05)
    mask = padded(10)
    expected, _, lengths = logits(model, filtered, [8, 1, 1], mask, on_device=False)
    dispatch.DISPATCHED.clear()
    found, _, stored_lengths = logits(model, filtered, [8, 1, 1], mask, on_device=True)
    assert set(dispatch.DISPATCHED) == {"decide: triton", "filtered decode: triton"}
    assert stored_lengths == lengths
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-4)


def test_rows_of_a_cache_are_reordered() -> None:
    key, value, valid = text()
    layer, totals = FilteredCacheLayer(DynamicLayer(), None), torch.zeros(2, dtype=torch.long, device=DEVICE)
    absent = layer.store(key, value, valid, RULES["kv"], layer.begin(key, value), totals, False)
    rows = torch.tensor([2, 0, 0, 1])
    lengths, keys, states = layer.lengths[rows], layer.keys[rows], layer.memory.states[rows]
    assert lengths.tolist() == (~absent).sum(1)[rows].tolist() and layer.longest == int(lengths.max())
    layer.batch_select_indices(rows)
    assert layer.lengths.tolist() == lengths.tolist()
    assert layer.keys.equal(keys) and layer.memory.states.equal(states)
    assert {len(tensor) for tensor in (*layer.memory.tensors, layer.positions)} == {4}
    key, value, valid = key[rows][:, :, :1], value[rows][:, :, :1], valid[:1, 5:6].expand(4, 1)
    for _ in range(20):  # it grows
        layer.store(key, value, valid, RULES["kv"], layer.memory, totals, True)
    assert layer.lengths.tolist() == (lengths + 20).tolist()
    assert int(layer.lengths.max()) <= layer.longest <= layer.positions.shape[1]
    assert layer.positions.shape[1] % filtered_cache.BLOCK == 0
