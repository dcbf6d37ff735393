"""`pruned-hf` against `hf` and against a plain transformers script."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from lmeval_prune import HeadMask, InputError, map_model
from lmeval_prune.architectures import weights_fingerprint
from lmeval_prune.interventions import interventions_on
from lmeval_prune.models.answer_store import read_answers
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.identity import Checkpoint
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.tasks import compat
from tests.conftest import task_manager
from tests.tiny_models import family_folder, tiny

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


@pytest.mark.parametrize("engine", ["generate", "batched"])
def test_results_file_names_heads_artefact_and_lengths(tiny_folder: Path, tmp_path: Path, engine: str) -> None:
    HeadMask("L0H1").save(tmp_path / "mask.json", map_model(AutoModelForCausalLM.from_pretrained(tiny_folder)))
    arguments = {"pretrained": str(tiny_folder), "mask": str(tmp_path / "mask.json"), "heads": "L1H2-3"}
    settings = {"gen_kwargs": {"max_gen_toks": 6}, "limit": 3, "device": "cpu", "task_manager": task_manager()}
    results = simple_evaluate("pruned-hf", {**arguments, "engine": engine}, tasks=["prune_tiny_words"], **settings)
    pruning = results["config"]["pruning"]
    assert pruning["heads"] == ["L0H1", "L1H2", "L1H3"]
    assert (pruning["heads_pruned"], pruning["heads_total"]) == (3, 8)
    assert len(pruning["mask_file_sha256"]) == 64 and pruning["mask_fingerprint"]
    assert results["config"]["model_args"]["heads"] == "L1H2-3"
    lengths = {"answers": 3, "unknown": 0, "cut_off": 1.0, "mean_tokens": 6, "max_gen_toks": 6}
    assert pruning["answers"] == {"prune_tiny_words": lengths} and json.dumps(pruning)


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


def test_more_tokens_than_rotary_positions_are_computed_as_under_hf(tiny_folder: Path) -> None:
    long = [request("loglikelihood_rolling", ("x" * 900,), 0)]
    scores = model(tiny_folder, max_length=600).loglikelihood_rolling(long)
    assert scores == model(tiny_folder, HFLM, max_length=600).loglikelihood_rolling(long)


@pytest.mark.parametrize("engine", ["generate", "auto", "batched"])
def test_wrong_generation_settings_are_refused(tiny_folder: Path, engine: str) -> None:
    settings: list[dict[str, Any]] = [
        {"max_gen_toks": 0},
        {"max_gen_toks": 600},
        {"do_sample": "false", "temperature": 0.7},
        {"do_sample": True},
        {"do_sample": True, "temperature": 1e-300},
    ]
    lm = model(tiny_folder, engine=engine)
    instances = {True: settings, False: [{"misspelt": 1}, {"num_return_sequences": 3}, {"suppress_tokens": "a"}]}
    for is_ours, changed in instances.items():
        for changes in changed:
            with pytest.raises(InputError if is_ours else Exception):
                lm.generate_until([request("generate_until", (p, {**GENERATE, **changes}), 0) for p in PROMPTS * 4])


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
        identities.append((lm.identity["arguments"], Checkpoint(loading).identity()["arguments"]))
    (loaded, checkpoint), (other_loaded, other_checkpoint) = identities
    assert texts[0] != texts[1] and loaded != other_loaded and checkpoint != other_checkpoint


def test_a_checkpoint_in_a_subfolder_is_the_one_that_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "half" / "small")
    tiny("gpt2", vocab_size=259).save_pretrained(tmp_path / "half")
    arguments = {"dtype": "float32", "device": "cpu"}
    inner = {**arguments, "pretrained": str(tmp_path / "half"), "subfolder": "small"}
    identity = Checkpoint(Arguments.of(inner).loading).identity()
    direct = Checkpoint(Arguments.of({**arguments, "pretrained": str(tiny_folder)}).loading).identity()
    assert identity == direct
    assert PrunedHFLM(**inner).weights == PrunedHFLM(str(tiny_folder), **arguments).weights
    with pytest.raises(InputError, match="missing"):
        Checkpoint(Arguments.of({**inner, "subfolder": "missing"}).loading)


def test_a_constructor_that_fails_leaves_nothing_on_a_live_model(tiny_folder: Path, tmp_path: Path) -> None:
    network, tokenizer = tiny("llama", vocab_size=259), AutoTokenizer.from_pretrained(tiny_folder)
    (tmp_path / "foreign").touch()
    with pytest.raises(InputError) as error:
        PrunedHFLM(network, tokenizer=tokenizer, heads=HEADS, responses=str(tmp_path / "foreign"))
    assert error.value.__traceback__ and interventions_on(network) == ()


def test_unknown_family_is_refused_before_loading_or_described(tiny_folder: Path, tmp_path: Path) -> None:
    folder = family_folder("bitnet", tiny_folder, tmp_path / "newcomer")
    with pytest.raises(InputError):
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


# --------------------------------------------------------------------------- engine=batched


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
    assert len(after.store.responses) == 2 * len(PROMPTS)  # the command finds the stored answers


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


def test_padding_that_eager_attention_cannot_read_is_no_answer(tiny_folder: Path) -> None:
    lm = model(tiny_folder, engine="generate", attn_implementation="eager")
    with pytest.raises(InputError, match=r"NaN.*attn_implementation=sdpa"):
        lm.generate_until(requests("generate_until"))
