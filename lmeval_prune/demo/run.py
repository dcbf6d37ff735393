"""The measurements of the demo."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from transformers import AutoTokenizer

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.architectures.identity import model_name
from lmeval_prune.artefacts import CREATED_BY, without_nan, write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import load_pretrained
from lmeval_prune.checkpoints.pruned import check_folder
from lmeval_prune.decoding import Engine, LikelihoodRequest, Request, SamplingParams
from lmeval_prune.distance.effect import sentence
from lmeval_prune.distance.summary import summarize_texts
from lmeval_prune.distance.tokens import Text, token_distances
from lmeval_prune.interventions import HeadMask, Plan
from lmeval_prune.profiling.costs import parameters
from lmeval_prune.profiling.speed import generate_rate
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.surgery.cut import cut_to
from lmeval_prune.tasks import data

PROBLEMS, QUESTIONS = "tiny_cloze", "tiny_words"  # packaged data: what is counted, and what is answered freely
SHARES = (0.03, 0.1, 0.2)  # of all heads
DRAWS = 3  # of random heads
SHOWN = 0.1  # the share of the answers that the page shows
WINDOWS, WINDOW = 16, 64  # of the text that the scores of heads read, and their tokens
TEXTS = 64  # completed problems over which distances are measured
PROMPTS, MASKS, NEW_TOKENS = 8, 9, 16
CUT = 0.25  # of the parameters of heads and channels


@dataclass
class Subject:
    """The dense model and what is measured on it."""

    name: str
    model: Any
    tokenizer: Any
    model_map: ModelMap
    engine: Engine

    @classmethod
    def load(cls, pretrained: str) -> Self:
        """Load the model in float32."""
        path = embedded.resolve(pretrained)
        model = load_pretrained(path, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model_map = map_model(model)
        return cls(model_name(pretrained), model, tokenizer, model_map, Engine(model, tokenizer, model_map=model_map))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text without special tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


@dataclass
class Variants:
    """Head masks by name: the least important heads, and random ones.

    Attributes:
        ranked: by share of the heads.
        drawn: by share, one for each draw.
        scores: importance of the heads, by layer.
    """

    ranked: dict[float, HeadMask]
    drawn: dict[float, list[HeadMask]]
    scores: dict[str, list[float]]

    @property
    def masks(self) -> dict[str, HeadMask]:
        """Return all masks by name."""
        ranked = {ranked_name(share): mask for share, mask in self.ranked.items()}
        return ranked | {drawn_name(share, n): m for share, masks in self.drawn.items() for n, m in enumerate(masks)}


def ranked_name(share: float) -> str:
    """Return the name of the mask of the least important heads."""
    return f"{share:.0%} least important"


def drawn_name(share: float, draw: int) -> str:
    """Return the name of a draw of random heads."""
    return f"{share:.0%} random, draw {draw + 1}"


def run(pretrained: str, folder: Path, progress: TextIO) -> dict[str, Any]:
    """Measure everything, write `demo.json`, and return it.

    Args:
        pretrained: a causal language model, as for lm_eval.
        folder: folder of `demo.json` and of the cut model.
        progress: where each part is named before it begins.
    """
    check_folder(folder / "cut", [pretrained])
    began = time.perf_counter()

    def begin(part: str) -> None:
        print(f"{time.perf_counter() - began:4.0f} s  {part}", file=progress, flush=True)

    begin("scores of heads")
    subject = Subject.load(pretrained)
    first, second = (data.load(PROBLEMS, split).to_list() for split in ("train", "test"))
    text = calibration(subject, [sentence(problem) for problem in first])
    variants = make_variants(subject, text)
    results: dict[str, Any] = {
        "created_by": CREATED_BY,
        "model": subject.name,
        "threads": torch.get_num_threads(),
        "heads": subject.model_map.total_heads,
        "task": f"prune_{PROBLEMS}",
        "problems": len(second),
        "texts": min(TEXTS, len(second)),
        "shares": SHARES,
        "scores": variants.scores,
        "masks": {name: list(mask.heads) for name, mask in variants.masks.items()},
    }
    begin("distances")
    texts = [_text(subject, problem, number) for number, problem in enumerate(second[:TEXTS])]
    tokens = token_distances(subject.engine, {name: [mask] for name, mask in variants.masks.items()}, texts)
    results["distances"] = {name: summarize_texts(tensors) for name, tensors in tokens.items()}
    begin("accuracy")
    results["accuracy"] = accuracies(subject, {"dense": None, **variants.masks}, second)
    begin("answers")
    results["answers"] = answers(subject, variants)
    begin("cut")
    results["cut"] = cut_quarter(subject, text, folder / "cut", second)
    results["seconds"] = round(time.perf_counter() - began, 1)
    write_text(folder / "demo.json", json.dumps(without_nan(results), indent=1) + "\n")
    return results


# --------------------------------------------------------------------------- masks


def calibration(subject: Subject, sentences: Sequence[str]) -> CalibrationText:
    """Return windows of the sentences, one after another."""
    ids = subject.encode(" ".join(sentences))
    windows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)[:WINDOWS]
    return CalibrationText.from_windows("the packaged problems of the first half", windows)


def make_variants(subject: Subject, text: CalibrationText) -> Variants:
    """Choose heads by norm + entropy, and at random."""
    ranked: dict[float, HeadMask] = {}
    drawn: dict[float, list[HeadMask]] = {}
    scores: Mapping[str, torch.Tensor] = {}
    for share in SHARES:
        plan = _plan(subject, "norm_entropy", {}, share, text, scores)
        scores = plan.scores
        ranked[share] = _mask(plan)
        drawn[share] = [_mask(_plan(subject, "random", {"seed": draw}, share)) for draw in range(DRAWS)]
    return Variants(ranked, drawn, {key: value.tolist() for key, value in scores.items()})


def _plan(
    subject: Subject,
    method: str,
    options: dict[str, Any],
    share: float,
    text: CalibrationText | None = None,
    scores: Mapping[str, torch.Tensor] | None = None,
) -> Plan:
    """Return the plan that removes a share of all heads."""
    pruning = PruneOptions(ratio=share, budget="heads", unit="head", allocation="global", allow_empty_layer=True)
    return list(stages(make_pruner(method, options), subject.model_map, pruning, text, scores=scores or {}))[-1]


def _mask(plan: Plan) -> HeadMask:
    """Return the heads of a plan, of which there is at least one."""
    assert plan.mask
    return plan.mask


# --------------------------------------------------------------------------- distance and accuracy


def _text(subject: Subject, problem: Mapping[str, Any], number: int) -> Text:
    """Return a completed problem, all tokens of which but the first are compared."""
    ids = subject.encode(sentence(problem))
    return Text(ids[:1], ids[1:], (PROBLEMS, number))


def accuracies(
    subject: Subject,
    masks: Mapping[str, HeadMask | None],
    problems: Sequence[Mapping[str, Any]],
) -> dict[str, list[bool]]:
    """Return, by mask, whether each problem's most probable choice is the right one."""
    requests = [
        LikelihoodRequest(subject.encode(problem["question"]), subject.encode(f" {choice}"), mask, (name, i, j))
        for i, problem in enumerate(problems)
        for j, choice in enumerate(problem["choices"])
        for name, mask in masks.items()
    ]
    values: dict[tuple[str, int], dict[int, float]] = {}
    for request, result in subject.engine.score(requests):
        name, i, j = request.tag
        values.setdefault((name, i), {})[j] = float(result.logprobs.sum())
    best = {key: max(likelihoods, key=likelihoods.__getitem__) for key, likelihoods in values.items()}
    return {name: [best[name, i] == problem["gold"] for i, problem in enumerate(problems)] for name in masks}


# --------------------------------------------------------------------------- answers


def answers(subject: Subject, variants: Variants) -> dict[str, Any]:
    """Decode prompts under nine masks by the engine, and by `generate` one mask at a time, and compare the texts."""
    questions = data.load(QUESTIONS, "test")["question"][:PROMPTS]
    prompts = [_chat(subject, question) for question in questions]
    masks: dict[str, HeadMask | None] = {"dense": None}
    masks |= {ranked_name(share): variants.ranked[share] for share in SHARES}
    masks |= {drawn_name(share, n): m for share in SHARES[1:] for n, m in enumerate(variants.drawn[share])}
    masks = dict(list(masks.items())[:MASKS])
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    requests = [
        Request(prompt, mask, params, tag=(name, i)) for i, prompt in enumerate(prompts) for name, mask in masks.items()
    ]
    list(subject.engine.decode(requests[:2]))  # what is slow only once, of both
    list(_generate(subject, prompts[:1], None))
    began = time.perf_counter()
    texts = {request.tag: subject.tokenizer.decode(tokens) for request, tokens in subject.engine.decode(requests)}
    engine = time.perf_counter() - began
    began = time.perf_counter()
    others: dict[tuple[str, int], str] = {}
    for name, mask in masks.items():
        others |= {(name, i): text for i, text in enumerate(_generate(subject, prompts, mask))}
    generate = time.perf_counter() - began
    shown = ["dense", ranked_name(SHOWN), drawn_name(SHOWN, 0)]
    return {
        "prompts": len(prompts),
        "masks": len(masks),
        "new_tokens": NEW_TOKENS,
        "task": f"prune_{QUESTIONS}",
        "identical": sum(texts[key] == others[key] for key in others),
        "texts": len(others),
        "engine_seconds": engine,
        "generate_seconds": generate,
        "shown": [
            {"question": questions[i], "answers": {name: _plain(subject, texts[name, i]) for name in shown}}
            for i in range(3)
        ],
    }


def _plain(subject: Subject, text: str) -> str:
    """Return an answer without its end token; one that has none was cut, and ends with `…`."""
    end = next((token for token in subject.tokenizer.all_special_tokens if text.endswith(token)), "")
    return text.removesuffix(end).strip() if end else f"{text.strip()}…"


def _chat(subject: Subject, question: str) -> tuple[int, ...]:
    """Return the tokens of a question in the chat template, if the model has one."""
    if not subject.tokenizer.chat_template:
        return subject.encode(question)
    messages = [{"role": "user", "content": question}]
    return subject.encode(subject.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _generate(subject: Subject, prompts: Sequence[tuple[int, ...]], mask: HeadMask | None) -> Iterator[str]:
    """Yield the answers of transformers' `generate` to prompts in one batch, under a mask."""
    tokenizer, longest = subject.tokenizer, max(map(len, prompts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": pad}
    applied = mask.applied_to(subject.model, subject.model_map) if mask else nullcontext()
    with torch.inference_mode(), applied:
        rows = subject.model.generate(ids, attention_mask=real, **options)[:, longest:].tolist()
    ends = subject.model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    for row in rows:
        last = next((i for i, token in enumerate(row) if token in ends), len(row))
        yield tokenizer.decode(row[: last + 1])


# --------------------------------------------------------------------------- cut


def cut_quarter(
    subject: Subject, text: CalibrationText, folder: Path, problems: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Cut a quarter of the parameters of heads and channels, and measure the smaller checkpoint."""
    pruning = PruneOptions(ratio=CUT, parts="both")
    plan = list(stages(make_pruner("flap", {}), subject.model_map, pruning, text))[-1]
    cut_to(folder, subject.model, plan, subject.tokenizer)
    smaller = load_pretrained(str(folder), dtype=torch.float32)
    cut = replace(subject, model=smaller, engine=Engine(smaller, subject.tokenizer))
    right = accuracies(cut, {"cut": None}, problems)["cut"]
    speeds = _speeds(subject, smaller)
    return {
        "folder": str(folder),
        "removed": CUT,
        "parameters": [parameters(model)[0] for model in (subject.model, smaller)],
        "bytes": [
            sum(parameter.nbytes for parameter in subject.model.parameters()),
            sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        ],
        **speeds,
        "accuracy": right,
    }


def _speeds(subject: Subject, smaller: Any, rounds: int = 3) -> dict[str, list[float]]:
    """Measure the speeds of both models, through `generate` in a batch, in turn in some rounds.

    Returns:
        `tokens_per_second`: median new tokens a second of the subject and of the smaller model; `speed_ratios`: the
        smaller model's share of the subject's speed in each round.
    """
    ids = torch.full((PROMPTS, 32), subject.encode("the")[0])
    rates: list[list[float]] = [[], []]
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for rate, model in zip(rates, (subject.model, smaller), strict=True):
                measured = generate_rate(model, ids, NEW_TOKENS)
                if turn:  # the first round is slower
                    rate.append(measured)
    ratios = [after / before for before, after in zip(*rates, strict=True)]
    return {"tokens_per_second": [statistics.median(rate) for rate in rates], "speed_ratios": ratios}
