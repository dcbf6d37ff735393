"""The method `lora` computes what PEFT computes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import HeadMask, InputError, Plan
from lmeval_prune.export.adapters import export_adapters
from lmeval_prune.interventions.lora import Lora
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.surgery.cut import cut
from tests.adapters import write_adapter
from tests.tiny_models import output, tiny, tokens


@pytest.mark.parametrize(
    "config", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 20, "layers.1.mlp.down_proj": 1}}]
)
def test_it_computes_what_peft_computes(config: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel

    write_adapter(tmp_path / "a", **config)
    model, inputs = tiny("llama"), tokens()
    peft = PeftModel.from_pretrained(tiny("llama"), str(tmp_path / "a")).double()
    expected = output(peft, inputs)
    with Lora(str(tmp_path / "a")).applied_to(model):
        torch.testing.assert_close(output(model, inputs), expected, rtol=0, atol=1e-9)
    with Lora(str(tmp_path / "a")).applied_to(peft):  # once more, on a model that PEFT wraps
        assert not torch.allclose(output(peft, inputs), expected)


@pytest.mark.parametrize("by", ["before", "after", "peft"])
def test_a_plan_that_replaces_weights_keeps_it(by: str, tmp_path: Path) -> None:
    """Whichever is applied first, and if PEFT has put the adapter on the model: W' x + s B A x."""
    from peft import PeftModel

    adapter, inputs = str(write_adapter(tmp_path / "a")), tokens()
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    plan = Plan("L0H1", compensation={"L1.down.weight": weight, "L1.down.bias": weight[:, 0]})
    with Lora(adapter).applied_to(cut(tiny("llama"), plan).model) as cut_map:
        expected = output(cut_map.model, inputs)
    model: Any = PeftModel.from_pretrained(tiny("llama"), adapter).double() if by == "peft" else tiny("llama")
    both = {"before": [Lora(adapter), plan], "after": [plan, Lora(adapter)], "peft": [plan]}[by]
    with ExitStack() as stack:
        for intervention in both:
            stack.enter_context(intervention.applied_to(model))
        torch.testing.assert_close(output(model, inputs), expected, rtol=0, atol=1e-9)


def test_an_exported_adapter_is_taken_by_its_own_model(tiny_folder: Path, tmp_path: Path) -> None:
    """Loaded in any type; not by a model with other weights."""
    export_adapters(str(tiny_folder), [HeadMask("L0H1")], str(tmp_path), "float32")
    lora = Lora(str(tmp_path / "L0H1"))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=dtype)
        with lora.applied_to(model):
            pass
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(1.01)
    with pytest.raises(InputError, match="another model"), lora.applied_to(model):
        pass


@pytest.mark.parametrize("trained", [[], ["lm_head"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("cut", [False, True])
def test_peft_loads_adapters_of_models_with_more_rows_than_tokens(
    trained: list[str], cut: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    """Also such as were trained after the rows had been cut."""
    from peft import LoraConfig, get_peft_model

    tokenizer, network = AutoTokenizer.from_pretrained(tiny_folder), AutoModelForCausalLM.from_pretrained(tiny_folder)
    network.resize_token_embeddings(len(tokenizer) + 61)
    network.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    if cut:
        network.resize_token_embeddings(len(tokenizer))
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=trained, init_lora_weights=False)
    expected = get_peft_model(network, config).eval()
    expected.save_pretrained(tmp_path / "adapter")
    lm = PrunedHFLM(str(tmp_path / "model"), peft=str(tmp_path / "adapter"), device="cpu")
    actual, wanted = (output(model, tokens())[..., : len(tokenizer)] for model in (lm.model, expected))
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-9)
    assert lm.model.get_input_embeddings().weight.shape[0] == len(tokenizer) + (0 if cut and trained else 61)
