"""Measure the distance of interventions and of other checkpoints from a dense model, and write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lm_eval
import pandas as pd
import torch

from lmeval_prune.architectures import position_limit
from lmeval_prune.artefacts import without_nan, write_artefact, write_text
from lmeval_prune.attributes import replaced
from lmeval_prune.comparison.distance import (
    COLUMNS,
    Summary,
    first_difference,
    summarize,
    summarize_answers,
    table,
)
from lmeval_prune.comparison.options import DistanceOptions
from lmeval_prune.comparison.tokens import Text, applied, logits_of, masks_of, pass_distances, token_distances
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import HeadMask, Intervention
from lmeval_prune.models import generation
from lmeval_prune.models.generation import token_windows
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.models.identity import Checkpoint
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.pruners.calibration import read_calibration
from lmeval_prune.pruners.options import TextOptions
from lmeval_prune.tasks.loading import check_task_names, task_manager

# answers to requests that are recorded
PLACEHOLDERS = {"generate_until": "", "loglikelihood": (0.0, False), "loglikelihood_rolling": 0.0}


def record_requests(lm: PrunedHFLM, **evaluation: Any) -> dict[str, list[Any]]:
    """Return the requests of an evaluation by kind, each once; `evaluation` are arguments of `simple_evaluate`."""
    recorded: dict[str, dict[int, Any]] = {}  # lm-eval repeats a request for each of its attempts

    def record(kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        recorded.setdefault(kind, {}).update({id(request): request for request in requests})
        return [PLACEHOLDERS[kind]] * len(requests)

    with replaced(lm, answer=record):
        lm_eval.simple_evaluate(lm, predict_only=True, bootstrap_iters=0, **evaluation)
    return {kind: list(requests.values()) for kind, requests in recorded.items()}


def distances_from(
    pretrained: str,
    settings: DistanceOptions,
    variants: Mapping[str, Sequence[Intervention]],
    checkpoints: Sequence[str],
) -> dict[str, pd.DataFrame]:
    """Measure interventions on a model, and other checkpoints, on the settings' text or task; see `measure`."""
    dense = Checkpoint({**settings.model_args, "pretrained": pretrained})  # checked before weights are loaded
    manager = task_manager(settings.metadata)
    if settings.task:
        check_task_names(manager, [settings.task])
    for intervention in chain.from_iterable(variants.values()):
        intervention.fit_to(dense.map)
    for name in checkpoints:
        check_tokenizers(dense, Checkpoint({**settings.model_args, "pretrained": name}))
    if settings.text and (limit := position_limit(dense.map.model)) and settings.tokens > limit:
        raise InputError(f"tokens={settings.tokens}: {pretrained} has {limit} positions; give fewer")
    arguments = {"engine": "batched", "deterministic": True, **settings.model_args}
    arguments |= {"device": settings.device} if settings.device else {}
    lm, others = (
        PrunedHFLM(pretrained, **arguments),
        {name: partial(PrunedHFLM, name, **arguments) for name in checkpoints},
    )
    if settings.text:
        options = TextOptions(text=settings.text, windows=settings.windows, tokens=settings.tokens, seed=settings.seed)
        batches = read_calibration(lm.tokenizer, options).batches
        rows = (tuple(row.tolist()) for batch in batches for row in batch.ids)
        texts = [Text(row[:1], row[1:], ("text", number)) for number, row in enumerate(rows)]
        return measure(lm, {}, variants, others, texts)
    requests = record_requests(
        lm,
        tasks=[settings.task],
        task_manager=manager,
        limit=settings.limit,
        num_fewshot=settings.num_fewshot,
        gen_kwargs=settings.gen_kwargs or None,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.apply_chat_template,  # the default of lm-eval's command
        system_instruction=settings.system_instruction,
    )
    return measure(lm, requests, variants, others)


def check_tokenizers(dense: Checkpoint, other: Checkpoint) -> None:
    """Refuse a model with another tokenizer than the dense model's."""
    if other.tokenizer.get_vocab() != dense.tokenizer.get_vocab():
        names = [str(checkpoint.loading["pretrained"]) for checkpoint in (other, dense)]
        raise InputError(f"{names[0]} has another tokenizer than {names[1]}")


def document(request: Any) -> tuple[str, int]:
    return str(request.task_name), int(request.doc_id)


# ---------------------------------------------------------------------- measuring


Answers = list[tuple[list[int], bool]]  # greedy ones: token ids with the EOS token; whether `max_gen_toks` ended it


def frames_of(
    texts: Sequence[Text], tokens: Mapping[str, Sequence[torch.Tensor]], answers: Mapping[str, Answers]
) -> dict[str, pd.DataFrame]:
    """Return the texts of each variant: document, distances of its tokens (arrays), and greedy answers if there are.

    `tokens` are the `COLUMNS` of each token of a text's continuation, `answers` also those of the dense model
    (`DENSE`), which has no distances.
    """
    tasks, numbers = zip(*(text.document for text in texts), strict=True)
    frames = {}
    for name in dict.fromkeys([*tokens, *answers]):
        columns: dict[str, Any] = {"task": tasks, "doc_id": numbers}
        for column, title in enumerate(COLUMNS if name in tokens else ()):
            columns[title] = [rows[:, column].numpy() for rows in tokens[name]]
        if answers:
            own, cut_off = zip(*answers[name], strict=True)
            differences = map(first_difference, (dense for dense, _ in answers[DENSE]), own)
            columns |= {"first_difference": pd.array(list(differences), dtype="Int32")}
            columns |= {"answer_tokens": list(map(len, own)), "cut_off": cut_off}
        frames[name] = pd.DataFrame(columns)
    return frames


def measure(
    lm: PrunedHFLM,
    requests: Mapping[str, list[Any]],
    variants: Mapping[str, Sequence[Intervention]],
    others: Mapping[str, Callable[[], PrunedHFLM]] = MappingProxyType({}),
    texts: Sequence[Text] = (),
) -> dict[str, pd.DataFrame]:
    """Measure variants on given texts, or on the dense model's greedy answers to lm-eval's requests, by kind.

    `variants` are interventions by name; head masks run in one batch. `others` are functions that load other models
    with the same tokenizer; they are called one after another. Returns the texts of each variant, see `frames_of`.
    """
    texts = list(texts)
    generated = requests.get("generate_until", [])
    for kind in ("loglikelihood", "loglikelihood_rolling"):
        scored = requests.get(kind, [])
        windows = token_windows(lm, kind, scored, disable_tqdm=True)
        texts += [Text(*window, document(request)) for request in scored for window in windows[id(request)]]
    if texts and generated:
        raise InputError("some of these tasks generate, others score texts; measure them one at a time")
    answers: dict[str, Answers] = {}
    if generated:
        masks = masks_of(variants)
        answers = greedy_answers(lm, generated, {DENSE: None, **masks})
        for name in [name for name in variants if name not in masks]:
            with applied(variants[name], lm.model, lm.model_map):
                answers |= greedy_answers(lm, generated, {name: None})
        for request, (answer, _) in zip(generated, answers[DENSE], strict=True):
            params, _ = generation.engine_settings(lm, generation.without_sampling(request.args[1]))
            prompt = generation.prompt_tokens(lm, request, params.max_new_tokens)
            texts.append(Text(prompt, tuple(answer), document(request)))
    assert lm.engine is not None
    tokens = token_distances(lm.engine, variants, texts)
    for name, load_other in others.items():
        with closing(load_other()) as other:
            answers |= greedy_answers(other, generated, {name: None}) if generated else {}
            tokens |= pass_distances(logits_of(lm.model), {name: logits_of(other.model)}, texts)
        del other  # before the next one is loaded
    return frames_of(texts, tokens, answers)


def greedy_answers(lm: PrunedHFLM, requests: Sequence[Any], masks: Mapping[str, HeadMask | None]) -> dict[str, Answers]:
    """Answer requests greedily under each mask, all in one batch."""
    names, count = list(masks), len(masks)
    answers: dict[str, Answers] = {name: [([], False)] * len(requests) for name in names}

    def done(index: int, _: str, tokens: list[int], ending: Any) -> None:
        number, mask = divmod(index, count)
        answers[names[mask]][number] = tokens, ending.cut_off

    repeated = [request for request in requests for _ in names]
    row_masks = list(masks.values()) * len(requests)
    assert lm.engine is not None
    generation.generate_until(lm, lm.engine, repeated, [0] * len(repeated), done, 0, row_masks, is_greedy=True)
    return answers


def write(output: str, pretrained: str, settings: DistanceOptions, frames: Mapping[str, pd.DataFrame]) -> str:
    """Write the JSON file and the table, and return what the command prints; `frames` are those of `measure`."""
    summaries = {name: summarize(frame) for name, frame in frames.items() if name != DENSE}
    dense: Summary = {}
    if DENSE in frames:
        answer_summary = summarize_answers(frames[DENSE])
        dense = {name: answer_summary[name] for name in ("mean_tokens", "mean_tokens_se", "cut_off", "cut_off_se")}
    variants: dict[str, Any] = {}
    for variant in summaries:  # of each text, the means over its tokens
        frame = frames[variant]
        means = {name: [float(values.mean()) for values in frame[name]] for name in COLUMNS}
        rows = frame.assign(tokens=frame["kld"].map(len), **means).to_dict("records")
        plain = [{key: None if x is pd.NA else without_nan(x) for key, x in row.items()} for row in rows]
        variants[variant] = {**summaries[variant], "texts": plain}
    content = {"model": pretrained, "settings": vars(settings), "dense": dense, "variants": variants}
    write_artefact(output, "lmeval-prune/distance", 1, content)
    lines = table(({DENSE: dense} if dense else {}) | summaries)
    first = next(iter(summaries.values()))
    text = f"{lines}\n\n{first['tokens']} tokens of {first['documents']} documents; ±: standard error over documents.\n"
    write_text(Path(output).with_suffix(".md"), text)
    return f"{text}{output} and .md"
