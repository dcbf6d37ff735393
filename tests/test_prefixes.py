"""Common prefixes of prompts: which are chosen, what they cost, and that answers are `generate`'s."""

import gc
import itertools
import random
from itertools import product
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_decoding import BY_GENERATE, Letters, alone, answers, model_of, some_requests
from tiny_models import CAUSAL, VOCABULARY

from lmeval_prune.decoding import Engine, Request, SamplingParams, Schedule
from lmeval_prune.decoding.attention import AttentionOptions, join_attention
from lmeval_prune.decoding.prefixes import SharedPrefix, common_prefixes
from lmeval_prune.interventions import HeadMask
from lmeval_prune.interventions.token_filter import TokenFilter

WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 6}),
    ("gemma2", {"sliding_window": 5}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    ("cohere2", {"sliding_window": 5}),
]


def prefixed_requests(model: Any, seed: int, lengths: tuple[int, ...] = (7, 3), **sizes: int) -> list[Request]:
    """Return requests whose prompts begin with one of several prefixes, and some without."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(3, VOCABULARY) for _ in range(length)) for length in lengths]
    by_prompt: dict[tuple[int, ...], tuple[int, ...]] = {}
    order = itertools.cycle([prefixes[0], *prefixes, ()])
    requests = []
    for request in some_requests(model, seed, **{"prompts": 6, "each": 4, **sizes}):
        if request.prompt not in by_prompt:
            by_prompt[request.prompt] = next(order)
        prefix = by_prompt[request.prompt]
        requests.append(Request((*prefix, *request.prompt), request.mask, request.params, tag=request.tag))
    return requests


# --------------------------------------------------------------------------- the choice of prefixes


def most_saved(prompts: list[tuple[int, ...]], least: int) -> int:
    """Return the tokens saved by the best division of the sorted prompts, all divisions tried."""
    best = 0
    for ends in product([False, True], repeat=len(prompts) - 1):
        groups = [[prompts[0]]]
        for prompt, is_new in zip(prompts[1:], ends, strict=True):
            groups.append([prompt]) if is_new else groups[-1].append(prompt)
        saved = 0
        for group in groups:
            depth = next(n for n in range(min(map(len, group)) - 1, -1, -1) if len({p[:n] for p in group}) == 1)
            together = (len(group) - 1) * depth
            saved += together if together >= least else 0
        best = max(best, saved)
    return best


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.sets(st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple), min_size=1, max_size=8),
    least=st.integers(1, 9),
)
def test_the_chosen_prefixes_save_most(prompts: set[tuple[int, ...]], least: int) -> None:
    lengths = common_prefixes(prompts, least)
    sharing: dict[tuple[int, ...], int] = {}
    for prompt, length in lengths.items():
        assert 0 < length < len(prompt)
        sharing[prompt[:length]] = sharing.get(prompt[:length], 0) + 1
    assert all(count > 1 and (count - 1) * len(prefix) >= least for prefix, count in sharing.items())
    saved = sum((count - 1) * len(prefix) for prefix, count in sharing.items())
    assert saved == most_saved(sorted(prompts), least)


def test_thousands_of_nested_prompts() -> None:
    """Each prompt begins with the one before it."""
    prompts = [tuple(range(n)) for n in range(1, 3000)]
    lengths = common_prefixes(prompts, 1)
    assert all(length < len(prompt) for prompt, length in lengths.items())


# --------------------------------------------------------------------------- attention in parts


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("widths", [(8, 8), (8, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_in_parts_is_attention(softcap: float | None, widths: tuple[int, int], dtype: torch.dtype) -> None:
    """Three parts of the keys, a part that a query does not see, and no keys at all."""
    torch.manual_seed(0)
    q = 3 * torch.randn(2, 3, 5, widths[0], dtype=dtype)
    k, v = (torch.randn(2, 3, 11, width, dtype=dtype) for width in widths)
    hidden = torch.rand(2, 1, 5, 11) < 0.3
    hidden[:, :, 0, :4], hidden[..., -1] = True, False
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    scores = q.double() @ k.double().mT * 0.4
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()
    options = AttentionOptions(0.4, softcap)
    bounds = [slice(0, 4), slice(4, 5), slice(5, 11)]
    parts = [options.attend_with_lse(q, k[:, :, part], v[:, :, part], mask[..., part]) for part in bounds]
    parts.append((torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], -torch.inf)))
    out = join_attention(parts)
    assert out.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype]
    assert (out.double() - expected).abs().max() < tolerance


# --------------------------------------------------------------------------- answers


@pytest.mark.parametrize("family", sorted(CAUSAL.keys() - BY_GENERATE))
def test_every_family_gives_what_generate_gives(family: str) -> None:
    """One of two prefixes is copied into slots, the other is not."""
    model = model_of(family)
    schedule = Schedule(budget=12, prefix=2, copied_prefix=4, static=False)
    engine = Engine(model, Letters(), max_rows=5, schedule=schedule)
    requests = prefixed_requests(model, seed=1)
    assert common_prefixes([request.prompt for request in requests], 2)
    found = answers(engine, requests)
    for request in requests:
        assert found[request.tag] == alone(model, request), request


@pytest.mark.parametrize(("family", "changes"), WINDOWS)
@pytest.mark.parametrize("length", [2, 5, 9])
@pytest.mark.parametrize("copied", [0, 100])
def test_sliding_windows(family: str, changes: dict[str, Any], length: int, copied: int) -> None:
    """Windows that end within the prefix, at its end and after it."""
    model = model_of(family, **changes)
    requests = prefixed_requests(model, length, (length,))
    found = answers(Engine(model, Letters(), schedule=Schedule(prefix=1, copied_prefix=copied)), requests)
    for request in requests:
        assert found[request.tag] == alone(model, request), request


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(["llama", "qwen2", "gemma2", "mistral", "gpt_neox", "gpt2"]),
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple),
    block=st.sampled_from([1, 3, 16, None]),
    rows=st.integers(1, 9),
    schedule=st.fixed_dictionaries(
        {
            "follow": st.sampled_from([0, 1, 16]),
            "refill": st.booleans(),
            "drafts": st.sampled_from([0, 8]),
            "budget": st.sampled_from([0, 40]),
            "prefix": st.integers(1, 6),
            "copied_prefix": st.sampled_from([0, 5, 100]),
            "static": st.booleans(),
        }
    ),
    deterministic=st.booleans(),
)
def test_any_prefixes_and_options(
    family: str, seed: int, lengths: tuple[int, ...], block: int, rows: int, schedule: Any, deterministic: bool
) -> None:
    model = model_of(family)
    requests = prefixed_requests(model, seed, lengths, prompts=4, each=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmeval_prune.decoding.engine.BLOCK", block)
        patch.setattr("lmeval_prune.decoding.prefixes.PASS", 4)
        engine = Engine(model, Letters(), max_rows=rows, deterministic=deterministic, schedule=Schedule(**schedule))
        found = answers(engine, requests)
    for request in requests:
        assert found[request.tag] == alone(model, request), request


# --------------------------------------------------------------------------- work and memory


def test_a_prefix_runs_once_for_each_mask_from_its_first_pruned_layer_up() -> None:
    """Three prompts under three masks, one token each: the prefix, then the prompts, then each mask's layers."""
    model = model_of("llama", layers=4)
    prefix = tuple(range(3, 13))
    masks = [None, HeadMask("L1H0"), HeadMask("L3H0")]
    params = SamplingParams(1, eos=())
    prompts = [(*prefix, *range(20 + 3 * i, 23 + 3 * i)) for i in range(3)]
    requests = [Request(prompt, mask, params, tag=(prompt, str(mask))) for prompt in prompts for mask in masks]
    tokens = {}
    for length in (0, 2):
        engine = Engine(model, schedule=Schedule(prefix=length, static=False, follow=0))
        tokens[length] = answers(engine, requests), engine.statistics.layer_tokens
    layers = 4 + 3 + 1
    assert tokens[0][0] == tokens[2][0]
    assert tokens[0][1] == 3 * 13 * layers
    assert tokens[2][1] == (10 + 3 * 3) * layers


def test_the_keys_of_a_prefix_are_stored_once_and_freed() -> None:
    model = model_of("llama", layers=4)
    prefix = tuple(range(3, 13))
    prompts = [(*prefix, 20 + i) for i in range(3)]
    masks = [None, HeadMask("L2H0")]
    requests = [Request(p, m, SamplingParams(2, eos=()), tag=(p, str(m))) for p in prompts for m in masks]
    stored: list[Any] = []
    engine = Engine(model, schedule=Schedule(prefix=2, static=False))
    assert engine.unsupported is None  # the check before the first run has a prefix of its own
    with pytest.MonkeyPatch.context() as patch:
        inner = SharedPrefix.under

        def under(self: SharedPrefix, *args: Any) -> Any:
            stored.append((ref(self), result := inner(self, *args)))
            return result

        patch.setattr(SharedPrefix, "under", under)
        answers(engine, requests)
    by_prefix = {id(prefix): prefix for _, prefix in stored}
    assert len({id(shared()) for shared, _ in stored}) == 1 and len(by_prefix) == 2
    dense, pruned = by_prefix.values()
    assert [a is b for a, b in zip(dense.keys, pruned.keys, strict=True)] == [True, True, False, False]
    shared = stored[0][0]
    size = shared().size(4, 1, 0)
    assert size == 10 * (4 + 2)
    freed = [ref(tensor) for prefix in by_prefix.values() for tensor in (*prefix.keys, *prefix.values)]
    stored.clear()
    del by_prefix, dense, pruned
    gc.collect()
    assert not any(tensor() is not None for tensor in freed)


@pytest.mark.parametrize("memory", [300_000, 600_000, 3_000_000])
def test_prefixes_take_at_most_half_of_the_memory(memory: int) -> None:
    """Prefixes that do not fit are not shared; the answers are the same."""
    model = model_of("llama", layers=4)
    requests = prefixed_requests(model, 5, (40, 30))
    requests = [r for r in requests if len(r.prompt) > 30] + [
        Request((*range(3, 63), 9 + i), HeadMask(f"L{i}H0"), SamplingParams(3), tag=1000 + i) for i in range(4)
    ]
    sizes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        inner = Engine._share_prefixes
        patch.setattr(Engine, "_share_prefixes", lambda *args: sizes.append(inner(*args)) or sizes[-1])
        engine = Engine(model, Letters(), memory=memory, schedule=Schedule(prefix=2, static=False))
        found = answers(engine, requests)
    assert sizes[0] <= memory // 2 and (memory < 500_000 or sizes[0] > 0)
    for request in requests:
        assert found[request.tag] == alone(model, request)


def test_a_token_filter_shares_no_prefix() -> None:
    """Its thresholds depend on all tokens before."""
    model = model_of("llama")
    requests = prefixed_requests(model, 2)
    with TokenFilter(0.4, focus="uniform", warmup=3).applied_to(model):
        shared, plain = (
            answers(Engine(model, Letters(), schedule=Schedule(prefix=prefix)), requests) for prefix in (1, 0)
        )
    assert shared == plain


def test_prefixes_of_a_few_prompts() -> None:
    prompts = [(1, 2, 3, 4), (1, 2, 3, 5), (1, 9, 9), (7, 8)]
    assert common_prefixes(prompts, 2) == {(1, 2, 3, 4): 3, (1, 2, 3, 5): 3}
    assert common_prefixes(prompts, 4) == {}
