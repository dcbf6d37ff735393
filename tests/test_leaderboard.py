"""The leaderboard's tests, computed again from its committed rows."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from scipy import stats

from tests.conftest import ROOT

FOLDER = ROOT / "docs/results/leaderboard"


def test_p_values_follow_from_the_rows_and_the_null_row_is_none() -> None:
    rows = pd.read_parquet(FOLDER / "rows.parquet")
    solved = rows[rows["task"] == "ASDiv-A"].pivot(index="question", columns="variant", values="value")
    assert len(solved) == 1218 and solved.notna().all(axis=None) and solved.isin([0, 1]).all(axis=None)
    report = json.loads((FOLDER / "comparison.json").read_text())["rows"]
    reported = {row["variant"]: row for row in report if row["task"] == "ASDiv-A" and row["p"] is not None}
    assert set(reported) == set(solved) - {"dense"}
    for variant, row in reported.items():
        difference = solved[variant] - solved["dense"]
        better, worse = int((difference > 0).sum()), int((difference < 0).sum())
        p = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
        assert row["p"] == pytest.approx(p) and row["difference"] == pytest.approx(difference.mean())
    ps = sorted(row["p"] for row in report if row["p"] is not None)
    for row in reported.values():
        adjusted = max(p * (len(ps) - rank) for rank, p in enumerate(ps) if p <= row["p"])
        assert row["p_holm"] == pytest.approx(min(1.0, adjusted))
    assert reported["copy of dense"]["p"] == 1.0 and reported["copy of dense"]["p_margin"] < 0.001
