"""`pruned-hf` against `hf` and against a plain transformers script."""

import hashlib
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from lmeval_prune import HeadMask, InputError, Plan, map_model
from lmeval_prune.architectures import ModelMap, weights_fingerprint
from lmeval_prune.interventions import interventions_on
from lmeval_prune.models.answer_store import read_answers
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.checkpoint import Checkpoint
from lmeval_prune.models.hf_arguments import hf_arguments, parse_hf_argument
from lmeval_prune.models.identity import ModelIdentity
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.settings import Natural
from lmeval_prune.tasks import compat
from tests.conftest import task_manager
from tests.tiny_models import family_folder, output, tiny, tokens

HEADS = "L0H1+L1H2-3"
PROMPTS = [
    "How many?",
    "A longer prompt, with a number 42.",
    "x",
    "Two plus two is",
    "Round and round and round",
]
GENERATE = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}


def request(kind: str, arguments: tuple, doc_id: int, repeats: int = 1, task: str = "toy") -> Instance:
    return compat.request(kind, arguments, task, doc_id, repeats)


def requests(kind: str) -> list[Instance]:
    if kind == "generate_until":
        return [request(kind, (p, dict(GENERATE)), i) for i, p in enumerate(PROMPTS)]
    if kind == "loglikelihood":  # one-token continuations of the same context share a forward pass
        return [request(kind, (p, c), i) for i, p in enumerate(PROMPTS) for c in ("a", "b", " yes indeed")]
    return [request(kind, (p * 3,), i) for i, p in enumerate(PROMPTS)]


def model(folder: Path, kind: type = PrunedHFLM, **arguments):
    return kind(str(folder), **{"dtype": "float64", "device": "cpu", "batch_size": 3, **arguments})


KINDS = ["generate_until", "loglikelihood", "loglikelihood_rolling"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_heads_it_is_hf_to_the_bit(tiny_folder: Path, kind: str) -> None:
    scores = getattr(model(tiny_folder, dtype="float32"), kind)(requests(kind))
    assert scores == getattr(model(tiny_folder, HFLM, dtype="float32"), kind)(requests(kind))


def test_with_heads_it_agrees_with_a_plain_script(tiny_folder: Path) -> None:
    """The script: zero the columns, then score and generate each prompt alone with transformers."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    with torch.no_grad():
        plain.model.layers[0].self_attn.o_proj.weight[:, 8:16] = 0
        plain.model.layers[1].self_attn.o_proj.weight[:, 16:32] = 0

    def score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
        with torch.no_grad():
            logits = plain(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
        places = range(len(context) - 1, len(context) + len(continuation) - 1)
        total = sum(float(logits[p, t]) for p, t in zip(places, continuation, strict=True))
        return total, all(int(logits[p].argmax()) == t for p, t in zip(places, continuation, strict=True))

    pruned = model(tiny_folder, heads=HEADS)
    dense = model(tiny_folder, HFLM)
    expected = [score(tokenizer.encode(p), tokenizer.encode(c)) for p in PROMPTS for c in ("a", "b", " yes indeed")]
    actual = pruned.loglikelihood(requests("loglikelihood"))
    for (value, greedy), (reference, reference_greedy) in zip(actual, expected, strict=True):
        assert value == pytest.approx(reference, abs=1e-9) and greedy == reference_greedy
    assert [v for v, _ in dense.loglikelihood(requests("loglikelihood"))] != pytest.approx(
        [v for v, _ in expected], abs=1e-3
    )

    rolling = [score([1], tokenizer.encode(p * 3))[0] for p in PROMPTS]
    actual = pruned.loglikelihood_rolling(requests("loglikelihood_rolling"))
    assert np.array(actual) == pytest.approx(np.array(rolling), abs=1e-9)

    texts = []
    for prompt in PROMPTS:
        inputs = torch.tensor([tokenizer.encode(prompt)])
        generated = plain.generate(inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, inputs.shape[1] :]
        texts.append(tokenizer.decode(generated, skip_special_tokens=True).split("\n")[0])
    assert pruned.generate_until(requests("generate_until")) == texts
    assert dense.generate_until(requests("generate_until")) != texts


@pytest.mark.parametrize("kind", KINDS)
def test_batch_size_and_order_do_not_matter(tiny_folder: Path, kind: str) -> None:
    reference = getattr(model(tiny_folder, heads=HEADS, batch_size=1), kind)(requests(kind))
    for size in (3, 16):
        items = requests(kind)
        order = list(range(len(items)))
        random.Random(size).shuffle(order)
        actual = getattr(model(tiny_folder, heads=HEADS, batch_size=size), kind)([items[i] for i in order])
        for position, i in enumerate(order):
            expected = reference[i]
            if kind == "generate_until":
                assert actual[position] == expected
            else:
                assert actual[position] == pytest.approx(expected, abs=1e-9)


def test_results_file_names_heads_and_artefact(tiny_folder: Path, tmp_path: Path) -> None:
    attention = map_model(AutoModelForCausalLM.from_pretrained(tiny_folder))
    HeadMask("L0H1").save(tmp_path / "mask.json", attention)
    arguments = {
        "pretrained": str(tiny_folder),
        "mask": str(tmp_path / "mask.json"),
        "heads": "L1H2-3",
        "dtype": "float32",
    }
    results = simple_evaluate(
        model="pruned-hf",
        model_args=arguments,
        tasks=["prune_tiny_choice"],
        limit=3,
        device="cpu",
        task_manager=task_manager(),
    )
    pruning = results["config"]["pruning"]
    assert pruning["heads"] == ["L0H1", "L1H2", "L1H3"]
    assert (pruning["heads_pruned"], pruning["heads_total"]) == (3, 8)
    assert len(pruning["mask_file_sha256"]) == 64 and pruning["mask_fingerprint"]
    assert results["config"]["model_args"]["heads"] == "L1H2-3"
    json.dumps(pruning)


def test_what_is_applied_is_said(tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Plan(heads=("L0H1",), channels={"L1": "0-3"}).save(
        tmp_path / "plan.json", map_model(AutoModelForCausalLM.from_pretrained(tiny_folder))
    )
    with caplog.at_level("INFO", logger="lmeval_prune"):
        lm = model(tiny_folder, heads="L0H1+L1H2")
        others = {"dtype": "float64", "device": "cpu", "batch_size": 3}
        lm.reconfigure(**others, plan=str(tmp_path / "plan.json"))
        lm.reconfigure(**others, token_filter=0.25)
    heads, plan, token_filter = [
        item.getMessage() for item in caplog.records if item.getMessage().startswith("applied")
    ]
    assert heads == "applied: 2 of 8 heads masked: L0H1, L1H2"
    assert plan.startswith("applied: a plan removes 1 of 8 heads and 4 of ")
    assert token_filter.startswith("applied: token_filter: ratio=0.25, ")
    assert all("\n" not in item and len(item) < 400 for item in (heads, plan, token_filter))


def test_hooks_leave_with_the_model_class(tiny_folder: Path) -> None:
    network = tiny("llama", vocab_size=259, max_position_embeddings=512)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    wrapped = PrunedHFLM(network, heads=HEADS, tokenizer=tokenizer)
    assert sum(len(m._forward_pre_hooks) for m in network.modules()) == 2
    del wrapped
    assert sum(len(m._forward_pre_hooks) for m in network.modules()) == 0


def test_recorded_hash_is_of_the_mask_that_was_read(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mask.json"
    HeadMask("L0H1").save(path, map_model(AutoModelForCausalLM.from_pretrained(tiny_folder)))
    before = path.read_bytes()
    pruned = model(tiny_folder, mask=str(path))
    path.unlink()
    assert pruned.pruning_info()["mask_file_sha256"] == hashlib.sha256(before).hexdigest()


def test_close_undoes_the_pruning(tiny_folder: Path) -> None:
    network = tiny("llama", vocab_size=259, max_position_embeddings=512)
    inputs = tokens()
    before = output(network, inputs)
    wrapped = PrunedHFLM(network, heads=HEADS, tokenizer=AutoTokenizer.from_pretrained(tiny_folder))
    assert not torch.equal(output(network, inputs), before)
    wrapped.close()
    assert torch.equal(output(network, inputs), before)


def test_an_argument_of_the_model_config_is_not_taken_for_a_slip(tiny_folder: Path) -> None:
    assert model(tiny_folder, heads=HEADS, attention_dropout=0.0).config.attention_dropout == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_decoders_are_pruned_too(tiny_folder: Path, tmp_path: Path, kind: str) -> None:
    tiny("bart", vocab_size=259, pad_token_id=0).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path)
    zeroed = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    for layer in zeroed.model.decoder.layers:
        layer.encoder_attn.out_proj.weight.data[:, :24] = 0
    zeroed.save_pretrained(tmp_path / "zeroed")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "zeroed")
    answers = [
        getattr(model(folder, heads=heads), kind)(requests(kind))
        for folder, heads in ((tmp_path, None), (tmp_path, "cross.L*H0-2"), (tmp_path / "zeroed", None))
    ]
    if kind == "generate_until":
        assert answers[0] != answers[1] == answers[2]
    else:
        first, pruned, zeroed = ([value[0] if isinstance(value, tuple) else value for value in a] for a in answers)
        assert first != pytest.approx(pruned, abs=1e-3) and pruned == pytest.approx(zeroed, abs=1e-9)


def test_automatic_batch_size_works(tiny_folder: Path) -> None:
    automatic = model(tiny_folder, heads=HEADS, batch_size="auto", max_batch_size=4, max_length=128)
    expected = [v for v, _ in model(tiny_folder, heads=HEADS).loglikelihood(requests("loglikelihood"))]
    assert [v for v, _ in automatic.loglikelihood(requests("loglikelihood"))] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("kind", "length"), [("generate_until", 5 + 12), ("loglikelihood_rolling", 15)])
def test_an_automatic_batch_size_is_sought_with_no_more_than_the_requests(
    tiny_folder: Path, kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts of 1 and 5 tokens, or texts of three times as many."""
    sizes: list[torch.Size] = []
    call = PrunedHFLM._model_call
    monkeypatch.setattr(PrunedHFLM, "_model_call", lambda lm, inps: sizes.append(inps.shape) or call(lm, inps))
    asked = [each for each in requests(kind) if each.args[0].startswith("x")]
    asked.append(replace(asked[0], arguments=(asked[0].args[0].replace("x", "xxxxx"), *asked[0].args[1:])))
    model(tiny_folder, batch_size="auto").answer(kind, asked, True)
    assert max(sizes) == (2, length)


def test_folding_any_head_changes_the_fingerprint() -> None:
    model = tiny("llama", hidden_size=576, num_attention_heads=9, num_key_value_heads=3, dtype=torch.float32)
    seen = {weights_fingerprint(model)}
    for head in range(9):
        columns = model.model.layers[0].self_attn.o_proj.weight.data[:, 64 * head : 64 * head + 64]
        kept = columns.clone()
        columns.zero_()
        seen.add(weights_fingerprint(model))
        columns.copy_(kept)
    assert len(seen) == 10
    model.register_buffer("scales", torch.ones(3))
    assert weights_fingerprint(model) not in seen
    assert weights_fingerprint(model.to("meta")) is None


def test_fingerprint_tells_weights_apart() -> None:
    first, again, other = tiny("llama"), tiny("llama"), tiny("llama", seed=1)
    assert weights_fingerprint(first) == weights_fingerprint(again) != weights_fingerprint(other)
    assert weights_fingerprint(first.float()) != weights_fingerprint(again)


def test_peft_adapters_work(tiny_folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload().double()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "merged")
    actual = model(tiny_folder, peft=str(tmp_path / "adapter"), heads=HEADS).loglikelihood(requests("loglikelihood"))
    expected = model(tmp_path / "merged", heads=HEADS).loglikelihood(requests("loglikelihood"))
    assert [v for v, _ in actual] == pytest.approx([v for v, _ in expected], rel=1e-5)


# --------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": "L0H9"}, "L0H9: layer 0 has 4 heads, 0 to 3, counted from 0; `lmeval-prune heads` lists them"),
        ({"heads": "L7H0"}, "no attention in layer 7"),
        ({"heads": "5:3"}, "head '5:3' cannot be read"),
        ({"heads": '["not valid JSON"]'}, "head 'not valid JSON' cannot be read"),
        ({"heads": "L0H*"}, "give allow_empty_layer=true"),
        ({"head": "L0H1"}, "unknown model_arg 'head'; did you mean 'heads'"),
        ({"response": "store"}, "did you mean 'responses'"),
        ({"heads": {"head": "L0H1"}}, "heads has no setting 'head'; did you mean 'heads'"),
        ({"mask": "nowhere.json"}, "no such file: nowhere.json"),
        ({"mask": "/"}, "is a folder; name a file in it"),
        ({"plan": "nowhere/nope"}, "no such file: nowhere/nope"),
        ({"heads": "/"}, "is a folder; name a file in it"),
        ({"heads": ""}, "heads= is empty"),
        ({"dtype": "floaty"}, "dtype=floaty is not a torch dtype"),
        ({"heads": "encoder.L0H1"}, "this model's stacks are a single one"),
        ({"heads": "L0H1", "attention_path": "model.layers.{i}.self_attn"}, "all three of"),
        ({"heads": "L0H1", "tp_plan": "auto"}, "tp_plan"),
        ({"heads": "L0H*", "allow_empty_layer": "perhaps"}, "allow_empty_layer='perhaps' must be"),
        ({"heads": "L0H*", "allow_empty_layer": "no"}, "give allow_empty_layer=true"),
        ({"heads": []}, "names no head"),
        ({"heads": {}}, r"heads needs heads; .* given as JSON: --model_args .*\"heads\": \{\"heads\""),
        ({"responses": True}, "responses=True must be"),
        ({"responses": ""}, "responses= is empty"),
        ({"responses": "/dev/null/x"}, "responses=/dev/null/x cannot be used"),
        ({"mask": True}, "mask=True must be"),
        ({"mask": {"heads": "L0H1"}}, "mask=.* must be"),
        ({"mask": ""}, "mask= is empty"),
        ({"router": True}, "router=True must be"),
        ({"router": "best", "router_store": True}, "router_store=True must be"),
        ({"router": "random", "router_pool": True}, "router_pool=True must be"),
        ({"router": "random", "router_pool": ["L0H0", "L0H1"]}, "router_pool=.* must be"),
        ({"router": "random", "router_pool": "L0H0", "router_seed": "abc"}, "router_seed='abc' must be"),
        ({"router": "random", "router_pool": "L0H0", "router_size": "abc"}, "router_size='abc' must be"),
        ({"router_seed": 4}, "belong to router=: router_seed; add router=random"),
        ({"router_size": 4, "router_pool": "L0H0"}, "belong to router=: router_pool, router_size"),
        ({"attention_path": True}, "attention_path=True must be"),
        ({"attention_heads": "abc"}, "attention_heads='abc' must be"),
        ({"attention_heads": 0}, "attention_heads=0 must be"),
        ({"engine": "batched", "engine_rows": True}, "engine_rows=True must be"),
        ({"engine": "batched", "engine_rows": "many"}, "engine_rows='many' must be"),
        ({"batch_size": "abc"}, "batch_size=abc is neither"),
        ({"batch_size": 0}, "batch_size=0 is neither"),
        ({"dtype": 5}, "dtype=5 is not a torch dtype"),
        ({"max_length": 0}, "max_length=0 must be"),
        ({"max_length": -5}, "max_length=-5 must be"),
        ({"max_length": "long"}, "max_length=.long. must be"),
        ({"prefix_token_id": "abc"}, "prefix_token_id='abc' must be a whole number"),
        ({"prefix_token_id": -1}, "prefix_token_id=-1 must be"),
        ({"truncation": "maybe"}, "truncation='maybe' must be true or false"),
        ({"add_bos_token": 5}, "add_bos_token=5 must be"),
        ({"trust_remote_code": "nein"}, "trust_remote_code='nein' must be"),
        ({"parallelize": 2}, "parallelize=2 must be"),
        ({"enable_thinking": "a little"}, "enable_thinking='a little' must be"),
    ],
)
def test_a_mistake_is_one_line_before_any_weights_are_loaded(tiny_folder, no_weights, arguments, message) -> None:
    with pytest.raises(InputError, match=message) as error:
        model(tiny_folder, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("setting", [{"device_map": "auto"}, {"max_cpu_memory": "1GB", "offload_folder": "off"}])
def test_settings_of_parallelize_alone_are_said(
    tiny_folder: Path, setting: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """`hf` leaves them out without a word, and loads the model on one device."""
    model(tiny_folder, **setting)
    (message,) = [text for text in caplog.messages if "parallelize" in text and "no effect" in text]
    assert message == f"{', '.join(setting)}: no effect without parallelize=true, as in lm-eval's hf"
    caplog.clear()
    model(tiny_folder)
    assert "no effect" not in caplog.text


def test_numbers_and_switches_of_hf_have_its_types() -> None:
    """Whatever its signature names so; text, devices and models stay as they are."""
    types = hf_arguments()
    assert types["truncation"] == types["enable_thinking"] == bool | None and types["logits_cache"] is bool
    assert types["prefix_token_id"] == Natural | None and types["dtype"] is types["think_end_token"] is Any
    assert "self" not in types and "kwargs" not in types
    assert parse_hf_argument("truncation", "true") is True and parse_hf_argument("dtype", "float32") == "float32"
    assert parse_hf_argument("logits_cache", None) is None and parse_hf_argument("attn_implementation", 3) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "name a model"),
        ("smollm2-135n", "did you mean smollm2-135m"),
        ("/no/such/one", "there is no such folder"),
        ("nope/nope", "cannot read the model nope/nope here"),
        ("", "name a model"),
        (5, "name a model: .*, not 5"),
    ],
)
def test_a_model_that_is_not_there_is_said_in_one_line(name: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as error:
        PrunedHFLM(name, device="cpu", responses=str(tmp_path / "answers"))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj"])
def test_more_tokens_than_a_table_of_positions_has_are_refused_before_loading(
    family: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a name, and by a live model; as many tokens as positions are scored."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    network = tiny(family, vocab_size=len(tokenizer))
    network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    long = [request("loglikelihood_rolling", ("x" * 300,), 0)]
    assert PrunedHFLM(network, tokenizer=tokenizer, max_length=128).loglikelihood_rolling(long)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    for pretrained in (str(tmp_path), network):
        with pytest.raises(InputError, match="max_length=129, but the model has only 128 positions; give at most 128"):
            PrunedHFLM(pretrained, tokenizer=tokenizer, device="cpu", max_length=129)


def test_more_tokens_than_rotary_positions_are_said_in_a_warning(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model computes them, as under `hf`."""
    long = [request("loglikelihood_rolling", ("x" * 900,), 0)]
    scores = model(tiny_folder, max_length="600").loglikelihood_rolling(long)
    assert scores == model(tiny_folder, HFLM, max_length=600).loglikelihood_rolling(long)
    warnings = [record.getMessage() for record in caplog.records if "max_length" in record.getMessage()]
    assert warnings == ["max_length=600 is more than the 512 positions that the model's configuration names"]


def test_a_folder_without_a_model_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the model") as error:
        PrunedHFLM(str(tmp_path), device="cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("argument", [{"mask_method": "weights"}, {"token_filtre": 0.2}, {"head": "L0H1"}])
def test_an_argument_that_nobody_knows_is_said_in_one_line(tiny_folder: Path, argument: dict) -> None:
    """By a name, and by a live model, whose class would never see it."""
    network, tokenizer = tiny("llama", vocab_size=259), AutoTokenizer.from_pretrained(tiny_folder)
    for make in (lambda: model(tiny_folder, **argument), lambda: PrunedHFLM(network, tokenizer=tokenizer, **argument)):
        with pytest.raises(InputError, match=f"unknown model_arg '{next(iter(argument))}'") as error:
            make()
        assert "\n" not in str(error.value)


def test_parsed_arguments_are_taken_as_they_are(tiny_folder: Path) -> None:
    parsed = Arguments.of({"pretrained": str(tiny_folder), "heads": HEADS, "dtype": "float64", "device": "cpu"})
    lm = PrunedHFLM(parsed)
    assert lm.arguments is parsed and lm.pruning_info()["heads"] == ["L0H1", "L1H2", "L1H3"]
    lm.reconfigure(replace(parsed, interventions=()))
    assert lm.pruning_info()["heads"] == []


def test_a_checkpoint_is_compared_with_the_model_that_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps({key: value for key, value in content.items() if key != "pad_token"}))
    arguments = {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}
    identity = ModelIdentity.of_checkpoint(Checkpoint(Arguments.of(arguments).loading))
    assert ModelIdentity(**identity.to_json()) == identity
    identity.check_loaded(PrunedHFLM(**arguments))
    with pytest.raises(InputError, match=r"the dtype of the loaded model .* changed"):
        identity.check_loaded(PrunedHFLM(**{**arguments, "dtype": "float64"}))
    settings.write_text(json.dumps({**content, "bos_token": "</s>"}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    with pytest.raises(InputError, match=r"the config and tokenizer of the loaded model .* changed") as error:
        identity.check_loaded(PrunedHFLM(**arguments))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("engine", ["generate", "auto", "batched"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_gen_toks": 0}, "max_gen_toks=0 must be a whole number"),
        ({"max_completion_tokens": "few"}, "max_completion_tokens='few' must be a whole number"),
        ({"temperature": "warm"}, "temperature='warm' must be a number"),
        ({"until": 3}, "until=3 must be a text or a list of texts"),
        ({"until": None}, "until=None must be a text or a list of texts"),
        ({"temperature": -1}, "temperature=-1 must be a number, at least 0"),
        ({"do_sample": True, "temperature": 1e-300}, "temperature=1e-300 must be a number, at least 1e-06"),
        ({"do_sample": None, "temperature": 1e-300}, "temperature=1e-300 must be a number, at least 1e-06"),
        ({"do_sample": "false", "temperature": 0.7}, "do_sample='false' must be true or false"),
        ({"max_gen_toks": 600}, "max_gen_toks=600 leaves no room for a prompt in max_length=512"),
        ({"stop": ["a"]}, "stop is no generation setting; give stop texts as until"),
        ({"attention_mask": 3}, "attention_mask is no generation setting; leave it out"),
        ({"assistant_model": "small"}, r"assistant_model|'str' object has no attribute"),
        ({"misspelt": 1}, "misspelt"),
        ({"do_sample": True, "temperature": 1.0, "top_k": -1}, "top_k.*-1"),
    ],
)
def test_wrong_generation_settings_are_one_line(tiny_folder: Path, engine: str, changes: dict, message: str) -> None:
    instances = [
        request("generate_until", (prompt, {**GENERATE, **changes}), i) for i, prompt in enumerate(PROMPTS * 4)
    ]
    with pytest.raises(InputError, match=message) as error:
        model(tiny_folder, engine=engine).generate_until(instances)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("temperature", [1e-7, 0.7])
@pytest.mark.parametrize("engine", ["generate", "batched"])
def test_the_temperature_of_a_greedy_answer_is_not_read(
    tiny_folder: Path, tmp_path: Path, engine: str, temperature: float
) -> None:
    """It is greedy with do_sample=false; the stored answer is the one without a temperature, too."""
    lm = model(tiny_folder, engine=engine, responses=str(tmp_path))
    instances = [
        request("generate_until", (prompt, {**GENERATE, "temperature": temperature}), i)
        for i, prompt in enumerate(PROMPTS)
    ]
    assert lm.generate_until(instances) == lm.generate_until(requests("generate_until"))
    assert len([*read_answers(tmp_path)]) == len({*PROMPTS})


def test_a_report_of_generate_instead_of_tokens_changes_nothing(tiny_folder: Path) -> None:
    lm = model(tiny_folder, engine="generate")
    settings = {**GENERATE, "return_dict_in_generate": True}
    instances = [request("generate_until", (prompt, settings), i) for i, prompt in enumerate(PROMPTS)]
    assert lm.generate_until(instances) == lm.generate_until(requests("generate_until"))


@pytest.mark.parametrize("changes", [{"num_beams": "x"}, {"num_beams": 0}, {"eos_token_id": "x"}], ids=str)
def test_what_transformers_refuses_is_one_line(tiny_folder: Path, changes: dict) -> None:
    instances = [request("generate_until", (prompt, {**GENERATE, **changes}), i) for i, prompt in enumerate(PROMPTS)]
    with pytest.raises(InputError) as error:
        model(tiny_folder, engine="generate").generate_until(instances)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_an_error_of_the_model_is_not_taken_for_a_setting_s(tiny_folder: Path, kind: type[Exception]) -> None:
    def fail(*_: object) -> None:
        raise kind("a hook's mistake")

    lm = model(tiny_folder, engine="generate")
    lm.model.model.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(kind, match=r"^a hook's mistake$"):
        lm.generate_until([request("generate_until", (PROMPTS[0], dict(GENERATE)), 0)])


@pytest.mark.parametrize("engine", ["generate", "batched"])
def test_texts_that_cannot_be_answered_are_named(tiny_folder: Path, engine: str) -> None:
    lm = model(tiny_folder, engine=engine)
    for text, count in (("", 0), ("x" * 600, 600)):
        with pytest.raises(InputError, match=f"task toy, document 1: the continuation has {count} tokens"):
            lm.loglikelihood(
                [request("loglikelihood", (f"abc{i}", continuation), i) for i, continuation in enumerate(("a", text))]
            )
    with pytest.raises(InputError, match="task toy, document 3: the context has no tokens"):
        lm.loglikelihood([request("loglikelihood", ("\n", "a"), 3)])
    lm.tokenizer.add_tokens("abc")
    with pytest.raises(InputError, match=r"a token of the context includes it: end the context at a space"):
        lm.loglikelihood([request("loglikelihood", ("ab", "c"), 3)])
    assert model(tiny_folder, engine=engine, add_bos_token=True).loglikelihood(
        [request("loglikelihood", ("\n", "a"), 3)]
    )
    with pytest.raises(InputError, match="prompt is empty"):
        lm.generate_until([request("generate_until", ("", dict(GENERATE)), 0)])


def test_a_chat_without_a_chat_template_is_one_line(tiny_folder: Path) -> None:
    lm = model(tiny_folder)
    lm.tokenizer.chat_template = None
    with pytest.raises(InputError, match="the tokenizer has no chat template; leave out --apply_chat_template"):
        lm.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("family", "arguments", "before", "after"),
    [
        ("llama", {"truncation": True}, {"truncation_side": "left"}, {"truncation_side": "right"}),
        ("llama", {"truncation": True}, {"model_max_length": 30}, {"model_max_length": 20}),
        (
            "bloom",
            {"dtype": "float32"},
            {"model_max_length": 30},
            {"model_max_length": 20},
        ),  # its configuration names no length
    ],
)
def test_what_a_tokenizer_truncates_to_is_part_of_the_identity(
    tiny_folder: Path, tmp_path: Path, family: str, arguments: dict, before: dict, after: dict
) -> None:
    texts, identities = [], []
    for number, settings in enumerate((before, after)):
        folder = tmp_path / str(number)
        tiny(family, vocab_size=259).save_pretrained(folder)
        tokenizer = {"model_max_length": 30, **settings}
        AutoTokenizer.from_pretrained(tiny_folder, **tokenizer).save_pretrained(folder)
        lm = model(folder, **arguments)
        gen_kwargs = {"until": ["\n"], "max_gen_toks": 4}
        texts.append(
            lm.generate_until([request("generate_until", (p * 3, gen_kwargs), i) for i, p in enumerate(PROMPTS)])
        )
        loading = Arguments.of({"pretrained": str(folder), **arguments}).loading
        identities.append((lm.identity["arguments"], ModelIdentity.of_checkpoint(Checkpoint(loading)).arguments))
    (loaded, checkpoint), (other_loaded, other_checkpoint) = identities
    assert texts[0] != texts[1] and loaded != other_loaded and checkpoint != other_checkpoint


def test_a_checkpoint_in_a_subfolder_is_the_one_that_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "half" / "small")
    tiny("gpt2", vocab_size=259).save_pretrained(tmp_path / "half")
    arguments = {"dtype": "float32", "device": "cpu"}
    inner = {**arguments, "pretrained": str(tmp_path / "half"), "subfolder": "small"}
    identity = ModelIdentity.of_checkpoint(Checkpoint(Arguments.of(inner).loading))
    direct = ModelIdentity.of_checkpoint(
        Checkpoint(Arguments.of({**arguments, "pretrained": str(tiny_folder)}).loading)
    )
    assert identity == direct
    identity.check_loaded(PrunedHFLM(**inner))
    with pytest.raises(InputError, match="missing"):
        Checkpoint(Arguments.of({**inner, "subfolder": "missing"}).loading)


def test_a_constructor_that_fails_leaves_nothing_on_a_live_model(tiny_folder: Path, tmp_path: Path) -> None:
    network, tokenizer = tiny("llama", vocab_size=259), AutoTokenizer.from_pretrained(tiny_folder)
    (tmp_path / "foreign").touch()
    with pytest.raises(InputError, match="not an answer store") as error:
        PrunedHFLM(network, tokenizer=tokenizer, heads=HEADS, responses=str(tmp_path))
    assert error.value.__traceback__ and interventions_on(network) == ()
    assert sum(len(m._forward_pre_hooks) for m in network.modules()) == 0


def test_heads_and_those_of_tries_are_checked_together(tiny_folder: Path, tmp_path: Path) -> None:
    for more in ({}, {"responses": str(tmp_path / "s")}):
        arguments = {"heads": "L0H0-2", "router": "random", "router_pool": "L0H3", **more}
        with pytest.raises(InputError, match="all 4 heads of layer L0 would be pruned"):
            model(tiny_folder, **arguments)
        model(tiny_folder, **arguments, allow_empty_layer=True).close()


def test_unknown_family_is_refused_before_loading_or_described(tiny_folder: Path, tmp_path: Path) -> None:
    folder = family_folder("bitnet", tiny_folder, tmp_path / "newcomer")
    with pytest.raises(InputError, match=r"model family 'bitnet' is not supported: .* attention_path"):
        model(folder, heads="L0H1")
    described = {
        "attention_path": "model.layers.{i}.self_attn",
        "attention_output": "o_proj",
        "attention_heads": 4,
    }
    assert model(folder, heads="L0H1", **described).pruning_info()["heads_pruned"] == 1
    dense = model(folder, responses=str(tmp_path / "store"))
    for kind in KINDS:
        assert dense.answer(kind, requests(kind), True) == getattr(model(folder, HFLM), kind)(requests(kind))
    assert dense.pruning_info()["weights_fingerprint"] == weights_fingerprint(dense.model)


def test_weights_that_are_cut_off_are_said_in_one_line(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match=rf"^{folder}/model.safetensors is damaged \(SafetensorError[^\n]*$"):
        PrunedHFLM(str(folder), device="cpu")


def test_masks_of_other_models_broken_files_and_pickles_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mask.json"
    HeadMask("L0H1").save(path, map_model(tiny("llama", num_key_value_heads=4)))
    with pytest.raises(InputError, match="layers or heads differ"):
        model(tiny_folder, mask=str(path))
    assert model(tiny_folder, mask=str(path), allow_other_model=True).pruning_info()["heads"] == ["L0H1"]
    HeadMask("L0H1").save(path, map_model(tiny("qwen2")))
    with pytest.raises(InputError, match="made for a qwen2 model, this one is llama"):
        model(tiny_folder, mask=str(path))

    attention = map_model(AutoModelForCausalLM.from_pretrained(tiny_folder))
    HeadMask("L0H1").save(path, attention)
    content = json.loads(path.read_text())
    renamed = {**content["model"], "name": "another-llama"}
    path.write_text(json.dumps({**content, "model": renamed}))
    assert model(tiny_folder, mask=str(path)).pruning_info()["heads"] == ["L0H1"]  # a folder may be renamed
    for name, weights in (("another-llama", ["0"]), ("tiny-llama", ["0"])):
        path.write_text(json.dumps({**content, "model": {**content["model"], "name": name, "weights": weights}}))
        with pytest.raises(InputError, match=rf"made for other weights \({name}\) than this model's \(tiny-llama\)"):
            model(tiny_folder, mask=str(path))
    path.write_text(json.dumps({**content, "model": {**renamed, "weights": []}}))  # as version 1 wrote them
    with pytest.raises(InputError, match="made for another-llama, this model is tiny-llama"):
        model(tiny_folder, mask=str(path))
    here = {**content["model"], "revision": "0123456789abcdef", "weights": []}
    path.write_text(json.dumps({**content, "model": here}))
    with pytest.raises(InputError, match="made for revision 0123456789ab, this one is fedcba987654"):
        HeadMask.load(path).fit_to(
            ModelMap(attention.model, attention.attention, "llama", "tiny-llama", "fedcba9876543210")
        )
    assert HeadMask.load(path).fit_to(
        ModelMap(attention.model, attention.attention, "llama", "tiny-llama", here["revision"])
    )
    path.write_text(json.dumps({**content, "schema_version": 99}))
    with pytest.raises(InputError, match="schema version 99"):
        model(tiny_folder, mask=str(path))
    path.write_text(json.dumps({**content, "schema": "other"}))
    with pytest.raises(InputError, match=r"not a lmeval-prune/head-mask or lmeval-prune/plan or .* artefact"):
        model(tiny_folder, mask=str(path))
    path.write_text(json.dumps({**content, "model": {**content["model"], "name": 5}}))
    with pytest.raises(InputError, match=r"model\.name"):
        model(tiny_folder, mask=str(path))
    path.write_text('{"schema": ')
    with pytest.raises(InputError, match="not valid JSON"):
        model(tiny_folder, mask=str(path))
    for save in (
        lambda: torch.save({"heads": 1}, path),
        lambda: path.write_bytes(b"\x80\x04\x95cbuiltins\nexec\n"),
    ):
        save()
        with pytest.raises(InputError, match=r"pickle.*was not read"):
            model(tiny_folder, mask=str(path))


def test_missing_demo_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lmeval_prune.checkpoints import embedded

    monkeypatch.setenv("LMEVAL_PRUNE_CACHE", str(tmp_path))
    gone = embedded.EmbeddedModel("no_such_package_here", "no-such-package==1", "x.gguf", "")
    monkeypatch.setitem(embedded.MODELS, "smollm2-135m", gone)
    with pytest.raises(
        InputError, match="no-such-package, which is not installed: run `lmeval-prune models --get smollm2-135m`"
    ):
        PrunedHFLM("smollm2-135m")


# --------------------------------------------------------------------------- engine=batched


@pytest.mark.parametrize("heads", [pytest.param(None, marks=pytest.mark.long), HEADS])
def test_the_engine_gives_the_same_texts(tiny_folder: Path, heads: str | None) -> None:
    """Several stops, lengths and a prompt that must be cut; in the order of the requests."""
    long = "word " * 120
    settings = [GENERATE, {"until": ["a", "zz"], "max_gen_toks": 30}, {"until": [], "max_gen_toks": 400}]
    instances = [
        request("generate_until", (prompt, dict(setting)), i)
        for i, (prompt, setting) in enumerate((p, s) for p in [*PROMPTS, long] for s in settings)
    ]
    expected = model(tiny_folder, heads=heads, batch_size=1).generate_until(instances)
    batched = model(tiny_folder, heads=heads, engine="batched", engine_rows=4)
    assert batched.generate_until(instances) == expected and len(set(expected)) > 10
    assert batched.engine.statistics.answers == len(instances)


@pytest.mark.parametrize("engine", ["batched", "generate"])
def test_a_model_that_is_built_before_an_evaluation_samples_by_the_seed_of_the_evaluation(
    tiny_folder: Path, tmp_path: Path, engine: str
) -> None:
    """lm-eval sets the seed at the beginning of an evaluation; its command builds the model after that."""
    settings = {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0}
    arguments = {"engine": engine, "responses": str(tmp_path)}

    def texts(lm: PrunedHFLM, seed: int) -> list[str]:
        torch.manual_seed(seed)
        return lm.generate_until([request("generate_until", (p, dict(settings)), i) for i, p in enumerate(PROMPTS)])

    before = model(tiny_folder, **arguments)
    by_seed = [texts(before, seed) for seed in (1, 2, 1)]
    before.close()
    assert by_seed[0] == by_seed[2] != by_seed[1]
    torch.manual_seed(2)
    after = model(tiny_folder, **arguments)
    assert texts(after, 2) == by_seed[1]
    assert len(after.answering.store.responses) == 2 * len(PROMPTS)  # the command finds the stored answers


def test_sampled_repeats_on_the_engine_resume_with_the_same_texts(tiny_folder: Path, tmp_path: Path) -> None:
    """Each repeat keeps its own text, however many of them were stored before."""
    setting = {"until": [], "max_gen_toks": 10, "do_sample": True, "temperature": 1.0}
    instances = [
        item for i, p in enumerate(PROMPTS[:2]) for item in [request("generate_until", (p, dict(setting)), i, 4)] * 4
    ]
    torch.manual_seed(5)
    whole = model(tiny_folder, engine="batched").generate_until(instances)
    assert len(set(whole)) == 8
    torch.manual_seed(5)
    first = model(tiny_folder, engine="batched", responses=str(tmp_path / "store"))
    assert first.generate_until(instances[:3]) == whole[:3]
    first.close()
    torch.manual_seed(5)
    again = model(tiny_folder, engine="batched", responses=str(tmp_path / "store"))
    assert again.generate_until(instances) == whole
    assert again.engine.statistics.answers == 5


@pytest.mark.parametrize("think_end", ["=", 100, "is"])
def test_what_was_thought_is_left_out_by_the_engine_too(tiny_folder: Path, think_end: str | int) -> None:
    """A delimiter that is a text, or a token; the answers are those of `generate`, cut alike."""
    instances = [request("generate_until", (p, {"until": [], "max_gen_toks": 60}), i) for i, p in enumerate(PROMPTS)]
    plain = model(tiny_folder, batch_size=1).generate_until(instances)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    if isinstance(think_end, int):
        think_end = next(t for text in plain for t in tokenizer.encode(text)[3:6])
    else:
        think_end = next(text[4] for text in plain)
    expected = model(tiny_folder, batch_size=1, think_end_token=think_end).generate_until(instances)
    assert expected != plain
    assert model(tiny_folder, engine="batched", think_end_token=think_end).generate_until(instances) == expected


@pytest.mark.parametrize("engine", ["generate", "batched"])
def test_an_error_of_the_model_is_not_one_of_the_settings(tiny_folder: Path, engine: str) -> None:
    lm = model(tiny_folder, engine=engine)
    lm.model.lm_head.register_forward_pre_hook(lambda *_: torch.ones(2) @ torch.ones(3))
    settings = {"until": [], "do_sample": True, "temperature": 1.0}
    with pytest.raises(RuntimeError, match="size"):
        lm.generate_until([request("generate_until", ("x", settings), 0)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", [{"engine": "generate"}, {"engine": "batched"}, {"token_filter": 0.5}], ids=str)
def test_nan_is_no_answer(tiny_folder: Path, arguments: dict, kind: str) -> None:
    """Greedy decoding would take the first token, and a choice the first one."""
    lm = model(tiny_folder, **arguments)
    with torch.no_grad():
        lm.model.model.norm.weight[3] = torch.nan
    message = r"logits are NaN, so they choose no tokens \(at requests of \w+\); give another dtype"
    with pytest.raises(InputError, match=message) as error:
        getattr(lm, kind)(requests(kind))
    assert "\n" not in str(error.value)
    unnamed = [replace(instance, metadata=(None, number, 1)) for number, instance in enumerate(requests(kind))]
    with pytest.raises(InputError, match=r"logits are NaN, so they choose no tokens; give another dtype"):
        getattr(lm, kind)(unnamed)


def test_padding_that_eager_attention_cannot_read_is_no_answer(tiny_folder: Path) -> None:
    lm = model(tiny_folder, engine="generate", attn_implementation="eager")
    with pytest.raises(InputError, match=r"NaN.*attn_implementation=sdpa"):
        lm.generate_until(requests("generate_until"))


# refused when they are read, when processors are made of them, or at the first token
REFUSED: list[dict] = [
    *({"bad_words_ids": value} for value in (3, [[999999]])),
    {"suppress_tokens": "a"},
    *({"sequence_bias": value} for value in ([1], [[[999999], 1.0]])),
    *({"exponential_decay_length_penalty": value} for value in (2, [1, "a"])),
    {"forced_eos_token_id": 999999},
    {"forced_bos_token_id": 999999},
    {"num_return_sequences": 3},
    {"watermarking_config": 3},
]


@pytest.mark.parametrize(
    ("arguments", "setting", "message"),
    [
        ({"engine": "fast"}, {}, "engine='fast' must be auto, generate or batched"),
        ({"engine": "batched"}, {"num_beams": 3}, "does not know the generation setting num_beams=3"),
        ({"engine": "batched"}, {"penalty_alpha": 0.5}, "does not know the generation mode contrastive_search"),
        ({"engine": "batched"}, {"guidance_scale": 1.5}, "does not know the generation setting guidance_scale=1.5"),
        ({"engine": "batched"}, {"max_length": 20}, "does not take max_length"),
        ({"deterministic": True}, {}, "add engine=batched"),
        ({"engine": "batched", "engine_rows": 0}, {}, "engine_rows=0 must be"),
        ({"engine": "batched"}, {"colour": 3}, "does not know: colour"),
        *(({"engine": engine}, setting, "transformers refuses the generation settings")
          for engine in ("batched", "generate", "auto") for setting in REFUSED),
        ({"engine": "batched"}, {"repetition_penalty": "x"}, "repetition_penalty='x' must be"),
        ({"engine": "batched"}, {"eos_token_id": "end"}, "eos_token_id must be token ids, not a text"),
        ({"engine": "batched"}, {"max_gen_toks": 600}, "leaves no room for a prompt in max_length=512"),
        *(({"engine": engine}, {"do_sample": True, **settings}, "do_sample=true needs a temperature above 0; give both")
          for engine in ("batched", "generate", "auto") for settings in ({}, {"temperature": 0.0})),
    ],
)  # fmt: skip
def test_what_the_engine_does_not_do_is_said(tiny_folder: Path, arguments: dict, setting: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model(tiny_folder, **arguments).generate_until([request("generate_until", ("x", {"until": [], **setting}), 0)])
