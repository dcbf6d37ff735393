"""`engine=auto`: each request by the engine or by lm-eval's `hf`, with the texts, keys and reports of `hf` alone."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, LlamaForCausalLM

from lmeval_prune import InputError
from lmeval_prune.architectures import FAMILIES
from lmeval_prune.decoding import Engine
from lmeval_prune.models import hf
from lmeval_prune.models.answer_store import read_answers
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.tasks import compat
from tests.covers import crossed
from tests.test_command_line import lm_eval
from tests.test_pruned_hf import HEADS, PROMPTS, model
from tests.tiny_models import BY_GENERATE, CAUSAL, tiny

GREEDY: list[dict[str, Any]] = [
    {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
    {"until": ["a", "zz"], "max_gen_toks": 30, "temperature": 0.0},
    {"until": [""], "max_gen_toks": 5},
]
BY_HF: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"max_length": 60},
    {"guidance_scale": 1.5},
    {"max_time": 60.0},
    {"do_sample": True, "temperature": 1.0},
    {"repetition_penalty": 1.3},
]


@pytest.fixture(autouse=True)
def few_requests_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "AUTO_MIN_REQUESTS", 1)


def mixed() -> list[Instance]:
    """Requests of several tasks with settings for the engine and for `hf`, in a shuffled order."""
    settings = [*GREEDY, *({"until": [], "max_gen_toks": 6, **setting} for setting in BY_HF)]
    pairs = [(prompt, task) for prompt in PROMPTS[:3] for task in range(len(settings))]
    pairs.sort(key=lambda pair: hash((len(pair[0]) * 7 + pair[1] * 5) % 11))
    return [
        compat.request("generate_until", (prompt, dict(settings[task])), f"task{task}", PROMPTS.index(prompt))
        for prompt, task in pairs
    ]


class Hook:
    """Records what a model reports to lm-eval's cache."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def add_partial(self, kind: str, arguments: Any, response: Any) -> None:
        self.seen[json.dumps([kind, arguments, response])] += 1


def run(folder: Path, requests: list[Instance], **arguments: Any) -> tuple[PrunedHFLM, list[str]]:
    torch.manual_seed(3)  # the model reads it
    lm = model(folder, **arguments)
    lm.set_cache_hook(Hook())
    torch.manual_seed(3)
    texts = lm.generate_until(requests)
    lm.close()
    return lm, texts


@pytest.mark.parametrize("heads", [None, HEADS])
@pytest.mark.parametrize("stored", [False, True])
def test_requests_with_several_settings_are_answered_as_by_hf(
    tiny_folder: Path, tmp_path: Path, stored: bool, heads: str | None
) -> None:
    """Texts in order, cache hooks, keys and lengths in the store, the report of lengths; one line for each decision."""
    outcomes = {}
    for engine in ("generate", None):
        where = {"responses": str(tmp_path / str(engine))} if stored else {}
        named = {"engine": engine} if engine else {}
        lm, texts = run(tiny_folder, mixed(), heads=heads, **named, **where)
        rows = list(read_answers(Path(where["responses"]))) if stored else []
        kept = {row["key"]: (row["response"], row["length"], row["cut_off"]) for row in rows}
        outcomes[engine] = texts, lm.cache_hook.seen, lm.lengths, kept
    assert outcomes[None] == outcomes["generate"] and len(set(texts)) > 10
    assert lm.engine and lm.engine.statistics.answers == 3 * len(GREEDY)


@pytest.mark.parametrize("engines", [("generate", "auto"), ("auto", "generate")])
def test_a_store_that_the_other_path_began_is_resumed(
    tiny_folder: Path, tmp_path: Path, engines: tuple[str, str]
) -> None:
    """In batches of 1: with beams, `max_length` and a repetition penalty `hf`'s texts depend on the padding."""
    requests = mixed()
    _, expected = run(tiny_folder, requests, engine="generate", batch_size=1, responses=str(tmp_path / "whole"))
    store = str(tmp_path / "store")
    run(tiny_folder, requests[::2], engine=engines[0], batch_size=1, responses=store)
    lm, texts = run(tiny_folder, requests, engine=engines[1], batch_size=1, responses=store)
    assert texts == expected
    missing = [request for request in requests[1::2] if lm.engine is None or request.args[1] in GREEDY]
    assert len(missing) == (lm.engine.statistics.answers if lm.engine else lm.cache_hook.seen.total()) > 2


def test_an_empty_prompt_is_left_to_hf(tiny_folder: Path) -> None:
    requests = [compat.request("generate_until", (text, dict(GREEDY[0])), "t", 0) for text in ("x", "")]
    lm = model(tiny_folder, batch_size=1, add_bos_token=True)
    assert lm.generate_until(requests) == model(tiny_folder, HFLM, batch_size=1, add_bos_token=True).generate_until(
        requests
    )
    assert lm.engine and lm.engine.statistics.answers == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "bfloat16"},
        {"mixed_precision_dtype": "bfloat16"},
        {"token_filter": {"ratio": 0.2, "state": "run"}},
        {"probe_pruning": {"ratio": 0.2, "skip_first": 0}},
    ],
    ids=str,
)
def test_models_are_left_to_hf(tiny_folder: Path, arguments: dict[str, Any]) -> None:
    requests = [compat.request("generate_until", (text, dict(GREEDY[0])), "t", i) for i, text in enumerate(PROMPTS)]
    lm, texts = run(tiny_folder, requests, **arguments)
    assert texts == run(tiny_folder, requests, **arguments, engine="generate")[1]
    assert lm.engine is None or lm.engine.statistics.answers == 0


def test_families_that_the_engine_does_not_run_are_left_to_hf(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    network = tiny("bloom", vocab_size=len(tokenizer), dtype=torch.float32)
    requests = [compat.request("generate_until", (text, dict(GREEDY[0])), "t", i) for i, text in enumerate(PROMPTS)]
    expected = HFLM(network, tokenizer=tokenizer, batch_size=2).generate_until(requests)
    assert PrunedHFLM(network, tokenizer=tokenizer, batch_size=2).generate_until(requests) == expected


class Unseen(LlamaForCausalLM):
    """A family with code of its own: logits depend on a token's place in its forward pass, from the 41st on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits[:, 40:] *= 2
        return out


def test_a_family_without_tests_is_checked_beyond_its_window(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tiny("llama")
    network.__class__ = Unseen
    assert "logits would differ" in str(Engine(network).unsupported)
    monkeypatch.setattr(Unseen, "__module__", "transformers.models.llama")
    assert Engine(network).unsupported is None  # what the short check of a tested family does not see
    monkeypatch.setattr(Unseen, "__module__", __name__)
    for window, length in ((0, 64), (20, 64), (70, 78), (1024, 128)):  # at most the model's 128 positions
        network.config.sliding_window = window
        seen: list[int] = []
        hook = network.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].shape[1]))
        assert Engine(network).unsupported
        hook.remove()
        assert seen[0] == length
    network.config.sliding_window = 4096
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    lm = PrunedHFLM(network, tokenizer=tokenizer)
    request = compat.request("generate_until", ("x", dict(GREEDY[0])), "t", 0)
    assert lm.by_engine([request]) == []


def test_every_family_of_the_table_is_compared_with_generate() -> None:
    """`is_tested` says so of all families of the table; encoders and encoder-decoders never reach the engine."""
    others = {"bert", "roberta", "xlm-roberta", "distilbert", "t5", "mt5", "bart", "mbart"}
    assert FAMILIES.keys() - CAUSAL.keys() == others and CAUSAL.keys() > BY_GENERATE


# --------------------------------------------------------------------------- batch size and memory


@pytest.mark.parametrize(("slots", "size", "by_engine"), [(1, 1, 5), (0.9, 1, 0), (2, 4, 0), (4, 4, 5), (3, "auto", 0)])
def test_hf_answers_where_memory_is_too_small(
    tiny_folder: Path, slots: float, size: Any, by_engine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot has keys and values: 2 layers, 2 heads of width 8, float64; fewer rows than the batch size are too few."""
    setting = {"until": [], "max_gen_toks": 10}
    requests = [compat.request("generate_until", (text, dict(setting)), "t", i) for i, text in enumerate(PROMPTS)]
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    slot = (max(len(tokenizer.encode(text)) for text in PROMPTS) + 10) * 2 * 2 * 8 * 2 * 8
    monkeypatch.setattr(hf, "available_memory", lambda _: int(slots * slot))
    lm, texts = run(tiny_folder, requests, batch_size=size)
    assert texts == run(tiny_folder, requests, batch_size=1, engine="generate")[1]
    assert lm.engine and lm.engine.statistics.answers == by_engine


# --------------------------------------------------------------------------- arguments and ranks


def test_the_default_is_auto_and_batched_with_a_router() -> None:
    assert Arguments.of({"pretrained": "x"}).engine == "auto"
    assert Arguments.of({"pretrained": "x", "engine": "generate"}).engine == "generate"
    router = {"pretrained": "x", "router": "random", "router_pool": "L0H*"}
    assert Arguments.of(router).engine == Arguments.of({**router, "engine": "auto"}).engine == "batched"
    with pytest.raises(InputError):
        Arguments.of({"pretrained": "x", "engine_rows": 3})


def test_a_rank_without_requests_for_hf_runs_one_with_the_others(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hf` synchronises the ranks, so all have to call it; its answer changes nothing."""
    ran: list[int] = []
    generate = HFLM.generate_until
    monkeypatch.setattr(
        HFLM, "generate_until", lambda lm, requests, **_: ran.append(len(requests)) or generate(lm, requests)
    )
    greedy = [request for request in mixed() if request.args[1] in GREEDY]
    lm = model(tiny_folder)
    expected = lm.generate_until(greedy)
    lengths = lm.lengths
    assert not ran
    lm.any_rank = lambda _: True
    assert lm.generate_until(greedy) == expected and ran == [1] and lm.lengths == lengths


# --------------------------------------------------------------------------- lm-eval's command line


def evaluated(folder: Path, cwd: Path, name: str, words: tuple[str, ...] = (), **arguments: Any) -> Any:
    """Evaluate a tiny task by lm-eval's command; return the texts of its log by document."""
    output = cwd / name
    model_args = {"pretrained": str(folder), "dtype": "float64", **arguments}
    command = ["--model", "pruned-hf", "--tasks", "prune_tiny_words", "--limit", "6", "--device", "cpu"]
    command += ["--model_args", json.dumps(model_args), "--output_path", str(output), "--log_samples", *words]
    assert lm_eval(*command, cwd=cwd) == 0
    (path,) = output.rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["doc_id"]: row["filtered_resps"] for row in rows}


UNTIL = json.dumps({"until": ["e", "th"], "max_gen_toks": 40})


@crossed(
    {
        "dtype": ["float32", "float64"],
        "arguments": [{}, {"think_end_token": "1"}, {"think_end_token": 90}, {"max_length": 70}],
        "heads": [{}, {"heads": HEADS}],
    },
    times=2,
    ids=str,
)
def test_the_command_gives_the_same_texts(
    tiny_folder: Path, tmp_path: Path, dtype: str, arguments: dict[str, Any], heads: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Stop texts, a delimiter of thoughts as a text and as a token, prompts that are cut; without and with heads."""
    counts: list[int] = []
    decode = Engine.decode
    monkeypatch.setattr(
        Engine, "decode", lambda engine, requests: counts.append(len(requests)) or decode(engine, requests)
    )
    texts = [
        evaluated(tiny_folder, tmp_path, engine, ("--gen_kwargs", UNTIL, "--batch_size", "4"), dtype=dtype,
                  engine=engine, **arguments, **heads)
        for engine in ("generate", "auto")
    ]  # fmt: skip
    assert texts[0] == texts[1] and len(texts[0]) == 6
    assert counts == [6]
