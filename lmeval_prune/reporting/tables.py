"""Tables as Markdown and CSV; names and texts of users are escaped, so that they never act as markup or formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup
from tabulate import tabulate

from lmeval_prune.reporting.documents import escape_markdown

_FORMULA_STARTS = tuple("=+-@\t\n＝＋－＠")  # of cells that a spreadsheet evaluates


@dataclass(frozen=True)
class Bold:
    """A bold text."""

    text: str


def bold(text: str, condition: bool = True) -> Any:
    """Return a cell in bold if a condition holds."""
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
    rows = [[_cell(value) for value in row] for row in table.itertuples(index=False)]
    return Markup(tabulate(rows, names, tablefmt="pipe", disable_numparse=True, colalign=align if rows else None))


def _cell(value: Any) -> str:
    return f"**{escape_markdown(value.text)}**" if isinstance(value, Bold) else escape_markdown(value)


def csv(table: pd.DataFrame) -> str:
    """Return a table as CSV with six decimals; texts that a spreadsheet would evaluate get an apostrophe."""
    escaped = table.map(_text).rename(columns=_text)
    return str(escaped.to_csv(index=False, float_format="%.6f", lineterminator="\n"))


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")  # a lone \r is not quoted and would end the row
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
