"""An adapter through PEFT is the head mask; what is refused; what a kill leaves."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file

from lmeval_prune import HeadMask, InputError, load_pretrained, map_model
from lmeval_prune.cli import main
from lmeval_prune.export import adapters
from lmeval_prune.export.adapters import AdapterExport
from lmeval_prune.export.manifest import adapter_name, read_adapter, read_adapters
from lmeval_prune.export.servers import RANKS, largest_rank
from lmeval_prune.interventions.plan import Plan
from tests.kills import killing_after
from tests.tiny_models import ALL, SEQ2SEQ, output, tiny, tokens


def masks_of(model: Any) -> list[str]:
    """One head, and a union over layers (and stacks) in which a layer loses two."""
    labels = [layer.label for layer in map_model(model).attention]
    return [f"{labels[0]}H1", "+".join([f"{labels[0]}H0", f"{labels[0]}H2", *(f"{label}H3" for label in labels[1:])])]


def saved(family: str, folder: Path, **changes: Any) -> Any:
    model: Any = tiny(family, **changes)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", ALL)
def test_an_adapter_through_peft_is_the_mask(family: str, tmp_path: Path) -> None:
    """Loaded from its files, not merged and merged; the others' columns of the merged weights stay as they were."""
    model = saved(family, tmp_path / "model")
    masks = [HeadMask(text) for text in masks_of(model)]
    export = AdapterExport(str(tmp_path / "model"), masks, str(tmp_path / "adapters"))
    names = [name for name, new in export.run() if new]
    assert sorted(names) == sorted(adapter_name(mask.resolve(map_model(model)).heads) for mask in masks)
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
        list(AdapterExport(str(tmp_path / "model"), [heads], str(folder), type_).run())
        wrapped = PeftModel.from_pretrained(tiny(family, dtype=torch.float32).to(kind), str(folder / str(heads)))
        merged = map_model(wrapped.merge_and_unload())
        plain = map_model(tiny(family, dtype=torch.float32).to(kind))
        for layer, own in zip(plain.attention, merged.attention, strict=True):
            weight, found = (one.o_proj.weight.T if family == "gpt2" else one.o_proj.weight for one in (layer, own))
            lost = {0: [1, 2], 1: [0]}[layer.index]
            columns = [c for head in lost for c in range(layer.columns(head).start, layer.columns(head).stop)]
            others = [c for c in range(weight.shape[1]) if c not in columns]
            assert torch.equal(found[:, others], weight[:, others])
            assert (found[:, columns] == 0).all() == exact


def test_the_files_are_as_servers_read_them(tiny_folder: Path, tmp_path: Path) -> None:
    """One rank, rows of the identity, whole names in a list, no pickles; the manifest names what it was made from."""
    masks = [HeadMask("L1H2"), HeadMask("L0H0+L0H3+L1H1")]
    export = AdapterExport(str(tiny_folder), masks, str(tmp_path), "bfloat16", served="org/NAME")
    list(export.run())
    config = json.loads((tmp_path / "L0H0+L0H3+L1H1" / "adapter_config.json").read_text())
    modules = ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
    assert config["target_modules"] == modules and config["base_model_name_or_path"] == "org/NAME"
    assert config["r"] == config["lora_alpha"] == export.rank == 16 and "rank_pattern" not in config
    tensors = load_file(tmp_path / "L0H0+L0H3+L1H1" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    a = tensors[f"base_model.model.{modules[0]}.lora_A.weight"].float()
    assert torch.equal(a, torch.eye(32)[[*range(8), *range(24, 32)]])
    a, b = (tensors[f"base_model.model.{modules[1]}.lora_{part}.weight"].float() for part in "AB")
    assert torch.equal(a[:8], torch.eye(32)[8:16]) and not a[8:].any() and not b[:, 8:].any()
    assert {path.suffix for path in tmp_path.rglob("*.*")} == {".json", ".safetensors"}
    found = read_adapters(tmp_path)
    assert list(found) == ["L1H2", "L0H0+L0H3+L1H1"]
    assert found["L1H2"]["dtype"] == "bfloat16" and found["L1H2"]["base"]["pretrained"] == "org/NAME"
    assert found["L0H0+L0H3+L1H1"]["modules"] == {modules[0]: [0, 3], modules[1]: [1]}


def test_the_hash_is_that_of_the_update_whatever_its_file(tiny_folder: Path, tmp_path: Path) -> None:
    """Padding and format do not count; heads, weights and type do."""

    def hashed(name: str, *masks: str, **settings: Any) -> str:
        export = AdapterExport(str(tiny_folder), [HeadMask(one) for one in masks], str(tmp_path / name), **settings)
        list(export.run())
        return str(read_adapter(tmp_path / name / masks[0])["hash"])

    own = hashed("own", "L1H2", dtype="float32")
    assert hashed("padded", "L1H2", "L0H0-2", dtype="float32") == own
    assert hashed("gguf", "L1H2", dtype="float32", format="gguf") == own
    assert len({own, hashed("other", "L1H1", dtype="float32"), hashed("type", "L1H2", dtype="bfloat16")}) == 3


def test_a_long_list_of_heads_has_a_short_name() -> None:
    heads = [f"L{layer}H{head}" for layer in range(30) for head in range(9)]
    assert adapter_name(heads[:3]) == "L0H0+L0H1+L0H2"
    assert adapter_name(heads).startswith("heads-270-") and adapter_name(heads) != adapter_name(heads[::-1])


def test_a_gguf_adapter_has_the_same_arrays(tiny_folder: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        export = AdapterExport(str(tiny_folder), [HeadMask("L0H1+L1H2-3")], str(tmp_path / dtype), dtype, "gguf")
        list(export.run())
        read = gguf.GGUFReader(tmp_path / dtype / "L0H1+L1H2+L1H3" / "adapter.gguf")
        settings = {name: field.contents() for name, field in read.fields.items() if "." in name}
        assert settings["general.type"] == "adapter" and settings["adapter.type"] == "lora"
        assert settings["adapter.lora.alpha"] == 16 and settings["general.architecture"] == "llama"
        arrays = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in read.tensors}
        assert len(arrays) == 4
        for update in export.updates(export.masks["L0H1+L1H2+L1H3"]):
            for part in ("a", "b"):
                own = torch.tensor(arrays[f"blk.{update.index}.attn_output.weight.lora_{part}"])
                assert torch.equal(own, getattr(update, f"lora_{part}").float())


# --------------------------------------------------------------------------- large pools


def test_of_the_weights_only_output_projections_are_read(tiny_folder: Path, tmp_path: Path) -> None:
    read = []

    class Watched:
        def __init__(self, *inputs: Any) -> None:
            self.file = safe_open(*inputs)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return self.file.get_tensor(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmeval_prune.export.projections.safe_open", Watched)
        patch.setattr("lmeval_prune.export.projections.with_weights", None)
        pool = [HeadMask(f"L{layer}H{head}") for head in range(4) for layer in range(2)]
        assert len(list(AdapterExport(str(tiny_folder), pool, str(tmp_path), "float32").run())) == 8
    assert read == [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(2)]


def test_weights_in_several_files_or_none_that_is_known_are_the_same(tmp_path: Path) -> None:
    """Files of a sharded checkpoint; where they do not have a projection by name, the model is loaded."""
    model: Any = tiny("gpt2", dtype=torch.float32)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    hashes = set()
    for place in ("read", "loaded"):
        export = AdapterExport(str(tmp_path / "model"), [HeadMask("L0H1+L1H2")], str(tmp_path / place))
        if place == "loaded":
            export.projections.__dict__["_files"] = {}
        list(export.run())
        assert ("model" in export.projections.__dict__) == (place == "loaded")
        hashes.add(read_adapter(tmp_path / place / "L0H1+L1H2")["hash"])
    assert len(hashes) == 1


def test_a_mask_artefact_is_an_adapter_of_its_own_weights(tiny_folder: Path, tmp_path: Path) -> None:
    HeadMask("L1H0+L0H1").save(tmp_path / "mask.json", map_model(load_pretrained(tiny_folder)))
    Plan("L1H3").save(tmp_path / "plan.json", map_model(load_pretrained(tiny_folder)))
    given = ["export", "adapter", "--pretrained", str(tiny_folder), "--output", str(tmp_path / "out")]
    both = ["--mask", str(tmp_path / "mask.json"), "--mask", str(tmp_path / "plan.json"), "--dtype", "float32"]
    assert main([*given, *both]) == 0
    assert list(read_adapters(tmp_path / "out")) == ["L1H3", "L0H1+L1H0"]


def _export(folder: str, output: str, kill: int | None = None) -> None:
    if kill is not None:
        adapters.write_bytes = killing_after(kill)(adapters.write_bytes)  # type: ignore[assignment]
    code = main(
        ["export", "adapter", "--pretrained", folder, "--output", output, "--layers", "0,1", "--dtype", "float32"]
    )
    os._exit(code)


def test_a_killed_export_goes_on(tiny_folder: Path, tmp_path: Path) -> None:
    """What was whole is kept as it is; what was half written is made anew."""
    context = multiprocessing.get_context("fork")
    written: dict[str, int] = {}
    for kill in (5, 3, None):
        process = context.Process(target=_export, args=(str(tiny_folder), str(tmp_path / "pool"), kill))
        process.start()
        process.join()
        assert process.exitcode == (0 if kill is None else -9)
        there = {path.parent.name: path.stat().st_mtime_ns for path in (tmp_path / "pool").glob("L*/*.json")}
        assert written.items() <= there.items() and len(there) > len(written)
        written = there
    assert len(written) == 8 and not list((tmp_path / "pool").glob(".*"))
    whole = AdapterExport(str(tiny_folder), [HeadMask("L1H3")], str(tmp_path / "again"), "float32")
    list(whole.run())
    assert read_adapter(tmp_path / "again" / "L1H3") == read_adapter(tmp_path / "pool" / "L1H3")


def test_folders_of_other_weights_or_settings_are_not_taken_for_ours(tiny_folder: Path, tmp_path: Path) -> None:
    def run(folder: Path = tiny_folder, dtype: str = "float32", **settings: Any) -> None:
        list(AdapterExport(str(folder), [HeadMask("L0H0")], str(tmp_path / "out"), dtype, **settings).run())

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
    with pytest.raises(InputError, match="not as it was written"):
        run()
    (tmp_path / "out" / "L0H0" / "lmeval_prune.json").unlink()
    with pytest.raises(InputError, match="no adapter of lmeval-prune's"):
        run()


# --------------------------------------------------------------------------- what is refused


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["export", "adapter", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("lmeval-prune: error: ")
    return lines[-1]


def test_what_no_adapter_can_do_is_one_line(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--pretrained", str(tiny_folder), "--output", str(tmp_path / "out"))
    model_map = map_model(tiny("llama"))
    Plan("L0H1", {"L0": "3"}).save(tmp_path / "plan.json", model_map)
    assert "channels or updated weights" in refused(capsys, *given, "--mask", str(tmp_path / "plan.json"))
    HeadMask("L0H1").save(tmp_path / "mask.json", model_map)
    assert "other weights" in refused(capsys, *given, "--mask", str(tmp_path / "mask.json"))
    assert "name what is to be pruned" in refused(capsys, *given)
    assert "no attention in layer 7" in refused(capsys, *given, "--heads", "L7H0")
    assert "all 4 heads of layer L0" in refused(capsys, *given, "--heads", "L0H*")
    assert "--dtype int8 is not known" in refused(capsys, *given, "--heads", "L0H0", "--dtype", "int8")
    assert "--format onnx is not known" in refused(capsys, *given, "--heads", "L0H0", "--format", "onnx")
    saved("gpt2", tmp_path / "gpt2")
    to = ("--output", str(tmp_path / "out"), "--heads", "L0H0")
    assert "gpt2 models are not written as GGUF" in refused(
        capsys, "--pretrained", str(tmp_path / "gpt2"), *to, "--format", "gguf"
    )
    saved("llama", tmp_path / "wide", hidden_size=640, num_attention_heads=10, num_key_value_heads=2)
    error = refused(
        capsys, "--pretrained", str(tmp_path / "wide"), "--output", str(tmp_path / "out"), "--heads", "L0H0-8"
    )
    assert "needs rank 576" in error and "export model --zeroed --heads L0H0+L0H1" in error
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    error = refused(capsys, "--pretrained", str(tmp_path / "wide"), *to)
    assert "is quantised" in error and "--served" in error
    assert not (tmp_path / "out").exists()


def test_weights_that_a_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = tiny("llama", dtype=torch.float32)
    with torch.no_grad():
        map_model(model).attention[1].o_proj.weight[3, 3] = 1e6
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=r"layers\.1.*float16 cannot hold"):
        list(AdapterExport(str(tmp_path / "model"), [HeadMask("L0H0+L1H0")], str(tmp_path / "out"), "float16").run())
    assert not list((tmp_path / "out").glob("*"))


def test_a_projection_that_is_no_plain_one_is_refused(tiny_folder: Path) -> None:
    class Scaled(torch.nn.Linear):
        pass

    model = tiny("llama")
    map_model(model).attention[0].module.o_proj = Scaled(32, 32)
    with pytest.raises(InputError, match="is a Scaled, no plain projection"):
        adapters.check_adaptable(map_model(model), "NAME")


def test_an_adapter_that_leaves_something_is_refused() -> None:
    layer = map_model(tiny("llama", dtype=torch.bfloat16)).attention[0]
    weight = layer.o_proj.weight.detach()
    update = adapters.Update.of("o_proj", layer, [1], weight, 8)
    update.lora_b[0, 0] *= 1.01
    with pytest.raises(InputError, match="does not prune its heads exactly"):
        update.check(weight, range(8, 16))


# --------------------------------------------------------------------------- the printed lines


def test_ranks_are_those_of_vllm() -> None:
    assert [largest_rank(rank) for rank in (1, 2, 64, 96, 257, 512)] == [1, 8, 64, 128, 320, 512]
    assert max(RANKS) == adapters.LARGEST_RANK


def test_the_command_prints_how_to_serve(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["export", "adapter", "--pretrained", str(tiny_folder), "--dtype", "float32"]
    assert main([*given, "--output", str(tmp_path / "peft"), "--heads", "L0H0+L1H2", "--each", "L1H0-1"]) == 0
    shown = capsys.readouterr().out
    assert "3 adapters written, 0 kept; rank 8" in shown
    for words in (
        f"VLLM_LORA_RESOLVER_CACHE_DIR={tmp_path / 'peft'}",
        "--max-lora-rank 8 --max-loras 4 --max-cpu-loras 4 --lora-target-modules o_proj",
        f"--model-path {tiny_folder} --dtype float32",
        "--max-loras-per-batch 4",
    ):
        assert words in shown
    words = ["--layers", "1", "--format", "gguf", "--served", "dense.gguf"]
    assert main([*given, "--output", str(tmp_path / "gguf"), *words]) == 0
    shown = capsys.readouterr().out
    assert "llama-server -m dense.gguf --lora-init-without-apply" in shown
    assert f"--lora {tmp_path / 'gguf' / 'L1H0' / 'adapter.gguf'} --lora " in shown and "4 adapters" in shown


def test_lines_are_of_adapters_that_belong_together(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One folder may hold those of other forms; a revision is the server's, too."""
    given = ["export", "adapter", "--pretrained", str(tiny_folder), "--dtype", "float32", "--output", str(tmp_path)]
    assert main([*given, "--heads", "L0H0", "--format", "gguf"]) == 0
    assert main([*given, "--heads", "L0H1", "--revision", "main"]) == 0
    shown = capsys.readouterr().out
    assert "--max-loras 2" in shown and f"vllm serve {tiny_folder} --revision main" in shown


def test_encoder_decoders_have_their_task(tmp_path: Path) -> None:
    for family in SEQ2SEQ:
        saved(family, tmp_path / family)
        export = AdapterExport(str(tmp_path / family), [HeadMask("decoder.L0H0")], str(tmp_path / f"{family}-out"))
        assert export._peft_config([])["task_type"] == "SEQ_2_SEQ_LM"
