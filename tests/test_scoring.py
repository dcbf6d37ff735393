"""Extraction and comparison of numbers."""

import re
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from lmeval_prune.scoring import (
    FormulaReader,
    MathematicsReader,
    NumberReader,
    TextReader,
    extract,
    normalisation,
    numbers_equal,
    readings,
)
from lmeval_prune.scoring.normalisation import words_by_key

EQUAL = [
    ("42", "42"), ("42.0", "42"), ("1,200", "1200"), ("$1,200.00", "1200"), ("18 dollars", "18"), ("x = 5", "5"),
    ("1/2", "0.5"), (r"\frac{3}{4}", "0.75"), (r"\dfrac34", "3/4"), ("2 1/2", "2.5"), ("80%", "0.8"), ("80%", "80"),
    (r"80\%", "80"), ("33.33", "33.333333"), ("-7", "-7"), ("−7", "-7"), ("１２", "12"), ("（3/8）", "0.375"),
    ("(3/8)", "3/8"), (r"12\text{ cm}", "12"), ("1{,}000", "1000"), ("3e2", "300"), ("5.", "5"), (".5", "1/2"),
    ("€ 4.50", "4.5"),
    ("2 1/2 cups", "2.5"), ("18 km^2", "18"), ("18 m", "18"), ("12cm", "12"), ("60 km/h", "60"),
    ("about 7 apples", "7"), ("共12个", "12"), ("1,200 square feet", "1200"), ("5 dollars.", "5"),
    ("\\$18", "18"), ("12 个", "12"), ("0.3333", "1/3"),
    ("007", "7"), ("+5", "5"), ("-0", "0"), ("1,234,567", "1234567"), ("1,234,567.89", "1234567.89"), ("£3.20", "3.2"),
    ("¥100", "100"), ("$ 12", "12"), ("12 %", "12"), ("12.5%", "0.125"), (r"\frac{-1}{4}", "-0.25"), (r"-\frac{1}{4}", "-1/4"),
    (r"2\frac{1}{2}", "5/2"), ("3(1/2)", "3.5"), ("1 3/4 hours", "1.75"), ("（-3）", "-3"), ("３．５", "3.5"), ("1.5e3", "1500"),
    ("2E-3", "0.002"), ("5 million", "5000000"), ("5 million dollars", "5000000"), ("1.5 million", "1500000"), ("2 thousand", "2000"),
    ("3万", "30000"), ("1.2亿元", "120000000"), ("2.50", "2.5"), ("66.67", "200/3"), ("0.6667", "2/3"), ("x=-3", "-3"),
    (r"\text{about } 7", "7"), ("7 m/s", "7"), ("12 sq ft", "12"), ("15°", "15"), ("答案12", "12"), ("30分钟", "30"), ("1000000", "1e6"),
    ("17.9999999", "18"), (r"5 \text{ million}", "5000000"), (r"3\text{万}", "30000"), ("2又1/2", "2.5"), (r"5 \times 10^{3}", "5000"),
    ("5 × 10^3", "5000"), ("80 percent", "0.8"), ("Total = 18", "18"), (r"18\,\text{cm}^2", "18"), ("18 (eggs)", "18"), ("18 m3", "18"),
]  # fmt: skip
NOT_EQUAL = [
    ("9.05", "9"), ("10001", "10000"), ("0.1", "0"), ("7", "-7"), ("12 or 13", "13"), ("3^2", "9"), ("0.33", "1/3"),
    ("2x", "2"), ("x+1", "1"), ("5i", "5"), (r"\sin 30", "30"), ("sin 30", "30"), ("(0,100)", "100"), ("(1,100)", "1100"),
    ("2k", "2"), ("-2x", "-2"), (r"2\pi", "2"), (r"3\sqrt{2}", "3"), ("10 or so x", "10"), ("14002.5", "14000"),
    ("0.9999", "1"), ("1.0001", "1"), ("99.99", "100"), ("17.99", "18"), ("-5", "5"), ("31/2", "3 1/2"), ("1/2", "2"), ("3/4", "4/3"),
    ("80%", "8"), ("0.8%", "0.81"), ("5 million", "50000"), ("5 million dollars", "5"), ("68.26", "68.25"), ("3124", "3124.45"), ("21993.6", "21992.6"), ("5 thousand", "5000000"), ("5千米", "5000"), ("1 2", "12"), ("12 34", "1234"),
    ("5:45", "5"), ("3; 4", "3"), ("3, 4", "34"), ("5 hours and 30 minutes", "5"), ("20 - 2", "20"), ("6 x 3", "6"), ("2*3", "2"),
    ("5!", "5"), (r"\sqrt{2}", "2"), ("|7|x", "7"), ("0.3334", "0.33"), ("1/3", "0.33"), ("2.5", "2"), ("1,000", "1"), ("log 2", "2"),
    ("12 pi", "12"), ("5 mod 7", "5"), ("5 minus", "5"), ("2^10", "10"), ("18 (7)", "18"), ("2 squared", "2"), ("A and B = 5; 6", "5"),
]  # fmt: skip
MALFORMED = [
    ("", "0"), ("twelve", "12"), ("1/0", "0"), ("1,20", "120"), ("1e999", "1"), ("nan", "nan"), ("inf", "inf"), ("1.2.3", "1.2"),
    ("-", "-"), ("$", "0"), ("%", "0"), ("--5", "5"), ("1/", "1"), ("/2", "2"), ("1//2", "0.5"), ("(5", "5("), ("5 5 5", "5"),
    (r"\frac{1}{", "1"), (r"\frac{}{}", "0"), (r"\boxed{}", "0"), ("1,2,3", "123"), ("0/0", "0"), ("1e", "1"), ("e5", "5"),
    ("\x00", "0"), ("½½", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_equal(answer: str, gold: str) -> None:
    assert numbers_equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), NOT_EQUAL + MALFORMED)
def test_not_equal(answer: str, gold: str) -> None:
    assert not numbers_equal(answer, gold)


@pytest.mark.parametrize(
    ("response", "answer", "how"),
    [
        (r"So \boxed{1} or rather \boxed{\frac{1}{2}}.", "1/2", "boxed"),
        ("#### 1\nno\n#### 1,234", "1,234", "hashes"),
        ("The answer is 2 1/2 cups, as said.", "2 1/2", "phrase"),
        ("There are 20 - 7 = 13 left.", "13", "end"),
        ("no idea", "", "none"),
        # not one number alone: the whole phrase, which equals none
        ("The answer is 5 hours and 30 minutes.", "5 hours and 30 minutes", "phrase"),
    ],
)
def test_extraction_of_a_number(response: str, answer: str, how: str) -> None:
    """As it is written, and how it was found; the corpus holds many more."""
    assert extract(response, NumberReader()) == (answer, how)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"The answer is $\sqrt{2}$.", r"\sqrt{2}"),
        (r"The final answer is $\frac{\sqrt{2}}{2}$. I hope it is correct.", r"\frac{\sqrt{2}}{2}"),
        (r"So the answer is \(x^2+1\), since $2+3=5$.", "x^2+1"),
        (r"**Answer:** \[3.5\]", "3.5"),
        ("The answers are $2$ and $3$.", "2 and 3"),
        ("The answer is therefore $x = 5$ because $2x = 10$.", "x = 5"),
        ("The answer is Mrs. Lamb because she has more.", "Mrs. Lamb"),
        ("The answer is 7+2=9.", "7+2=9"),
        ("The answer is Marta. I hope the answer is correct.", "Marta"),
    ],
)
def test_extraction_of_a_formula_or_words(response: str, answer: str) -> None:
    assert extract(response, FormulaReader(words=answer[0] == "M")) == (answer, "phrase")


THOUGHTS = {
    "<think>": "</think>", "<seed:think>": "</seed:think>", "[THINK]": "[/THINK]", "◁think▷": "◁/think▷",
    "<|channel>thought\n": "<channel|>", "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel|>analysis<|message|>": "<|end|><|start|>assistant<|channel|>final<|message|>", "analysis": "assistantfinal",
}  # fmt: skip


@pytest.mark.parametrize("begin", THOUGHTS)
@pytest.mark.parametrize("reader", [NumberReader(), MathematicsReader("15")])
def test_an_unfinished_thought_gives_no_answer_and_after_a_finished_one_the_answer_counts(
    begin: str, reader: Any
) -> None:
    thought = f"{begin}So the answer is 12. Wait, I should check " + "3 + 4, " * 9_000
    assert extract(thought, reader).answer == ""
    assert extract(f"{thought}{THOUGHTS[begin]}The answer is 15.", reader).answer == "15"


@given(st.integers(-(10**12), 10**12))
def test_whole_numbers_equal_themselves_alone(number: int) -> None:
    for text in (str(number), f"{number:,}", f"{number}.0"):
        assert numbers_equal(text, str(number))
        assert not numbers_equal(text, str(number + 1))
    assert numbers_equal(extract(f"So the answer is {number:,}.", NumberReader()).answer, str(number))
    assert numbers_equal(
        extract(f"The answer is {number}, because it is {number + 1} - 1.", NumberReader()).answer, str(number)
    )


@given(st.text(max_size=60))
def test_any_text_is_survived(text: str) -> None:
    for response in (text, f"The answer is {text}"):
        numbers_equal(extract(response, NumberReader()).answer, "1")
        extract(response, FormulaReader())
    numbers_equal(text, text)


@pytest.mark.parametrize(
    "hostile",
    [
        "9" * 1_000_000,
        r"\boxed{" * 100_000,
        "1/" * 100_000,
        "(" * 100_000,
        r"\frac{" * 50_000,
        "1(" * 200_000,
        "答案是" + " " * 1600 + "a" * 300,
        "answer is " * 100_000,
        ("Answer: " + "$$" * 150 + "\n") * 2000,
        r"\boxed{5" + " a-" * 200 + "}",
    ],
)
def test_hostile_texts_hold_no_answer(hostile: str) -> None:
    for reader in (NumberReader(), NumberReader(algebra=True), FormulaReader(), FormulaReader(words=True)):
        assert not numbers_equal(extract(hostile, reader).answer, "12345")


SPACES = [r"\,", r"\;", r"\:", r"\!", r"\ ", "~", r"\quad ", r"\\", "&", " \n", "\u00a0"]
BRACKETS = [
    "(", ")", "[", "]", "{", "}", r"\{", r"\}", r"\(", r"\[", r"\left(", r"\right]", r"\langle ", r"\frac{", r"\sqrt{", r"\text{", "$",
]  # fmt: skip
SIGNS = [rf"\{names[0]}" for names in words_by_key("signs", "latex").values()]
REPEATED = [*SPACES, *BRACKETS, *SIGNS, *"+-*/^_=!.,:;%'\"#1x", "1,", "x,", r"\pix"]
AROUND = [
    r"\boxed{%s5}", r"\boxed{\frac{%s5x}{2}}", "So $%s5$.", "So x = 5%sab.", r"\[5%sx\]", "The answer is %s5 x.", "5%s7 a b c",
]  # fmt: skip


def test_two_thousand_of_each_space_sign_and_bracket_are_read_in_a_second() -> None:
    slow = []
    for text in (form.replace("%s", piece * 2_000) for form in AROUND for piece in REPEATED):
        for reader in (NumberReader(algebra=True), FormulaReader(), TextReader("3; 4")):
            start = time.process_time()
            extract(text, reader)
            slow += [text[:40]] if time.process_time() - start > 1 else []
    assert slow == []


TEXTS = st.lists(
    st.sampled_from(
        ["The answer is ", "12", "1,250", "3/4", " apples", ". ", "\n", "\n\n", "#### ", r"\boxed{12}", "So ", "= ", "x", "wait, ", "not ",
         "$", " and ", "é", "答案是", "。", "(", ")", "half of ", "because ", "- ", "Answer: ", "  "]
    ),
    max_size=12,
).map("".join)  # fmt: skip


@given(TEXTS)
@example("12The answer is The answer is ")
def test_the_reading_does_not_depend_on_white_space_line_ends_or_unicode_form(text: str) -> None:
    for reader in (NumberReader(), FormulaReader()):
        expected = extract(text, reader)
        assert extract(f" \n{text}\n\t ", reader) == expected
        assert extract(text.replace("\n", "\r\n"), reader) == expected
        assert extract(unicodedata.normalize("NFD", text), reader) == expected


@given(TEXTS)
def test_what_was_read_as_a_number_is_read_as_the_same_again(text: str) -> None:
    answer = extract(text, NumberReader()).answer
    if readings(answer):
        assert numbers_equal(extract(f"The answer is {answer}.", NumberReader()).answer, answer)


WORD_LISTS = sorted((Path(normalisation.__file__).parent / "words").glob("*.yaml"))


def test_every_list_of_words_is_read_by_the_code() -> None:
    sources = [path.read_text("utf-8") for path in WORD_LISTS[0].parents[1].glob("*.py")]
    source = "".join([*sources, *(path.read_text("utf-8") for path in WORD_LISTS)])
    for path in WORD_LISTS:
        lists = yaml.load(path.read_text("utf-8"), yaml.BaseLoader)
        assert [name for name in lists if not re.search(rf"[(\"']{name}[\"']|{{{{{name}}}}}", source)] == [], path.name
