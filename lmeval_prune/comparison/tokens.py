"""Distance between next-token distributions, token by token of given texts; what pruning did to a model, in a line.

With p of the dense model and q of a variant, before each token t of a text:

- `kld`: the KL divergence Σ p(x) · (log p(x) − log q(x)) over the vocabulary, in nats;
- `same_top`: 1 if both give the highest probability to the same token, else 0;
- `delta_p`: q(t) − p(t);
- `log_ratio`: log q(t) − log p(t).

Names and definitions are those of llama.cpp's `llama-perplexity --kl-divergence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

import torch

from lmeval_prune.architectures import ModelMap, input_device, position_limit
from lmeval_prune.comparison.distance import summarize_texts
from lmeval_prune.decoding import Engine, LikelihoodRequest
from lmeval_prune.interventions import HeadMask, Intervention
from lmeval_prune.pruners.calibration import encode
from lmeval_prune.tasks import data

SENTENCES = 48  # packaged ones on which the effect of pruning is printed
CHUNK = 64  # tokens of a plain pass whose logits are compared at once
Logits = Callable[[Sequence[int]], torch.Tensor]  # of the next token after each token of a text, (tokens, vocabulary)


class Text(NamedTuple):
    """A text whose tokens are compared."""

    context: tuple[int, ...]  # token ids before the compared ones, at least one
    continuation: tuple[int, ...]  # compared token ids, at least one
    document: tuple[str, int]  # task and number; texts with the same document are dependent


def reduce_distances(tokens: torch.Tensor, logits: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the `COLUMNS` of each variant, (rows, columns), given the dense model's logits and then the variants'."""
    reference = _log_softmax(next(logits))
    probabilities, top, index = reference.exp(), reference.argmax(-1), tokens.unsqueeze(-1)
    before = reference.gather(-1, index).squeeze(-1)
    for variant_logits in logits:
        other = _log_softmax(variant_logits)
        terms = torch.where(probabilities > 0, probabilities * (reference - other), 0)
        after = other.gather(-1, index).squeeze(-1)
        same_top = (other.argmax(-1) == top).to(other.dtype)
        yield torch.stack([terms.sum(-1), same_top, after.exp() - before.exp(), after - before], -1)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1, dtype=torch.float32 if logits.device.type == "mps" else torch.float64)


def token_distances(
    engine: Engine, variants: Mapping[str, Sequence[Intervention]], texts: Sequence[Text]
) -> dict[str, list[torch.Tensor]]:
    """Compute the `COLUMNS` of each token of texts under interventions on a model.

    Head masks run in one batch of the engine; other interventions, and masks on a model that the engine does not
    score, by plain passes of each text.

    Returns:
        By variant, a tensor (tokens of the continuation, columns) for each text.
    """
    masks = masks_of(variants)
    if masks and engine.unscored:
        masks = {}
    results: dict[str, list[Any]] = {name: [None] * len(texts) for name in masks}
    requests = [
        LikelihoodRequest(text.context, text.continuation, mask, (name, number))
        for number, text in enumerate(texts)
        for name, mask in masks.items()
    ]
    with closing(engine.compare(requests, reduce_distances)) as compared:
        for request, distances in compared:
            name, number = request.tag
            results[name][number] = distances
    others = {name: logits_under(each, engine.model_map) for name, each in variants.items() if name not in masks}
    results |= pass_distances(logits_of(engine.model), others, texts) if others else {}
    return {name: results[name] for name in variants}


def masks_of(variants: Mapping[str, Sequence[Intervention]]) -> dict[str, HeadMask]:
    return {
        name: interventions[0]
        for name, interventions in variants.items()
        if len(interventions) == 1 and isinstance(interventions[0], HeadMask)
    }


@contextmanager
def applied(interventions: Sequence[Intervention], model: Any, model_map: ModelMap) -> Iterator[None]:
    with ExitStack() as stack:
        for intervention in interventions:
            stack.enter_context(intervention.applied_to(model, model_map))
        yield


def logits_of(model: Any) -> Logits:
    """Return the function that runs a causal model on a text."""
    device = input_device(model)

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        output: torch.Tensor = model(torch.tensor([list(tokens)], device=device), use_cache=False).logits[0]
        return output

    return logits


def logits_under(interventions: Sequence[Intervention], model_map: ModelMap) -> Logits:
    """Return the function that runs a causal model on a text under interventions."""
    return applied(interventions, model_map.model, model_map)(logits_of(model_map.model))


def pass_distances(
    dense: Logits, variants: Mapping[str, Logits], texts: Sequence[Text]
) -> dict[str, list[torch.Tensor]]:
    """Return the `COLUMNS` of each text's tokens, by variant, by plain passes of each text."""
    results: dict[str, list[torch.Tensor]] = {name: [] for name in variants}
    for text in texts:
        tokens, first = (text.context + text.continuation)[:-1], len(text.context) - 1
        with torch.inference_mode():
            reference = dense(tokens)[first:]
            following = torch.tensor(text.continuation, device=reference.device).split(CHUNK)
            for name, run in variants.items():
                chunks = zip(following, reference.split(CHUNK), run(tokens)[first:].split(CHUNK), strict=True)
                parts = [next(reduce_distances(part, iter(logits))) for part, *logits in chunks]
                results[name].append(torch.cat(parts).cpu())
    return results


# ---------------------------------------------------------------------- what pruning did


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
    summary = summarize_texts(pass_distances(logits_of(model), {"": pruned}, texts)[""])
    values = (summary[name] for name in ("mean_kld", "same_top", "ppl_ratio"))
    kld, same_top, ratio = (math.inf if value is None else value for value in values)
    measured = f"mean KLD {kld:.3f}, same top token {same_top:.0%}, perplexity × {ratio:,.2f}"
    print(f"  from the dense model: {measured}, on {summary['tokens']} tokens of {where}")
    if same_top < 0.5:
        print("  warning: less than half of the top tokens are the same: remove less, by a better method, or train it")
