"""`responses=`: no answer of one mask for another, no collapsed repeats, nothing lost."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import HeadMask, InputError, RowMasks
from lmeval_prune.interventions import Plan, interventions_on
from lmeval_prune.models import hf, identity
from lmeval_prune.models.answer_store import AnswerStore
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.tasks import compat
from tests.test_pruned_hf import GENERATE, HEADS, PROMPTS, model, request, requests
from tests.tiny_models import tiny


class Stopped(Exception):
    pass


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


@pytest.mark.parametrize(
    "batch_size", [pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long), "auto"]
)
def test_a_killed_sampled_run_ends_as_one_that_was_not(
    tiny_folder: Path, tmp_path: Path, batch_size: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was killed, with greedy requests among the sampled ones, and prompts of different lengths."""
    instances = [*requests("generate_until")[:2], *repeats(4)]
    instances += [request("generate_until", (PROMPTS[i], SAMPLED), i, 2, "other") for i in (0, 0, 2, 2)]
    add, detected = AnswerStore.add, 0
    monkeypatch.setattr(hf, "AUTO_GROUP_SIZE", 3)

    def detect(*_: Any, **__: Any) -> int:
        nonlocal detected
        detected += 1
        return detected  # another one each time

    monkeypatch.setattr(PrunedHFLM, "_detect_batch_size", detect)

    def run(store: Path, most: int) -> list:
        torch.manual_seed(1234)
        lm, count = model(tiny_folder, responses=str(store), batch_size=batch_size), 0

        def add_some(*arguments: Any) -> None:
            nonlocal count
            if count == most:
                raise Stopped
            count += 1
            add(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AnswerStore, "add", add_some)
            try:
                return lm.generate_until(instances)
            finally:
                lm.close()

    whole = run(tmp_path / "whole", 99)
    assert len(set(whole[2:6])) == 4
    for killed in (1, 3, 4, 7, 9):
        with pytest.raises(Stopped):
            run(tmp_path / str(killed), killed)
        path = tmp_path / str(killed) / "rank-0.jsonl"
        path.write_text(path.read_text() + '{"key": "cut sho')  # as a kill in the middle of a write leaves it
        assert run(tmp_path / str(killed), 99) == whole
        lines = [line for line in path.read_text().splitlines() if not line.startswith('{"key": "cut sho')]
        assert len({json.loads(line)["key"] for line in lines}) == len(lines) == len(instances)


@pytest.mark.parametrize("trials", [10, pytest.param(30, marks=pytest.mark.long)])
def test_ranks_may_open_a_new_store_together_but_not_the_same_file(tmp_path: Path, trials: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    for trial in range(trials):
        with ThreadPoolExecutor(4) as threads:
            stores = list(threads.map(lambda rank, trial=trial: AnswerStore(tmp_path / str(trial), rank), range(4)))
        with pytest.raises(InputError):
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
    assert AnswerStore(tmp_path).responses == {"a": "x", "b": "y", "c": "z", "d": "w"}


def stored_heads(folder: Path) -> list[str]:
    return [json.loads(line)["head"] for line in (folder / "rank-0.jsonl").read_text().splitlines()]


def test_a_stored_answer_names_the_heads_that_were_pruned(tiny_folder: Path, tmp_path: Path) -> None:
    """Of a mask, a plan, both, a router on a masked model, masks answered ahead, and a `with` block."""
    names, plan = "L0H1+L1H2+L1H3", str(tmp_path / "plan.json")
    Plan("L1H2-3").save(plan, model(tiny_folder).model_map)
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["dense"]),
        ({"heads": HEADS}, [names]),
        ({"plan": plan}, ["L1H2+L1H3"]),
        ({"plan": plan, "heads": "L0H1"}, [names]),
        ({"token_filter": 0.5}, ["dense"]),
        ({"heads": "L1H0", "router": "random", "router_pool": "L0H1+dense"}, ["L0H1+L1H0", "L1H0"]),
    ]
    for number, (arguments, expected) in enumerate(cases):
        lm = model(tiny_folder, responses=str(tmp_path / str(number)), **arguments)
        instance = compat.request("generate_until", ("a", dict(GENERATE)), "toy", 0, 2, doc={"question": "a"})
        lm.generate_until([instance] * 2)
        assert sorted(stored_heads(tmp_path / str(number))) == expected
    lm = model(tiny_folder, heads="L0H0", engine="batched", responses=str(tmp_path / "ahead"))
    lm.answer_ahead("generate_until", requests("generate_until")[:1], [None, HeadMask("L1H2-3")])
    with HeadMask("L1H1").applied_to(lm.model):
        lm.generate_until(requests("generate_until")[:1])
    assert sorted(stored_heads(tmp_path / "ahead")) == ["L0H0", "L0H0+L1H1", "L0H0+L1H2+L1H3"]


def live(folder: Path) -> tuple:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), AutoTokenizer.from_pretrained(folder)


def test_a_wrapper_is_the_model_that_it_wraps(tiny_folder: Path) -> None:
    peft = pytest.importorskip("peft")
    network, _ = live(tiny_folder)
    wrapper = peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for applied_to, other in ((network, wrapper), (wrapper, network)):
        with HeadMask("L0H1").applied_to(applied_to):
            assert interventions_on(other) == interventions_on(applied_to) == (HeadMask("L0H1"),)
        assert interventions_on(other) == ()


def test_masks_by_row_are_in_no_store(tiny_folder: Path, tmp_path: Path) -> None:
    network, tokenizer = live(tiny_folder)
    lm = PrunedHFLM(network, tokenizer=tokenizer, responses=str(tmp_path / "s"))
    with RowMasks().applied_to(network), pytest.raises(InputError):
        lm.generate_until(requests("generate_until"))


def lora(network: nn.Module, alpha: int, seed: int = 0) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    return peft.get_peft_model(network, config).double()


def changed_model(change: str, changed: bool, tokenizer: Any) -> PrunedHFLM:
    """One of two models that differ in one thing."""
    eps = {"rms_norm_eps": 0.5} if (change, changed) == ("config", True) else {}
    seed = int(change == "weights" and changed)
    network = tiny("llama", seed=seed, vocab_size=259, max_position_embeddings=512, **eps).bfloat16().double()
    arguments: dict[str, Any] = {"max_length": 20} if (change, changed) == ("arguments", True) else {}
    if change == "adapters":
        network = lora(network, 64 if changed else 1)
    elif changed and change == "dtype":
        network = network.float()
    elif changed and change == "tokenizer":
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace("o", "0")
    elif changed and change == "generation_config":
        network.generation_config.repetition_penalty = 5.0
    return PrunedHFLM(network, tokenizer=tokenizer, batch_size=1, **arguments)


@pytest.mark.parametrize(
    "part", ["weights", "config", "dtype", "tokenizer", "generation_config", "arguments", "adapters"]
)
def test_models_that_differ_in_one_part_do_not_share_answers(tiny_folder: Path, tmp_path: Path, part: str) -> None:
    instances, count, identities = requests("generate_until"), 0, []
    for changed in (False, True):
        lm = changed_model(part, changed, AutoTokenizer.from_pretrained(tiny_folder))
        identities.append(lm.identity)
        expected = lm.generate_until(instances)
        lm.store = AnswerStore(tmp_path / "s")
        count += len(instances)
        assert lm.generate_until(instances) == expected and len(lm.store.responses) == count
        lm.close()
    item, other = identities
    assert [name for name in item if item[name] != other[name]] == [part] and item.keys() == other.keys()


def test_artefacts_of_weights_before_a_training_are_refused_after_it(tiny_folder: Path, tmp_path: Path) -> None:
    network, tokenizer = live(tiny_folder)
    lm = PrunedHFLM(network, tokenizer=tokenizer)
    Plan(("L0H1",)).save(tmp_path / "before.json", lm.model_map)
    lm.reconfigure(tokenizer=tokenizer, plan=str(tmp_path / "before.json"))
    with torch.no_grad():
        network.lm_head.weight += 1
    with pytest.raises(InputError):
        lm.reconfigure(tokenizer=tokenizer, plan=str(tmp_path / "before.json"))
    Plan(("L0H1",)).save(tmp_path / "after.json", lm.model_map)
    PrunedHFLM(network, tokenizer=tokenizer, plan=str(tmp_path / "after.json"))


CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"split_special_tokens": True}, True),
        ({"clean_up_tokenization_spaces": True, CLEANS_BPE: True}, True),
        ({"clean_up_tokenization_spaces": True}, False),  # transformers ignores it for byte-pair encoding
    ],
)
def test_a_tokenizer_with_other_settings_is_another(tiny_folder: Path, settings: dict, changes: bool) -> None:
    tokenizers = [AutoTokenizer.from_pretrained(tiny_folder, **options) for options in ({}, settings)]
    texts = [(tokenizer.encode("a</s>"), tokenizer.decode(tokenizer.encode("a , b ."))) for tokenizer in tokenizers]
    fingerprints = set(map(identity.tokenizer_fingerprint, tokenizers))
    assert (texts[0] != texts[1], len(fingerprints) == 2) == (changes, changes)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.0
        return out
"""


def test_answers_of_other_code_of_the_checkpoint_are_not_used(tiny_folder: Path, tmp_path: Path) -> None:
    folder, answers = shutil.copytree(tiny_folder, tmp_path / "own"), []
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own_llama", "auto_map": classes}))
    for factor in ("1.0", "2.0", "1.0"):
        (folder / "own.py").write_text(CODE.replace("1.0", factor))
        stored = model(folder, trust_remote_code=True, responses=str(tmp_path / "s"))
        answers.append(stored.loglikelihood(requests("loglikelihood")))
        expected = model(folder, trust_remote_code=True).loglikelihood(requests("loglikelihood"))
        assert answers[-1] == expected
        count = len(stored.store.responses)
        stored.close()
    assert answers[0] == answers[2] != answers[1] and count == 2 * len(answers[0])


# ---------------------------------------------------------------------- versions of what computes answers


def other_arithmetic(patch: pytest.MonkeyPatch) -> None:
    """A head mask that halves heads instead of taking them away, as a method that was changed would be."""
    attach = HeadMask.attach

    def changed(self: HeadMask, model_map: Any, stack: Any) -> None:
        attach(replace(self, heads=self.heads[:1]), model_map, stack)

    patch.setattr(HeadMask, "attach", changed)


@pytest.mark.parametrize("raised", ["method", "answering", "transformers"])
@pytest.mark.parametrize("compacted", [False, True])
def test_answers_of_code_that_has_changed_since_are_not_used(
    tiny_folder: Path, tmp_path: Path, raised: str, compacted: bool
) -> None:
    instances, folder = requests("generate_until"), str(tmp_path / "s")
    numbers = {"transformers": "5.17.0", "lm_eval": "0.4.13"}

    def answers(patch: pytest.MonkeyPatch) -> list:
        patch.setattr(identity, "version", numbers.get)
        identity.code_versions.cache_clear()
        lm = model(tiny_folder, heads=HEADS, responses=folder)
        try:
            return lm.generate_until(instances)
        finally:
            if compacted:
                lm.store.compact()
            lm.close()

    with pytest.MonkeyPatch.context() as patch:
        before = answers(patch)
    with pytest.MonkeyPatch.context() as patch:
        other_arithmetic(patch)
        if raised == "method":
            patch.setattr(HeadMask, "version", 2)
        elif raised == "answering":
            patch.setattr(identity, "ANSWERING", 2)
        else:
            numbers["transformers"] = "5.23.0"
        fresh = answers(patch)
        assert fresh != before and answers(patch) == fresh
    identity.code_versions.cache_clear()
