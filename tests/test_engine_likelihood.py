"""Log-likelihoods by the decoding engine, against plain passes of each text alone and against lm-eval's `hf`."""

import logging
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from test_decoding import model_of
from tiny_models import BY_GENERATE, CAUSAL, VOCABULARY, quick
from torch import nn

from lmeval_prune import InputError
from lmeval_prune.architectures import map_model
from lmeval_prune.decoding import Engine, LikelihoodRequest
from lmeval_prune.decoding.tree import TokenTree
from lmeval_prune.grid.worker import VariantLM
from lmeval_prune.interventions import HeadMask
from lmeval_prune.interventions.token_filter import TokenFilter
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.tasks import compat
from tests.covers import crossed
from tests.test_pruned_hf import model as pruned_hf


def doubles(family: str, **changes: Any) -> nn.Module:
    return model_of(family, dtype=torch.float64, **changes)


@pytest.fixture(autouse=True)
def softmax_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention of transformers rounds to float32; the reference must not."""
    softmax = nn.functional.softmax

    def unrounded(x: torch.Tensor, *args: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
        return softmax(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **options)

    monkeypatch.setattr(nn.functional, "softmax", unrounded)


def alone(model: nn.Module, request: LikelihoodRequest) -> tuple[list[float], bool]:
    """The reference: a plain pass of the whole text, the log-softmax written out token by token."""
    tokens = [*request.context, *request.continuation]
    with torch.no_grad(), request.mask.applied_to(model) if request.mask else nullcontext():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    logprobs, greedy = [], True
    for position in range(len(request.context), len(tokens)):
        before = logits[position - 1]
        logprobs.append(float(before[tokens[position]] - before.exp().sum().log()))
        greedy &= max(range(len(before)), key=before.tolist().__getitem__) == tokens[position]
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
    results = {request.tag: result for request, result in engine.score(requests)}
    assert sorted(results) == sorted(request.tag for request in requests)
    for request in requests:
        logprobs, greedy = alone(engine.model, request)
        assert results[request.tag].logprobs.tolist() == pytest.approx(logprobs, abs=1e-9), request
        assert results[request.tag].is_greedy == greedy, request


def small_passes(patch: pytest.MonkeyPatch, tokens: int, block: int, logits: int) -> None:
    patch.setattr("lmeval_prune.decoding.likelihood.PASS", tokens)
    patch.setattr("lmeval_prune.decoding.likelihood.LOGITS", logits)
    patch.setattr("lmeval_prune.decoding.tree.BLOCK", block)


@pytest.mark.parametrize("family", quick(sorted(set(CAUSAL) - BY_GENERATE), "gpt2", "gemma3_text", "mixtral"))
def test_every_family_scores_as_each_text_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_passes(monkeypatch, 25, 8, 5 * VOCABULARY)
    check(Engine(doubles(family)), tree_requests(doubles(family), seed=1))


@crossed(
    {"block": [0, 6, 128], "window": [("mistral", 6), ("gemma2", 5), ("gemma3_text", 5), ("olmo3", 3), ("cohere2", 5)]},
    ids=str,
)
def test_sliding_windows_shorter_than_the_context(
    block: int, window: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_passes(monkeypatch, 30, block, 1 << 25)
    model = doubles(window[0], sliding_window=window[1])
    check(Engine(model), tree_requests(model, seed=2, longest=30))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(["llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "deepseek_v3"]),
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 60),
    block=st.sampled_from([0, 1, 5, 16, 128]),
    rows=st.integers(1, 20),
    memory=st.sampled_from([1, 100_000, 1 << 30]),
)
def test_any_tree_in_any_passes(family: str, seed: int, tokens: int, block: int, rows: int, memory: int) -> None:
    model = doubles(family)
    with pytest.MonkeyPatch.context() as patch:
        small_passes(patch, tokens, block, rows * VOCABULARY)
        check(Engine(model, memory=memory), tree_requests(model, seed))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1), st.integers(1, 4))
def test_a_tree_has_each_prefix_once(sequences: list[tuple[int, ...]], longest: int) -> None:
    tree = TokenTree(sequences, longest)
    prefixes = {sequence[:end] for sequence in sequences for end in range(1, len(sequence) + 1)}
    assert sum(len(segment.tokens) for segment in tree.segments) == len(prefixes)
    assert max(len(segment.tokens) for segment in tree.segments) <= longest
    for sequence in sequences:
        path = [tree.segments[number] for number in tree.path(sequence)]
        assert sum((segment.tokens for segment in path), ())[: len(sequence)] == sequence
        assert [segment.start for segment in path] == [sum(len(s.tokens) for s in path[:i]) for i in range(len(path))]
    for number, segment in enumerate(tree.segments):
        below = {number}
        below |= {i for i in range(len(tree.segments)) if ancestors(tree, i) & {number}}
        assert below == set(range(number, segment.end))
    for most in (1, 3, 8):
        passes = list(tree.passes(most))
        assert [number for part in passes for number in part] == list(range(len(tree.segments)))
        sizes = [sum(len(tree.segments[number].tokens) for number in part) for part in passes]
        assert all(size <= most or len(part) == 1 for size, part in zip(sizes, passes, strict=True))


def ancestors(tree: TokenTree, number: int) -> set[int]:
    parent = tree.segments[number].parent
    return set() if parent is None else {parent, *ancestors(tree, parent)}


def test_common_tokens_run_once_and_masks_from_their_first_layer_up() -> None:
    model = model_of("llama")
    shots, question = (5, 6, 7, 8), (9, 10)
    texts = [((*shots, *question), (11, 12)), ((*shots, *question), (13, 14, 15)), ((*shots, 20), (21,))]
    masks = [None, HeadMask("L1H0"), HeadMask("L3H0")]
    engine = Engine(model)
    list(engine.score([LikelihoodRequest(*text, mask) for text in texts for mask in masks]))
    distinct = 4 + 2 + 1 + 2 + 1  # the last token of each text does not run
    assert engine.statistics.layer_tokens == distinct * (4 + 3 + 1)
    assert engine.statistics.head_tokens == (1 + 1 + 2 + 1) * 3  # the first tokens of two choices have the same logits
    assert engine.statistics.scored == 9


# --------------------------------------------------------------------------- through lm-eval

HEADS = "L0H1+L1H2-3"
WORDS = ["How many?", "x", "Two plus two is", "Two plus", "Round and round and round", "word " * 30]


def instances(kind: str) -> list[Instance]:
    """Make requests: also an empty context, a context that ends in spaces, equal requests, an empty text."""
    pairs: list[Any] = [(prompt, choice) for prompt in [*WORDS, "", "Two  "] for choice in ("a", "b", " yes indeed")]
    arguments = [*pairs, pairs[0]] if kind == "loglikelihood" else [(word,) for word in [*WORDS, "", WORDS[0]]]
    return [compat.request(kind, args, "toy", i) for i, args in enumerate(arguments)]


KINDS = ["loglikelihood", "loglikelihood_rolling"]


def assert_close(kind: str, responses: list[Any], expected: list[Any], tolerance: float = 1e-9) -> None:
    if kind == "loglikelihood":
        assert [greedy for _, greedy in responses] == [greedy for _, greedy in expected]
        responses, expected = [value for value, _ in responses], [value for value, _ in expected]
    assert responses == pytest.approx(expected, abs=tolerance)


@crossed(
    {
        "kind": KINDS,
        "arguments": [{}, {"heads": HEADS}, {"max_length": 13}, {"add_bos_token": True}, {"logits_cache": False}],
    },
    times=2,
    ids=str,
)
def test_the_engine_scores_as_hf(tiny_folder: Path, kind: str, arguments: dict[str, Any]) -> None:
    expected = getattr(pruned_hf(tiny_folder, **arguments), kind)(instances(kind))
    lm = pruned_hf(tiny_folder, engine="batched", **arguments)
    lm._world_size = 2  # no rank waits for another
    assert_close(kind, getattr(lm, kind)(instances(kind)), expected)
    assert lm.engine.statistics.scored >= len(expected) - 1  # an empty text needs no pass


@pytest.mark.parametrize("softmax_dtype", [None, "float32"])
def test_the_log_softmax_has_hfs_type(tiny_folder: Path, softmax_dtype: str | None) -> None:
    arguments: dict[str, Any] = {"dtype": "bfloat16", **({"softmax_dtype": softmax_dtype} if softmax_dtype else {})}
    expected = HFLM(str(tiny_folder), device="cpu", **arguments).loglikelihood(instances("loglikelihood"))
    values = pruned_hf(tiny_folder, engine="batched", **arguments).loglikelihood(instances("loglikelihood"))
    assert [value for value, _ in values] == pytest.approx([value for value, _ in expected], rel=0.05)
    rounded = [value == float(torch.tensor(value, dtype=torch.bfloat16)) for value, _ in values]
    assert all(rounded) == (softmax_dtype is None)


@pytest.mark.parametrize("length", [5, 20])
def test_a_continuation_without_room_is_refused(tiny_folder: Path, length: int) -> None:
    lm = pruned_hf(tiny_folder, engine="batched", max_length=10)
    request = compat.request("loglikelihood", ("a", "b" * length), "toy", 7)
    if length <= 10:
        expected = pruned_hf(tiny_folder, max_length=10).loglikelihood([request])
        assert_close("loglikelihood", lm.loglikelihood([request]), expected)
        return
    with pytest.raises(InputError, match=r"task toy, document 7: .*the continuation 20.*at most 10"):
        lm.loglikelihood([request])


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_answered_ahead(tiny_folder: Path, tmp_path: Path, kind: str) -> None:
    """A later run of a mask alone has its answers in the store, with the engine and without."""
    heads = [None, "L0H1", "L1H2-3"]
    settings = {"pretrained": str(tiny_folder), "dtype": "float64", "device": "cpu", "engine": "batched"}
    lm = VariantLM(Arguments.of({**settings, "responses": str(tmp_path / "s")}))
    lm.job_masks = tuple(HeadMask(head) if head else None for head in heads)
    getattr(lm, kind)(instances(kind))
    assert lm.engine.statistics.scored > 0
    lm.close()
    for head in heads:
        expected = getattr(pruned_hf(tiny_folder, heads=head), kind)(instances(kind))
        for engine in ("batched", "generate"):
            again = pruned_hf(tiny_folder, heads=head, engine=engine, responses=str(tmp_path / "s"), batch_size=1)
            before = len(again.store.responses)
            assert_close(kind, getattr(again, kind)(instances(kind)), expected)
            assert len(again.store.responses) == before
            again.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_engine_cannot_score_is_left_to_hf(
    tiny_folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = getattr(pruned_hf(tiny_folder, token_filter=0.4), kind)(instances(kind))
    lm = pruned_hf(tiny_folder, token_filter=0.4, engine="batched")
    assert isinstance(lm.arguments.interventions[0], TokenFilter)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert getattr(lm, kind)(instances(kind)) == expected
    lines = [record.message for record in caplog.records if "hf computes" in record.message]
    assert len(lines) == 1 and "the effect of TokenFilter on a token depends on other tokens" in lines[0]
