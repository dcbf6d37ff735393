"""`--model pruned-server` against a stub server: the answers equal those of `pruned-hf`, also when servers fail."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.api_models import JsonChatStr

from lmeval_prune import InputError
from lmeval_prune.models.answer_store import read_answers
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.models.pruned_server import PrunedServerChatLM, PrunedServerLM, log_probability, sampling_seed
from tests.conftest import task_manager
from tests.stub_server import Stub
from tests.test_pruned_hf import request, requests

pytestmark = pytest.mark.usefixtures("quick_retries")
HEADS = ("L0H0", "L0H1", "L0H2", "L0H3", "L1H2")
ROUTED = {"router": "random", "router_pool": "+".join([*HEADS, "dense"])}
TASK = "prune_tiny_words_pass4"


def served(folder: Path, stub: Stub, **arguments: Any) -> PrunedServerLM:
    model_args = {"pretrained": str(folder), "server": stub.kind, "dtype": "float64", "max_retries": 4, **arguments}
    return PrunedServerLM(stub.url, **model_args)


def evaluate(lm: Any, task: str = TASK, **options: Any) -> list[Any]:
    settings = {"gen_kwargs": {"max_gen_toks": 6}, "limit": 3, **options}
    results = simple_evaluate(model=lm, tasks=[task], task_manager=task_manager(), bootstrap_iters=0, **settings)
    assert results is not None
    return [[sample["arguments"][0][0], sample["resps"]] for sample in results["samples"][task]]


@pytest.fixture(scope="module")
def routed(tiny_folder: Path) -> list[Any]:
    """Answers of `pruned-hf`."""
    lm = PrunedHFLM(str(tiny_folder), dtype="float64", device="cpu", **ROUTED)
    return evaluate(lm)


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_tries_are_those_of_pruned_hf(tiny_folder: Path, routed: list[Any], kind: str) -> None:
    with Stub(tiny_folder, HEADS, kind) as stub:
        assert evaluate(served(tiny_folder, stub, **ROUTED)) == routed
    assert len({text for _, ((*texts,),) in routed for text in texts}) > 4  # heads matter


def test_what_is_always_pruned_joins_the_head_of_a_try(tiny_folder: Path) -> None:
    arguments = {"heads": "L1H0", "router": "random", "router_pool": "L0H1+L1H2+L0H2+L0H3"}
    expected = evaluate(PrunedHFLM(str(tiny_folder), dtype="float64", device="cpu", **arguments))
    unions = ("L0H1+L1H0", "L1H0+L1H2", "L0H2+L1H0", "L0H3+L1H0")
    for kind, adapters in (("vllm", unions), ("llamacpp", ("L1H0", "L0H1", "L1H2", "L0H2", "L0H3"))):  # which compose
        with Stub(tiny_folder, adapters, kind) as stub:
            assert evaluate(served(tiny_folder, stub, **arguments)) == expected


@pytest.mark.parametrize("heads", [pytest.param(None, marks=pytest.mark.long), "L0H1+L1H2"])
def test_given_texts_are_scored_as_pruned_hf_scores_them(tiny_folder: Path, tmp_path: Path, heads: str | None) -> None:
    hf = PrunedHFLM(str(tiny_folder), dtype="float64", device="cpu", heads=heads)
    with Stub(tiny_folder, ("L0H1+L1H2",)) as stub:
        lm = served(tiny_folder, stub, heads=heads, responses=str(tmp_path / "r"))
        for _ in range(2):  # the second time from the store
            for kind in ("loglikelihood", "loglikelihood_rolling"):
                count = len(stub.payloads)
                for expected, own in zip(*(getattr(x, kind)(requests(kind)) for x in (hf, lm)), strict=True):
                    assert own == pytest.approx(expected, abs=1e-9)
        assert len(stub.payloads) == count
        lines = map(json.loads, (tmp_path / "r" / "rank-0.jsonl").read_text().splitlines())
        assert {line["head"] for line in lines} == {heads or "dense"}
        lm.close()
        settings = {"tasks": ["prune_tiny_choice"], "limit": 4, "task_manager": task_manager()}
        own, expected = (simple_evaluate(x, **settings) for x in (served(tiny_folder, stub, heads=heads), hf))
        assert own["results"] == expected["results"]


FAULTS = ["500", "429", "cut", "wrong", "twice", "garbage", "abort"]


def test_faults_lose_nothing_and_count_nothing_twice(tiny_folder: Path, routed: list[Any], tmp_path: Path) -> None:
    kinds = iter(FAULTS * 100)
    faulty = {number: next(kinds) for number in range(0, 200, 2)}
    with Stub(tiny_folder, HEADS, fault=lambda number, payload: faulty.get(number)) as stub:
        lm = served(tiny_folder, stub, **ROUTED, responses=str(tmp_path / "r"), probe=False, max_retries=30)
        assert evaluate(lm) == routed
        lm.close()
    assert {faulty.get(number) for number in range(len(stub.payloads))} >= {*FAULTS, None}
    lines = [json.loads(line) for line in (tmp_path / "r" / "rank-0.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["key"] for line in lines}) == 3 * 4


def test_a_server_that_was_started_again_works_on(tiny_folder: Path, routed: list[Any]) -> None:
    revived: list[Stub] = []

    def dies(number: int, payload: dict) -> str | None:
        return "die" if number == first + 4 else None

    with Stub(tiny_folder, HEADS) as stub:
        lm = served(tiny_folder, stub, **ROUTED, num_concurrent=1, max_retries=12)
        first = len(stub.payloads)
        stub.fault, die = dies, stub.die

        def die_and_rise() -> None:
            stub.die = die  # type: ignore[method-assign]
            die()
            revived.append(Stub(tiny_folder, HEADS, port=stub.port))

        stub.die = die_and_rise  # type: ignore[method-assign]
        assert evaluate(lm) == routed
    assert len(revived[0].payloads) == 12 - 4
    revived[0].die()


def test_every_sampled_try_has_a_seed_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    settings = {"max_gen_toks": 8, "temperature": 1.0, "do_sample": True}
    tries = [request("generate_until", ("a b c", settings), 0, 4)] * 4
    with Stub(tiny_folder) as stub:
        texts = served(tiny_folder, stub, probe=False).generate_until(tries)
        assert len(set(texts)) == 4
        seeds = {seed: {sampling_seed(seed, repeat) for repeat in range(4)} for seed in (1234, 1235)}
        assert {payload["seed"] for payload in stub.payloads} == seeds[1234]
        assert len(seeds[1234] | seeds[1235]) == 8  # runs of neighbouring seeds share no try
        stored = served(tiny_folder, stub, probe=False, responses=str(tmp_path / "r"))
        assert stored.generate_until(tries) == texts
        stored.close()
        again = served(tiny_folder, stub, probe=False, responses=str(tmp_path / "r"))
        count = len(stub.payloads)
        assert again.generate_until(tries) == texts and len(stub.payloads) == count
        again.close()
        other = served(tiny_folder, stub, probe=False, responses=str(tmp_path / "r"), seed=7)
        assert other.generate_until(tries) != texts
        other.close()


def test_greedy_tries_are_one_answer_and_settings_are_lm_evals(tiny_folder: Path, tmp_path: Path) -> None:
    greedy = {"max_gen_toks": 4, "until": ["\n"], "do_sample": False}
    with Stub(tiny_folder) as stub:
        lm = served(tiny_folder, stub, probe=False, responses=str(tmp_path / "r"))
        lm.generate_until([request("generate_until", ("a", {**greedy}), 0, 3)] * 3)
        lm.close()
        (payload,) = stub.payloads
        lm = served(tiny_folder, stub, probe=False)
        lm.generate_until([request("generate_until", ("a", {"max_gen_toks": 4, "do_sample": True}), 0)])
        lm.generate_until([request("generate_until", ("a", {**greedy, "temperature": 0.7}), 0)])
    assert payload["temperature"] == 0 and payload["stop"] == ["\n", "</s>"] and payload["max_tokens"] == 4
    assert payload["prompt"] == lm.tok_encode("a") and "do_sample" not in payload and "until" not in payload
    # lm-eval's own class would send 0 and 0.7
    assert [payload["temperature"] for payload in stub.payloads[1:]] == [1, 0]


def test_llama_cpp_is_told_the_scale_of_every_adapter(tiny_folder: Path) -> None:
    with Stub(tiny_folder, ("L0H1", "L1H2", "L0H1+L1H0"), "llamacpp") as stub:
        numbers = {adapter["path"].split("/")[2]: adapter["id"] for adapter in stub.lora_adapters()}
        for heads, on in (
            (None, set()),
            ("L1H2", {"L1H2"}),
            ("L0H1+L1H2", {"L0H1", "L1H2"}),
            ("L0H1+L1H0", {"L0H1+L1H0"}),
        ):
            lm = served(tiny_folder, stub, heads=heads)
            lm.generate_until([request("generate_until", ("a", {"max_gen_toks": 2, "temperature": 0.5}), 0)])
            payload = stub.payloads[-1]
            assert payload["lora"] == [{"id": n, "scale": int(n in {numbers[name] for name in on})} for n in range(3)]
            assert payload["cache_prompt"] is False  # it may have been computed under another adapter
            assert (payload["top_k"], payload["top_p"], payload["min_p"]) == (50, 1.0, 0.0)  # as `hf`


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_the_repetition_penalty_is_that_of_hf(tiny_folder: Path, tmp_path: Path, kind: str) -> None:
    """It counts the prompt, is the model's own if the task has none, and never a default of the server."""
    folder = with_generation_config(tiny_folder, tmp_path, repetition_penalty=1.1)
    prompt = "the cat sat on a mat and " * 5  # longer than llama.cpp's own window
    overrides = [{}, {"repetition_penalty": 1.0}, {"repetition_penalty": 3.0}]
    instances = [text(prompt, number, max_gen_toks=24, **settings) for number, settings in enumerate(overrides)]
    expected = PrunedHFLM(str(folder), dtype="float64", device="cpu").generate_until(instances)
    assert len(set(expected)) == 3
    with Stub(folder, kind=kind) as stub:
        stub.defaults = {stub.penalty: 9.0, "presence_penalty": 1.0, "frequency_penalty": 1.0, "mirostat": 2}
        assert served(folder, stub).generate_until(instances) == expected
    for payload in stub.payloads:
        sent = {name: payload.get(name) for name in ("presence_penalty", "frequency_penalty", "mirostat")}
        assert not any(sent.values()) and payload.get("repeat_last_n", 0) <= 512  # of which it allocates memory


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_that_a_full_context_ends_is_refused_and_not_stored(
    tiny_folder: Path, tmp_path: Path, chat: bool
) -> None:
    words = ["one two", "one two three " * 3]
    kind = PrunedServerChatLM if chat else PrunedServerLM
    with Stub(tiny_folder, HEADS, "llamacpp") as stub:
        options = {"pretrained": str(tiny_folder), "server": "llamacpp", "dtype": "float64", "probe": False}
        lm = kind(stub.url, **options, responses=str(tmp_path / "r"))
        chats = [[{"role": "user", "content": content}] for content in words]
        texts = [
            stub.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages in chats
        ]
        stub.length = len(stub.tokenizer.encode((texts if chat else words)[1])) + 3  # started again with less memory
        contexts = [JsonChatStr(json.dumps(messages)) for messages in chats] if chat else words
        with pytest.raises(InputError):
            lm.generate_until([text(context, number) for number, context in enumerate(contexts)])
        lm.close()
    assert len((tmp_path / "r" / "rank-0.jsonl").read_text().splitlines()) == 1


def test_stored_answers_are_those_of_the_file_that_a_llama_cpp_has(tiny_folder: Path, tmp_path: Path) -> None:
    """A GGUF file of a cut model has the `pretrained=` of the dense one: it has no folder of its own."""
    with Stub(tiny_folder, HEADS, "llamacpp", name="/models/dense.gguf") as stub:
        for count, (name, size) in enumerate(
            [
                ("/models/dense.gguf", 1000),
                ("/models/cut.gguf", 1000),
                ("/models/cut.gguf", 900),
                ("/seed1/cut.gguf", 900),  # as large: another training
            ],
            1,
        ):
            stub.name, stub.size = name, size
            for _ in range(2):
                lm = served(tiny_folder, stub, probe=False, responses=str(tmp_path / "r"))
                lm.generate_until([text("a b")])
                lm.close()
                assert len(stub.payloads) == count


def test_answers_of_the_store_are_those_of_the_variant_and_not_of_its_router(tiny_folder: Path, tmp_path: Path) -> None:
    with Stub(tiny_folder, HEADS) as stub:
        store = {"responses": str(tmp_path / "r"), "probe": False}
        for seed in (0, 1):
            lm = served(tiny_folder, stub, **ROUTED, router_seed=seed, **store)
            evaluate(lm)
            lm.close()
        sent = Counter(json.dumps([payload["model"], payload["prompt"]]) for payload in stub.payloads)
        assert len(sent) > 12 and set(sent.values()) == {1}
        instance = request("generate_until", ("some text", {"max_gen_toks": 2}), 0)
        for count, other in enumerate(
            ({}, {"dtype": "bfloat16"}, {"max_length": 6}, {"max_length": 7}, {"heads": "L0H1"}), len(stub.payloads)
        ):
            for _ in range(2):
                lm = served(tiny_folder, stub, **{**store, **other})
                lm.generate_until([instance])
                assert len(stub.payloads) == count + 1
                lm.close()
        stub.length = 400  # nothing is cut
        lm = served(tiny_folder, stub, **store)
        lm.generate_until([instance])
        assert lm.max_length == 400 and len(stub.payloads) == count + 1
        lm.close()


def test_chats(tiny_folder: Path) -> None:
    with Stub(tiny_folder, HEADS) as stub:
        hf = PrunedHFLM(str(tiny_folder), dtype="float64", device="cpu", heads="L0H1")
        expected = [texts for _, texts in evaluate(hf, "prune_tiny_words", apply_chat_template=True)]
        plain = served(tiny_folder, stub, heads="L0H1")
        assert [texts for _, texts in evaluate(plain, "prune_tiny_words", apply_chat_template=True)] == expected
        chat = PrunedServerChatLM(stub.url, pretrained=str(tiny_folder), heads="L0H1")
        assert [texts for _, texts in evaluate(chat, "prune_tiny_words", apply_chat_template=True)] == expected
        assert "messages" in stub.payloads[-1]
        with pytest.raises(AttributeError):
            evaluate(chat, "prune_tiny_words")  # prompts that are no chats


# ---------------------------------------------------------------------- refused arguments and servers


def test_a_server_that_is_set_up_wrongly_is_found_out(tiny_folder: Path) -> None:
    with Stub(tiny_folder, HEADS, silent=("L0H2",)) as stub, pytest.raises(InputError):
        served(tiny_folder, stub, **ROUTED)
    with Stub(tiny_folder, HEADS) as stub:
        stub.tokenizer = type("Other", (), {"encode": lambda self, text, **_: list(text.encode())})()
        with pytest.raises(InputError):
            served(tiny_folder, stub)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 10**400, 0.5, None, True], ids=str)
def test_log_probabilities_are_numbers_up_to_zero(value: Any) -> None:
    with pytest.raises(InputError):
        log_probability(value)
    assert [log_probability(number) for number in (0, -9999.0, 1e-6)] == [0.0, -9999.0, 1e-6]


@pytest.mark.parametrize(("where", "value"), [("token_logprobs", math.nan), ("top_logprobs", None)])
@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_log_probabilities_that_are_none_are_no_answers(
    tiny_folder: Path, tmp_path: Path, kind: str, where: str, value: Any
) -> None:
    instances = [request(kind, ("a b", " yes") if kind == "loglikelihood" else ("a b yes",), n) for n in range(2)]
    instances[1] = request(kind, ("a b", " nope") if kind == "loglikelihood" else ("a b nope",), 1)
    with Stub(tiny_folder, HEADS) as stub:
        lm = served(tiny_folder, stub, heads="L0H1", probe=False, responses=str(tmp_path), num_concurrent=1)

        def spoil(body: dict) -> None:
            if len(stub.payloads) == 2:
                every = body["choices"][0]["logprobs"][where]
                every[-2] = value if where == "token_logprobs" else {**every[-2], "token_id:1": value}

        stub.spoil = spoil
        with pytest.raises(InputError):
            getattr(lm, kind)(instances)
        assert len(stub.payloads) == 2 and len(lm.store.responses) == 1
        lm.close()


# ---------------------------------------------------------------------- servers that change, wrong adapters


def with_generation_config(tiny_folder: Path, tmp_path: Path, **own: Any) -> Path:
    """A copy of the model with settings of its own."""
    folder = shutil.copytree(tiny_folder, tmp_path / "tiny-llama")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    return folder


def text(context: Any, number: int = 0, **settings: Any) -> Any:
    return request("generate_until", (context, {"max_gen_toks": 8, **settings}), number)


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_a_chat_that_ends_with_the_beginning_of_the_answer_is_continued(tiny_folder: Path, kind: str) -> None:
    """As of a task with `gen_prefix`; the answer is what follows."""
    history = [{"role": "user", "content": "x y"}, {"role": "assistant", "content": "The answer"}]
    hf = PrunedHFLM(str(tiny_folder), dtype="float64", device="cpu")
    expected, other = (
        hf.generate_until([text(hf.apply_chat_template(history, add_generation_prompt=begins))])
        for begins in (False, True)
    )
    assert expected != other
    with Stub(tiny_folder, kind=kind) as stub:
        chat = PrunedServerChatLM(stub.url, pretrained=str(tiny_folder), server=kind)
        context = chat.apply_chat_template(history, add_generation_prompt=False)
        assert chat.generate_until([text(context)]) == expected


@pytest.mark.parametrize(("kind", "failure"), [("vllm", "500"), ("llamacpp", "cut")])
def test_another_model_or_order_of_adapters_in_the_place_of_a_server_is_not_asked(
    tiny_folder: Path, kind: str, failure: str
) -> None:
    with Stub(tiny_folder, HEADS, kind) as stub:
        lm = served(tiny_folder, stub, heads="L0H1", num_concurrent=1, probe=False)

        def fault(number: int, payload: dict) -> str:
            stub.adapters, stub.root = ("L0H0", "L0H3", "L0H2", "L0H1", "L1H2"), "another"
            return failure

        stub.fault = fault
        for contexts in (("a b", "c d"), ("e f",)):
            with pytest.raises(InputError):
                lm.generate_until([text(context, number) for number, context in enumerate(contexts)])
        assert len(stub.payloads) == 1


def test_answers_of_llamacpp_after_its_adapters_changed_places_are_not_stored(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """No request fails: another server has taken the place between two answers."""
    with Stub(tiny_folder, HEADS, "llamacpp") as stub:
        lm = served(tiny_folder, stub, heads="L0H1", num_concurrent=1, responses=str(tmp_path))

        def fault(number: int, payload: dict) -> None:
            if len(list(read_answers(tmp_path))) == 1:
                stub.adapters = ("L0H0", "L0H3", "L0H2", "L0H1", "L1H2")

        stub.fault = fault
        with pytest.raises(InputError):
            lm.generate_until([text(context, number) for number, context in enumerate(("a b", "c d", "e f"))])
        lm.close()
    assert len(list(read_answers(tmp_path))) == 1


# ---------------------------------------------------------------------- requests and stored answers


class Mixing(Stub):
    """Answers requests for the unpruned model under an adapter while others are being answered."""

    busy = 0

    def heads(self, payload: dict[str, Any]) -> str | None:
        self.busy += 1
        time.sleep(0.1)
        is_mixed = self.busy > 1
        time.sleep(0.05)
        self.busy -= 1
        heads = super().heads(payload)
        return self.adapters[-1] if heads == "" and is_mixed else heads


def test_a_server_that_mixes_variants_is_refused(tiny_folder: Path) -> None:
    routed = {"router": "random", "router_pool": "L0H0+L0H1+dense"}
    with Stub(tiny_folder, ("L0H0", "L0H1")) as stub:
        served(tiny_folder, stub, **routed)
    with Mixing(tiny_folder, ("L0H0", "L0H1")) as stub, pytest.raises(InputError, match="mixes variants"):
        served(tiny_folder, stub, **routed)


def test_whole_texts_longer_than_a_request_are_scored_in_windows(tiny_folder: Path) -> None:
    """Two tokens shorter than those of `hf`."""
    hf = PrunedHFLM(str(tiny_folder), dtype="float64", device="cpu", max_length=30)
    with Stub(tiny_folder) as stub:
        lm = served(tiny_folder, stub, probe=False, max_length=32)
        instances = [request("loglikelihood_rolling", ("x" * n,), n) for n in (29, 30, 31, 32, 33, 90)]
        assert lm.loglikelihood_rolling(instances) == pytest.approx(hf.loglikelihood_rolling(instances), abs=1e-9)


def test_answers_depend_on_the_prefix(tiny_folder: Path, tmp_path: Path) -> None:
    instances = [request("loglikelihood_rolling", ("hello",), 0)]
    likelihoods = []
    with Stub(tiny_folder) as stub:
        for prefix in (None, 50):
            store = {"responses": str(tmp_path / "r")}
            lm = served(tiny_folder, stub, probe=False, custom_prefix_token_id=prefix, **store)
            likelihoods += lm.loglikelihood_rolling(instances)
            lm.close()
    assert likelihoods[0] != likelihoods[1]


def test_settings_that_a_server_would_ignore_are_refused(tiny_folder: Path) -> None:
    with Stub(tiny_folder) as stub, Stub(tiny_folder, kind="llamacpp") as other:
        lm = served(tiny_folder, stub, probe=False)
        for name, value in (("seed", 7), ("n", 2), ("num_beams", 4), ("repetition_penaltyy", 3.0), ("model", "x")):
            with pytest.raises(InputError, match=name):
                lm.generate_until([text("a", **{name: value})])
        lm.generate_until([text("a", num_beams=1, repetition_penalty=1.5)])
        assert stub.payloads[-1]["repetition_penalty"] == 1.5 and "num_beams" not in stub.payloads[-1]
        with pytest.raises(InputError, match="min_tokens"):
            served(tiny_folder, other, probe=False).generate_until([text("a", min_tokens=2)])


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_sampling_is_by_the_models_own_settings(tiny_folder: Path, tmp_path: Path, kind: str) -> None:
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}
    folder = with_generation_config(tiny_folder, tmp_path, **own)
    with Stub(tiny_folder, kind=kind) as stub:
        lm = served(folder, stub, probe=False)
        lm.generate_until([text("a", do_sample=True, top_k=0)])
    sent = stub.payloads[-1]
    assert [sent[name] for name in ("temperature", "top_p", "top_k", "min_p")] == [0.6, 0.9, -1, 0.0]


@pytest.mark.parametrize(
    ("own", "off"),
    [
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 0}),
        ({"suppress_tokens": [70]}, {"suppress_tokens": None}),
        ({"num_beams": 2}, {"num_beams": 1}),
        ({"typical_p": 0.5, "renormalize_logits": True}, {}),  # without effect on greedy answers
    ],
)
def test_settings_of_the_model_that_a_server_does_not_know_are_refused(
    tiny_folder: Path, tmp_path: Path, own: dict[str, Any], off: dict[str, Any]
) -> None:
    """`hf` obeys them, also in greedy answers; a task can switch them off."""
    folder = with_generation_config(tiny_folder, tmp_path, **own)
    with Stub(tiny_folder) as stub:
        lm = served(folder, stub, probe=False)
        if off:
            with pytest.raises(InputError, match=next(iter(off))):
                lm.generate_until([text("a")])
        lm.generate_until([text("a", **off)])
    assert not {*own} & stub.payloads[-1].keys()


def test_an_answer_without_text_is_not_kept(tiny_folder: Path, tmp_path: Path) -> None:
    class Null(Stub):
        def complete(self, payload: dict, heads: str, chat: bool) -> dict:
            body = super().complete(payload, heads, chat)
            body["choices"][0]["message"] = {"role": "assistant", "content": None}
            return body

    chat = JsonChatStr(json.dumps([{"role": "user", "content": "x"}]))
    with Null(tiny_folder) as stub:
        model_args = {
            "pretrained": str(tiny_folder),
            "dtype": "float64",
            "responses": str(tmp_path / "r"),
            "probe": False,
        }
        lm = PrunedServerChatLM(stub.url, **model_args, enable_thinking=False)
        assert lm.generate_until([text(chat, 0), text(chat, 1, max_gen_toks=3)]) == ["", ""]
        lm.close()
    assert stub.payloads[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert not list(read_answers(tmp_path / "r"))


def test_the_template_is_told_what_hf_tells_it(tiny_folder: Path) -> None:
    with Stub(tiny_folder) as stub:
        lm = served(tiny_folder, stub, probe=False, enable_thinking=False, chat_template_args={"tone": "dry"})
        lm.tokenizer.chat_template = "{{ messages[0]['content'] }} {{ enable_thinking }} {{ tone }}"
        assert lm.apply_chat_template([{"role": "user", "content": "x"}]) == "x False dry"
