"""An exported model is the plan: as a checkpoint, zeroed, and as a GGUF file read back and computed with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from lmeval_prune import InputError, cut, map_model
from lmeval_prune.checkpoints.loading import read_manifest
from lmeval_prune.cli import main
from lmeval_prune.export.gguf import check_tokenizer, write_gguf_model
from lmeval_prune.interventions.plan import Plan
from tests.conftest import ROOT
from tests.tiny_models import SEQ2SEQ, implementations, output, stored, tiny, tokens

CHANNELS = {"L0": "0,3-6,11", "L1": "1,2,7-10"}


def by_transformers(family: str, folder: Path, **options: Any) -> Any:
    kind = AutoModelForSeq2SeqLM if family in SEQ2SEQ else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype="auto", **implementations(family), **options).eval()


def masked(model: Any, plan: Plan) -> torch.Tensor:
    with plan.applied_to(model):
        return output(model, tokens())


def export(folder: Path, to: Path, *words: str) -> int:
    return main(["export", "model", "--pretrained", str(folder), "--output", str(to), *words])


# --------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("family", ["llama", "gpt2", "olmo2", "bloom", "gemma3_text", "t5", "deepseek_v3"])
def test_a_zeroed_checkpoint_is_the_plan_in_the_model_s_own_class(family: str, tmp_path: Path) -> None:
    """Also of families that cannot be cut."""
    model = stored(family, tmp_path / "model")
    labels = [layer.label for layer in map_model(model).attention]
    heads = f"{labels[0]}H0-2+{labels[1]}H1"
    channels = {} if family == "t5" else {"L0": "0,5-9"}
    Plan(heads, channels).save(tmp_path / "plan.json", map_model(model))
    assert export(tmp_path / "model", tmp_path / "out", "--plan", str(tmp_path / "plan.json"), "--zeroed") == 0
    loaded = by_transformers(family, tmp_path / "out")
    assert type(loaded).__name__ == type(model).__name__
    torch.testing.assert_close(output(loaded, tokens()), masked(model, Plan(heads, channels)), rtol=0, atol=1e-9)
    manifest = read_manifest(tmp_path / "out") or {}
    removed = manifest["stages"][0]["removed"]
    assert removed["heads"] == 0 and removed["fillers"] == {
        labels[0]: [0, 1, 2],
        labels[1]: [1],
    }
    again = {name: value.shape for name, value in loaded.state_dict().items()}
    assert again == {name: value.shape for name, value in model.state_dict().items()}


def test_the_lines_are_those_that_engines_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain ones of what any engine builds; else what vLLM must be told."""
    code = " --trust-remote-code"
    for family, heads, options in (
        ("llama", "L0H0-1+L1H2-3", None),
        ("llama", "L0H0-1", code),
        ("gpt2", "L0H0", code),
        ("phi3", "L0H0-1", code),
        ("qwen2", "L0H0-1+L1H2-3", " --model-impl transformers"),
    ):
        stored(family, tmp_path / family, dtype=torch.float32)
        shutil.rmtree(tmp_path / "a b", ignore_errors=True)
        assert export(tmp_path / family, tmp_path / "a b", "--heads", heads) == 0
        printed = capsys.readouterr().out.splitlines()
        comment = "# --trust-remote-code is not needed if lmeval-prune is installed"
        assert (comment in printed) == ((family, options) == ("llama", code))
        lines = [line for line in printed if "vllm serve" in line]
        assert lines == [f"vllm serve '{tmp_path}/a b'" + (options or "")]


# --------------------------------------------------------------------------- vLLM


def test_with_vllm_no_remote_code_is_needed_and_without_nothing_happens(tmp_path: Path) -> None:
    """In a process of its own, with a package that is called vllm."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert entry == {"lmeval_prune": "lmeval_prune.export.vllm_plugin:register"}
    stored("llama", tmp_path / "model")
    assert export(tmp_path / "model", tmp_path / "out", "--heads", "L0H0-1") == 0
    code = """
import sys
from pkgutil import resolve_name
register = resolve_name("lmeval_prune.export.vllm_plugin:register")
assert not {"torch", "transformers", "vllm"} & set(sys.modules), "heavy imports"
register()
assert "transformers" not in sys.modules
sys.path.insert(0, sys.argv[1])
register(); register()
import transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[2])
assert issubclass(getattr(transformers, config.architectures[0]), transformers.LlamaForCausalLM)
model = transformers.AutoModel.from_config(config, trust_remote_code=False)
assert type(model).__name__ == "PrunedLlamaModel", type(model)
assert [tuple(layer.self_attn.o_proj.weight.shape) for layer in model.layers] == [(32, 16), (32, 32)]
stock = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(sys.argv[3]))
assert type(stock) is transformers.LlamaModel
"""
    (tmp_path / "there" / "vllm").mkdir(parents=True)
    (tmp_path / "there" / "vllm" / "__init__.py").touch()
    paths = [str(tmp_path / name) for name in ("there", "out", "model")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


# --------------------------------------------------------------------------- GGUF


def read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read settings, without the architecture's name before them, and arrays."""
    file = gguf.GGUFReader(path)
    arrays = {
        tensor.name: torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)) for tensor in file.tensors
    }
    settings = {name: field.contents() for name, field in file.fields.items()}
    own = f"{settings['general.architecture']}."
    return {name.removeprefix(own): value for name, value in settings.items()}, arrays


def of_layer(value: Any, layer: int) -> int:
    return value[layer] if isinstance(value, list) else value


def by_llama_cpp(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """Compute logits of a sequence as llama.cpp computes them from such a file, written out."""
    settings, arrays = read(path)
    arrays = {name: value.double() for name, value in arrays.items()}
    neighbours = settings["general.architecture"] in ("llama", "deci")
    width = settings["attention.key_length"]
    assert settings["rope.dimension_count"] == settings["attention.value_length"] == width

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        epsilon = settings["attention.layer_norm_rms_epsilon"]
        return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * arrays[f"{name}.weight"]

    def times(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ arrays[f"{name}.weight"].T + arrays.get(f"{name}.bias", torch.zeros(1))

    def turned(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for position in range(x.shape[0]):
            for i in range(width // 2):
                factor = arrays.get("rope_freqs.weight", torch.ones(width // 2).double())[i]
                factor = factor * settings.get("rope.scaling.factor", 1)
                angle = position * settings["rope.freq_base"] ** (-2 * i / width) / factor
                first, second = (2 * i, 2 * i + 1) if neighbours else (i, i + width // 2)
                a, b = x[position, :, first].clone(), x[position, :, second].clone()
                x[position, :, first], x[position, :, second] = (
                    a * angle.cos() - b * angle.sin(),
                    a * angle.sin() + b * angle.cos(),
                )
        return x

    x = arrays["token_embd.weight"][ids]
    for layer in range(settings["block_count"]):
        block = f"blk.{layer}"
        heads = of_layer(settings["attention.head_count"], layer)
        kv_heads = of_layer(settings["attention.head_count_kv"], layer)
        channels = of_layer(settings["feed_forward_length"], layer)
        assert len(arrays[f"{block}.ffn_up.weight"]) == channels > 0  # else `deci` drops the layer's attention
        if not heads:
            assert layer and not kv_heads and f"{block}.attn_norm.weight" not in arrays
            inner = normed(x, f"{block}.ffn_norm")
            x = x + times(
                silu(times(inner, f"{block}.ffn_gate")) * times(inner, f"{block}.ffn_up"), f"{block}.ffn_down"
            )
            continue
        inner = normed(x, f"{block}.attn_norm")
        q = times(inner, f"{block}.attn_q").reshape(len(ids), heads, width)
        k = times(inner, f"{block}.attn_k").reshape(len(ids), kv_heads, width)
        v = times(inner, f"{block}.attn_v").reshape(len(ids), kv_heads, width)
        if f"{block}.attn_q_norm.weight" in arrays:
            q, k = normed(q, f"{block}.attn_q_norm"), normed(k, f"{block}.attn_k_norm")
        q, k, v = (states.transpose(0, 1) for states in (turned(q), turned(k), v))
        attention = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + times(attention.transpose(0, 1).flatten(1), f"{block}.attn_output")
        inner = normed(x, f"{block}.ffn_norm")
        hidden = silu(times(inner, f"{block}.ffn_gate")) * times(inner, f"{block}.ffn_up")
        x = x + times(hidden, f"{block}.ffn_down")
    x = normed(x, "output_norm")
    return x @ arrays.get("output.weight", arrays["token_embd.weight"]).T


LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
EVEN, UNEVEN = ("L0H0-1+L1H2-3", CHANNELS), ("L0H0-1", {"L1": "5"})
BIASED = (*EVEN, (), {"L0.o_proj.bias": torch.linspace(-1, 1, 32), "L1.down.bias": torch.linspace(0, 2, 32)})


@pytest.mark.parametrize(
    ("family", "plan", "architecture", "changes"),
    [
        ("llama", None, "llama", {}),
        ("llama", EVEN, "llama", {"tie_word_embeddings": True}),
        ("llama", UNEVEN, "deci", {"attention_bias": True, "mlp_bias": True}),
        ("llama", UNEVEN, "deci", {"rope_parameters": LLAMA3}),
        ("llama", ("L0H1", {}), "llama", {"rope_parameters": LINEAR}),
        ("mistral", EVEN, "llama", {"sliding_window": 64, "head_dim": 16}),
        ("mistral", UNEVEN, "deci", {}),
        ("qwen2", None, "qwen2", {}),
        ("qwen2", ((), CHANNELS), "qwen2", {}),
        ("qwen2", EVEN, "llama", {}),
        ("qwen2", UNEVEN, "deci", {}),
        ("qwen2", None, "llama", {"rope_parameters": LLAMA3}),
        ("qwen3", EVEN, "qwen3", {}),
        ("llama", ((), {}, "L1"), "llama", {}),
        ("qwen3", ((), {}, "L1"), "qwen3", {}),
        ("llama", BIASED, "llama", {}),  # in Qwen2's class such biases are another architecture
        ("qwen2", BIASED, "llama", {}),
        ("qwen2", ((), {}, "L0.attention"), "deci", {}),
        ("mistral", ((), {}, "L1.attention+L2.attention+L2.feed_forward"), "deci", {"num_hidden_layers": 4}),
        (
            "llama",
            ("L2H0-1", {"L3": "3"}, "L0.feed_forward+L1.attention+L3.attention"),
            "deci",
            {"num_hidden_layers": 4},
        ),
    ],
)
def test_a_gguf_file_computes_the_plan(
    family: str, plan: Any, architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """As llama.cpp would: its settings, its rotary embedding, its order of rows."""
    model = stored(family, tmp_path / "model", dtype=torch.float32, **changes)
    pruning = Plan(*plan[:3], compensation=dict(*plan[3:])) if plan else None
    written = cut(model, pruning).model if pruning else model
    written_architecture = write_gguf_model(tmp_path / "model.gguf", written, {"notes": []})
    assert written_architecture == architecture
    exact = model.double()
    ids = tokens(1, 9)
    with pruning.applied_to(exact) if pruning else torch.no_grad():
        expected = output(exact, ids)[0]
    torch.testing.assert_close(by_llama_cpp(tmp_path / "model.gguf", ids[0]), expected, rtol=1e-5, atol=1e-5)
    settings, _ = read(tmp_path / "model.gguf")
    assert settings["tokenizer.ggml.model"] == "no_vocab"
    assert settings["context_length"] == changes.get("sliding_window", 128)


# --------------------------------------------------------------------------- tokenizers


def trained(*steps: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, and that is that: 12 cats, 345 mats"] * 3, trainer)
    tokenizer.add_tokens(["wholeword"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template="{{ 1 }}"
    )


def bytes_(use_regex: bool = False) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def test_what_a_gguf_file_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    for number, (family, changes) in enumerate(
        (("llama", {"hidden_act": "gelu"}), ("llama", {"rope_parameters": yarn}), ("gpt2", {}))
    ):
        stored(family, tmp_path / str(number), dtype=torch.float32, **changes)
        assert export(tmp_path / str(number), tmp_path / "out.gguf", "--format", "gguf") == 2
    tokenizer = trained(bytes_(True))
    for normalizer in (normalizers.NFKC(), normalizers.NFC()):
        tokenizer.backend_tokenizer.normalizer = normalizer
        with pytest.raises(InputError) if isinstance(normalizer, normalizers.NFKC) else nullcontext():
            check_tokenizer(tokenizer)
    model = stored("llama", tmp_path / "large", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[3, 3] = 1e6
    model.save_pretrained(tmp_path / "large")
    assert export(tmp_path / "large", tmp_path / "out.gguf", "--format", "gguf", "--dtype", "float16") == 2
    assert not list(tmp_path.glob("*out*"))


def settings_of(folder: Path, tokenizer: Any, ends: Any = None) -> dict[str, Any]:
    """The tokenizer's settings in the GGUF file of a model with it."""
    model: Any = tiny("llama", dtype=torch.float32, vocab_size=len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert export(folder, folder / "out.gguf", "--format", "gguf") == 0
    tokenizer_settings = {
        name: value for name, value in read(folder / "out.gguf")[0].items() if name.startswith("tokenizer.")
    }
    return {name.rpartition(".ggml.")[2]: value for name, value in tokenizer_settings.items()}


def test_a_gguf_file_stops_and_begins_where_the_model_does(tmp_path: Path) -> None:
    """All ends of its generation; tokens that the tokenizer adds; templates by name."""
    tokenizer = trained(bytes_(True))
    own = settings_of(tmp_path / "plain", tokenizer, 1)
    assert own["eos_token_id"] == 1 and not {"eot_token_id", "eom_token_id"} & set(own)
    assert (own["add_bos_token"], own["add_eos_token"]) == (False, False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"], "pad_token": "<p>", "unk_token": "<u>"})
    tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    known = tokenizer.convert_tokens_to_ids("<|im_end|>")
    both = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.backend_tokenizer.post_processor = both
    own = settings_of(tmp_path / "ends", tokenizer, [1, known, 7, 9])
    assert (own["eos_token_id"], own["eot_token_id"], own["eom_token_id"]) == (1, 7, 9)
    assert (own["add_bos_token"], own["add_eos_token"]) == (True, True)
    pad, unknown = tokenizer.convert_tokens_to_ids(["<p>", "<u>"])
    assert (own["padding_token_id"], own["unknown_token_id"]) == (pad, unknown)
    assert own["tokenizer.chat_template"] == "{{ 1 }}" and own["tokenizer.chat_template.tool_use"] == "{{ 2 }}"


def test_a_tokenizer_is_the_folder_s_or_there_is_none(tmp_path: Path) -> None:
    """Transformers invents a tokenizer for a Qwen2 without files."""
    stored("qwen2", tmp_path / "bare", dtype=torch.float32)
    assert export(tmp_path / "bare", tmp_path / "bare.gguf", "--format", "gguf") == 0
    assert read(tmp_path / "bare.gguf")[0]["tokenizer.ggml.model"] == "no_vocab"
    assert export(tmp_path / "bare", tmp_path / "out", "--heads", "L0H0-1+L1H2-3") == 0
    assert not list((tmp_path / "out").glob("*token*"))


def test_a_gguf_file_has_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = trained(bytes_(True))
    size = len(tokenizer) + 3  # as of a model whose embeddings are padded
    stored("llama", tmp_path / "model", dtype=torch.float32, vocab_size=size)
    tokenizer.save_pretrained(tmp_path / "model")
    assert export(tmp_path / "model", tmp_path / "out.gguf", "--format", "gguf", "--heads", "L0H1") == 0
    settings, arrays = read(tmp_path / "out.gguf")
    own = {name.removeprefix("tokenizer.ggml."): value for name, value in settings.items() if "tokenizer" in name}
    assert own["model"] == "gpt2" and own["pre"] == "gpt-2" and own["tokenizer.chat_template"] == "{{ 1 }}"
    assert len(arrays["token_embd.weight"]) == size == len(own["tokens"]) == len(own["token_type"])
    assert own["tokens"][: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    kinds = gguf.TokenType
    assert own["token_type"][:3] == [kinds.CONTROL, kinds.CONTROL, kinds.NORMAL]
    assert own["token_type"][-4:] == [kinds.USER_DEFINED, *[kinds.UNUSED] * 3]
    assert (own["bos_token_id"], own["eos_token_id"], own["add_bos_token"]) == (0, 1, False)
    again = Tokenizer(
        models.BPE({x: i for i, x in enumerate(own["tokens"])}, [tuple(x.split(" ")) for x in own["merges"]])
    )
    again.pre_tokenizer = bytes_(True)
    text = "the mats that 12 cats sat on, 345 of them"
    assert again.encode(text).ids == tokenizer(text)["input_ids"]
    stage = json.loads(settings["lmeval_prune.manifest"])["stages"][0]
    assert stage["removed"]["fillers"] == {"L0": [1]} and stage["removed"]["heads"] == 0


@pytest.mark.long
@pytest.mark.real
def test_the_real_model_is_written_as_its_authors_wrote_it(tmp_path: Path) -> None:
    """Every array of the embedded GGUF file, through transformers and back: the order of rows, and the tokenizer."""
    from lmeval_prune.checkpoints import embedded

    try:
        source = embedded.packaged_file("smollm2-135m")
    except InputError:
        pytest.skip("no real model")
    assert export(Path("smollm2-135m"), tmp_path / "out.gguf", "--format", "gguf") == 0
    (settings, arrays), (known, expected) = read(tmp_path / "out.gguf"), read(source)
    assert arrays.keys() == expected.keys()
    assert all(torch.equal(arrays[name], value) for name, value in expected.items())
    differs = {name for name in known.keys() & settings.keys() if known[name] != settings[name]}
    assert differs <= {"general.name", "general.file_type", "GGUF.kv_count", "tokenizer.ggml.pre"}
    assert {name for name in known.keys() - settings.keys() if not name.startswith("general.")} == set()
