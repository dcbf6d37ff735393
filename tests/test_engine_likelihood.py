"""Log-likelihoods by the decoding engine, against plain passes of each text alone and against lm-eval's `hf`."""

import itertools
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_decoding import BY_GENERATE, model_of
from tiny_models import CAUSAL, VOCABULARY
from torch import nn

from lmeval_prune import InputError
from lmeval_prune.architectures import map_model
from lmeval_prune.decoding import Engine, LikelihoodRequest
from lmeval_prune.decoding.token_tree import TokenTree
from lmeval_prune.interventions import HeadMask


def doubles(family: str, **changes: Any) -> nn.Module:
    return model_of(family, dtype=torch.float64, **changes)


def alone(model: nn.Module, request: LikelihoodRequest) -> tuple[list[float], bool]:
    """The reference: a plain pass of the whole text, the log-softmax written out token by token."""
    tokens = [*request.context, *request.continuation]
    with torch.no_grad(), request.mask.applied_to(model) if request.mask else nullcontext():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    logprobs, greedy = [], True
    for position in range(len(request.context), len(tokens)):
        before = logits[position - 1]
        logprobs.append(float(before[tokens[position]] - before.exp().sum().log()))
        greedy &= max(range(len(before)), key=lambda i, before=before: float(before[i])) == tokens[position]
    return logprobs, greedy


def tree_requests(model: nn.Module, seed: int, texts: int = 8, longest: int = 20) -> list[LikelihoodRequest]:
    """Requests whose contexts continue earlier texts from any token on, under random masks."""
    rng = random.Random(seed)
    layers = list(map_model(model).attention)
    heads = [f"L{layer.index}H{head}" for layer in layers for head in range(layer.heads)]
    masks = [None, *(HeadMask("+".join(rng.sample(heads, rng.randint(1, 2)))) for _ in range(3))]
    requests: list[LikelihoodRequest] = []
    texts_so_far: list[tuple[int, ...]] = [()]
    for _ in range(texts):
        base = rng.choice(texts_so_far)
        base = base[: rng.randint(0, len(base))]
        text = base + tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, longest)))
        texts_so_far.append(text)
        for _ in range(rng.randint(1, 3)):  # also equal requests, and other divisions of a text
            cut = rng.randint(1, len(text) - 1)
            end = rng.randint(cut + 1, len(text))
            for mask in rng.sample(masks, rng.randint(1, 4)):
                requests.append(LikelihoodRequest(text[:cut], text[cut:end], mask, len(requests)))
    rng.shuffle(requests)
    return requests


def check(engine: Engine, requests: list[LikelihoodRequest]) -> None:
    results = dict((request.tag, result) for request, result in engine.score(requests))
    assert sorted(results) == sorted(request.tag for request in requests)
    for request in requests:
        logprobs, greedy = alone(engine.model, request)
        assert results[request.tag].logprobs.tolist() == pytest.approx(logprobs, abs=1e-9), request
        assert results[request.tag].is_greedy == greedy, request


@pytest.fixture
def small_passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    def patch(tokens: int, block: int, logits: int) -> None:
        monkeypatch.setattr("lmeval_prune.decoding.likelihood.PASS", tokens)
        monkeypatch.setattr("lmeval_prune.decoding.likelihood.LOGITS", logits)
        monkeypatch.setattr("lmeval_prune.decoding.tree_attention.BLOCK", block)

    return patch


@pytest.mark.parametrize("family", sorted(set(CAUSAL) - BY_GENERATE))
def test_every_family_scores_as_each_text_alone(family: str, small_passes: Any) -> None:
    small_passes(25, 8, 5 * VOCABULARY)
    check(Engine(doubles(family)), tree_requests(doubles(family), seed=1))


@pytest.mark.parametrize("block", [0, 6, 128])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 6}),
        ("gemma2", {"sliding_window": 5}),
        ("gemma3_text", {"sliding_window": 5}),
        ("olmo3", {"sliding_window": 3}),
        ("cohere2", {"sliding_window": 5}),
    ],
)
def test_sliding_windows_shorter_than_the_context(
    family: str, changes: dict[str, Any], block: int, small_passes: Any
) -> None:
    small_passes(30, block, 1 << 25)
    model = doubles(family, **changes)
    check(Engine(model), tree_requests(model, seed=2, longest=30))
