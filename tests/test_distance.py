"""The distance from the dense model: against a literal reference in float64, and through the command."""

from __future__ import annotations

import copy
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_engine_likelihood import doubles, softmax_in_float64  # noqa: F401
from tiny_models import VOCABULARY
from torch import nn
from transformers import AutoTokenizer

from lmeval_prune import HeadMask, Plan, cut, load_pretrained, map_model
from lmeval_prune.cli import main
from lmeval_prune.comparison.distance import COLUMNS, first_difference, summarize_answers, summarize_tokens
from lmeval_prune.comparison.options import DistanceOptions
from lmeval_prune.comparison.tokens import Text, logits_of, pass_distances, reduce_distances, token_distances
from lmeval_prune.comparison.variants import frames_of, write
from lmeval_prune.decoding import Engine
from lmeval_prune.reporting.statistics import clustered_means
from tests.conftest import strict_json, task_manager


def some_masks(model: nn.Module, count: int, seed: int = 0) -> dict[str, HeadMask]:
    rng = random.Random(seed)
    heads = [f"L{layer.index}H{head}" for layer in map_model(model).attention for head in range(layer.heads)]
    return {f"mask {i}": HeadMask("+".join(rng.sample(heads, rng.randint(1, 3)))) for i in range(count)}


def some_texts(count: int, seed: int = 0, longest: int = 12) -> list[Text]:
    """Texts that begin with the same tokens, two for each document."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(4)]
    texts = []
    for number in range(count):
        tokens = shared[: rng.randint(0, 4)] + [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(2, longest))]
        cut = rng.randint(1, len(tokens) - 1)
        texts.append(Text(tuple(tokens[:cut]), tuple(tokens[cut:]), ("task", number // 2)))
    return texts


def under_masks(engine: Engine, masks: dict[str, HeadMask], texts: list[Text]) -> dict[str, list[torch.Tensor]]:
    return token_distances(engine, {name: [mask] for name, mask in masks.items()}, texts)


def reference_distances(model: nn.Module, mask: HeadMask, text: Text) -> list[list[float]]:
    """The definitions, written out: one plain pass each, a loop over tokens and the vocabulary."""
    tokens = [*text.context, *text.continuation]
    with torch.no_grad():
        dense = torch.log_softmax(model(torch.tensor([tokens]), use_cache=False).logits[0], -1).tolist()
        with mask.applied_to(model):
            pruned = torch.log_softmax(model(torch.tensor([tokens]), use_cache=False).logits[0], -1).tolist()
    rows = []
    for position in range(len(text.context), len(tokens)):
        p, q, token = dense[position - 1], pruned[position - 1], tokens[position]
        kld = 0.0
        for x in range(len(p)):
            kld += math.exp(p[x]) * (p[x] - q[x])
        same = float(p.index(max(p)) == q.index(max(q)))
        rows.append([kld, same, math.exp(q[token]) - math.exp(p[token]), q[token] - p[token]])
    return rows


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_ten_masks_in_a_batch_are_as_far_as_the_definitions_say(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmeval_prune.decoding.likelihood.PASS", 20)
    monkeypatch.setattr("lmeval_prune.decoding.likelihood.LOGITS", 40 * VOCABULARY)  # five rows a chunk
    model = doubles(family)
    masks, texts = some_masks(model, 10), some_texts(6)
    distances = under_masks(Engine(model), masks, texts)
    assert list(distances) == list(masks)
    for name, mask in masks.items():
        for text, values in zip(texts, distances[name], strict=True):
            assert values.dtype == torch.float64
            expected = reference_distances(model, mask, text)
            assert values.tolist() == [pytest.approx(row, abs=1e-9) for row in expected]


@pytest.mark.parametrize("memory", [1, 100_000])
def test_masks_that_do_not_fit_together_run_one_group_after_another(memory: int) -> None:
    model = doubles("llama")
    masks, texts = some_masks(model, 4), some_texts(5, seed=1)
    whole, parts = (under_masks(Engine(model, memory=size), masks, texts) for size in (1 << 30, memory))
    for name in masks:
        for a, b in zip(whole[name], parts[name], strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_a_model_that_the_engine_does_not_run_takes_plain_passes() -> None:
    model = doubles("bloom")
    engine = Engine(model)
    assert engine.unscored
    masks, texts = some_masks(model, 2), some_texts(3)
    for name, values in under_masks(engine, masks, texts).items():
        for text, rows in zip(texts, values, strict=True):
            expected = reference_distances(model, masks[name], text)
            assert rows.tolist() == [pytest.approx(row, abs=1e-9) for row in expected]


LOGITS = st.integers(0, 10**6).map(lambda seed: 3 * torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(seed)))


@given(LOGITS, st.integers(1, 5))
def test_kld_is_zero_for_the_same_logits_never_negative_and_additive_over_chunks(pair: torch.Tensor, cut: int) -> None:
    dense, other = pair
    tokens = torch.arange(6)
    same, shifted, values = reduce_distances(tokens, iter([dense, dense, dense + 2.5, other]))
    assert same.tolist() == [[0, 1, 0, 0]] * 6
    assert shifted[:, 0].abs().max() < 1e-6
    assert values[:, 0].min() >= 0
    parts = [
        next(reduce_distances(tokens[rows], iter([dense[rows], other[rows]]))) for rows in (slice(cut), slice(cut, 6))
    ]
    assert torch.cat(parts).equal(values)


def test_tokens_without_probability_do_not_count() -> None:
    dense = torch.tensor([[0.0, -math.inf, 0.0], [0.0, 0.0, 0.0]])
    other = torch.tensor([[0.0, -math.inf, 1.0], [0.0, -math.inf, 0.0]])
    (values,) = reduce_distances(torch.tensor([0, 0]), iter([dense, other]))
    p = 1 / (1 + math.e)
    assert values[0, 0] == pytest.approx(0.5 * math.log(0.5 / p) + 0.5 * math.log(0.5 / (1 - p)))
    assert values[1, 0] == math.inf


def test_two_checkpoints_take_plain_passes() -> None:
    dense = doubles("llama")
    other = copy.deepcopy(dense)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    texts = some_texts(3, longest=90)  # more tokens than a chunk
    results = pass_distances(logits_of(dense), {"same": logits_of(dense), "other": logits_of(other)}, texts)
    for name, rows in results.items():
        for text, values in zip(texts, rows, strict=True):
            assert values.shape == (len(text.continuation), len(COLUMNS))
            assert (values[:, 0] > 0).all() == (name == "other")


# --------------------------------------------------------------------------- summaries


def test_errors_are_those_of_the_ratio_estimator() -> None:
    """Against the jackknife over clusters, with which it agrees for many clusters, and against independent rows."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 400)
    clusters = np.repeat(np.arange(400), sizes)
    values = (rng.normal(size=400)[clusters] + rng.normal(size=len(clusters)))[:, None]
    means, errors = clustered_means(values, clusters.tolist())
    assert means[0] == pytest.approx(values.mean())
    without = np.array([values[clusters != number].mean() for number in range(400)])
    assert errors[0] == pytest.approx(np.sqrt(399 / 400 * ((without - without.mean()) ** 2).sum()), rel=0.02)
    _, alone = clustered_means(values, list(range(len(values))))
    assert alone[0] == pytest.approx(values.std(ddof=1) / np.sqrt(len(values)))
    assert errors[0] > 1.5 * alone[0]
    assert np.isnan(clustered_means(values, [0] * len(values))[1]).all()


def test_a_summary_of_tokens() -> None:
    rng = np.random.default_rng(1)
    tokens = np.stack(
        [rng.exponential(size=50), rng.integers(0, 2, 50), rng.normal(size=50) / 9, rng.normal(size=50)], 1
    )
    summary = summarize_tokens(tokens, [i // 5 for i in range(50)])
    assert summary["documents"] == 10 and summary["tokens"] == 50
    assert summary["mean_kld"] == pytest.approx(sum(tokens[:, 0]) / 50)
    assert summary["median_kld"] == pytest.approx(sorted(tokens[:, 0])[24:26][0] / 2 + sorted(tokens[:, 0])[25] / 2)
    assert summary["max_kld"] == max(tokens[:, 0])
    assert summary["same_top"] == sum(tokens[:, 1]) / 50
    assert summary["rms_delta_p"] == pytest.approx(math.sqrt(sum(x * x for x in tokens[:, 2]) / 50))
    assert summary["ppl_ratio"] == pytest.approx(math.exp(-sum(tokens[:, 3]) / 50))
    assert all(summary[f"{name}_se"] > 0 for name in ("mean_kld", "same_top", "rms_delta_p", "ppl_ratio"))
    alone = summarize_tokens(tokens, [0] * 50)
    assert alone["mean_kld"] == summary["mean_kld"] and alone["mean_kld_se"] is None and alone["rms_delta_p_se"] is None


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 2), ([1], [2], 1), ([1, 2], [1], 2), ([1], [1, 2, 3], 2)],
)
def test_the_first_token_that_differs(a: list[int], b: list[int], expected: int | None) -> None:
    assert first_difference(a, b) == expected


def test_a_summary_of_answers() -> None:
    texts = pd.DataFrame(
        {"task": "t", "doc_id": range(4), "answer_tokens": [3, 3, 2, 1], "cut_off": [False, True, False, False]}
    )
    summary = summarize_answers(texts.assign(first_difference=pd.array([None, 1, 2, None], dtype="Int32")))
    assert summary["same_answers"] == 0.5 and summary["first_difference"] == 1.5
    assert summary["mean_tokens"] == 9 / 4 and summary["cut_off"] == 0.25
    assert summary["mean_tokens_se"] == pytest.approx(np.std([3, 3, 2, 1], ddof=1) / 2)
    assert (
        summarize_answers(texts.assign(first_difference=pd.array([None] * 4, dtype="Int32")))["first_difference"]
        is None
    )


# --------------------------------------------------------------------------- the command


def measured(folder: Path, *words: str) -> dict[str, Any]:
    output = folder / "d.json"
    model_args = "dtype=float64,device=cpu"
    assert main(["distance", *words, "--output", str(output), "--model_args", model_args]) == 0
    return {**strict_json(output), "table": (folder / "d.md").read_text()}


def test_what_is_infinite_or_undefined_is_null(tmp_path: Path) -> None:
    """Of a variant that gives the first token probability 0, and of one whose logits are NaN."""
    text = Text((5,), (7, 8), ("text", 0))
    texts = [text, text._replace(document=("text", 1))]
    finite = torch.tensor([[0.1, 1, 0, 0], [0.2, 1, 0, 0]], dtype=torch.float64)
    infinite, undefined = finite.clone(), torch.full_like(finite, torch.nan)
    infinite[0, 0], infinite[0, 3] = torch.inf, -torch.inf
    tokens = {"finite": [finite] * 2, "infinite": [infinite, finite], "undefined": [undefined, finite]}
    options = DistanceOptions(text="text.txt")
    write(str(tmp_path / "d.json"), "model", options, frames_of(texts, tokens, {}))
    variants = strict_json(tmp_path / "d.json")["variants"]
    for name in ("infinite", "undefined"):
        row, (first, second) = variants[name], variants[name]["texts"]
        assert row["mean_kld"] is row["ppl_ratio"] is row["max_kld"] is first["kld"] is first["log_ratio"] is None
        assert second == variants["finite"]["texts"][1]
    assert variants["infinite"]["same_top"] == 1 and variants["undefined"]["same_top"] is None
    assert None not in variants["finite"].values() and variants["finite"]["mean_kld"] == pytest.approx(0.15)


def test_variants_on_greedy_answers(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Head masks in a batch, a plan with channels by hooks, a checkpoint: each against plain `generate` and passes."""
    model = load_pretrained(str(tiny_folder), dtype=torch.float64)
    plan = Plan("L1H0", {"L0": "3-9"})
    plan.save(tmp_path / "plan.json", map_model(model))
    HeadMask("L0H1").save(tmp_path / "mask.json", map_model(model))
    smaller = cut(model, plan)
    smaller.save(tmp_path / "smaller", AutoTokenizer.from_pretrained(tiny_folder))
    content = measured(
        tmp_path, str(tiny_folder), "--task", "prune_tiny_words", "--limit", "3", "--gen_kwargs", "max_gen_toks=12",
        "--heads", "L1H2-3", "--heads", str(tmp_path / "mask.json"), "--mask", str(tmp_path / "plan.json"),
        "--checkpoint", str(tmp_path / "smaller"), "--checkpoint", str(tiny_folder),
    )  # fmt: skip
    rows = content["variants"]
    assert list(rows) == ["L1H2-3", "mask", "plan", str(tmp_path / "smaller"), str(tiny_folder)]
    same = rows[str(tiny_folder)]
    assert same["mean_kld"] == pytest.approx(0, abs=1e-12) and same["same_top"] == same["same_answers"] == 1
    assert rows["plan"]["mean_kld"] == pytest.approx(rows[str(tmp_path / "smaller")]["mean_kld"], rel=1e-9)
    assert rows["plan"]["mean_kld"] > 0 and rows["mask"]["mean_kld"] > 0
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    manager = task_manager()
    docs = list(manager.load(["prune_tiny_words"])["tasks"]["prune_tiny_words"].test_docs())[:3]
    task = manager.load(["prune_tiny_words"])["tasks"]["prune_tiny_words"]
    means = []
    for number, doc in enumerate(docs):
        prompt = tokenizer.encode(task.doc_to_text(doc))
        with torch.no_grad():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist()
        answer = tuple(out[len(prompt) :])
        assert rows["mask"]["texts"][number]["tokens"] == len(answer)
        expected = reference_distances(model, HeadMask("L0H1"), Text(tuple(prompt), answer, ("", 0)))
        means += [row[0] for row in expected]
        assert rows["mask"]["texts"][number]["kld"] == pytest.approx(np.mean([row[0] for row in expected]), abs=1e-9)
    assert rows["mask"]["mean_kld"] == pytest.approx(np.mean(means), abs=1e-9)
    assert content["dense"]["cut_off"] in (0, 1 / 3, 2 / 3, 1)
    assert content["table"] in capsys.readouterr().out
    assert "| mean KLD |" in re.sub(" +", " ", content["table"])


def test_variants_on_a_text_and_on_choices(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A text of many words. " * 20)
    heads = ["--heads", "L0H1", "--heads", "L1H0"]
    text = measured(
        tmp_path, str(tiny_folder), "--text", str(tmp_path / "text.txt"), "--windows", "3", "--tokens", "20", *heads
    )
    assert text["variants"]["L0H1"]["tokens"] == 3 * 19 and text["variants"]["L0H1"]["documents"] == 3
    assert "same_answers" not in text["variants"]["L0H1"] and text["dense"] == {}
    choices = measured(tmp_path, str(tiny_folder), "--task", "prune_tiny_choice", "--limit", "2", *heads)
    assert choices["variants"]["L1H0"]["documents"] == 2  # all choices of a question are one document
    assert len(choices["variants"]["L1H0"]["texts"]) > 2
    gen_kwargs = ["--gen_kwargs", "max_gen_toks=5"]
    tries = measured(
        tmp_path, str(tiny_folder), "--task", "prune_tiny_words_pass4", "--limit", "2", *gen_kwargs, *heads
    )
    assert tries["variants"]["L1H0"]["answers"] == 2  # greedy answers, each once
