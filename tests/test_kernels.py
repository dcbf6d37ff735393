"""Kernels against their twins: in Triton's interpreter, or compiled where there is a CUDA device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason='kernels need triton (pip install -e ".[kernels]")')

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lmeval_prune import map_model
from lmeval_prune.interventions import interventions_on
from lmeval_prune.interventions.token_filter import FilteredCacheLayer, TokenFilter
from lmeval_prune.kernels import decode_attention_triton as attention
from lmeval_prune.kernels import dispatch
from lmeval_prune.kernels import token_filter as ops
from lmeval_prune.kernels import token_filter_compiled as compiled
from lmeval_prune.kernels.token_filter_memory import Memory, Rule, fresh_states
from tests import literal_decode, literal_filter
from tests.covers import crossed
from tests.tiny_models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the relative RMS error


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison memory: what is not written is NaN, or true."""
    empty = torch.empty

    def poison(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

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


def is_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    error = (actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30)
    assert not actual.isnan().any()
    assert error <= TOLERANCES[actual.dtype], error


def doubles(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.double() for tensor in tensors]


# ---------------------------------------------------------------------- decode attention


CAPACITY = 40


def random_step(
    seed: int,
    heads: tuple[int, int] = (6, 2),
    widths: tuple[int, int] = (8, 12),
    dtype: torch.dtype = torch.float64,
    number: torch.dtype = torch.long,
    skips: bool = False,
    positions: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of `decode` for seven rows, one of them full and one empty; NaN behind the stored tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, CAPACITY, (7,), generator=generator)
    lengths[:3] = torch.tensor([CAPACITY, 0, 1])
    keys, values = (random(7, heads[1], CAPACITY, width, dtype=dtype, seed=seed + i) for i, width in enumerate(widths))
    behind = (torch.arange(CAPACITY) >= lengths[:, None])[:, None, :, None].to(DEVICE)
    arguments: dict[str, Any] = {
        "query": random(7, heads[0], widths[0], dtype=dtype, seed=seed),
        "keys": keys.masked_fill(behind, torch.nan),
        "values": values.masked_fill(behind, torch.nan),
        "lengths": lengths.to(DEVICE, number),
        "scaling": 0.3,
        **options,
    }
    if skips:
        arguments["skipped"] = (torch.arange(7) % 3 == 2).to(DEVICE)
    if positions:
        places = torch.randint(1, 4, (7, CAPACITY), generator=generator).cumsum(1)
        arguments["positions"] = places.to(DEVICE, number)
    return arguments


def literal_step(step: dict[str, Any]) -> torch.Tensor:
    return literal_decode.decode(**{name: value for name, value in step.items() if name != "splits"})[0]


STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "skipped": {"skips": True},
    "window": {"window": 7},
    "window 1": {"window": 1},
    "window, positions": {"window": 7, "positions": True, "skips": True},
    "softcap": {"softcap": 1.5, "window": 30},
}


STEP_SHAPES = [((6, 2), (8, 12)), ((3, 3), (20, 20)), ((2, 1), (64, 16)), ((20, 1), (5, 7))]
STEP_TYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16)


@crossed({"name": STEPS, "shape": range(4), "products": ("dot", "sums"), "splits": (1, 4)})
def test_a_step_in_the_kernel_is_the_literal_one(
    name: str, shape: int, products: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = {"dot": attention.DOT_CONFIGS, "sums": attention.SUM_CONFIGS}[products]
    seed = shape + 4 * splits + list(STEPS).index(name)
    monkeypatch.setattr(attention, "_configuration", lambda *_: configs[seed % len(configs)])
    kinds = STEP_TYPES[shape], (torch.int32, torch.long)[seed % 2]
    step = random_step(seed, *STEP_SHAPES[shape], *kinds, splits=splits, **STEPS[name])
    is_close(attention.decode(**step), literal_step(step))


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
    states = [literal_filter.State() for _ in key]
    skipped = torch.zeros_like(valid)
    for t, row in product(range(key.shape[2]), range(len(key))):
        if valid[row, t]:
            skipped[row, t] = literal_filter.decide(key[row, :, t], value[row, :, t], states[row], of)
            if shared:
                for other in states:
                    for name in ("threshold", "count", "skipped", "warmup_scores"):
                        setattr(other, name, getattr(states[row], name))
    return skipped


def same_memory(actual: Memory, expected: Memory, tolerance: float = 1e-9) -> None:
    assert actual.started.tolist() == expected.started.tolist()
    for tensor, other in zip(actual.tensors[1:], expected.tensors[1:], strict=True):
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
    decisions = ops.decide(key, value, valid, at_once, RULES[name])
    parts = [
        ops.decide(key[:, :, part], value[:, :, part], valid[:, part], in_parts, RULES[name])
        for part in (slice(0, 5), slice(5, 19), slice(19, 24))
    ]
    assert decisions.tolist() == torch.cat(parts, 1).tolist() == expected.tolist()
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
        of, memory, again, expected = rule(smoothing=smoothing), *(fresh(key, value) for _ in range(3))
        arrays = [tensor.cpu().numpy() for tensor in (key, value, valid, *expected.tensors[:3])]
        literal_scores = compiled.similarities(*arrays, smoothing, of.kind, of.as_printed)
        scores = ops.similarities(key, value, valid, memory, of)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "SLICE", 1)  # rows one after another
            by_row = ops.similarities(key, value, valid, again, of)
        torch.testing.assert_close(by_row[valid], scores[valid], rtol=0, atol=1e-12, equal_nan=True)
        np.testing.assert_allclose(scores[valid].cpu(), literal_scores[arrays[2]], rtol=0, atol=1e-9)
        for tensor, array in zip(memory.tensors, arrays[3:], strict=False):
            np.testing.assert_allclose(tensor.cpu(), array, rtol=0, atol=1e-9)


def empty_store() -> tuple[torch.Tensor, ...]:
    """Keys, values, positions, lengths and totals for the rows of `text`."""
    shapes = ((3, 3, 25, 5), torch.float64), ((3, 3, 25, 7), torch.float64), ((3, 25), torch.long)
    return tuple(
        torch.zeros(shape, dtype=dtype, device=DEVICE)
        for shape, dtype in (*shapes, ((3,), torch.int32), ((2,), torch.long))
    )


@pytest.mark.parametrize("keep_skipped", [False, True])
def test_tokens_that_stay_are_stored_in_the_same_launch(keep_skipped: bool) -> None:
    key, value, valid = text()
    skipped = literal(key, value, valid, RULES["kv"], False)
    stays = valid if keep_skipped else valid & ~skipped
    memory, store = fresh(key, value), empty_store()
    for t in range(key.shape[2]):
        token = key[:, :, t : t + 1], value[:, :, t : t + 1], valid[:, t : t + 1]
        absent = ops.decide_and_store(
            *token, memory, RULES["kv"], store=store, position=t + 100, keep_skipped=keep_skipped
        )
        assert absent is not None and absent[:, 0].tolist() == (skipped | ~valid)[:, t].tolist()
    keys, values, positions, lengths, totals = store
    assert lengths.tolist() == stays.sum(1).tolist()
    assert totals.tolist() == [int(valid.sum()), int(skipped.sum())]
    for row in range(3):
        at = stays[row].nonzero()[:, 0]
        torch.testing.assert_close(keys[row, :, : len(at)], key[row, :, at])
        torch.testing.assert_close(values[row, :, : len(at)], value[row, :, at])
        assert positions[row, : len(at)].tolist() == (at + 100).tolist()


# ---------------------------------------------------------------------- which way is taken


def test_an_empty_batch() -> None:
    key, value, valid = text()
    assert ops.decide(key[:0], value[:0], valid[:0], fresh(key[:0], value[:0]), RULES["kv"]).shape == (0, 24)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", ["query", "keys", "values"])
def test_what_is_not_a_number_is_seen(name: str, splits: int) -> None:
    """Of the rows that attend to it."""
    step, row = random_step(0, dtype=torch.float32, splits=splits), 0
    step[name][row, :, 0] = torch.nan
    assert attention.decode(**step).isnan().flatten(1).any(1).tolist() == [i == row for i in range(7)]


@pytest.mark.parametrize("splits", [1, 4])
def test_scores_without_a_finite_number_are_those_of_pytorch(splits: int) -> None:
    """Rows of scores that are all minus infinity, all NaN, and all plus infinity."""
    query = torch.tensor([-1, math.nan, 1], device=DEVICE)[:, None, None].expand(3, 2, 16)
    keys, values = torch.full((3, 1, 3, 16), math.inf, device=DEVICE), torch.ones(3, 1, 3, 16, device=DEVICE)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    visible = keys.expand(-1, 2, -1, -1)
    expected = sdpa(query[:, :, None], visible, torch.ones_like(visible), scale=1.0)[:, :, 0]
    assert not expected[0].any() and expected[1:].isnan().all()
    arguments = query, keys, values, torch.full((3,), 3, device=DEVICE), 1.0
    torch.testing.assert_close(attention.decode(*arguments, splits=splits), expected, equal_nan=True)


@pytest.mark.parametrize("dimension", ["heads", "tokens"])
def test_storage_of_more_than_2_31_numbers(dimension: str) -> None:
    """Each stride fits into 32 bits; the ninth head or token is farther away. The memory between is not touched."""
    apart, width, count = 2**28, 16, 9
    shape = {"heads": (1, count, 2, width), "tokens": (1, 1, count, width)}[dimension]
    strides = {"heads": (0, apart, width, 1), "tokens": (0, 0, apart, 1)}[dimension]
    storage = torch.UntypedStorage(2 * (apart * (count - 1) + 4 * width), device=DEVICE)
    keys, values = (
        torch.tensor([], dtype=torch.float16, device=DEVICE).set_(storage, offset, shape, strides)
        for offset in (0, 2 * width)
    )
    for seed, stored in enumerate((keys, values)):
        stored.copy_(random(*shape, dtype=torch.float16, seed=seed))
    query = random(1, count, width, dtype=torch.float16)
    lengths = torch.tensor([shape[2]], device=DEVICE)
    expected, _ = literal_decode.decode(query, keys, values, lengths, 0.3)
    is_close(attention.decode(query, keys, values, lengths, 0.3), expected)


def test_gradients_go_into_the_storage() -> None:
    key, value, valid = text(tokens=1)
    valid[:] = True
    cache = FilteredCacheLayer(DynamicLayer(), SimpleNamespace(keep_skipped_kv=False))
    memory, totals = cache.begin(key, value), torch.zeros(2, dtype=torch.long, device=DEVICE)
    cache.store(key.requires_grad_(), value, valid, memory, totals, RULES["kv"])
    cache.keys.sum().backward()
    assert key.grad is not None and key.grad.eq(1).all()


# ---------------------------------------------------------------------- the filter on models


def logits(model: Any, filtered: TokenFilter, pieces: list[int], mask: torch.Tensor, on_device: bool) -> Any:
    """Compute logits of a text fed in such pieces, with the counts of tokens and skips."""
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), filtered.applied_to(model):
        patch.setattr(dispatch, "KERNELS_ON_CPU", on_device)
        cache, chunks, begin = DynamicCache(config=model.config), [], 0
        for piece in pieces:
            end = begin + piece
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
            part = model(ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache)
            chunks.append(part.logits)
            begin = end
        report = interventions_on(model)[0].report(map_model(model))["token_filter_skipped"]
        lengths = [layer.lengths.tolist() for layer in cache.layers]
    return torch.cat(chunks, 1), report, lengths


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
        actual, by_device, stored_lengths = logits(model, filtered, pieces, mask, on_device=True)
        assert bool(dispatch.DISPATCHED["decide and store: triton"]) == (1 in pieces)
        assert by_device == report and report["realised"] > 0
        assert stored_lengths == lengths
        # gemma2 is eager here, whose weights are in single precision
        tolerance = 1e-5 if family == "gemma2" else 1e-9
        torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=tolerance)
