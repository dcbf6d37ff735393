"""Write measured distances as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import write_artefact, write_text
from lmeval_prune.distance.options import DistanceOptions
from lmeval_prune.distance.summary import summarize_answers, table
from lmeval_prune.distance.variants import Variant
from lmeval_prune.models.head_router import DENSE

SCHEMA, VERSION = "lmeval-prune/distance", 1


def write(output: str, pretrained: str, settings: DistanceOptions, variants: Mapping[str, Variant]) -> str:
    """Write the JSON file and the table, and return what the command prints."""
    summaries = {name: variant.summary() for name, variant in variants.items()}
    first = next(iter(variants.values()))
    dense: dict[str, Any] = {}
    if first.dense_answers:
        tokens, cut_off = first.dense_answers.tokens, first.dense_answers.cut_off
        whole = summarize_answers(tokens, tokens, cut_off, [text.document for text in first.texts])
        dense = {name: whole[name] for name in ("mean_tokens", "mean_tokens_se", "cut_off", "cut_off_se")}
    content = {
        "model": pretrained,
        "settings": vars(settings),
        "dense": dense,
        "variants": {name: {**summaries[name], "texts": variant.by_text()} for name, variant in variants.items()},
    }
    write_artefact(output, SCHEMA, VERSION, content)
    counted = next(iter(summaries.values()))
    lines = table(({DENSE: dense} if dense else {}) | summaries)
    size = f"{counted['tokens']} tokens of {counted['documents']} documents"
    text = f"{lines}\n\n{size}; ±: standard error over documents.\n"
    write_text(Path(output).with_suffix(".md"), text)
    return f"{text}{output} and .md"
