"""Expressions of splits: sums and slices of the splits of a data set, as in `datasets`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lmeval_prune.errors import InputError
from lmeval_prune.tasks import data
from lmeval_prune.tasks.loading import warn_of_scored_splits


def texts(split: str, folder: Path) -> list[str]:
    return list(data.load("asdiv_a", split, folder)["question"])


def test_splits_are_added_and_sliced(shared_data: Path) -> None:
    first, second = texts("fold0", shared_data), texts("fold1", shared_data)
    assert texts("fold0 + fold1", shared_data) == first + second
    half = len(second) // 2
    assert texts("fold1[:50%]", shared_data) + texts("fold1[50%:]", shared_data) == second
    assert abs(len(texts("fold1[:50%]", shared_data)) - half) <= 1
    assert texts("fold0[3:5]+fold1[-2:]", shared_data) == first[3:5] + second[-2:]
    assert texts("all", shared_data)[:7] == texts("all[:7]", shared_data)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("fold7", "has no split 'fold7'; it has all, fold0"),
        ("fold0+fold7[:2]", "has no split 'fold7'"),
        ("fold0+", "has no split ''"),
    ],
)
def test_wrong_expressions_are_one_line(shared_data: Path, split: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        texts(split, shared_data)
    assert "\n" not in str(error.value)


def test_a_part_of_a_scored_split_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_scored_splits("the sweep", "prune_gsm8k", ["train+test[:10]"], ["test"], "sweep train")
    [record] = caplog.records
    assert "questions of the split test, which prune_gsm8k scores" in record.getMessage()


def test_exemplars_are_of_no_named_split() -> None:
    arguments: dict[str, Any] = {"prune_data": "tiny_cloze", "prune_train": "train"}
    with pytest.raises(InputError, match="exemplars come from train"):
        data.custom_dataset(**arguments, data_split="train[:3]+test")
    assert len(data.custom_dataset(**arguments, data_split="test[:3]")["test"]) == 3
