"""Names of attempts and variants, mixes of tries, votes, and estimators over samples, against literal ones."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from lmeval_prune import HeadMask, InputError, Plan, map_model
from lmeval_prune.models.attempts import Attempt, attempt_order, short_label
from lmeval_prune.models.variants import Variant
from lmeval_prune.scoring.passes import pass_mixed, vote
from lmeval_prune.sprint import policies
from lmeval_prune.sprint.choosing import accuracy_at, choose, extraction_note
from lmeval_prune.sprint.curves import policy_curve
from lmeval_prune.sprint.mixes import Mix
from lmeval_prune.sprint.outcomes import Outcomes
from lmeval_prune.tasks import results
from tests.adapters import adapter, write_adapter
from tests.tiny_models import tiny

# --------------------------------------------------------------------------- names

NAMES = ["dense", "L5H3", "L5H3+L15H0", "dense@0.6#0", "dense@1#12", "x@0.6", '{"token_filter":{"ratio":0.2}}@0.25#3']


@pytest.mark.parametrize("name", NAMES)
def test_names_survive(name: str) -> None:
    assert str(Attempt.named(name)) == name


def test_names_are_ordered_and_labelled() -> None:
    names = [
        "dense@0.6#10",
        "L10H2",
        '{"token_filter":{"ratio":0.2}}',
        "dense@0.6#9",
        "L5H10+L6H0",
        "dense",
        "L5H9@1#0",
    ]
    assert attempt_order([*names, "dense"]) == [
        *("dense", "L10H2", "L5H10+L6H0", '{"token_filter":{"ratio":0.2}}'),
        *("dense@0.6#9", "dense@0.6#10", "L5H9@1#0"),
    ]
    assert short_label("L1H0+L1H1+L2H0+L3H0@0.5#1") == "L1H0 and 3 heads @0.5 #1"
    assert short_label('{"token_filter":{"ratio":0.2,"tail":0.5}}') == "token_filter 0.2"
    assert short_label('{"plan":{"sha256":"ab"}}', {'{"plan":{"sha256":"ab"}}': "flap"}) == "flap"


@pytest.mark.parametrize("name", ["dense@0#1", "dense@1e-99999#0", "dense@0.12345678#0", "dense@1.2.3#0"])
def test_wrong_temperatures_are_one_line(name: str) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*the temperature [^\n]* must be a number above 0[^\n]*$"):
        Attempt.named(name)


# --------------------------------------------------------------------------- variants


def test_a_variant_is_named_by_what_it_does(tmp_path: Path) -> None:
    model_map = map_model(tiny("llama"))
    Plan(heads="L0H1", channels={"L1": "3-5"}).save(tmp_path / "plan.json", model_map)
    (tmp_path / "moved").mkdir()
    Plan(heads="L0H1", channels={"L1": [5, 4, 3]}).save(tmp_path / "moved/p.json", model_map)
    HeadMask("L0H1+L1H2").save(tmp_path / "mask.json", model_map)
    same = [
        ("dense", {}),
        ("L1H2+L0H1", {"heads": ["L0H1", [1, 2]]}, {"mask": str(tmp_path / "mask.json")}, '{"heads": "L0H1+L1H2"}'),
        ({"token_filter": 0.2}, {"token_filter": {"ratio": "0.2", "tail": 0.5}}),
        ({"token_filter": 0.2, "heads": "L0H1"}, {"heads": "L0H1", "token_filter": {"ratio": 0.2}}),
        ({"plan": str(tmp_path / "plan.json")}, {"plan": str(tmp_path / "moved/p.json")}),
        ({"lora": adapter()}, {"lora": adapter("again", base_model_name_or_path="elsewhere")}),
    ]
    names = []
    for values in same:
        variants = [Variant.of(value, model_map) for value in values]
        assert len({variant.name for variant in variants}) == 1
        names.append(variants[0].name)
        again = Variant.named(variants[0].name, model_map, variants[0].record)
        assert again == variants[0] and len(again.interventions) == len(variants[0].interventions)
    assert len(set(names)) == len(names) and names[:2] == ["dense", "L0H1+L1H2"]
    assert [bool(Variant.of(values[0], model_map).record) for values in same] == [False] * 4 + [True] * 2
    assert all(json.loads(name) for name in names[2:])


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    model_map = map_model(tiny("llama"))
    variant = Variant.of({"lora": str(write_adapter(tmp_path / "a"))}, model_map, label="mine")
    assert variant.record["label"] == "mine"
    write_adapter(tmp_path / "a", seed=3)
    with pytest.raises(InputError, match="a file that it is made from, or its method, has changed"):
        Variant.named(variant.name, model_map, variant.record)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("L9H0", "no attention in layer 9"),
        ({"head": "L0H1"}, "a variant has no setting 'head'; did you mean 'heads'"),
        ({"router": "best"}, "a variant has no setting 'router'"),
        ({"token_filter": {"ratio": 0.2, "state": "run"}}, "must not depend on their order"),
        ({"token_filter": 2}, "at least 0 and at most 1"),
        ('{"token_filter"', "not valid JSON"),
        ({"plan": {"sha256": "00"}}, "no setting 'sha256'"),
        (5, "heads=5 cannot be read"),
    ],
)
def test_wrong_variants_are_one_line(value: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        Variant.of(value, map_model(tiny("llama")))
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------- mixes

ORDER = ["a", "dense", "b", "c"]


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        ("next", "a dense b c"),
        ("dense|next", "dense a b c"),
        ("next@0.6", "a@0.6#0 dense@0.6#0 b@0.6#0 c@0.6#0 a@0.6#1 dense@0.6#1"),
        ("next+dense@0.5", "a dense@0.5#0 dense dense@0.5#1 b dense@0.5#2 c dense@0.5#3"),
        ("dense+dense@0.2|next@0.4+next@0.8", "dense dense@0.2#0 a@0.4#0 dense@0.8#0 b@0.4#0 c@0.8#0 a@0.4#1"),
        ("dense@1", "dense@1#0 dense@1#1 dense@1#2"),
    ],
)
def test_mixes(mix: str, expected: str) -> None:
    names = expected.split()
    assert [str(attempt) for attempt in Mix.parse(mix).attempts(ORDER, len(names))] == names
    assert str(Mix.parse(mix)) == mix


@pytest.mark.parametrize(
    "mix", ["", "|next", "next|", "next|next|next", "best", "next@0", "next@x", "dense", "next+dense", "next++next"]
)
def test_wrong_mixes_are_one_line(mix: str) -> None:
    with pytest.raises(InputError, match=r"^mix=[^\n]+$"):
        Mix.parse(mix)


def test_too_few_variants_for_greedy_tries() -> None:
    with pytest.raises(InputError, match="has only 4 variants for greedy tries"):
        Mix.parse("dense|next").attempts(ORDER, 5)


# --------------------------------------------------------------------------- estimators


def world(seed: int, questions: int = 5) -> Outcomes:
    """Greedy answers of three variants, and five samples of each at 0.6 and of dense at 0.9."""
    generator = np.random.default_rng(seed)
    kinds = [("dense", 0.6), ("a", 0.6), ("b", 0.6), ("dense", 0.9)]
    pool = ["dense", "a", "b", *(str(Attempt(v, t, d)) for v, t in kinds for d in range(5))]
    shape = (questions, len(pool))
    rows = [{"question": f"q{i}", "task": "toy", "split": "t", "doc_id": i, "attributes": {}} for i in range(questions)]
    extracted = np.array(["", "1", "1.0", "2", "3"], object)[generator.integers(0, 5, shape)]
    gold = generator.integers(1, 4, questions).astype(str)
    z = np.array([[bool(a) and float(a) == float(g) for a in row] for row, g in zip(extracted, gold, strict=True)])
    tokens, logprobs = generator.integers(1, 9, shape).astype(float), -generator.random(shape).round(1)
    scoring = {"toy": {"scoring": "lmeval_prune.tasks.results:number"}}
    return Outcomes(
        z.astype(np.float32), pool, rows, tasks=scoring, tokens=tokens, extracted=extracted, logprobs=logprobs
    )


def literal_pass(outcomes: Outcomes, row: int, kinds: list[tuple[str, float]]) -> tuple[float, float]:
    """Average `any is right` and the sum of tokens over every way to draw the samples of each kind without replacement."""
    draws: dict[tuple[str, float], list[int]] = {}
    for j, attempt in enumerate(map(Attempt.named, outcomes.pool)):
        draws.setdefault((attempt.variant, attempt.temperature), []).append(j)
    counts = {kind: kinds.count(kind) for kind in kinds}
    ways = itertools.product(*(itertools.combinations(draws[kind], count) for kind, count in counts.items()))
    right, tokens, total = 0, 0.0, 0
    for way in ways:
        chosen = [j for part in way for j in part]
        right += any(outcomes.z[row, j] == 1 for j in chosen)
        tokens += sum(outcomes.tokens[row, j] for j in chosen)
        total += 1
    return right / total, tokens / total


@pytest.mark.parametrize(
    "mix", ["next", "dense|next", "next@0.6", "next+dense@0.6", "dense|next@0.6+dense@0.9", "dense@0.6"]
)
def test_pass_of_mixes_is_the_mean_over_all_draws(mix: str) -> None:
    outcomes, parsed = world(1), Mix.parse(mix)
    policy = policies.best(outcomes.greedy())
    n = 3 if mix in ("next", "dense|next") else 5
    curve = policy_curve("x", policy, outcomes, n, parsed)
    for i in range(len(outcomes.texts)):
        kinds = [(attempt.variant, attempt.temperature) for attempt in parsed.attempts(policy.pool, n)]
        for k in range(n):
            expected, tokens = literal_pass(outcomes, i, kinds[: k + 1])
            assert curve.values[i, k] == pytest.approx(expected, abs=1e-12)
            assert curve.tokens is not None and curve.tokens[i, k] == pytest.approx(tokens, abs=1e-9)
    assert curve.kind == ("ordered" if mix in ("next", "dense|next") else "unbiased")


def test_pass_mixed_of_random_groups() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        sizes = generator.integers(1, 5, 3)
        groups = [(int(n), int(generator.integers(0, n + 1)), int(generator.integers(0, n + 1))) for n in sizes]
        draws = [list(itertools.combinations([i < c for i in range(n)], m)) for n, c, m in groups]
        ways = [any(any(part) for part in way) for way in itertools.product(*draws)]
        assert pass_mixed(groups) == pytest.approx(np.mean(ways), abs=1e-12)


def test_missing_samples_are_one_line() -> None:
    outcomes = world(2)
    policy = policies.best(outcomes.greedy())
    with pytest.raises(InputError, match=r"only 5 of 6 samples of dense@0.6#0; sweep more"):
        policy_curve("x", policy, outcomes, 6, Mix.parse("dense@0.6"))
    with pytest.raises(InputError, match=r"has no dense@0.7#0; sweep it too"):
        policy_curve("x", policy, outcomes, 1, Mix.parse("dense@0.7"))


def literal_cover(z: np.ndarray, size: int) -> list[int]:
    """Greedy coverage, question by question."""
    chosen: list[int] = []
    for _ in range(size):

        def gain(j: int) -> int:
            return sum(z[i, j] == 1 and not any(z[i, k] == 1 for k in chosen) for i in range(len(z)))

        best = None
        for j in range(z.shape[1]):
            key = (gain(j), int((z[:, j] == 1).sum()))
            if j not in chosen and (best is None or key > best[0]):
                best = key, j
        assert best is not None
        chosen.append(best[1])
    return chosen


def test_greedy_coverage_is_greedy_and_near_the_best_set() -> None:
    generator = np.random.default_rng(3)
    for _ in range(40):
        z = (generator.random((12, 7)) < 0.2).astype(float)
        z[generator.random(z.shape) < 0.1] = math.nan
        for size in (1, 2, 3, 7):
            chosen = policies.greedy_cover(z, size)
            assert chosen == literal_cover(z, size)
            best = max((z[:, list(s)] == 1).any(1).sum() for s in itertools.combinations(range(7), size))
            covered = (z[:, chosen] == 1).any(1).sum()
            assert (1 - (1 - 1 / size) ** size) * best <= covered <= best  # the bound of greedy coverage


# --------------------------------------------------------------------------- choosing without gold


def literal_choice(
    rule: str, tries: list[str], answers: list[str], weights: list[float], logprobs: list[float]
) -> tuple:
    """Count a vote, answer by answer; answers are numbers."""
    answered = [i for i, answer in enumerate(answers) if answer]
    if not answered:
        return None, False
    if rule == "likelihood":
        top = max(logprobs[i] for i in answered)
        leaders = [i for i in answered if logprobs[i] == top]
        return leaders[0], len({float(answers[i]) for i in leaders}) > 1
    totals: dict[float, float] = {}
    first: dict[float, int] = {}
    for i in answered:
        voters = [k for k in answered if tries[k] == tries[i]]
        share = {"majority": 1.0, "weighted": weights[i], "variants": 1.0 / len(voters)}[rule]
        totals[float(answers[i])] = totals.get(float(answers[i]), 0.0) + share
        first.setdefault(float(answers[i]), i)
    top = max(totals.values())
    leaders = [first[value] for value, total in totals.items() if abs(total - top) < 1e-9]
    return min(leaders), len(leaders) > 1


@pytest.mark.parametrize("rule", ["majority", "weighted", "variants", "likelihood"])
def test_votes_are_the_literal_ones(rule: str) -> None:
    generator = np.random.default_rng(4)
    ties = 0
    for _ in range(300):
        n = int(generator.integers(1, 7))
        answers = np.array(["", "1", "1.0", "2", "3"])[generator.integers(0, 5, n)].tolist()
        attempts = [
            Attempt(name, 0.5, d) for d, name in enumerate(np.array(["a", "b", "c"])[generator.integers(0, 3, n)])
        ]
        weights, logprobs = generator.integers(1, 4, n) / 4, -generator.integers(1, 5, n) / 4
        chosen = choose(rule, attempts, answers, lambda a, b: float(a) == float(b), weights.tolist(), logprobs.tolist())
        expected = literal_choice(rule, [a.variant for a in attempts], answers, weights.tolist(), logprobs.tolist())
        assert (chosen.winner, chosen.is_tied) == expected
        ties += chosen.is_tied
    assert 10 < ties < 290


def test_one_voter_is_chosen_and_nobody_is_not() -> None:
    assert vote(["", ""], [1, 1], str.__eq__) == (None, 0, False)
    assert vote(["", "x"], [1, 1], str.__eq__) == (1, 1, False)


@pytest.mark.parametrize(
    ("scoring", "is_said"), [("mathematics", True), ("text_or_number", True), ("number", False), ("equation", False)]
)
def test_a_report_says_that_answers_are_read_by_the_gold_answer(scoring: str, is_said: bool) -> None:
    function = getattr(results, scoring)
    note = extraction_note({"t": {"scoring": f"{function.__module__}:{function.__qualname__}"}})
    assert note.startswith("The scoring of this task extracts answers by the form of the gold answer") == is_said
    assert bool(note) == is_said


@pytest.mark.parametrize("has_holes", [False, True])
def test_accuracy_at_n_averages_disjoint_samples(has_holes: bool) -> None:
    """Of five samples, two at a time make two replicates; a literal count. Samples whose outcome is unknown are skipped."""
    outcomes = world(5, questions=30)
    first = outcomes.pool.index("dense@0.6#0")
    if has_holes:
        for i in range(0, 30, 2):
            outcomes.z[i, first + i // 2 % 5] = np.nan
    policy = policies.best(outcomes.greedy())
    result = accuracy_at(policy, outcomes, [1, 2], Mix.parse("dense@0.6"))
    assert set(result) == {"majority", "weighted", "variants", "likelihood"}
    assert result["majority"].replicates == [4 if has_holes else 5, 2]
    known = [[j for j in range(first, first + 5) if not np.isnan(outcomes.z[i, j])] for i in range(30)]
    for i in range(30):
        pairs = [known[i][:2], known[i][2:4]]
        for rule, choices in result.items():
            right, tied = [], []
            for pair in pairs:
                answers = [str(outcomes.extracted[i, j]) for j in pair]
                logprobs = [float(outcomes.logprobs[i, j]) for j in pair]
                winner, tie = literal_choice(rule, ["dense"] * 2, answers, [1.0, 1.0], logprobs)
                right.append(winner is not None and outcomes.z[i, pair[winner]] == 1)
                tied.append(tie)
            assert choices.values[i, 1] == pytest.approx(np.mean(right)) and choices.ties[i, 1] == np.mean(tied)
    alone = [outcomes.z[i, known[i][: result["majority"].replicates[0]]].mean() for i in range(30)]
    assert np.allclose(result["majority"].values[:, 0], alone)
