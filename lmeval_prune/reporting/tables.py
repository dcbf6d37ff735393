"""Tables, as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd


def markdown(table: pd.DataFrame, left: Sequence[str]) -> str:
    """Write a table as Markdown.

    Args:
        table: of text, formatted as it is to be shown.
        left: columns that are aligned to the left; the others hold numbers.
    """
    shown = table.astype(str).replace(r"\|", r"\\|", regex=True)
    align = ["left" if name in left else "right" for name in table.columns]
    return str(shown.to_markdown(index=False, disable_numparse=True, colalign=align))


def bold(text: str, wanted: bool = True) -> str:
    """Markdown's bold, if wanted."""
    return f"**{text}**" if text and wanted else text


def csv(table: pd.DataFrame) -> str:
    """Write a table as CSV, numbers with six decimals."""
    return str(table.to_csv(index=False, float_format="%.6f", lineterminator="\n"))
