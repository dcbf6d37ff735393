"""What pruning did to a model, in a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmeval_prune.architectures import position_limit
from lmeval_prune.distance.summary import summarize_texts
from lmeval_prune.distance.tokens import Logits, Text, logits_of, other_distances
from lmeval_prune.pruners.calibration import encode
from lmeval_prune.tasks import data

SENTENCES = 48  # of the packaged ones


def sentence(problem: Mapping[str, Any]) -> str:
    """Return a packaged problem completed by its right answer."""
    return f"{problem['question']} {problem['choices'][problem['gold']]}."


def print_effect(model: Any, pruned: Logits, tokenizer: Any, unread: Sequence[Sequence[int]] = ()) -> None:
    """Print how far a pruned model is from the dense one; nothing for a model that predicts no next token.

    `unread` are windows of token ids that were not read for the pruning; without any, packaged sentences are read.
    """
    if tokenizer is None or model.config.is_encoder_decoder or not model.can_generate():
        return
    rows, where = unread, "text that the pruner has not read"
    if not unread:
        problems = data.load("tiny_cloze", "test").select(range(SENTENCES)).to_list()
        rows = [encode(tokenizer, sentence(problem))[: position_limit(model)] for problem in problems]
        where = "packaged sentences"
    texts = [Text(tuple(row[:1]), tuple(row[1:]), ("", number)) for number, row in enumerate(rows)]
    summary = summarize_texts(other_distances(logits_of(model), pruned, texts))
    values = (summary[name] for name in ("mean_kld", "same_top", "ppl_ratio"))
    kld, same_top, ratio = (math.inf if value is None else value for value in values)
    measured = f"mean KLD {kld:.3f}, same top token {same_top:.0%}, perplexity × {ratio:,.2f}"
    print(f"  from the dense model: {measured}, on {summary['tokens']} tokens of {where}")
    if same_top < 0.5:
        print("  warning: less than half of the top tokens are the same: remove less, by a better method, or train it")
