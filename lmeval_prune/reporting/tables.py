"""Tables, as Markdown and as CSV, that show names and texts of others as they are and let none act."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup
from tabulate import tabulate

from lmeval_prune.reporting.documents import plain

_FORMULA = tuple("=+-@\t\n＝＋－＠")  # how a cell begins that a spreadsheet computes


@dataclass(frozen=True)
class Bold:
    """A text that is shown in bold."""

    text: str


def bold(text: str, wanted: bool = True) -> Any:
    """Return a cell in bold, if wanted."""
    return Bold(text) if text and wanted else text


def markdown(table: pd.DataFrame, left: Sequence[str]) -> Markup:
    """Write a table as Markdown.

    Args:
        table: of text, formatted as it is to be shown, and of `Bold`.
        left: columns that are aligned to the left; the others hold numbers.
    """
    align = ["left" if name in left else "right" for name in table.columns]
    rows = [[_cell(value) for value in row] for row in table.itertuples(index=False)]
    names = [plain(name) for name in table.columns]
    return Markup(tabulate(rows, names, tablefmt="pipe", disable_numparse=True, colalign=align if rows else None))


def _cell(value: Any) -> str:
    return f"**{plain(value.text)}**" if isinstance(value, Bold) else plain(value)


def csv(table: pd.DataFrame) -> str:
    """Write a table as CSV, numbers with six decimals; a text that a spreadsheet would compute gets an apostrophe."""
    shown = table.map(_text).rename(columns=_text)
    return str(shown.to_csv(index=False, float_format="%.6f", lineterminator="\n"))


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")  # which is not quoted, so that a row would end there
    return f"'{text}" if text.startswith(_FORMULA) else text
