"""Model cards: front matter as the Hub reads it, and sections of Markdown."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from huggingface_hub import ModelCard, ModelCardData

from lmeval_prune.artefacts import CREATED_BY, digest, write_text
from lmeval_prune.cards.command import command_line
from lmeval_prune.cards.origin import CARD, Origin
from lmeval_prune.reporting.documents import backticks, escape_markdown
from lmeval_prune.reporting.tables import markdown

_logger = logging.getLogger(__name__)
LIBRARY = "lmeval-prune"
EXAMPLE_TASK = "prune_tiny_choice"  # of commands: it is installed with its questions
Relation = Literal["adapter", "finetune", "quantized"]  # of the Hub's; it has none for pruned models


@dataclass(frozen=True)
class Card:
    """The card of a model, an adapter or a router.

    Attributes:
        title: name of what the card is about.
        origin: the model that it derives from.
        relation: the Hub's `base_model_relation`. Pruned models, also distilled ones, are `finetune`: other weights
            in the same format.
        library: the library that loads it, as on the Hub.
        tags: besides `lmeval-prune`.
        summary: what it is, in Markdown.
        sections: Markdown by heading, in order; empty ones are left out.
        pipeline: the Hub's `pipeline_tag`, if one is right.
        datasets: names on the Hub of the data sets it was trained on.
    """

    title: str
    origin: Origin
    relation: Relation
    library: str
    tags: Sequence[str]
    summary: str
    sections: Mapping[str, str]
    pipeline: str | None = None
    datasets: Sequence[str] = ()

    @property
    def data(self) -> ModelCardData:
        """Front matter."""
        fields: dict[str, Any] = {
            "base_model": self.origin.base_model,
            "datasets": list(self.datasets) or None,
            "language": self.origin.language,
            "library_name": self.library,
            "pipeline_tag": self.pipeline,
            "tags": list(dict.fromkeys([LIBRARY, *self.tags])),
            **self.origin.license,
            **({"base_model_relation": self.relation} if self.origin.base_model else {}),
        }
        return ModelCardData(**fields)

    @property
    def text(self) -> str:
        """Content of the README.md."""
        sections = {**self.sections, "License": self.origin.license_text}
        parts = [f"# {escape_markdown(self.title)}", self.summary]
        parts += [f"## {heading}\n\n{text.strip()}" for heading, text in sections.items() if text.strip()]
        parts.append(f"Written by {CREATED_BY}.")
        body = "\n\n".join(parts)
        text = str(ModelCard(f"---\n{self.data.to_yaml()}\n---\n\n{body}\n"))
        text = text.encode("utf-8", "backslashreplace").decode()  # the name of a folder may be no text
        return f"{text}\n{_mark(text)}\n"

    def write(self, folder: Path) -> None:
        """Write the README.md of a folder; see `write_file`."""
        self.write_file(folder / CARD)

    def write_file(self, path: Path) -> None:
        """Write the card; a file that this package did not write, or that was changed since, stays, with a warning."""
        if path.is_file() and not is_unchanged(path):
            _logger.warning("%s is not replaced by a new card: it was written or changed by hand", path)
            return
        write_text(path, self.text)


def is_unchanged(path: Path) -> bool:
    """Return whether a file is a card as this package wrote it."""
    content = path.read_bytes().decode("utf-8", "replace").rstrip("\n")
    text, _, mark = content.rpartition("\n")
    return mark == _mark(text)


def _mark(text: str) -> str:
    """Return the last line of a card, by which a later change of its text is recognised; Markdown does not show it."""
    return f"<!-- lmeval-prune card {digest(text)} -->"


def command_section(text: str = "") -> str:
    """Return a section with the command of this process, if there is one, and further Markdown."""
    command = command_line()
    section = code("bash", command) if command else "By a Python program that used lmeval-prune."
    return "\n\n".join(filter(None, [section, text]))


def code(language: str, text: str) -> str:
    """Return a block of code."""
    fence = backticks(text, 3)
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def quoted(text: str) -> str:
    """Return a text as a literal of Python in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def table(rows: Sequence[Mapping[str, Any]], left: str) -> str:
    """Return rows as a Markdown table; the column `left` is aligned to the left."""
    frame = pd.DataFrame([{key: str(value) for key, value in row.items()} for row in rows]).fillna("")
    return str(markdown(frame, [left]))
