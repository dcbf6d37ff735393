"""What is decided by the device: a test a branch. All are skipped without a CUDA device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lmeval_prune import HeadMask, RowMasks, map_model
from lmeval_prune.architectures import weights_fingerprint
from lmeval_prune.decoding import Engine, LikelihoodRequest, Request, SamplingParams
from lmeval_prune.decoding.memory import available_memory
from lmeval_prune.interventions.attention_call import intercept_attention
from tests.tiny_models import output, tiny, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NEAR = 1e-5  # sines and cosines of positions are of float32, and others on each device
MASKS = [None, HeadMask("L0H1"), HeadMask("L1H2-3"), HeadMask("L0H0+L1H1")]


def requests(eos: tuple[int, ...] = (), **params: float) -> list[Request]:
    return [
        Request(tuple(range(5, 5 + length)), mask, SamplingParams(16, eos, **params), tag=(length, str(mask)))
        for length in (2, 7, 11)
        for mask in MASKS
    ]


def answers(engine: Engine, batch: list[Request]) -> dict:
    return {request.tag: answer for request, answer in engine.decode(batch)}


def test_a_head_mask_moves_to_the_activations() -> None:
    model, inputs = tiny("llama"), tokens()
    with MASKS[3].applied_to(model):
        expected = output(model, inputs)
    model.cuda()
    with MASKS[3].applied_to(model):
        torch.testing.assert_close(output(model, inputs.cuda()).cpu(), expected, rtol=0, atol=NEAR)


def test_row_masks_stay_on_the_device() -> None:
    model, inputs = tiny("llama"), tokens(rows=4)
    rows = RowMasks()
    with rows.applied_to(model), rows.using(MASKS):
        expected = output(model, inputs)
    model.cuda()
    rows = RowMasks()
    with rows.applied_to(model):
        table = rows.table(MASKS)
        with rows.using(table):
            torch.testing.assert_close(output(model, inputs.cuda()).cpu(), expected, rtol=0, atol=NEAR)
        assert {drop.device.type for drop in table.drops.values()} == {"cuda"}


def test_a_handler_stands_in_front_of_attention() -> None:
    from contextlib import ExitStack

    model, inputs = tiny("llama").cuda(), tokens().cuda()
    expected = output(model, inputs)
    with ExitStack() as stack:
        intercept_attention(map_model(model), lambda call, attend: attend(call), stack)
        assert torch.equal(output(model, inputs), expected)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_engine_gives_what_it_gives_on_a_cpu(sampled: bool) -> None:
    """All slots are one block there, prompts and steps are moved to the device, draws are the same."""
    batch = requests(do_sample=sampled, temperature=0.7) if sampled else requests()
    model = tiny("llama")
    expected = answers(Engine(model), batch)
    engine = Engine(model.cuda(), deterministic=True)
    assert engine.unsupported is None
    assert answers(engine, batch) == expected


def test_log_likelihoods_are_those_of_a_cpu() -> None:
    texts = [((5, 6, 7, *range(8, 8 + n)), (3, 4 + n)) for n in range(4)]
    model = tiny("llama")
    expected = {r.tag: value for r, value in Engine(model).score(likelihoods(texts))}
    engine = Engine(model.cuda())
    assert engine.unscored is None
    for request, result in engine.score(likelihoods(texts)):
        torch.testing.assert_close(result.logprobs, expected[request.tag].logprobs, rtol=0, atol=NEAR)


def likelihoods(texts: list) -> list[LikelihoodRequest]:
    return [LikelihoodRequest(*text, mask, (text, str(mask))) for text in texts for mask in MASKS]


def test_its_rows_are_what_the_devices_memory_holds() -> None:
    model = tiny("llama").cuda()
    assert 0 < available_memory(torch.device("cuda")) <= torch.cuda.get_device_properties(0).total_memory
    assert answers(Engine(model), requests()) == answers(Engine(model, max_rows=2), requests())


def test_the_fallback_draws_by_the_requests_seed() -> None:
    model = tiny("bloom").cuda()
    batch = [Request((5, 6, 7), None, SamplingParams(12, (), do_sample=True), seed, tag=seed) for seed in range(4)]
    first, again = answers(Engine(model), batch), answers(Engine(model), batch[::-1])
    assert first == again and len(set(map(tuple, first.values()))) > 1


def test_a_fingerprint_does_not_depend_on_the_device() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = tiny("llama", dtype=dtype)
        assert weights_fingerprint(model) == weights_fingerprint(model.cuda())


def test_pruned_hf_runs_there(tiny_folder: Path) -> None:
    pytest.importorskip("lm_eval", reason="pruned-hf needs lm_eval")
    from lmeval_prune.models.pruned_hf import PrunedHFLM
    from tests.test_pruned_hf import HEADS
    from tests.test_pruned_hf import requests as instances

    for kind in ("generate_until", "loglikelihood", "loglikelihood_rolling"):
        arguments = {"dtype": "float64", "batch_size": 3, "heads": HEADS}
        expected = getattr(PrunedHFLM(str(tiny_folder), device="cpu", **arguments), kind)(instances(kind))
        actual = getattr(PrunedHFLM(str(tiny_folder), device="cuda", **arguments), kind)(instances(kind))
        if kind == "generate_until":
            assert actual == expected
        else:
            assert np.allclose(np.array(actual, float), np.array(expected, float), atol=NEAR * 10)
