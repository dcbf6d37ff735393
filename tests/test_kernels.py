"""Kernels against their twins: in Triton's interpreter, or compiled where there is a CUDA device."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton (pip install lmeval-prune[kernels])")

from transformers import DynamicCache

from lmeval_prune import map_model
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import filter_on_device, filtered_attention, interventions_on
from lmeval_prune.interventions.filter_on_device import DeviceSequences
from lmeval_prune.interventions.filtered_attention import Sequences
from lmeval_prune.interventions.token_filter import TokenFilter
from lmeval_prune.kernels import dispatch
from lmeval_prune.kernels.filtered_attention import naive as naive_attention
from lmeval_prune.kernels.filtered_attention import ops as attention
from lmeval_prune.kernels.masked_projection import naive as naive_projection
from lmeval_prune.kernels.masked_projection import ops as projection
from lmeval_prune.kernels.token_filter import compiled, naive, ops, parallel
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


@contextmanager
def only(way: str, operation: str) -> Iterator[None]:
    """Nothing but `operation` runs, and that `way`: in its kernel (`triton`) or its twin (`torch`)."""
    dispatch.TAKEN.clear()
    yield
    assert set(dispatch.TAKEN) == {f"{operation}: {way}"}


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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "width", "width_v"), [(4, 2, 16, 16), (3, 3, 20, 12), (10, 2, 40, 64)])
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
    keys, values, places = stored(2, 50, 24, 24, lengths, torch.float32)
    keys[2:], values[2:] = torch.nan, torch.nan  # of a skipped row nothing is read
    with only("triton", "filtered decode"):
        found = attention.decode(query, keys, values, lengths, skipped, 0.2, window, places, softcap, splits)
    expected = naive_attention.decode(*doubles(query, keys, values), lengths, skipped, 0.2, window, places, softcap)
    is_close(found, expected)
    assert not found[2:].any()


# ---------------------------------------------------------------------- filtered prefill attention


def chosen_tokens(rows: list[list[int]], lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """These tokens of each row, which are the last ones stored; what lies behind them is out of range."""
    room = max(map(len, rows), default=0)
    chosen = torch.tensor([row + [999] * (room - len(row)) for row in rows], device=DEVICE).view(len(rows), room)
    counts = torch.tensor([len(row) for row in rows], device=DEVICE)
    ends = (lengths - counts)[:, None] + 1 + torch.arange(room, device=DEVICE)
    return chosen, counts, ends


ROWS = [[0, 1, 4, 8, 9, 10, 17], [3], [], list(range(20))]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "width", "width_v"), [(2, 1, 16, 16), (3, 3, 20, 12), (4, 2, 40, 64)])
def test_prefill_is_its_twin(heads: int, kv_heads: int, width: int, width_v: int, dtype: torch.dtype) -> None:
    for before, window, softcap in ((0, None, None), (40, None, 3.0), (40, 11, None)):
        lengths = torch.tensor([len(row) + before for row in ROWS], device=DEVICE)
        query = random(4, heads, 20, width, dtype=dtype)
        keys, values, places = stored(kv_heads, 61, width, width_v, lengths, dtype)
        some = chosen_tokens(ROWS, lengths)
        for row, tokens in enumerate(ROWS):  # what is not chosen is not read
            query[row, :, [token for token in range(20) if token not in tokens]] = torch.nan
        with only("triton", "filtered prefill"):
            found = attention.prefill(query, keys, values, *some, 0.3, window, places, softcap)
        expected = naive_attention.prefill(*doubles(query, keys, values), *some, 0.3, window, places, softcap)
        is_close(found, expected)
        for row, tokens in enumerate(ROWS):
            assert found[row].any(-1).any(-1).nonzero()[:, 0].tolist() == tokens


def test_prefill_of_many_blocks_a_row() -> None:
    rows = [list(range(0, 100, 2)), list(range(70))]
    lengths = torch.tensor([50, 70], device=DEVICE)
    query = random(2, 1, 100, 8)
    keys, values, places = stored(1, 70, 8, 8, lengths, torch.float32)
    some = chosen_tokens(rows, lengths)
    for window in (None, 25):
        with only("triton", "filtered prefill"):
            found = attention.prefill(query, keys, values, *some, 0.3, window, places)
        is_close(found, naive_attention.prefill(*doubles(query, keys, values), *some, 0.3, window, places))


@pytest.mark.parametrize(("window", "keep"), [(None, False), (4, False), (4, True), (None, True)])
def test_the_twins_are_the_literal_attention(window: int | None, keep: bool) -> None:
    skips = [False, True, False, False, True, True, False, False, True, False]
    query, key, value = random(4, 10, 6).double(), random(2, 10, 6, seed=1).double(), random(2, 10, 5).double()
    expected = naive.attention(query, key, value, skips, 0.4, window, keep)[None]
    stays = [t for t in range(10) if keep or not skips[t]]
    asks = [t for t in range(10) if not skips[t]]
    keys, values, places = key[None, :, stays], value[None, :, stays], torch.tensor([stays], device=DEVICE)
    ends = torch.tensor([[stays.index(t) + 1 for t in asks]], device=DEVICE)
    chosen, counts = torch.tensor([asks], device=DEVICE), torch.tensor([len(asks)], device=DEVICE)
    found = naive_attention.prefill(query[None], keys, values, chosen, counts, ends, 0.4, window, places)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    last, ran = torch.tensor([len(stays)], device=DEVICE), torch.tensor([False], device=DEVICE)
    found = naive_attention.decode(query[None, :, -1], keys, values, last, ran, 0.4, window, places)
    torch.testing.assert_close(found, expected[:, -1], rtol=0, atol=1e-12)


# ---------------------------------------------------------------------- masked projection


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("shape", "heads", "width", "outputs"), [((1,), 4, 16, 32), ((3, 7), 3, 20, 50), ((2, 1), 5, 40, 33)]
)
def test_projection_is_its_twin(
    shape: tuple[int, ...], heads: int, width: int, outputs: int, dtype: torch.dtype
) -> None:
    for kept, bias, transposed in product(([0, 2], [1], list(range(heads))), (True, False), (True, False)):
        x, weight = random(*shape, heads * width, dtype=dtype), random(outputs, heads * width, dtype=dtype)
        of = random(outputs, dtype=dtype) if bias else None
        for head in set(range(heads)) - set(kept):  # it is not read
            x[..., head * width : (head + 1) * width] = torch.nan
            weight[:, head * width : (head + 1) * width] = torch.nan
        weight = weight.T.contiguous().T if transposed else weight
        chosen = torch.tensor(kept, device=DEVICE)
        with only("triton", "masked projection"):
            found = projection.project(x, weight, chosen, width, of)
        is_close(
            found, naive_projection.project(*doubles(x, weight), chosen, width, None if of is None else of.double())
        )


def test_the_projection_is_a_head_mask() -> None:
    x, weight, bias = random(3, 12).double(), random(5, 12).double(), random(5).double()
    masked = x.clone()
    masked[:, 4:8] = 0
    found = projection.project(x, weight, torch.tensor([0, 2], device=DEVICE), 4, bias)
    torch.testing.assert_close(found, masked @ weight.T + bias, rtol=0, atol=1e-12)
    none = projection.project(x, weight, torch.tensor([], dtype=torch.long, device=DEVICE), 4, bias)
    torch.testing.assert_close(none, bias.expand(3, 5))


# ---------------------------------------------------------------------- decisions


def rule(share: float = 0.4, kind: int = 0, as_printed: bool = False, smoothing: float = 0.9, warmup: int = 4) -> Any:
    quantile = NormalDist().inv_cdf(1 - share) if 0 < share < 1 else math.inf if share == 0 else -math.inf
    return (share, 0.05, smoothing, warmup, quantile, kind, as_printed)


RULES = {
    "kv": rule(),
    "as printed": rule(as_printed=True),
    "key": rule(kind=1),
    "value": rule(kind=2),
    "none": rule(share=0),
    "all": rule(share=1),
    "last": rule(smoothing=0),
    "first": rule(smoothing=1),
    "short": rule(warmup=1),
    "long": rule(warmup=11, smoothing=0.5),
}


def text(rows: int = 3, heads: int = 3, tokens: int = 24, width: int = 5, width_v: int = 7) -> Any:
    """Keys, values, and which tokens are no padding: on the left, on the right, anywhere, nowhere."""
    key = random(rows, heads, tokens, width).double() + 1
    value = random(rows, heads, tokens, width_v).double() + 0.5
    valid = torch.ones(rows, tokens, dtype=torch.bool, device=DEVICE)
    valid[0, :3] = False
    valid[1, random(tokens) > 0.7] = False
    valid[1, -2:] = False
    return key, value, valid


def fresh(key: torch.Tensor, value: torch.Tensor, shared: bool, dtype: torch.dtype = torch.float64) -> Any:
    rows = len(key)
    state = torch.zeros(1 if shared else rows, compiled.COLUMNS, dtype=torch.float64, device=DEVICE)
    state[:, compiled.THRESHOLD] = 1
    anchors = [torch.zeros(*one.shape[:2], one.shape[-1], dtype=dtype, device=DEVICE) for one in (key, value)]
    return torch.zeros(rows, dtype=torch.bool, device=DEVICE), *anchors, state


def literal(key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor, options: Any, shared: bool) -> torch.Tensor:
    """By the formulas; with one threshold for all, rows take turns."""
    share, step_size, smoothing, warmup, _, kind, as_printed = options
    of = naive.Rule(
        share,
        ("kv", "key", "value")[kind],
        "as_printed" if as_printed else "inverse_variance",
        step_size,
        smoothing,
        warmup,
    )
    states = [naive.State() for _ in key]
    skipped = torch.zeros_like(valid)
    for t, row in product(range(key.shape[2]), range(len(key))):
        if valid[row, t]:
            skipped[row, t] = naive.decide(key[row, :, t], value[row, :, t], states[row], of)
            if shared:
                for other in states:
                    for name in ("threshold", "seen", "skipped", "known"):
                        setattr(other, name, getattr(states[row], name))
    return skipped


def same_state(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    assert found[0].tolist() == expected[0].tolist()
    for one, other in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(one.cpu(), other.cpu(), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "shared"), [*((name, False) for name in RULES), *((name, True) for name in ("kv", "all", "last", "long"))]
)
def test_decisions_are_the_literal_ones(name: str, shared: bool) -> None:
    """Token by token in one launch each, all at once, and a part after another."""
    key, value, valid = text()
    expected = literal(key, value, valid, RULES[name], shared)
    assert expected.any() == (name != "none")
    by_token, at_once, in_parts = (fresh(key, value, shared) for _ in range(3))
    with only("triton", "decide"):
        steps = [
            ops.decide(key[:, :, t : t + 1], value[:, :, t : t + 1], valid[:, t : t + 1], *by_token, RULES[name])
            for t in range(key.shape[2])
        ]
    assert torch.cat(steps, 1).tolist() == expected.tolist()
    with only("triton", "thresholds"):
        found = ops.decide(key, value, valid, *at_once, RULES[name])
        parts = [
            ops.decide(key[:, :, part], value[:, :, part], valid[:, part], *in_parts, RULES[name])
            for part in (slice(0, 5), slice(5, 19), slice(19, 24))
        ]
    assert found.tolist() == torch.cat(parts, 1).tolist() == expected.tolist()
    same_state(at_once, by_token)
    same_state(in_parts, by_token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decisions_in_single_precision(dtype: torch.dtype) -> None:
    key, value, valid = text(heads=4, width=16, width_v=16)
    key, value = key.to(dtype), value.to(dtype)
    expected = literal(*doubles(key, value), valid, RULES["kv"], False)
    by_token, at_once = (fresh(key, value, False, torch.float32) for _ in range(2))
    steps = [
        ops.decide(key[:, :, t : t + 1], value[:, :, t : t + 1], valid[:, t : t + 1], *by_token, RULES["kv"])
        for t in range(key.shape[2])
    ]
    assert torch.cat(steps, 1).tolist() == expected.tolist()
    assert ops.decide(key, value, valid, *at_once, RULES["kv"]).tolist() == expected.tolist()
    same_state(at_once, by_token, 1e-5)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 150])
def test_similarities_in_chunks_are_the_loop(tokens: int) -> None:
    key, value, valid = text(tokens=tokens)
    key[~valid[:, None].expand(-1, key.shape[1], -1)] = torch.nan  # padding is not looked at
    for smoothing in (0.0, 0.3, 0.9, 1.0):
        options = rule(smoothing=smoothing)
        found, expected = fresh(key, value, False), [one.cpu().numpy() for one in fresh(key, value, False)]
        some = [one.cpu().numpy() for one in (key, value, valid)]
        skipped = compiled.decide(*some, *expected, *options)
        scores, what = parallel.similarities(key, value, valid, *found[:3], smoothing, 0, False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel, "SLICE", 1)  # rows one after another
            again, _ = parallel.similarities(key, value, valid, *fresh(key, value, False)[:3], smoothing, 0, False)
        torch.testing.assert_close(again, scores, rtol=0, atol=1e-12)
        arrays = scores.cpu().numpy(), what.cpu().numpy(), found[3].cpu().numpy()
        assert compiled.thresholds(*arrays, *options[:2], *options[3:5]).tolist() == skipped.tolist()
        same_state(found[:3], [torch.from_numpy(one) for one in expected[:3]])


@pytest.mark.parametrize("keep_skipped", [False, True])
def test_tokens_that_stay_are_stored_in_the_same_launch(keep_skipped: bool) -> None:
    key, value, valid = text()
    skipped = literal(key, value, valid, RULES["kv"], False)
    stays = valid if keep_skipped else valid & ~skipped
    for way in ("triton", "torch"):
        state = fresh(key, value, False)
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
                    patch.setattr(ops, "takes_kernel", lambda *_: False)
                absent = ops.decide_and_store(
                    *one, *state, RULES["kv"], store=store, place=t + 100, keep_skipped=keep_skipped
                )
            assert absent[:, 0].tolist() == (skipped | ~valid)[:, t].tolist()
        keys, values, places, lengths, totals = store
        assert lengths.tolist() == stays.sum(1).tolist()
        assert totals.tolist() == [int(valid.sum()), int(skipped.sum())]
        for row in range(3):
            at = stays[row].nonzero()[:, 0]
            torch.testing.assert_close(keys[row, :, : len(at)], key[row, :, at])
            torch.testing.assert_close(values[row, :, : len(at)], value[row, :, at])
            assert places[row, : len(at)].tolist() == (at + 100).tolist()


# ---------------------------------------------------------------------- which way is taken


def test_what_a_kernel_cannot_do_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._say_once.cache_clear()
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
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    x, weight = torch.ones(2, 8), torch.ones(3, 8)
    with only("torch", "masked projection"):
        assert projection.project(x, weight, torch.tensor([1]), 4).tolist() == [[4.0] * 3] * 2
    key, value, valid = (one.cpu() for one in text())
    state = [one.cpu() for one in fresh(key, value, False)]
    with only("torch", "thresholds"):
        found = ops.decide(key, value, valid, *state, RULES["kv"])
    assert found.tolist() == literal(key, value, valid, RULES["kv"], False).tolist()
    assert not caplog.messages


def test_empty_batches() -> None:
    keys, none = random(0, 2, 4, 8), torch.zeros(0, dtype=torch.long, device=DEVICE)
    assert attention.decode(random(0, 4, 8), keys, keys, none, none.bool(), 1.0).shape == (0, 4, 8)
    room = torch.zeros(2, 0, dtype=torch.long, device=DEVICE)
    some, counts = random(2, 2, 4, 8), torch.zeros(2, dtype=torch.long, device=DEVICE)
    assert not attention.prefill(random(2, 4, 5, 8), some, some, room, counts, room, 1.0).any()
    assert not attention.decode(random(2, 4, 8), some[:, :, :0], some[:, :, :0], counts, counts.bool(), 1.0).any()
    assert projection.project(random(0, 8), random(3, 8), torch.tensor([0], device=DEVICE), 4).shape == (0, 3)
    key, value, valid = text()
    assert ops.decide(key[:0], value[:0], valid[:0], *fresh(key[:0], value[:0], False), RULES["kv"]).shape == (0, 24)


def test_wrong_input_is_one_line() -> None:
    query, keys = random(2, 4, 8), random(2, 2, 6, 8)
    fine, skipped = torch.tensor([1, 6], device=DEVICE), torch.tensor([False, False], device=DEVICE)
    for lengths in ([1, 7], [-1, 6]):
        with pytest.raises(InputError, match=r"lengths holds -?\d, which is not from 0 to 6") as error:
            attention.decode(query, keys, keys, torch.tensor(lengths, device=DEVICE), skipped, 1.0)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="whole groups"):
        attention.decode(random(2, 3, 8), keys, keys, fine, skipped, 1.0)
    with pytest.raises(InputError, match="needs the places"):
        attention.decode(query, keys, keys, fine, skipped, 1.0, window=3)
    one, many = torch.tensor([[0], [0]], device=DEVICE), torch.tensor([1, 1], device=DEVICE)
    for chosen, counts, ends, name in (
        (one + 5, many, one + 1, "chosen"),
        (one, many + 1, one + 1, "counts"),
        (one, many, one + 7, "ends"),
    ):
        with pytest.raises(InputError, match=f"{name} holds"):
            attention.prefill(random(2, 4, 5, 8), keys, keys, chosen, counts, ends, 1.0)
    with pytest.raises(InputError, match="heads \\[2\\] are not all from 0 to 1"):
        projection.project(random(3, 8), random(3, 8), torch.tensor([2], device=DEVICE), 4)
    with pytest.raises(InputError, match="not whole heads of 3"):
        projection.project(random(3, 8), random(3, 8), torch.tensor([0], device=DEVICE), 3)


# ---------------------------------------------------------------------- the filter on models


def logits(model: Any, filtered: TokenFilter, pieces: list[int], mask: torch.Tensor, on_device: bool) -> Any:
    """Of a text fed in such pieces, with the counts of tokens and skips."""
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), filtered.applied_to(model):
        patch.setattr(filtered_attention, "sequences_like", (DeviceSequences if on_device else Sequences).like)
        cache, found, begin = DynamicCache(config=model.config), [], 0
        for piece in pieces:
            end = begin + piece
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
            part = model(ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache)
            found.append(part.logits)
            begin = end
        report = interventions_on(model)[0].report(map_model(model))["token_filter_skipped"]
        lengths = [list(map(int, layer.sequences.lengths)) for layer in cache.layers]
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
        dispatch.TAKEN.clear()
        found, by_device, stored_lengths = logits(model, filtered, pieces, mask, on_device=True)
        assert dispatch.TAKEN["thresholds: triton"] and not dispatch.TAKEN["thresholds: torch"]
        assert bool(dispatch.TAKEN["decide: triton"]) == (1 in pieces)
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
        with pytest.MonkeyPatch.context() as patch, torch.no_grad(), filtered.applied_to(model) as model_map:
            patch.setattr(filtered_attention, "sequences_like", DeviceSequences.like)
            model(ids, use_cache=False)
            (live,) = interventions_on(model)
            if trial:
                with live.uncounted():
                    model(ids.flip(1), use_cache=False)
            return model(ids, use_cache=False).logits, live.report(model_map)["token_filter_skipped"]

    (expected, counted), (found, tried) = run(False), run(True)
    assert tried == counted and counted["tokens"] == 48
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_a_filter_on_the_device_in_single_precision() -> None:
    """Nothing but kernels."""
    model = tiny("llama").float().to(DEVICE).eval()
    filtered = TokenFilter(0.4, focus="uniform", warmup=3, step_size=0.05)
    mask = padded(10)
    expected, _, lengths = logits(model, filtered, [8, 1, 1], mask, on_device=False)
    dispatch.TAKEN.clear()
    found, _, stored_lengths = logits(model, filtered, [8, 1, 1], mask, on_device=True)
    assert set(dispatch.TAKEN) == {
        f"{one}: triton" for one in ("decide", "thresholds", "filtered decode", "filtered prefill")
    }
    assert stored_lengths == lengths
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-4)


def test_rows_of_a_device_cache_are_reordered() -> None:
    key, value, valid = text()
    sequences, of = (
        DeviceSequences.like(key, value),
        filter_on_device.DeviceFilter(RULES["kv"], False, False, {"a": Counter()}),
    )
    call: Any = SimpleNamespace(key=key, value=value)
    absent = of.decide("a", call, sequences, valid)
    rows = torch.tensor([2, 0, 0, 1])
    lengths, keys, state = sequences.lengths[rows], sequences.keys[rows], sequences.states[rows]
    assert lengths.tolist() == (~absent).sum(1)[rows].tolist() and sequences.bound == int(lengths.max())
    sequences.select(rows)
    assert sequences.lengths.tolist() == lengths.tolist()
    assert sequences.keys.equal(keys) and sequences.states.equal(state)
    assert len(sequences.anchors[0]) == len(sequences.begun) == len(sequences.places) == 4
    call = SimpleNamespace(key=key[rows][:, :, :1], value=value[rows][:, :, :1])
    for _ in range(80):  # it grows
        of.decide("a", call, sequences, valid[:1, 5:6].expand(4, 1))
    assert int(sequences.lengths.max()) <= sequences.bound <= sequences.places.shape[1]
    assert sequences.places.shape[1] % filter_on_device.BLOCK == 0
