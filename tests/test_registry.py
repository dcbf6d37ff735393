"""Methods, pruners, routers and preparations of installed packages, by their entry points."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lmeval_prune.architectures import map_model
from lmeval_prune.cli import main
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import foreign_methods
from lmeval_prune.errors import InputError
from lmeval_prune.grid.preparations import PREPARATIONS, Prune
from lmeval_prune.interventions import METHODS, HeadMask, load_intervention
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.registry import Registry
from lmeval_prune.sprint.options import ROUTERS, FitOptions
from lmeval_prune.sprint.router import Router, fit_embeddings
from tests.tiny_models import tiny

MAP = map_model(tiny("llama"))
MODULE = '''
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch

from lmeval_prune.grid.preparations import Preparation
from lmeval_prune.interventions import Intervention
from lmeval_prune.interventions.base import change_output
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.sprint.routers.knn import Knn


@dataclass(frozen=True)
class Halve(Intervention):
    factor: float = 0.5

    def attach(self, model_map, stack):
        for layer in model_map.attention:
            change_output(layer.o_proj, lambda x: x * self.factor, stack)


@dataclass(frozen=True)
class Ascending(Pruner):
    """Scores by the index, times a factor."""

    factor: float = 1.0

    def scores(self, model_map, text, parts, removed):
        return Scores({part.key: self.factor * torch.arange(part.size, dtype=torch.float64) for part in parts})


@dataclass(frozen=True, eq=False)
class Nearest(Knn.ranker):
    pass


@dataclass(frozen=True)
class Neighbours(Knn):
    ranker: ClassVar = Nearest

    def candidates(self, examples):
        for candidate in super().candidates(examples):
            values = {field.name: getattr(candidate.ranker, field.name) for field in fields(Nearest)}
            yield replace(candidate, ranker=Nearest(**values))


@dataclass(frozen=True)
class Nothing(Preparation):
    def make(self, lm, folder):
        pass

    def model_args(self, folder):
        return {}


@dataclass(frozen=True)
class Other(Intervention):
    """As `Halve`, but for what it does."""

    factor: float = 0.5

    def attach(self, model_map, stack):
        pass


@dataclass(frozen=True)
class HeadMask(Other):
    """Named as one of this package."""


@dataclass(frozen=True)
class Plain(Intervention):
    def attach(self, model_map, stack):
        pass


@dataclass(frozen=True)
class Longer(Ascending):
    def scores(self, model_map, text, parts, removed):
        return Scores({part.key: torch.zeros(part.size + 1) for part in parts})


@dataclass(frozen=True)
class Descending(Ascending):
    pass


@dataclass(frozen=True)
class Infinite(Ascending):
    def scores(self, model_map, text, parts, removed):
        return Scores({part.key: torch.full((part.size,), float("inf")) for part in parts})


'''
ADDED = [
    (METHODS, "interventions", "Halve"),
    (PRUNERS, "pruners", "Ascending"),
    (ROUTERS, "routers", "Neighbours"),
    (PREPARATIONS, "preparations", "Nothing"),
]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs a package with entry points, `{group: {name: path}}`, until the test ends."""
    number = iter(range(9))

    def install(points: dict[str, dict[str, str]]) -> None:
        package = f"elsewhere{next(number)}"
        folder = tmp_path / package
        about = folder / f"{package}-1.dist-info"
        about.mkdir(parents=True)
        (folder / "elsewhere.py").write_text(MODULE, encoding="utf-8")
        (folder / "reexporting.py").write_text("from elsewhere import *", encoding="utf-8")
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n", encoding="utf-8")
        lines = [
            f"[lmeval_prune.{group}]\n" + "".join(f"{n} = {path}\n" for n, path in rows.items())
            for group, rows in points.items()
        ]
        (about / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        for registry, *_ in ADDED:
            forget(registry)

    yield install
    monkeypatch.undo()
    for name in ("elsewhere", "reexporting"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    for registry, *_ in ADDED:
        forget(registry)


def forget(registry: Registry) -> None:
    """Let the registry read the entry points again."""
    vars(registry).pop("_declared", None)


@dataclass(frozen=True)
class Constant(Pruner):
    def scores(self, model_map: Any, text: Any, parts: Any, removed: Any) -> Scores:
        return Scores({part.key: torch.zeros(part.size) for part in parts})


def install_all(install: Any) -> None:
    install({group: {"mine": f"elsewhere:{name}"} for _, group, name in ADDED})


def test_a_class_is_known_by_the_name_of_its_entry_point(install: Any) -> None:
    before = [list(registry) for registry, *_ in ADDED]
    install_all(install)
    for (registry, _, name), names in zip(ADDED, before, strict=True):
        assert list(registry) == [*names, "mine"]
        assert registry.load("mine").__name__ == name
        assert registry.name_of(registry.load("mine"), "") == "mine"


def test_a_method_is_a_model_arg_and_an_artefact(install: Any, tmp_path: Path) -> None:
    install_all(install)
    (half,) = Arguments.of({"mine": 0.25}).interventions
    assert half.factor == 0.25 and half.settings() == {"factor": 0.25}
    half.save(tmp_path / "half.json", MAP)
    assert load_intervention(tmp_path / "half.json") == half
    assert Arguments.of({"mask": str(tmp_path / "half.json")}).interventions == (half,)


def test_a_pruner_is_a_method_of_the_commands(install: Any, tmp_path: Path, tiny_folder: Path) -> None:
    install_all(install)
    scores = tmp_path / "scores.json"
    method = ["--method", "mine", "--options", "factor=2"]
    assert main(["importance", "--pretrained", str(tiny_folder), *method, "--output", str(scores)]) == 0
    assert Plan.load(scores).provenance["method"] == "mine"
    prune = ["prune", "--pretrained", str(tiny_folder), "--ratio", "0.25", "--budget", "heads"]
    for number, more in enumerate((method, ["--scores", str(scores)])):
        plan = tmp_path / f"plan{number}.json"
        assert main([*prune, *more, "--output", str(plan)]) == 0
        mask = Plan.load(plan).converted(HeadMask)
        assert str(mask) == "L0H0+L1H0"  # the lowest of each layer


def test_a_name_of_this_package_stays(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install({"pruners": {"magnitude": "elsewhere:Ascending", "with space": "elsewhere:Ascending"}})
    assert PRUNERS["magnitude"] == "lmeval_prune.pruners.baselines:Magnitude"
    assert "with space" not in PRUNERS and len(caplog.messages) == 2


def test_classes_of_one_name_share_no_answers_and_no_artefacts(install: Any, tmp_path: Path) -> None:
    install({"interventions": {"mine": "elsewhere:Halve", "masked": "elsewhere:HeadMask"}})
    first = METHODS.load("mine")(0.5)
    first.save(tmp_path / "first.json", MAP)
    HeadMask("L0H1").save(tmp_path / "mask.json", MAP)
    assert load_intervention(tmp_path / "mask.json") == HeadMask("L0H1")  # although `masked` is called HeadMask, too
    reported = first.report(MAP)["mine"]
    assert reported == {"class": "elsewhere:Halve", "version": 1, "factor": 0.5}

    other = importlib.import_module("elsewhere").Other(0.5)
    assert other.settings() == first.settings() and other.identity(MAP) != first.identity(MAP)
    with pytest.raises(InputError):
        other.load(tmp_path / "first.json")


def test_a_method_without_settings_is_switched_on(install: Any) -> None:
    install({"interventions": {"mine": "elsewhere:Plain"}})
    for value in (True, "true", {}):
        assert len(Arguments.of({"mine": value}).interventions) == 1


@pytest.mark.parametrize("kind", ["Longer", "Infinite"])
def test_scores_that_would_be_misread_are_refused(install: Any, tiny_folder: Path, tmp_path: Path, kind: str) -> None:
    install({"pruners": {"mine": f"elsewhere:{kind}"}})
    words = ["--pretrained", str(tiny_folder), "--method", "mine", "--output", str(tmp_path / "out.json")]
    assert main(["prune", *words, "--ratio", "0.25", "--budget", "heads"]) == 2


def test_a_router_knows_its_class(install: Any, tmp_path: Path) -> None:
    install_all(install)
    options = FitOptions(router="mine", options={"k": 1, "weighting": "uniform", "prior": 1}, validation=0)
    x, z = torch.randn(20, 4), (torch.rand(20, 3) < 0.5).float()
    router = fit_embeddings(x, z, ["dense", "L0H0", "L0H1"], "encoder", options)
    router.save(tmp_path / "router")
    assert Router.load(tmp_path / "router").method == "mine"
    path = tmp_path / "router/router.json"
    content = json.loads(path.read_text())
    assert content["class"] == "elsewhere:Nearest"
    path.write_text(json.dumps(content | {"class": "other:Nearest"}))
    with pytest.raises(InputError, match="router=mine is elsewhere:Nearest now, and was other:Nearest"):
        Router.load(tmp_path / "router")


def test_a_program_adds_a_class_without_a_package() -> None:
    registry = Registry("lmeval_prune.none", "method", {"a": PRUNERS["magnitude"]})
    registry["mine"] = Constant
    registry["other"] = f"{__name__}:Constant"
    assert registry.load("mine") is registry.load("other") is Constant
    assert list(registry) == ["a", "mine", "other"] and len(registry) == 3
    with pytest.raises(InputError):
        registry["a"] = Constant


def test_pruners_of_one_name_share_no_results(
    install: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    install({"pruners": {"mine": "elsewhere:Ascending"}})
    scores, words = tmp_path / "scores.json", ["--pretrained", str(tiny_folder)]
    assert main(["importance", *words, "--method", "mine", "--output", str(scores)]) == 0
    prune, options = Prune(method="mine", ratio=0.25, budget="heads"), DistillOptions("x", "y", method="mine")
    before, distilled = prune.identity(), foreign_methods(options)
    assert distilled == {"mine_class": "elsewhere:Ascending, version 1"}
    assert not foreign_methods(DistillOptions("x", "y", method="flap"))
    monkeypatch.setattr(PRUNERS, "_declared", {"mine": {"elsewhere:Descending": "other"}})
    assert prune.identity() != before and foreign_methods(options) != distilled
    more = ["--scores", str(scores), "--ratio", "0.25", "--budget", "heads", "--output", str(tmp_path / "plan.json")]
    assert main(["prune", *words, *more]) == 2
    assert "score again" in capsys.readouterr().err
