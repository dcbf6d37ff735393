"""What reports share: tests and bands against all flips and draws, tables that survive any name."""

from __future__ import annotations

import csv
import io
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from jinja2 import UndefinedError

from lmeval_prune.reporting import documents, tables
from lmeval_prune.reporting.statistics import bootstrap_band, holm, sign_flip_test


def test_the_paired_test_knows_a_difference_from_none() -> None:
    generator = np.random.default_rng(0)
    base = (generator.random((200, 2)) < 0.5).astype(float)
    better = base.copy()
    better[:40, 0] = 1
    real, none = sign_flip_test(better - base)
    assert 1 / 10_001 <= real < 0.001 and none == 1


def test_the_paired_test_counts_all_flips() -> None:
    generator = np.random.default_rng(0)
    for questions, tolerance in ((10, 1e-12), (16, 0.02)):  # all 2^10 are taken; of 2^16 some are drawn
        for differences in (generator.normal(0.3, 1, (questions, 3)), generator.integers(-1, 2, (questions, 3))):
            flips = np.array(list(itertools.product((-1, 1), repeat=questions))) @ differences
            exact = (np.abs(flips) >= np.abs(differences.sum(0)) - 1e-12).mean(0)
            assert sign_flip_test(differences) == pytest.approx(exact, abs=tolerance)


def test_without_an_effect_the_paired_test_is_wrong_as_often_as_it_says() -> None:
    found = sign_flip_test(np.random.default_rng(1).normal(size=(30, 2000)), draws=999)
    for level in (0.05, 0.2, 0.5):
        assert (found <= level).mean() == pytest.approx(level, abs=4 * (level * (1 - level) / 2000) ** 0.5)


def test_the_paired_test_of_what_is_not_known_and_of_one_question() -> None:
    found = sign_flip_test(np.array([[1.0, np.nan], [1.0, 2.0], [1.0, 1.0]]))
    assert found[0] == 2 / 8 and np.isnan(found[1])
    assert sign_flip_test(np.array([[1.0]])).tolist() == [1.0]


def test_the_same_seed_gives_the_same_numbers() -> None:
    values = np.random.default_rng(0).random((50, 3))
    for function in (sign_flip_test, bootstrap_band):
        first, again, other = (np.array(function(values - 0.45, seed)) for seed in (1, 1, 2))
        assert (first == again).all() and (first != other).any()


def test_the_band_is_that_of_all_draws() -> None:
    """Five questions: their 5^5 draws with replacement, one by one."""
    values = np.array([[0.0, 1], [1, 1], [1, 0], [0.5, 0], [0, 0.2]])
    means = np.array([values[list(rows)].mean(0) for rows in itertools.product(range(5), repeat=5)])
    low, high = bootstrap_band(values, draws=20_000)
    assert low == pytest.approx(np.percentile(means, 2.5, axis=0), abs=0.03)
    assert high == pytest.approx(np.percentile(means, 97.5, axis=0), abs=0.03)
    one, _ = bootstrap_band(values[:1])
    assert one.tolist() == [0, 1]
    low, high = bootstrap_band(np.array([[1.0, np.nan], [0.0, 2.0]]))
    assert (low[0], high[0]) == (0, 1) and np.isnan([low[1], high[1]]).all()


def test_holm_against_its_definition() -> None:
    assert holm([0.01, float("nan"), 0.04, 0.03]) == pytest.approx([0.03, float("nan"), 0.06, 0.06], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]


AWKWARD = ['say "T = 0.6"', "a, b", "a|b", "two\nlines"]


def test_any_name_survives_csv() -> None:
    text = tables.csv(pd.DataFrame({"policy": AWKWARD, "n": [1, 2, 3, 4], "pass": [0.5, 1 / 3, 0, 1]}))
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == ["policy", "n", "pass"] and [row[0] for row in rows[1:]] == AWKWARD
    assert rows[2][1:] == ["2", "0.333333"]


def test_a_markdown_table_keeps_its_columns_and_digits() -> None:
    shown = tables.markdown(pd.DataFrame({"policy": ["a|b", "c"], "N": ["0.500", tables.bold("0.250")]}), ["policy"])
    header, rule, first, second = shown.splitlines()
    assert rule.replace("-", "") == "|:|:|" and header.split()[1::2] == ["policy", "N"]
    assert r"a\|b" in first and "0.500" in first and "**0.250**" in second
    assert tables.bold("") == tables.bold("", True) == "" and tables.bold("x", False) == "x"


def test_a_template_that_lacks_a_value_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.jinja").write_text("{{ a }}: {{ b }}\n")
    assert documents.render(tmp_path / "x.jinja", a="<&>", b=1) == "<&>: 1\n"
    with pytest.raises(UndefinedError):
        documents.render(tmp_path / "x.jinja", a=1)
