"""Time of the decoding engine against lm-eval's `hf`, one mask at a time at its best batch size.

    GOMP_SPINCOUNT=1000 python benchmarks/sweep_speed.py [--questions 16] [--tokens 128] [--threads 2] [--runs 3]
        [--parts sweep,router,fewshot-4,choice] [--device cpu]

Parts: `sweep`, each question dense and with 8 heads; `fewshot-N`, the same for N questions after the 8 examples of
lm-eval's gsm8k_cot; `router`, some questions with 8 heads each, of as many as leave `hf` full batches; `choice`,
log-likelihoods of choices, dense and with 8 heads, without examples and with 5. Before a ratio is written, the texts of
both are compared: every difference must start where the two largest logits are nearly equal (`choice`: values and the
order of the choices).
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch
import yaml
from _record import environment, timed, write
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.checkpoints import embedded
from lmeval_prune.decoding import Engine, LikelihoodRequest, Schedule
from lmeval_prune.decoding.groups import common_prefixes
from lmeval_prune.interventions import HeadMask
from lmeval_prune.models import generation
from lmeval_prune.tasks import compat, data

SWEEP = ["L5H0", "L5H4", "L10H1", "L10H6", "L15H2", "L15H7", "L20H3", "L25H5"]
POOL = [f"L{layer}H{head}" for layer in (5, 10, 15, 20, 25) for head in range(9)]
PROMPT = "\nPlease reason step by step, and put your final answer within \\boxed{}."
Pairs = list[tuple[int, str | None]]  # question, head (None: dense)


class Work:
    """Questions as lm-eval requests, and the ways to answer them."""

    def __init__(self, model: str, questions: Sequence[str], longest: int, device: str = "cpu") -> None:
        self.lm = HFLM(model, device=device, dtype="float32", batch_size=16)
        self.model_map = map_model(self.lm.model)
        self.generate = {"until": ["<|im_end|>", "<|endoftext|>"], "max_gen_toks": longest, "do_sample": False}
        chats = [[{"role": "user", "content": question + PROMPT}] for question in questions]
        self.prompts = [
            self.lm.tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in chats
        ]

    def use_examples(self, questions: Sequence[str]) -> None:
        """Replace the prompts by those of lm-eval's gsm8k_cot: eight examples, then the question."""
        path = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k-cot.yaml"
        config = yaml.safe_load(path.read_text())
        examples = [
            f"Q: {example['question']}\nA: {example['target']}" for example in config["fewshot_config"]["samples"]
        ]
        self.prompts = ["\n\n".join([*examples, f"Q: {question}\nA:"]) for question in questions]
        self.generate["until"] = config["generation_kwargs"]["until"]

    def instances(self, questions: list[int]) -> list[Instance]:
        """Return the requests of questions, which are given by number."""
        return [compat.request("generate_until", (self.prompts[i], dict(self.generate)), "g", i) for i in questions]

    def by_hf(self, pairs: Pairs, batch: int) -> dict[tuple[int, str | None], str]:
        """Answer by lm-eval's `hf`, a mask at a time."""
        self.lm.batch_size_per_gpu = batch
        groups: dict[str | None, list[int]] = defaultdict(list)
        for question, head in pairs:
            groups[head].append(question)
        texts = {}
        for head, questions in groups.items():
            with HeadMask(head).applied_to(self.lm.model, self.model_map) if head else nullcontext():
                answers = self.lm.generate_until(self.instances(questions), disable_tqdm=True)
            texts |= {(question, head): answer for question, answer in zip(questions, answers, strict=True)}
        return texts

    def by_engine(self, pairs: Pairs, engine: Engine) -> dict[tuple[int, str | None], str]:
        """Answer by the decoding engine, all masks in its batches."""
        questions = [question for question, _ in pairs]
        masks = [HeadMask(head) if head else None for _, head in pairs]
        done: Callable[..., None] = lambda *_: None  # noqa: E731
        texts = generation.generate_until(self.lm, engine, self.instances(questions), [0] * len(pairs), done, 0, masks)
        return dict(zip(pairs, texts, strict=True))

    def engine(self) -> Engine:
        engine = Engine(self.lm.model, self.lm.tokenizer, model_map=self.model_map)
        assert engine.unsupported is None
        return engine

    def compare(self, texts: dict, expected: dict) -> dict[str, Any]:
        """Count equal texts, and return the gap between the two largest logits where the others part."""
        gaps = []
        for key, text in expected.items():
            if texts[key] == text:
                continue
            question, head = key
            prompt = self.lm.tok_encode(self.prompts[question])
            tokens = self.lm.tokenizer.encode(texts[key], add_special_tokens=False)
            different = (i for i in range(len(tokens)) if not text.startswith(self.lm.tok_decode(tokens[: i + 1])))
            parting = next(different, len(tokens))  # the first token that is not in the expected text
            with torch.inference_mode(), HeadMask(head).applied_to(self.lm.model) if head else nullcontext():
                logits = self.lm.model(
                    torch.tensor([prompt + tokens[:parting]], device=self.lm.device), logits_to_keep=1
                ).logits[0, 0]
            best, second = logits.topk(2).values.tolist()
            gaps.append(best - second)
        report = {
            "texts": len(expected),
            "identical": len(expected) - len(gaps),
            "gaps_where_others_part": sorted(gaps),
        }
        assert sum(gap >= 1e-3 for gap in gaps) == 0, report
        return report

    def tokens(self, texts: dict) -> int:
        return sum(len(self.lm.tokenizer.encode(text, add_special_tokens=False)) + 1 for text in texts.values())

    # ------------------------------------------------------------------ arithmetic

    def least_arithmetic(self, pairs: Pairs, texts: dict) -> float:
        """Count the floating-point operations of matrix products and attention that cannot be avoided.

        Each prompt once through the dense model; each variant's prompt from its first pruned layer up; each
        answer's own tokens through all layers. Tokens with which several prompts begin count once for each variant.
        """
        config, layers = self.lm.model.config, self.lm.model.model.layers
        a_layer = 2 * sum(p.numel() for p in layers[0].parameters() if p.dim() == 2)
        a_head = 2 * self.lm.model.lm_head.weight.numel()
        width = config.num_attention_heads * layers[0].self_attn.head_dim
        prompts = {question: tuple(self.lm.tok_encode(self.prompts[question])) for question, _ in pairs}
        masks: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for question, head in pairs:
            first = int(head[1 : head.index("H")]) if head else len(layers)
            masks[prompts[question]].append(((None, *SWEEP, *POOL).index(head), first))
        shared = common_prefixes(masks, len(layers), Schedule().prefix)
        lengths = {prompt: len(prefix.tokens) for prefix in shared for prompt in prefix.prompts}
        passes: dict[tuple[tuple[int, ...], int], int] = {}  # by all tokens and the number of earlier ones: layers
        total, counted = 0.0, set()
        for question, head in pairs:
            prompt = prompts[question]
            first = int(head[1 : head.index("H")]) if head else len(layers)
            common = lengths.get(prompt, 0)
            for tokens, before in ((prompt[:common], 0), (prompt, common)):
                for start, number in ((0, None), (first, head)):
                    if tokens and (tokens, number) not in counted:
                        counted.add((tokens, number))
                        passes[tokens, before] = passes.get((tokens, before), 0) + len(layers) - start
            new = len(self.lm.tokenizer.encode(texts[question, head], add_special_tokens=False))
            total += new * (len(layers) * a_layer + a_head)
            total += len(layers) * 4 * width * sum(range(len(prompt), len(prompt) + new))
        for (tokens, before), count in passes.items():
            total += count * ((len(tokens) - before) * a_layer + 2 * width * (len(tokens) ** 2 - before**2))
        return total


def peak(device: str) -> float:
    """Measure the operations a second of a large float32 matrix product."""
    size = 1536 if device == "cpu" else 8192
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    return 2 * size**3 / min(_seconds(lambda: a @ b) for _ in range(20))


def _seconds(run: Callable[[], Any]) -> float:
    """Return how long a call takes, the device's own work included."""
    _wait()
    begin = time.perf_counter()
    run()
    _wait()
    return time.perf_counter() - begin


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---------------------------------------------------------------- choices

CHOICES = 4
Values = list[tuple[float, bool]]  # of all choices of all questions


def choice_requests(questions: int, shots: int) -> list[Instance]:
    """GSM8K's test questions; the choices are the last steps of four solutions, one of them the question's own."""
    rows = [dict(row) for row in data.load("gsm8k", "test")]
    steps = [row["answer"].partition("####")[0].strip().splitlines()[-1] for row in rows]
    examples = "".join(f"Question: {rows[-i]['question']}\nAnswer: {steps[-i]}\n\n" for i in range(1, shots + 1))
    rng = random.Random(0)
    instances = []
    for doc in range(questions):
        own = rng.sample([i for i in range(questions + 100) if i != doc], CHOICES - 1)
        own.insert(rng.randrange(CHOICES), doc)
        context = f"{examples}Question: {rows[doc]['question']}\nAnswer:"
        for choice in own:
            arguments = (context, f" {steps[choice]}")
            instances.append(compat.request("loglikelihood", arguments, "choice", doc))
    return instances


def choices_by_hf(
    lm: HFLM, model_map: ModelMap, work: list[Instance], heads: Sequence[str | None], batch: int
) -> list[Values]:
    """lm-eval's `hf`, one mask at a time."""
    lm.batch_size_per_gpu = batch
    values = []
    for head in heads:
        with HeadMask(head).applied_to(lm.model, model_map) if head else nullcontext():
            values.append(lm.loglikelihood(work, disable_tqdm=True))
    return values


def choices_by_engine(lm: HFLM, engine: Engine, work: list[Instance], heads: Sequence[str | None]) -> list[Values]:
    """The engine, all masks in one run."""
    windows = generation.token_windows(lm, "loglikelihood", work, disable_tqdm=True)
    pairs = [(number, HeadMask(head) if head else None) for number, head in enumerate(heads)]
    requests = [
        LikelihoodRequest(*windows[id(request)][0], mask, (number, i))
        for number, mask in pairs
        for i, request in enumerate(work)
    ]
    scored = {
        request.tag: (float(result.logprobs.sum()), result.is_greedy) for request, result in engine.score(requests)
    }
    return [[scored[number, i] for i in range(len(work))] for number in range(len(heads))]


def largest_difference(values: list[Values], expected: list[Values]) -> float:
    differences = [a[0] - b[0] for a, b in zip(flat(values), flat(expected), strict=True)]
    return float(np.abs(differences).max())  # NaN if one is: Python's max can lose it


def flat(values: list[Values]) -> Values:
    return list(itertools.chain.from_iterable(values))


def compare_choices(engine: list[Values], hf: list[Values], tolerance: float) -> dict[str, Any]:
    """Refuse values that differ by more than the tolerance, and another order of choices that are further apart."""
    difference = largest_difference(engine, hf)
    reordered = 0
    for a, b in zip(engine, hf, strict=True):
        for begin in range(0, len(a), CHOICES):
            for i, j in itertools.combinations(range(begin, begin + CHOICES), 2):
                gap = b[i][0] - b[j][0]
                reordered += abs(gap) > tolerance and (a[i][0] > a[j][0]) != (gap > 0)
    greedy = sum(a[1] != b[1] for a, b in zip(flat(engine), flat(hf), strict=True))
    report = {"values": len(flat(hf)), "largest_difference": difference, "tolerance": tolerance}
    report |= {"pairs_in_another_order": reordered, "other_is_greedy": greedy}
    assert difference <= tolerance and not reordered and not greedy, report
    return report


def operations(engine: Engine) -> float:
    """Floating-point operations of the matrix products that the engine ran."""
    model = engine.model
    a_layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    done = engine.statistics
    return 2 * (done.layer_tokens * a_layer + done.head_tokens * model.lm_head.weight.numel())


def choice(
    lm: HFLM,
    model_map: ModelMap,
    heads: Sequence[str | None],
    questions: int,
    shots: int,
    batches: Sequence[int],
    peak: float,
) -> dict[str, Any]:
    """Time the engine and `hf` at its best batch size; refuse values that do not agree."""
    work = choice_requests(questions, shots)
    choices_by_hf(lm, model_map, work[:CHOICES], heads[:2], CHOICES)  # whatever is slow only once
    choices_by_engine(lm, Engine(lm.model, lm.tokenizer, model_map=model_map), work[:CHOICES], heads[:2])
    engine = Engine(lm.model, lm.tokenizer, model_map=model_map)
    assert engine.unscored is None
    dense = {batch: timed(lambda batch=batch: choices_by_hf(lm, model_map, work, [None], batch)) for batch in batches}
    best = min(dense, key=lambda batch: dense[batch][1])
    spread = max(largest_difference(values, dense[best][0]) for values, _ in dense.values())
    values, seconds = timed(lambda: choices_by_engine(lm, engine, work, heads))
    hf, hf_seconds = timed(lambda: choices_by_hf(lm, model_map, work, heads, best))
    return {
        "questions": questions,
        "shots": shots,
        "masks": len(heads),
        "context_tokens": sum(len(lm.tok_encode(request.args[0])) for request in work[::CHOICES]) / questions,
        "agreement": compare_choices(values, hf, max(spread, 1e-3)),
        "largest_difference_between_batches_of_hf": spread,
        "hf_dense_seconds_by_batch": {batch: round(spent, 2) for batch, (_, spent) in dense.items()},
        "hf_batch": best,
        "hf_seconds": hf_seconds,
        "engine_seconds": seconds,
        "ratio": round(hf_seconds / seconds, 2),
        "share_of_peak_in_matrix_products": round(operations(engine) / peak / seconds, 3),
        "statistics": {name: value for name, value in asdict(engine.statistics).items() if value},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", default="sweep,router,fewshot-4,choice")
    parser.add_argument("--router-questions", type=int, default=8)
    parser.add_argument("--batches", default="16,32,64")
    parser.add_argument("--choice-questions", type=int, default=2)
    parser.add_argument("--choice-batches", default="4,16", help="hf's batch sizes in that part")
    parser.add_argument("--runs", type=int, default=3, help="measurements of each part")
    parser.add_argument("--name", default="engine")
    parser.add_argument("--device", default="cpu", help="torch's name of it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    results: dict[str, Any] = {"environment": environment(), "questions": options.questions, "tokens": options.tokens}
    questions = data.load("gsm8k", "test")["question"][: options.questions]
    work = Work(embedded.resolve("smollm2-135m"), questions, options.tokens, options.device)
    highest = peak(options.device)
    results["gemm_peak_gflops"] = round(highest / 1e9, 1)
    rng = random.Random(0)
    # as many questions a head as 64 questions have with the 45 heads of five layers: hf's batches are then of that size
    pool = rng.sample(POOL, max(8, round(len(POOL) * options.router_questions / 64)))
    everything: dict[str, Pairs] = {
        "sweep": [(i, head) for i in range(options.questions) for head in (None, *SWEEP)],
        "router": [(i, head) for i in range(options.router_questions) for head in rng.sample(pool, 8)],
    }
    parts = options.parts.split(",")
    everything |= {name: few_shot_pairs(name) for name in parts if name.startswith("fewshot")}
    batches = list(map(int, options.batches.split(",")))
    if {"sweep", "router"} & set(parts):
        dense: Pairs = [(i, None) for i in range(options.questions)]
        best, results["hf_dense_seconds_by_batch"] = best_batch(work, dense, batches)
    for part in (name for name in everything if name in parts):
        run, pairs = work, everything[part]
        if part.startswith("fewshot"):
            run = Work(embedded.resolve("smollm2-135m"), questions, options.tokens, options.device)
            run.use_examples(questions)
            few = [pair for pair in pairs if pair[1] is None]
            best, results[f"hf_dense_seconds_by_batch_{part}"] = best_batch(run, few, batches)
        runs = results[part] = []
        for _ in range(options.runs):
            engine = run.engine()
            engine_texts, seconds = timed(lambda run=run, pairs=pairs, engine=engine: run.by_engine(pairs, engine))
            hf_texts, hf = timed(lambda run=run, pairs=pairs, best=best: run.by_hf(pairs, best))
            figures = {
                "texts": run.compare(engine_texts, hf_texts),
                "engine_seconds": seconds,
                "hf_seconds": hf,
                "hf_batch": best,
                "ratio": round(hf / seconds, 2),
                "engine_answer_tokens_per_second": round(run.tokens(engine_texts) / seconds, 1),
                "hf_answer_tokens_per_second": round(run.tokens(hf_texts) / hf, 1),
                "share_of_arithmetic_limit": round(run.least_arithmetic(pairs, engine_texts) / highest / seconds, 3),
                "statistics": asdict(engine.statistics),
            }
            runs.append(figures)
            print(part, figures, flush=True)
            write(options.name, results)
    if "choice" in parts:
        batches = [int(batch) for batch in options.choice_batches.split(",")]
        for shots in (0, 5):
            variants = [None, *SWEEP]
            runs = results[f"choice_{shots}_shots"] = []
            for _ in range(options.runs):
                runs.append(
                    choice(work.lm, work.model_map, variants, options.choice_questions, shots, batches, highest)
                )
                print(runs[-1], flush=True)
                write(options.name, results)


def few_shot_pairs(part: str) -> Pairs:
    """Return the N questions of a part `fewshot-N`, dense and with each head."""
    return [(i, head) for i in range(int(part.split("-")[1])) for head in (None, *SWEEP)]


def best_batch(work: Work, pairs: Pairs, batches: Sequence[int]) -> tuple[int, dict[int, float]]:
    """Return the batch size with which `hf` answers fastest, and the seconds of each."""
    work.by_hf(pairs[:4], 4)  # whatever is slow only once
    rates = {}
    for batch in batches:
        _, rates[batch] = timed(lambda batch=batch: work.by_hf(pairs, batch))
        print(f"hf, dense, batch {batch}: {rates[batch]:.1f} s", flush=True)
        if batch >= len(pairs):
            break
    return min(rates, key=lambda batch: rates[batch]), rates


if __name__ == "__main__":
    main()
