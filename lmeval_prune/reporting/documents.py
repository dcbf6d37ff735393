"""Documents from jinja2 templates, and tables as Markdown and CSV.

Names and texts of users are escaped, so that they never act as markup or formulas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from tabulate import tabulate

_FORMULA_STARTS = tuple("=+-@\t\n＝＋－＠")  # of cells that a spreadsheet evaluates
_MARKDOWN = re.compile(r"[\\`*\[\]|]|(?<!\w)_|_(?!\w)")


def printable(text: Any) -> str:
    """Return a text for a terminal or a figure, with spaces for line breaks and control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def escape_markdown(text: Any) -> Markup:
    """Escape a text for Markdown with embedded HTML, in one line; `Markup` is returned unchanged."""
    if isinstance(text, Markup):
        return text
    escaped = printable(text).replace("&", "&amp;").replace(">", "&gt;").replace("~", "&#126;")
    escaped = re.sub(r"<(?!\d)", "&lt;", escaped)  # no tag begins with a digit
    return Markup(_MARKDOWN.sub(r"\\\g<0>", escaped))


def render(template: Path, **values: Any) -> str:
    """Render a template, `*.md.jinja` or `*.html.jinja`; all values except `Markup` are escaped."""
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=escape if ".html" in template.suffixes else escape_markdown,
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


# ---------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Bold:
    """A bold text; no `Markup`, which pandas turns into plain text."""

    text: str


def bold(text: str, condition: bool = True) -> Any:
    return Bold(text) if text and condition else text


def signed(value: float, digits: int = 1) -> str:
    """Format a difference with its sign; empty for NaN."""
    return "" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")


def significant(value: float, digits: int = 4, sign: bool = False) -> str:
    """Format a number with so many significant digits, up to a million with all before the point; empty for NaN."""
    if math.isnan(value):
        return ""
    exponent = math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
    notation = f"{digits - 1}e" if exponent > 6 else f"{min(9, max(0, digits - 1 - exponent))}f"
    return f"{value:{'+' * sign}.{notation}}".replace("-", "−")


def p_value(value: float | None) -> str:
    """Format a p-value with three decimals; empty for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def markdown(table: pd.DataFrame, left: Sequence[str]) -> Markup:
    """Return a table of formatted texts and `Bold` as Markdown; the columns `left` are aligned to the left."""
    align = ["left" if name in left else "right" for name in table.columns]
    names = [escape_markdown(name) for name in table.columns]
    rows = [
        [f"**{escape_markdown(x.text)}**" if isinstance(x, Bold) else escape_markdown(x) for x in row]
        for row in table.itertuples(index=False)
    ]
    return Markup(tabulate(rows, names, tablefmt="pipe", disable_numparse=True, colalign=align if rows else None))


def csv(table: pd.DataFrame) -> str:
    """Return a table as CSV with six decimals; texts that a spreadsheet would evaluate get an apostrophe."""

    def escaped(value: Any) -> Any:
        text = re.sub("\r\n?", "\n", value) if isinstance(value, str) else value  # a lone \r would end the row
        return f"'{text}" if isinstance(text, str) and text.startswith(_FORMULA_STARTS) else text

    cells = table.map(escaped).rename(columns=escaped)
    return str(cells.to_csv(index=False, float_format="%.6f", lineterminator="\n"))
