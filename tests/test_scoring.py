"""Extraction and comparison of numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmeval_prune.scoring import extract, numbers_equal

EQUAL = [
    ("42", "42"), ("42.0", "42"), ("1,200", "1200"), ("$1,200.00", "1200"), ("18 dollars", "18"), ("x = 5", "5"),
    ("1/2", "0.5"), (r"\frac{3}{4}", "0.75"), (r"\dfrac34", "3/4"), ("2 1/2", "2.5"), ("80%", "0.8"), ("80%", "80"),
    (r"80\%", "80"), ("33.33", "33.333333"), ("-7", "-7"), ("−7", "-7"), ("１２", "12"), ("（3/8）", "0.375"),
    ("(3/8)", "3/8"), (r"12\text{ cm}", "12"), ("1{,}000", "1000"), ("3e2", "300"), ("5.", "5"), (".5", "1/2"),
    ("€ 4.50", "4.5"),
    ("2 1/2 cups", "2.5"), ("18 km^2", "18"), ("18 m", "18"), ("12cm", "12"), ("60 km/h", "60"),
    ("about 7 apples", "7"), ("共12个", "12"), ("1,200 square feet", "1200"), ("5 dollars.", "5"),
    ("\\$18", "18"), ("12 个", "12"), ("0.3333", "1/3"),
]  # fmt: skip
NOT_EQUAL = [
    ("9.05", "9"), ("10001", "10000"), ("0.1", "0"), ("7", "-7"), ("", "0"), ("twelve", "12"), ("1/0", "0"),
    ("12 or 13", "13"), ("3^2", "9"), ("1,20", "120"), ("1e999", "1"), ("0.33", "1/3"), ("nan", "nan"), ("inf", "inf"),
    ("2x", "2"), ("x+1", "1"), ("5i", "5"), (r"\\sin 30", "30"), ("sin 30", "30"), ("(0,100)", "100"),
    ("(1,100)", "1100"),
    ("2k", "2"), ("-2x", "-2"), (r"2\\pi", "2"), (r"3\\sqrt{2}", "3"), ("1.2.3", "1.2"), ("10 or so x", "10"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_equal(answer: str, gold: str) -> None:
    assert numbers_equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), NOT_EQUAL)
def test_not_equal(answer: str, gold: str) -> None:
    assert not numbers_equal(answer, gold)


@pytest.mark.parametrize(
    ("response", "answer", "how"),
    [
        (r"So \boxed{1} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}", "boxed"),
        (r"\boxed{3} but then \boxed{4", "3", "boxed"),
        ("#### 1\nno\n#### 1,234", "1,234", "hashes"),
        ("There are 20 - 7 = 13 left.", "13", "number"),
        ("20-7", "7", "number"),
        ("It is -7.", "-7", "number"),
        ("costs $1,234.50.", "1,234.50", "number"),
        ("共有１２个", "12", "number"),
        ("about 3/4 of it", "3/4", "number"),
        ("The result comes to 1e5", "1e5", "number"),
        ("no idea", "", "none"),
        ("", "", "none"),
        (r"\boxed{}", "", "none"),
    ],
)
def test_extraction(response: str, answer: str, how: str) -> None:
    assert extract(response) == (answer, how)


@given(st.integers(-(10**12), 10**12))
def test_whole_numbers_equal_themselves_alone(number: int) -> None:
    for text in (str(number), f"{number:,}", f"{number}.0"):
        assert numbers_equal(text, str(number))
        assert not numbers_equal(text, str(number + 1))
    assert numbers_equal(extract(f"So the answer is {number:,}.").answer, str(number))


@given(st.text(max_size=60))
def test_any_text_is_survived(text: str) -> None:
    numbers_equal(extract(text).answer, "1")
    numbers_equal(text, text)


@pytest.mark.parametrize(
    "hostile",
    [
        "9" * 1_000_000,
        r"\boxed{" * 100_000,
        "1," * 200_000,
        "1/" * 100_000,
        "- " * 200_000,
        "(" * 100_000,
        r"\frac{" * 50_000,
        "1.0 " * 100_000,
    ],
)
def test_hostile_texts_end_quickly(hostile: str) -> None:
    assert not numbers_equal(extract(hostile).answer, "12345")
