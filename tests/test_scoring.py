"""Extraction and comparison of numbers."""

import time
import unicodedata
from typing import Any

import pytest
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
    verdicts,
)
from tests.answers import load


@pytest.mark.parametrize("kind", ["number", "mathematics"])
def test_pairs_of_answers_are_equal_or_not(kind: str) -> None:
    """Also what is no number, or is malformed."""
    pairs = [pair for pair in load("pairs") if pair["kind"] == kind]
    if kind == "number":
        same = [numbers_equal(pair["answer"], pair["gold"]) for pair in pairs]
    else:
        same = [verdict == "equal" for verdict in verdicts((pair["answer"], pair["gold"]) for pair in pairs)]
    assert [pair for pair, equal in zip(pairs, same, strict=True) if equal != pair["equal"]] == []


@pytest.mark.parametrize(
    ("reader", "response", "answer", "how"),
    [
        (NumberReader(), r"So \boxed{1} or rather \boxed{\frac{1}{2}}.", "1/2", "boxed"),
        (NumberReader(), "#### 1\nno\n#### 1,234", "1,234", "hashes"),
        (NumberReader(), "The answer is 2 1/2 cups, as said.", "2 1/2", "phrase"),
        (NumberReader(), "There are 20 - 7 = 13 left.", "13", "end"),
        (NumberReader(), "no idea", "", "none"),
        # not one number alone: the whole phrase, which equals none
        (NumberReader(), "The answer is 5 hours and 30 minutes.", "5 hours and 30 minutes", "phrase"),
        (
            FormulaReader(),
            r"The final answer is $\frac{\sqrt{2}}{2}$. I hope it is correct.",
            r"\frac{\sqrt{2}}{2}",
            "phrase",
        ),
        (FormulaReader(), r"So the answer is \(x^2+1\), since $2+3=5$.", "x^2+1", "phrase"),
        (FormulaReader(), r"**Answer:** \[3.5\]", "3.5", "phrase"),
        (FormulaReader(), "The answers are $2$ and $3$.", "2 and 3", "phrase"),
        (FormulaReader(), "The answer is therefore $x = 5$ because $2x = 10$.", "x = 5", "phrase"),
        (FormulaReader(), "The answer is 7+2=9.", "7+2=9", "phrase"),
        (FormulaReader(words=True), "The answer is Mrs. Lamb because she has more.", "Mrs. Lamb", "phrase"),
    ],
)
def test_extraction(reader: Any, response: str, answer: str, how: str) -> None:
    """As it is written, and how it was found; the corpus holds many more."""
    assert extract(response, reader) == (answer, how)


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


SPACES = [r"\,", r"\;", r"\:", r"\!", r"\ ", "~", r"\quad ", r"\\", "&", " \n", "\u00a0"]
BRACKETS = [
    "(", ")", "[", "]", "{", "}", r"\{", r"\}", r"\(", r"\[", r"\left(", r"\right]", r"\langle ", r"\frac{", r"\sqrt{", r"\text{", "$",
]  # fmt: skip
SIGNS = [rf"\{names[0]}" for names in normalisation._SIGNS.values()]
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
