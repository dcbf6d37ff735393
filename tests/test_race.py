"""The race: what training chooses, what is left out, what is tested, and when it counts as pre-registered."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sprint_race_choice as race
from datasets import Dataset
from scipy import stats
from sprint_race import rehearsal
from sprint_race_costs import estimate, noted, seconds_a_question
from sprint_race_plan import RacePlan, Registration
from sprint_race_stages import Race

from lmeval_prune import InputError
from lmeval_prune.sprint import policies
from lmeval_prune.sprint.curves import policy_curve
from lmeval_prune.sprint.mixes import Mix
from lmeval_prune.sprint.outcomes import Outcomes
from lmeval_prune.sprint.policies import Policy
from lmeval_prune.tasks import data
from tests.conftest import ROOT
from tests.git_folders import make_git_folder

PLAN = ROOT / "docs/results/sprint_race/plan.md"
POOL = ["dense", "a", "b", *(f"dense@{t}#{d}" for t in (0.5, 1) for d in range(4)), "a@0.5#0", "b@0.5#0", "dense@0.5#4"]


def no_fit(method: str, training: Outcomes) -> Policy:
    raise AssertionError(method)


def outcomes(seed: int, questions: int = 12, chance: float = 0.4) -> Outcomes:
    generator = np.random.default_rng(seed)
    z = (generator.random((questions, len(POOL))) < chance).astype(np.float32)
    rows = [
        {"question": f"{seed} {i}", "task": "t", "split": "s", "doc_id": i, "attributes": {}} for i in range(questions)
    ]
    return Outcomes(z, POOL, rows, tokens=np.ones(z.shape))


# --------------------------------------------------------------------------- what training chooses


def test_candidates_are_orders_with_mixes() -> None:
    candidates = race.candidates(["best", "cover"], ["next", "next+dense@T"], [0.5, 1.0])
    assert [str(candidate) for candidate in candidates] == [
        f"{order}, {mix}" for order in ("best", "cover") for mix in ("next", "next+dense@0.5", "next+dense@1")
    ]
    with pytest.raises(InputError, match=r"^mixes: dense@0.5 is sampling itself[^\n]*$"):
        race.candidates(["best"], ["dense@T"], [0.5])
    with pytest.raises(InputError, match=r"^orders: 'worst' is not known; use best, cover or router:METHOD$"):
        race.make_policy("worst", outcomes(0), no_fit)


def test_samples_under_variants_take_the_temperature_of_the_rival() -> None:
    training = outcomes(2)
    training.z[:, [j for j, name in enumerate(POOL) if name.startswith("dense@1#")]] = 1
    training.z[:, [j for j, name in enumerate(POOL) if name.startswith("dense@0.5#")]] = 0
    rival = race.choose_rival(race.rivals(["dense@T", "dense|dense@T"], [0.5, 1.0]), training, 2)
    assert str(rival) == "dense@1"
    candidates = race.candidates(
        ["best"], ["next@0.6", "next@sampling", "dense|next@sampling"], [], race.temperature_of(rival)
    )
    assert [str(candidate.mix) for candidate in candidates] == ["next@0.6", "next@1", "dense|next@1"]
    same = race.candidates(["best"], ["next@0.6", "next@sampling"], [], 0.6)
    assert [str(candidate.mix) for candidate in same] == ["next@0.6"]
    with pytest.raises(InputError, match="the temperature sampling must be a number"):
        race.candidates(["best"], ["next@sampling"], [])


def test_sprint_as_published_orders_single_heads_and_the_unpruned_model() -> None:
    names = ["dense", "L0H1", "L0H0+L1H2", '{"token_filter": 0.1}', "L2H0", "L2H0@0.5#0", "dense@0.5#0"]
    part, seen = Outcomes(np.ones((2, 7)), names, [{"question": "a"}, {"question": "b"}]), []

    def fit(method: str, training: Outcomes) -> Policy:
        seen.append((method, training.pool))
        return policies.best(training)

    race.make_policy(race.PUBLISHED, part, fit)
    assert seen == [("published", ["dense", "L0H1", "L2H0"])]


def test_a_pool_in_random_order_is_its_mean_over_all_orders() -> None:
    training = outcomes(3)
    z = training.z[:, :3] == 1  # dense, a, b
    alone = np.mean([z[:, list(order)[:2]].any(1) for order in itertools.permutations(range(3))])
    after = np.mean([z[:, [0, j]].any(1) for j in (1, 2)])
    assert race.random_passes(training, 2) == pytest.approx({"next": alone, "dense|next": after})


def test_cross_fitting_never_sees_the_question() -> None:
    """Each value is the literal one of a policy fitted without the question's part."""
    training, seen = outcomes(1), []

    def fit(method: str, part: Outcomes) -> Policy:
        seen.append(set(part.texts))
        assert method == "mine" and part.pool == ["dense", "a", "b"]
        return policies.best(part)

    candidates = race.candidates(["router:mine", "cover"], ["next", "dense|next"], [])
    known = race.cross_fitted_orders(["router:mine", "cover"], training, 3, 7, fit)
    values = race.cross_fitted(candidates, known, training, 2)
    number = np.random.default_rng(7).permutation(12) % 3
    assert seen == [{training.texts[i] for i in range(12) if number[i] != part} for part in range(3)]
    for i in range(12):
        rest = [k for k in range(12) if number[k] != number[i]]
        z = training.z[rest][:, :3]
        best = sorted(range(3), key=lambda j: (-z[:, j].sum(), j))
        cover = policies.greedy_cover(z, 3)
        orders = [best, best, cover, cover]
        for column, (candidate, order) in enumerate(zip(candidates, orders, strict=True)):
            tries = order[:2] if str(candidate.mix) == "next" else [0, next(j for j in order if j)]
            assert values[i, column] == float(any(training.z[i, j] == 1 for j in tries))
    with pytest.raises(InputError, match="12 training questions cannot be divided into 13 parts"):
        race.cross_fitted_orders(["cover"], training, 13, 0, fit)


def test_training_chooses_the_best_and_of_equals_the_first() -> None:
    training = outcomes(2)
    training.z[:, POOL.index("a")] = 1  # any order that tries it first or second wins
    training.z[:, [0, POOL.index("b")]] = 0
    training.z[:, [j for j, name in enumerate(POOL) if name.startswith("dense@1#")]] = 1
    candidates = race.candidates(["best", "cover"], ["dense|next", "next"], [])
    known = race.cross_fitted_orders(["best", "cover"], training, 3, 0, no_fit)
    sampling = race.rivals(["dense@T"], [0.5, 1.0])
    choice = race.choose(candidates, known, sampling, training, 2)
    assert str(choice.candidate) == "best, dense|next" and str(choice.rival) == "dense@1"
    assert choice.passes == {str(candidate): 1.0 for candidate in candidates}
    assert choice.sampled["dense@1"] == 1.0 > choice.sampled["dense@0.5"] and choice.to_json()["temperature"] == 1.0
    assert (choice.differences == 0).all() and choice.to_json()["mix"] == "dense|next"


def test_the_rival_may_try_the_greedy_answer_first() -> None:
    """Where the unpruned model's greedy answer is what a policy gains by, its rival has it, too."""
    training = outcomes(2)
    training.z[:] = 0
    training.z[:6, 0] = 1  # only the greedy answer solves anything
    candidates = race.candidates(["best"], ["dense|next"], [])
    known = race.cross_fitted_orders(["best"], training, 3, 0, no_fit)
    sampling = race.rivals(["dense@T", "dense|dense@T"], [0.5, 1.0])
    assert list(map(str, sampling)) == ["dense@0.5", "dense@1", "dense|dense@0.5", "dense|dense@1"]
    choice = race.choose(candidates, known, sampling, training, 2)
    assert str(choice.rival) == "dense|dense@0.5" and (choice.differences == 0).all()
    assert choice.sampled == {"dense@0.5": 0, "dense@1": 0, "dense|dense@0.5": 0.5, "dense|dense@1": 0.5}
    for mix in ("next", "dense|next+dense@0.5", "next@0.5"):
        with pytest.raises(InputError, match=r"^sampling: [^\n]* is no sampling of the unpruned model[^\n]*$"):
            race.rivals([mix], [0.5])


def test_the_smallest_difference_has_the_power_that_it_says() -> None:
    generator = np.random.default_rng(0)
    count, runs = 200, 4000
    differences = generator.choice([-1.0, 0.0, 0.5, 1.0], size=(runs, count), p=[0.2, 0.5, 0.2, 0.1])
    deviation = float(differences.std())
    shift = race.smallest_difference(deviation, count)
    assert shift == pytest.approx((1.959964 + 0.841621) * deviation / count**0.5, rel=1e-5)
    shifted = differences - differences.mean() + shift
    z = shifted.mean(1) / (shifted.std(1, ddof=1) / count**0.5)
    assert np.mean(np.abs(z) > stats.norm.isf(0.025)) == pytest.approx(0.8, abs=0.025)


def test_the_summary_names_what_the_race_can_show() -> None:
    parts = [np.array([0.0, 1.0, -1.0]), np.array([0.5, 0.0])]
    summary = race.summarise([{"fold": 0}, {"fold": 1}], parts, 100)
    together = [0.0, 1.0, -1.0, 0.5, 0.0]
    assert summary["training_difference"] == pytest.approx(np.mean(together))
    assert summary["smallest_difference"] == pytest.approx(race.smallest_difference(np.std(together, ddof=1), 100))


# --------------------------------------------------------------------------- what is left out


def literal_twins(texts: Sequence[str], groups: Sequence[int], least: float) -> set[int]:
    """Pair by pair."""

    def words(text: str) -> list[str]:
        return ["#" if word[0].isdigit() else word for word in text.split()]

    def triples(text: str) -> set[tuple[str, ...]]:
        w = words(text)
        return {tuple(w[i : i + 3]) for i in range(len(w) - 2)} or {tuple(w)}

    out = set()
    for i, j in itertools.combinations(range(len(texts)), 2):
        a, b = triples(texts[i]), triples(texts[j])
        if len(a & b) / len(a | b) >= least:
            out |= {j} | ({i} if groups[i] != groups[j] else set())
    return out


def test_twins_are_found_in_every_fold() -> None:
    generator = random.Random(0)
    words = ["bees", "made", "honey", "jars", "how", "many", "of", "12", "7", "3.5"]
    texts = [" ".join(generator.choices(words, k=generator.randint(3, 7))) for _ in range(60)]
    texts += [text.replace("12", "4") for text in texts[:10]] + texts[20:23]
    groups = [generator.randint(0, 4) for _ in texts]
    for least in (0.5, 0.8, 1.0):
        duplicates = race.near_duplicates(texts, groups, least)
        assert set(duplicates) == literal_twins(texts, groups, least)
        assert len(duplicates) >= 3 and all(i != j for i, j in duplicates.items())


@pytest.mark.parametrize("number", ["7", "1,200", "3.5", "four", "seventy-four", "Twelve", "two hundred"])
def test_numbers_are_alike_in_digits_and_words(number: str) -> None:
    texts = [f"A ship has {spelling} sails and someone tends them." for spelling in ("74", number)]
    assert race.near_duplicates(texts, [0, 1], 1.0) == {0: 1, 1: 0}


def test_the_folds_of_asdiv_a_have_few_twins(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LMEVAL_PRUNE_DATA", str(shared_data))
    whole_race = Race(RacePlan.read(PLAN), PLAN, tmp_path, "cpu")
    folds = range(len(whole_race.plan.folds))
    kept = {number: whole_race.texts(number, "test") for number in folds}
    questions = {text for texts in kept.values() for text in texts}
    assert sum(map(len, kept.values())) == len(questions) >= 1000
    assert not questions & whole_race.twins.keys()
    for number in folds:
        test, choosing, tuned = whole_race.splits(number)
        assert test == whole_race.plan.folds[number]["test"]
        choosers = {*whole_race.texts(number, "train")}
        assert len(choosers) >= 100 and not choosers & {*kept[number]}
        assert choosers <= {*data.load("asdiv_a", choosing)["question"]}
        assert {*kept[number]} <= {*data.load("asdiv_a", test)["question"]}
        trained = {text for split in tuned for text in data.load("asdiv_a", split)["question"]}
        assert not trained & (choosers | {*kept[number]})
    halves = [whole_race.texts(number, "train") for number in folds]
    assert {text for half in halves for text in half} == {*whole_race.questions_of("fold2")}
    assert sum(map(len, halves)) == len(whole_race.questions_of("fold2"))
    assert whole_race.counts([0, 1])["test"] == len(kept[0]) + len(kept[1])
    trial = Race(rehearsal(whole_race.plan, 12), PLAN, tmp_path, "cpu", 12)
    assert all(trial.splits(k)[0] in trial.splits(k)[2] for k in folds)  # a rehearsal asks no test question
    assert all(len(trial.texts(k, part)) == 12 for k in folds for part in ("train", "test"))


@pytest.mark.parametrize(
    ("fold", "message"),
    [
        ({"choosing": "fold1", "test": "fold2"}, "number 0 has no finetune"),
        ({"finetune": "fold0", "choosing": "fold0", "test": "fold1"}, "on [0-9]+ of its choosing questions"),
        ({"finetune": "fold0", "choosing": "fold1", "test": "fold0[:5]+fold2"}, "on 5 of its test questions"),
        ({"finetune": "fold0", "choosing": "fold1", "test": "fold1"}, "number 0 has no test question left"),
        ({"finetune": "fold0", "choosing": "fold1", "test": "fold4+fold2"}, "of number 1 are also of number 0"),
    ],
)
def test_plans_by_which_models_know_questions_are_refused(
    fold: dict[str, str], message: str, shared_data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LMEVAL_PRUNE_DATA", str(shared_data))
    monkeypatch.setattr(Race, "twins", {})
    plan = RacePlan.read(PLAN)
    Race(plan, PLAN, tmp_path, "cpu").check_folds()
    other = {"finetune": "fold0", "choosing": "fold1", "test": "fold2"}
    folds = (fold,) if fold["test"] != "fold4+fold2" else (fold, other)
    with pytest.raises(InputError, match=message) as error:
        Race(replace(plan, folds=folds), PLAN, tmp_path, "cpu").check_folds()
    assert "\n" not in str(error.value)


def test_a_question_of_two_folds_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    same = "Mia has 3 red cups and buys 4 blue ones. How many cups does she have?"
    rows = {
        "a": [
            {"question": same, "fold": 0},
            {"question": "A bus drives 7 miles a day for 9 days. How far?", "fold": 0},
        ],
        "b": [{"question": "Tom sold 12 of his 30 stamps to Ann yesterday. How many remain?", "fold": 1}],
        "c": [{"question": same, "fold": 2}],
    }
    monkeypatch.setattr("sprint_race_folders.data.load", lambda _, split: Dataset.from_list(rows[split]))
    plan = replace(RacePlan.read(PLAN), folds=({"finetune": "a", "choosing": "b", "test": "c"},))
    assert set(Race(plan, PLAN, tmp_path, "cpu").twins) == {same}


# --------------------------------------------------------------------------- tests


def test_only_secondary_comparisons_are_corrected() -> None:
    generator = np.random.default_rng(3)
    values = [(generator.random((2, 40)) < share).astype(float) for share in (0.3, 0.5, 0.7)]
    values[1][0] = 1.0
    results = race.test_comparisons([race.Comparison(str(i), *pair, i == 0) for i, pair in enumerate(values)])
    assert results[0]["primary"] and results[0]["p_holm"] is None
    p = [entry["p"] for entry in results[1:]]
    expected = [min(2 * x, 1) if x == min(p) else max(x, min(2 * min(p), 1)) for x in p]
    assert [entry["p_holm"] for entry in results[1:]] == pytest.approx(expected)
    for result, (policy, sampling) in zip(results, values, strict=True):
        assert result["difference"] == pytest.approx(np.mean(policy - sampling))
        assert (result["low"] > 0 or result["high"] < 0) == (result["p"] < 0.05)


def test_what_only_variants_solve_is_counted() -> None:
    parts = [outcomes(4), outcomes(5, questions=9)]
    result = race.solved_only(parts, [0.5, 1.0], 4)
    literal = {"only_variants": 0, "only_samples": 0, "both": 0, "neither": 0}
    for part, temperature in zip(parts, ("0.5", "1"), strict=True):
        for row in part.z:
            variant = any(row[POOL.index(name)] == 1 for name in ("a", "b"))
            sample = row[0] == 1 or any(row[POOL.index(f"dense@{temperature}#{d}")] == 1 for d in range(4))
            name = {(1, 0): "only_variants", (0, 1): "only_samples", (1, 1): "both", (0, 0): "neither"}
            literal[name[int(variant), int(sample)]] += 1
    assert {name: round(result["shares"][name]["share"] * 21) for name in literal} == literal
    assert result["questions"] == 21 and result["greedy_variants"] == [2]
    share = result["shares"]["both"]
    assert share["low"] < share["share"] < share["high"]


def test_questions_without_all_samples_are_not_counted() -> None:
    part = outcomes(4)
    part.z[5:, POOL.index("dense@0.5#3")] = np.nan
    assert race.solved_only([part], [0.5], 4)["questions"] == 5
    part.z[:, POOL.index("dense@0.5#3")] = np.nan
    with pytest.raises(InputError, match="no question has 4 samples"):
        race.solved_only([part], [0.5], 4)


def test_only_tries_are_asked() -> None:
    orders, mix = [["dense", "a", "b"], ["b", "dense", "a"]], Mix.parse("dense|next+dense@0.5")
    attempts = race.attempts_of([(orders, mix, 4), (orders, Mix.parse("next@1"), 2)])
    assert attempts == [
        ["dense", "a", "dense@0.5#0", "b", "dense@1#0", "a@1#0"],
        ["dense", "b", "dense@0.5#0", "a", "b@1#0", "dense@1#0"],
    ]


def test_a_curve_needs_only_the_tries_of_each_question() -> None:
    """Outcomes that no try needs may be unknown; those that one needs may not."""
    whole, mix = outcomes(8), Mix.parse("next+dense@0.5")
    orders = [["a", "b"] if i % 2 else ["b", "a"] for i in range(12)]
    attempts = race.attempts_of([(orders, mix, 2)])
    z, tokens = np.full_like(whole.z, np.nan), np.full(whole.z.shape, np.nan)
    for i, names in enumerate(attempts):
        columns = [POOL.index(name) for name in names]
        z[i, columns], tokens[i, columns] = whole.z[i, columns], 3.0
    part = replace(whole, z=z, tokens=tokens)
    curve = policy_curve("", race.fixed_policy(orders), part, 2, mix)
    for i, (first, second) in enumerate(attempts):
        tries = [whole.z[i, POOL.index(name)] for name in (first, second)]
        assert curve.values[i].tolist() == [tries[0], max(tries)]
    assert curve.mean_tokens is not None and curve.mean_tokens.tolist() == [3.0, 6.0]
    with pytest.raises(InputError, match=r"outcomes of the test store are unknown, e.g. a on question 0"):
        policy_curve("", race.fixed_policy([["a", "b"]] * 12), part, 2, mix)
    with pytest.raises(InputError, match=r"outcomes of the test store are unknown, e.g. dense@0.5#0 on question 0"):
        policy_curve("", race.fixed_policy(orders), part, 2, Mix.parse("dense@0.5"))


def test_costs_are_rates_times_counts() -> None:
    plan = RacePlan.read(PLAN)
    rates = {"finetune": {"seconds": 20.0, "steps": 10}}
    entry = noted(noted(None, 100, 100, 0.0, 12), 100, 140, 10.0, 12)
    entry = noted(entry, 200, 280, 20.0, 12)  # a run between them was killed after 60 answers
    assert (entry["made"], entry["answers"], entry["seconds"]) == (180, 120, 30.0)
    assert seconds_a_question(entry) == pytest.approx(30 / 120 * 180 / 12)
    other = {**entry, "made": 120, "answers": 120}
    rates |= {name: {"0": other, "3": other} for name in ("train", "sampled", "ceiling", "test")}
    counts = {"finetune": 800, "train": 1200, "sampled": 1200, "ceiling": 120, "test": 1200}
    costs = estimate(plan, rates, counts)
    assert costs["training_steps"] == 90 * 4
    assert costs["hours"] == {
        "finetune": 0.2, "train": 0.83, "sampled": 0.83, "ceiling": 0.08, "test": 0.83,
    }  # fmt: skip
    with pytest.raises(InputError, match="the rates lack test; rehearse"):
        estimate(plan, {name: rate for name, rate in rates.items() if name != "test"}, counts)


def test_sampling_uses_all_samples() -> None:
    part = outcomes(6)
    columns = [POOL.index(f"dense@0.5#{d}") for d in range(5)]
    curve = race.sampling_curve(part, Mix.parse("dense@0.5"), 2)
    for i, row in enumerate(part.z):
        pairs = [row[a] == 1 or row[b] == 1 for a, b in itertools.combinations(columns, 2)]
        assert curve.values[i, 1] == pytest.approx(np.mean(pairs))


# --------------------------------------------------------------------------- the plan and its commit


def test_the_plan_is_the_races() -> None:
    plan = RacePlan.read(PLAN)
    sets = sum(int(text.partition("x")[2]) for text in plan.random_sets)
    assert 9 * len(plan.layers) + sets + len(plan.variants) + len(plan.plans) >= 60
    assert len(plan.temperatures) == 7 and plan.n == 8 and plan.most == 16 and plan.ceiling_samples == 64
    candidates = race.candidates(plan.orders, plan.mixes, plan.temperatures, 1.0)
    assert len(candidates) == len(plan.orders) * (6 + 3 * len(plan.temperatures))
    rehearsal(plan, 12)  # its settings are those of a plan, too


def changed(tmp_path: Path, old: str, new: str) -> Path:
    path = tmp_path / "plan.md"
    text = PLAN.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("```yaml\n", "```\n", "has 0 blocks that begin with ```yaml"),
        ("n: 8\n", "n: [\n", "its settings are not YAML"),
        ("n: 8\n", "", ""),
        ("n: 8\n", "n: 0\n", "n=0 must be a whole number, at least 1"),
        ("n: 8\n", "n: 16\n", "n must be at most draws and most"),
        ("n: 8\n", "n: 5\n", "n=5 must be one of 1, 2, 4, 8, 16"),
        ("parts: 5\n", "parts: 1\n", "parts must be at least 2"),
        ("draws: 8\n", "", "needs draws"),
        ("draws: 8\n", "drawn: 8\n", "has no setting 'drawn'; did you mean 'draws'"),
        ("choosing:", "chosen:", "folds: number 0 names finetune, chosen, test; a fold"),
        ("folds:\n", "folds:\n- fold0\n", "must be a list of mappings of names to values"),
        ("temperatures: [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4]", "temperatures: [0]", "temperatures"),
    ],
)
def test_wrong_plans_are_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = changed(tmp_path, old, new)
    if not message:  # a default
        assert RacePlan.read(path).n == 8
        return
    with pytest.raises(InputError, match=message) as error:
        RacePlan.read(path)
    assert "\n" not in str(error.value)


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, Any]:
    git = make_git_folder(tmp_path)
    (tmp_path / "docs/plan.md").write_text("a plan\n")
    return tmp_path, git


def test_only_committed_files_are_registered(repository: tuple[Path, Any]) -> None:
    folder, git = repository
    files = [folder / "docs/plan.md", folder / "docs/choices.json"]
    with pytest.raises(InputError, match="no such file"):
        Registration.of(files)
    files[1].write_text("{}")
    with pytest.raises(InputError, match=r"docs/plan.md is not committed; commit it before the test run"):
        Registration.of(files)
    git("add", "docs/plan.md"), git("commit", "-qm", "plan")
    with pytest.raises(InputError, match=r"docs/choices.json is not committed"):
        Registration.of(files)
    git("add", "."), git("commit", "-qm", "choices")
    files[0].write_text("another plan\n")
    with pytest.raises(InputError, match=r"docs/plan.md has changed since its commit"):
        Registration.of(files)


def test_a_race_is_registered_while_its_files_stay(repository: tuple[Path, Any], tmp_path: Path) -> None:
    folder, git = repository
    git("add", "."), git("commit", "-qm", "plan")
    first = Registration.of([folder / "docs/plan.md"])
    assert first.commit == git("rev-parse", "HEAD") and first.files.keys() == {"docs/plan.md"}
    assert Registration.from_json(first.to_json()) == first and first.difference(folder / "docs") == ""
    (folder / "other").write_text("x")
    git("add", "."), git("commit", "-qm", "other")
    assert Registration.of([folder / "docs/plan.md"]) == first and first.difference(folder) == ""  # later work
    (folder / "docs/plan.md").write_text("another plan\n")
    assert first.difference(folder) == f"docs/plan.md differs from that of commit {first.commit[:12]}"
    git("add", "."), git("commit", "-qm", "changed")
    second = Registration.of([folder / "docs/plan.md"])
    assert "differs from that of commit" in first.difference(folder) and second.difference(folder) == ""
    forged = Registration(first.commit, first.date, second.files)  # the file of now with the commit of before
    assert "is not the file that the test run read" in forged.difference(folder)
    gone = Registration("0" * 40, first.date, first.files)
    assert "cannot be read" in gone.difference(folder)
