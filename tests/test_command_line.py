"""The real commands, as a user types them: found by lm-eval, in a wheel and in place, on one rank and two."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import hatchling.build
import pytest
from lm_eval.__main__ import cli_evaluate

from lmeval_prune import InputError, __version__
from lmeval_prune.checkpoints import embedded
from lmeval_prune.cli import main
from lmeval_prune.plugin import registration
from tests.conftest import ROOT


def call(*command: str, python: str = sys.executable, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([python, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)


def lm_eval(*words: str, cwd: Path) -> int:
    """Run lm-eval's command line in this process, as its script does; return the exit status."""
    registration.register()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["lm_eval", *words])
        patch.setattr(sys, "excepthook", sys.__excepthook__)
        # lm-eval adds a handler once per process, which keeps the standard error of that time
        patch.setattr("lm_eval.utils._LOGGING_CONFIGURED", False)
        patch.setattr(logging.getLogger("lm_eval"), "handlers", [])
        try:
            cli_evaluate()
        except InputError as error:
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
    return 0


def evaluate(
    folder: Path,
    cwd: Path,
    model: str = "pruned-hf",
    arguments: str = "",
    launch: Callable[[list[str], Path], str] | None = None,
):
    """Run a tiny model on `prune_tiny`, in this process or as `launch` does; return metrics and pruning of the results."""
    output = cwd / "out"
    command = ["--model", model, "--model_args", f"pretrained={folder},dtype=float64{arguments}"]
    command += ["--tasks", "prune_tiny", "--limit", "6", "--batch_size", "4", "--device", "cpu"]
    command += ["--gen_kwargs", "max_gen_toks=8", "--output_path", str(output), "--log_samples"]
    if launch is None:
        assert lm_eval(*command, cwd=cwd) == 0
    else:
        assert "prune_tiny_words" in launch(command, cwd)
    (path,) = output.rglob("results_*.json")
    results = json.loads(path.read_text())
    samples = {
        p.name.split("_2")[0]: sorted(json.loads(line)["doc_id"] for line in p.read_text().splitlines())
        for p in output.rglob("samples_*.jsonl")
    }
    assert all(ids == list(range(6)) for ids in samples.values()), samples
    return results["results"], results["config"].get("pruning")


def started(python: str, *launcher: str) -> Callable[[list[str], Path], str]:
    """Return what runs a command in a process of its own and returns its standard output."""

    def launch(command: list[str], cwd: Path) -> str:
        done = call(*launcher, *command, python=python, cwd=cwd)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return launch


@pytest.fixture(scope="module")
def dense(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    return evaluate(tiny_folder, tmp_path_factory.mktemp("hf"), model="hf")


def script(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def test_built_in_models_still_work_and_agree_with_no_heads(tiny_folder: Path, tmp_path: Path, dense) -> None:
    """`lm_eval` as it is installed, which finds us by the bridge."""
    metrics, pruning = evaluate(tiny_folder, tmp_path, launch=started(script("lm_eval")))
    assert metrics == dense[0]
    assert dense[1] is None and pruning["heads"] == []


def test_several_fields_of_a_method_are_given_as_json(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = {"pretrained": str(tiny_folder), "heads": {"heads": "L0H*", "allow_empty_layer": True}}
    command = ["--model", "pruned-hf", "--model_args", json.dumps(arguments), "--limit", "1"]
    command += ["--tasks", "prune_tiny_choice", "--device", "cpu", "--output_path", str(tmp_path)]
    assert lm_eval(*command, cwd=tmp_path) == 0
    (path,) = tmp_path.rglob("results_*.json")
    assert json.loads(path.read_text())["config"]["pruning"]["heads"] == ["L0H0", "L0H1", "L0H2", "L0H3"]


@pytest.mark.long
def test_tries_on_two_ranks_are_those_on_one(tiny_folder: Path, tmp_path: Path) -> None:
    """Seven documents, so that one rank is padded: each has its four tries, sampled or greedy, and the same ones."""
    results = {}
    for kind, settings in (("sampled", "max_gen_toks=8"), ("greedy", "max_gen_toks=8,do_sample=false,temperature=0")):
        for ranks in (1, 2):
            output = tmp_path / f"{kind}-{ranks}"
            launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2"] if ranks == 2 else []
            command = [*launcher, "-m", "lm_eval", "--model", "pruned-hf", "--device", "cpu", "--limit", "7"]
            command += ["--model_args", f"pretrained={tiny_folder},dtype=float64,engine=batched"]
            command += ["--tasks", "prune_tiny_words_pass4", "--gen_kwargs", settings, "--output_path", str(output)]
            done = call(*command, "--log_samples", cwd=tmp_path, ACCELERATE_USE_CPU="true")
            assert done.returncode == 0, done.stderr[-3000:]
            (path,) = output.rglob("samples_*.jsonl")
            rows = {row["doc_id"]: row["filtered_resps"][0] for row in map(json.loads, path.read_text().splitlines())}
            assert sorted(rows) == list(range(7)) and all(len(tries) == 4 for tries in rows.values())
            results[kind, ranks] = rows
    for kind, distinct in (("sampled", True), ("greedy", False)):
        assert results[kind, 1] == results[kind, 2]
        assert any(len(set(tries)) > 1 for tries in results[kind, 1].values()) == distinct


@pytest.mark.long
def test_without_the_bridge_lm_eval_does_not_know_us(tmp_path: Path) -> None:
    off = call("-m", "lm_eval", "--model", "pruned-hf", "--tasks", "piqa", cwd=tmp_path, LMEVAL_PRUNE_NO_BRIDGE="1")
    assert off.returncode != 0 and "no model for this name found" in off.stderr


def test_an_error_that_is_no_mistake_is_one_line_and_debug_shows_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(name: str) -> str:
        raise KeyError(f"{name}\nsecond line")

    monkeypatch.setattr(embedded, "find", fail)
    assert main(["models", "x"]) == 1
    line = capsys.readouterr().err
    assert line.startswith("lmeval-prune: error: KeyError: ") and line.count("\n") == 1
    assert main(["models", "--debug", "x"]) == 1
    shown = capsys.readouterr().err
    assert "in fail" in shown and shown.endswith(line)


def test_a_configuration_of_lm_eval_and_its_check_of_tasks(tiny_folder: Path, tmp_path: Path, capsys) -> None:
    """`lm_eval validate`, and `lm_eval run --config` with heads as a YAML list."""
    assert lm_eval("validate", "--tasks", "prune_gsm8k,prune_tiny", cwd=tmp_path) == 0
    assert "All tasks found and valid" in capsys.readouterr().out
    config = (ROOT / "configs" / "smollm2_pruned.yaml").read_text()
    config = config.replace("smollm2-135m", str(tiny_folder)).replace("[L5H3, L15H0]", "[L0H3, L1H0]")
    (tmp_path / "run.yaml").write_text(config + "limit: 2\ndevice: cpu\noutput_path: configured\n")
    assert lm_eval("run", "--config", "run.yaml", cwd=tmp_path) == 0
    (path,) = (tmp_path / "configured").rglob("results_*.json")
    assert json.loads(path.read_text())["config"]["pruning"]["heads"] == ["L0H3", "L1H0"]


def test_the_source_archive_can_build_the_wheel() -> None:
    from hatchling.builders.sdist import SdistBuilder

    files = {file.relative_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    assert {"lmeval_prune/tasks/data.py", "lmeval_prune/kernels/dispatch.py", "lmeval_prune/configs/README.md"} <= files
    assert {"tasks/data.py", "lmeval_prune/plugin/bridge.pth", "lmeval_prune/_hatch_hook.py", "LICENSE"} <= files
    assert not any(name.startswith((".venv", "out/")) for name in files)


def test_masks_are_written_and_listed(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, model = tmp_path / "mask.json", ["--pretrained", str(tiny_folder)]
    assert main(["mask", *model, "--heads", "L0H1-2", "--output", str(path)]) == 0
    assert "2 of 8 heads of tiny-llama" in capsys.readouterr().out
    assert json.loads(path.read_text())["settings"] == {"heads": ["L0H1", "L0H2"]}
    assert main(["heads", *model]) == 0
    listed = capsys.readouterr().out
    assert "8 heads in 2 attention layers of tiny-llama (llama)" in listed
    assert "L1  4 heads, 2 key-value heads, head_dim 8, 48 channels  model.layers.1.self_attn" in listed
    assert main(["mask", "--pretrained", str(tmp_path), "--heads", "L0H1", "--output", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lmeval-prune: error: cannot read the model") and error.count("\n") == 1


# --------------------------------------------------------------------------- installed from a wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A virtual environment with our wheel; every other package comes from this one's folder."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        wheel = folder / hatchling.build.build_wheel(str(folder))
    venv.EnvBuilder(symlinks=True).create(folder / "env")
    python = str(folder / "env" / "bin" / "python")
    (site,) = (folder / "env" / "lib").glob("python3*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-compile", str(wheel)], check=True, capture_output=True)
    (site / "zz_others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return python, wheel


def test_the_wheel_holds_the_package_and_the_bridge_and_nothing_beside(installed) -> None:
    names = zipfile.ZipFile(installed[1]).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"lmeval_prune", "_lmeval_prune_bridge.pth", f"lmeval_prune-{__version__}.dist-info"}
    for name in (
        "tasks/data.py",
        "tasks/__init__.py",
        "tasks/gsm8k/prune_gsm8k.yaml",
        "tasks/tiny/words.jsonl",
        "tasks/_chat_answer",
        "kernels/__init__.py",
        "sprint/report.md.jinja",
        "configs/smollm2_pruned.yaml",
    ):
        assert f"lmeval_prune/{name}" in names
    assert not any("shared" in name or name.endswith("_hatch_hook.py") for name in names)


def test_the_wheel_is_found_by_lm_eval(installed, tiny_folder: Path, tmp_path: Path) -> None:
    python, _ = installed
    script = (
        "import importlib.util as u, json, lmeval_prune\n"
        "beside = [n for n in ('tasks', 'configs') if u.find_spec(n)]\n"
        "import lm_eval\n"
        f"r = lm_eval.simple_evaluate(model='pruned-hf', model_args='pretrained={tiny_folder},heads=L0H1', "
        "tasks=['prune_tiny_choice'], limit=2, device='cpu')\n"
        "from lm_eval.api.registry import model_registry\n"
        "from lm_eval.tasks import TaskManager\n"
        "registered = ['vllm' in model_registry, 'prune_gsm8k' in TaskManager()._index]\n"
        "print(json.dumps([lmeval_prune.__file__, beside, r['config']['pruning']['heads'], *registered]))"
    )
    done = call("-c", script, python=python, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    file, beside, heads, others, task = json.loads(done.stdout.splitlines()[-1])
    assert "site-packages" in file and str(ROOT) not in file
    assert beside == [] and heads == ["L0H1"] and others and task


@pytest.mark.long
def test_the_bridge_stands_aside_and_survives_probes(installed, tmp_path: Path) -> None:
    """A probe for the module must not use up the hook; a name that is already registered stays."""
    script = (
        "import importlib.util, sys\n"
        "names = lambda: [type(f).__name__ for f in sys.meta_path]\n"
        "assert '_Finder' in names() and 'torch' not in sys.modules and 'lm_eval' not in sys.modules\n"
        "importlib.util.find_spec('lm_eval.tasks.manager')\n"
        "import lm_eval.api.registry as r\n"
        "import lm_eval.models\n"
        "from lm_eval.tasks import TaskManager\n"
        "assert '_Finder' not in names()\n"
        "assert 'pruned-hf' in r.model_registry\n"
        "r.model_registry._objs['pruned-hf'] = 'elsewhere:Model'\n"
        "from lmeval_prune.plugin import registration; registration.register()\n"
        "assert r.model_registry._objs['pruned-hf'] == 'elsewhere:Model'\n"
        "assert hasattr(TaskManager.__init__, '_lmeval_prune')\n"
        "print('fine')"
    )
    done = call("-c", script, python=installed[0], cwd=tmp_path)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


@pytest.mark.long
def test_a_failing_hook_warns_and_lets_lm_eval_go_on(installed, tmp_path: Path) -> None:
    script = (
        "import sys, types\n"
        "sys.modules['lmeval_prune.plugin.registration'] = types.ModuleType('registration')\n"
        "import lm_eval.models\n"
        "from lm_eval.api.registry import get_model\n"
        "print('hf' in lm_eval.models.MODEL_MAPPING)"
    )
    done = call("-c", script, python=installed[0], cwd=tmp_path)
    assert done.stdout.strip() == "True" and "could not register itself" in done.stderr
