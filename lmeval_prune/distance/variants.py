"""Measure the distance of interventions and of other checkpoints from a dense model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmeval_prune.distance.options import DistanceOptions
from lmeval_prune.distance.summary import Summary, first_difference, summarize_answers, summarize_tokens
from lmeval_prune.distance.texts import DistanceLM, document
from lmeval_prune.distance.tokens import COLUMNS, Text, logits_of, pass_distances, token_distances
from lmeval_prune.interventions import HeadMask, Intervention
from lmeval_prune.models import generation
from lmeval_prune.models.head_router import DENSE


@dataclass
class Answers:
    """Greedy answers of a variant, by request."""

    tokens: list[list[int]]  # token ids, with the end token
    cut_off: list[bool]  # whether `max_gen_toks` ended the answer


@dataclass
class Variant:
    """Distances of a variant.

    Attributes:
        texts: texts that were compared; continuations are the dense model's answers, or given.
        tokens: `COLUMNS` of each token of their continuations, by text.
        answers, dense_answers: greedy answers of the variant and of the dense model; None for given texts.
    """

    texts: Sequence[Text]
    tokens: Sequence[torch.Tensor]
    answers: Answers | None = None
    dense_answers: Answers | None = None

    def summary(self) -> Summary:
        """Summarise distances and answers over all texts."""
        documents = [text.document for text, rows in zip(self.texts, self.tokens, strict=True) for _ in rows]
        summary = summarize_tokens(torch.cat(list(self.tokens)).double().numpy(), documents)
        if self.answers and self.dense_answers:
            texts = [text.document for text in self.texts]
            summary |= summarize_answers(self.dense_answers.tokens, self.answers.tokens, self.answers.cut_off, texts)
        return summary

    def by_text(self) -> list[dict[str, Any]]:
        """Return the number of tokens and the means of `COLUMNS` of each text, and what is known of its answer."""
        rows = []
        for number, (text, tokens) in enumerate(zip(self.texts, self.tokens, strict=True)):
            row = {"document": text.document, "tokens": len(tokens)}
            row |= dict(zip(COLUMNS, np.asarray(tokens.mean(0)).tolist(), strict=True))
            if self.answers and self.dense_answers:
                answer = self.answers.tokens[number]
                row |= {"first_difference": first_difference(self.dense_answers.tokens[number], answer)}
                row |= {"answer_tokens": len(answer), "cut_off": self.answers.cut_off[number]}
            rows.append(row)
        return rows


def measure(
    lm: DistanceLM,
    settings: DistanceOptions,
    variants: Mapping[str, Intervention],
    checkpoints: Sequence[str],
    texts: Sequence[Text],
) -> dict[str, Variant]:
    """Measure variants on given texts, or on the dense model's greedy answers to its recorded requests.

    Args:
        lm: the dense model.
        settings: with which `lm` was loaded.
        variants: interventions by name.
        checkpoints: other models with the same tokenizer; they are loaded one after another.
        texts: given texts; empty for recorded requests.
    """
    requests = lm.requests.get("generate_until", [])
    answers = answers_under(lm, requests, variants)
    texts = texts or answered_texts(lm, requests, answers[DENSE])
    assert lm.engine is not None
    tokens = token_distances(lm.engine, variants, texts)
    for name in checkpoints:
        other = DistanceLM(name, settings)
        answers |= greedy_answers(other, requests, {name: None})
        passes = pass_distances(logits_of(lm.model), {name: logits_of(other.model)}, texts)
        tokens[name] = [distances for _, _, distances in passes]
        other.close()
    return {
        name: Variant(texts, rows, *((answers[name], answers[DENSE]) if requests else ()))
        for name, rows in tokens.items()
    }


def answered_texts(lm: DistanceLM, requests: Sequence[Any], answers: Answers) -> list[Text]:
    """Return requests with their answers as texts."""
    texts = []
    for request, answer in zip(requests, answers.tokens, strict=True):
        params, _ = generation.engine_settings(lm, generation.without_sampling(request.args[1]))
        prompt = generation.prompt_tokens(lm, request, params.max_new_tokens)
        texts.append(Text(prompt, tuple(answer), document(request)))
    return texts


def answers_under(lm: DistanceLM, requests: Sequence[Any], variants: Mapping[str, Intervention]) -> dict[str, Answers]:
    """Answer requests by the dense model and under interventions, head masks in one batch."""
    masks = {name: each for name, each in variants.items() if isinstance(each, HeadMask)}
    answers = greedy_answers(lm, requests, {DENSE: None, **masks})
    for name, intervention in variants.items():
        if name not in masks:
            with intervention.applied_to(lm.model, lm.model_map):
                answers |= greedy_answers(lm, requests, {name: None})
    return answers


def greedy_answers(lm: DistanceLM, requests: Sequence[Any], masks: Mapping[str, HeadMask | None]) -> dict[str, Answers]:
    """Answer requests greedily under each mask, all in one batch."""
    names, count = list(masks), len(masks)
    answers = {name: Answers([[]] * len(requests), [False] * len(requests)) for name in names}

    def done(index: int, _: str, tokens: list[int], ending: Any) -> None:
        number, mask = divmod(index, count)
        answers[names[mask]].tokens[number] = tokens
        answers[names[mask]].cut_off[number] = ending.cut_off

    repeated = [request for request in requests for _ in names]
    row_masks = list(masks.values()) * len(requests)
    assert lm.engine is not None
    generation.generate_until(lm, lm.engine, repeated, [0] * len(repeated), done, 0, row_masks, greedy=True)
    return answers
