"""Exported adapters: equal to the head mask in PEFT; resumable; refused models and folders."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from lmeval_prune import HeadMask, InputError, load_pretrained, map_model
from lmeval_prune.cli import main
from lmeval_prune.export.adapters import export_adapters
from lmeval_prune.export.manifest import adapter_name, read_adapter, read_adapters
from lmeval_prune.interventions.plan import Plan
from tests.tiny_models import ALL, output, saved, tiny, tokens


def masks_of(model: Any) -> list[str]:
    """One head, and a union over layers (and stacks) in which a layer loses two."""
    labels = [layer.label for layer in map_model(model).attention]
    return [f"{labels[0]}H1", "+".join([f"{labels[0]}H0", f"{labels[0]}H2", *(f"{label}H3" for label in labels[1:])])]


@pytest.mark.parametrize("family", ALL)
def test_an_adapter_through_peft_is_the_mask(family: str, tmp_path: Path) -> None:
    """Loaded from its files, not merged and merged; the others' columns of the merged weights stay as they were."""
    model = saved(family, tmp_path / "model")
    masks = [HeadMask(text) for text in masks_of(model)]
    export_adapters(str(tmp_path / "model"), masks, str(tmp_path / "adapters"))
    names = {adapter_name(mask.resolve(map_model(model)).heads) for mask in masks}
    assert {*read_adapters(tmp_path / "adapters")} == names
    dense = output(model, tokens())
    before = copy.deepcopy(model.state_dict())
    for mask, name in zip(masks, [str(mask.resolve(map_model(model))) for mask in masks], strict=True):
        with mask.applied_to(model):
            expected = output(model, tokens())
        assert not torch.allclose(expected, dense)
        wrapped = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "adapters" / name))
        torch.testing.assert_close(output(wrapped, tokens()), expected, rtol=0, atol=1e-9)
        merged = wrapped.merge_and_unload()
        torch.testing.assert_close(output(merged, tokens()), expected, rtol=0, atol=1e-9)
        changed = {key for key, value in merged.state_dict().items() if not torch.equal(value, before[key])}
        assert changed == {f"{module}.weight" for module in read_adapter(tmp_path / "adapters" / name)["modules"]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_in_the_type_of_the_server_the_columns_are_exactly_zero(family: str, dtype: str, tmp_path: Path) -> None:
    """From float32 weights: an adapter in float32 would leave what rounding them takes away."""
    model = tiny(family, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    kind = getattr(torch, dtype)
    heads = HeadMask("L0H1+L0H2+L1H0")
    for type_, exact in ((dtype, True), ("float32", False)):
        folder = tmp_path / type_
        export_adapters(str(tmp_path / "model"), [heads], str(folder), type_)
        wrapped = PeftModel.from_pretrained(tiny(family, dtype=torch.float32).to(kind), str(folder / str(heads)))
        merged = map_model(wrapped.merge_and_unload())
        plain = map_model(tiny(family, dtype=torch.float32).to(kind))
        for layer, own in zip(plain.attention, merged.attention, strict=True):
            weight, merged_weight = (
                attention.o_proj.weight.T if family == "gpt2" else attention.o_proj.weight for attention in (layer, own)
            )
            lost = {0: [1, 2], 1: [0]}[layer.index]
            columns = [c for head in lost for c in range(layer.columns(head).start, layer.columns(head).stop)]
            others = [c for c in range(weight.shape[1]) if c not in columns]
            assert torch.equal(merged_weight[:, others], weight[:, others])
            assert (merged_weight[:, columns] == 0).all() == exact


def test_the_files_are_as_servers_read_them(tiny_folder: Path, tmp_path: Path) -> None:
    """One rank, rows of the identity, full module names, no pickles; the manifest names the base model."""
    masks = [HeadMask("L1H2"), HeadMask("L0H0+L0H3+L1H1")]
    export_adapters(str(tiny_folder), masks, str(tmp_path), "bfloat16", served="org/NAME")
    config = json.loads((tmp_path / "L0H0+L0H3+L1H1" / "adapter_config.json").read_text())
    modules = ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
    assert config["target_modules"] == modules and config["base_model_name_or_path"] == "org/NAME"
    assert config["r"] == config["lora_alpha"] == 16 and "rank_pattern" not in config
    tensors = load_file(tmp_path / "L0H0+L0H3+L1H1" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    a = tensors[f"base_model.model.{modules[0]}.lora_A.weight"].float()
    assert torch.equal(a, torch.eye(32)[[*range(8), *range(24, 32)]])
    a, b = (tensors[f"base_model.model.{modules[1]}.lora_{part}.weight"].float() for part in "AB")
    assert torch.equal(a[:8], torch.eye(32)[8:16]) and not a[8:].any() and not b[:, 8:].any()
    assert {path.suffix for path in tmp_path.rglob("*.*")} == {".json", ".md", ".safetensors"}
    manifests = read_adapters(tmp_path)
    assert list(manifests) == ["L1H2", "L0H0+L0H3+L1H1"]
    assert manifests["L1H2"]["dtype"] == "bfloat16" and manifests["L1H2"]["base"]["pretrained"] == "org/NAME"
    assert manifests["L0H0+L0H3+L1H1"]["modules"] == {modules[0]: [0, 3], modules[1]: [1]}


def test_the_hash_is_that_of_the_update_whatever_its_file(tiny_folder: Path, tmp_path: Path) -> None:
    """Padding and format do not count; heads, weights and type do."""

    def hashed(name: str, *masks: str, **settings: Any) -> str:
        export_adapters(str(tiny_folder), [HeadMask(mask) for mask in masks], str(tmp_path / name), **settings)
        return str(read_adapter(tmp_path / name / masks[0])["hash"])

    own = hashed("own", "L1H2", dtype="float32")
    assert hashed("padded", "L1H2", "L0H0-2", dtype="float32") == own
    assert hashed("gguf", "L1H2", dtype="float32", format="gguf") == own
    assert len({own, hashed("other", "L1H1", dtype="float32"), hashed("type", "L1H2", dtype="bfloat16")}) == 3


def test_a_gguf_adapter_has_the_same_arrays(tiny_folder: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        for kind in ("gguf", "peft"):
            export_adapters(str(tiny_folder), [HeadMask("L0H1+L1H2-3")], str(tmp_path / dtype / kind), dtype, kind)
        read = gguf.GGUFReader(tmp_path / dtype / "gguf" / "L0H1+L1H2+L1H3" / "adapter.gguf")
        own = load_file(tmp_path / dtype / "peft" / "L0H1+L1H2+L1H3" / "adapter_model.safetensors")
        settings = {name: field.contents() for name, field in read.fields.items() if "." in name}
        assert settings["general.type"] == "adapter" and settings["adapter.type"] == "lora"
        assert settings["adapter.lora.alpha"] == 16 and settings["general.architecture"] == "llama"
        arrays = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in read.tensors}
        assert len(arrays) == len(own) == 4
        for name, tensor in own.items():
            layer, part = name.split(".")[4], name.split(".")[-2][-1].lower()
            assert torch.equal(torch.tensor(arrays[f"blk.{layer}.attn_output.weight.lora_{part}"]), tensor.float())


# --------------------------------------------------------------------------- large pools


def test_a_mask_artefact_is_an_adapter_of_its_own_weights(tiny_folder: Path, tmp_path: Path) -> None:
    HeadMask("L1H0+L0H1").save(tmp_path / "mask.json", map_model(load_pretrained(tiny_folder)))
    Plan("L1H3").save(tmp_path / "plan.json", map_model(load_pretrained(tiny_folder)))
    arguments = ["export", "adapter", "--pretrained", str(tiny_folder), "--output", str(tmp_path / "out")]
    both = ["--mask", str(tmp_path / "mask.json"), "--mask", str(tmp_path / "plan.json"), "--dtype", "float32"]
    assert main([*arguments, *both]) == 0
    assert list(read_adapters(tmp_path / "out")) == ["L1H3", "L0H1+L1H0"]


def test_folders_of_other_weights_or_settings_are_not_taken_for_ours(tiny_folder: Path, tmp_path: Path) -> None:
    def run(folder: Path = tiny_folder, dtype: str = "float32", **settings: Any) -> None:
        export_adapters(str(folder), [HeadMask("L0H0")], str(tmp_path / "out"), dtype, **settings)

    run()
    run()
    saved("llama", tmp_path / "other", seed=1)
    for settings, what in (
        ({"folder": tmp_path / "other", "served": str(tiny_folder)}, "another base"),
        ({"dtype": "float16"}, "another dtype"),
        ({"format": "gguf"}, "another format"),
    ):
        with pytest.raises(InputError, match=what):
            run(**settings)
    file = tmp_path / "out" / "L0H0" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError):
        run()


# --------------------------------------------------------------------------- refused models and folders


def test_what_else_is_in_the_folder_does_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint has a manifest of the same name."""
    saved("llama", tmp_path / "model", dtype=torch.float32)
    model = ["--pretrained", str(tmp_path / "model"), "--heads", "L0H0-1"]
    assert main(["export", "model", *model, "--output", str(tmp_path / "out" / "smaller")]) == 0
    capsys.readouterr()
    assert len(lines_of(capsys, *model, "--output", str(tmp_path / "out"))) == 1
    assert list(read_adapters(tmp_path / "out")) == ["L0H0+L0H1"]


def test_the_file_that_llama_cpp_serves_is_looked_at(tiny_folder: Path, tmp_path: Path) -> None:
    """An adapter takes away what the served file has: other weights would leave something."""
    model = ("--pretrained", str(tiny_folder), "--format", "gguf")
    to_gguf = ("export", "model", *model, "--splitting", "gpt-2", "--dtype", "float16")
    adapter = ("export", "adapter", *model, "--heads", "L0H0", "--dtype", "float16", "--output", str(tmp_path / "out"))
    zeroed, own = tmp_path / "zeroed.gguf", tmp_path / "own.gguf"  # its head would come back with the other sign
    assert main([*to_gguf, "--heads", "L0H0", "--zeroed", "--output", str(zeroed)]) == 0
    assert main([*adapter, "--served", str(zeroed)]) == 2 and not (tmp_path / "out").exists()
    assert main([*to_gguf, "--output", str(own)]) == 0
    assert main([*adapter, "--served", str(own)]) == 0


def test_weights_that_a_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = tiny("llama", dtype=torch.float32)
    with torch.no_grad():
        map_model(model).attention[1].o_proj.weight[3, 3] = 1e6
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError):
        export_adapters(str(tmp_path / "model"), [HeadMask("L0H0+L1H0")], str(tmp_path / "out"), "float16")
    assert not list((tmp_path / "out").glob("*"))


# --------------------------------------------------------------------------- the printed lines


def test_the_command_prints_how_to_serve(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pretrained", str(tiny_folder), "--dtype", "float32"]
    pool = tmp_path / "a pool"
    (vllm,) = lines_of(capsys, *words, "--output", str(pool), "--heads", "L0H0+L1H2", "--each", "L1H0-1")
    assert f"VLLM_LORA_RESOLVER_CACHE_DIR='{pool}' vllm serve {tiny_folder} --dtype float32 --enable-lora" in vllm
    assert "--max-lora-rank 8 --max-loras 4 --max-cpu-loras 4 --lora-target-modules o_proj" in vllm
    gguf = lines_of(capsys, *words, "--output", str(tmp_path / "gguf"), "--layers", "1", "--format", "gguf")
    files = " ".join(f"--lora {tmp_path}/gguf/L1H{head}/adapter.gguf" for head in range(4))
    assert gguf[-1] == f"llama-server -m MODEL.gguf --lora-init-without-apply {files}"


def lines_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines that say how to serve."""
    assert main(["export", "adapter", *words]) == 0
    shown = capsys.readouterr().out.partition("merged, all are exact\n")[2]
    return [line for line in shown.splitlines() if line]
