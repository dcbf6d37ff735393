"""Methods, pruners, routers and preparations of installed packages, by their entry points."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lmeval_prune.architectures import map_model
from lmeval_prune.cli import main
from lmeval_prune.errors import InputError
from lmeval_prune.grid.preparations import PREPARATIONS
from lmeval_prune.interventions import METHODS, HeadMask, load_intervention
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.pruners.base import Pruner, make_pruner
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.registry import Registry
from lmeval_prune.sprint.options import FitOptions
from lmeval_prune.sprint.routers.table import ROUTERS
from tests.tiny_models import tiny

MAP = map_model(tiny("llama"))
MODULE = '''
from dataclasses import dataclass

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
    """Scores by the place, times a factor."""

    factor: float = 1.0

    def scores(self, model_map, text, parts, removed):
        return Scores({part.key: self.factor * torch.arange(part.size, dtype=torch.float64) for part in parts})


@dataclass(frozen=True)
class Neighbours(Knn):
    pass


@dataclass(frozen=True)
class Nothing(Preparation):
    def make(self, lm, folder):
        pass

    def model_args(self, folder):
        return {}


class Undecorated(Pruner):
    factor: float = 1.0

    def scores(self, model_map, text, parts, removed):
        return Scores({})


@dataclass(frozen=True)
class Unfinished(Pruner):
    pass


def function():
    pass
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
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n", encoding="utf-8")
        lines = [
            f"[lmeval_prune.{group}]\n" + "".join(f"{n} = {path}\n" for n, path in rows.items())
            for group, rows in points.items()
        ]
        (about / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        for registry, *_ in ADDED:
            vars(registry).pop("_paths", None)

    yield install
    monkeypatch.undo()
    sys.modules.pop("elsewhere", None)
    importlib.invalidate_caches()
    for registry, *_ in ADDED:
        vars(registry).pop("_paths", None)


def install_all(install: Any) -> None:
    install({group: {"mine": f"elsewhere:{name}"} for _, group, name in ADDED})


def test_a_class_is_known_by_the_name_of_its_entry_point(install: Any) -> None:
    before = [list(registry) for registry, *_ in ADDED]
    install_all(install)
    for (registry, _, name), names in zip(ADDED, before, strict=True):
        assert list(registry) == [*names, "mine"]
        assert registry.load("mine").__name__ == name
        assert registry.name_of(registry.load("mine"), "") == "mine"
        assert dict(registry.classes())["mine"] is registry.load("mine")


def test_a_method_is_a_model_arg_and_an_artefact(install: Any, tmp_path: Path) -> None:
    install_all(install)
    (half,) = Arguments.of({"mine": 0.25}).interventions
    assert half.factor == 0.25 and half.settings() == {"factor": 0.25}
    half.save(tmp_path / "half.json", MAP)
    assert load_intervention(tmp_path / "half.json") == half
    assert Arguments.of({"mask": str(tmp_path / "half.json")}).interventions == (half,)
    with pytest.raises(InputError, match=re.escape("mine.factor='much' must be a number")):
        Arguments.of({"mine": "much"})


def test_a_pruner_is_a_method_of_the_commands(
    install: Any, tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    words = [*prune, "--scores", str(scores), "--method", "magnitude", "--output", str(tmp_path / "other.json")]
    capsys.readouterr()
    assert main(words) == 2
    assert "mine" in capsys.readouterr().err


def test_a_router_is_an_option_of_fit(install: Any) -> None:
    install_all(install)
    assert type(FitOptions(router="mine", options={"k": 3}).method()).__name__ == "Neighbours"


def test_a_name_of_this_package_stays(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install({"pruners": {"magnitude": "elsewhere:Ascending", "with space": "elsewhere:Ascending"}})
    assert PRUNERS["magnitude"] == "lmeval_prune.pruners.magnitude:Magnitude"
    messages = caplog.messages
    assert "elsewhere0" in messages[0] and "'magnitude' in lmeval_prune.pruners" in messages[0]
    assert "'with space'" in messages[1] and "with space" not in PRUNERS


def test_the_first_of_two_packages_counts(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install({"pruners": {"mine": "elsewhere:Undecorated"}})
    install({"pruners": {"mine": "elsewhere:Ascending"}})  # before the other one on the path
    assert PRUNERS["mine"] == "elsewhere:Ascending"
    assert re.search("elsewhere0 declares 'mine'.*is elsewhere:Ascending already", caplog.text)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "nowhere:Class",
            r"method=mine: nowhere:Class cannot be imported \(ModuleNotFoundError.*uninstall its package",
        ),
        ("elsewhere:Absent", "cannot be imported"),
        ("elsewhere:function", "is no subclass of lmeval_prune.pruners.base.Pruner"),
        ("elsewhere:Halve", "is no subclass"),
        ("elsewhere:Undecorated", "is no dataclass; decorate it"),
        ("elsewhere:Unfinished", "does not implement scores"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    install: Any, path: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    install({"pruners": {"mine": path}})
    with pytest.raises(InputError, match=message) as raised:
        make_pruner("mine", {})
    assert "\n" not in str(raised.value)
    assert "mine" not in dict(PRUNERS.classes())  # and keeps no other from being used
    assert str(raised.value) in caplog.text


def test_a_broken_method_leaves_others_usable(install: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    install({"interventions": {"mine": "nowhere:Class"}})
    mask = HeadMask("L0H1")
    mask.save(tmp_path / "mask.json", MAP)
    assert load_intervention(tmp_path / "mask.json") == mask
    assert "nowhere:Class" in caplog.text


@pytest.mark.parametrize("name", ["dtype", "engine", "mask"])
def test_a_method_with_the_name_of_a_model_arg_is_refused(install: Any, name: str) -> None:
    install({"interventions": {name: "elsewhere:Halve"}})
    with pytest.raises(InputError, match=f"{name} is a model_arg already; give the entry point of elsewhere:Halve"):
        Arguments.of({"pretrained": "x"}).refuse_misspelt({"dtype"}, None)


def test_a_program_adds_a_class_without_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry("lmeval_prune.none", "method", "lmeval_prune.pruners.base:Pruner", {"a": PRUNERS["magnitude"]})
    registry["mine"] = f"{__name__}:Constant"
    globals()["Constant"] = dict(PRUNERS.classes())["random"]
    monkeypatch.setitem(registry, "other", "m:C")
    assert registry.load("mine") is Constant  # noqa: F821
    assert registry["other"] == "m:C" and len(registry) == 3
    assert issubclass(registry.load("a"), Pruner)
