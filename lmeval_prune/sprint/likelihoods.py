"""The model's own likelihood of swept answers: the mean log-probability of their tokens, under the unpruned model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from tqdm import tqdm

from lmeval_prune.artefacts import digest
from lmeval_prune.decoding import LikelihoodRequest
from lmeval_prune.errors import InputError
from lmeval_prune.models import generation
from lmeval_prune.models.answer_store import read_answers

KIND = "answer_logprobs"  # of records in the answer store: sum of log-probabilities, and number of tokens
PART = 1024  # answers that are scored and stored together, so that little is lost by a kill
Text = tuple[tuple[int, ...], tuple[int, ...]]  # tokens of a prompt and of an answer, with its end token


def check_scoring(lm: Any) -> None:
    """Refuse a model whose answers the engine cannot score."""
    if reason := lm.engine.unscored:
        raise InputError(f"the engine computes no log-likelihoods of this model ({reason}); leave out likelihood")
    if lm.world_size > 1:
        raise InputError("likelihood=true runs in one process; sweep in several without it, then once with it in one")


def add_logprobs(lm: Any, tasks: Mapping[str, Any], cells: Sequence[dict[str, Any]]) -> None:
    """Set `logprob` of cells whose answers have tokens; equal answers to a question are scored once, and stored.

    Args:
        lm: a `PrunedHFLM` with an answer store.
        tasks: the swept tasks by name, with their requests.
        cells: rows of `cells.parquet`.
    """
    store = lm.answering.store
    answers = {record["key"]: record.get("tokens") for record in read_answers(store.folder)}
    prompts = _prompts(lm, tasks)
    texts = {
        index: (prompts[cell["task"], cell["doc_id"]], tuple(answers[cell["answer"]] or ()))
        for index, cell in enumerate(cells)
    }
    model = [lm.identity, lm.answering.interventions(), lm.answering.versions]
    keys = {text: digest([KIND, model, text]) for text in dict.fromkeys(texts.values()) if text[1]}
    _score(lm, {key: text for text, key in keys.items() if key not in store.responses})
    for index, cell in enumerate(cells):
        if texts[index] in keys:
            total, count = store.responses[keys[texts[index]]]
            cell["logprob"] = total / count


def _prompts(lm: Any, tasks: Mapping[str, Any]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Return the tokens of each prompt, by task and document."""
    prompts: dict[tuple[str, int], tuple[int, ...]] = {}
    for name, task in tasks.items():
        settings = generation.without_sampling(task.get_config("generation_kwargs"))
        length = generation.engine_settings(lm, settings)[0].max_new_tokens
        tokens = {digest(request.args[0]): generation.prompt_tokens(lm, request, length) for request in task.instances}
        prompts |= {(name, doc_id): tokens[prompt] for doc_id, prompt in task.prompts.items()}
    return prompts


def _score(lm: Any, texts: Mapping[str, Text]) -> None:
    """Score texts by key and store the results, part by part."""
    store, waiting = lm.answering.store, list(texts.items())
    with tqdm(total=len(waiting), desc="log-probabilities of answers", disable=not waiting) as bar:
        for begin in range(0, len(waiting), PART):
            part = waiting[begin : begin + PART]
            requests = [LikelihoodRequest(prompt, answer, None, key) for key, (prompt, answer) in part]
            with closing(lm.engine.score(requests)) as results:
                for request, result in results:
                    total = float(result.logprobs.double().sum())
                    if not math.isfinite(total):
                        raise InputError("the model gives an answer a log-probability that is not finite")
                    store.add(request.tag, [total, len(request.continuation)], {"kind": KIND})
                    bar.update()
