"""Tests run on one thread, offline, and keep everything they write in temporary folders."""

import copy
import functools
import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("LMEVAL_PRUNE_DATA", None)

import hypothesis
import pytest
import torch
import torch.utils.collect_env

# The same examples for the same code, so that a run can be repeated; HYPOTHESIS_PROFILE=default draws new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

torch.set_num_threads(1)
# lm-eval describes the machine after each evaluation, by programs that take seconds
torch.utils.collect_env.get_pretty_env_info = functools.cache(torch.utils.collect_env.get_pretty_env_info)
# flushing the disk takes milliseconds for each file, and is for machines that lose power; tests lose processes
os.fsync = lambda handle: None
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():  # kernels run in the interpreter; before triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
# folders of lm-eval's own tasks that tests of this process name
LM_EVAL_TASKS = {"aime", "arc", "gpqa", "gsm8k", "hellaswag", "minerva_math", "openbookqa", "piqa", "super_glue",
                 "wikitext", "winogrande"}  # fmt: skip


def pytest_collection() -> None:
    """Import modules and collect tests without garbage collections, which took longer than all else of it."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Prepare what all tests share."""
    read_few_tasks()
    read_problems_once()
    compile_templates_once()
    prepare_triton_once()
    freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free what a file of tests has left."""
    if nextitem is None or nextitem.path != item.path:
        freeze()


def freeze() -> None:
    """Leave what is there now out of further garbage collections: lm-eval asks for one again and again."""
    gc.collect()
    gc.freeze()


def read_few_tasks() -> None:
    """Let lm-eval's index of tasks read this package's files once, and few of its own 14,000, which take seconds.

    Tests that start lm-eval in a process of its own read them all.
    """
    index: Any = sys.modules.get("lm_eval.tasks._index")
    if not hasattr(index, "load_yaml"):
        return
    load, lm_eval_folder = index.load_yaml, Path(index.__file__).parent
    once = functools.cache(load)

    def load_few(path: Path, **options: Any) -> Any:
        if path.is_relative_to(lm_eval_folder) and path.relative_to(lm_eval_folder).parts[0] not in LM_EVAL_TASKS:
            raise LookupError(path)  # which the index passes over
        return copy.deepcopy(once(path, **options)) if path.is_relative_to(ROOT) else load(path, **options)

    index.load_yaml = load_few


def read_problems_once() -> None:
    """Keep splits of the real problems, which no test changes; all of Math23K takes a second to read."""
    data: Any = sys.modules.get("lmeval_prune.tasks.data")
    if data is None:
        return
    load, read = data.load, data._all_documents
    once = functools.cache(lambda name, split: load(name, split, SHARED))
    read_shared = functools.lru_cache(maxsize=16)(lambda name, split: read(name, data.DATA[name], split, SHARED))

    def are_real(folder: Any) -> bool:
        return str(folder or os.environ.get("LMEVAL_PRUNE_DATA")) == str(SHARED)

    @functools.wraps(load)
    def load_once(name: str, split: str = "test", data_dir: Any = None) -> Any:
        return once(name, split) if are_real(data_dir) else load(name, split, data_dir)

    def read_once(name: str, of: Any, split: str, folder: Any) -> Any:
        return read_shared(name, split) if of is data.DATA[name] and are_real(folder) else read(name, of, split, folder)

    data.load, data._all_documents = load_once, read_once


def compile_templates_once() -> None:
    """Keep the compiled templates of tasks; lm-eval 0.4 compiles one anew for each field of each question."""
    utils: Any = sys.modules.get("lm_eval.utils")
    if hasattr(utils, "env"):
        utils.env.from_string = functools.cache(utils.env.from_string)


def prepare_triton_once() -> None:
    """Let triton's interpreter replace its language for each launch, and not again for each function that it calls."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if not all(hasattr(interpreter, name) for name in ("_LangPatchScope", "_patch_lang", "tl")):
        return
    replace, language = interpreter._patch_lang, interpreter.tl

    def replace_once(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if value is language or value is language.core]
        is_done = not any(language.core.is_builtin(module.load) for module in modules)
        return interpreter._LangPatchScope() if is_done else replace(function)

    interpreter._patch_lang = replace_once


def pytest_unconfigure() -> None:
    """Let the end of Python collect them."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real problems beside the checkout; CI always has them."""
    if not SHARED.is_dir():
        pytest.skip(f"no data folder at {SHARED}")
    return SHARED


def task_manager(metadata: dict[str, Any] | None = None) -> Any:
    """Return a task manager of our tasks alone: lm-eval's index takes 15 seconds of CPU time to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(ROOT / "tasks"), include_defaults=False, metadata=metadata)


def strict_json(path: Path) -> Any:
    """Return the content of a JSON file; NaN and infinity, which JSON lacks and Python reads, are errors."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


def file_contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of a folder's files by name, without hidden ones."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def run_command(*words: object) -> int:
    """Run a command of `lmeval-prune` in this process, and return its exit status."""
    from lmeval_prune.cli import main

    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def no_pictures() -> Iterator[None]:
    """Skip drawing the figures of training."""
    from tests.athena_hosts import quick_training

    with quick_training():
        yield


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that loads a language model's weights."""
    from transformers import AutoModelForCausalLM

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait shortly before a request is sent again."""
    from lm_eval.models import api_models
    from tenacity import wait_fixed

    monkeypatch.setattr(api_models, "wait_exponential", lambda **_: wait_fixed(0.02))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer and a chat template, saved as a user would have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.tiny_models import tiny

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=512
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}a:"
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    model = tiny("llama", vocab_size=len(vocabulary), max_position_embeddings=512, dtype=torch.float64)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def browser() -> Any:
    """Chromium. `.ci/run` sees to it that it is there, and then nothing is skipped."""
    required = os.environ.get("LMEVAL_PRUNE_BROWSER") == "required"
    path = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        if required:
            raise
        pytest.skip("playwright is not installed")
    if path is None:
        assert not required, "no chromium"
        pytest.skip("no chromium is installed; LMEVAL_PRUNE_BROWSER=required makes this an error")
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def split_warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what was warned of the splits of calibration questions so far; each warning is one line."""

    def warnings() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == "lmeval_prune.tasks.splits"]
        assert not any("\n" in line for line in lines)
        return lines

    return warnings
