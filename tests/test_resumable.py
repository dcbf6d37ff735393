"""Any lm-eval model with the answer store: killed and resumed with equal tables, kept apart by arguments, refused in one line."""

import functools
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager

from lmeval_prune.models.answer_store import AnswerStore, read_answers
from lmeval_prune.models.resumable import model_identity
from tests.conftest import ROOT
from tests.kills import killing_after
from tests.stub_server import Stub

LIMIT = 4
ROLLING = {
    "task": "rolling",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(ROOT / "tasks/tiny/words.jsonl")}},
    "output_type": "loglikelihood_rolling",
    "test_split": "test",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
}
TASKS = {
    "prune_tiny_words": LIMIT,
    "prune_tiny_choice": LIMIT * 4,
    "prune_tiny_words_pass4": LIMIT * 4,
    "rolling": LIMIT,
}


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict]:
    """Evaluate a model by name; returns the tables."""
    folder = tmp_path_factory.mktemp("yaml")
    (folder / "rolling.yaml").write_text(yaml.safe_dump(ROLLING))
    manager = TaskManager(include_path=[str(ROOT / "tasks"), str(folder)], include_defaults=False)

    def run(name: str, tasks: Any = TASKS, limit: int = LIMIT, gen_kwargs: Any = (), **arguments: Any) -> dict:
        settings: dict = {"task_manager": manager, "limit": limit, "bootstrap_iters": 0, "device": "cpu"}
        settings |= {
            "gen_kwargs": {"max_gen_toks": 6, **dict(gen_kwargs)},
            "batch_size": 1 if "base_url" in arguments else 3,
        }
        out = simple_evaluate(model=name, model_args=arguments, tasks=list(tasks), **settings)
        return dict(out["results"])

    return run


@pytest.fixture
def server(tiny_folder: Path) -> Iterator[Stub]:
    with Stub(tiny_folder) as stub:
        yield stub


def arguments_of(lm: str, folder: Path, server: Stub) -> dict[str, Any]:
    """model_args of `hf`, or of `local-completions` with a number of concurrent requests."""
    if lm == "hf":
        return {"pretrained": str(folder), "dtype": "float64"}
    served = {"model": "tiny", "base_url": f"{server.url}/v1/completions", "tokenizer": str(folder), "max_length": 500}
    return {**served, "tokenizer_backend": "huggingface", "tokenized_requests": False, "num_concurrent": int(lm[-1])}


def stored(folder: Path) -> int:
    return len({record["key"] for record in read_answers(folder)})


@pytest.fixture(scope="module")
def undisturbed(
    evaluate: Callable, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], tuple[dict[str, Any], dict, int]]]:
    """Evaluate `hf` or a server once; returns model_args, the tables and the number of stored answers."""
    with Stub(tiny_folder) as server:

        @functools.cache
        def run(lm: str) -> tuple[dict[str, Any], dict, int]:
            arguments = {"lm": lm.split()[0], **arguments_of(lm, tiny_folder, server)}
            folder = tmp_path_factory.mktemp("whole") / "store"
            return arguments, evaluate("resumable", responses=str(folder), **arguments), stored(folder)

        yield run


@pytest.mark.parametrize("lm", ["hf", "local-completions 1", "local-completions 2"])
@pytest.mark.parametrize("count", [2, 9, 27])
def test_killed_and_resumed_with_equal_tables(
    lm: str, count: int, evaluate: Callable, undisturbed: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, whole, answers = undisturbed(lm)
    again = {**arguments, "responses": str(tmp_path / "killed")}

    def child() -> None:
        AnswerStore.add = killing_after(count)(AnswerStore.add)  # type: ignore[method-assign]
        evaluate("resumable", **again)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -9 and stored(tmp_path / "killed") == count
    added: list[str] = []
    add = AnswerStore.add
    monkeypatch.setattr(AnswerStore, "add", lambda self, key, *rest: added.append(key) or add(self, key, *rest))
    assert evaluate("resumable", **again) == whole
    assert len(set(added)) == len(added) == answers - count
    added.clear()
    assert evaluate("resumable", **again) == whole and not added


def test_greedy_tables_are_those_of_the_model_itself(
    evaluate: Callable, server: Stub, tiny_folder: Path, tmp_path: Path
) -> None:
    greedy = [task for task in TASKS if "pass" not in task]
    for lm in ("hf", "local-completions 2"):
        arguments = arguments_of(lm, tiny_folder, server)
        name = lm.split()[0]
        assert evaluate("resumable", greedy, lm=name, responses=str(tmp_path / name), **arguments) == evaluate(
            name, greedy, **arguments
        )


@pytest.mark.parametrize("settings", [{}, {"do_sample": False, "temperature": 0.7}], ids=["do_sample", "temperature"])
def test_repeats_on_a_server_have_seeds_of_their_own(
    evaluate: Callable, server: Stub, tiny_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Also with do_sample=false, which lm-eval's client does not send beside the temperature."""
    arguments = arguments_of("local-completions 1", tiny_folder, server)
    arguments |= {"lm": "local-completions", "responses": str(tmp_path / "s"), "gen_kwargs": settings}
    evaluate("resumable", ["prune_tiny_words_pass4"], **arguments)
    seeds: dict[str, list[int]] = {}
    for payload in server.payloads:
        seeds.setdefault(str(payload["prompt"]), []).append(payload["seed"])
    assert len(seeds) == LIMIT and all(len(set(prompt_seeds)) == 4 for prompt_seeds in seeds.values())


# --------------------------------------------------------------------------- a model that returns at the end only


class Late(LM):
    """Returns its answers at the end of a call, as vLLM does with an automatic batch size; dies at a call."""

    calls: ClassVar[list[int]] = []
    dies_at = -1

    def __init__(self, model="", path="", num_concurrent=1, batch_size=None, device=None) -> None:
        super().__init__()

    def generate_until(self, requests: list) -> list[str]:
        self.calls.append(len(requests))
        if len(self.calls) == self.dies_at:
            raise KeyboardInterrupt
        return [f"{request.doc['question'][:20]} {torch.rand(1).item()}" for request in requests]

    def loglikelihood(self, requests: list) -> list:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[Late]:
    monkeypatch.setitem(model_registry._objs, "late", Late)
    monkeypatch.setattr(Late, "calls", [])
    monkeypatch.setattr(Late, "dies_at", -1)
    return Late


@pytest.mark.parametrize(
    ("task", "sizes", "count"), [("prune_tiny_words", [5, 5], 5), ("prune_tiny_words_pass4", [5] * 3, 10)]
)
def test_answers_are_stored_part_by_part(
    task: str, sizes: list[int], count: int, late: type[Late], evaluate: Callable, tmp_path: Path
) -> None:
    arguments = {"lm": "late", "responses": str(tmp_path / "store"), "store_every": 5}
    late.dies_at = len(sizes)
    with pytest.raises(KeyboardInterrupt):
        evaluate("resumable", [task], 12, **arguments)
    assert late.calls == sizes and stored(tmp_path / "store") == count
    resumed = evaluate("resumable", [task], 12, **arguments)
    whole = evaluate("resumable", [task], 12, **{**arguments, "responses": str(tmp_path / "whole")})
    records = [{r["key"]: r["response"] for r in read_answers(tmp_path / name)} for name in ("store", "whole")]
    assert records[0].keys() == records[1].keys()
    if "pass" in task:  # drawn again by the same random numbers
        assert records[0] == records[1] and len(set(records[0].values())) == 48
        assert resumed == whole


@pytest.mark.parametrize("count", [1, 2])
def test_a_text_that_a_server_did_not_send_is_asked_for_again(
    count: int, evaluate: Callable, server: Stub, tiny_folder: Path, tmp_path: Path
) -> None:
    """lm-eval takes an empty text for it; a store would keep it as the model's answer."""
    arguments = {"lm": "local-completions", **arguments_of(f"local-completions {count}", tiny_folder, server)}
    tasks = ["prune_tiny_words", "prune_tiny_words_pass4"]
    whole = evaluate("resumable", tasks, responses=str(tmp_path / "whole"), **arguments)
    sent: list[dict] = []

    def spoil(body: dict) -> None:
        sent.append(body)
        if len(sent) in (2, 5, 6):
            for choice in body["choices"]:
                choice["text"] = None

    server.spoil = spoil
    evaluate("resumable", tasks, responses=str(tmp_path / "store"), **arguments)
    assert len(sent) == 5 * LIMIT and stored(tmp_path / "store") == 5 * LIMIT - 3
    assert evaluate("resumable", tasks, responses=str(tmp_path / "store"), **arguments) == whole
    assert len(sent) == 5 * LIMIT + 3 and stored(tmp_path / "store") == 5 * LIMIT


# --------------------------------------------------------------------------- identity


def test_what_identifies_a_model(tiny_folder: Path, tmp_path: Path) -> None:
    def identity(**arguments: Any) -> dict:
        return model_identity("hf", {"pretrained": str(tiny_folder), "dtype": "float32", **arguments})

    copy = tmp_path / "copy"
    shutil.copytree(tiny_folder, copy)
    assert identity() == identity(pretrained=str(copy), batch_size=8, device="cpu", gpu_memory_utilization=0.5)
    assert identity() != identity(dtype="bfloat16")
    assert identity() != identity(add_bos_token=True)
    assert identity() != {**identity(), "lm": "vllm"}
    config = copy / "config.json"
    config.write_text(config.read_text().replace("rope", "rope "))
    assert identity() != identity(pretrained=str(copy))
    shutil.copy(tiny_folder / "config.json", config)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert identity() != identity(pretrained=str(copy))
    for name, content in (("one", "a"), ("same", "a"), ("two", "b")):
        (tmp_path / name).write_text(content)
    one, same, two = (model_identity("late", {"path": str(tmp_path / name)}) for name in ("one", "same", "two"))
    assert one == same != two and model_identity("late", {"model": "a"}) != model_identity("late", {"model": "b"})
    served = {"model": "tiny", "base_url": "http://one"}
    assert model_identity("local-completions", served) != model_identity(
        "local-completions", {**served, "base_url": "http://two"}
    )
    assert model_identity("local-completions", served) == model_identity(
        "local-completions", {**served, "num_concurrent": 9}
    )
