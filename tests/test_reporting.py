"""What reports share: tests and bands against all flips and draws, tables that survive any name."""

from __future__ import annotations

import csv
import io
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lmeval_prune.reporting import documents, plot_style
from lmeval_prune.reporting.statistics import mean_interval, sign_flip_test


def test_the_paired_test_counts_all_flips() -> None:
    generator = np.random.default_rng(0)
    for questions, tolerance in ((10, 1e-12), (16, 0.02)):  # all 2^10 are taken; of 2^16 some are drawn
        for differences in (generator.normal(0.3, 1, (questions, 3)), generator.integers(-1, 2, (questions, 3))):
            flips = np.array(list(itertools.product((-1, 1), repeat=questions))) @ differences
            exact = (np.abs(flips) >= np.abs(differences.sum(0)) - 1e-12).mean(0)
            assert sign_flip_test(differences) == pytest.approx(exact, abs=tolerance)


def test_the_paired_test_of_what_is_not_known_and_of_one_question() -> None:
    ps = sign_flip_test(np.array([[1.0, np.nan], [1.0, 2.0], [1.0, 1.0]]))
    assert ps[0] == 2 / 8 and np.isnan(ps[1])
    assert sign_flip_test(np.array([[1.0]])).tolist() == [1.0]


def test_an_interval_of_what_is_not_known_and_of_one_question() -> None:
    low, high = mean_interval(np.array([[1.0, np.nan], [0.0, 2.0]]), 1.0)
    assert (low[0], high[0]) == pytest.approx((0.0126, 0.9874), abs=1e-4) and np.isnan([low[1], high[1]]).all()
    low, high = mean_interval(np.array([[1.0, 0.5]]), 1.0)
    assert (low[0], high[0]) == pytest.approx((0.025, 1.0)) and (low[1], high[1]) == (0, 1)


def test_a_markdown_table_keeps_its_columns_and_digits() -> None:
    table = pd.DataFrame({"policy": ["a|b", "c"], "N": ["0.500", documents.bold("0.250")]})
    shown = documents.markdown(table, ["policy"])
    header, rule, first, second = shown.splitlines()
    assert rule.replace("-", "") == "|:|:|" and header.split()[1::2] == ["policy", "N"]
    assert r"a\|b" in first and "0.500" in first and "**0.250**" in second
    assert documents.bold("") == documents.bold("", False) == "" and documents.bold("x", False) == "x"


HOSTILE = ["=HYPERLINK(1)", "+1", "-1+cmd", "@SUM(A1)", "\t=1", "＝1"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.000"), (12.34567, "12.35"), (-0.00123456, "−0.001235"), (123456.7, "123457"), (1e9, "1.000e+09"),
     (float("nan"), ""), (float("inf"), "inf"), (9.99999, "10.000")],
)  # fmt: skip
def test_significant_digits(value: float, text: str) -> None:
    assert documents.significant(value) == text


def test_any_name_survives_csv_and_none_is_a_formula() -> None:
    """Numbers stay what they are."""
    names = ['say "T = 0.6"', "a, b", "a|b", "two\nlines", *HOSTILE]
    table = {"=name": names, "n": [-1, *range(1, len(names))], "d": [-0.5, 1 / 3, *[None] * (len(names) - 2)]}
    rows = list(csv.reader(io.StringIO(documents.csv(pd.DataFrame(table)), newline="")))
    assert rows[0] == ["'=name", "n", "d"] and [row[0] for row in rows[1:]] == [*names[:4], *(f"'{x}" for x in HOSTILE)]
    assert rows[1][1:] == ["-1", "-0.500000"] and rows[2][1:] == ["1", "0.333333"]
    assert documents.csv(pd.DataFrame({"a": ["\r=1"]})).startswith('a\n"\'\n=1"')


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("[a](javascript:alert(1))", r"\[a\](javascript:alert(1))"),
        ("![](http://x/y)", r"!\[\](http://x/y)"),
        ("**a** `b` _c_ ~~d~~", r"\*\*a\*\* \`b\` \_c\_ &#126;&#126;d&#126;&#126;"),
        ("random_heads 10%, α, <0.001", "random_heads 10%, α, <0.001"),
        ("<", "&lt;"),
        ("a\n# b\x1b[31m|\u202e&lt;", r"a # b \[31m\| &amp;lt;"),
    ],
)
def test_names_of_others_are_shown_in_markdown_not_read(text: str, shown: str, tmp_path: Path) -> None:
    assert documents.escape_markdown(text) == shown == documents.escape_markdown(documents.escape_markdown(text))
    assert shown in documents.markdown(pd.DataFrame({text: [text]}), [text]).splitlines()[0]
    assert shown in documents.markdown(pd.DataFrame({"a": [documents.bold(text)]}), ["a"])
    (tmp_path / "x.md.jinja").write_text("{{ a }}\n")
    assert documents.render(tmp_path / "x.md.jinja", a=text) == f"{shown}\n"


def test_a_dollar_in_a_name_is_no_formula(tmp_path: Path) -> None:
    canvas, axes = plot_style.figure(3, 2, "costs $\\frac{")
    axes.plot([1, 2], [1, 10], label="a $x^{")
    axes.set_yscale("log")
    axes.legend()
    axes.set_xticks([1, 2], ["$_{", "b"])
    plot_style.save(canvas, tmp_path / "x")
    assert (tmp_path / "x.png").is_file()
