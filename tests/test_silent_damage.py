"""What would be a wrong number without a word, a small case each. A right number or an error is asked for, never which words.

Only what users call is called: commands, the class of models for lm-eval, and what `lmeval_prune` exports.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import HeadMask, Plan, TokenFilter, cut, load_pretrained, map_model
from lmeval_prune.models.pruned_hf import PrunedHFLM
from tests.conftest import task_manager
from tests.forks import Fork
from tests.gates import command, outcomes, read_text, tiny_model

pytestmark = pytest.mark.gate
HEADS, OTHER = "L0H1+L1H2-3", "L2H0"
FILTER = {"ratio": 0.4, "warmup": 3}
PROMPTS = ["The cat sat", "If 3 boxes hold 12 pens, one box", "x", "Two plus two is"]
GENERATE = {"until": ["\n\n"], "max_gen_toks": 10, "do_sample": False}
ASKED: dict[str, list[tuple[Any, ...]]] = {
    "loglikelihood": [(prompt, end) for prompt in PROMPTS for end in (" a", " and so on")],
    "loglikelihood_rolling": [(prompt * 2,) for prompt in PROMPTS],
    "generate_until": [(prompt, GENERATE) for prompt in PROMPTS],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("silent") / "model")


def copied(model: Path, to: Path) -> Path:
    return Path(shutil.copytree(model, to))


def changed(folder: Path, by: float = 0.5) -> Path:
    """Change one projection in a checkpoint's file."""
    [path] = folder.glob("model*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.o_proj.weight"] += by
    save_file(tensors, path, {"format": "pt"})
    return folder


def loaded(pretrained: Any, **arguments: Any) -> Any:
    pretrained = str(pretrained) if isinstance(pretrained, Path) else pretrained
    return PrunedHFLM(pretrained, **{"device": "cpu", "dtype": "float64", "batch_size": 2, **arguments})


def live(folder: Path) -> tuple[Any, dict[str, Any]]:
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return network.eval(), {"tokenizer": AutoTokenizer.from_pretrained(folder)}


def asked(lm: Any) -> list[Any]:
    """Return the answers of each kind, without the last digits."""
    answers: list[Any] = []
    for kind, arguments in ASKED.items():
        requests = [Instance(kind, {}, args, i, ("silent", i, 1)) for i, args in enumerate(arguments)]
        answers += getattr(lm, kind)(requests)
    return [a if isinstance(a, str) else np.round(a, 8).tolist() for a in answers]


def of(pretrained: Any, **arguments: Any) -> list[Any]:
    with contextlib.closing(loaded(pretrained, **arguments)) as lm:
        return asked(lm)


def output(network: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = network(torch.arange(5, 25)[None]).logits
    return logits


@contextlib.contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(Exception, match=r"\S"):
        yield


def right_or_refused(get: Callable[[], Any], expected: Any) -> None:
    try:
        got = get()
    except Exception:
        return
    assert got == expected


def done(*words: object) -> bool:
    return not command(*words).startswith("status")


# --------------------------------------------------------------------------- what was kept


def test_two_masks_never_share_an_answer(model: Path, tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [{}, {"heads": HEADS}, {"heads": OTHER}, {"token_filter": FILTER}]
    expected = [of(model, **variant) for variant in variants]
    assert len(set(map(str, expected))) == len(variants)
    for _ in range(2):
        assert [of(model, responses=str(tmp_path), **variant) for variant in variants] == expected
    network, tokenizer = live(model)
    with contextlib.closing(loaded(network, responses=str(tmp_path), **tokenizer)) as lm:
        for heads, answers in zip((HEADS, OTHER), expected[1:], strict=False):
            with HeadMask(heads).applied_to(network):
                assert asked(lm) == answers
            assert asked(lm) == expected[0]


def test_lm_evals_cache_serves_no_answer_of_another_mask_or_of_before_a_training(model: Path, tmp_path: Path) -> None:
    def cached(pretrained: Any, **arguments: Any) -> Any:
        lm = CachingLM(loaded(pretrained, **arguments), str(tmp_path / "cache.db"))
        with contextlib.closing(lm.dbdict):
            return asked(lm)

    for heads in (None, HEADS, None):
        right_or_refused(partial(cached, model, heads=heads), of(model, heads=heads))
    network, tokenizer = live(model)
    for _ in range(2):
        right_or_refused(partial(cached, network, **tokenizer), of(network, **tokenizer))
        train(network)


def train(network: Any) -> None:
    network(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    torch.optim.SGD(network.parameters(), lr=0.5).step()


def test_training_in_place_makes_no_stale_answer(model: Path, tmp_path: Path) -> None:
    network, tokenizer = live(model)
    with contextlib.closing(loaded(network, responses=str(tmp_path), **tokenizer)) as lm:
        before = asked(lm)
        train(network)
        assert asked(lm) == of(network, **tokenizer) != before


def change_theta(folder: Path) -> Path:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 10.0'))
    return folder


def with_bos(folder: Path) -> Path:
    """Let a model's tokenizer add the BOS token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("change", [changed, change_theta, with_bos])
def test_a_changed_file_of_the_model_makes_no_stale_answer(model: Path, tmp_path: Path, change: Any) -> None:
    folder, store = copied(model, tmp_path / "m"), str(tmp_path / "s")
    before = of(folder, responses=store)
    change(folder)
    assert of(folder, responses=store) == of(folder) != before


def test_a_changed_byte_of_a_stored_answer_is_no_answer(model: Path, tmp_path: Path) -> None:
    """In the digits of likelihoods, in texts, and in the middle of each file."""
    expected, places = of(model, responses=str(tmp_path)), 0
    parts = [str(np.ravel(answer)[0])[:7] for answer in expected if not isinstance(answer, str)]
    parts += [max(re.findall("[ !#-Z^-~]+", answer), key=len) for answer in expected if isinstance(answer, str)]
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]:
        whole = path.read_bytes()
        inside = [at + 2 for part in parts if len(part) > 2 and (at := whole.find(part.encode())) >= 0]
        places += len(inside)
        for at in [*inside[::4], len(whole) // 2]:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            right_or_refused(lambda: of(model, responses=str(tmp_path)), expected)
            path.write_bytes(whole)
    assert places > 3


TASK = """
task: own
dataset_path: json
dataset_kwargs: {data_files: FOLDER/rows.json}
test_split: train
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
process_results: !function own.score
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
SCORE = "def score(doc, results): return {'exact_match': float((len(results[0].encode()) + doc['answer']) % 2)}\n"


def own_task(folder: Path, add: int = 0) -> Path:
    """Write a task of whose answers about half are right, other ones with another `add`."""
    folder.mkdir(exist_ok=True, parents=True)
    rows = [{"question": f"{i} and {i * i % 7}?", "answer": i // 2 + add} for i in range(8)]
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (folder / "own.py").write_text(SCORE)
    (folder / "own.yaml").write_text(TASK.replace("FOLDER", str(folder)))
    return folder / "own.yaml"


def sweep(model: Path, task: Path, store: Path) -> bool:
    words = ("--model_args", f"pretrained={model},dtype=float64,device=cpu", "--tasks", task, "--heads", "L0H0-3")
    return done("sweep", *words, "--output", store)


def cells(store: Path) -> list[Any]:
    return sorted((cell["doc_id"], cell["attempt"], bool(cell["outcome"]), cell["text"]) for cell in outcomes(store))


def test_changed_targets_of_a_task_make_no_stale_outcome(model: Path, tmp_path: Path) -> None:
    task, store, fresh = own_task(tmp_path / "t"), tmp_path / "s", tmp_path / "fresh"
    assert sweep(model, task, store)
    before = cells(store)
    own_task(tmp_path / "t", add=1)
    again = sweep(model, task, store)
    assert sweep(model, task, fresh) and cells(fresh) != before
    assert not again or cells(store) == cells(fresh)


def test_scores_of_other_weights_prune_nothing(model: Path, tmp_path: Path) -> None:
    folder, scores, plan = copied(model, tmp_path / "m"), tmp_path / "scores.json", tmp_path / "plan.json"
    assert done("importance", "--pretrained", folder, "--method", "magnitude", "--output", scores)
    words = ("prune", "--pretrained", folder, "--scores", scores, "--budget", "heads", "--ratio", 0.3, "--output")
    assert done(*words, plan)
    changed(folder)
    assert not done(*words, tmp_path / "other.json") and not (tmp_path / "other.json").exists()


def test_two_writers_of_one_output(model: Path, artefacts: Path, tmp_path: Path) -> None:
    with contextlib.closing(loaded(model, responses=str(tmp_path / "s"))), refused():
        loaded(model, responses=str(tmp_path / "s"))
    with (tmp_path / "log").open("w") as log:
        task = own_task(tmp_path / "t")
        forks = [Fork(lambda: not sweep(model, task, tmp_path / "both"), log) for _ in range(2)]
        assert 0 in [fork.wait() for fork in forks]
    assert cells(tmp_path / "both") == cells(artefacts / "sweep")


def test_a_cut_checkpoint_that_was_changed_since_is_seen(model: Path, artefacts: Path, tmp_path: Path) -> None:
    """Refused, or other numbers; and what was made for it as it was is refused."""
    folder, store, plan = tmp_path / "cut", str(tmp_path / "s"), artefacts / "plan.json"
    assert done("cut", "--pretrained", model, "--plan", plan, "--output", folder)
    before = of(folder, responses=store)
    assert before == of(model, plan=str(plan))
    HeadMask("L0H0").save(tmp_path / "mask.json", map_model(load_pretrained(folder)))
    loaded(folder, mask=str(tmp_path / "mask.json")).close()
    changed(folder)
    try:
        plain = of(folder)
    except Exception:
        return
    assert of(folder, responses=store) == plain != before
    with refused():
        loaded(folder, mask=str(tmp_path / "mask.json"))


# --------------------------------------------------------------------------- what is applied to a model


@pytest.mark.parametrize(
    "method", [HeadMask(HEADS), TokenFilter(0.5), Plan(HEADS, {"L0": "0-9"})], ids=["heads", "filter", "plan"]
)
def test_a_masked_model_is_not_copied_or_pickled(model: Path, method: Any, tmp_path: Path) -> None:
    network, _ = live(model)
    dense = output(network)
    with method.applied_to(network):
        ways: list[Any] = [copy.deepcopy, pickle.dumps, lambda network: torch.save(network, tmp_path / "network.pt")]
        for copying in ways:
            with refused():
                copying(network)
    assert torch.equal(output(network), dense) and torch.equal(output(copy.deepcopy(network)), dense)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_mask_on_a_compiled_model(model: Path, in_place: bool) -> None:
    """Also if it is called for the first time under the mask."""
    network, _ = live(model)
    dense, mask = output(network), HeadMask(HEADS)
    with mask.applied_to(network):
        masked = output(network)
    torch.compiler.reset()
    if in_place:
        network.compile(backend="eager")
        assert torch.allclose(output(network), dense)
    call = network if in_place else torch.compile(network, backend="eager")
    for _ in range(2):
        with mask.applied_to(network):
            with refused(), torch.compiler.set_stance("default"):
                output(call)
            assert torch.allclose(output(call), masked)
        with torch.compiler.set_stance("default"):
            assert torch.allclose(output(call), dense)
    assert not torch.allclose(masked, dense)


def test_another_thread_applies_nothing_meanwhile(model: Path) -> None:
    network, _ = live(model)

    def elsewhere() -> torch.Tensor:
        with HeadMask(OTHER).applied_to(network):
            return output(network)

    with ThreadPoolExecutor(1) as pool:
        expected = pool.submit(elsewhere).result()
        with HeadMask(HEADS).applied_to(network):
            masked = output(network)
            with refused():
                pool.submit(elsewhere).result()
            assert torch.equal(output(network), masked)
        assert torch.equal(pool.submit(elsewhere).result(), expected)


@pytest.fixture(scope="module")
def artefacts(model: Path) -> Path:
    """A mask, a plan, an adapter, a sweep and a router of the model."""
    folder, own = model.with_name("artefacts"), ("--pretrained", model)
    assert done("mask", *own, "--heads", HEADS, "--output", folder / "mask.json")
    assert done("prune", *own, "--method", "magnitude", "--ratio", 0.3, "--output", folder / "plan.json")
    assert done("export", "adapter", *own, "--heads", "L0H1", "--output", folder / "adapters")
    assert sweep(model, own_task(folder / "task"), folder / "sweep")
    assert done("fit", "--outcomes", folder / "sweep", "--router", "knn", "--output", folder / "router")
    return folder


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mask", "mask.json"),
        ("plan", "plan.json"),
        ("router", "router"),
        ("lora", "adapters/L0H1"),
    ],
)
def test_what_another_model_has_made_is_refused(
    model: Path, artefacts: Path, name: str, file: str, tmp_path: Path
) -> None:
    other = changed(copied(model, tmp_path / "other"))
    loaded(model, **{name: str(artefacts / file)}).close()
    with refused():
        of(other, **{name: str(artefacts / file)})
    loaders: dict[str, Any] = {"mask": HeadMask, "plan": Plan}
    if loader := loaders.get(name):
        assert not done("cut", "--pretrained", other, "--plan", artefacts / file, "--output", tmp_path / "cut")
        network, _ = live(other)
        with refused(), loader.load(artefacts / file).applied_to(network):
            pass
        with refused():
            cut(network, loader.load(artefacts / file))


@pytest.mark.parametrize("more", [{"engine": "generate"}, {"engine": "batched"}, {"token_filter": FILTER}], ids=str)
def test_nan_is_no_answer(model: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    with refused():
        of(changed(copied(model, tmp_path / "m"), by=float("nan")), **more)
    network, tokenizer = live(model)
    network.model.layers[0].self_attn.o_proj.weight.data += float("nan")
    lm = loaded(network, **tokenizer, **more)
    for kind, arguments in ASKED.items():
        with refused():
            getattr(lm, kind)([Instance(kind, {}, arguments[0], 0, ("silent", 0, 1))])


def test_nothing_is_pruned_by_nan(model: Path, tmp_path: Path) -> None:
    read, file = ["--text", read_text(tmp_path), "--windows", 2, "--tokens", 32], tmp_path / "x.json"
    share, broken = ["--ratio", 0.3, "--method"], changed(copied(model, tmp_path / "m"), by=float("nan"))
    for words in (["prune", *share, "magnitude"], ["prune", *share, "flap", *read], ["importance", *read]):
        assert not done(*words, "--pretrained", broken, "--output", file) and not file.exists()
        assert done(*words, "--pretrained", model, "--output", file)
        file.unlink()


METHODS: list[dict[str, Any]] = [
    {"heads": HEADS},
    {"token_filter": FILTER},
    {"probe_pruning": {"ratio": 0.3, "skip_first": 0}},
]


@pytest.mark.parametrize("engine", ["generate", "batched"])
@pytest.mark.parametrize("more", METHODS, ids=str)
def test_padding_and_the_rest_of_a_batch_are_not_seen(model: Path, more: dict[str, Any], engine: str) -> None:
    alone = of(model, batch_size=1, engine=engine, **more)
    assert of(model, batch_size=4, engine=engine, **more) == alone != of(model)


def test_two_ranks_answer_as_one(model: Path, tmp_path: Path) -> None:
    """Five questions, so that one rank is padded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def run(file: Path) -> int:
        AcceleratorState._reset_state(reset_partial_state=True)  # of the process that was forked
        options: dict[str, Any] = {"limit": 5, "gen_kwargs": "max_gen_toks=8", "bootstrap_iters": 0}
        tasks: list[Any] = ["prune_tiny_words", "prune_tiny_choice"]
        results = simple_evaluate(loaded(model, heads=HEADS), tasks=tasks, task_manager=task_manager(), **options)
        if results:
            rows = [(row["doc_id"], row["filtered_resps"]) for name in tasks for row in results["samples"][name]]
            file.write_text(json.dumps([results["results"], sorted(rows, key=str)]))
        return 0

    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true", "WORLD_SIZE": "2"}
    with (tmp_path / "log").open("w+") as log:
        forks = [Fork(lambda: run(tmp_path / "two"), log, RANK=str(i), LOCAL_RANK=str(i), **common) for i in range(2)]
        forks.append(Fork(lambda: run(tmp_path / "one"), log))
        assert [fork.wait() for fork in forks] == [0, 0, 0], (tmp_path / "log").read_text()[-2000:]
    assert json.loads((tmp_path / "two").read_text()) == json.loads((tmp_path / "one").read_text())
