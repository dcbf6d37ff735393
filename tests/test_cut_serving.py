"""What `benchmarks/cut_serving.py` checks before it writes a time."""

from __future__ import annotations

from typing import Any

import cut_serving
import pytest
import torch

from tests.tiny_models import tiny

PROMPT = [1, 2, 3]


def greedy(model: Any, new: int, forbidden: list[int]) -> list[int]:
    ids = list(PROMPT)
    for _ in range(new):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        logits[forbidden] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("ends", [None, 5, [5, 6]])
def test_answers_of_a_server_are_greedy(monkeypatch: pytest.MonkeyPatch, ends: Any) -> None:
    """A token that is not the likeliest is refused, also of a model without end tokens; so is a model that gives NaN."""
    model: Any = tiny("llama")
    model.generation_config.eos_token_id = ends
    right = greedy(model, 4, [] if ends is None else [ends] if isinstance(ends, int) else ends)
    answers = [right]
    monkeypatch.setattr(cut_serving, "_answers", lambda *_: answers)
    server: Any = None
    assert cut_serving._check(model, server, [PROMPT], 4)["largest_gap"] == 0
    answers[0] = [*right[:-1], (right[-1] + 1) % 5]
    with pytest.raises(AssertionError, match="below the largest logit"):
        cut_serving._check(model, server, [PROMPT], 4)
    answers[0] = right
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(AssertionError, match="below the largest logit"):
        cut_serving._check(model, server, [PROMPT], 4)
