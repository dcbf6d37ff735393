"""Head masks: the hook and a slice deleted by hand are the same thing."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lmeval_prune import Head, HeadMask, InputError, RowMasks, map_model
from tests.tiny_models import ALL, distinct, output, tiny, tokens


def prefixed(attention, heads) -> list[Head]:
    return [Head(stack, layer, head) for stack in attention.stacks for layer, head in heads]


class DeletedSlice(nn.Module):
    """An output projection without some heads: their columns are cut out of the weight and of the input."""

    def __init__(self, projection: nn.Module, keep: torch.Tensor) -> None:
        super().__init__()
        self.keep = keep
        self.in_features = projection.weight.shape[0 if isinstance(projection, Conv1D) else 1]
        self.weight = nn.Parameter(
            (projection.weight.T if isinstance(projection, Conv1D) else projection.weight)[:, keep].clone()
        )
        self.bias = projection.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x[..., self.keep], self.weight, self.bias)


def delete_by_hand(model: nn.Module, heads: list[Head]) -> nn.Module:
    """A copy of the model with the heads' slices deleted, written apart from the package."""
    model = copy.deepcopy(model)
    for layer in map_model(model).attention:
        lost = [h.head for h in heads if (h.stack, h.layer) == (layer.stack, layer.index)]
        if lost:
            keep = torch.tensor([i for i in range(layer.heads * layer.head_dim) if i // layer.head_dim not in lost])
            parent, _, name = next(n for n, m in model.named_modules() if m is layer.o_proj).rpartition(".")
            setattr(model.get_submodule(parent), name, DeletedSlice(layer.o_proj, keep))
    return model


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.long)])
@pytest.mark.parametrize("family", distinct(ALL))
def test_the_hook_is_deletion(family: str, attention: str) -> None:
    model = tiny(family, attention)
    inputs = tokens()
    dense = output(model, inputs)
    heads = prefixed(map_model(model), [(0, 1), (1, 0), (1, 3)])
    expected = output(delete_by_hand(model, heads), inputs)
    assert (expected - dense).abs().max() > 1e-4
    with HeadMask(heads).applied_to(model):
        actual = output(model, inputs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    assert torch.equal(output(model, inputs), dense)


@pytest.mark.parametrize("family", distinct(ALL))
def test_each_row_of_a_batch_has_its_own_mask(family: str) -> None:
    model = tiny(family)
    inputs = tokens(rows=4)
    attention = map_model(model)
    masks = [
        HeadMask(prefixed(attention, h)) if h else None for h in ([(0, 1)], [], [(1, 2), (1, 3)], [(0, 1), (1, 0)])
    ]
    rows = RowMasks()
    with rows.applied_to(model):
        dense = output(model, inputs)
        with rows.using(masks):
            actual = output(model, inputs)
        assert torch.equal(output(model, inputs), dense)
    assert torch.equal(actual[1], dense[1])
    for row, mask in enumerate(masks):
        if mask:
            with mask.applied_to(model):
                torch.testing.assert_close(actual[row], output(model, inputs)[row], rtol=0, atol=1e-11)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox"])
def test_each_token_of_a_packed_batch_has_its_own_mask(family: str) -> None:
    """Two sequences packed into one row, kept apart by a block-diagonal attention mask."""
    model = tiny(family)
    first, second = tokens(1, 5, seed=2), tokens(1, 4, seed=3)
    packed = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]
    allowed = torch.zeros(9, 9, dtype=torch.bool)
    allowed[:5, :5], allowed[5:, 5:] = torch.ones(5, 5).tril().bool(), torch.ones(4, 4).tril().bool()
    masks = [HeadMask("L0H1+L1H2"), HeadMask("L1H0")]
    rows = RowMasks()
    with rows.applied_to(model), rows.using(masks, torch.tensor([[0] * 5 + [1] * 4])):
        actual = output(model, packed, attention_mask=allowed[None, None], position_ids=positions)
    for mask, part, span in ((masks[0], first, slice(0, 5)), (masks[1], second, slice(5, 9))):
        with mask.applied_to(model):
            torch.testing.assert_close(actual[:, span], output(model, part), rtol=0, atol=1e-11)


def test_generation_follows_the_rows_and_repeats_them_for_several_returned_sequences() -> None:
    model = tiny("llama")
    prompt = tokens(2, 5)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    masks = [HeadMask("L0H0-2"), HeadMask("L1H1-3")]
    alone = []
    for row, mask in enumerate(masks):
        with mask.applied_to(model):
            alone.append(model.generate(prompt[row : row + 1], **settings)[0])
    rows = RowMasks()
    with rows.applied_to(model), rows.using(masks):
        together = model.generate(prompt, **settings)
        with pytest.raises(InputError):
            model(tokens(4, 5))
        with rows.using(masks, repeats=2):
            beams = model.generate(prompt, num_beams=2, num_return_sequences=2, **settings)
    for index in (torch.tensor([True, False]), torch.tensor([0.0, 1.0]), torch.tensor([0, 2]), torch.tensor([-1, 0])):
        with rows.applied_to(model), pytest.raises(InputError), rows.using(masks, index):
            pass
    assert torch.equal(together, torch.stack(alone))
    assert beams.shape[0] == 4
    with masks[1].applied_to(model):
        assert torch.equal(beams[2:], model.generate(prompt[1:], num_beams=2, num_return_sequences=2, **settings))


def test_row_masks_that_no_model_has_are_refused() -> None:
    """Also by a table that was resolved while they were applied: it would prune nothing."""
    model, rows, masks = tiny("llama"), RowMasks(), [HeadMask("L0H1")]
    with rows.applied_to(model):
        table = rows.table(masks)
        with rows.using(table):
            pass
    for unapplied in (lambda: rows.using(masks), lambda: rows.using(table)):
        with pytest.raises(InputError), unapplied():
            pass
    with pytest.raises(InputError):
        rows.table(masks)


def test_masks_compose_by_union_nested_or_joined() -> None:
    model, inputs = tiny("qwen3"), tokens()
    first, second = HeadMask("L0H1"), HeadMask("L0H1+L1H2")
    with HeadMask((*first.heads, *second.heads)).applied_to(model):
        union = output(model, inputs)
    with first.applied_to(model), second.applied_to(model):
        assert torch.equal(output(model, inputs), union)
    rows = RowMasks()
    with first.applied_to(model), rows.applied_to(model), rows.using([second, None, second]):
        torch.testing.assert_close(output(model, inputs)[[0, 2]], union[[0, 2]], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("text", "heads"),
    [
        ("L1H3+L0H0", ["L0H0", "L1H3"]),
        ("L1H*", ["L1H0", "L1H1", "L1H2", "L1H3"]),
        ("L0H1-2", ["L0H1", "L0H2"]),
        ("l0h1+L0H1", ["L0H1"]),
        ("L*H2", ["L0H2", "L1H2"]),
        ("L0-1H0-1", ["L0H0", "L0H1", "L1H0", "L1H1"]),
        (["L1H3", "L0H0"], ["L0H0", "L1H3"]),
        (["L1H3+L0H0"], ["L0H0", "L1H3"]),
        ([[1, 3], [0, 0]], ["L0H0", "L1H3"]),
        ([1, 3], ["L1H3"]),
        ("[[1, 3], [0, 0]]", ["L0H0", "L1H3"]),
        ('["L1H3", "L0H0"]', ["L0H0", "L1H3"]),
        ("[L1H3]", ["L1H3"]),
    ],
)
def test_parsing(text, heads) -> None:
    mask = HeadMask(text, allow_empty_layer=True)
    assert [str(head) for head in mask.heads_of(map_model(tiny("llama")))] == heads


@pytest.mark.parametrize("text", ["L2H0", "L0H4", "L1H*", "encoder.L0H0", "L0-99999999999H0"])
def test_heads_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(InputError), HeadMask(text).applied_to(tiny("llama")):
        pass


def test_encoder_decoders_need_the_stack_named() -> None:
    attention = map_model(tiny("bart"))
    with pytest.raises(InputError):
        HeadMask("L0H0").heads_of(attention)
    assert len(HeadMask("encoder.L0H0+cross.L1H1-2+decoder.L*H3").heads_of(attention)) == 5
