"""`--use_cache` and `responses=`: no answer of one mask for another, no collapsed repeats, nothing lost."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from lm_eval.api.model import CachingLM

from lmeval_prune import InputError
from lmeval_prune.models.answer_store import AnswerStore
from tests.test_pruned_hf import GENERATE, HEADS, KINDS, PROMPTS, model, request, requests


@pytest.mark.parametrize("kind", KINDS)
def test_cache_keeps_masks_and_models_apart(tiny_folder: Path, tmp_path: Path, kind: str) -> None:
    """Dense and pruned runs share one cache file; each gets its own answers, the second time from the file."""
    path = str(tmp_path / "cache.db")
    fresh = {heads: getattr(model(tiny_folder, heads=heads), kind)(requests(kind)) for heads in (None, HEADS)}
    assert fresh[None] != fresh[HEADS]
    for _ in range(2):
        for heads, expected in fresh.items():
            cached = CachingLM(model(tiny_folder, heads=heads), path)
            assert [tuple(r) if isinstance(r, list) else r for r in getattr(cached, kind)(requests(kind))] == expected
            cached.dbdict.close()
    cached = CachingLM(model(tiny_folder, heads=HEADS), path)
    cached.lm.answering = None  # a second run must not reach the model
    assert getattr(cached, kind)(requests(kind)) == fresh[HEADS]


def test_cache_that_would_collapse_sampled_repeats_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    cached = CachingLM(model(tiny_folder), str(tmp_path / "cache.db"))
    sampled = {"until": ["\n"], "max_gen_toks": 4, "temperature": 0.6}
    with pytest.raises(InputError, match="responses=FOLDER"):
        cached.generate_until([request("generate_until", ("a", sampled), 0, 2)] * 2)
    assert len(cached.generate_until([request("generate_until", ("a", {**sampled, "do_sample": True}), 0, 2)] * 2)) == 2


class Stopped(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_where_it_was(tiny_folder: Path, tmp_path: Path, kind: str) -> None:
    expected = getattr(model(tiny_folder, heads=HEADS, batch_size=1), kind)(requests(kind))
    stopped = model(tiny_folder, heads=HEADS, batch_size=1, responses=str(tmp_path / "store"))
    add, count = stopped.answering.store.add, 0

    def add_two(*arguments) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise Stopped
        add(*arguments)

    stopped.answering.store.add = add_two
    with pytest.raises(Stopped):
        getattr(stopped, kind)(requests(kind))
    stopped.answering.store.close()
    path = tmp_path / "store" / "rank-0.jsonl"
    path.write_text(path.read_text() + '{"key": "cut sho')  # as a kill in the middle of a write leaves it

    again = model(tiny_folder, heads=HEADS, batch_size=1, responses=str(tmp_path / "store"))
    asked: list[int] = []
    compute = again._loglikelihood_tokens if kind != "generate_until" else again._model_generate
    name = compute.__name__
    setattr(again, name, lambda *a, **k: (asked.append(1), compute(*a, **k))[1])
    assert getattr(again, kind)(requests(kind)) == expected
    assert asked
    again.close()
    finished = model(tiny_folder, heads=HEADS, batch_size=1, responses=str(tmp_path / "store"))
    finished.model.forward = None  # everything is in the store
    assert getattr(finished, kind)(requests(kind)) == expected
    lines = [line for line in path.read_text().splitlines() if not line.startswith('{"key": "cut sho')]
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == len(expected)


def fresh(folder: Path, store: Path, items: list, **arguments) -> list:
    lm = model(folder, responses=str(store), **arguments)
    try:
        return lm.generate_until(items)
    finally:
        lm.close()


SAMPLED = {"until": ["\n"], "max_gen_toks": 12, "temperature": 2.0, "do_sample": True}


def repeats(count: int = 6) -> list:
    return [request("generate_until", (PROMPTS[1], SAMPLED), 1, count, "sampled")] * count


def test_store_keeps_masks_settings_and_repeats_apart(tiny_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    dense = fresh(tiny_folder, store, requests("generate_until"))
    pruned = fresh(tiny_folder, store, requests("generate_until"), heads=HEADS)
    assert dense == model(tiny_folder).generate_until(requests("generate_until")) != pruned
    longer = [request("generate_until", (PROMPTS[0], {**GENERATE, "max_gen_toks": 20}), 0)]
    assert len(fresh(tiny_folder, store, longer)[0]) > len(dense[0])
    described = {"attention_path": "model.layers.{i}.self_attn", "attention_output": "o_proj"}
    by_size = [
        fresh(tiny_folder, store, requests("generate_until"), heads=HEADS, attention_heads=n, **described)
        for n in (4, 16)
    ]
    assert by_size[0] != by_size[1]

    first = fresh(tiny_folder, store, repeats())
    assert len(set(first)) > 1
    assert fresh(tiny_folder, store, repeats()) == first
    count = len((store / "rank-0.jsonl").read_text().splitlines())
    assert fresh(tiny_folder, store, [*requests("generate_until"), *repeats()]) == dense + first
    assert len((store / "rank-0.jsonl").read_text().splitlines()) == count  # a sampled task changes no greedy key


def test_going_on_with_samples_draws_new_ones(tiny_folder: Path, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(1234)
    whole = fresh(tiny_folder, tmp_path / "whole", repeats(), batch_size=1)
    torch.manual_seed(1234)
    assert fresh(tiny_folder, tmp_path / "again", repeats(), batch_size=1) == whole
    torch.manual_seed(1234)
    half = fresh(tiny_folder, tmp_path / "store", repeats(3), batch_size=1)
    torch.manual_seed(1234)
    rest = fresh(tiny_folder, tmp_path / "store", repeats(6), batch_size=1)
    assert rest[:3] == half and len(set(rest)) == len(set(whole)) == 6


def test_going_on_with_few_requests_and_an_automatic_batch_size(tiny_folder: Path, tmp_path: Path) -> None:
    lm = model(tiny_folder, responses=str(tmp_path / "s"), batch_size="auto:4", max_batch_size=2, max_length=64)
    expected = [v for v, _ in model(tiny_folder).loglikelihood(requests("loglikelihood"))]
    lm.loglikelihood(requests("loglikelihood")[:-2])
    assert [v for v, _ in lm.loglikelihood(requests("loglikelihood"))] == pytest.approx(expected, abs=1e-9)


def test_both_kinds_of_store_at_once_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give one of them"):
        CachingLM(model(tiny_folder, responses=str(tmp_path / "s")), str(tmp_path / "cache.db"))


def test_ranks_may_open_a_new_store_together_but_not_the_same_file(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    for trial in range(30):
        with ThreadPoolExecutor(4) as threads:
            stores = list(threads.map(lambda rank, trial=trial: AnswerStore(tmp_path / str(trial), rank), range(4)))
        with pytest.raises(InputError, match="another run is writing"):
            AnswerStore(tmp_path / str(trial), 2)
        for store in stores:
            store.close()


def test_compacting_leaves_alone_what_another_process_writes(tmp_path: Path) -> None:
    first, second = AnswerStore(tmp_path, 0), AnswerStore(tmp_path, 1)
    about = {"kind": "generate_until", "task": "t", "prompt": "p", "head": "dense"}
    first.add("a", "x", about)
    second.add("b", "y", about)
    first.compact()
    first.add("c", "z", about)  # it may go on
    second.add("d", "w", about)
    assert {path.name for path in tmp_path.glob("rank-*.jsonl")} == {"rank-0.jsonl", "rank-1.jsonl"}
    second.close()
    first.compact()
    assert not list(tmp_path.glob("rank-*.jsonl"))
    first.close()
    assert AnswerStore(tmp_path).known == {"a": "x", "b": "y", "c": "z", "d": "w"}


def test_a_damaged_store_is_refused_in_one_line(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.add("a", "x", {})
    store.compact()
    store.close()
    table = tmp_path / "answers.parquet"
    for columns in (["key", "prompt"], {"response": ["{"]}, {"response": [None]}):
        whole = parquet.read_table(table)
        changed = whole.select(columns) if isinstance(columns, list) else whole.drop_columns("response").append_column(
            "response", pa.array(columns["response"], pa.string()))  # fmt: skip
        parquet.write_table(changed, table)
        with pytest.raises(InputError, match="damaged") as error:
            AnswerStore(tmp_path)
        assert "\n" not in str(error.value)
        parquet.write_table(whole, table)
    assert AnswerStore(tmp_path).known == {"a": "x"}


def test_two_files_are_merged_and_foreign_folders_refused(tmp_path: Path) -> None:
    first, second = AnswerStore(tmp_path / "s", 0), AnswerStore(tmp_path / "s", 1)
    first.add("a", "x", {})
    second.add("b", [1.5, True], {})
    first.close()
    assert AnswerStore(tmp_path / "s", 0).known == {"a": "x", "b": [1.5, True]}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(InputError, match="not an answer store"):
        AnswerStore(tmp_path / "other")
    with pytest.raises(InputError, match="cannot be used"):
        AnswerStore(tmp_path / "other" / "file")
