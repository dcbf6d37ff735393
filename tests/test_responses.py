"""`--use_cache` and `responses=`: no answer of one mask for another, no collapsed repeats, nothing lost."""

import json
from pathlib import Path

import pytest
from lm_eval.api.model import CachingLM

from lmeval_prune import InputError
from lmeval_prune.models.responses import ResponseStore
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
    cached.lm._answered = None  # a second run must not reach the model
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
    add, count = stopped._store.add, 0

    def add_two(*arguments) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise Stopped
        add(*arguments)

    stopped._store.add = add_two
    with pytest.raises(Stopped):
        getattr(stopped, kind)(requests(kind))
    stopped._store.close()
    path = tmp_path / "store" / "rank-0.jsonl"
    path.write_text(path.read_text() + '{"key": "cut sho')  # as a kill in the middle of a write leaves it

    again = model(tiny_folder, heads=HEADS, batch_size=1, responses=str(tmp_path / "store"))
    asked: list[int] = []
    compute = again._loglikelihood_tokens if kind != "generate_until" else again._model_generate
    name = compute.__name__
    setattr(again, name, lambda *a, **k: (asked.append(1), compute(*a, **k))[1])
    assert getattr(again, kind)(requests(kind)) == expected
    assert asked
    finished = model(tiny_folder, heads=HEADS, batch_size=1, responses=str(tmp_path / "store"))
    finished.model.forward = None  # everything is in the store
    assert getattr(finished, kind)(requests(kind)) == expected
    lines = [line for line in path.read_text().splitlines() if not line.startswith('{"key": "cut sho')]
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == len(expected)


def test_store_keeps_masks_settings_and_repeats_apart(tiny_folder: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "store")
    dense = model(tiny_folder, responses=folder).generate_until(requests("generate_until"))
    pruned = model(tiny_folder, heads=HEADS, responses=folder).generate_until(requests("generate_until"))
    assert dense == model(tiny_folder).generate_until(requests("generate_until")) != pruned
    longer = [request("generate_until", (PROMPTS[0], {**GENERATE, "max_gen_toks": 20}), 0)]
    assert len(model(tiny_folder, responses=folder).generate_until(longer)[0]) > len(dense[0])

    sampled = {"until": ["\n"], "max_gen_toks": 12, "temperature": 2.0, "do_sample": True}

    def repeats() -> list:
        return [request("generate_until", (PROMPTS[1], sampled), 1, 6)] * 6

    first = model(tiny_folder, responses=folder).generate_until(repeats())
    assert len(set(first)) > 1
    assert model(tiny_folder, responses=folder).generate_until(repeats()) == first


def test_two_files_are_merged_and_foreign_folders_refused(tmp_path: Path) -> None:
    first, second = ResponseStore(tmp_path / "s", 0), ResponseStore(tmp_path / "s", 1)
    first.add("a", "x", {})
    second.add("b", [1.5, True], {})
    assert ResponseStore(tmp_path / "s", 0).known == {"a": "x", "b": [1.5, True]}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(InputError, match="not a response store"):
        ResponseStore(tmp_path / "other")
    with pytest.raises(InputError, match="is a file"):
        ResponseStore(tmp_path / "other" / "file")
