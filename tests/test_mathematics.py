"""Mathematical equivalence, expressions, complexity, and metrics of several attempts."""

import itertools
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmeval_prune.scoring import (
    complexity,
    equality,
    evaluate,
    has_operator,
    is_division,
    numbers_equal,
    readings,
    same_mathematics,
    verdicts,
)
from lmeval_prune.scoring.prose import equals_number
from lmeval_prune.scoring.verifier import Verifier
from lmeval_prune.tasks import data, scorers
from lmeval_prune.tasks.tries import attempts, majority, pass_ordered, pass_unbiased

THINNED = pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.long)])  # of the rows


@pytest.mark.parametrize(
    ("name", "splits"),
    [("gsm8k", "train+test"), ("math500", "train+test"), ("asdiv", "test"), ("math23k", "train+test")],
)
def test_each_gold_answer_alone_scores_bare_and_boxed(name: str, splits: str, shared_data: Path) -> None:
    score = {"math500": scorers.mathematics, "asdiv": scorers.text_or_number}.get(name, scorers.number)
    golds = {
        " ".join(row["target"].split()) for split in splits.split("+") for row in data.load(name, split, shared_data)
    }
    texts = {text: gold for gold in golds for text in (gold, rf"\boxed{{{gold}}}")}
    assert [text for text, gold in texts.items() if score({"target": gold}, [text])["exact_match"] != 1] == []


@THINNED
@pytest.mark.parametrize("prefix", ["", "Answer: ", "**Answer:** ", "Answer:\n", "#### Solution\n"])
def test_whole_solutions_are_not_taken_for_their_first_sentence(prefix: str, step: int, shared_data: Path) -> None:
    rows = data.load("gsm8k", "test", shared_data).to_list()[::step]
    texts = [prefix + row["answer"].partition("####")[0] for row in rows]
    right = sum(scorers.number(row, [text])["exact_match"] for row, text in zip(rows, texts, strict=True))
    print(f"{prefix!r}: {right / len(rows):.4f}")
    assert right >= len(rows) * 1298 / 1319  # the others do not end with their answer


def test_the_unmarked_gold_formulas_of_math500_are_never_torn_apart(shared_data: Path) -> None:
    """Each gold answer that is no number, as the last formula: right, and not one of its numbers."""
    rows = [row for row in data.load("math500", "test", shared_data) if not readings(row["target"])]
    texts = [f"Therefore the value is ${row['target']}$." for row in rows]
    scores = [scorers.mathematics(row, [text]) for row, text in zip(rows, texts, strict=True)]
    missed = [row["target"] for row, score in zip(rows, scores, strict=True) if score["exact_match"] != 1]
    assert len(rows) == 99 and not missed and all(score["how"] == "end" for score in scores)


# --------------------------------------------------------------------------- many comparisons


def test_timeouts_are_counted_in_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "_KNOWN", {})
    monkeypatch.setattr(Verifier, "verify_many", lambda _, pairs: ["timeout" for _ in pairs])
    scores = scorers.mathematics({"target": "x+1"}, [r"\boxed{1+x}"])
    assert (scores["exact_match"], scores["timeouts"]) == (0.0, 1.0)


def test_the_comparisons_of_a_task_are_made_at_once_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "_KNOWN", {})
    batches: list[list[tuple[str, str]]] = []
    verify_many = Verifier.verify_many
    monkeypatch.setattr(Verifier, "verify_many", lambda self, pairs: batches.append(pairs) or verify_many(self, pairs))
    docs = [{"target": f"x+y+{i}", "level": 1} for i in range(5)]
    texts = [[rf"\boxed{{{i % 3}+x+y}}", rf"The answer is $x+{i}+2y$.", rf"\boxed{{2y+x+{i}}}"] for i in range(5)]
    assert scorers.Verdicts().apply(texts, docs) == texts
    assert len(batches) == 1 and len(batches[0]) == 5 * 6
    right = [scorers.mathematics(doc, [text[0]])["exact_match"] for doc, text in zip(docs, texts, strict=True)]
    assert right == [1, 1, 1, 0, 0] and same_mathematics(r"2y+x+0", "x+0+2y")
    assert len(batches) == 1


def test_a_long_list_is_compared_in_order() -> None:
    numbers = [str(number) for number in range(1, 60)]
    assert same_mathematics(", ".join(numbers), ", ".join(numbers))
    assert not same_mathematics(", ".join(numbers), ", ".join([*numbers[:-1], "60"]))


@THINNED
def test_five_hundred_comparisons_come_to_an_end(step: int, shared_data: Path) -> None:
    """Gold answers in another form that needs math-verify: `0+` before each; also those of the next problem."""
    golds = data.load("math500", "test", shared_data)["target"][::step]
    pairs = [(f"0+({gold})", gold) for gold in golds] + [(f"0+({a})", b) for a, b in itertools.pairwise(golds)]
    hard = sum(equality.easy_verdict(*pair) is None for pair in pairs)
    assert hard > 500 / step and not {"timeout", "crash"} & set(verdicts(pairs))


# --------------------------------------------------------------------------- expressions


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(3+4)*2", 14), ("x = 7-2", 5), ("7+2=9", 9), ("3×(5+25%)", Fraction(63, 4)), ("2^3", 8), ("[1+2]÷3", 1), ("-3+1", -2),
        ("n0 / ( 1 - n1 )", 640), ("1,000*2", 2000), (r"3 \times 4", 12), ("2**-1", Fraction(1, 2)), ("（3+4）＊2", 14),
        ("0.1+0.2", Fraction(3, 10)), (r"\frac{12+8}{4}", 5), (r"\dfrac{20}{4}", 5), (r"\frac{\frac{1+2}{3}}{4+1}", Fraction(1, 5)),
        ("5 x 3", 15), ("5x3", 15), ("2(3+4)", 14), ("(2)(3)", 6), ("(3+4)2", 14), (r"\$5 \times 3", 15), ("n0 x n1", 150),
        (r"5 \times 3 \text{ apples}", 15), ("5 * 3 apples", 15), (r"\left(12-2\right) \div 5", 2), ("9 = 4 + 5", 9), ("x = 20-7 = 13", 13),
        ("算式为：5*3（元）", 15), ("列式为5*3=15元", 15), ("The equation is 5*3", 15), (r"2\pi", Fraction(157, 25)), ("2*π", Fraction(157, 25)),
        ("3 1/2 + 1", Fraction(9, 2)), (r"3\frac{1}{2} \times 2", 7), ("2(6/3)", 4), (r"\(5+3\)", 8), ("5 + 3 = 8 apples", 8),
        (r"\frac{" * 60, None), (r"\frac{1}{" * 20 + "1" + "}" * 20, 1), ("5@3", None), ("2(" * 190, None),
        ("9**9**9", None), ("1/0", None), ("(" * 10**6, None), ("1+", None), ("a+b", None), ("f(3)", None), ("2**0.5", None),
        ("__import__('os')", None), ("1 if 2 else 3", None), ("True+1", None), ("'a'*3", None), ("1=2=3", None), ("", None),
        ("10**64*10**64*" * 20 + "1", None), ("9" * 401, None),
        (".5+14.5", 15), (".5*30", 15), ("07+8", 15), ("7+08", 15), ("5⋅3", 15), ("5∗3", 15), ("5•3", 15), ("30:2", 15), ("5 apples * 3", 15),
        ("5+10 (apples)", 15), ("5{\\times}3", 15), ("20 — 5", 15), ("\\[ 5 \\times 3 \\]", 15), ("**5 * 3**", 15), ("`5 * 3`", 15),
        ("Answer: 5*3", 15), ("100+007", 107), ("1.05*100", 105), ("5 plus -3", None), ("5 apples", 5),
    ],
)  # fmt: skip
def test_expressions(text: str, value) -> None:
    names = {"n0": Fraction(400), "n1": Fraction(3, 8)}
    assert evaluate(text, names) == value


@pytest.mark.parametrize(
    ("text", "computes"),
    [("12", False), ("x = -5", False), ("25%", False), ("3 1/2", False), ("1=2", False), ("f(3)", False), ("3*4", True), ("7+2=9", True), ("2(3)", True), (r"\frac{1}{2}", True)],
)  # fmt: skip
def test_what_computes_something(text: str, computes: bool) -> None:
    assert has_operator(text) == computes


def test_a_number_copied_from_the_answer_is_no_equation() -> None:
    doc = {"target": "12", "formula": "3*4=12"}
    answers = ("12", "x=12", "3*4", "2(6)=12")
    assert [scorers.equation(doc, [rf"\boxed{{{text}}}"])["exact_match"] for text in answers] == [0, 0, 1, 1]
    assert scorers.equation(doc, ["The answer is 3*4=12."])["strict_match"] == 1
    copied = {"target": "12", "equation": "x=n0", "names": {"n0": "12"}}
    assert scorers.equation(copied, [r"\boxed{12}"])["exact_match"] == 1


@given(st.recursive(st.integers(0, 999).map(str), lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"), max_leaves=12))  # fmt: skip
def test_expressions_agree_with_python(text: str) -> None:
    assert evaluate(text) == eval(text)


@pytest.mark.parametrize(
    ("expression", "level"),
    [
        ("7+2=9", "low"), ("7", "low"), ("n0 * n1 - n2", "low"), ("(3)*(4)", "low"), ("(7+2)=9", "low"), ("x=-3+4", "low"),
        ("a+b+c+d", "medium"), ("a*b+c*d+e", "medium"), ("(a+b)*c", "medium"), ("a/(b-c)+d", "medium"), ("2**3*(1+1)", "medium"),
        ("a+b+c+d+e+f", "high"), ("((a+b)*c+d)/e", "high"), ("a*(b-(c+d))", "high"), ("(a+b)*(c+d)*(e+f)", "high"),
        ("((a+b))*c", "medium"),
    ],
)  # fmt: skip
def test_complexity(expression: str, level: str) -> None:
    assert complexity(expression) == level


@pytest.mark.long
def test_gold_equations_have_the_gold_value(shared_data: Path) -> None:
    """Math23k: all but 0.2%, with pi as 3.14 or 3.1416; ASDiv-A: all but the divisions with a remainder."""
    wrong = []
    for row in data.load("math23k", "all", shared_data):
        values = []
        for pi in ("3.14", "3.1416"):
            names = {key: Fraction(value) for key, value in row["names"].items() if value}
            names["x3_1416"] = Fraction(pi)
            values.append(evaluate(row["equation"], names))
        if not any(value is not None and equals_number(value, row["target"]) for value in values):
            wrong.append((row["equation"], row["numbers"], row["answer"]))
    print(f"math23k: {len(wrong)} of 23160 equations do not give the gold answer, e.g. {wrong[:5]}")
    assert len(wrong) < 60
    rows = data.load("asdiv_a", "all", shared_data).to_list()
    wrong = [r["formula"] for r in rows if not scorers.equation(r, ["\\boxed{" + r["formula"] + "}"])["exact_match"]]
    print(f"asdiv_a: {len(wrong)} of 1218 formulas do not give the gold answer: {wrong}")
    assert all("r" in formula for formula in wrong) and len(wrong) == 28


def test_a_copied_fraction_is_no_expression(shared_data: Path) -> None:
    doc = {"equation": "x=n0/(n1+n2)", "names": {"n0": "3", "n1": "5", "n2": "7"}, "target": "1/4"}
    division = doc | {"equation": "x=n0/n1", "names": {"n0": "1", "n1": "4"}}
    forms = (r"\frac{1}{4}", 0, 1), ("3/(5+7)", 1, 1), (r"\frac{n0}{n1+n2}", 1, 0), ("0.25", 0, 0), ("-(-1/4)", 0, 1)
    for answer, right, alone in forms:
        response = [r"\boxed{" + answer + "}"]
        assert scorers.equation(doc, response)["exact_match"] == right, answer
        assert scorers.equation(division, response)["exact_match"] == alone, answer
    rows = [row for row in data.load("math23k", "test", shared_data) if not row["target"].replace(".", "").isdigit()]
    copied = [row for row in rows if scorers.equation(row, [r"\boxed{" + row["target"] + "}"])["exact_match"]]
    print(f"{len(copied)} of {len(rows)} gold answers that are no plain numbers count as expressions")
    assert all(is_division(row["equation"]) or not has_operator(row["equation"]) for row in copied)


# --------------------------------------------------------------------------- several attempts


def test_unbiased_estimator_is_the_mean_over_all_subsets() -> None:
    for n in range(1, 8):
        for right in itertools.product([False, True], repeat=n):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(right, k))
                assert pass_unbiased(n, sum(right), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
                assert pass_ordered(right, k) == any(right[:k])


def test_attempts_and_majority() -> None:
    assert [attempts(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]
    same = numbers_equal
    assert majority(["3", "4", "4.0", "", "3.0", "3"], same) == (0, 2)
    assert majority(["4", "3", "3.0"], same) == (1, 2)
    assert majority(["4", "3"], same) == (0, 2)
    assert majority(["", ""], same) == (None, 0)


def test_folds_are_disjoint_and_splits_reproducible(shared_data: Path) -> None:
    for name, ratios in (("math23k", (7, 1, 2)), ("asdiv_a", (8, 1, 1))):
        whole = data.load(name, "all", shared_data).to_list()
        part_of = data.DATA[name].parts
        key = "segmented_text" if name == "math23k" else "id"
        folds = [[row[key] for row in part_of[f"fold{k}"](whole)] for k in range(5)]
        assert sorted(itertools.chain(*folds)) == sorted(row[key] for row in whole)
        parts = {p: part_of[f"stratified_{p}"](whole) for p in ("train", "validation", "test")}
        assert sorted(r[key] for part in parts.values() for r in part) == sorted(row[key] for row in whole)
        for part, ratio in zip(parts.values(), ratios, strict=True):
            assert len(part) == pytest.approx(len(whole) * ratio / sum(ratios), abs=12)
        again = data.load(name, "stratified_test", shared_data)[key]
        assert list(again) == [row[key] for row in parts["test"]]
        by = "complexity" if name == "math23k" else "solution_type"
        for kind in {row[by] for row in whole}:
            shares = [sum(row[by] == kind for row in rows) / len(rows) for rows in (parts["test"], whole)]
            assert shares[0] == pytest.approx(shares[1], abs=0.02)
    tests = set(data.load("math23k", "test", shared_data)["segmented_text"])
    assert len(tests) == 1000
