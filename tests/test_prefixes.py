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
from test_decoding import answers, check, model_of, some_requests
from tiny_models import BY_GENERATE, CAUSAL, VOCABULARY, Letters, quick

from lmeval_prune import InputError
from lmeval_prune.decoding import Engine, Request, SamplingParams, Schedule
from lmeval_prune.decoding.groups import SharedPrefix, common_prefixes
from lmeval_prune.decoding.kv_cache import AttentionOptions, join_attention
from lmeval_prune.interventions import HeadMask

WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 6}),
    ("gemma2", {"sliding_window": 5}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    ("cohere2", {"sliding_window": 5}),
]


def prefixed_requests(
    model: Any, seed: int, lengths: tuple[int, ...] = (7, 3), prompts: int = 6, each: int = 4
) -> list[Request]:
    """Return requests whose prompts begin with one of several prefixes, and some without."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(3, VOCABULARY) for _ in range(length)) for length in lengths]
    by_prompt: dict[tuple[int, ...], tuple[int, ...]] = {}
    order = itertools.cycle([prefixes[0], *prefixes, ()])
    requests = []
    for request in some_requests(model, seed, prompts, per_prompt=each):
        if request.prompt not in by_prompt:
            by_prompt[request.prompt] = next(order)
        prefix = by_prompt[request.prompt]
        requests.append(Request((*prefix, *request.prompt), request.mask, request.params, tag=request.tag))
    return requests


# --------------------------------------------------------------------------- the choice of prefixes


LAYERS = 4
Masks = dict[tuple[int, ...], list[tuple[int, int]]]  # by prompt: numbers of masks, and their first pruned layers


def layers_run(masks: list[tuple[int, int]]) -> int:
    """Count the layers that run a token: the mask that is pruned highest runs all, the others those above."""
    firsts = sorted((first for _, first in masks), reverse=True)
    return LAYERS + sum(LAYERS - first for first in firsts[1:])


def most_saved(prompts: Masks, least: int, only_whole: bool) -> int:
    """Return the tokens × layers that the best division of the sorted prompts saves; all divisions are tried.

    With `only_whole`, a prefix is shared by all longer prompts that begin with it, or by none.
    """
    ordered, best = sorted(prompts), 0
    for ends in product([False, True], repeat=len(ordered) - 1):
        groups = [[ordered[0]]]
        for prompt, is_new in zip(ordered[1:], ends, strict=True):
            groups.append([prompt]) if is_new else groups[-1].append(prompt)
        saved = 0
        for group in groups:
            depth = next(n for n in range(min(map(len, group)) - 1, -1, -1) if len({p[:n] for p in group}) == 1)
            separate = sum(layers_run(prompts[prompt]) for prompt in group)
            masks = {number: first for prompt in group for number, first in prompts[prompt]}
            together = depth * (separate - layers_run(list(masks.items())))
            alike = [p for p in prompts if len(p) > depth and p[:depth] == group[0][:depth]]
            is_allowed = len(group) > 1 and (len(alike) == len(group) or not only_whole)
            saved += together if is_allowed and together >= least * LAYERS else 0
        best = max(best, saved)
    return best


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.dictionaries(
        st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple),
        st.lists(st.integers(0, LAYERS).map(lambda first: (first, first)), min_size=1, max_size=4),
        min_size=1,
        max_size=8,
    ),
    least=st.integers(1, 9),
)
def test_the_chosen_prefixes_save_most(prompts: Masks, least: int) -> None:
    prefixes = common_prefixes(prompts, LAYERS, least)
    sharing = [prompt for prefix in prefixes for prompt in prefix.prompts]
    assert len(sharing) == len(set(sharing))
    for prefix in prefixes:
        assert len(prefix.prompts) > 1 and prefix.tokens and prefix.saved >= least * LAYERS
        assert all(prompt[: len(prefix.tokens)] == prefix.tokens != prompt for prompt in prefix.prompts)
    saved = sum(prefix.saved for prefix in prefixes)
    assert most_saved(prompts, least, only_whole=True) <= saved <= most_saved(prompts, least, only_whole=False)


def single_mask(prompts: list[tuple[int, ...]]) -> Masks:
    return {prompt: [(0, LAYERS)] for prompt in prompts}


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


@pytest.mark.parametrize("family", quick(sorted(CAUSAL.keys() - BY_GENERATE), "gpt2", "gemma3_text", "mixtral"))
def test_every_family_gives_what_generate_gives(family: str) -> None:
    """One of two prefixes is copied into slots, the other is not."""
    model = model_of(family)
    schedule = Schedule(prefix=2, copied_prefix=4)
    engine = Engine(model, Letters(), max_rows=5, schedule=schedule)
    requests = prefixed_requests(model, seed=1)
    assert common_prefixes(single_mask([request.prompt for request in requests]), LAYERS, 2)
    check(engine, requests, model)


@pytest.mark.parametrize(
    ("window", "length", "copied"),
    [
        pytest.param(*case, marks=pytest.mark.long if i % 5 else ())
        for i, case in enumerate(itertools.product(WINDOWS, [2, 5, 9], [0, 100]))
    ],
)
def test_sliding_windows(window: tuple[str, dict[str, Any]], length: int, copied: int) -> None:
    """Windows that end within the prefix, at its end and after it."""
    family, changes = window
    model = model_of(family, **changes)
    requests = prefixed_requests(model, length, (length,))
    check(Engine(model, Letters(), schedule=Schedule(prefix=1, copied_prefix=copied)), requests, model)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(["llama", "qwen2", "gemma2", "mistral", "gpt_neox", "gpt2"]),
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple),
    block=st.sampled_from([1, 3, 16, None]),
    rows=st.integers(1, 9),
    schedule=st.fixed_dictionaries(
        {
            "prefix": st.integers(1, 6),
            "copied_prefix": st.sampled_from([0, 5, 100]),
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
        patch.setattr("lmeval_prune.decoding.model_runner.PASS", 4)
        engine = Engine(model, Letters(), max_rows=rows, deterministic=deterministic, schedule=Schedule(**schedule))
        check(engine, requests, model)


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
        engine = Engine(model, schedule=Schedule(prefix=length))
        tokens[length] = answers(engine, requests), engine.statistics.layer_tokens
        assert engine.statistics.head_tokens == len(requests)  # no logits of the prefix
    layers = 4 + 3 + 1
    assert tokens[0][0] == tokens[2][0]
    assert tokens[0][1] == 3 * 13 * layers
    assert tokens[2][1] == (10 + 3 * 3) * layers


@pytest.mark.parametrize("copied", [0, 100])
def test_the_keys_of_a_prefix_are_stored_once_and_freed_after_its_last_answer(copied: int) -> None:
    """Layers below a mask's first share tensors; a second prompt without a prefix is still decoded afterwards."""
    model = model_of("llama", layers=4)
    prefix = tuple(range(3, 13))
    prompts = [(*prefix, 20 + i) for i in range(3)]
    masks = [None, HeadMask("L2H0")]
    requests = [
        Request(p, m, SamplingParams(2 + 3 * i, eos=()), tag=(p, str(m))) for i, p in enumerate(prompts) for m in masks
    ]
    requests.append(Request((40, 41), None, SamplingParams(30, eos=()), tag="last"))
    engine = Engine(model, schedule=Schedule(prefix=2, copied_prefix=copied))
    assert engine.unsupported is None  # the check before the first run has a prefix of its own
    stored: dict[int, tuple[Any, ...]] = {}
    with pytest.MonkeyPatch.context() as patch:
        inner = SharedPrefix.for_mask

        def for_mask(self: SharedPrefix, mask: int, *args: Any) -> Any:
            result = inner(self, mask, *args)
            stored[mask] = tuple(ref(tensor) for layer in result.layers for tensor in (layer.keys, layer.values))
            sizes.add(self.size(4, 1, 0))
            return result

        sizes: set[int] = set()
        patch.setattr(SharedPrefix, "for_mask", for_mask)
        answered = 0
        for request, _ in engine.decode(requests):
            answered += 1
            dense, pruned = stored.values()
            if answered == 1:
                assert [a() is b() for a, b in zip(dense, pruned, strict=True)] == [True] * 4 + [False] * 4
            if answered == len(requests) - 1:
                gc.collect()
                assert request.tag != "last" and not any(tensor() is not None for tensor in (*dense, *pruned))
    assert answered == len(requests) and sizes == {10 * (4 + 2)}


def test_a_memory_that_is_too_small_for_prefixes_decodes_without_them() -> None:
    """A long prompt needs nearly all of it."""
    model = model_of("llama", layers=4)
    requests = [Request((*range(3, 14), 20 + i), HeadMask(f"L{i % 3}H0"), SamplingParams(2), tag=i) for i in range(16)]
    requests.append(Request(tuple(3 + i % 40 for i in range(110)), None, SamplingParams(2), tag=16))
    slot = 112 * Engine(model)._token_bytes
    engine = Engine(model, memory=int(1.02 * slot), schedule=Schedule(prefix=2))
    check(engine, requests, model)
    with pytest.raises(InputError, match="more than memory="):
        answers(Engine(model, memory=slot // 2, schedule=Schedule(prefix=2)), requests)
