"""Scores against literal references in float64, selection in units, the schedule, and the commands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lmeval_prune import InputError, Plan, map_model
from lmeval_prune.architectures import AttentionLayer, ModelMap
from lmeval_prune.pruners.allocation import allocate, removed_by, share_of, unit_pools
from lmeval_prune.pruners.attention_statistics import attention_statistic
from lmeval_prune.pruners.base import PRUNERS, Pruner, Scores, make_pruner
from lmeval_prune.pruners.baselines import RandomScores
from lmeval_prune.pruners.calibration import Batch, CalibrationText, check_length
from lmeval_prune.pruners.norm_entropy import GlobalThreshold, NormEntropy, confidences
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import KINDS, Part, parts_of
from lmeval_prune.pruners.schedule import resolve_options, stages
from lmeval_prune.surgery.cut import cut
from tests.tiny_models import ALL, ENCODERS, tiny, tokens, weight_view

EVERYDAY = {
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "gpt_oss"),
    *("deepseek_v3", "falcon", "bloom", "bert", "bart", "t5"),
}
FAMILIES = [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.long) for name in ALL]


WIDTH = [name for name in PRUNERS if "heads" in PRUNERS.load(name).kinds]  # others: `test_depth_pruners.py`
by_heads = partial(PruneOptions, budget="heads")
Labelled = dict[str, Any]  # by layer, `L0`


def scores_of(
    kind: str, pruner: Pruner, model_map: ModelMap, text: CalibrationText | None, removed: Labelled | None = None
) -> Labelled:
    """Score the heads or the channels of each layer."""
    before = {f"{kind}.{label}": members for label, members in (removed or {}).items()}
    scores = pruner.scores(model_map, text, parts_of(model_map, [kind]), before).values
    return {key.partition(".")[2]: values for key, values in scores.items()}


head_scores, channel_scores = (partial(scores_of, kind) for kind in KINDS)


def select(
    kind: str, model_map: ModelMap, scores: Labelled, ratio: float, allocation: str = "global", **settings: Any
) -> Labelled:
    """Return the heads or channels of each layer that a budget of heads or channels removes."""
    share = {"ratio" if kind == "heads" else "ffn_ratio": ratio}
    options = by_heads(**share, **settings)
    pools = unit_pools(model_map, options, [kind], {f"{kind}.{label}": values for label, values in scores.items()})
    removed = removed_by(pools, allocate(pools, options, ratio, allocation), {})
    return {key.partition(".")[2]: members for key, members in removed.items()}


select_heads, select_channels = (partial(select, kind) for kind in KINDS)


def text_of(side: str = "right", rows: int = 5, length: int = 9) -> CalibrationText:
    """Return windows of token ids, some of them padded."""
    real = torch.ones(rows, length, dtype=torch.long)
    for row, missing in ((1, 3), (3, 5)):
        real[row, length - missing :] = 0
    real = real.flip(1) if side == "left" else real
    return CalibrationText.from_windows("test", tokens(rows, length), 2, real)


def eager_attentions(model: Any, ids: torch.Tensor, real: torch.Tensor) -> list[torch.Tensor]:
    """Return the attention matrices of the eager implementation, in the order of the model map."""
    inputs = {"input_ids": ids, "attention_mask": real, "output_attentions": True}
    if model.config.is_encoder_decoder:
        inputs |= {"labels": ids, "decoder_attention_mask": real}
    with torch.no_grad():
        out = model(**inputs)
    if model.config.is_encoder_decoder:
        return [*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions]
    return list(out.attentions)


def visible_keys(layer: AttentionLayer, model: Any, real: torch.Tensor, row: int, query: int) -> list[int]:
    """Return the keys that a query may attend to, by the rules of the family."""
    causal = not (layer.stack in ("encoder", "cross") or model.config.model_type in ENCODERS)
    keys = [key for key in range(real.shape[1]) if real[row, key] and (not causal or key <= query)]
    window = getattr(layer.module, "sliding_window", None)
    window = model.config.window_size if getattr(layer.module, "attention_type", "") == "local" else window
    window = model.config.sliding_window if model.config.model_type == "mistral" else window
    return [key for key in keys if not window or key > query - window]


def literal(model: Any, text: CalibrationText, measure: str) -> dict[str, torch.Tensor]:
    """Compute eq. 3 (or confidence) query by query."""
    layers = map_model(model).attention
    sums = {layer.label: torch.zeros(layer.heads, dtype=torch.float64) for layer in layers}
    counts = dict.fromkeys(sums, 0)
    for ids, real, _ in text.batches:
        for layer, weights in zip(layers, eager_attentions(model, ids, real), strict=True):
            for row in range(len(ids)):
                places = [position for position in range(ids.shape[1]) if real[row, position]]
                for query in places:
                    keys = visible_keys(layer, model, real, row, query)
                    if (measure != "raw" and len(keys) < 2) or (measure == "confidence" and query == places[0]):
                        continue
                    counts[layer.label] += 1
                    for head in range(layer.heads):
                        p = [float(weights[row, head, query, key]) for key in keys]
                        if measure == "confidence":
                            value = max(x for x, key in zip(p, keys, strict=True) if key != places[0])
                        else:
                            value = -sum(x * math.log(x) for x in p if x > 0)
                            value /= math.log(len(keys)) if measure == "normalized" else 1
                        sums[layer.label][head] += value
    return {f"heads.{label}": total / counts[label] for label, total in sums.items()}


def test_activations_that_are_no_numbers_are_refused() -> None:
    """They counted as those of a channel that is never active, whose entropy is 0."""
    model: Any = tiny("llama")
    spoil = partial(torch.index_fill, dim=-1, index=torch.tensor([3]), value=torch.nan)
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, inputs, output: spoil(output))
    model_map, text = map_model(model), CalibrationText.from_windows("random", tokens(2, 9))
    with pytest.raises(InputError, match=r"the calibration run has NaN or infinite values in L1\.down"):
        NormEntropy().scores(model_map, text, parts_of(model_map), {})


@pytest.mark.parametrize("family", FAMILIES)
def test_entropies_and_confidences_are_those_of_eager_attention(family: str) -> None:
    """Padded batches, grouped queries, sinks, soft caps and position biases."""
    changes = {"window_size": 4} if family == "gpt_neo" else {}
    model, text = tiny(family, **changes), text_of()
    before = model.config._attn_implementation
    actual = {
        entropy: attention_statistic(map_model(model), text, NormEntropy(entropy=entropy)._entropies)
        for entropy in ("raw", "normalized")
    }
    actual["confidence"] = attention_statistic(map_model(model), text, confidences)
    assert model.config._attn_implementation == before
    eager = tiny(family, "eager", **changes)
    for measure, scores in actual.items():
        expected = literal(eager, text, measure)
        assert scores.keys() == expected.keys()
        for label, value in scores.items():
            # eager softmax is computed in float32
            torch.testing.assert_close(value, expected[label], rtol=0, atol=2e-6, msg=f"{measure} {label}")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_padding_on_the_left_does_not_count_either(family: str) -> None:
    """Each text by itself, without padding (the eager implementation gives NaN for such rows in float64)."""
    model, padded = map_model(tiny(family)), text_of("left")
    rows = [
        (ids[r : r + 1, m.bool()], m[m.bool()][None]) for ids, real, _ in padded.batches for r, m in enumerate(real)
    ]
    alone = CalibrationText("alone", tuple(Batch(ids, real, real) for ids, real in rows))
    for measure in (NormEntropy()._entropies, NormEntropy(entropy="raw")._entropies, confidences):
        expected = attention_statistic(model, alone, measure)
        for label, value in attention_statistic(model, padded, measure).items():
            torch.testing.assert_close(value, expected[label], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["bloom", "gpt_neo", "falcon"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_keys_of_no_weight_at_all_are_seen_all_the_same(family: str, dtype: torch.dtype) -> None:
    """Families that return their weights: most weights of a sharp head are 0, more so in bfloat16."""
    changes = {"window_size": 4} if family == "gpt_neo" else {}
    model, text = tiny(family, "eager", **changes), text_of()
    for layer in map_model(model).attention:
        for head in range(layer.heads):
            rows = layer.rows("q", head)
            rows.module.weight.data[rows.start : rows.stop] *= 1000
    model = model.to(dtype)
    matrices = eager_attentions(model, *text.batches[0][:2])
    assert sum(int((value == 0).sum()) for value in matrices) > sum(value.numel() for value in matrices) * 0.6
    for measure, pruner in (("raw", NormEntropy(entropy="raw")), ("normalized", NormEntropy())):
        expected = literal(model, text, measure)
        for label, value in attention_statistic(map_model(model), text, pruner._entropies).items():
            torch.testing.assert_close(value, expected[label], rtol=0, atol=2e-6)


def test_windows_that_slide_are_counted_as_such() -> None:
    """Without padding, which the eager implementation cannot read where a window holds nothing else."""
    model, text = tiny("mistral", sliding_window=4), CalibrationText.from_windows("whole", tokens(4, 9), 2)
    expected = literal(tiny("mistral", "eager", sliding_window=4), text, "normalized")
    for label, value in attention_statistic(map_model(model), text, NormEntropy()._entropies).items():
        torch.testing.assert_close(value, expected[label], rtol=0, atol=2e-6)


def test_entropies_do_not_depend_on_the_block_nor_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    whole = head_scores(NormEntropy(0), map_model(model), text_of())
    monkeypatch.setattr("lmeval_prune.pruners.attention_statistics.BLOCK", 80)  # a query at a time
    single = CalibrationText(
        "t", tuple(Batch(*(x[r : r + 1] for x in b)) for b in text_of().batches for r in range(len(b.ids)))
    )
    for text in (text_of(), single):
        for label, value in head_scores(NormEntropy(0), map_model(model), text).items():
            torch.testing.assert_close(value, whole[label], rtol=0, atol=1e-9)


def rows_of_head(family: str, module: nn.Module, head: int) -> list[torch.Tensor]:
    """Rows of the query, key and value projections of one of 4 heads, which read 2 keys and values, or 4."""
    parts = {
        name.rpartition(".")[2]: weight_view(part)
        for name, part in module.named_modules()
        if isinstance(part, (nn.Linear, Conv1D))
    }
    if family in ("llama", "qwen3"):
        d = 16 if family == "qwen3" else 8
        return [
            parts["q_proj"].view(4, d, 32)[head],
            *(parts[x].view(2, d, 32)[head // 2] for x in ("k_proj", "v_proj")),
        ]
    if family == "phi3":  # queries, keys, values
        q, k, v = parts["qkv_proj"].split([32, 16, 16])
        return [q.view(4, 8, 32)[head], k.view(2, 8, 32)[head // 2], v.view(2, 8, 32)[head // 2]]
    if family == "falcon":  # group by group: its queries, its key, its value
        group = parts["query_key_value"].view(2, 4, 8, 32)[head // 2]
        return [group[head % 2], group[2], group[3]]
    if family == "gpt_neox":  # head by head: query, key, value
        return list(parts["query_key_value"].view(4, 3, 8, 32)[head])
    if family == "gpt2":
        return [part.view(4, 8, 32)[head] for part in parts["c_attn"].split(32)]
    names = {"bert": ("query", "key", "value"), "bart": ("q_proj", "k_proj", "v_proj"), "t5": ("q", "k", "v")}
    return [parts[name].view(4, 8, 32)[head] for name in names[family]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_neox", "phi3", "falcon", "bert", "bart", "t5"])
def test_the_weight_norm_is_eq_1(family: str) -> None:
    """The test locates a head's rows itself, family by family."""
    model_map = map_model(tiny(family))
    actual = head_scores(GlobalThreshold(), model_map, None)
    assert {(layer.heads, layer.kv_heads) for layer in model_map.attention} == {
        (4, 2 if family in ("llama", "qwen3", "phi3", "falcon") else 4)
    }
    for layer in model_map.attention:
        for head in range(4):
            total = 0.0
            for rows in rows_of_head(family, layer.module, head):
                for row in rows.tolist():
                    total += sum(abs(x) for x in row) / len(rows)
            assert float(actual[layer.label][head]) == pytest.approx(total, rel=1e-12)


def test_the_score_is_eq_4_standardised_or_as_printed() -> None:
    model_map, text = map_model(tiny("llama")), text_of()
    norms = torch.cat(list(head_scores(GlobalThreshold(), model_map, None).values()))
    entropies = torch.cat(list(head_scores(NormEntropy(0, "none"), model_map, text).values()))
    for alpha in (0.0, 0.3, 1.0):
        printed = torch.cat(list(head_scores(NormEntropy(alpha, "none"), model_map, text).values()))
        torch.testing.assert_close(printed, alpha * norms + (1 - alpha) * entropies)
        mixed = torch.cat(list(head_scores(NormEntropy(alpha), model_map, text).values()))
        w, h = ((x - x.mean()) / x.std(correction=0) for x in (norms, entropies))
        expected = alpha * w + (1 - alpha) * h if alpha < 1 else norms  # alone, it needs no scale
        torch.testing.assert_close(mixed, expected)
    assert not NormEntropy(1.0).reads_text and NormEntropy(0.9).reads_text


def test_channels_have_a_norm_and_the_entropy_of_their_activation() -> None:
    model, text = tiny("llama"), text_of()
    model_map = map_model(model)
    block = model_map.feed_forward[0]
    recorded: list[torch.Tensor] = []
    handle = block.down.register_forward_pre_hook(lambda _, args: recorded.append(args[0]))
    for ids, real, _ in text.batches:
        with torch.no_grad():
            model(ids, attention_mask=real)
    handle.remove()
    real = torch.cat([mask.flatten() for _, mask, _ in text.batches]).bool()
    sizes = torch.cat([value.flatten(0, 1) for value in recorded])[real].abs()
    p = sizes / sizes.sum(0)
    expected = -(p * p.log()).sum(0) / math.log(len(sizes))
    actual = channel_scores(NormEntropy(0, "none"), model_map, text)["L0"]
    torch.testing.assert_close(actual, expected)
    norm = float(block.module.gate_proj.weight.data[5].abs().sum())
    norm += float(block.module.up_proj.weight.data[5].abs().sum())
    assert float(channel_scores(GlobalThreshold(), model_map, None)["L0"][5]) == pytest.approx(norm)


# --------------------------------------------------------------------------- selection and schedule


def scores_for(model_map: ModelMap, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {layer.label: torch.rand(layer.heads, generator=draw) for layer in model_map.attention}


def test_eq_5_and_its_floor() -> None:
    options = PruneOptions(0.3, p_min=0.1, steps=4, growth=2.0)
    assert [options.shares(t)[0] for t in range(5)] == pytest.approx([0.1, 0.1125, 0.15, 0.2125, 0.3])
    assert share_of(0.3, 270) == 81 and share_of(0.1 * 3, 10) == 3 and share_of(0.29, 10) == 2


def test_the_lowest_heads_go_over_all_layers_or_in_each() -> None:
    model_map = map_model(tiny("llama", num_hidden_layers=4))
    scores = scores_for(model_map)
    flat = sorted((float(x), label, head) for label, value in scores.items() for head, x in enumerate(value))
    lost = select_heads(model_map, scores, 0.25)
    assert {(label, head) for label, heads in lost.items() for head in heads} == {(x, h) for _, x, h in flat[:4]}
    even = select_heads(model_map, scores, 0.25, allocation="uniform")
    assert even == {k: {int(v.argmin())} for k, v in scores.items()}


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("unit", ["head", "group", "balanced"])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_units_stay_whole_and_no_layer_is_emptied(unit: str, ratio: float, allocation: str) -> None:
    model_map = map_model(
        tiny("llama", num_hidden_layers=3, hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    )
    lost = select_heads(model_map, scores_for(model_map), ratio, allocation, unit=unit)
    assert sum(map(len, lost.values())) <= ratio * model_map.total_heads
    for layer in model_map.attention:
        heads = lost.get(layer.label, set())
        assert len(heads) < layer.heads
        by_group = [sum(h // 2 == g for h in heads) for g in range(4)]
        assert unit != "group" or set(by_group) <= {0, 2}
        assert unit != "balanced" or len(set(by_group)) == 1
    everything = select_heads(model_map, scores_for(model_map), ratio, allocation, unit=unit, allow_empty_layer=True)
    assert sum(map(len, everything.values())) >= sum(map(len, lost.values()))


def test_the_lowest_channels_go_and_one_stays() -> None:
    model_map = map_model(tiny("llama"))
    scores = {
        label: torch.rand(width, generator=torch.Generator().manual_seed(3))
        for label, width in model_map.channels().items()
    }
    for ratio in (0.1, 0.5, 0.95, 0.999):
        for allocation in ("global", "uniform"):
            for label, lost in select_channels(model_map, scores, ratio, allocation).items():
                assert len(lost) < 48 and {*scores[label].argsort()[: len(lost)].tolist()} == lost
    assert sum(map(len, select_channels(model_map, scores, 0.25).values())) == 24


def gone(plan: Plan, label: str) -> list[int]:
    """Return the heads of a layer that a plan removes."""
    return [int(name.partition("H")[2]) for name in plan.heads if name.startswith(f"{label}H")]


def test_a_stage_is_what_scoring_the_cut_model_gives() -> None:
    """Scoring a model that is cut by the first stage selects the same units as the second stage."""
    text, pruner = text_of(rows=6, length=12), NormEntropy(0.5)
    for seed in range(4):
        model = tiny("llama", seed=seed, num_hidden_layers=6, hidden_size=64, num_attention_heads=8,
                     num_key_value_heads=8)  # fmt: skip
        model_map = map_model(model)
        first, second = stages(pruner, model_map, by_heads(0.5, ffn_ratio=0.5, steps=2), text)
        smaller = map_model(cut(model, first).model)
        assert (model_map.total_heads, smaller.total_heads) == (48, 36)
        lost = select_heads(smaller, head_scores(pruner, smaller, text), 12 / 36)
        fewer = select_channels(smaller, channel_scores(pruner, smaller, text), 1 / 3)
        for layer in model_map.attention:
            left = [head for head in range(8) if head not in gone(first, layer.label)]
            again = [left[position] for position in lost.get(layer.label, ())]
            assert sorted([*gone(first, layer.label), *again]) == sorted(gone(second, layer.label))
            label, numbers = layer.label, first.channels[layer.label].numbers
            left = [channel for channel in range(48) if channel not in numbers]
            again = [left[position] for position in fewer.get(label, ())]
            assert sorted([*numbers, *again]) == second.channels[label].numbers


def test_stages_remove_more_and_more_and_score_what_is_left() -> None:
    model = tiny("llama", num_hidden_layers=3)
    model_map, text = map_model(model), text_of()
    options = by_heads(0.5, p_min=0.1, steps=3, growth=1.5, ffn_ratio=0.25)
    plans = list(stages(NormEntropy(0.5), model_map, options, text))
    removed = [{*plan.heads} for plan in plans]
    assert [len(value) for value in removed] == [share_of(0.1 + 0.4 * (t / 3) ** 1.5, 12) for t in (1, 2, 3)]
    assert removed[0] <= removed[1] <= removed[2]
    with plans[0].applied_to(model):
        again = head_scores(NormEntropy(0.5), model_map, text, {x: set(gone(plans[0], x)) for x in ("L0", "L1", "L2")})
    for label, value in again.items():
        torch.testing.assert_close(plans[1].scores[f"heads.{label}"], value)
    assert any(not torch.equal(plans[0].scores[key], plans[1].scores[key]) for key in plans[0].scores)
    provenance = plans[-1].provenance
    assert provenance["method"] == "norm_entropy" and provenance["calibration"]["sha256"]
    assert len(provenance["stages"]) == 3
    assert sum(len(channels.numbers) for channels in plans[-1].channels.values()) == 36
    assert [stage["channels"] for stage in provenance["stages"]] == [
        share_of((0.05 + 0.2 * (t / 3) ** 1.5), 144) for t in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"ffn_ratio": 0.5}, [(0, 0.4), (0, 0.425), (0, 0.45), (0, 0.475), (0, 0.5)]),
        ({"ratio": 0.5}, [(0.4, 0), (0.425, 0), (0.45, 0), (0.475, 0), (0.5, 0)]),
        ({"ratio": 0.1, "ffn_ratio": 0.5}, [(0.08, 0.4), (0.085, 0.425), (0.09, 0.45), (0.095, 0.475), (0.1, 0.5)]),
        ({"ratio": 0.5, "ffn_ratio": 0.1}, [(0.4, 0.08), (0.425, 0.085), (0.45, 0.09), (0.475, 0.095), (0.5, 0.1)]),
    ],
)
def test_the_larger_ratio_starts_at_p_min_and_the_other_as_far_on_its_way(settings: Any, shares: Any) -> None:
    options = by_heads(**settings, p_min=0.4, steps=4)
    for step, expected in enumerate(shares):
        assert options.shares(step) == pytest.approx(expected)
    model_map = map_model(tiny("llama"))
    plans = stages(make_pruner("random", {}), model_map, options)
    actual = [sum(len(channels.numbers) for channels in plan.channels.values()) for plan in plans]
    counts = [(share_of(of_heads, 8), share_of(of_channels, 96)) for of_heads, of_channels in shares[1:]]
    assert actual == [channels for _, channels in dict.fromkeys(counts)]  # steps that remove nothing more are skipped


@dataclass(frozen=True)
class Numbered(Pruner):
    """A user's method: scores heads by their numbers, and records the bias of the first layer's projection."""

    kinds = ("heads",)
    parts = "heads"
    biases: list[float] = field(default_factory=list, compare=False)

    def scores(self, model_map: Any, text: Any, parts: Sequence[Part], removed: Any) -> Scores:
        with torch.no_grad():
            bias = model_map.attention[0].o_proj(torch.zeros(1, 1, 32, dtype=torch.float64))
        self.biases.append(float(bias.norm()))
        return Scores({part.key: torch.arange(part.size).double() for part in parts})


def test_what_makes_up_for_a_step_goes_with_the_plan_and_counts_in_the_next_one() -> None:
    model_map, pruner = map_model(tiny("llama")), Numbered([])
    plans = list(stages(pruner, model_map, by_heads(0.5, steps=2, compensation="bias"), text_of()))
    assert [len(plan.heads) for plan in plans] == [2, 4]
    bias = float(plans[0].compensation["L0.o_proj.bias"].norm())
    assert pruner.biases == [0.0, pytest.approx(bias)] and bias > 0
    assert plans[1].compensation.keys() == plans[0].compensation.keys()


@pytest.mark.parametrize("name", WIDTH)
def test_every_method_scores_blocks_that_read_tokens_without_rows(name: str) -> None:
    """OPT's feed-forward blocks read (rows · tokens, columns); padding does not change the scores."""
    model_map, text = map_model(tiny("opt")), text_of()
    pruner = make_pruner(name, {})
    parts = parts_of(model_map, [kind for kind in KINDS if kind in pruner.kinds])
    ids, real, _ = (torch.cat(tensors) for tensors in zip(*text.batches, strict=True))
    others = CalibrationText.from_windows("test", torch.where(real.bool(), ids, ids + 1), 2, real)
    first, second = (pruner.scores(model_map, calibration, parts, {}).values for calibration in (text, others))
    for part in parts:
        assert len(first[part.key]) == part.size
        torch.testing.assert_close(first[part.key], second[part.key])


@pytest.mark.parametrize("name", WIDTH)
def test_parts_that_are_left_open_are_what_the_paper_removes(name: str) -> None:
    """With a second method for channels, both kinds are removed."""
    model_map, text = map_model(tiny("llama", num_hidden_layers=4)), text_of()
    pruner = make_pruner(name, {})
    parts = pruner.parts
    (plan,) = stages(pruner, model_map, PruneOptions(0.25), text)
    assert plan == next(stages(pruner, model_map, PruneOptions(0.25, parts=parts), text))
    assert bool(plan.channels) == (parts == "both") and plan.provenance["options"]["parts"] == parts
    assert resolve_options(PruneOptions(0.25), NormEntropy(), model_map, RandomScores(3)).parts == "both"
    assert resolve_options(PruneOptions(0.25, budget="heads"), RandomScores(), model_map).parts is None


@pytest.mark.parametrize("family", ["gpt2", "roberta"])
def test_windows_are_as_long_as_the_model_has_positions_and_no_longer(family: str) -> None:
    """The longest allowed window runs, and one token more fails."""
    model = tiny(family)
    limit = 128 - 2 if family == "roberta" else 128
    if family == "roberta":
        model = tiny(family, pad_token_id=1)
    for length in (limit, limit + 1):
        text = CalibrationText.from_windows("long", tokens(1, length).clamp(min=3))
        if length == limit:
            check_length(model, length)
            list(text.run(model))
        else:
            with pytest.raises(InputError, match=f"windows of {length} tokens.*at most {limit} positions"):
                check_length(model, length)
            with pytest.raises((IndexError, RuntimeError)):
                list(text.run(model))
