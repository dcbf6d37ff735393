"""Probe Pruning against its formulas, written out as plans; and what is chosen while a text is generated."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from lmeval_prune import InputError, Plan, TokenFilter, map_model
from lmeval_prune.architectures.blocks import weight_of
from lmeval_prune.interventions import interventions_on
from lmeval_prune.interventions.probe_pruning import ProbePruning
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.surgery.cut import cut
from tests.test_baselines import inputs_of
from tests.tiny_models import output, tiny, tokens


def lowest(scores: torch.Tensor, weight: torch.Tensor, width: int, ratio: float) -> list[int]:
    """‖(s_j · W_ij²)_{i, j∈unit}‖ of each unit, element by element; the lowest."""
    norms, columns = [], weight.T.tolist()
    for start in range(0, len(scores), width):
        unit = zip(scores.tolist()[start : start + width], columns[start : start + width], strict=True)
        norms.append(sum((score * w**2) ** 2 for score, column in unit for w in column) ** 0.5)
    return sorted(sorted(range(len(norms)), key=norms.__getitem__)[: int(ratio * len(norms))])


def plain(model: Any, ids: torch.Tensor, ratio: float) -> Plan:
    """Return the plan that the plain criterion gives for a text: Σ_t of what each projection reads, layer after layer."""
    model_map, text = map_model(model), CalibrationText.from_windows("text", ids)
    plan = Plan()
    for layer, block in zip(model_map.attention, model_map.feed_forward, strict=True):
        for part, module, width in (("o_proj", layer.o_proj, layer.head_dim), ("down", block.down, 1)):
            with plan.applied_to(model):
                x = inputs_of(model_map, text)[f"{layer.label}.{part}"]
            gone = lowest(x.square().sum(0), weight_of(module), width, ratio)
            heads = [f"{layer.label}H{head}" for head in gone] if part == "o_proj" else []
            addition = Plan(heads, {layer.label: gone} if part == "down" else {})
            plan = plan.merged_with(addition) or addition
    return plan


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_a_full_probe_is_the_plain_criterion_of_each_text(family: str) -> None:
    model = tiny(family)
    ids = tokens(3, 9)
    with ProbePruning(0.5, positions=1.0, skip_first=0).applied_to(model):
        actual = output(model, ids)
    for row, text in zip(actual, ids[:, None], strict=True):
        with plain(model, text, 0.5).applied_to(model):
            torch.testing.assert_close(row, output(model, text)[0], rtol=0, atol=1e-9)
    assert not torch.equal(actual, output(model, ids))


def test_ratio_0_is_the_dense_model() -> None:
    model = tiny("llama")
    dense = output(model, tokens())
    with ProbePruning(0.0, skip_first=0).applied_to(model):
        assert torch.equal(output(model, tokens()), dense)
    assert ProbePruning(0.0).tokenwise and not ProbePruning(0.1).tokenwise


def test_a_probe_is_the_attention_among_the_largest_tokens() -> None:
    """Of the first layer: the tokens whose embeddings are largest, with their own places, and none of the others.

    Of ten or fewer the first is the text's first.
    """
    model, ids = tiny("llama"), tokens(1, 12)
    layer = map_model(model).attention[0]
    residual = model.model.embed_tokens(ids)
    places = residual[0].norm(dim=-1).topk(4).indices.sort().values  # a third, rounded up
    assert places[0] > 0
    places[0] = 0
    seen: list[torch.Tensor] = []
    handle = layer.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        model(ids[:, places], position_ids=places[None])
    handle.remove()
    expected = lowest(seen[0].square().sum(0), layer.o_proj.weight.data, layer.head_dim, 0.5)
    with ProbePruning(0.5, positions=1 / 3, skip_first=0).applied_to(model), torch.no_grad():
        handle = layer.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        model(ids)
        handle.remove()
    gone = [head for head in range(4) if not seen[1][:, layer.columns(head)].any()]
    assert gone == expected and len(gone) == 2


@pytest.mark.parametrize("kind", ["none", "least_squares"])
def test_over_a_plan_it_is_what_it_is_on_the_cut_model(kind: str) -> None:
    """What is gone is not counted, and new weights are what scores are of; what goes is said."""
    model, text = tiny("llama", num_hidden_layers=4), CalibrationText.from_windows("t", tokens(16, 20, seed=1))
    options = PruneOptions(0.4, budget="parameters", compensation=kind)
    (plan,) = stages(make_pruner("random", {}), map_model(model), options, text)
    assert plan.heads and plan.channels
    outputs = []
    for network, before in ((model, plan), (cut(model, plan).model, None)):
        with before.applied_to(network) if before else nullcontext():
            dense = output(network, tokens())
            with ProbePruning(0.5, skip_first=0).applied_to(network):
                outputs.append(output(network, tokens()))
                assert (outputs[-1] - dense).abs().max() > 1e-6
                report = interventions_on(network)[-1].report(map_model(network))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-9)
    left = map_model(cut(model, plan).model)
    gone = int(0.5 * left.total_heads) / left.total_heads
    assert report["probe_pruning_left_out"]["heads"] == gone > 0


def test_what_was_chosen_at_the_prompt_stays_while_a_text_is_generated() -> None:
    """Token by token it is the plan that the prompt alone gives."""
    model, prompts = tiny("llama"), tokens(2, 7)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    probe = ProbePruning(0.5, positions=1.0, skip_first=0)
    with probe.applied_to(model):
        generated = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    for row, prompt in enumerate(prompts):
        with plain(model, prompt[None], 0.5).applied_to(model):
            alone = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **settings)
        assert torch.equal(generated[row], alone[0])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompts, past_key_values=cache)
        with probe.applied_to(model), pytest.raises(InputError):
            model(prompts[:, :1], past_key_values=cache)


def test_what_does_not_go_together_is_refused() -> None:
    model = tiny("llama")
    probe = ProbePruning(0.3, skip_first=0)
    with probe.applied_to(model), pytest.raises(InputError), probe.applied_to(model):
        pass
    with (
        probe.applied_to(model),
        pytest.raises(InputError),
        TokenFilter(0.2).applied_to(model),
    ):
        pass
    for family in ("bert", "t5", "bloom"):
        with pytest.raises(InputError), probe.applied_to(tiny(family)):
            pass


@pytest.mark.parametrize(
    ("ratio", "heads", "channels"),
    [(0.2, [0, 1, 1, 1, 1, 0], [9, 10, 9, 10, 10, 9]), (0.7, [2, 3, 3, 3, 3, 2], [33, 34, 33, 34, 34, 33])],
)
def test_what_rounding_leaves_goes_to_the_next_layer(ratio: float, heads: list[int], channels: list[int]) -> None:
    """A fifth of four heads a layer is none of each, and four of 24."""
    model = tiny("llama", num_hidden_layers=6)
    read: dict[str, torch.Tensor] = {}
    model_map = map_model(model)
    with ProbePruning(ratio, skip_first=0).applied_to(model):
        (applied,) = interventions_on(model)
        for layer, block in zip(model_map.attention, model_map.feed_forward, strict=True):
            for name, module in ((f"{layer.label}H", layer.o_proj), (f"{layer.label}C", block.down)):
                module.register_forward_pre_hook(lambda _, args, name=name: read.update({name: args[0][0]}))
        output(model, tokens(1, 30))
        report = applied.report(model_map)["probe_pruning_left_out"]
    lost = [sum(not read[f"L{n}H"][:, 8 * h : 8 * h + 8].any() for h in range(4)) for n in range(6)]
    assert lost == [*heads] and [int((~read[f"L{n}C"].any(0)).sum()) for n in range(6)] == channels
    assert report == {"heads": sum(heads) / 24, "channels": sum(channels) / 288}


def rows_of(texts: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as one batch, padded on a side, and its mask."""
    width = max(map(len, texts))
    ids, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        where = slice(width - len(text), None) if side == "left" else slice(len(text))
        ids[row, where], mask[row, where] = text, 1
    return ids, mask


@pytest.mark.parametrize("trials", [4, pytest.param(25, marks=pytest.mark.long)])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
def test_equal_tokens_are_told_apart_by_their_place(kind: torch.dtype, side: str, trials: int) -> None:
    """Texts of a few tokens, in any order: their norms are equal, or would be but for rounding; padding decides nothing."""
    model = tiny("llama", dtype=kind)
    draw = torch.Generator().manual_seed(0)
    for trial in range(trials):
        words = torch.randint(3, 64, (1 + trial % 4,), generator=draw)
        lengths = torch.randint(5, 70, (4,), generator=draw).tolist()
        texts = [words[torch.randint(len(words), (length,), generator=draw)] for length in lengths]
        ids, mask = rows_of(texts, side)
        with ProbePruning(0.5, positions=0.3, skip_first=0).applied_to(model), torch.no_grad():
            places = (mask.cumsum(1) - 1).clamp(min=0)
            together = model(ids, attention_mask=mask, position_ids=places).logits
            for row, text in enumerate(texts):
                alone = model(text[None]).logits[0]
                torch.testing.assert_close(together[row, mask[row].bool()], alone, rtol=0, atol=1e-3)


@pytest.mark.parametrize("overflows", [False, True])
def test_hidden_states_that_are_not_finite_are_one_line(overflows: bool) -> None:
    """In float64 the eager attention of transformers gives NaN in a text that is padded on the left."""
    model = tiny("llama").double().eval()
    model.set_attn_implementation("sdpa" if overflows else "eager")
    ids, mask = rows_of([torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 7])], "left")
    if overflows:
        model.get_input_embeddings().weight.data[6] = torch.inf
    with torch.no_grad(), ProbePruning(0.3, skip_first=0).applied_to(model), pytest.raises(InputError):
        model(ids, attention_mask=mask)
