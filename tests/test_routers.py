"""Every router method through the same tests, and the formulas of each against a literal reference."""

import itertools
import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from lmeval_prune import InputError
from lmeval_prune.cli import main
from lmeval_prune.sprint.encoder import load_encoder
from lmeval_prune.sprint.fit import fit, fit_embeddings, mean_passes, split
from lmeval_prune.sprint.options import FitOptions
from lmeval_prune.sprint.outcomes import OutcomeStore
from lmeval_prune.sprint.router import Router
from lmeval_prune.sprint.routers import calibration
from lmeval_prune.sprint.routers.base import (
    Candidate,
    Examples,
    Ranker,
    RouterMethod,
    by_coverage,
    by_probability,
    standardisation,
)
from lmeval_prune.sprint.routers.contrastive import NearestHeads
from lmeval_prune.sprint.routers.knn import Neighbours
from lmeval_prune.sprint.routers.outcome_model import OutcomeModel, quadrature
from lmeval_prune.sprint.routers.table import ROUTERS
from tests.conftest import ROOT
from tests.routers import ROWS, Row, pass_at
from tests.swept_outcomes import write_outcomes
from tests.test_sprint import POOL, random_z, world

BY_NAME = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def options(row: Row, **settings: Any) -> FitOptions:
    return FitOptions(router=row.name, options=row.options, **{**row.flat, **settings})


def fitted(row: Row, questions: int = 200, seed: int = 1, **settings: Any) -> Router:
    return fit_embeddings(*world(questions, seed), POOL[:6], "none", options(row, **settings))


# --------------------------------------------------------------------------- every method


def test_every_method_has_a_row() -> None:
    assert [row.name for row in ROWS] == list(ROUTERS)


@BY_NAME
def test_known_structure_is_recovered(row: Row) -> None:
    router = fitted(row, 400)
    x, z = world(300, 2)
    solvable = float(z.max(1).values.mean())
    assert float(z.mean()) < 0.4  # what a random head solves
    assert pass_at(router, x, z, 1) > 0.9 * solvable and pass_at(router, x, z, 2) > 0.96 * solvable


@BY_NAME
def test_unknown_outcomes_are_no_failures(row: Row) -> None:
    x, z = world(400, 1)
    z[torch.rand(z.shape, generator=torch.Generator().manual_seed(0)) < 0.4] = math.nan
    router = fit_embeddings(x, z, POOL[:6], "none", options(row))
    x, z = world(300, 2)
    assert pass_at(router, x, z, 1) > 0.85 * float(z.max(1).values.mean())


@BY_NAME
def test_orders_are_permutations_and_independent_of_other_questions(row: Row) -> None:
    router, (x, _) = fitted(row), world(30, 3)
    orders = router.ranking(x)
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert [router.ranking(x[i : i + 1])[0] for i in range(30)] == orders
    p = router.chances(x)
    assert (p is not None) == row.has_probabilities
    if p is not None:
        assert p.shape == (30, 6) and bool(((p > 0) & (p < 1)).all())
        torch.testing.assert_close(torch.cat([router.chances(x[i : i + 1]) for i in range(30)]), p)


def test_nearly_equal_distances_do_not_depend_on_other_questions() -> None:
    generator = torch.Generator().manual_seed(0)
    theta, heads, x = (torch.randn(*shape, generator=generator) for shape in ((32, 384), (270, 32), (300, 384)))
    router = NearestHeads(theta / 384**0.5, heads * 0.01)
    assert torch.equal(router.order(x)[:150], torch.cat([router.order(x[i : i + 1]) for i in range(150)]))


@BY_NAME
def test_a_fit_is_repeatable_and_survives_its_files(row: Row, tmp_path: Path) -> None:
    first, again, (x, _) = fitted(row), fitted(row), world(50, 3)
    first.save(tmp_path)
    loaded = Router.load(tmp_path)
    for other in (again, loaded):
        assert other.ranker.tensors.keys() == first.ranker.tensors.keys()
        assert all(torch.equal(other.ranker.tensors[name], value) for name, value in first.ranker.tensors.items())
        assert other.ranker.settings == first.ranker.settings and other.ranking(x) == first.ranking(x)
        assert other.platt == first.platt and other.about["chosen"] == first.about["chosen"]
    assert loaded.method == row.name and loaded.sha256


@BY_NAME
def test_nothing_is_learned_from_shuffled_outcomes(row: Row) -> None:
    """Rows of Z are shuffled among questions; the unpruned model is best, so the guard keeps it first."""
    result = []
    for seed in (1, 2):
        x, z = world(300, seed)
        z[:, 0] = torch.from_numpy((np.random.default_rng(seed).random(300) < 0.6).astype(np.float32))
        result.append((x, z[torch.from_numpy(np.random.default_rng(seed).permutation(300))]))
    router = fit_embeddings(*result[0], POOL[:6], "none", options(row, guard=True))
    assert router.about["validation_pass"]["pass@1"] >= router.about["validation_dense"]
    assert pass_at(router, *result[1], 1) > float(result[1][1][:, 0].mean()) - 0.1


@BY_NAME
def test_the_guard_tries_dense_first(row: Row, tmp_path: Path) -> None:
    """Dense solves what nothing in the question tells; a head is better on the training questions alone."""
    x, z = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(60, 6)
    fit_options = options(row, validation=0.5, guard=True)
    validation, training = split(range(60), 0.5, 0)
    z[validation, 0] = 1
    z[training, 3] = 1
    router = fit_embeddings(x, z, POOL[:6], "none", fit_options)
    assert router.dense_first and router.about["validation_pass"]["pass@1"] == router.about["validation_dense"] == 1
    router.save(tmp_path)
    orders = Router.load(tmp_path).ranking(x)
    assert all(order[0] == 0 and sorted(order) == list(range(6)) for order in orders)
    own = fit_embeddings(x, z, POOL[:6], "none", replace(fit_options, guard=False))
    assert not own.dense_first and own.about["validation_pass"]["pass@1"] < 0.2
    assert [[j for j in order if j] for order in own.ranking(x)] == [order[1:] for order in orders]
    by_default = fit_embeddings(x, z, POOL[:6], "none", replace(fit_options, guard=None))
    assert by_default.dense_first == (row.name != "contrastive")
    names = POOL[1:6]  # without dense there is nothing to fall back to
    without = fit_embeddings(x, z[:, 1:], names, "none", replace(fit_options, validation=0.0))
    assert not without.dense_first and without.about["validation_dense"] is None


@BY_NAME
def test_validation_chooses(row: Row) -> None:
    method = FitOptions(router=row.name).method()
    several = {name: value for name, value in vars(method).items() if isinstance(value, tuple) and len(value) > 1}
    assert several
    with pytest.raises(InputError, match="need a validation split"):
        FitOptions(router=row.name, validation=0).method()
    options(row, validation=0.0).method()
    quick = {"epochs": 2} if row.flat else {"options": {"iterations": 5} if "iterations" in vars(method) else {}}
    router = fit_embeddings(*world(60, 4), POOL[:6], "none", FitOptions(router=row.name, **quick))
    tried, chosen = router.about["tried"], router.about["chosen"]
    best = max(sum(setting["validation_pass"].values()) for setting in tried)
    (winner,) = [setting for setting in tried if chosen.items() <= setting.items()]
    assert len(tried) > 2 and sum(winner["validation_pass"].values()) == best
    assert winner["validation_pass"] == router.about["validation_pass"]


@BY_NAME
def test_wrong_options_are_refused_in_one_line(row: Row) -> None:
    for wrong, message in row.wrong:
        with pytest.raises(InputError, match=rf"^[^\n]*{message}[^\n]*$"):
            FitOptions(router=row.name, options=wrong).method()


def test_wrong_commands_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["fit", "--outcomes", str(tmp_path), "--output", str(tmp_path / "router")]
    for words, message in (
        (["--router", "knm"], "router='knm' is not known; use contrastive, knn"),
        (["--router", "knn", "--p", "16"], "p is a setting of router=contrastive"),
        (["--router", "knn", "--epochs", "3"], "epochs is a setting of router=contrastive"),
        (["--router", "knn", "--options", "k=0"], "each at least 1"),
        (["--router", "logistic", "--validation", "0"], "several values of rank need a validation split"),
        (["--guard", "perhaps"], "must be true or false"),
    ):
        assert main([*command, *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_a_router_of_other_options_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of the same options is: then only the outcomes are missing here."""
    router = fit_embeddings(*world(60, 4), POOL[:6], "all-minilm-l6-v2", FitOptions(router="knn"))
    router.save(tmp_path / "router")
    command = ["fit", "--outcomes", str(tmp_path / "none"), "--output", str(tmp_path / "router"), "--router", "knn"]
    for words, message in (
        ([], "none is not an outcome store"),
        (["--seed", "1"], "router was made with other options (seed=0); name another output, or delete it"),
        (["--encoder", "mine"], "router was made with other options (encoder=all-minilm-l6-v2); name another output"),
    ):
        assert main([*command, *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_options_of_the_papers_router_have_their_own_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_embeddings(*world(60, 4), POOL[:6], "all-minilm-l6-v2", FitOptions(epochs=1)).save(tmp_path / "router")
    command = ["fit", "--outcomes", str(tmp_path / "none"), "--output", str(tmp_path / "router"), "--epochs", "1"]
    for words, message in (([], "none is not an outcome store"), (["--lambda", "0"], "(lambda=[0.0, 0.0001, 0.001]);")):
        assert main([*command, *words]) == 2
        assert message in capsys.readouterr().err


def test_columns_of_fewer_questions_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A column that was asked few questions can have the highest accuracy by luck."""
    z = {"dense": [0, 1] * 5, "L0H0": [1, 0] * 5, "L1H0": [1, 1]}
    folder = write_outcomes(tmp_path / "s", z, {"name": "toy"})
    command = ["fit", "--outcomes", str(folder), "--output", str(tmp_path / "r"), "--router", "knn"]
    assert main([*command, "--validation", "0", "--options", "k=2,weighting=uniform,prior=1"]) == 0
    assert "1 of 3 columns have outcomes of fewer questions, e.g. L1H0 of 2 and not 10" in capsys.readouterr().out
    assert OutcomeStore(folder).read().columns(["dense", "L0H0"]).uneven == ""


def test_cut_off_answers_explain_errors_about_outcomes_alone(tmp_path: Path) -> None:
    folder = write_outcomes(tmp_path / "s", {"dense": [0, 1] * 5, "L0H0": [1, 0] * 5}, {"name": "toy"})
    lengths = {"answers": 20, "unknown": 0, "cut_off": 1.0, "mean_tokens": 8.0, "max_gen_toks": 8}
    outcomes = replace(OutcomeStore(folder).read(), lengths=lengths)
    with pytest.raises(InputError, match=r"^the sentence encoder .* cannot be loaded"):
        fit(outcomes, str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"^100% of the answers were cut off at 8 tokens, .*: none of the 5 questions"):
        fit(replace(outcomes, z=outcomes.z * 0), "all-minilm-l6-v2", FitOptions(holdout=0.5))
    with pytest.raises(InputError, match=r"validation=0\.01 of 10 questions is none; give more, or 0"):
        fit(outcomes, "all-minilm-l6-v2", FitOptions(validation=0.01))


def test_what_an_encoder_does_not_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """all-MiniLM-L6-v2 reads 256 tokens."""
    folder = write_outcomes(tmp_path / "s", {"dense": [0, 1, 1], "L0H0": [1, 0, 1]}, {"name": "toy"})
    outcomes = OutcomeStore(folder).read()
    outcomes.questions[1]["question"] = "word " * 300
    fit(outcomes, "all-minilm-l6-v2", FitOptions(epochs=1, weights=(0.0,), validation=0))
    [record] = caplog.records
    assert "1 of 3 questions are longer than the 256 tokens that the sentence encoder reads" in record.getMessage()


def test_a_language_model_as_encoder_is_said_to_be_one(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_encoder(str(tiny_folder))
    assert "no model of sentence-transformers (no modules.json)" in caplog.text


@dataclass(frozen=True, eq=False)
class WrongRanker(Ranker):
    shapes: ClassVar = {"width": ("width",)}
    width: torch.Tensor
    pool: int
    fault: str

    def order(self, x: torch.Tensor) -> Any:
        order = torch.arange(self.pool).expand(len(x), -1)
        faults = {
            "short": order[:, 1:],
            "twice": order * 0,
            "above": order + 1,
            "rows": order[:1],
            "list": [*range(self.pool)],
            "fractions": order + 0.5,
        }
        return faults.get(self.fault, order)

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        p = torch.full((len(x), self.pool), 0.5)
        return {"narrow": p[:, 1:], "large": p + 1, "nan": p * math.nan}.get(self.fault, p)


@dataclass(frozen=True)
class Wrong(RouterMethod):
    ranker: ClassVar = WrongRanker
    fault: str = ""

    def candidates(self, examples: Examples) -> Iterator[Candidate]:
        if self.fault != "nothing":
            width = torch.full(
                [1] * (2 if self.fault == "matrix" else 1), math.inf if self.fault == "infinite" else 1.0
            )
            ranker = WrongRanker(width, examples.z.shape[1], self.fault)
            yield Candidate({}, ranker, math.nan if self.fault == "loss" else 1.0)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("short twice above rows list fractions", "router wrong ordered other columns than 0 to 5, each once"),
        ("narrow large nan", r"router wrong gave no probabilities of shape \(40, 6\), between 0 and 1"),
        ("matrix", "router wrong: a pool of 6 and tensors of shapes .* do not fit together"),
        ("infinite", "router wrong: its candidate has NaN or infinite values in width"),
        ("loss", "router wrong: its candidate has NaN or infinite values in loss"),
        ("nothing", "router wrong fitted nothing"),
    ],
)
def test_what_a_router_of_others_does_wrong_is_one_line(
    faults: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROUTERS._added, "wrong", f"{__name__}:Wrong")
    for fault in ["", *faults.split()]:
        refused = pytest.raises(InputError, match=message) if fault else nullcontext()
        with refused:
            fit_embeddings(*world(200, 1), POOL[:6], "none", FitOptions(router="wrong", options={"fault": fault}))


def test_a_fit_that_diverges_is_one_line() -> None:
    with pytest.raises(
        InputError, match=r"^the fit with p=32 and lambda=0 has diverged at learning_rate=1e\+30; give a smaller one$"
    ):
        fit_embeddings(*world(60, 4), POOL[:6], "none", FitOptions(learning_rate=1e30, epochs=2))


@pytest.mark.parametrize("diversity", ["ball", "sphere", "unbounded"])
@pytest.mark.parametrize(
    "extremes", [{"decay": 100}, {"radius": 1e6}, {"weights": (1e6,)}, {"radius": 1e6, "weights": (1e6,)}]
)
def test_the_largest_options_leave_a_fit_finite(diversity: Any, extremes: dict[str, Any]) -> None:
    """A fit that diverges does so by its learning rate, as the message says."""
    options = FitOptions(diversity=diversity, epochs=8, **extremes)
    router = fit_embeddings(*world(60, 4), POOL[:6], "none", options)
    assert bool(router.ranker.theta.isfinite().all() and router.ranker.heads.isfinite().all())


def test_a_weight_beyond_float32_is_one_line() -> None:
    with pytest.raises(InputError, match=r"^lambda=\(1e\+40,\) must be"):
        FitOptions(weights=(1e40,))


def test_a_fit_that_diverges_later_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fitted_router = fit_embeddings(*world(60, 4), POOL[:6], "none", FitOptions(learning_rate=1e10, epochs=6))
    assert all(bool(tensor.isfinite().all()) for tensor in (fitted_router.ranker.theta, fitted_router.ranker.heads))
    assert "has diverged at learning_rate=1e+10 in epoch 2: the best epoch before is kept" in caplog.text


def test_tensors_of_another_method_or_pool_are_refused(tmp_path: Path) -> None:
    for row in ROWS:
        router = fitted(row, 60)
        for index, wrong in enumerate(
            [replace(router, pool=router.pool[1:]), replace(router, method=ROWS[(ROWS.index(row) + 2) % 4].name)]
        ):
            wrong.save(tmp_path / f"{row.name}{index}")
            with pytest.raises(InputError, match=r"do not fit together|no setting|needs"):
                Router.load(tmp_path / f"{row.name}{index}")


def test_routers_of_earlier_versions_are_read(caplog: pytest.LogCaptureFixture) -> None:
    router = Router.load(ROOT / "docs" / "results" / "sprint")
    [record] = caplog.records
    assert "sprint was fitted by version 1 of contrastive; version 2, which is installed, may" in record.getMessage()
    assert router.method == "contrastive" and router.about["chosen"].keys() == {"p", "lambda"}
    assert not router.dense_first and router.chances(torch.randn(2, router.ranker.theta.shape[1])) is None


def test_a_router_of_another_version_of_its_method_is_said_to_be_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for row in ROWS:
        fitted(row, 60).save(tmp_path / row.name)
        Router.load(tmp_path / row.name)
    assert not caplog.records
    for row in ROWS:
        method = ROUTERS.load(row.name)
        monkeypatch.setattr(method, "version", method.version + 1)
        assert Router.load(tmp_path / row.name).method == row.name
    for row, record in zip(ROWS, caplog.records, strict=True):
        assert f"of {row.name}; version" in record.getMessage()


# --------------------------------------------------------------------------- greedy coverage against brute force


def joint_table(weights: list[float], success: list[list[float]]) -> dict[tuple[int, ...], float]:
    """P(outcomes of all columns) of a mixture of cases, by enumeration."""
    table = {}
    for outcomes in itertools.product((0, 1), repeat=len(success[0])):
        table[outcomes] = sum(
            weight * math.prod(s if outcome else 1 - s for s, outcome in zip(row, outcomes, strict=True))
            for weight, row in zip(weights, success, strict=True)
        )
    return table


def covered(table: dict[tuple[int, ...], float], columns: Any) -> float:
    return sum(chance for outcomes, chance in table.items() if any(outcomes[j] for j in columns))


@pytest.mark.parametrize("shared", [True, False])
def test_the_greedy_order_is_that_of_the_joint_table(shared: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    cases, pool, questions = 4, 5, 6
    weights = torch.rand(questions, cases, generator=generator, dtype=torch.float64)
    shape = (cases, pool) if shared else (questions, cases, pool)
    success = torch.rand(shape, generator=generator, dtype=torch.float64)
    orders = by_coverage(weights, success).tolist()
    for i, order in enumerate(orders):
        chance = (weights[i] / weights[i].sum()).tolist()
        table = joint_table(chance, (success if shared else success[i]).tolist())
        assert sum(table.values()) == pytest.approx(1)
        for step in range(pool):
            failed = {o: c for o, c in table.items() if not any(o[j] for j in order[:step])}
            conditional = {
                j: sum(c for o, c in failed.items() if o[j]) / sum(failed.values())
                for j in range(pool)
                if j not in order[:step]
            }
            assert conditional[order[step]] == pytest.approx(max(conditional.values()), abs=1e-9)
        for tries in range(1, pool + 1):
            best = max(covered(table, columns) for columns in itertools.combinations(range(pool), tries))
            greedy = covered(table, order[:tries])
            assert (1 - (1 - 1 / tries) ** tries) * best <= greedy + 1e-12 <= best + 1e-9


def test_coverage_without_shared_factors_sorts_by_probability() -> None:
    p = torch.rand(20, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p[:, 3] = p[:, 5]
    assert torch.equal(by_coverage(torch.ones(20, 1).double(), p[:, None]), by_probability(p))


def test_columns_that_fail_together_are_not_tried_one_after_another() -> None:
    """Three columns solve the same questions (0.5); one solves others (0.4): it is the second try."""
    weights, success = torch.full((1, 10), 0.1).double(), torch.zeros(10, 4).double()
    success[:5, :3], success[5:9, 3] = 1, 1
    assert by_coverage(weights, success).tolist() == [[0, 3, 1, 2]]
    assert by_probability(weights @ success).tolist() == [[0, 1, 2, 3]]


def test_ties_are_broken_by_pool_order() -> None:
    p = torch.tensor([[0.2, 0.5, 0.5, 0.5 + 1e-15]]).double()
    assert by_probability(p).tolist() == [[1, 2, 3, 0]]
    assert by_coverage(torch.ones(1, 1).double(), p[:, None]).tolist() == [[1, 2, 3, 0]]


# --------------------------------------------------------------------------- the model of outcomes


def model(generator: torch.Generator, width: int = 3, pool: int = 4, rank: int = 2, factors: int = 1) -> OutcomeModel:
    shapes = [(width,), (width,), (pool,), (pool, rank), (rank, width), (pool, factors)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[1] = tensors[1].abs() + 0.5
    return OutcomeModel(*tensors)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def literal_success(parameters: OutcomeModel, x: list[float], t: list[float]) -> list[float]:
    """σ(b_j + a_j · W x + s_j · t), number by number."""
    p = {name: tensor.tolist() for name, tensor in parameters.tensors.items()}
    x = [(value - m) / s for value, m, s in zip(x, p["mean"], p["scale"], strict=True)]
    wx = [sum(w * value for w, value in zip(row, x, strict=True)) for row in p["projection"]]
    return [
        sigmoid(
            b
            + sum(a * value for a, value in zip(effects, wx, strict=True))
            + sum(s * value for s, value in zip(loadings, t, strict=True))
        )
        for b, effects, loadings in zip(p["bias"], p["effects"], p["loadings"], strict=True)
    ]


@pytest.mark.parametrize("factors", [0, 1, 2, 3])
def test_the_likelihood_is_the_formula(factors: int) -> None:
    generator = torch.Generator().manual_seed(factors)
    parameters, z = model(generator, factors=factors), random_z(generator, 6, 4, True)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    points, weights = np.polynomial.hermite_e.hermegauss({0: 1, 1: 15, 2: 7, 3: 5}[factors])
    nodes = list(itertools.product(zip(points, weights / weights.sum(), strict=True), repeat=factors))
    expected, marginals = [], []
    for question, outcomes in zip(x.tolist(), z.tolist(), strict=True):
        likelihood, marginal = 0.0, [0.0] * 4
        for node in nodes:
            chance = math.prod(weight for _, weight in node)
            success = literal_success(parameters, question, [point for point, _ in node])
            factors_of = [p if o == 1 else 1 - p for p, o in zip(success, outcomes, strict=True) if not math.isnan(o)]
            likelihood += chance * math.prod(factors_of)
            marginal = [m + chance * p for m, p in zip(marginal, success, strict=True)]
        expected.append(-math.log(likelihood))
        marginals.append(marginal)
    assert parameters.negative_log_likelihood(x, z).tolist() == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(parameters.probabilities(x), torch.tensor(marginals, dtype=torch.float64))
    squares = {name: sum(v**2 for v in tensor.flatten().tolist()) for name, tensor in parameters.tensors.items()}
    penalty = 0.3 * (squares["effects"] + squares["projection"]) + 1e-4 * (squares["bias"] + squares["loadings"])
    assert float(parameters.objective(x, z, 0.3)) == pytest.approx(sum(expected) / 6 + penalty, rel=1e-10)


@pytest.mark.parametrize("factors", [1, 2])
def test_the_sequential_order_is_that_of_the_models_joint_distribution(factors: int) -> None:
    """Each next column is the most probable given that the earlier ones failed, by the table of all outcomes."""
    generator = torch.Generator().manual_seed(10 + factors)
    parameters = model(generator, pool=5, factors=factors)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    points, weights = np.polynomial.hermite_e.hermegauss({1: 15, 2: 7}[factors])
    nodes = list(itertools.product(zip(points, weights / weights.sum(), strict=True), repeat=factors))
    chances, differ = [math.prod(weight for _, weight in node) for node in nodes], 0
    for question, order in zip(x.tolist(), parameters.order(x).tolist(), strict=True):
        table = joint_table(chances, [literal_success(parameters, question, [p for p, _ in node]) for node in nodes])
        expected: list[int] = []
        while len(expected) < 5:
            failed = {o: c for o, c in table.items() if not any(o[j] for j in expected)}
            rest = [j for j in range(5) if j not in expected]
            expected.append(max(rest, key=lambda j: sum(c for o, c in failed.items() if o[j])))
        assert order == expected
        differ += order != by_probability(parameters.probabilities(torch.tensor([question]).double()))[0].tolist()
    assert differ  # from the order without regard to what failed


def test_the_quadrature_has_the_moments_of_a_normal_distribution() -> None:
    for factors in (1, 2, 3):
        t, chance = quadrature(factors)
        assert float(chance.sum()) == pytest.approx(1)
        covariance = (t * chance[:, None]).T @ t
        torch.testing.assert_close(covariance, torch.eye(factors).double())
        torch.testing.assert_close((t**4 * chance[:, None]).sum(0), torch.full((factors,), 3.0).double())


@pytest.mark.parametrize("factors", [0, 1])
def test_a_fit_is_a_minimum_of_the_objective(factors: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x, z = torch.randn(40, 3, generator=generator), random_z(generator, 40, 4, True)
    outcome_model = OutcomeModel.fit(x, z, 2, factors, 0.01, 0, 500)
    lowest = float(outcome_model.objective(x, z, 0.01))
    for name in ("bias", "effects", "projection", "loadings"):
        tensor = getattr(outcome_model, name)
        for index in np.ndindex(*tensor.shape):
            for step in (-1e-2, 1e-2):
                moved = tensor.clone()
                moved[index] += step
                assert float(replace(outcome_model, **{name: moved}).objective(x, z, 0.01)) > lowest - 1e-7


def test_factors_are_found_where_outcomes_of_a_question_agree() -> None:
    """Six columns: three share one hidden kind of question, three another; the text says nothing."""
    generator = np.random.default_rng(0)
    hidden = generator.normal(size=(600, 2))
    chance = 1 / (1 + np.exp(-4 * np.repeat(hidden, 3, axis=1)))
    z = torch.from_numpy((generator.random((600, 6)) < chance).astype(np.float32))
    x = torch.from_numpy(generator.normal(size=(600, 4)).astype(np.float32))
    losses = {}
    for factors in (0, 1, 2):
        outcome_model = OutcomeModel.fit(x[:300], z[:300], 0, factors, 0.01, 0, 200)
        losses[factors] = float(outcome_model.negative_log_likelihood(x[300:], z[300:]).mean())
    assert losses[0] > losses[1] + 0.05 and losses[1] > losses[2] + 0.05
    orders = outcome_model.order(x[300:])
    assert bool(((orders[:, 0] < 3) != (orders[:, 1] < 3)).all())  # the second try is of the other kind
    plain = OutcomeModel.fit(x[:300], z[:300], 0, 0, 0.01, 0, 200).order(x[300:])
    first_two = [mean_passes(order.tolist(), z[300:])["pass@2"] for order in (orders, plain)]
    assert first_two[0] >= first_two[1]


# --------------------------------------------------------------------------- neighbours


@pytest.mark.parametrize("weighting", ["uniform", "distance"])
def test_neighbours_are_weighed_as_written(weighting: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x, z = torch.randn(12, 3, generator=generator), random_z(generator, 12, 4, True)
    mean, scale = standardisation(x)
    known = [[o for o in column if not math.isnan(o)] for column in z.T.tolist()]
    rates = [sum(column) / len(column) for column in known]
    filled = torch.tensor([[rates[j] if math.isnan(o) else o for j, o in enumerate(row)] for row in z.tolist()])
    vectors = (x.double() - mean) / scale
    vectors = vectors / vectors.norm(dim=1, keepdim=True)
    ranker = Neighbours(mean, scale, vectors, filled.double(), 5, weighting, 2.0)
    queries = torch.randn(4, 3, generator=generator)
    expected, conditional = [], []
    for query in queries.double().tolist():
        point = [(v - m) / s for v, m, s in zip(query, mean.tolist(), scale.tolist(), strict=True)]
        length = math.sqrt(sum(v * v for v in point))
        distances = [math.dist([v / length for v in point], row) for row in vectors.tolist()]
        nearest = sorted(range(12), key=lambda i: distances[i])[:5]
        raw = {i: 1.0 if weighting == "uniform" else 1 / distances[i] for i in nearest}
        weights = [5 * raw.get(i, 0) / sum(raw.values()) + 2 / 12 for i in range(12)]
        weights = [weight / sum(weights) for weight in weights]
        rows = filled.tolist()
        expected.append([sum(w * row[j] for w, row in zip(weights, rows, strict=True)) for j in range(4)])
        order: list[int] = []
        while len(order) < 4:  # shares of solved questions among those that no earlier try solves
            left = [w * math.prod(1 - row[j] for j in order) for w, row in zip(weights, rows, strict=True)]
            gains = {j: sum(w * row[j] for w, row in zip(left, rows, strict=True)) for j in range(4) if j not in order}
            order.append(max(gains, key=lambda j: (round(gains[j], 9), round(expected[-1][j], 9), -j)))
        conditional.append(order)
    torch.testing.assert_close(ranker.probabilities(queries), torch.tensor(expected, dtype=torch.float64))
    assert ranker.order(queries).tolist() == by_probability(torch.tensor(expected).double()).tolist()
    assert replace(ranker, sequential=True).order(queries).tolist() == conditional


# --------------------------------------------------------------------------- calibration


def test_scores_are_their_formulas() -> None:
    generator = random.Random(0)
    p = [[generator.random() for _ in range(5)] for _ in range(40)]
    z = [[generator.choice([0.0, 1.0, 1.0, math.nan]) for _ in row] for row in p]
    cells = [(c, o) for row, outcomes in zip(p, z, strict=True) for c, o in zip(row, outcomes, strict=True) if o == o]
    scores = calibration.scores(torch.tensor(p).double(), torch.tensor(z))
    assert scores["brier"] == pytest.approx(sum((c - o) ** 2 for c, o in cells) / len(cells))
    assert scores["log_loss"] == pytest.approx(-sum(math.log(c if o else 1 - c) for c, o in cells) / len(cells))
    error = 0.0
    for b in range(10):
        bin_cells = [(c, o) for c, o in cells if b / 10 <= c < (b + 1) / 10]
        if bin_cells:
            gap = sum(c for c, _ in bin_cells) / len(bin_cells) - sum(o for _, o in bin_cells) / len(bin_cells)
            error += len(bin_cells) / len(cells) * abs(gap)
    assert scores["ece"] == pytest.approx(error)


def test_platt_scaling_finds_a_distortion() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.rand(3000, 4, generator=generator).double() * 0.8 + 0.1
    z = (torch.rand(true.shape, generator=generator) < true).float()
    z[torch.rand(z.shape, generator=generator) < 0.2] = math.nan
    distorted = (2 * true.logit() - 1).sigmoid()
    slope, offset = calibration.platt(distorted, z)
    assert slope == pytest.approx(0.5, abs=0.05) and offset == pytest.approx(0.5, abs=0.1)
    scores = calibration.cross_fitted(distorted, z)
    assert scores["after"]["ece"] < 0.02 < scores["before"]["ece"]

    def loss(slope: float, offset: float) -> float:
        penalty = 1e-3 * (math.log(slope) ** 2 + offset**2)
        return calibration.log_loss(calibration.rescale(distorted, slope, offset), z) + penalty

    lowest = loss(slope, offset)
    assert all(loss(slope + a, offset + b) >= lowest - 1e-9 for a in (-0.02, 0, 0.02) for b in (-0.02, 0, 0.02))
    only = calibration.platt(torch.tensor([[0.5, 0.6]]).double(), torch.tensor([[1.0, 1.0]]))
    assert all(map(math.isfinite, only)) and only[0] > 0
