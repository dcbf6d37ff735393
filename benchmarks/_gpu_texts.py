"""Prompts and models of whole runs, `generate` in batches, and the comparison of texts."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from _gpu_common import WrongResultsError, causal_model, random_prompts, synchronize
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune.decoding.request import end_tokens
from lmeval_prune.decoding.sampling import near_tied_argmax
from lmeval_prune.interventions import HeadMask

MEAN_PROMPT = 109  # tokens of a GSM8K question with its frame, by SmolLM2's tokenizer
Prompt = tuple[int, ...]
Answers = dict[tuple[Prompt, HeadMask | None], list[int]]


def loaded_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model of a sweep and its tokenizer: that of `--pretrained`, or random weights and None."""
    dtype = getattr(torch, options.dtype)
    if not options.pretrained:
        return causal_model(options.shape, options.dtype, options.device, options.tiny, options.layers), None
    model = AutoModelForCausalLM.from_pretrained(options.pretrained, dtype=dtype).eval().to(options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.pretrained)
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = 0
    return model, tokenizer


def question_prompts(options: argparse.Namespace, model: Any, tokenizer: Any) -> list[Prompt]:
    """Return distinct prompts, longest first: questions of `--texts`, or random tokens of similar lengths."""
    count = 4 if options.tiny else options.questions
    if options.texts and tokenizer is not None:
        lines = Path(options.texts).read_text().splitlines()[:count]
        texts = (f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines)
        prompts = [tuple(tokenizer.encode(text)) for text in texts]
    else:
        prompts = random_prompts(count, model.config.vocab_size, 12 if options.tiny else MEAN_PROMPT)
    return sorted(set(prompts), key=len, reverse=True)


def new_tokens(options: argparse.Namespace) -> int:
    """Return the largest number of tokens in an answer."""
    return 5 if options.tiny else int(options.new_tokens)


@contextmanager
def masked(model: Any, mask: HeadMask | None) -> Iterator[None]:
    """Prune a mask's heads by hooks inside the block."""
    context: AbstractContextManager[Any] = mask.applied_to(model) if mask else nullcontext()
    with context:
        yield


@torch.inference_mode()
def generate_batch(
    model: Any, prompts: Sequence[Prompt], longest: int, width: int = 0, **settings: Any
) -> list[list[int]]:
    """Decode one batch greedily by `generate`, padded on the left to `width` or to its longest prompt."""
    width = max(width, *map(len, prompts))
    padding = model.generation_config.pad_token_id
    ids = torch.tensor([[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    attended = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=attended.to(model.device),
        max_new_tokens=longest,
        do_sample=False,
        **settings,
    )
    ends = set(end_tokens(model.generation_config))
    return [cut(answer, ends) for answer in out[:, width:].tolist()]


def cut(answer: list[int], ends: set[int]) -> list[int]:
    """Return an answer up to its first end token."""
    stop = next((i + 1 for i, token in enumerate(answer) if token in ends), len(answer))
    return answer[:stop]


def generated(
    model: Any, prompts: Sequence[Prompt], mask: HeadMask | None, batch: int, longest: int, **settings: Any
) -> Answers:
    """Decode prompts in batches by `generate` under one mask."""
    out: Answers = {}
    with masked(model, mask):
        for begin in range(0, len(prompts), batch):
            part = prompts[begin : begin + batch]
            answers = generate_batch(model, part, longest, **settings)
            out |= {(prompt, mask): answer for prompt, answer in zip(part, answers, strict=True)}
    return out


def seconds_of(device: str, function: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a function returns, and the seconds until the device has finished."""
    synchronize(device)
    begin = time.perf_counter()
    out = function()
    synchronize(device)
    return out, time.perf_counter() - begin


def best_batch(
    model: Any, prompts: Sequence[Prompt], options: argparse.Namespace, **settings: Any
) -> tuple[int, dict[str, float | str]]:
    """Return the batch size at which `generate` decodes most tokens a second, and the rates by size."""
    rates: dict[str, float | str] = {}
    for batch in sorted({min(batch, len(prompts)) for batch in ([4] if options.tiny else options.batches)}):
        part, longest = prompts[:batch], min(64, new_tokens(options))
        try:
            generate_batch(model, part, 4, **settings)
            answers, seconds = seconds_of(options.device, lambda: generate_batch(model, part, longest, **settings))  # noqa: B023
        except torch.OutOfMemoryError:
            rates[str(batch)] = "out of memory"
            torch.cuda.empty_cache()
            break
        rates[str(batch)] = sum(map(len, answers)) / seconds
    numbers = {int(batch): rate for batch, rate in rates.items() if isinstance(rate, float)}
    if not numbers:
        raise torch.OutOfMemoryError("no batch fits")
    return max(numbers, key=lambda batch: numbers[batch]), rates


# ---------------------------------------------------------------------- comparison


@torch.inference_mode()
def is_near_tie(model: Any, prompt: Prompt, mask: HeadMask | None, answer: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two answers differ first where the model's logits of both tokens are near the largest."""
    i = next((i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b), None)
    if i is None:  # one ends before the other without an end token
        return False
    with masked(model, mask):
        ids = torch.tensor([[*prompt, *answer[:i]]], device=model.device)
        logits = model(ids, use_cache=False).logits[0, -1]
    pair = logits[[answer[i], other[i]]]
    tied = torch.stack([logits.max(), pair.min()])  # as if these were all tokens
    return bool(near_tied_argmax(tied[None])[0])


def compare_texts(model: Any, answers: Answers, expected: Answers) -> dict[str, Any]:
    """Compare answers; refuse differences that no near-tie explains."""
    if answers.keys() != expected.keys():
        raise WrongResultsError("answers are missing")
    different = [key for key in answers if answers[key] != expected[key]]
    wrong = [key for key in different if not is_near_tie(model, *key, answers[key], expected[key])]
    if wrong:
        prompt, mask = wrong[0]
        raise WrongResultsError(
            f"{len(wrong)} of {len(answers)} texts differ, first under {mask}: prompt {prompt[:8]}…"
        )
    return {"texts": len(answers), "identical": len(answers) - len(different), "near_ties": len(different)}


def rates(answers: Mapping[Any, Sequence[int]], seconds: float) -> dict[str, float]:
    """Return tokens and tokens a second."""
    tokens = sum(map(len, answers.values()))
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}
