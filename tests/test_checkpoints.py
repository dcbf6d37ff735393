"""Class of a checkpoint, validity of its weights, and its identity."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload, dispatch_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from lmeval_prune import InputError, load_pretrained, map_model
from lmeval_prune.architectures import identity, loadable_fingerprints, nonfinite_tensor, weights_fingerprint
from lmeval_prune.checkpoints.loading import (
    language_skeleton,
    read_config,
    read_manifest,
    save_checkpoint,
    skeleton_of,
    with_weights,
)
from lmeval_prune.cli import main
from lmeval_prune.comparison.tokens import logits_of
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.surgery.cut import cut, cut_to
from lmeval_prune.tasks import compat
from tests.tiny_models import ALL, output, tiny, tiny_llava, tokens

HEADS = [  # classes that are no language models
    ("llama", "LlamaForSequenceClassification"),
    ("llama", "LlamaForQuestionAnswering"),
    ("gpt2", "GPT2ForSequenceClassification"),
    ("bert", "BertForTokenClassification"),
    ("bert", "BertModel"),
]
OTHERS = [("bert", "BertForMaskedLM"), ("bert", "BertForPreTraining"), ("t5", "T5EncoderModel")]


def build(family: str, name: str, **changes: Any) -> Any:
    """Build a random model of a class in which every weight matters."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 64,
        "pad_token_id": 0,
        **ALL[family],
        "num_labels": 2 if "Question" in name else 3,
        **changes,
    }
    config = AutoConfig.for_model(family, **settings)
    model: Any = getattr(transformers, name)._from_config(config).to(torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def outputs(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        actual = model(input_ids=tokens(), attention_mask=torch.ones(3, 7, dtype=torch.long))
    return [value for value in actual.to_tuple() if isinstance(value, torch.Tensor)]


def same(model: Any, other: Any) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(outputs(model), outputs(other), strict=True))


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of a folder's config.json; None deletes a field."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def refused(capsys: Any, *words: str) -> str:
    """Return the single line of a command's error message."""
    assert main(list(words)) == 2
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if "it/s]" not in line]
    assert len([line for line in lines if line]) == 1, lines
    return str(lines[-1])


# ---------------------------------------------------------------- the class


@pytest.mark.parametrize(("family", "name"), HEADS + OTHERS)
def test_a_checkpoint_is_of_the_class_that_it_names_also_when_cut(family: str, name: str, tmp_path: Path) -> None:
    """With equal and with different layers; stock classes are also loaded by plain transformers."""
    original = build(family, name)
    original.save_pretrained(tmp_path / "m")
    bare, model = skeleton_of(str(tmp_path / "m")), load_pretrained(tmp_path / "m")
    assert type(bare).__name__ == name
    for loaded in (model, with_weights(bare, str(tmp_path / "m"))):
        assert type(loaded) is type(original) and same(loaded, original)
    for number, heads in enumerate(("L0H0+L0H1+L1H0+L1H1", "L0H0+L0H1") if family != "t5" else ()):
        plan, folder = Plan(heads, {"L0": "0-7", "L1": "3-10"}), tmp_path / f"cut{number}"
        smaller, again = cut_to(folder, model, plan), load_pretrained(folder)
        assert type(again).__name__ in (name, f"Pruned{name}", name.replace("Llama", "Mistral"))
        with plan.applied_to(model):
            assert same(smaller.model, model) and same(again, model)
            if not type(again).__name__.startswith("Pruned"):
                assert same(getattr(transformers, type(again).__name__).from_pretrained(folder), model)


def test_auto_classes_load_a_cut_model_with_its_head(tmp_path: Path) -> None:
    """All auto classes that build the parent."""
    tiny_llava().save_pretrained(tmp_path / "parent")
    model, plan = load_pretrained(tmp_path / "parent"), Plan("L0H0-1", {"L1": "0-9"})
    cut_to(tmp_path / "cut", model, plan)
    named = json.loads((tmp_path / "cut" / "config.json").read_text())["auto_map"]
    assert {"AutoModel", "AutoModelForImageTextToText", "AutoModelForPreTraining"} <= named.keys()
    for name in sorted(named.keys() - {"AutoModel"}):
        again = getattr(transformers, name).from_pretrained(tmp_path / "cut", trust_remote_code=True)
        with plan.applied_to(model):
            assert same(again, model), name
    assert "pipeline_tag: image-text-to-text" in (tmp_path / "cut" / "README.md").read_text()


def test_what_stays_beside_the_weights_goes_along(tmp_path: Path) -> None:
    """Processors, modules of a sentence encoder, licenses; no code, no weights, and nothing outside of the folder."""
    build("bert", "BertModel").save_pretrained(tmp_path / "parent")
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "3_Normalize"}, {"path": "../other"}]
    texts = {
        **dict.fromkeys(("preprocessor_config.json", "processor_config.json", "1_Pooling/config.json"), "{}"),
        **{"modules.json": json.dumps(modules), "LICENSE": "as you like", "2_Dense/model.safetensors": "weights"},
        "chat_template.json": json.dumps({"chat_template": "{{ messages }}"}),
    }
    for name, text in {**texts, "code.py": "", "pytorch_model.bin.old": "", "../other/config.json": "{}"}.items():
        (tmp_path / "parent" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "parent" / name).write_text(text)
    for _ in range(2):  # the second checkpoint replaces the first
        cut_to(tmp_path / "cut", load_pretrained(tmp_path / "parent"), Plan("L0H0"))
    files = {path.relative_to(tmp_path / "cut").as_posix(): path for path in (tmp_path / "cut").rglob("*.*")}
    files["LICENSE"] = tmp_path / "cut" / "LICENSE"
    assert {name: files[name].read_text() for name in texts} == texts
    assert texts.keys() <= read_manifest(tmp_path / "cut")["files"].keys()
    assert not {"code.py", "pytorch_model.bin.old"} & files.keys()
    model = build("bert", "BertModel")  # was never saved
    cut_to(tmp_path / "plain", cut(model, Plan("L0H0")).model, Plan("L1H0"))
    assert not texts.keys() & {path.name for path in (tmp_path / "plain").iterdir()}


def test_a_cut_of_a_trained_checkpoint_is_replaced_as_any_other(tmp_path: Path) -> None:
    """The questions that the parent was trained on are inherited; a trained checkpoint itself is not replaced."""
    build("llama", "LlamaForCausalLM").save_pretrained(tmp_path / "m")
    smaller = cut(load_pretrained(tmp_path / "m"), Plan("L0H0"))
    save_checkpoint(tmp_path / "trained", smaller.model, {**smaller.manifest, "trained_on": ["0123456789abcdef"]})
    Plan("L1H0").save(tmp_path / "plan.json", map_model(load_pretrained(tmp_path / "trained")))
    words = ["cut", "--pretrained", str(tmp_path / "trained"), "--plan", str(tmp_path / "plan.json"), "--output"]
    for _ in range(2):
        assert main([*words, str(tmp_path / "again")]) == 0
    assert read_manifest(tmp_path / "again")["trained_on"] == ["0123456789abcdef"]
    words[2] = str(tmp_path / "m")
    assert main([*words, str(tmp_path / "trained")]) == 2


@pytest.mark.parametrize("cut_first", [False, True])
@pytest.mark.parametrize(("family", "name"), HEADS[::4])
def test_lm_eval_asks_language_models_only(
    family: str, name: str, cut_first: bool, tmp_path: Path, tiny_folder: Path, no_weights: None
) -> None:
    build(family, name).save_pretrained(tmp_path / "m")
    if cut_first:
        cut_to(tmp_path / "c", load_pretrained(tmp_path / "m"), Plan("L0H0+L0H1"))
    folder = tmp_path / ("c" if cut_first else "m")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    with pytest.raises(InputError, match=name):
        PrunedHFLM(str(folder), device="cpu")


@pytest.mark.parametrize(("family", "name"), [("gpt2", "GPT2Model"), ("bart", "BartModel"), ("t5", "T5Model")])
def test_a_model_whose_head_is_tied_lacks_nothing(family: str, name: str, tmp_path: Path, tiny_folder: Path) -> None:
    """Like facebook/bart-base, whose `config.json` names a BartModel."""
    model = build(family, name)
    model.save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "m")
    lm = PrunedHFLM(str(tmp_path / "m"), device="cpu", heads="encoder.L0H0" if family != "gpt2" else "L0H0")
    assert lm.model.get_output_embeddings().weight is lm.model.get_input_embeddings().weight
    config = read_config(str(tmp_path / "m"))
    assert type(language_skeleton(config)) is type(lm.model)


def test_a_name_that_transformers_has_not_is_the_familys_language_model(tmp_path: Path) -> None:
    """Old names, names of own code, and no name; the weights must fit the language model."""
    model: Any = tiny("llama")
    model.save_pretrained(tmp_path / "m")
    for architectures in (None, ["LLaMAForCausalLM"], ["MyOwnModel"], []):
        edit(tmp_path / "m", architectures=architectures)
        assert type(load_pretrained(tmp_path / "m")) is type(model)
    build("llama", "LlamaForSequenceClassification").save_pretrained(tmp_path / "c")
    for architectures in (None, ["MyOwnModel"], ["BertForSequenceClassification"]):
        edit(tmp_path / "c", architectures=architectures)
        with pytest.raises(InputError, match=r"lm_head\.weight"):
            load_pretrained(tmp_path / "c")


def test_a_quantisation_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    """It would be left out, and the weights read as if they were not quantised."""
    tiny("llama").save_pretrained(tmp_path / "m")  # type: ignore[operator]
    edit(tmp_path / "m", quantization_config={"quant_method": "zzz"})
    with pytest.raises(InputError, match="zzz"):
        load_pretrained(tmp_path / "m")


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_another_class_are_refused(tied: bool, tmp_path: Path, tiny_folder: Path) -> None:
    """With a tied head no tensor is missing, and only additional tensors show the other class."""
    build("llama", "LlamaForSequenceClassification", tie_word_embeddings=tied).save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "m")
    edit(tmp_path / "m", architectures=None)
    for load in (load_pretrained, lambda folder: PrunedHFLM(str(folder), device="cpu")):
        with pytest.raises(InputError):
            load(tmp_path / "m")


K_SCALE = "model.layers.0.self_attn.k_scale"
FURTHER = "model.layers.2.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("is_needed", "keys", "changes"),
    [
        (False, [K_SCALE], {}),
        (False, ["model.layers.1.self_attn.k_proj.output_scale"], {}),
        (False, [FURTHER, "model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight"], {}),
        (False, [FURTHER], {"num_nextn_predict_layers": 1}),
        (False, ["mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"], {}),
        (False, ["vision_tower.layers.0.weight", "vision_tower.patches.weight"], {"architectures": None}),
        (False, ["model.vision_tower.layers.0.bias"], {}),
        (False, ["v_head.summary.weight"], {}),
        (True, ["lm_head.bias"], {}),
        (True, ["model.layers.0.self_attn.q_norm.weight"], {}),
        (True, ["model.layers.0.self_attn.sinks"], {}),
        (True, ["model.layers.0.self_attn.q_proj.weight_scale"], {}),
        (True, [FURTHER], {}),
        (True, ["model.layers.3.mlp.up_proj.weight"], {"num_nextn_predict_layers": 1}),
        (True, ["v_head.summary.weight"], {"architectures": None}),
    ],
)
def test_weights_that_change_nothing_are_left_out_and_others_refused(
    is_needed: bool, keys: list[str], changes: dict[str, Any], tmp_path: Path
) -> None:
    model: Any = tiny("llama")
    model.save_pretrained(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    save_file({**load_file(file), **{key: torch.ones(2) for key in keys}}, file, {"format": "pt"})
    edit(tmp_path / "m", **changes)
    with pytest.raises(InputError) if is_needed else nullcontext():
        assert same(load_pretrained(tmp_path / "m"), model)


# ---------------------------------------------------------------- sound weights


@pytest.mark.parametrize(
    "words",
    [
        "prune --ratio 0.5 --output p.json --method flap --text t",
        "cut --plan plan.json --output c",
        "export model --format gguf --output c.gguf --dtype float32 --splitting gpt-2",
        "export adapter --heads L1H0 --output c",
    ],
)
def test_weights_that_are_no_numbers_are_refused(
    words: str, tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "broken")
    weights = load_file("broken/model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"][3, 5] = float("nan")
    save_file(weights, "broken/model.safetensors", {"format": "pt"})
    Path("t").write_text("some words of a text that is read for calibration " * 400)
    Plan("L0H0+L0H1").save("plan.json", map_model(skeleton_of("broken")))
    assert "model.layers.1.self_attn.o_proj" in refused(capsys, *words.split(), "--pretrained", "broken")
    assert not any(Path(name).exists() for name in ("p.json", "c/L1H0", "c/config.json", "c.gguf"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_value_that_is_no_number_is_found_and_large_ones_are_none(dtype: torch.dtype) -> None:
    """Also opposite infinities, values whose sum overflows, and masks in saved buffers."""
    model: Any = tiny("llama", dtype=dtype)
    weight = model.model.layers[1].mlp.up_proj.weight
    model.register_buffer("mask", torch.full((4, 4), float("-inf")))
    with torch.no_grad():
        weight.fill_(torch.finfo(dtype).max)
    assert nonfinite_tensor(model) is None
    for values in ([float("nan")], [float("inf")], [float("-inf")], [float("inf"), float("-inf")]):
        with torch.no_grad():
            weight.zero_()[-1, -len(values) :] = torch.tensor(values, dtype=dtype)
        assert nonfinite_tensor(model) == "model.layers.1.mlp.up_proj.weight of layer 1"


@pytest.mark.parametrize("name", ["flap", "norm_entropy"])
def test_scores_that_are_no_numbers_are_refused(
    name: str, tmp_path: Path, tiny_folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are finite, but activations in float16 are not."""
    monkeypatch.chdir(tmp_path)
    Path("t").write_text("some words of a text that is read for calibration " * 40)
    model = load_pretrained(tiny_folder, dtype=torch.float16)
    layer = map_model(model).attention[1].module
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection.weight.fill_(60000)
    model.save_pretrained("m")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained("m")
    text = ["--text", "t", "--windows", "2", "--tokens", "16"]
    for command in (["importance"], ["prune", "--ratio", "0.25"]):
        line = refused(capsys, *command, "--method", name, "--pretrained", "m", "--output", "p.json", *text)
        assert re.search("L[01]", line), line
        assert not Path("p.json").exists()


# ---------------------------------------------------------------- fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_fingerprint_is_of_two_sums_of_each_tensor(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk: a sum of bits, and one weighted by position, modulo 2⁶⁴."""
    monkeypatch.setattr(identity, "_CHUNK", 50)
    monkeypatch.setattr(identity, "_CACHED", 16)
    torch.manual_seed(0)
    values = (torch.randn(130) * 1000).to(dtype)
    values[3] = -0.0
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(values, requires_grad=False)
    if dtype == torch.int64:
        bits = [list(struct.pack("<q", value)) for value in values.tolist()]
        numbers = [byte for value in bits for byte in value]
    elif dtype == torch.float64:
        doubles = [struct.unpack("<q", struct.pack("<d", value + 0.0))[0] for value in values.tolist()]
        floats = [struct.unpack("<i", struct.pack("<f", value + 0.0))[0] for value in values.tolist()]
        is_exact = (values.float().double() == values).tolist()
        numbers = [a if exact else b for a, b, exact in zip(floats, doubles, is_exact, strict=True)]
    else:
        numbers = [struct.unpack("<i", struct.pack("<f", value + 0.0))[0] for value in values.tolist()]
    length = 50 * (8 if dtype == torch.int64 else 1)
    weighted = sum(x * ((n % length + 1) * 2654435761 + n // length) for n, x in enumerate(numbers))
    text = f"weight(130,){sum(numbers) % 2**64},{weighted % 2**64};"
    assert weights_fingerprint(model) == hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------- offloaded weights


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
@pytest.mark.parametrize("kind", ["cpu", "disk", "dispatch"])
def test_offloaded_weights_have_the_fingerprint_of_the_model(family: str, kind: str, tmp_path: Path) -> None:
    """On any device or offloaded; with tied weights and buffers, and in a smaller dtype."""
    tied = {"tie_word_embeddings": True} if family == "llama" else {}
    model: Any = tiny(family, dtype=torch.float32, **tied)
    expected = loadable_fingerprints(model, weights_fingerprint(model))
    before = output(model, tokens())
    if kind == "cpu":
        cpu_offload(model, torch.device("cpu"))
    elif kind == "disk":
        disk_offload(model, str(tmp_path / "off"), torch.device("cpu"))
    else:
        places = {name: "cpu" if number % 2 else "disk" for number, (name, _) in enumerate(model.named_children())}
        dispatch_model(model, places, torch.device("cpu"), offload_dir=str(tmp_path / "off"), force_hooks=True)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert loadable_fingerprints(model, weights_fingerprint(model)) == expected
    assert nonfinite_tensor(model) is None
    assert torch.equal(output(model, tokens()), before)  # it works as before


@pytest.mark.parametrize("engine", ["batched", "generate"])
def test_a_model_that_is_offloaded_completely_answers_as_in_memory(
    engine: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Its parameters are on the meta device, its inputs are not."""
    folder = tmp_path / "shards"
    model = load_pretrained(tiny_folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    loading = {"parallelize": True, "max_cpu_memory": "20KB", "offload_folder": str(tmp_path / "off")}
    texts, windows = [], []
    for arguments in ({}, loading):
        lm: Any = PrunedHFLM(str(folder), device="cpu", batch_size=4, engine=engine, heads="L1H2", **arguments)
        assert {parameter.is_meta for parameter in lm.model.parameters()} == {bool(arguments)}
        instances = [generation(number) for number in range(3)]
        texts.append(lm.generate_until(instances, disable_tqdm=True))
        windows.append(logits_of(lm.model)([5, 6, 7]))
        lm.close()
    assert texts[0] == texts[1]
    assert torch.equal(*windows)


def generation(number: int) -> Any:
    arguments = (f"{number} and", {"until": ["\n"], "max_gen_toks": 6})
    return compat.request("generate_until", arguments, "t", number)


# ---------------------------------------------------------------- damaged configurations, strangers' code


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("prune --ratio 0.25 --method flap --text plan.json --output o.json", "tokenizer"),
        ("cut --plan plan.json --output o", "model"),
        ("export model --heads L0H0 --output o", "tokenizer"),
    ],
)
def test_no_command_runs_a_strangers_code_or_asks_whether_to(
    command: str, part: str, tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "m")
    Plan("L0H0").save("plan.json", map_model(skeleton_of("m")))
    Path("m/theirs.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    if part == "model":
        edit(Path("m"), model_type="theirs", auto_map={"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"})
    else:
        path = Path("m/tokenizer_config.json")
        settings = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.T", "theirs.T"]}}
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    refused(capsys, *command.split(), "--pretrained", "m")
    assert not Path("ran").exists()
