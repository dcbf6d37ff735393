"""What a race may claim: values, tests and verdicts of two tiny folds, the registration, and what was chosen."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sprint_race_claims as claims
import sprint_race_guesses as guesses
from scipy import stats
from sprint_race_choice import Comparison, fixed_policy, solved_only, test_comparisons
from sprint_race_plan import RacePlan, code_state
from sprint_race_report import (
    CHOSEN,
    SAMPLING,
    Fold,
    Report,
    at_budget,
    interval_text,
    narrow_interval,
    over_folds,
    write_race_report,
)
from sprint_race_stages import Race

from lmeval_prune import InputError
from lmeval_prune.sprint.mixes import Mix
from lmeval_prune.sprint.outcomes import Outcomes
from tests.conftest import ROOT
from tests.git_folders import make_git_folder

PLAN = ROOT / "docs/results/sprint_race/plan.md"
PLAIN = [f"dense@0.5#{d}" for d in range(4)]
POOL = ["dense", "a", "b", *PLAIN]
SOLVED = [  # of two folds: dense, a, b, and four samples
    [[1, 0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0]],
    [[0, 1, 0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 1, 1]],
]
TOKENS = [10, 20, 30, 4, 6, 8, 10]


@pytest.fixture
def folds() -> list[Fold]:
    """Make two folds: the first is chosen `next` with sampling alone, the second the greedy answer first in both."""
    choices = [
        {"fold": 0, "order": "first", "mix": "next", "rival": "dense@0.5"},
        {"fold": 1, "order": "second", "mix": "dense|next", "rival": "dense|dense@0.5"},
    ]
    orders = {"first": ["a", "b", "dense"], "second": ["b", "a", "dense"]}
    result = []
    for solved, choice in zip(SOLVED, choices, strict=True):
        z = np.array(solved, np.float32)
        rows = [{"question": f"{choice['fold']} {i}", "task": "t"} for i in range(len(z))]
        extracted = np.where(z == 1, "right", "wrong").astype(object)
        part = Outcomes(z, POOL, rows, tokens=np.tile(np.array(TOKENS, float), (len(z), 1)), extracted=extracted)

        def policy_of(order: str, count: int = len(z)) -> Any:
            return fixed_policy([orders[order]] * count)

        result.append(Fold(part, choice, policy_of))
    return result


@pytest.fixture
def report(folds: list[Fold]) -> Report:
    plan = SimpleNamespace(n=2, most=2, test_samples=4)
    race = SimpleNamespace(plan=plan, note="A rehearsal.", rivals=lambda _: {"b": ("second", Mix())})
    report = Report(race, [])
    report.folds = folds
    return report


def test_values_of_two_folds_are_literal(report: Report) -> None:
    """Pairs of the chosen policy and its rival, in this order; counted by hand from `SOLVED`."""
    primary, first, tokens, *rest = report.comparisons()
    assert primary.is_primary and not any(comparison.is_primary for comparison in (first, tokens, *rest))
    assert primary.name == "pass@2, primary" and first.name == "pass@1, beside the greedy answer"
    assert primary.policy.tolist() == [0, 1, 1, 0, 1]  # a or b; dense or b
    assert primary.sampling == pytest.approx([1 - 3 / 6, 0, 1 - 1 / 6, 0, 1])  # two of four samples; dense or a sample
    assert first.policy.tolist() == [0, 0, 1, 0, 1] and first.sampling.tolist() == [1, 0, 0, 0, 1]  # column `dense`
    assert report.curves[CHOSEN].tokens is not None and report.curves[SAMPLING].tokens is not None
    assert report.curves[CHOSEN].tokens.tolist() == [[20, 50]] * 3 + [[10, 40]] * 2
    assert report.curves[SAMPLING].tokens.tolist() == [[7, 14]] * 3 + [[10, 17]] * 2
    assert tokens.name == "at the tokens of 2 tries" and tokens.policy.tolist() == primary.policy.tolist()
    assert tokens.sampling == pytest.approx([1 / 2, 0, 5 / 6, 0, 1])  # 50 and 40 tokens: both tries of sampling fit
    votes = {comparison.name: comparison for comparison in rest}
    assert votes["majority at 2"].policy.tolist() == [0, 0, 1, 0, 1]  # the first of two different answers
    assert votes["majority at 2"].sampling.tolist() == [1 / 2, 0, 1 / 2, 0, 1]  # samples 0, 1 and samples 2, 3
    beside = votes["majority at 2, beside the greedy answer"]
    assert beside.policy.tolist() == [0, 0, 1, 0, 1] and beside.sampling.tolist() == first.sampling.tolist()
    assert votes["b, pass@2"].policy.tolist() == [0, 1, 1, 1, 1]
    assert votes["b, pass@2"].sampling.tolist() == primary.sampling.tolist()


def test_fewer_tries_of_sampling_fit_into_fewer_tokens(report: Report) -> None:
    for fold in report.folds:
        assert fold.outcomes.tokens is not None
        fold.outcomes.tokens[:, 1:3] = 3.0  # the chosen policy's two tries have 6 and 13 tokens
    # sampling has 7 tokens a try; the greedy answer and a sample have 10 and 17
    first = [6 / 7 * share for share in (1 / 4, 0, 2 / 4)]
    assert report.sampled_at_tokens() == pytest.approx([*first, 0, 1])


@pytest.mark.parametrize("budget", [1.0, 4.0, 5.0, 9.0, 12.0, 50.0])
def test_sampling_at_a_budget_is_a_mixture_of_two_numbers_of_tries(budget: float) -> None:
    values, tokens = np.array([[0.2, 0.5, 0.9], [0.0, 1.0, 1.0]]), np.array([4.0, 9.0, 12.0])
    both = [(0.0, np.zeros(2)), *zip(tokens, values.T, strict=True)]
    expected = values[:, -1]
    for (low, fewer), (high, more) in pairwise(both):
        if low <= budget <= high:
            share = (budget - low) / (high - low)
            assert share * high + (1 - share) * low == pytest.approx(budget)
            expected = share * more + (1 - share) * fewer
    assert at_budget(values, tokens, budget) == pytest.approx(expected)


def test_the_share_of_cut_answers_is_by_kind(report: Report) -> None:
    report.plan.max_gen_toks = 10  # of TOKENS: dense has 10; a and b have 20 and 30; of the samples one has 10
    assert report.cut_off() == {"greedy, unpruned": 1.0, "sampled, unpruned": 1 / 4, "under variants": 1.0}


def test_folds_are_compared_by_students_interval() -> None:
    rows = [{"policy": x, "sampling": 0.5} for x in (0.4, 0.5, 0.75)]
    low, high = stats.t.interval(0.95, 2, np.mean([-0.1, 0, 0.25]), np.std([-0.1, 0, 0.25], ddof=1) / 3**0.5)
    assert over_folds(rows) == pytest.approx({"mean": 0.05, "low": low, "high": high})
    assert over_folds(rows[:1]) is None


def test_a_comparison_without_a_difference_is_explained(folds: list[Fold], page_of: Any) -> None:
    """If every answer is right, each interval says that nothing differs, and none is `+0.000 to +0.000`."""
    assert interval_text(-0.1, 0.2, 3) == "-0.100 to +0.200"
    for fold in folds:
        fold.outcomes.z[:] = 1
    page = page_of(folds)
    assert re.search(r"difference \+0.000 \(95% interval -0.\d+ to \+0.\d+, no question differs\)", page)
    table = re.findall(r"^\|.*\+0.000 \|.*$", page, re.MULTILINE)
    assert table and all("no question differs" in row for row in table) and "+0.000 to +0.000" not in page
    assert "is +0.000 (the same for each model, so there is no interval)" in page


def test_a_comparison_that_cannot_be_made_is_an_error(report: Report) -> None:
    report.race.note = ""
    with pytest.raises(InputError, match=r"^report: 8 comparisons can be made of the plan's 11; [^\n]*$"):
        report.comparisons()


def test_guesses_are_expressions_over_the_numbers_of_the_text() -> None:
    text = "Seven red apples cost 1,200.5 cents, and someone has 3."
    assert guesses.numbers_in(text) == ["7", "1200.5", "3"]
    assert guesses.expressions("Of 3 boys and twelve girls", 16) == ["3+12", "12-3", "12*3", "12/3", "12+3", "3/12"]
    assert guesses.expressions(text, 5) == ["7+1200.5+3", "1200.5-7", "7-3", "1200.5-3", "1200.5*7"]
    assert guesses.expressions("No numbers", 8) == []


@pytest.fixture
def page_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes the report of folds, and returns its page."""

    def write(folds: list[Fold]) -> str:
        parts = [fold.outcomes for fold in folds]
        monkeypatch.setattr(Report, "_fold", lambda _, number: folds[number])
        monkeypatch.setattr(Report, "solved_only", lambda _: solved_only(parts, [0.5, 0.5], 4))
        code = {"test 0": [{"commit": "c" * 40, "changed": ["lmeval_prune/x.py"]}]}
        race = SimpleNamespace(
            plan=SimpleNamespace(n=2, most=2, test_samples=4, seed=0, margin=0.02, max_gen_toks=30, task="other"), rivals=lambda _: {"b": ("second", Mix())},
            note="A rehearsal.", limit=5, report_folder=tmp_path, choices_file=tmp_path / "choices.json", twins={}, code=code,
            seconds={}, rates={},
        )  # fmt: skip
        race.choices_file.write_text('{"smallest_difference": 0.1}')
        write_race_report(race, [0, 1])
        return (tmp_path / "report.md").read_text()

    return write


def test_the_page_has_the_figures(folds: list[Fold], tmp_path: Path, page_of: Any) -> None:
    page, results = page_of(folds), json.loads((tmp_path / "results.json").read_text())
    assert f"A rehearsal. Code: commit {'c' * 12} for test 0; with uncommitted changes in the stages test 0" in page
    assert "Not tested: over the 2 models, each with choices of its own" in page
    assert "which are scored as they stand: 0.0% (greedy, unpruned), 0.0% (sampled, unpruned), 50.0% (under v" in page
    assert "of the policy that training chose: **0.600**" in page and "that training chose: **0.467**" in page
    assert "No claim: the race is not pre-registered." in page and "unpruned model solves 0.400 greedily" in page
    primary = results["comparisons"][0]
    assert (primary["policy"], primary["sampling"]) == pytest.approx((3 / 5, (1 / 2 + 5 / 6 + 1) / 5))
    assert results["pass"]["b"] == [0.6, 0.8] and results["tokens"][CHOSEN] == [16.0, 46.0]
    assert results["solved_only"]["shares"]["only_variants"]["share"] == pytest.approx(2 / 5)
    assert [fold["rival"] for fold in results["folds"]] == ["dense@0.5", "dense|dense@0.5"]


@pytest.mark.parametrize(
    ("policy", "sampling", "margin", "is_registered", "words"),
    [
        (1.0, 0.0, 0.02, True, "The policy that training chose beats sampling, for this model, pool and task."),
        (0.0, 1.0, 0.02, True, "Sampling beats the policy that training chose, for this model, pool and task."),
        (0.5, 0.5, 0.1, True, "The race shows no difference, and none of 0.1 or more (the 90% interval is within it)."),
        (0.5, 0.5, 0.02, True, "The race shows no difference, and does not exclude one of 0.02: undecided."),
        (1.0, 0.0, 0.02, False, "No claim: the race is not pre-registered."),
    ],
)
def test_a_verdict_is_of_the_difference(
    policy: float, sampling: float, margin: float, is_registered: bool, words: str
) -> None:
    noise = np.tile([0.0, 0.1], 10)
    comparison = Comparison("p", policy - noise, sampling - noise[::-1], True)
    row = test_comparisons([comparison])[0] | narrow_interval(comparison)
    low, high = stats.t.interval(0.9, 19, row["difference"], stats.sem(comparison.policy - comparison.sampling))
    assert (row["low_90"], row["high_90"]) == pytest.approx((low, high))
    assert claims.verdict(row, is_registered, margin) == words


# --------------------------------------------------------------------------- registration


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, Any]:
    git = make_git_folder(tmp_path)
    (tmp_path / "docs/plan.md").write_text(PLAN.read_text())
    git("add", "docs"), git("commit", "-qm", "plan")
    return tmp_path, git


def make(folder: Path, name: str = "plan.md") -> Race:
    plan = folder / "docs" / name
    return Race(RacePlan.read(plan), plan, folder / "work", "cpu")


def write_choices(race: Race, **changes: Any) -> None:
    content = {"plan": claims.plan_identity(race), "folds": [], **changes}
    race.choices_file.write_text(json.dumps(content))


@pytest.fixture
def registered(repository: tuple[Path, Any]) -> tuple[Race, Any]:
    folder, git = repository
    race = make(folder)
    write_choices(race)
    git("add", "docs"), git("commit", "-qm", "choices")
    claims.register(race)
    return race, git


def test_a_race_is_registered_with_all_its_folds(registered: tuple[Race, Any]) -> None:
    race, git = registered
    status = claims.status(race, range(2))
    assert status["commit"] == git("rev-parse", "HEAD") and status["text"].startswith("Pre-registered: ")
    part = claims.status(race, [1])
    assert part["commit"] is None and part["text"].endswith("only these folds were tested: 1.")
    assert claims.status(replace(race, limit=12), range(2)) == {"commit": None, "text": replace(race, limit=12).note}
    (race.work / "registration.json").unlink()
    assert claims.status(race, range(2))["text"].startswith("Not pre-registered: the test run began without")


@pytest.mark.parametrize("name", ["plan.md", "choices.json"])
@pytest.mark.parametrize("is_committed", [False, True])
def test_changed_files_are_not_registered(registered: tuple[Race, Any], name: str, is_committed: bool) -> None:
    race, git = registered
    path = race.plan_file.with_name(name)
    path.write_text(path.read_text() + "\n")
    if is_committed:
        git("add", "docs"), git("commit", "-qm", "changed")
    status = claims.status(race, range(2))
    assert status["commit"] is None and status["text"].startswith("Not pre-registered (commit ")


def test_another_plan_is_not_registered(registered: tuple[Race, Any]) -> None:
    """A plan that lies beside the registered one, with other settings, whether it is committed or not."""
    race, git = registered
    (race.plan_file.with_name("plan2.md")).write_text(PLAN.read_text().replace("\nseed: 0", "\nseed: 1"))
    other = make(race.work.parent, "plan2.md")
    assert other.plan.seed == 1
    for _ in range(2):
        status = claims.status(other, range(2))
        assert status["commit"] is None and status["text"].startswith("Not pre-registered")
        git("add", "docs"), git("commit", "--allow-empty", "-qm", "plan 2")
    write_choices(other)
    git("add", "docs"), git("commit", "-qm", "choices of plan 2")
    assert "began with the plan and choices of commit" in claims.status(other, range(2))["text"]


def test_the_test_run_needs_the_commit_and_keeps_to_it(repository: tuple[Path, Any]) -> None:
    folder, git = repository
    race = make(folder)
    write_choices(race)
    with pytest.raises(InputError, match="is not committed; commit it before the test run"):
        race.run(["test"], [0])
    git("add", "docs"), git("commit", "-qm", "choices")
    with pytest.raises(InputError, match="has no fold 0; run the stage choose"):
        race.run(["test"], [0])
    assert (folder / "work/registration.json").exists()
    write_choices(race, folds=[1])
    git("add", "docs"), git("commit", "-qm", "other choices")
    with pytest.raises(InputError, match=r"the test run began with the plan and choices of commit \w{12}, and these"):
        race.run(["test"], [0])


def test_choices_are_of_a_committed_plan(repository: tuple[Path, Any]) -> None:
    folder, git = repository
    race = make(folder)
    write_choices(race)
    race.plan_file.write_text(PLAN.read_text() + "\nA new paragraph.\n")
    with pytest.raises(InputError, match=r"^docs/plan.md has changed since its commit[^\n]*$"):
        race.run(["choose"], range(2))
    git("add", "docs"), git("commit", "-qm", "a new paragraph, and choices of the old plan")
    with pytest.raises(InputError, match=r"^[^\n]*choices.json was chosen by another plan than [^\n]*plan.md[^\n]*$"):
        race.run(["test"], [0])


def test_a_work_folder_has_one_race(repository: tuple[Path, Any]) -> None:
    folder, _ = repository
    race, ran = make(folder), []
    race.run([], [0])
    race.stage("sweep 0", lambda: None)
    with pytest.raises(
        InputError, match=r"^[^\n]*holds a race with another seed; give --work [^\n]*sweep_0.done[^\n]*$"
    ):
        replace(race, plan=replace(race.plan, n=4, seed=3)).run([], [0])
    replace(race, plan=replace(race.plan, n=4)).run([], [0])  # no stage that is done depends on n
    race.run([], [0])
    race.stage("choose", lambda: ran.append(1), folds=[0, 1])
    race.stage("choose", lambda: ran.append(2), folds=[0, 1])
    with pytest.raises(InputError, match=r"^choose was done with other settings or folds; give --work [^\n]*$"):
        race.stage("choose", lambda: ran.append(3), folds=[0])
    with pytest.raises(InputError, match="other settings or folds"):
        replace(race, plan=replace(race.plan, n=4)).stage("choose", lambda: ran.append(4), folds=[0, 1])
    assert ran == [1]


def test_processes_that_share_a_race_keep_each_others_entries(tmp_path: Path) -> None:
    first, second = (Race(RacePlan.read(PLAN), PLAN, tmp_path, "cpu") for _ in range(2))
    first.stage("finetune 0", lambda: second.stage("plans 1", lambda: None))
    second.note_down("rates", ["train", "0"], {"seconds": 1})
    first.note_down("rates", ["train", "1"], {"seconds": 2})
    assert set(json.loads((tmp_path / "seconds.json").read_text())) == {"finetune 0", "plans 1"}
    assert set(json.loads((tmp_path / "code.json").read_text())) == {"finetune 0", "plans 1"}
    assert json.loads((tmp_path / "rates.json").read_text()) == {"train": {"0": {"seconds": 1}, "1": {"seconds": 2}}}


def test_nothing_is_looked_at_before_all_folds_are_complete(registered: tuple[Race, Any]) -> None:
    race, _ = registered
    steps = [f"{stage} {number}" for stage in ("ceiling", "test", "lm-eval") for number in range(2)]
    for step in steps:
        race.stage(step, lambda: None)
    for step in steps:
        race.marker(step).unlink()
        for folds in (range(2), [0]):
            with pytest.raises(InputError, match=rf"^report: {step} is not done; nothing is looked at[^\n]*$"):
                race.run(["report"], folds)
        race.stage(step, lambda: None)
    claims.check_complete(race)


# --------------------------------------------------------------------------- what was chosen


class TinyRace(Race):
    """A race whose training outcomes and test questions are made by hand."""

    z = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 1, 0]], np.float32)

    def training(self, number: int) -> Outcomes:
        return Outcomes(self.z, ["dense", "a", "b"], [{"question": f"train {i}"} for i in range(4)])

    def texts(self, number: int, part: str) -> list[str]:
        return ["test 0", "test 1"]


def test_only_what_was_chosen_is_tested_and_reported(tmp_path: Path) -> None:
    plan = replace(RacePlan.read(PLAN), orders=("best", "cover"))
    race = TinyRace(plan, tmp_path / "plan.md", tmp_path / "work", "cpu", limit=4)
    model = race.fold(0) / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    digests = claims.fingerprints(race, 0, "best")
    assert digests.keys() == {"training outcomes", "model", "order best", "order cover"}
    choice = {"fold": 0, "order": "best", "digests": digests}
    race.choices_file.write_text(json.dumps({"folds": [choice]}))
    claims.verify(race, 0)
    (model / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(InputError, match=r"^fold 0: model of [^\n]* differ from those of [^\n]*choices.json; put them"):
        race.run(["test"], [0])
    (model / "model.safetensors").write_bytes(b"weights")
    race.z = race.z[:, [1, 0, 2]]  # other outcomes, and so another order
    with pytest.raises(InputError, match=r"^fold 0: training outcomes, order best[^\n]* of [^\n]*$"):
        race.run(["report"], [0])
    race.choices_file.write_text(json.dumps({"folds": [{"fold": 0, "order": "best"}]}))
    with pytest.raises(InputError, match=r"^fold 0: training outcomes, model, order best, order cover of [^\n]*$"):
        claims.verify(race, 0)


def test_uncommitted_code_is_named(repository: tuple[Path, Any]) -> None:
    folder, git = repository
    clean = code_state(folder / "docs", ["docs", ":(exclude)docs/results"])
    assert clean == {"commit": git("rev-parse", "HEAD"), "changed": []}
    (folder / "docs/results").mkdir()
    (folder / "docs/results/table").write_text("x")
    (folder / "docs/plan.md").write_text("x")
    changed = code_state(folder, ["docs", ":(exclude)docs/results"])
    assert changed["changed"] == ["docs/plan.md"]
    commit = clean["commit"][:12]
    assert claims.code_text({"choose": [clean], "test 0": [clean]}) == f"Code: commit {commit} for choose, test 0."
    text = claims.code_text({"choose": [clean], "test 0": [clean, changed]})
    assert (
        text
        == f"Code: commit {commit} for choose, test 0; with uncommitted changes in the stages test 0 (docs/plan.md)."
    )
