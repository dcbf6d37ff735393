"""Every router method through the same tests, and the formulas of each against a literal reference."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from lmeval_prune import InputError
from lmeval_prune.cli import main
from lmeval_prune.sprint.encoder import load_encoder
from lmeval_prune.sprint.fit import fit, fit_embeddings
from lmeval_prune.sprint.options import FitOptions
from lmeval_prune.sprint.outcomes import OutcomeStore
from lmeval_prune.sprint.router import Router
from lmeval_prune.sprint.routers.base import Candidate, Examples, Ranker, RouterMethod
from lmeval_prune.sprint.routers.contrastive import NearestHeads
from lmeval_prune.sprint.routers.knn import Neighbours, standardisation
from lmeval_prune.sprint.routers.table import ROUTERS
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
    with pytest.raises(InputError, match="need a validation split"):
        FitOptions(router=row.name, validation=0).method()
    options(row, validation=0.0).method()
    quick = {"epochs": 2} if row.flat else {}
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
        (["--router", "knn", "--validation", "0"], "several values of k need a validation split"),
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
            [replace(router, pool=router.pool[1:]), replace(router, method=ROWS[1 - ROWS.index(row)].name)]
        ):
            wrong.save(tmp_path / f"{row.name}{index}")
            with pytest.raises(InputError, match=r"do not fit together|no setting|needs"):
                Router.load(tmp_path / f"{row.name}{index}")


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
