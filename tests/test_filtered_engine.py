"""The decoding engine on filtered models, against `generate` of each request alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmeval_prune import HeadMask
from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding import Engine, Request, SamplingParams, Schedule
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.interventions import Intervention, interventions_on
from lmeval_prune.interventions.attention_call import Attend, AttentionCall, intercept_attention
from lmeval_prune.interventions.token_filter import TokenFilter
from lmeval_prune.kernels import token_filter as ops
from tests.test_decoding import alone, answers, check, model_of, some_requests
from tests.tiny_models import Letters, tiny

QUICK = {"ratio": 0.4, "focus": "uniform", "warmup": 3}
# Of families that share code one runs by default, with or without skipped keys.
CASES = [
    ("llama", {}),
    ("gpt2", {}),
    ("deepseek_v3", {}),
    ("mistral", {"sliding_window": 6}),
    ("gemma2", {"sliding_window": 5}),
]
OTHERS = [("qwen2", {}), ("qwen3", {}), ("phi3", {}), ("gemma3_text", {"sliding_window": 5})]
FAMILIES = [
    pytest.param(family, changes, keep, marks=[] if keep == number % 2 and number < 5 else pytest.mark.long)
    for number, (family, changes) in enumerate([*CASES, *OTHERS])
    for keep in (False, True)
]


def plain(requests: list[Request]) -> list[Request]:
    """Without stop texts, which `alone` only cuts off afterwards."""
    return [Request(r.prompt, r.mask, SamplingParams(r.params.max_new_tokens, ()), tag=r.tag) for r in requests]


def counts(model: Any) -> dict[str, Counter[str]]:
    return {label: Counter(count) for label, count in interventions_on(model)[0].counts.items()}


@pytest.mark.parametrize(("family", "changes", "keep"), FAMILIES)
def test_every_family_gives_what_generate_gives(family: str, changes: dict[str, Any], keep: bool) -> None:
    """More requests than slots, several of a prompt under different masks, ends at any time."""
    model = model_of(family, **changes)
    requests = some_requests(model, seed=1, longest=20)
    dense = answers(Engine(model, Letters()), requests)
    with TokenFilter(**QUICK, keep_skipped_kv=keep).applied_to(model):
        engine = Engine(model, Letters(), max_rows=3)
        assert engine.unsupported is None
        assert check(engine, requests, model) != dense


@pytest.mark.parametrize("options", [{"similarity": "random"}, {"phase": "decode"}], ids=str)
def test_chance_and_answers_alone_give_what_generate_gives(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a token is decided in a batch of one."""
    monkeypatch.setattr("lmeval_prune.decoding.scheduler.near_tied_argmax", lambda logits: logits.argmax(-1) % 3 == 0)
    model = model_of("llama")
    requests = some_requests(model, seed=1, longest=20)
    dense = answers(Engine(model, Letters()), requests)
    for deterministic in (False, True):
        with TokenFilter(**QUICK, **options).applied_to(model):
            assert check(Engine(model, Letters(), max_rows=3, deterministic=deterministic), requests, model) != dense


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    block=st.sampled_from([1, 2, 3, 16, None]),
    rule=st.fixed_dictionaries(
        {
            "ratio": st.sampled_from([0.2, 0.5]),
            "focus": st.sampled_from(["tail", "uniform", "head"]),
            "warmup": st.sampled_from([1, 4]),
            "keep_skipped_kv": st.booleans(),
        }
    ),
    rows=st.integers(1, 9),
    share=st.booleans(),
    deterministic=st.booleans(),
)
def test_any_options_and_order_give_what_generate_gives(
    seed: int, block: int, rule: dict[str, Any], rows: int, share: bool, deterministic: bool
) -> None:
    """Answers, and what was skipped by layer, shared prompts counted for each."""
    model = model_of("llama")
    requests = plain(some_requests(model, seed, prompts=3, per_prompt=4))
    with pytest.MonkeyPatch.context() as patch, TokenFilter(**rule).applied_to(model):
        patch.setattr("lmeval_prune.decoding.engine.BLOCK", block)
        engine = Engine(model, schedule=Schedule(share), max_rows=rows, deterministic=deterministic)
        result, done = answers(engine, requests), counts(model)
        assert result == {request.tag: alone(model, request) for request in requests}
        assert {label: now - done[label] for label, now in counts(model).items()} == done


class Counted:
    """How many tokens of each slot's sequence attended so far; a `SlotState`."""

    def __init__(self, slots: int) -> None:
        self.seen = [0] * slots

    def begin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.seen[slot] = 0

    def move(self, source: int, target: int) -> None:
        self.seen[target] = self.seen[source]

    def snapshot(self, slot: int) -> int:
        return self.seen[slot]

    def restore(self, slot: int, taken: int) -> None:
        self.seen[slot] = taken


@dataclass(frozen=True)
class Halved(Intervention):
    """Halves the attention of every third token of a sequence that attends. Asks the store twice a pass."""

    by_sequence = True

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        def handler(call: AttentionCall, attend: Attend) -> Any:
            out, weights = attend(call)
            if call.store is None:  # a whole text, without a cache
                positions = torch.arange(out.shape[1])
            else:
                query_mask = (torch.ones(out.shape[1]) if call.query_mask is None else call.query_mask).long()
                positions, at = torch.zeros_like(query_mask), 0
                for slot, count in zip(call.store.packed.slots, call.store.packed.counts, strict=True):
                    before = call.store.state(call, self, lambda: Counted(call.store.count))  # type: ignore[union-attr]
                    here = slice(at, at + count)
                    positions[here] = before.seen[slot] + query_mask[here].cumsum(0) - 1
                    before.seen[slot] += int(query_mask[here].sum())
                    at += count
            return out * torch.where(positions % 3 == 2, 0.5, 1.0).to(out.dtype)[None, :, None, None], weights

        intercept_attention(model_map, handler, stack)


@pytest.mark.parametrize(("first", "keep"), [(False, True), (True, False)])
def test_two_methods_remember_what_they_remember(first: bool, keep: bool) -> None:
    """Each for itself, in the same layers, in either order; slots move, prompts are shared."""
    model = model_of("llama")
    masks = (None, HeadMask("L1H1"), HeadMask("L3H0"))
    requests = [
        Request(tuple(range(5 + n, 11 + 3 * n)), mask, SamplingParams(4 + 3 * n, ()), tag=(n, i))
        for n in range(3)
        for i, mask in enumerate(masks)
    ]
    both = (Halved(), TokenFilter(**QUICK, keep_skipped_kv=keep))
    with ExitStack() as stack:
        for method in both if first else both[::-1]:
            stack.enter_context(method.applied_to(model))
        engine = Engine(model, max_rows=4)
        assert engine.unsupported is None
        result = answers(engine, requests)
        for request in requests:
            text = list(request.prompt)
            with request.mask.applied_to(model) if request.mask else nullcontext(), torch.inference_mode():
                while len(text) < len(request.prompt) + request.params.max_new_tokens:
                    text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
            assert result[request.tag] == text[len(request.prompt) :], request


def test_decisions_where_the_tensors_are_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, without its kernels."""
    model, results = model_of("llama"), []
    requests = some_requests(model, seed=4, prompts=3)
    for on_device in (False, True):
        monkeypatch.setattr(ops, "on_device", lambda _, on_device=on_device: on_device)
        with TokenFilter(**QUICK).applied_to(model):
            results.append((answers(Engine(model, Letters(), max_rows=4), requests), counts(model)))
    assert results[0] == results[1]


def test_a_slot_holds_what_was_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, caches = model_of("llama"), []
    monkeypatch.setattr(KVCache, "move", lambda *_: None)  # one answer, never moved
    inner = KVCache.__init__
    monkeypatch.setattr(KVCache, "__init__", lambda self, *args: (inner(self, *args), caches.append(self))[0])
    with TokenFilter(**{**QUICK, "focus": "tail"}).applied_to(model):
        engine = Engine(model)
        assert engine.unsupported is None
        list(engine.decode([Request(tuple(range(5, 25)), None, SamplingParams(21, ()))]))
        done = counts(model)
    cache = caches[-1]
    assert set(cache.lengths) == {2, 3}  # of 4 layers, the last two filter
    for layer, label in ((2, "L2"), (3, "L3")):
        held = int(cache.lengths[layer][0])
        assert held == done[label]["tokens"] - done[label]["skipped"] < done[label]["tokens"] == 40
        assert not cache.keys[layer][0, :, held:].any()
        places = cache.positions[layer][0, :held]
        assert (places.diff() > 0).all() and places[-1] < 40


def test_a_lone_skipped_token_that_is_stored_all_the_same_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What most steps of filtered models are: one new token a slot. Its keys are stored."""
    inner = KVCache.attend

    def keeping(self: KVCache, call: Any) -> Any:
        counts = torch.tensor(self.packed.counts)
        return inner(self, replace(call, stored_mask=call.stored_mask | (counts == 1).repeat_interleave(counts)))

    for dtype in (torch.float64, torch.bfloat16):
        model = tiny("llama", dtype=dtype)
        with TokenFilter(0.3, focus="uniform").applied_to(model):
            with monkeypatch.context() as patch:
                patch.setattr(KVCache, "attend", keeping)
                assert "logits would differ" in str(Engine(model).unsupported)
            assert Engine(model).unsupported is None
