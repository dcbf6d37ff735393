"""Write measured distances as JSON and as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from lmeval_prune.artefacts import without_nan, write_artefact, write_text
from lmeval_prune.distance.options import DistanceOptions
from lmeval_prune.distance.summary import COLUMNS, Summary, summarize, summarize_answers, table
from lmeval_prune.distance.variants import Distances
from lmeval_prune.models.attempts import DENSE

SCHEMA, VERSION = "lmeval-prune/distance", 1


def write(output: str, pretrained: str, settings: DistanceOptions, distances: Distances) -> str:
    """Write the JSON file and the table, and return what the command prints."""
    frames = {name: distances.frame(name) for name in distances.tokens}
    summaries = {name: summarize(frame) for name, frame in frames.items()}
    dense: Summary = {}
    if distances.answers:
        answers, frame = distances.answers[DENSE], next(iter(frames.values()))
        lengths = frame.assign(answer_tokens=list(map(len, answers.tokens)), cut_off=answers.cut_off)
        answer_summary = summarize_answers(lengths)
        dense = {name: answer_summary[name] for name in ("mean_tokens", "mean_tokens_se", "cut_off", "cut_off_se")}
    variants = {name: {**summary, "texts": _texts(frames[name])} for name, summary in summaries.items()}
    content = {"model": pretrained, "settings": vars(settings), "dense": dense, "variants": variants}
    write_artefact(output, SCHEMA, VERSION, content)
    lines = table(({DENSE: dense} if dense else {}) | summaries)
    first = next(iter(summaries.values()))
    text = f"{lines}\n\n{first['tokens']} tokens of {first['documents']} documents; ±: standard error over documents.\n"
    write_text(Path(output).with_suffix(".md"), text)
    return f"{text}{output} and .md"


def _texts(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a variant's texts for JSON, with the means over their tokens."""
    means = {name: [float(values.mean()) for values in frame[name]] for name in COLUMNS}
    rows = frame.assign(tokens=frame["kld"].map(len), **means).to_dict("records")
    return [{name: None if value is pd.NA else without_nan(value) for name, value in row.items()} for row in rows]
