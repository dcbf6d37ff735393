"""The demo: its measurements, its summary in Markdown, and its page with figures."""

from __future__ import annotations

import base64
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from markdown_it import MarkdownIt
from markupsafe import Markup
from transformers import AutoTokenizer

from lmeval_prune.architectures.identity import model_name
from lmeval_prune.artefacts import CREATED_BY, without_nan, write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import check_folder, load_pretrained
from lmeval_prune.comparison.distance import summarize_texts
from lmeval_prune.comparison.tokens import Text, sentence, token_distances
from lmeval_prune.decoding import Engine, LikelihoodRequest, Request, SamplingParams
from lmeval_prune.interventions import HeadMask, Plan
from lmeval_prune.profiling.speed import generate_rate
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.reporting.documents import markdown, render
from lmeval_prune.reporting.plot_style import COLOURS, draw_scores, figure, save
from lmeval_prune.surgery.cut import cut_to
from lmeval_prune.tasks import data

PROBLEMS, QUESTIONS = "tiny_cloze", "tiny_words"  # packaged data: what is counted, and what is answered freely
SHARES = (0.03, 0.1, 0.2)  # of all heads
DRAWS, SHOWN = 2, 0.1  # of random heads; the share whose answers the page shows
WINDOWS, WINDOW = 16, 64  # of the text that the scores of heads read, and their tokens
TEXTS = 32  # completed problems over which distances are measured
PROMPTS, NEW_TOKENS = 2, 16  # of the sweep
CUT, BATCH = 0.25, 8  # of the parameters of heads and channels; prompts at once that are timed
_HERE = Path(__file__).parent
QUANTITIES = {  # name in the table, title of the figure, and how a value is written
    "KL, nats": ("KL divergence from the dense model, nats", "{x:.2f}"),
    "same top": ("Same top token as the dense model", "{x:.0%}"),
    "solved": ("Problems solved", "{x:.0%}"),
}
Masks = Mapping[str, HeadMask | None]
ranked_name, drawn_name = "{:.0%} least important".format, "{:.0%} random, draw {}".format  # of masks: share, draw


def run(pretrained: str, folder: Path) -> dict[str, Any]:
    """Measure everything, write `demo.json` and the cut model to a folder, and return the results."""
    check_folder(folder / "cut", pretrained)
    began = time.perf_counter()

    def begin(part: str) -> None:
        print(f"{time.perf_counter() - began:4.0f} s  {part}", file=sys.stderr, flush=True)

    begin("scores of heads")
    model = load_pretrained(pretrained, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(embedded.resolve(pretrained))
    engine = Engine(model, tokenizer)
    first, second = (data.load(PROBLEMS, split).to_list() for split in ("train", "test"))
    ids = encode(tokenizer, " ".join(map(sentence, first)))
    windows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)[:WINDOWS]
    text = CalibrationText.from_windows("the packaged problems of the first half", windows)
    masks, scores = choose(engine, text)

    begin("distances")
    rows = [encode(tokenizer, sentence(problem)) for problem in second[:TEXTS]]
    texts = [Text(row[:1], row[1:], (PROBLEMS, number)) for number, row in enumerate(rows)]
    tokens = token_distances(engine, {name: [mask] for name, mask in masks.items()}, texts)
    begin("accuracy")
    accuracy = accuracies(engine, tokenizer, {"dense": None, **masks}, second)
    begin("answers")
    sweep = answers(engine, tokenizer, {"dense": None, **masks})
    begin("cut")
    results = {
        "created_by": CREATED_BY,
        "model": model_name(pretrained),
        "threads": torch.get_num_threads(),
        "heads": engine.model_map.total_heads,
        "problems": len(second),
        "texts": len(texts),
        "shares": SHARES,
        "draws": DRAWS,
        "scores": {key: values.tolist() for key, values in scores.items()},
        "masks": {name: list(mask.heads) for name, mask in masks.items()},
        "distances": {name: summarize_texts(tensors) for name, tensors in tokens.items()},
        "accuracy": accuracy,
        "answers": sweep,
        "cut": cut_quarter(engine, tokenizer, text, folder / "cut", second),
        "seconds": round(time.perf_counter() - began, 1),
    }
    write_text(folder / "demo.json", json.dumps(without_nan(results), indent=1) + "\n")
    return results


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def choose(engine: Engine, text: CalibrationText) -> tuple[dict[str, HeadMask], Mapping[str, torch.Tensor]]:
    """Return masks of the least important heads by norm + entropy, and of random heads; and the scores by layer."""
    masks: dict[str, HeadMask] = {}
    scores: Mapping[str, torch.Tensor] = {}

    def plan(method: str, share: float, **options: Any) -> Plan:
        pruning = PruneOptions(ratio=share, budget="heads", unit="head", allocation="global", allow_empty_layer=True)
        stored = {} if options else scores
        return [*stages(make_pruner(method, options), engine.model_map, pruning, text, scores=stored)][-1]

    for share in SHARES:
        least = plan("norm_entropy", share)
        scores, chosen = least.scores, {ranked_name(share): least}
        chosen |= {drawn_name(share, draw): plan("random", share, seed=draw) for draw in range(DRAWS)}
        masks |= {name: each.mask for name, each in chosen.items() if each.mask}
    return masks, scores


def accuracies(
    engine: Engine, tokenizer: Any, masks: Masks, problems: Sequence[Mapping[str, Any]]
) -> dict[str, list[bool]]:
    """Return, by mask, whether each problem's most probable choice is the right one."""
    requests = [
        LikelihoodRequest(encode(tokenizer, problem["question"]), encode(tokenizer, f" {choice}"), mask, (name, i, j))
        for i, problem in enumerate(problems)
        for j, choice in enumerate(problem["choices"])
        for name, mask in masks.items()
    ]
    values: dict[tuple[str, int], dict[int, float]] = {}
    for request, result in engine.score(requests):
        name, i, j = request.tag
        values.setdefault((name, i), {})[j] = float(result.logprobs.sum())
    best = {key: max(likelihoods, key=likelihoods.__getitem__) for key, likelihoods in values.items()}
    return {name: [best[name, i] == problem["gold"] for i, problem in enumerate(problems)] for name in masks}


def answers(engine: Engine, tokenizer: Any, masks: Masks) -> dict[str, Any]:
    """Answer questions under all masks by the engine, and by `generate` one mask at a time, and compare the texts."""
    asked = questions = data.load(QUESTIONS, "test")["question"][:PROMPTS]
    if tokenizer.chat_template:
        turns = [[{"role": "user", "content": question}] for question in questions]
        asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    prompts = [encode(tokenizer, text) for text in asked]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer.pad({"input_ids": [[*ids] for ids in prompts]}, padding_side="left", return_tensors="pt")

    def generate(mask: HeadMask | None, tokens: int) -> list[str]:
        options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
        with mask.applied_to(engine.model, engine.model_map) if mask else nullcontext():
            rows = engine.model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
        return list(tokenizer.batch_decode(rows, skip_special_tokens=True))

    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    requests = [
        Request(ids, mask, params, tag=(name, i)) for i, ids in enumerate(prompts) for name, mask in masks.items()
    ]
    list(engine.decode(requests[:2]))  # what is slow only once, of both
    generate(None, 2)
    began = time.perf_counter()
    decoded = {request.tag: tokens for request, tokens in engine.decode(requests)}
    fast = time.perf_counter() - began
    began = time.perf_counter()
    others = {(name, i): text for name, mask in masks.items() for i, text in enumerate(generate(mask, NEW_TOKENS))}
    slow = time.perf_counter() - began
    texts = {key: tokenizer.decode(tokens, skip_special_tokens=True) for key, tokens in decoded.items()}
    is_cut = {key: tokens[-1] not in tokenizer.all_special_ids for key, tokens in decoded.items()}
    shown = ["dense", ranked_name(SHOWN), drawn_name(SHOWN, 0)]
    return {
        "prompts": len(prompts),
        "masks": len(masks),
        "new_tokens": NEW_TOKENS,
        "identical": sum(texts[key] == others[key] for key in others),
        "texts": len(others),
        "engine_seconds": fast,
        "generate_seconds": slow,
        "shown": [
            {"question": question, "answers": {x: texts[x, i].strip() + "…" * is_cut[x, i] for x in shown}}
            for i, question in enumerate(questions)
        ],
    }


def cut_quarter(
    engine: Engine, tokenizer: Any, text: CalibrationText, folder: Path, problems: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Cut a quarter of the parameters of heads and channels, and measure the smaller checkpoint."""
    plan = [*stages(make_pruner("flap", {}), engine.model_map, PruneOptions(ratio=CUT, parts="both"), text)][-1]
    sizes = cut_to(folder, engine.model, plan, tokenizer).manifest["stages"][-1]["parameters"]
    smaller = load_pretrained(folder, dtype=torch.float32)
    models, ids = (engine.model, smaller), torch.full((BATCH, 32), encode(tokenizer, "the")[0])
    _, *rounds = [  # the first: what is slow only once
        [generate_rate(model, ids, new) for model in models] for new in (2, *[NEW_TOKENS] * 3)
    ]
    return {
        "removed": CUT,
        "batch": BATCH,
        "parameters": [sizes["before"][0], sizes["after"][0]],
        "tokens_per_second": [statistics.median(rates) for rates in zip(*rounds, strict=True)],
        "accuracy": accuracies(Engine(smaller, tokenizer), tokenizer, {"cut": None}, problems)["cut"],
    }


# ---------------------------------------------------------------------- what is shown


def curves(results: Mapping[str, Any]) -> pd.DataFrame:
    """Return each quantity by share of pruned heads, `least` important or `random` ones, in long form.

    `low` and `high` are a standard error from the value, or the lowest and the highest draw.
    """

    def measured(quantity: str, name: str) -> tuple[float, float]:
        if quantity == "solved":
            right = np.array(results["accuracy"][name], float)
            return float(right.mean()), float(right.std(ddof=1) / len(right) ** 0.5)
        key = "mean_kld" if quantity == "KL, nats" else "same_top"
        distance = results["distances"].get(name, {"mean_kld": 0.0, "same_top": 1.0})  # else of the dense model
        return distance[key], distance.get(f"{key}_se") or 0.0

    rows = []
    for quantity, share in itertools.product(QUANTITIES, (0.0, *results["shares"])):
        value, error = measured(quantity, ranked_name(share) if share else "dense")
        names = [drawn_name(share, draw) if share else "dense" for draw in range(results["draws"])]
        draws = [measured(quantity, name)[0] for name in names]
        rows.append((quantity, "least", share, value, value - error, value + error))
        rows.append((quantity, "random", share, sum(draws) / len(draws), min(draws), max(draws)))
    return pd.DataFrame(rows, columns=["quantity", "heads", "share", "value", "low", "high"])


def summary(results: Mapping[str, Any]) -> str:
    """Return the tables and sentences that the command prints."""
    columns: dict[str, list[str]] = {"heads pruned": [f"{share:.0%}" for share in (0.0, *results["shares"])]}
    for (quantity, heads), line in curves(results).groupby(["quantity", "heads"], sort=False):
        columns[f"{quantity}, {heads}"] = [QUANTITIES[quantity][1].format(x=value) for value in line["value"]]
    cut = results["cut"]
    (before, after), (dense, smaller) = cut["parameters"], cut["tokens_per_second"]
    solved, still = (100 * sum(right) / len(right) for right in (results["accuracy"]["dense"], cut["accuracy"]))
    rows = [
        ("parameters, million", f"{before / 1e6:.1f}", f"{after / 1e6:.1f}", f"{after / before - 1:+.0%}"),
        ("speed, tokens a second", f"{dense:.0f}", f"{smaller:.0f}", f"{smaller / dense - 1:+.0%}"),
        ("problems solved, %", f"{solved:.0f}", f"{still:.0f}", f"{still - solved:+.0f} points"),
    ]
    tables = {"pruned": pd.DataFrame(columns), "cut": pd.DataFrame(rows, columns=["", "before", "after", "change"])}
    texts = {name: markdown(table, [""]) for name, table in tables.items()}
    return render(_HERE / "summary.md.jinja", results=results, **texts)


def write_page(results: Mapping[str, Any], path: Path) -> None:
    """Write the page, one self-contained HTML file without scripts, and its figures beside it."""

    def image(stem: str) -> str:
        return f"data:image/svg+xml;base64,{base64.b64encode(path.with_name(f'{stem}.svg').read_bytes()).decode()}"

    points, images = curves(results), {}
    for (quantity, (title, form)), stem in zip(QUANTITIES.items(), ("kl", "same_top", "solved"), strict=True):
        canvas, axes = figure(4, 3, title)
        lines = points[points["quantity"] == quantity].groupby("heads")
        for (heads, line), colour, style in zip(lines, COLOURS, ("-", "--"), strict=False):
            axes.plot(line["share"], line["value"], color=colour, ls=style, marker="o", label=heads)
            axes.fill_between(line["share"], line["low"], line["high"], color=colour, alpha=0.15, lw=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.yaxis.set_major_formatter(form)
        axes.set_xlabel("heads pruned")
        axes.legend(frameon=False)
        save(canvas, path.with_name(stem))
        images[title] = image(stem)
    scores = {key.partition(".")[2]: values for key, values in results["scores"].items()}
    draw_scores(scores, f"norm + entropy, {results['model']}", path.with_name("heads"))
    text = Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(summary(results)))
    shown = {"figures": images, "heads": image("heads"), "least": results["masks"][ranked_name(results["shares"][0])]}
    write_text(path, render(_HERE / "page.html.jinja", results=results, summary=text, **shown))
