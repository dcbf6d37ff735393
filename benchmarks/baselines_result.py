"""What a share of the parameters costs by each pruner, calibrated on one text and on another: SmolLM2.

    python benchmarks/baselines_result.py [--tokens 4096] [--threads 1] [--device cpu] [--match REGEX]
        [--work out/baselines] [--report]

Calibrated on 128 windows of 128 tokens of GSM8K's training text, and of MATH's; perplexity by token on GSM8K's test
text and on MATH-500, windows of 128 tokens, at 10, 20 and 50 per cent of the parameters of heads and channels, with
the share that each row has really lost; random over five seeds. Methods run as they are, without their compensation,
in their authors' settings, and SlimGPT by other schedules; on heads alone at 10, 20 and 30 per cent of the heads'
parameters. Where a setting spares layers, the others lose more, so that all rows of a share lose the same of the whole
model. Token Filtering stands beside them at as many multiplications as a plan leaves, where it can save so many. What
is expected is written down in `EXPECTED`, and held against what was measured on either text.

What was measured stands in `results/baselines.json`, row by row, what matters most first, and is not measured again;
each row says in which environment. At the end, or with --report, writes tables and a picture under
`docs/results/baselines/`.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from shutil import rmtree
from statistics import mean
from typing import Any

import torch
from _measures import arithmetic, expected
from _record import RESULTS, environment, write
from transformers import AutoTokenizer

from lmeval_prune import load_pretrained, map_model
from lmeval_prune.artefacts import write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.interventions import interventions_on
from lmeval_prune.interventions.probe_pruning import ProbePruning
from lmeval_prune.interventions.token_filter import TokenFilter
from lmeval_prune.profiling.costs import formula_flops, parameters
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.calibration import CalibrationText, read_calibration
from lmeval_prune.pruners.options import PruneOptions, TextOptions
from lmeval_prune.pruners.parts import HEADS, KINDS, parts_of
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.pruners.sequential import SequentialPruner
from lmeval_prune.reporting.plot_style import COLOURS, save
from lmeval_prune.tasks import data

WINDOW = 128
BATCH = 16  # windows a forward pass
SEEDS = 5  # of random
RATIOS = (0.2, 0.5, 0.1)
HEAD_RATIOS = (0.2, 0.1, 0.3)  # of rows on heads alone
TEXTS = {"GSM8K": ("gsm8k", "answer"), "MATH": ("math500", "solution")}
CALIBRATED = {"GSM8K": "prune_gsm8k", "MATH": "prune_math500"}
OUTPUT = RESULTS.parent.parent / "docs/results/baselines"


@dataclass(frozen=True)
class Row:
    """One way to prune.

    Attributes:
        name: as tables call it.
        method, method_options: a pruner and its options; none of Token Filtering and Probe Pruning, which prune while
            they run.
        ratio: share of the parameters of all heads and channels, or with `parts` of those.
        text: what it is calibrated on.
        options: further ones of the plan.
        reads: windows, tokens and seed of the calibration text.
    """

    name: str
    method: str
    ratio: float
    text: str = "GSM8K"
    method_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    reads: tuple[int, int, int] = (128, WINDOW, 0)

    @property
    def key(self) -> str:
        """Name of the result."""
        return f"{self.name}, {self.ratio:.0%}, {self.text}"


ALONE = "heads alone, "  # what the names of these rows begin with
SETTINGS = {  # rows in their authors' settings: the row of the same budget in everybody's setting, and how they differ
    "flap, reference": ("flap", "its code's variance, scores and allocation"),
    "flap, 1,024 windows": ("flap", "1,024 windows instead of 128"),
    "llm_pruner, authors' layers": ("llm_pruner", "the first four and the last two layers spared"),
    "llm_pruner, authors' setting": ("llm_pruner", "the same, and 10 windows of 64 tokens"),
    "wanda_sp, first 3 layers spared": ("wanda_sp", "the first three layers spared (Probe Pruning's authors)"),
    "slimgpt, authors' 50%": ("slimgpt", "the first layer loses 0.24 of the share instead of 0.31"),
    "slimgpt, 2,048 tokens": ("slimgpt", "8 windows of 2,048 tokens instead of 128 of 128"),
}


def rows() -> Iterator[Row]:
    """Yield all rows, what matters most first."""
    alone = {"compensation": "none"}
    yield from _heads(HEAD_RATIOS[0])
    yield from _settings({"skip_first": 4, "skip_last": 2})
    for ratio in HEAD_RATIOS[1:]:
        yield from _heads(ratio)
    for ratio in RATIOS:
        yield from _long(ratio)
    for ratio in RATIOS:
        yield from (Row(name, name, ratio) for name in ("flap", "slimgpt", "wanda_sp", "llm_pruner", "magnitude"))
        yield Row("random, seed 0", "random", ratio, method_options={"seed": 0})
        yield Row("flap without its bias", "flap", ratio, options=alone)
        yield Row("slimgpt without its update", "slimgpt", ratio, options=alone)
        yield from (Row(name, name, ratio, "MATH") for name in ("flap", "slimgpt"))
        yield Row("slimgpt, uniform", "slimgpt", ratio, options={"allocation": "uniform"})
        yield from (
            Row(f"random, seed {seed}", "random", ratio, method_options={"seed": seed}) for seed in range(1, SEEDS)
        )
        yield from (Row(name, name, ratio, "MATH") for name in ("llm_pruner", "wanda_sp"))
    for ratio in RATIOS:
        yield Row("token filter", "", ratio)
        yield Row("random with least squares, seed 0", "random", ratio, options={"compensation": "least_squares"})
        yield Row("slimgpt, diagonal error", "slimgpt", ratio, method_options={"error": "diagonal"})
        yield Row("norm_entropy, channels by an extension of ours", "norm_entropy", ratio, options={"parts": "both"})


def _heads(ratio: float) -> Iterator[Row]:
    """Yield rows on heads alone."""
    heads = {"parts": "heads"}
    for name in ("norm_entropy", "magnitude", "global_threshold", "confidence"):
        yield Row(f"{ALONE}{name}", name, ratio, options=heads)
    for seed in range(SEEDS):
        yield Row(f"{ALONE}random, seed {seed}", "random", ratio, method_options={"seed": seed}, options=heads)
    for name in ("flap", "llm_pruner"):
        yield Row(f"{ALONE}{name}", name, ratio, options=heads)


def _settings(ends: dict[str, Any]) -> Iterator[Row]:
    """Yield rows in the settings of methods' authors, and of Probe Pruning."""
    for ratio in RATIOS:
        yield Row("flap, reference", "flap", ratio, method_options={"reference": True})
    for ratio in RATIOS:
        yield Row("llm_pruner, authors' layers", "llm_pruner", ratio, options=ends)
        yield Row("probe pruning", "", ratio)
    for ratio in RATIOS:
        yield Row("llm_pruner, authors' setting", "llm_pruner", ratio, options=ends, reads=(10, 64, 0))
    for seed in (1, 2):
        name = f"llm_pruner, authors' setting, seed {seed}"
        yield Row(name, "llm_pruner", 0.2, options=ends, reads=(10, 64, seed))
    yield Row("probe pruning, 0.2 of the layers in play", "", 0.2, method_options={"ratio": 0.2})


def _long(ratio: float) -> Iterator[Row]:
    """Yield rows that take long."""
    yield Row("wanda_sp, first 3 layers spared", "wanda_sp", ratio, options={"skip_first": 3})
    if ratio == 0.5:
        yield Row("slimgpt, authors' 50%", "slimgpt", ratio, options={"log_start": 0.242})
    if ratio == 0.2:
        yield Row("slimgpt, 2,048 tokens", "slimgpt", ratio, reads=(8, 2048, 0))
        yield Row("flap, 1,024 windows", "flap", ratio, reads=(1024, WINDOW, 0))
        for name in ("slimgpt", "wanda_sp"):
            yield Row(f"{ALONE}{name}", name, ratio, options={"parts": "heads"})


Figure = Callable[[str, float], float | None]  # of a name and a ratio, calibrated on GSM8K, read on one text


def _random(figure: Figure, ratio: float) -> float | None:
    values = [figure(f"random, seed {seed}", ratio) for seed in range(SEEDS)]
    figures = [value for value in values if value is not None]
    return mean(figures) if figures else None


# what was expected before anything was measured: a name, and the two figures of which the first is to be lower
EXPECTED: list[tuple[str, Callable[[Figure, float], tuple[float | None, float | None]]]] = [
    ("random is better than magnitude", lambda f, r: (_random(f, r), f("magnitude", r))),
    ("Taylor scores are better than random", lambda f, r: (f("llm_pruner", r), _random(f, r))),
    ("FLAP is better with its bias", lambda f, r: (f("flap", r), f("flap without its bias", r))),
    ("SlimGPT is better with its update", lambda f, r: (f("slimgpt", r), f("slimgpt without its update", r))),
    ("log is better than uniform", lambda f, r: (f("slimgpt", r), f("slimgpt, uniform", r))),
    ("SlimGPT is at least as good as FLAP", lambda f, r: (f("slimgpt", r), f("flap", r))),
    ("FLAP is better than Wanda-sp", lambda f, r: (f("flap", r), f("wanda_sp", r))),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", default="out/baselines", help="for what is known of a plan's layers until it is made")
    parser.add_argument("--rows", type=int, help="at most so many rows that are not there")
    parser.add_argument("--match", default="", help="only rows whose name has this regular expression")
    parser.add_argument("--device", default="cpu", help="torch's name of it")
    parser.add_argument("--report", action="store_true", help="measure nothing, write what is known")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    machine = environment()
    folder = embedded.resolve("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = Texts(tokenizer)
    stored_rows = stored(options.tokens)
    if options.report:
        report(*finish(machine, options.tokens, texts, stored_rows))
        return
    model: Any = load_pretrained(folder, dtype=torch.float32)
    model.to(options.device)
    model_map = map_model(model)
    windows = {name: windows_of(tokenizer, name, options.tokens).to(options.device) for name in TEXTS}
    if "dense" not in stored_rows:
        all_, without = parameters(model)
        counts = {"parameters": all_, "without_embeddings": without, "flops": formula_flops(model_map, WINDOW)}
        stored_rows["dense"] = {**counts, "perplexity": perplexities(model, windows), "environment": machine}
    waiting = [row for row in rows() if re.search(options.match, row.key) and row.key not in stored_rows][
        : options.rows
    ]
    for number, row in enumerate(waiting, 1):
        began = time.perf_counter()
        try:
            stored_rows[row.key] = {
                **measured(row, model_map, texts, windows, options.work),
                "environment": machine,
            }
        except ValueError as error:  # a share that would empty a layer
            stored_rows[row.key] = {"refused": str(error), "environment": machine}
        finish(machine, options.tokens, texts, stored_rows)
        shown = stored_rows[row.key].get("perplexity") or stored_rows[row.key]["refused"]
        print(f"{number} of {len(waiting)}, {time.perf_counter() - began:.0f} s: {row.key}: {shown}", flush=True)
    report(*finish(machine, options.tokens, texts, stored_rows))


def stored(tokens: int) -> dict[str, Any]:
    """Return the rows of the results file, each with the environment that it was measured in."""
    path = RESULTS / "baselines.json"
    content = json.loads(path.read_text()) if path.exists() else {"tokens": tokens, "results": {}}
    if content["tokens"] != tokens:
        raise SystemExit(f"{path} has rows of {content['tokens']} tokens of each text; move it away")
    environments = content.get("environments", [])
    return {name: {**row, "environment": environments[row["environment"]]} for name, row in content["results"].items()}


@dataclass
class Texts:
    """Calibration texts, and scores that were measured on them, which serve every share.

    Attributes:
        tokenizer: of the model.
        read, scored: what is known.
    """

    tokenizer: Any
    read: dict[Any, CalibrationText] = field(default_factory=dict)
    scored: dict[Any, dict[str, torch.Tensor]] = field(default_factory=dict)

    def of(self, name: str, reads: tuple[int, int, int] = (128, WINDOW, 0)) -> CalibrationText:
        """Return a text of so many windows, of so many tokens, drawn by a seed."""
        windows, tokens, seed = reads
        if (name, reads) not in self.read:
            batch = max(1, BATCH * WINDOW // tokens)
            options = TextOptions(task=CALIBRATED[name], windows=windows, tokens=tokens, batch=batch, seed=seed)
            self.read[name, reads] = read_calibration(self.tokenizer, options)
        return self.read[name, reads]

    def scores(self, row: Row, model_map: Any) -> dict[str, torch.Tensor]:
        """Return scores of a row, by part; none of those that need more than one look at the model."""
        pruner = make_pruner(row.method, row.method_options)
        if isinstance(pruner, SequentialPruner) or row.options.get("compensation", pruner.compensates) != "none":
            return {}
        kinds = [HEADS] if row.options.get("parts") == "heads" else KINDS
        key = (row.method, str(row.method_options), row.text, row.reads, len(kinds))
        if key not in self.scored:
            text = self.of(row.text, row.reads)
            self.scored[key] = pruner.scores(model_map, text, parts_of(model_map, kinds), {}).values
        return self.scored[key]


def windows_of(tokenizer: Any, name: str, tokens: int) -> torch.Tensor:
    """Return windows of a test text, (windows, WINDOW)."""
    source, answer = TEXTS[name]
    ids: list[int] = []
    for problem in data.load(source, "test"):
        ids += tokenizer(f"Question: {problem['question']}\nAnswer: {problem[answer]}\n\n")["input_ids"]
        if len(ids) >= tokens:
            break
    count = min(tokens, len(ids)) // WINDOW
    return torch.tensor(ids[: count * WINDOW]).reshape(count, WINDOW)


def perplexities(model: Any, windows: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return perplexities by token, each window by itself, its first token not scored."""
    quality = {}
    for name, text_windows in windows.items():
        total = 0.0
        for batch in text_windows.split(BATCH):
            with torch.no_grad():
                logits = model(batch, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
            total += float(loss)
        quality[name] = float(torch.tensor(total / text_windows[:, 1:].numel()).exp())
    return quality


def measured(row: Row, model_map: Any, texts: Texts, windows: dict[str, torch.Tensor], work: str) -> dict[str, Any]:
    """Make a plan and read the texts under it."""
    if row.name.startswith("probe pruning"):
        return probed(row, model_map, windows)
    if not row.method:
        return filtered(row, model_map, windows)
    layers = len(model_map.attention)
    in_play = layers - row.options.get("skip_first", 0) - row.options.get("skip_last", 0)
    prune_options = PruneOptions(row.ratio * layers / in_play, **row.options)
    text = texts.of(row.text, row.reads)
    pruner = make_pruner(row.method, row.method_options)
    stem = Path(work) / row.key.replace(", ", "-").replace(" ", "_").replace("%", "")
    scores = texts.scores(row, model_map)
    (plan,) = stages(pruner, model_map, prune_options, text, scores=scores, work=stem.with_suffix(".layers"))
    with plan.applied_to(model_map.model, model_map):
        quality = perplexities(model_map.model, windows)
    rmtree(stem.with_suffix(".layers"), ignore_errors=True)
    added = sum(tensor.numel() for name, tensor in plan.compensation.items() if name.endswith(".bias"))
    left = expected(model_map, plan, WINDOW)
    left = {**left, "parameters": left["parameters"] + added}
    notes = {"removes": plan.provenance["removes"], "calibration": text.record()}
    removable = round(plan.provenance["parameters"]["removable"] * layers / in_play)  # all layers are alike
    return {"perplexity": quality, **left, "planned": plan.provenance["parameters"], "removable": removable, **notes}


def probed(row: Row, model_map: Any, windows: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Read the texts under Probe Pruning.

    Parameters and arithmetic stay, since it masks; `masked` is what it leaves out, in parameters. The
    first three layers are whole. Each window is read by itself, and so many heads and channels are left out that the
    share of all is the row's; or as the row's options say.
    """
    hidden, layers = model_map.model.config.hidden_size, model_map.attention
    costs = {"heads": 2 * hidden * layers[0].head_dim, "channels": 3 * hidden}  # queries and outputs; keys, values stay
    counts = {"heads": model_map.total_heads, "channels": sum(model_map.channels().values())}
    maskable = sum(counts[kind] * costs[kind] for kind in costs) * (len(layers) - 3) / len(layers)
    method = ProbePruning(**{"ratio": row.ratio * _removable(model_map) / maskable, **row.method_options})
    quality = {}
    for name, text_windows in windows.items():
        with method.applied_to(model_map.model, model_map):
            quality |= perplexities(model_map.model, {name: text_windows})
            (applied,) = interventions_on(model_map.model)
            left_out = applied.report(model_map)["probe_pruning_left_out"]
    masked = round(sum(left_out[kind] * counts[kind] * costs[kind] for kind in costs))
    all_, without = parameters(model_map.model)
    flops = formula_flops(model_map, WINDOW)
    left = {"parameters": all_, "without_embeddings": without, "flops": flops, "removed": {}}
    settings = {"ratio": method.ratio, "skip_first": method.skip_first}
    return {"perplexity": quality, **left, "masked": masked, "removable": _removable(model_map), **settings}


def filtered(row: Row, model_map: Any, windows: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Read the texts under Token Filtering at as many multiplications as a plan of that ratio leaves."""
    costs = arithmetic(model_map, WINDOW // 2)
    target = row.ratio * _removable(model_map)
    share = target / (len(model_map.attention) * costs["attention_of_a_skipped_token"])
    if share > 1:
        return {"refused": f"all attention that it could skip is {1 / share:.0%} of what is to be saved"}
    token_filter = TokenFilter(ratio=share, focus="uniform")
    with token_filter.applied_to(model_map.model, model_map):
        quality = perplexities(model_map.model, windows)
        (applied,) = interventions_on(model_map.model)
        skipped = applied.report(model_map)["token_filter_skipped"]["realised"]
    saved = 2 * WINDOW * skipped * len(model_map.attention) * costs["attention_of_a_skipped_token"]
    all_, without = parameters(model_map.model)
    flops = formula_flops(model_map, WINDOW) - round(saved)
    left = {"parameters": all_, "without_embeddings": without, "flops": flops, "removed": {}}
    return {"perplexity": quality, **left, "skipped": skipped}


def _removable(model_map: Any) -> int:
    """Return the number of parameters of all heads and channels."""
    modules = [m for x in model_map.attention for m in (x.o_proj, *(x.rows(part, 0).module for part in "qkv"))]
    modules += [m for x in model_map.feed_forward for m in (x.down, *x.parts.values())]
    return sum(module.in_features * module.out_features for module in modules)


def realised(result: dict[str, Any], dense: dict[str, Any]) -> float | None:
    """Return the share of heads' and channels' parameters that a row has really lost, less biases that it gained."""
    if "planned" in result:  # of layers that are spared, too
        return (dense["parameters"] - result["parameters"]) / result.get("removable", result["planned"]["removable"])
    return result["masked"] / result["removable"] if "masked" in result else None


def finish(
    machine: dict[str, Any], tokens: int, texts: Texts, stored_rows: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write the results file; return its rows and the checks of what was expected."""
    calibration = {name: texts.of(name).record() for name in CALIBRATED}
    environments: list[dict[str, Any]] = []
    results = {}
    for key in ("dense", *(row.key for row in rows() if row.key in stored_rows)):
        environment_of_row = stored_rows[key]["environment"]
        if environment_of_row not in environments:
            environments.append(environment_of_row)
        results[key] = {**stored_rows[key], "environment": environments.index(environment_of_row)}
    checked = expectations(results)
    content = {"written": machine, "environments": environments, "tokens": tokens, "calibration": calibration}
    write("baselines", {**content, "expectations": checked, "results": results})
    return results, checked


def expectations(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Check what was expected, at each ratio and on each text: two figures, and whether it is so; None without one."""

    def figure(read: str, name: str, ratio: float) -> float | None:
        quality = results.get(Row(name, "", ratio).key, {}).get("perplexity")
        return quality and quality[read]

    checks = []
    for expectation, figures in EXPECTED:
        for ratio, read in product(sorted(RATIOS), TEXTS):
            lower, higher = figures(partial(figure, read), ratio)
            so = None if lower is None or higher is None else lower <= higher
            checks.append({"expected": expectation, "ratio": ratio, "read": read, "figures": [lower, higher], "so": so})
    return checks


def report(results: dict[str, Any], checked: list[dict[str, Any]]) -> None:
    """Write the tables and the picture."""
    ordered = sorted(rows(), key=lambda row: row.ratio)
    lines = [*_table(results, [row for row in ordered if not row.name.startswith(ALONE)], "heads and channels")]
    lines += [
        "",
        "Asked and realised are shares of the parameters of heads and channels of the whole model, layers that a",
        "setting spares included; realised ones are counted on what is left, biases that were added taken off. Probe",
        "Pruning masks and Token Filtering skips: all parameters stay, and Probe Pruning's share is what its masks",
        "leave out: heads without keys and values, and channels. A probe looks at the whole window, the predicted",
        "tokens included.",
        *(f"{row.key}: {result['refused']}." for row in ordered if "refused" in (result := results.get(row.key, {}))),
        "",
        *_table(results, [row for row in ordered if row.name.startswith(ALONE)], "heads"),
        "",
        "Here they are shares of the parameters of heads alone, a key-value head with its query heads at a time.",
        "",
        "| authors' setting | differs in | asked | GSM8K: theirs | everybody's | MATH-500: theirs | everybody's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, (other, differs) in SETTINGS.items():
        for ratio in sorted(RATIOS):
            pair = [results.get(Row(setting, "", ratio).key, {}).get("perplexity") for setting in (name, other)]
            if all(pair):
                figures = " | ".join(_number(quality[read]) for read in TEXTS for quality in pair)
                lines.append(f"| {name} | {differs} | {ratio:.0%} | {figures} |")
    lines += ["", "| expected | asked | read | so? | figures |", "| --- | --- | --- | --- | --- |"]
    for check in checked:
        if check["so"] is not None:
            figures = " against ".join(f"{x:,.1f}" for x in check["figures"])
            read, so = check["read"].replace("MATH", "MATH-500"), "yes" if check["so"] else "**no**"
            lines.append(f"| {check['expected']} | {check['ratio']:.0%} | {read} | {so} | {figures} |")
    write_text(OUTPUT / "table.md", "\n".join(lines) + "\n")
    draw(results)


def _table(results: dict[str, Any], selected: list[Row], kinds: str) -> Iterator[str]:
    """Yield the lines of a table of rows whose shares are of the parameters of these kinds."""
    dense = results["dense"]
    yield f"| pruned by | asked, of {kinds} | realised | calibrated on | GSM8K | MATH-500 | parameters | FLOPs |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    counts = f"{dense['parameters'] / 1e6:.1f} M | {dense['flops'] / 1e9:.2f} G"
    yield f"| nothing | | | | {_shown(dense['perplexity'])} | {counts} |"
    for row in selected:
        result = results.get(row.key)
        if result is None:
            continue
        text = row.text if row.method and make_pruner(row.method, row.method_options).reads_text else ""
        text = row.text if row.options.get("compensation") == "least_squares" else text
        name = row.name.removeprefix(ALONE)
        if "refused" in result:
            yield f"| {name} | {row.ratio:.0%} | | {text} | — | — | | |"
            continue
        shares = " | ".join(f"−{1 - result[cost] / dense[cost]:.1%}" for cost in ("parameters", "flops"))
        share = realised(result, dense)
        real = f"{share:.1%}" if share is not None else ""
        yield f"| {name} | {row.ratio:.0%} | {real} | {text} | {_shown(result['perplexity'])} | {shares} |"


def _shown(quality: dict[str, float]) -> str:
    return " | ".join(_number(quality[name]) for name in TEXTS)


def _number(perplexity: float) -> str:
    return f"{perplexity:,.2f}" if perplexity < 1e5 else f"{perplexity:.1e}"


def draw(results: dict[str, Any]) -> None:
    """Draw perplexity against the share, of each method and text that it was calibrated on."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(10, 3.8), layout="constrained")
    panels = picture.subplots(1, len(TEXTS), sharey=True)
    names = ["slimgpt", "flap", "wanda_sp", "llm_pruner", "magnitude"]
    for axes, read in zip(panels, TEXTS, strict=True):
        for colour, name in zip(COLOURS, names, strict=False):
            for text, line in (("GSM8K", "-"), ("MATH", "--")):
                measurements = [(ratio, results.get(Row(name, "", ratio, text).key, {})) for ratio in sorted(RATIOS)]
                points = [
                    (100 * ratio, result["perplexity"][read])
                    for ratio, result in measurements
                    if "perplexity" in result
                ]
                label = f"{name}{'' if text == 'GSM8K' else ', calibrated on MATH'}"
                if points:
                    axes.plot(*zip(*points, strict=True), color=colour, ls=line, marker="o", ms=4, label=label)
        seeds = [[results.get(Row(f"random, seed {s}", "", r).key, {}) for s in range(SEEDS)] for r in sorted(RATIOS)]
        drawn = [
            [result["perplexity"][read] for result in seed_results if "perplexity" in result] for seed_results in seeds
        ]
        if all(drawn):
            shares, ends = [100 * ratio for ratio in sorted(RATIOS)], [(min(values), max(values)) for values in drawn]
            axes.fill_between(
                shares, *zip(*ends, strict=True), color="grey", alpha=0.3, lw=0, label="random, five seeds"
            )
        axes.axhline(results["dense"]["perplexity"][read], color="black", lw=0.8, ls=":", label="unpruned")
        axes.set_yscale("log")
        axes.set_xlim(0, 60)
        axes.set_xticks([100 * ratio for ratio in sorted(RATIOS)])
        axes.set_title(f"read: {read}", fontsize=9, loc="left")
        axes.set_xlabel("per cent of the parameters of heads and channels")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("perplexity by token")
    picture.legend(*panels[-1].get_legend_handles_labels(), fontsize=7, frameon=False, loc="outside right center")
    save(picture, OUTPUT / "perplexity")


if __name__ == "__main__":
    main()
