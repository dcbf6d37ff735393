"""Lengths of answers, and answers cut off by `max_gen_toks`: equal on every path, stored and reported."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.models.identity import Checkpoint, generation_digest
from tests.test_pruned_hf import PROMPTS, model, request

LONG = {"until": ["\x00"], "max_gen_toks": 12}


def instances(stop: str) -> list[Any]:
    """Return requests of two tasks; the answers of the second can end with a stop text."""
    settings = {"until": [stop], "max_gen_toks": 12}
    free = [request("generate_until", (prompt, LONG), i, task="free") for i, prompt in enumerate(PROMPTS)]
    return [*free, *(request("generate_until", (prompt, settings), i, task="ends") for i, prompt in enumerate(PROMPTS))]


@cache
def decoded(folder: Path) -> list[list[int]]:
    """Tokens of the answers to the prompts."""
    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64),
        AutoTokenizer.from_pretrained(folder),
    )
    requests = [Request(tuple(tokenizer(prompt)["input_ids"]), None, SamplingParams(12)) for prompt in PROMPTS]
    answers = {request.prompt: answer for request, answer in Engine(network, tokenizer).decode(requests)}
    return [answers[request.prompt] for request in requests]


@pytest.mark.parametrize("engine", ["generate", "batched"])
@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_the_limit_is_the_tasks_by_any_name(tiny_folder: Path, tmp_path: Path, engine: str, name: str) -> None:
    """A limit in the model's generation config, by which `hf` would cut the answers, changes neither texts nor keys."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    other = shutil.copytree(tiny_folder, tmp_path / "other")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "max_new_tokens": 3}))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "max_new_tokens": 5}))
    results = []
    for source in (other, folder):
        lm = model(source, engine=engine)
        requests = [request("generate_until", (p, {"until": ["\x00"], name: 12}), i) for i, p in enumerate(PROMPTS)]
        results.append((lm.generate_until(requests), lm.lengths["toy"], lm.identity["generation_config"]))
    digests = {generation_digest(Checkpoint({"pretrained": str(path)}).generation_config) for path in (other, folder)}
    assert results[0][:2] == results[1][:2] and results[0][1]["mean_tokens"] == results[0][1]["max_gen_toks"] == 12
    assert "max_new_tokens" not in results[1][2] and len(digests) == 1


@pytest.mark.parametrize("arguments", [{"batch_size": 1}, {"batch_size": 3}, {"engine": "batched"}], ids=str)
@pytest.mark.parametrize("stored", [False, True])
def test_every_path_counts_the_same(tiny_folder: Path, tmp_path: Path, arguments: dict[str, Any], stored: bool) -> None:
    texts = decoded(tiny_folder)
    assert all(len(text) == 12 for text in texts)  # no end token
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    token = next(token for token in texts[0][2:] if tokenizer.decode([token]).isascii())
    stop = tokenizer.decode([token])
    expected = [text.index(token) + 1 if token in text else 12 for text in texts]
    settings = {**arguments, **({"responses": str(tmp_path / "s")} if stored else {})}
    for _ in range(1 + stored):  # the second time from the store
        lm = model(tiny_folder, **settings)
        lm.generate_until(instances(stop))
        free, ends = lm.lengths["free"], lm.lengths["ends"]
        assert free == {"answers": len(PROMPTS), "unknown": 0, "cut_off": 1.0, "mean_tokens": 12, "max_gen_toks": 12}
        assert ends["mean_tokens"] == sum(expected) / len(expected)
        assert ends["cut_off"] == sum(token not in text for text in texts) / len(texts) < 1
        lm.close()


@pytest.mark.parametrize("arguments", [{"batch_size": 1}, {"batch_size": 3}, {"engine": "batched"}], ids=str)
@pytest.mark.parametrize("kind", [str, int])
@pytest.mark.parametrize(("end", "stop", "length"), [("l", "j", 12), ("|", "j", 3)])
def test_stop_texts_end_an_answer_after_its_thought(
    tiny_folder: Path, arguments: dict[str, Any], kind: type, end: str, stop: str, length: int
) -> None:
    """A stop text in the thought, and one after it, which the tokens of longer rows do not undo."""
    tokenizer, tokens = AutoTokenizer.from_pretrained(tiny_folder), decoded(tiny_folder)[2]
    assert tokenizer.decode(tokens).startswith("||j|") and tokenizer.decode(tokens[:10]).endswith("l")
    lm = model(tiny_folder, think_end_token=end if kind is str else tokenizer.encode(end)[0], **arguments)
    settings = {"until": [stop], "max_gen_toks": 12}
    requests = [request("generate_until", (p, settings), i, task=str(i)) for i, p in enumerate(PROMPTS)]
    assert lm.generate_until(requests)[2] == tokenizer.decode(tokens[10:length])
    assert lm.lengths["2"]["mean_tokens"] == length


@pytest.mark.parametrize("arguments", [{"batch_size": 1}, {"batch_size": 3}, {"engine": "batched"}], ids=str)
def test_stop_texts_of_the_model_end_an_answer(tiny_folder: Path, arguments: dict[str, Any]) -> None:
    """They stay in the text, as in `generate`."""
    lm = model(tiny_folder, **arguments)
    lm.model.generation_config.stop_strings = ["j"]
    assert lm.generate_until(instances("\x00"))[2] == "||j"
    assert lm.lengths["free"]["mean_tokens"] == (4 * 12 + 3) / 5


def test_a_limit_that_counts_the_prompt_is_not_reported_as_one_of_answers(tiny_folder: Path) -> None:
    """`hf` obeys it in place of `max_gen_toks`: each answer has as many tokens as its prompt leaves."""
    lm = model(tiny_folder, engine="generate", batch_size=1)
    lm.generate_until([request("generate_until", (p, {**LONG, "max_length": 50}), i) for i, p in enumerate(PROMPTS)])
    room = [50 - len(lm.tok_encode(prompt)) for prompt in PROMPTS]
    lengths = lm.lengths["toy"]
    assert lengths["mean_tokens"] == sum(room) / len(room) and lengths["max_gen_toks"] is None


def test_an_end_token_is_no_cut(tiny_folder: Path) -> None:
    """Nor is what other rows of the batch still generate after it."""
    free = instances("\x00")[: len(PROMPTS)]
    result = []
    for arguments in ({"batch_size": 1}, {"batch_size": 5}, {"engine": "batched"}):
        lm = model(tiny_folder, **arguments)
        lm.model.generation_config.eos_token_id = [2, decoded(tiny_folder)[0][4]]
        lm.__dict__.pop("_stopping", None)
        lm.choose_engine()
        lm.generate_until(free)
        result.append(lm.lengths["free"])
    assert result[0] == result[1] == result[2] and result[0]["cut_off"] < 1 and result[0]["mean_tokens"] < 12
