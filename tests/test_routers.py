"""Every router method through the same tests, and the formulas of each against a literal reference."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmeval_prune import InputError
from lmeval_prune.sprint.options import ROUTERS, FitOptions
from lmeval_prune.sprint.router import Router, fit_embeddings
from lmeval_prune.sprint.routers.contrastive import NearestHeads
from lmeval_prune.sprint.routers.knn import Neighbours, standardisation
from lmeval_prune.tasks.tries import pass_ordered
from tests.test_sprint import POOL, random_z, world


@dataclass(frozen=True)
class Row:
    """A method, one quick value for each of its options, and the options of `FitOptions` that are the method's."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    flat: dict[str, Any] = field(default_factory=dict)


ROWS = (
    Row("contrastive", flat={"sizes": (8,), "weights": (1e-3,), "epochs": 60}),
    Row("knn", {"k": 10, "weighting": "uniform", "prior": 1}),
)
BY_NAME = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def options(row: Row, **settings: Any) -> FitOptions:
    return FitOptions(router=row.name, options=row.options, **{**row.flat, **settings})


def fitted(row: Row, questions: int = 200, seed: int = 1, **settings: Any) -> Router:
    return fit_embeddings(*world(questions, seed), POOL[:6], "none", options(row, **settings))


def pass_at(router: Router, x: torch.Tensor, z: torch.Tensor, k: int) -> float:
    """pass@k of a router's order of the columns of `z`, (questions, columns), at the questions' embeddings `x`."""
    rows = zip(router.ranking(x), z.tolist(), strict=True)
    return sum(pass_ordered([bool(row[j]) for j in order], k) for order, row in rows) / len(z)


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
        assert other.about["chosen"] == first.about["chosen"]
    assert loaded.method == row.name and loaded.sha256


@BY_NAME
def test_validation_chooses(row: Row) -> None:
    method = FitOptions(router=row.name).method()
    several = {name: value for name, value in vars(method).items() if isinstance(value, tuple) and len(value) > 1}
    assert several
    with pytest.raises(InputError):
        fit_embeddings(*world(60, 4), POOL[:6], "none", FitOptions(router=row.name, validation=0))
    with pytest.raises(InputError):  # a share that rounds to no question
        fit_embeddings(*world(8, 4), POOL[:6], "none", FitOptions(router=row.name, validation=0.01))
    quick = {"epochs": 2} if row.flat else {}
    router = fit_embeddings(*world(60, 4), POOL[:6], "none", FitOptions(router=row.name, **quick))
    tried, chosen = router.about["tried"], router.about["chosen"]
    best = max(sum(setting["validation_pass"].values()) for setting in tried)
    (winner,) = [setting for setting in tried if chosen.items() <= setting.items()]
    assert len(tried) > 2 and sum(winner["validation_pass"].values()) == best
    assert winner["validation_pass"] == router.about["validation_pass"]


def test_a_fit_that_diverges_is_refused() -> None:
    with pytest.raises(InputError):
        fit_embeddings(*world(60, 4), POOL[:6], "none", FitOptions(learning_rate=1e30, epochs=2))


def test_a_fit_that_diverges_later_keeps_its_best_epoch() -> None:
    fitted_router = fit_embeddings(*world(60, 4), POOL[:6], "none", FitOptions(learning_rate=1e10, epochs=6))
    assert all(bool(tensor.isfinite().all()) for tensor in (fitted_router.ranker.theta, fitted_router.ranker.heads))


def test_tensors_of_another_method_or_pool_are_refused(tmp_path: Path) -> None:
    for row in ROWS:
        router = fitted(row, 60)
        replace(router, method=ROWS[1 - ROWS.index(row)].name).save(tmp_path / row.name)
        with pytest.raises(InputError):
            Router.load(tmp_path / row.name)
        with pytest.raises(InputError):
            replace(router, pool=router.pool[1:]).ranking(world(5, 3)[0])


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
    expected = []
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
    torch.testing.assert_close(ranker.probabilities(queries), torch.tensor(expected, dtype=torch.float64))
    assert ranker.order(queries).tolist() == [sorted(range(4), key=lambda j: -row[j]) for row in expected]
