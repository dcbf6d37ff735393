"""Tables as Markdown and CSV; names and texts of users are shown as they are and never act as markup or formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup
from tabulate import tabulate

from lmeval_prune.reporting.documents import plain

_FORMULA_STARTS = tuple("=+-@\t\n＝＋－＠")  # how a cell begins that a spreadsheet computes


@dataclass(frozen=True)
class Bold:
    """A text that is shown in bold."""

    text: str


def bold(text: str, condition: bool = True) -> Any:
    """Return a cell in bold, if a condition is met."""
    return Bold(text) if text and condition else text


def signed(value: float, digits: int = 1) -> str:
    """Format a difference with its sign; nothing for NaN."""
    return "" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")


def p_value(value: float | None) -> str:
    """Format a p-value with three decimals; nothing where there is none."""
    if value is None or math.isnan(value):
        return ""
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def markdown(table: pd.DataFrame, left: Sequence[str]) -> Markup:
    """Write a table as Markdown.

    Args:
        table: of text, formatted as it is to be shown, and of `Bold`.
        left: names of the columns that are aligned to the left; the others hold numbers.
    """
    align = ["left" if name in left else "right" for name in table.columns]
    names = [plain(name) for name in table.columns]
    rows = [[_cell(value) for value in row] for row in table.itertuples(index=False)]
    return Markup(tabulate(rows, names, tablefmt="pipe", disable_numparse=True, colalign=align if rows else None))


def _cell(value: Any) -> str:
    return f"**{plain(value.text)}**" if isinstance(value, Bold) else plain(value)


def csv(table: pd.DataFrame) -> str:
    """Write a table as CSV, numbers with six decimals; a text that a spreadsheet would compute gets an apostrophe."""
    escaped = table.map(_text).rename(columns=_text)
    return str(escaped.to_csv(index=False, float_format="%.6f", lineterminator="\n"))


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")  # a lone \r is not quoted and would end the row
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
