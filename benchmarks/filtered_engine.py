"""Filtered SmolLM2 by `generate` in batches and by the decoding engine, after a check that texts are the same; and what
leaving skipped tokens out of the output projection saves in a prompt of 1,024 tokens.

    python benchmarks/filtered_engine.py [--prompts 16] [--tokens 48] [--rounds 2] [--questions gsm8k]

Questions are those of the embedded `prune_tiny_words`, or GSM8K's (LMEVAL_PRUNE_DATA).
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from typing import Any

import torch
from _record import environment, timed, write
from transformers import AutoModelForCausalLM

from lmeval_prune.checkpoints import embedded
from lmeval_prune.interventions import filtered_attention, interventions_on
from lmeval_prune.interventions.token_filter import TokenFilter
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.tasks import compat, data

RATIO = 0.2


def decoding(options: Any) -> dict[str, Any]:
    """Time each way to decode, and compare the texts."""
    rows = data.load("gsm8k", "test") if options.questions == "gsm8k" else data.load("tiny_words")
    questions = [row["question"] for row in rows][: options.prompts]
    folder = embedded.resolve("smollm2-135m")
    settings = {"until": ["\n\n"], "max_gen_toks": options.tokens, "do_sample": False}
    ways: dict[str, dict[str, Any]] = {
        f"generate, batches of {size}": {"engine": "generate", "batch_size": size} for size in (1, 4, 16)
    }
    ways["engine"] = {"engine": "batched"}
    texts: dict[tuple[str, float], list[str]] = {}
    seconds: dict[tuple[str, float], list[dict[str, float]]] = {}
    skipped: dict[str, float] = {}
    for ratio in (RATIO, 0.0):
        for name, arguments in ways.items():
            if not ratio and name not in ("engine", "generate, batches of 16"):
                continue
            filtered = {"token_filter": ratio} if ratio else {}
            lm = PrunedHFLM(folder, device="cpu", dtype="float32", **filtered, **{"batch_size": 1, **arguments})
            chats = [lm.apply_chat_template([{"role": "user", "content": question}]) for question in questions]
            requests = [
                compat.request("generate_until", (chat, dict(settings)), "t", i) for i, chat in enumerate(chats)
            ]
            lm.generate_until(requests[:1], disable_tqdm=True)  # compiles, and checks itself
            for _ in range(1 if arguments.get("batch_size") == 1 else options.rounds):
                start = time.process_time()
                answers, wall = timed(lambda lm=lm, requests=requests: lm.generate_until(requests, disable_tqdm=True))
                seconds.setdefault((name, ratio), []).append({"wall": wall, "processor": time.process_time() - start})
            texts[name, ratio] = answers
            if ratio:
                skipped[name] = lm.pruning_info()["token_filter_skipped"]["realised"]
            tokens = sum(len(lm.tok_encode(text)) for text in answers)
            print(f"{ratio:.0%} {name}: {seconds[name, ratio]}, {tokens} tokens", flush=True)
    for (name, ratio), answers in texts.items():
        expected = texts["generate, batches of 1" if ratio else "generate, batches of 16", ratio]
        differing = sum(a != b for a, b in zip(answers, expected, strict=True))
        assert not differing, f"{differing} texts of {name} at {ratio:.0%} differ from those of generate"
    assert texts["engine", RATIO] != texts["engine", 0.0]
    return {
        "prompts": len(questions),
        "questions": options.questions,
        "longest": options.tokens,
        "answer_tokens": tokens,
        "texts": "all the same",
        "realised": skipped,
        "seconds": {
            f"{ratio:.0%}" if ratio else "dense": {name: took for (name, of), took in seconds.items() if of == ratio}
            for ratio in (RATIO, 0.0)
        },
    }


def projection(options: Any) -> dict[str, Any]:
    """Time a prompt, and the filtered layers' output projections in it, in processor seconds.

    Projections of all tokens, and of those that do not skip, are timed in turn.
    """
    model = AutoModelForCausalLM.from_pretrained(embedded.resolve("smollm2-135m"), dtype=torch.float32).eval()
    tokens = torch.randint(5, 40_000, (1, 1024), generator=torch.Generator().manual_seed(0))
    results: dict[str, Any] = {}
    small, spent, begun = filtered_attention.SMALL_PASS, [0.0], [0.0]
    ways = ("all tokens", "without skipped ones")

    def begin(*_: Any) -> None:
        begun[0] = time.process_time()

    def end(*_: Any) -> None:
        spent[0] += time.process_time() - begun[0]

    for ratio in (0.2, 0.5):
        token_filter = TokenFilter(ratio)
        passes: dict[str, list[float]] = {name: [] for name in ways}
        projections: dict[str, list[float]] = {name: [] for name in ways}
        with token_filter.applied_to(model) as model_map, torch.inference_mode():
            modules = [layer.o_proj for layer in token_filter.layers(model_map)]
            hooks = [module.register_forward_pre_hook(begin) for module in modules]
            hooks += [module.register_forward_hook(end) for module in modules]
            for number in range(2 * options.rounds + 1):
                for name in ways if number % 2 else reversed(ways):
                    filtered_attention.SMALL_PASS = 1 << 30 if name == "all tokens" else small
                    spent[0], start = 0.0, time.process_time()
                    model.model(tokens, use_cache=False)
                    passes[name].append(time.process_time() - start)
                    projections[name].append(spent[0])
            realised = interventions_on(model)[0].report(model_map)["token_filter_skipped"]["realised"]
            for hook in hooks:
                hook.remove()
        median = {
            kind: {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
            for kind, times in (("pass", passes), ("projections", projections))
        }
        results[f"{ratio:.0%}"] = {"realised": realised, "median": median, "pass": passes, "projections": projections}
        print(ratio, median, flush=True)
    filtered_attention.SMALL_PASS = small
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--questions", default="tiny_words", choices=["tiny_words", "gsm8k"])
    parser.add_argument("--parts", default="projection,decoding")
    parser.add_argument("--name", default="filtered_engine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    machine = environment()
    parts = {part: globals()[part](options) for part in options.parts.split(",")}
    write(options.name, {"environment": machine, **parts})


if __name__ == "__main__":
    main()
