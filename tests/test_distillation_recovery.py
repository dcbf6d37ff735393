"""What a student learns by and from: layer maps, hidden states, LoRA, likeliest tokens, corpora."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lmeval_prune import InputError, load_pretrained, map_model
from lmeval_prune.checkpoints.pruned import kept_layers, read_manifest
from lmeval_prune.cli import main
from lmeval_prune.distillation import language_host, stages
from lmeval_prune.distillation.attention_maps import turn_off_map_dropout
from lmeval_prune.distillation.corpus import QuestionSearch, answered_text, corpus_identity, read_corpus
from lmeval_prune.distillation.features import Features
from lmeval_prune.distillation.host import read_note
from lmeval_prune.distillation.layer_map import LayerMap, collected_states, layers_of
from lmeval_prune.distillation.lora import add_lora, check_lora, lora_config, merge
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill, make_host
from lmeval_prune.distillation.trainer import DistillTrainer
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.planning.own_answers import Answerer, OwnAnswer
from lmeval_prune.pruners.calibration import encode
from lmeval_prune.surgery.cut import cut, cut_to
from lmeval_prune.training.questions import drop_test_questions, split_by_question
from tests.athena_hosts import data_folder
from tests.kills import Killed
from tests.test_distillation import assert_same, killed_at, losses, plain_descent
from tests.test_own_answers import task_file
from tests.tiny_models import tiny, tokens

pytestmark = pytest.mark.usefixtures("no_pictures")
LORA = {"r": 2, "lora_dropout": 0.1}
EVERYTHING = {"hidden": True, "top_k": 5}


@pytest.fixture
def options(tiny_folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> DistillOptions:
    """One stage of one epoch over six problems, by the response and the hidden-state term."""
    return DistillOptions(
        pretrained=str(tiny_folder),
        output=str(tmp_path / "student"),
        data_dir=str(data_folder(tmp_path_factory.mktemp("data"))),
        task="prune_asdiv_a_equation",
        test="fold0",
        limit=8,
        validation=0.25,
        answer="\\boxed{{}}",
        ratio=0.5,
        unit="balanced",
        stages=1,
        epochs=1,
        batch=3,
        calibration=4,
        rate=1e-3,
        feature=False,
        hidden=True,
    )


# ---------------------------------------------------------------- layers and heads


def test_a_map_follows_the_stages() -> None:
    """Heads are those of the model before the first stage, also of layers that moved when others went."""
    first = {"kept_heads": {"L0": [0, 2, 3], "L1": [1], "L2": [0, 1]}}
    second = {"kept_heads": {"L0": [1], "L2": [1]}, "kept_layers": {"L0": "L0", "L1": "L2"}}
    assert LayerMap.of([first]).layers == {"L0": "L0", "L1": "L1", "L2": "L2"}
    both = LayerMap.of([first, second])
    assert both == LayerMap({"L0": "L0", "L1": "L2"}, {"L0": [2], "L1": [1]})
    third = {"kept_heads": {"L1": [0]}, "kept_layers": {"L0": "L0", "L1": "L1"}}  # L0 has no attention any more
    assert LayerMap.of([first, second, third]) == LayerMap({"L0": "L0", "L1": "L2"}, {"L1": [1]})
    assert kept_layers(first) == {"L0": "L0", "L1": "L1", "L2": "L2"}


@pytest.mark.parametrize("teachers", ["previous", "first"])
def test_students_are_compared_with_the_parts_of_their_teacher(
    options: DistillOptions, monkeypatch: pytest.MonkeyPatch, teachers: Any
) -> None:
    """At the start of each stage, query weights of student heads equal those of their teacher heads."""
    counts: list[tuple[int, int]] = []

    def compared(self: DistillTrainer) -> Any:
        assert self.features is not None
        student, teacher = (map_model(model).attention for model in (self.student, self.teacher))
        for layer, heads, position in zip(student, self.features.heads, self.features.teacher_numbers, strict=True):
            for index, head in enumerate(heads):
                student_rows, teacher_rows = layer.rows("q", index), teacher[position].rows("q", head)
                rows = (
                    student_rows.module.weight[student_rows.start : student_rows.stop],
                    teacher_rows.module.weight[teacher_rows.start : teacher_rows.stop],
                )
                assert torch.equal(*rows)
        counts.append((sum(x.heads for x in student), sum(x.heads for x in teacher)))
        return {"best_epoch": 0, "log": []}

    monkeypatch.setattr(DistillTrainer, "run", compared)
    distill(replace(options, stages=2, feature=True, teachers=teachers))
    assert counts == [(6, 8), (4, 6 if teachers == "previous" else 8)]


def test_a_cut_model_is_taught_by_the_model_before_its_cuts(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compensation first: the cut model is the student, and the whole model the teacher of its heads."""
    whole = load_pretrained(options.pretrained)
    tokenizer = AutoTokenizer.from_pretrained(options.pretrained)
    cut_to(tmp_path / "once", whole, Plan(("L0H0", "L0H2"), {"L0": "0-9"}), tokenizer)
    cut_to(tmp_path / "twice", load_pretrained(str(tmp_path / "once")), Plan(("L1H1", "L1H3")), tokenizer)
    seen: list[Any] = []
    monkeypatch.setattr(DistillTrainer, "run", lambda self: seen.append(self.features) or {"best_epoch": 0, "log": []})
    taught = replace(options, ratio=0.0, feature=True, teacher=options.pretrained)
    for name, heads in (("once", [[1, 3], [0, 1, 2, 3]]), ("twice", [[1, 3], [0, 2]])):
        distill(replace(taught, pretrained=str(tmp_path / name), output=str(tmp_path / f"of_{name}")))
        assert seen[-1].heads == heads and seen[-1].pairs == {"L0": "L0", "L1": "L1"}
    other = tmp_path / "other"
    tiny("llama", vocab_size=whole.config.vocab_size, num_hidden_layers=3, max_position_embeddings=512).save_pretrained(
        other
    )
    tokenizer.save_pretrained(other)
    unrelated = replace(taught, teacher=str(other), output=str(tmp_path / "of_other"))
    with pytest.raises(InputError, match=r"feature compares heads, and the teacher .* has other heads"):
        distill(unrelated)
    with pytest.raises(InputError, match=r"hidden compares layers, and the teacher .* name them in layer_map"):
        distill(replace(unrelated, feature=False))
    distill(replace(unrelated, feature=False, layer_map={"L1": "L2"}))
    assert seen[-1].pairs == {"L1": "L2"}


def test_hidden_states_are_the_outputs_of_layers() -> None:
    model, ids = tiny("llama", num_hidden_layers=3), tokens()
    layers = [model.model.layers[number] for number in (2, 0)]  # type: ignore[union-attr, index]
    model(ids, output_hidden_states=True)  # transformers adds hooks of its own
    hooks = [len(layer._forward_hooks) for layer in layers]
    with torch.no_grad(), collected_states(layers) as states:
        expected = model(ids, output_hidden_states=True)
    assert torch.equal(states[1], expected.hidden_states[1])
    assert torch.equal(model.model.norm(states[0]), expected.hidden_states[3])  # type: ignore[union-attr, operator]
    assert hooks == [len(layer._forward_hooks) for layer in layers]


def test_layers_that_are_gone(options: DistillOptions) -> None:
    """A student of two layers of a teacher of four: each is compared with the layer that it was."""
    teacher, student = tiny("llama", num_hidden_layers=4), tiny("llama", num_hidden_layers=2)
    stage = {"kept_heads": {f"L{n}": [0, 1, 2, 3] for n in (0, 3)}, "kept_layers": {"L0": "L0", "L1": "L3"}}
    both = [map_model(model) for model in (student, teacher)]
    features = Features(replace(options, normalize="none", feature=True), LayerMap.of([stage]), *both)
    assert features.pairs == {"L0": "L0", "L1": "L3"} and features.teacher_numbers == [0, 3]
    ids, real = tokens(), torch.ones(3, 7)
    with torch.no_grad(), features.collected():
        student.config._attn_implementation = teacher.config._attn_implementation = "eager"
        outputs, target = (model(ids, output_attentions=True) for model in (student, teacher))
        terms = features.terms(target, outputs, real)
        states = [model(ids, output_hidden_states=True).hidden_states for model in (student, teacher)]
    first = (states[0][1] - states[1][1]).square().mean(-1).sum()
    norms = [model.model.norm for model in (student, teacher)]  # type: ignore[union-attr]
    with torch.no_grad(), collected_states([student.model.layers[1], teacher.model.layers[3]]) as last:  # type: ignore[union-attr, index, list-item]
        student(ids), teacher(ids)
    assert torch.equal(norms[1](last[1]), states[1][4])  # type: ignore[operator]
    second = (last[0] - last[1]).square().mean(-1).sum()
    assert float(terms["hidden"]) == pytest.approx(float(first + second) / 2, rel=1e-9)
    maps = [(outputs.attentions[n] - target.attentions[m]).square().sum() / 4 for n, m in ((0, 0), (1, 3))]
    assert float(terms["feature"]) == pytest.approx(float(sum(maps)) / 2, rel=1e-9)


def test_the_manifest_says_which_layers_are_left() -> None:
    """Of a class with fewer layers, which have new numbers, and of one that has an absent block in its place."""
    model = tiny("llama", num_hidden_layers=4)
    ids = tokens()
    for blocks, expected in (
        (("L1",), {"L0": "L0", "L1": "L2", "L2": "L3"}),
        (("L1.attention",), {f"L{n}": f"L{n}" for n in range(4)}),
        (("L1", "L2.attention"), None),
    ):
        result = cut(model, Plan(blocks=blocks))
        layers = LayerMap.of(result.manifest["stages"])
        assert expected is None or layers.layers == expected
        both = map_model(result.model), map_model(model)
        for label, before in layers.layers.items():
            student, teacher = (
                layers_of(model_map)[name] for model_map, name in zip(both, (label, before), strict=True)
            )
            for name, parameter in student.named_parameters():
                assert torch.equal(parameter, teacher.get_parameter(name))
        same = replace(DistillOptions("x", "y", task="z", unit="group"), hidden=True)
        features = Features(same, layers, *both)
        assert len(features.heads) == len(features.teacher_numbers) == len(both[0].attention)
        with torch.no_grad(), features.collected():
            for network in (result.model, model):
                network.config._attn_implementation = "eager"
            outputs, target = (network(ids, output_attentions=True) for network in (result.model, model))
            terms = features.terms(target, outputs, torch.ones(3, 7))
        assert set(terms) == {"feature", "hidden"} and all(bool(term.isfinite()) for term in terms.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_map": {"L5": "L0"}}, "layer_map: the student has no layer L5; it has L0 to L1"),
        ({"layer_map": {"L0": "L7"}}, "layer_map: the teacher has no layer L7; it has L0 to L1"),
        ({"layer_map": {"L0": "L0"}, "hidden": False}, "layer_map is for the hidden-state term"),
        ({"lora": {"rank": 3}}, r"lora: rank cannot be used here.*use r, lora_alpha"),
        ({"lora": {"r": 0}}, "lora: peft refuses"),
        ({"lora": {"r": 2, "target_modules": ["q_prjo"]}}, "has no module q_prjo; did you mean 'q_proj'"),
        ({"corpus": "nowhere/else"}, "corpus=nowhere/else is neither a file or folder nor a data set"),
        ({"corpus_prompt": "question"}, "corpus_prompt is for a corpus; give that"),
        ({"task": None, "corpus": "x"}, "test is for the problems of a task"),
        ({"normalize": "all"}, "normalize='all' must be teacher or none"),
        ({"top_k_rest": "all"}, "top_k_rest='all' must be bucket or none"),
        ({"hidden_weight": 0}, "hidden_weight=0 must be"),
        ({"teachers": "last"}, "teachers='last' must be previous or first"),
    ],
)
def test_mistakes_are_one_line_before_any_weights_are_read(
    options: DistillOptions, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(language_host, "load_pretrained", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(InputError, match=message) as raised:
        distill(replace(options, **changes))
    assert "\n" not in str(raised.value)
    assert not Path(options.output).exists()


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "embed_tokens"], r".*\.(q_proj|embed_tokens)"])
def test_lora_of_weights_that_two_modules_share_is_refused(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: Any
) -> None:
    """Their updates are added to one tensor, so the written model would compute something else than the trained one."""
    folder, tied = Path(options.pretrained), tmp_path / "tied"
    tiny("llama", tie_word_embeddings=True, vocab_size=259, max_position_embeddings=512).save_pretrained(tied)
    for path in folder.glob("*token*"):
        shutil.copy(path, tied)
    (tied / "chat_template.jinja").write_bytes((folder / "chat_template.jinja").read_bytes())
    monkeypatch.setattr(language_host, "load_pretrained", lambda *_: pytest.fail("weights were read"))
    changed = replace(options, pretrained=str(tied), lora={"r": 2, "target_modules": targets})
    with pytest.raises(InputError, match=r"lora: \S+ has the same weights as \S+, to which its update .* leave it out"):
        distill(changed)
    check_lora(changed.lora, map_model(tiny("llama")))  # which is not tied


# ---------------------------------------------------------------- invariances of each term


VARIANTS = {
    "hidden": {},
    "hidden, as printed": {"normalize": "none"},
    "maps": {"hidden": False, "feature": True},
    "likeliest tokens": {"hidden": False, "top_k": 5},
    "lora": {"lora": {"r": 2}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_accumulated_batches_are_one_large_batch(options: DistillOptions, tmp_path: Path, name: str) -> None:
    changed = replace(options, rate=0.05, clip=1e9, decay=0.0, **VARIANTS[name])
    for batch, accumulate in ((2, 3), (6, 1)):
        with pytest.MonkeyPatch.context() as patch:
            plain_descent(patch)
            distill(replace(changed, batch=batch, accumulate=accumulate, output=str(tmp_path / str(batch))))
    assert_same(str(tmp_path / "2"), str(tmp_path / "6"), 1e-9)


@pytest.mark.parametrize("name", ["hidden", "lora", "corpus"])
def test_an_interrupted_distillation_ends_the_same_to_the_bit(
    options: DistillOptions, tmp_path: Path, name: str
) -> None:
    further: dict[str, Any] = {"hidden": EVERYTHING, "lora": {"lora": LORA}}.get(name, {})
    if name == "corpus":
        (tmp_path / "text.txt").write_text("Once upon a time there was a text of words. " * 20)
        further = {"corpus": str(tmp_path / "text.txt"), "corpus_tokens": 64, "corpus_texts": 4}
    whole = replace(options, epochs=2, output=str(tmp_path / "whole"), **further)
    distill(whole)
    again = replace(whole, output=str(tmp_path / "again"))
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, DistillTrainer, "training_step", 4)
        with pytest.raises(Killed):
            distill(again)
    distill(again)
    assert_same(whole.output, again.output, 0.0)


@pytest.mark.parametrize("switch", ["response", "feature", "hidden"])
def test_each_term_alone(options: DistillOptions, switch: str) -> None:
    """One term is switched on, reported by itself, and it falls."""
    alone = {"response": False, "feature": False, "hidden": False, switch: True}
    note = distill(replace(options, **alone, task_weight=0.0, distill_weight=1.0, epochs=3, rate=5e-3))
    rows = [row for row in note["stages"][0]["log"] if "loss" in row]
    assert {name for row in rows for name in ("response", "feature", "hidden") if name in row} == {switch}
    assert all(row["loss"] == pytest.approx(row[switch]) for row in rows)
    assert rows[-1][switch] < rows[0][switch]


def test_bfloat16_keeps_losses_and_weights_wide(options: DistillOptions, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    load_pretrained(options.pretrained).float().save_pretrained(wide)
    AutoTokenizer.from_pretrained(options.pretrained).save_pretrained(wide)
    values = []
    for trainer in ({}, {"bf16": True}):
        changed = replace(options, pretrained=str(wide), trainer=trainer, **EVERYTHING, lora=LORA)
        distill(replace(changed, output=f"{options.output}_{len(trainer)}"))
        assert load_pretrained(f"{options.output}_{len(trainer)}").dtype == torch.float32
        values.append([x for name, x in losses(f"{options.output}_{len(trainer)}")[0]])
    assert values[1] == pytest.approx(values[0], rel=0.1, abs=0.05) and values[1] != values[0]


def test_recomputed_activations_change_nothing(options: DistillOptions, tmp_path: Path) -> None:
    distill(replace(options, output=str(tmp_path / "plain")))
    for reentrant in (True, False):
        again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        distill(replace(options, trainer=again, output=str(tmp_path / str(reentrant))))
        assert_same(str(tmp_path / "plain"), str(tmp_path / str(reentrant)), 1e-9)


# ---------------------------------------------------------------- LoRA


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_lora_updates_are_added_to_a_model_whose_layers_differ(family: str) -> None:
    model = cut(tiny(family), Plan(("L0H0", "L0H1"), {"L1": "0-9"})).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = tokens()
    plain = model(ids).logits
    tuner = add_lora({"r": 2, "lora_dropout": 0.5}, map_model(model), 3)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert torch.equal(model.eval()(ids).logits, plain)  # B is zero at first
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    expected = model(ids).logits
    assert not torch.allclose(expected, plain)
    merge(tuner)
    assert model.state_dict().keys() == before.keys() and not hasattr(model, "peft_config")
    torch.testing.assert_close(model(ids).logits, expected)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    blocks = [*map_model(model).attention, *map_model(model).feed_forward]
    assert changed and all(any(name.startswith(block.name) for block in blocks) for name in changed)
    cut(model, Plan(channels={"L0": "0-7"}))  # it can be cut again


@pytest.mark.parametrize(
    ("arguments", "r", "alpha"),
    [({"lora_dropout": 0.05}, 8, 16), ({"r": 3}, 3, 6), ({"r": 3, "lora_alpha": 5}, 3, 5), ({"lora_alpha": 5}, 8, 5)],
)
def test_alpha_is_twice_the_rank_unless_it_is_given(arguments: dict[str, Any], r: int, alpha: int) -> None:
    config = lora_config(arguments, map_model(tiny("llama")))
    assert (config.r, config.lora_alpha) == (r, alpha)


@pytest.mark.parametrize("r", [None, "x", 0, 2.5, [1]])
def test_a_rank_that_is_no_number_is_one_line(r: Any) -> None:
    with pytest.raises(InputError, match="lora: peft refuses") as raised:
        lora_config({"r": r}, map_model(tiny("llama")))
    assert "\n" not in str(raised.value)


def test_dropout_of_lora_stays_where_that_of_maps_is_turned_off() -> None:
    model = tiny("llama", attention_dropout=0.3)
    add_lora({"r": 2, "lora_dropout": 0.5}, map_model(model), 3)
    turn_off_map_dropout(map_model(model))
    inner = [named for layer in map_model(model).attention for named in layer.module.named_modules()]
    rates = [module.p for name, module in inner if "lora_dropout" in name and isinstance(module, torch.nn.Dropout)]
    assert len(rates) == 8 and {*rates} == {0.5}
    assert all(layer.module.attention_dropout == 0 for layer in map_model(model).attention)


def test_lora_recovery_writes_plain_weights_and_leaves_its_base(options: DistillOptions, tmp_path: Path) -> None:
    """Frozen parameters stay to the bit; checkpoints of the training have the updates only."""
    base = {path.name: path.read_bytes() for path in Path(options.pretrained).iterdir()}
    sizes: list[int] = []
    original = DistillTrainer._save_checkpoint

    def saved(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        sizes.extend(x.stat().st_size for x in Path(self.args.output_dir).glob("checkpoint-*/model.safetensors"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistillTrainer, "_save_checkpoint", saved)
        distill(replace(options, stages=2, unit="balanced", lora=LORA, ffn_ratio=0.25, ffn_method="random"))
    assert {path.name: path.read_bytes() for path in Path(options.pretrained).iterdir()} == base
    student, dense = load_pretrained(options.output), load_pretrained(options.pretrained)
    assert sizes and max(sizes) < 0.5 * sum(x.numel() * x.element_size() for x in student.parameters())
    assert torch.equal(student.model.embed_tokens.weight, dense.model.embed_tokens.weight)
    assert [x.requires_grad for x in student.parameters()] == [True] * len(list(student.parameters()))
    assert not any("lora" in name or "base_layer" in name for name in student.state_dict())
    manifest = read_manifest(options.output)
    assert manifest is not None and len(manifest["stages"]) == 2


# ---------------------------------------------------------------- lengths


def resized(source: Path, folder: Path, positions: int, family: str = "llama") -> Path:
    """Save a model of another number of positions, with the tokenizer of a folder."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    tiny(family, vocab_size=len(tokenizer), **{name: positions}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


OF_TASK: dict[str, Any] = {"task": None, "test": None, "limit": None, "answer": "{}"}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("shorter", ["pretrained", "teacher"])
@pytest.mark.parametrize("option", ["max_length", "corpus_tokens", "max_length of a corpus", "max_gen_toks"])
def test_texts_longer_than_the_positions_are_refused_before_any_weights_are_read(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, shorter: str, option: str
) -> None:
    """Of the model, or of its teacher; also an answer's length that is the task's."""
    short, long = (resized(Path(options.pretrained), tmp_path / f"{n}", n, family) for n in (128, 512))
    models = {"pretrained": str(long), "teacher": str(long), shorter: str(short)}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": "words", "p": "more"}) + "\n")
    changes: dict[str, dict[str, Any]] = {
        "max_length": {"max_length": 129},
        "corpus_tokens": {**OF_TASK, "corpus": str(prompts), "corpus_tokens": 129},
        "max_length of a corpus": {**OF_TASK, "corpus": str(prompts), "corpus_prompt": "p", "max_length": 200},
        "max_gen_toks": {"train_on": "teacher"},  # 256 by lm-eval
    }
    message = (
        "max_gen_toks=.* leaves no room" if option == "max_gen_toks" else f"{option.split()[0]}=.*give at most 128"
    )
    monkeypatch.setattr(language_host, "load_pretrained", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(InputError, match=message) as raised:
        distill(replace(options, unit="group", hidden=False, **models, **changes[option]))
    assert f"{short} has 128 positions" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_default_lengths_are_at_most_the_positions(
    options: DistillOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    """Longer problems and prompts are left out and counted, windows are shorter."""
    task = replace(options, limit=None, unit="group", batch=8)
    every = make_host(replace(task, validation=0.0)).examples().lengths
    middle = sorted(every)[len(every) // 2]
    short = str(resized(Path(options.pretrained), tmp_path / "short", middle, family))
    note = distill(replace(task, pretrained=short))["material"]
    assert note["too_long"] == sum(length > middle for length in every) > 0
    assert note["train"] + note["validation"] == sum(length <= middle for length in every)
    assert [r.getMessage() for r in caplog.records if r.name == language_host.__name__] == [
        f"max_length: {middle} instead of 512, since {short} has no more positions"
    ]
    path, shorter = tmp_path / "a.jsonl", str(resized(Path(options.pretrained), tmp_path / "shorter", 50, family))
    rows = [{"p": "prompt " * n, "text": f"text {k} with words " * n} for k, n in enumerate((1, 1, 1, 9))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = replace(task, **OF_TASK, pretrained=shorter, corpus=str(path))
    distill(replace(alone, output=str(tmp_path / "windows")))
    assert {*make_host(alone).examples().lengths} == {50}
    prompted = replace(alone, corpus_prompt="p", validation=0.5, output=str(tmp_path / "asked"))
    assert distill(prompted)["material"]["corpus"]["too_long"] == 1


def test_lessons_are_at_most_as_long_as_the_positions(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher with more positions than the student: its longer answers are left out."""

    def answers(answerer: Answerer, model: Any, questions: Any) -> list[list[OwnAnswer]]:
        prompts = [tuple(answerer.tokenizer(question.prompt)["input_ids"]) for question in questions]
        return [
            [OwnAnswer(p, (6,) * (count - len(p) - 1) + (2,), "", False) for count in (249, 250, 251, 330)]
            for p in prompts
        ]

    monkeypatch.setattr(Answerer, "answers", answers)
    monkeypatch.setattr(Answerer, "outcomes", lambda self, questions, answers, metric: [[True] * 4] * len(questions))
    short = str(resized(Path(options.pretrained), tmp_path / "short", 250))
    taught = {"train_on": "teacher", "sample_temperature": 1.0, "max_gen_toks": 100, "samples": 4}
    whole = replace(options, pretrained=short, teacher=options.pretrained, hidden=False, epochs=1, **taught)
    note = distill(whole)["material"]["lessons"]["train"]
    assert note["kept"] == 4 * note["questions"] and note["too_long"] == 2 * note["questions"] > 0


# ---------------------------------------------------------------- tasks of one's own


def sums_with_a_test(folder: Path) -> str:
    """Write a task with 20 training questions and a test question."""
    folder.mkdir()
    (folder / "test.jsonl").write_text(json.dumps({"question": "What is 1 + 2?", "answer": "3"}))
    files = {"train": str(folder / "rows.jsonl"), "test": str(folder / "test.jsonl")}
    return task_file(folder, dataset_kwargs={"data_files": files, "cache_dir": str(folder)}, test_split="test")


def test_a_task_of_ones_own_has_its_splits_in_its_file(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe's split is refused with the words that take it back, and the last line evaluates the task as it stands."""
    sums_with_a_test(tmp_path / "own tasks")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("distill: {test: fold0, ratio: 0.5, unit: balanced, stages: 1, epochs: 0, feature: false}")
    words = ["distill", "--config", str(recipe), "--pretrained", str(tiny_folder), "--output", str(tmp_path / "out")]
    words += ["--task", "sums", "--include_path", str(tmp_path / "own tasks"), "--best_by", "none"]
    assert main(words) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1].endswith('leave the option out, or take back a recipe\'s: --test ""')
    )
    assert main([*words, "--test", ""]) == 0
    assert f"--tasks sums --include_path '{tmp_path / 'own tasks'}'\n" in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["{}", r"\boxed{{}}"])
def test_answers_that_the_scorer_finds_wrong_are_warned_of(
    options: DistillOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: str
) -> None:
    own = replace(options, task=sums_with_a_test(tmp_path / "own"), test=None, answer=answer)
    for settings, is_wrong in ((own, answer != "{}"), (replace(options, answer=answer), False)):
        caplog.clear()
        host = make_host(settings)
        host.check_scoring(host.examples())
        assert ("counts as wrong" in caplog.text) == is_wrong


@pytest.mark.parametrize(
    ("scores", "warning"),
    [
        (lambda: {"exact_match": 1 / 0}, r"cannot score \(ZeroDivisionError: division by zero\)"),
        (lambda: {"exact_match": ("4", "4")}, ""),  # of the whole corpus, as BLEU is
        (lambda: {"exact_match": 0.5}, ""),
    ],
)
def test_a_scorer_that_fails_at_written_answers_is_warned_of(
    options: DistillOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture, scores: Any, warning: str
) -> None:
    host = make_host(replace(options, task=sums_with_a_test(tmp_path / "own"), test=None))
    host.answerer.task.process_results = lambda *_: scores()
    host.check_scoring(host.examples())
    own = [record.getMessage() for record in caplog.records if record.name.startswith("lmeval_prune")]
    assert len(own) == bool(warning) and all(re.search(warning, line) for line in own)


def test_problems_that_ask_the_same_are_on_one_side(
    options: DistillOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the best epoch would be that of problems that are learned."""
    name = sums_with_a_test(tmp_path / "own")
    rows = [{"question": f"What is {n % 5} + {n % 5}?", "answer": str(n)} for n in range(20)]
    (tmp_path / "own" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for seed in range(4):
        own = replace(options, task=name, test=None, limit=None, validation=0.2, seed=seed)
        examples = make_host(own).examples()
        train, validation = (
            {problem.question.prompt for problem in part} for part in (examples.train, examples.validation)
        )
        assert len(examples.validation) == 4 and len(examples.train) == 16
        assert len(validation) == 1 and len(train) == 4 and not train & validation
    (tmp_path / "own" / "rows.jsonl").write_text("\n".join([json.dumps(rows[0])] * 20))
    with pytest.raises(InputError, match="are too few to train and validate"):
        make_host(own).examples()
    rows = [{"question": "Say a number.", "answer": str(n)} for n in range(20)]
    (tmp_path / "own" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    examples = make_host(own).examples()
    assert (len(examples.train), len(examples.validation)) == (16, 4)
    rows = [{"question": f"Say {'one' if n < 12 else 'two'} number.", "answer": str(n)} for n in range(20)]
    (tmp_path / "own" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(make_host(replace(own, validation=0.1)).examples().validation) == 8
    assert "8 of 20 problems are for validation, not 2: those of a question stay together" in caplog.text
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"p": "Say.", "text": f"a {n % 4}"}) for n in range(12)))
    corpus = make_host(replace(options, **OF_TASK, corpus=str(tmp_path / "a.jsonl"), corpus_prompt="p")).examples()
    train, validation = ({tuple(text.ids) for text in part} for part in (corpus.train, corpus.validation))
    assert len(validation) == 1 and len(train) == 3 and not train & validation


@pytest.mark.parametrize("ends", [False, True], ids=["killed", "complete"])
@pytest.mark.parametrize(
    "changes",
    [
        {"doc_to_text": "Now: {{question}}"},
        {"doc_to_target": "{{n}}"},
        {"gen_prefix": "So"},
        {"target_delimiter": "\n"},
    ],
)
def test_the_file_of_a_task_may_not_change(
    options: DistillOptions, tmp_path: Path, changes: dict[str, Any], ends: bool
) -> None:
    """Neither within a distillation nor after it; what nothing of it is learned from may."""
    path = Path(sums_with_a_test(tmp_path / "own"))
    own = replace(options, task=str(path), test=None, epochs=0)
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, stages, "cut", 1)
        with pytest.raises(Killed):
            distill(own)
    if ends:
        distill(own)
    before = json.loads(path.read_text())
    path.write_text(json.dumps(before | changes))
    with pytest.raises(
        InputError, match=r"student\S* was made with other data \(the task's prompts or targets\); name"
    ):
        distill(own)
    path.write_text(json.dumps(before | {"metadata": {"version": 2}}))
    assert len(distill(own)["stages"]) == 1


def test_a_teacher_may_have_other_settings_of_the_tokenizer(options: DistillOptions, tmp_path: Path) -> None:
    """They change texts, which only the student's tokenizer writes."""
    shutil.copytree(options.pretrained, tmp_path / "teacher")
    path = tmp_path / "teacher" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_special_tokens": True}))
    host = make_host(replace(options, teacher=str(tmp_path / "teacher")))
    host.check_teacher(str(tmp_path / "teacher"))
    assert AutoTokenizer.from_pretrained(tmp_path / "teacher").split_special_tokens


def test_a_teacher_with_more_rows_teaches_the_rows_of_the_student(options: DistillOptions, tmp_path: Path) -> None:
    """The vocabularies of a family's models are padded to different numbers of rows."""
    options = replace(options, hidden=False)
    teacher = load_pretrained(options.pretrained)
    teacher.resize_token_embeddings(teacher.config.vocab_size + 5)
    teacher.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(options.pretrained).save_pretrained(tmp_path / "teacher")
    taught = replace(options, teacher=str(tmp_path / "teacher"), output=str(tmp_path / "taught"))
    for each in (options, taught):
        distill(each)
    assert losses(taught.output) == losses(options.output)


@pytest.mark.parametrize(
    ("questions", "count", "first"),
    [
        ("aabcd", 2, [0, 1]),
        ("abbbc", 2, [0, 4]),  # three of one question are more than are left
        ("aaabb", 1, [3, 4]),  # each question has more
        ("aaa", 1, [0, 1, 2]),
        ("abc", 0, []),
    ],
)
def test_problems_of_a_question_that_are_more_than_are_split_off(questions: str, count: int, first: list[int]) -> None:
    split, others = split_by_question(range(len(questions)), questions, count)
    assert split == first and sorted(others + split) == [*range(len(questions))]


def test_a_corpus_of_files_of_one_name_is_known_by_all_of_them(tmp_path: Path) -> None:
    paths = [tmp_path / "corpus" / name / "part.txt" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text(path.parent.name)
    identities = {corpus_identity(str(tmp_path / "corpus"))}
    for path in paths:
        path.write_text("changed")
        identities.add(corpus_identity(str(tmp_path / "corpus")))
    assert len(identities) == 3


def test_a_test_with_the_question_of_all_problems_is_one_line() -> None:
    rows = [{"question": "Say a number.", "answer": str(n)} for n in range(4)]
    with pytest.raises(
        InputError, match="all problems of train and of test ask the same question, so those of the test"
    ):
        drop_test_questions(rows, rows[:1], "train", "test")
    assert drop_test_questions(rows, [], "train", "test") == (rows, 0)


def test_questions_that_differ_in_spaces_or_case_are_the_same(options: DistillOptions, tmp_path: Path) -> None:
    name = sums_with_a_test(tmp_path / "own")
    with (tmp_path / "own" / "rows.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"question": " what IS  1 + 2?\n", "answer": "3"}))
    own = replace(options, task=name, test=None, limit=None)
    host = make_host(own)
    with pytest.raises(InputError, match="have 1 of the 1 questions of the test split"):
        host.examples()
    (tmp_path / "own" / "test.jsonl").write_text(
        "\n".join(json.dumps({"question": f"What is 1 + {n}?", "answer": "3"}) for n in range(2, 6))
    )
    examples = make_host(own).examples()
    assert examples.note["repeated"] == 1 and examples.note["train"] + examples.note["validation"] == 20


def test_a_question_without_a_field_is_the_same_in_a_chat(options: DistillOptions, tmp_path: Path) -> None:
    """So that a model that was trained on it in a chat template is known to be, without one, too."""
    folder = tmp_path / "own"
    name = sums_with_a_test(folder)
    settings = json.loads(Path(name).read_text()) | {"doc_to_text": "Asked: {{asked}}", "num_fewshot": 2}
    Path(name).write_text(json.dumps(settings))
    for path in (folder / "rows.jsonl", folder / "test.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{"asked": row["question"], "answer": row["answer"]} for row in rows]
        path.write_text("\n".join(map(json.dumps, rows)))
    keys = [
        make_host(replace(options, task=name, test=None, limit=None, chat=chat)).examples().note["trained_on"]
        for chat in (False, True)
    ]
    assert keys[0] == keys[1] and len(keys[0]) == 20


@pytest.mark.parametrize("scheme", ["always", "first", "never", "normalizer"])
def test_an_answer_follows_its_prompt_without_a_further_space(tiny_folder: Path, scheme: str) -> None:
    """Also by tokenizers that put a space before a text, as those of SentencePiece."""
    text = "Question: What is 4 plus 2?\nAnswer: 42 43 a"
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    if scheme == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if scheme != "never" else []))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    backend.train_from_iterator([text] * 3, trainers.BpeTrainer(vocab_size=200, special_tokens=[*special.values()]))
    spaced = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    for tokenizer in (spaced, AutoTokenizer.from_pretrained(tiny_folder)):
        for prompt, answer in (
            ("Question: What is 4 plus 2?\nAnswer:", " 42"),
            ("Answer:\n", "42"),
            ("plus 2?", "\n4"),
        ):
            answered = answered_text(tokenizer, encode(tokenizer, prompt), answer)
            assert tokenizer.decode(answered.ids[:-1], clean_up_tokenization_spaces=False) == prompt + answer


# ---------------------------------------------------------------- corpora


def test_a_tokenizer_without_an_end_token_is_one_line(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert answered_text(tokenizer, [1], "a").ids[-1] == tokenizer.eos_token_id
    tokenizer.eos_token = None
    with pytest.raises(InputError, match=r"^the tokenizer has no end-of-text token"):
        answered_text(tokenizer, [1], "a")


def test_a_corpus_beside_the_problems(options: DistillOptions, tmp_path: Path) -> None:
    folder = tmp_path / "corpus" / "inner"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("The first document has some words in it.")
    rows = [{"body": f"Document {number} of the lines file, which is a little longer."} for number in range(6)]
    (folder.parent / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="has no text in text; it has body: name them by corpus_field"):
        distill(replace(options, corpus=str(folder.parent)))
    (folder / "a.txt").unlink()
    changed = replace(
        options, corpus=str(folder.parent), corpus_field="body", corpus_tokens=32, corpus_texts=5, epochs=1
    )
    host = make_host(changed)
    examples = host.examples()
    assert len(examples.train) == 6 + 5 and len(examples.validation) == 2
    windows = [text for text in examples.train if len(text.ids) == 32]
    assert len(windows) == 5
    decoded = "".join(host.tokenizer.decode(text.ids) for text in windows)
    assert decoded.count("Document") >= 2 and "</s>" in decoded and decoded[: len("Document")] == "Document"
    assert [text.start for text in windows] == [1] * 5  # nothing is known before the first token
    assert examples.note["corpus"]["texts"] == 5 and examples.note["train"] == 11
    inputs = host.collate(windows[:2])
    assert host.items(inputs) == sum(len(text.ids) - text.start for text in windows[:2])
    assert make_host(changed).examples().train == examples.train
    note = distill(changed)
    assert note["material"]["corpus"]["documents"] <= 6
    (folder.parent / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    with pytest.raises(InputError, match=r"was made with other data \(the corpus\)"):
        distill(changed)


def test_a_corpus_alone(options: DistillOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time there was a text of words. " * 20)
    alone = replace(options, **OF_TASK, corpus=str(tmp_path / "text.txt"), corpus_tokens=40)
    examples = make_host(alone).examples()
    assert len(examples.validation) == round(0.25 * (len(examples.train) + len(examples.validation)))
    distill(alone)
    assert read_note(alone.output)["material"]["trained_on"] == []
    long = replace(alone, pretrained=str(resized(Path(alone.pretrained), tmp_path / "resized", 4000)))
    with pytest.raises(
        InputError, match=r"1 documents, the whole with \d+ tokens, fewer than a text of 4000; give fewer"
    ):
        distill(replace(long, corpus_tokens=4000, output=str(tmp_path / "long")))
    with pytest.raises(InputError, match=r"has no files \.txt or \.jsonl"):
        (tmp_path / "bare").mkdir()
        distill(replace(alone, corpus=str(tmp_path / "bare"), output=str(tmp_path / "none")))


def test_prompts_with_answers_of_a_corpus(options: DistillOptions, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    rows = [{"question": f"What is {n} plus one?", "answer": f"\\boxed{{{n}+1}}"} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {"corpus_prompt": "question", "corpus_field": "answer"}
    host = make_host(replace(options, chat=True, corpus=str(path), **named))
    texts = host.examples().train[-4:]
    for text in texts:
        prompt, answer = (host.tokenizer.decode(ids) for ids in (text.ids[: text.start], text.ids[text.start :]))
        assert prompt.startswith("u: What is ") and prompt.endswith("plus one?\na:")
        assert answer.startswith("\\boxed{") and answer.endswith("+1}</s>")


def test_documents_with_test_questions_are_left_out(options: DistillOptions, tmp_path: Path) -> None:
    question = "Ann has 3 red caps and 12 blue ones. Ben lost 4. How many caps has Ann?"
    search = QuestionSearch([question, "How much money is it now, all in all?"])
    assert search.matches("They say: ann has 3 red caps, and 12 blue ones; Ben lost 4. How many?")
    assert search.matches("… how much money is it now, all in all …")
    assert not search.matches("Ann has 3 red caps and 13 blue ones. Ben lost 4.")
    assert not search.matches("How much money is it?") and not QuestionSearch([]).matches("anything at all")
    path = tmp_path / "text.jsonl"
    rows = [{"text": f"{question} " * 3}, *[{"text": "Other words are here to be read. " * 3}] * 2]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    host = make_host(options)
    settings = replace(options, corpus=str(path), corpus_tokens=50, corpus_texts=50)
    corpus = read_corpus(settings, host.tokenizer, [question])
    assert corpus.note["with_test_questions"] == 1 and corpus.note["documents"] == 3
    assert "Ann" not in "".join(host.tokenizer.decode(text.ids) for text in corpus.texts)


@pytest.mark.parametrize("question", ["", "???", " \n", "Why?", "What is the capital of France?", "多少?"])
def test_a_question_of_few_words_excludes_no_texts(question: str) -> None:
    search = QuestionSearch([question])
    texts = ("", "unrelated words", f"He asked: {question} Nobody knew the capital of France.", "???", question)
    assert not any(search.matches(text) for text in texts)
    assert search.matches("It is Paris.", question) == any(letter.isalnum() for letter in question)
    assert not search.matches(question, "unrelated words")


def test_characters_of_chinese_questions_are_words() -> None:
    search = QuestionSearch(["小明有3个苹果，买了5个，一共有多少？"])
    assert search.matches("第一题。小明有3个苹果，买了5个，一共有多少？答：8个。")
    assert not search.matches("小明有3个苹果，买了6个，一共有多少？")


def test_a_corpus_without_texts_says_why(options: DistillOptions, tmp_path: Path) -> None:
    """Each reason is counted; the remedy is of what was the reason."""
    question = "Ann has 3 red caps and 12 blue ones. Ben lost 4. How many caps has Ann?"
    tokenizer = make_host(options).tokenizer
    path = tmp_path / "a.jsonl"

    def message(rows: list[dict[str, str]], **changes: Any) -> str:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(InputError) as raised:
            read_corpus(replace(options, corpus=str(path), **changes), tokenizer, [question])
        assert "\n" not in str(raised.value)
        return str(raised.value).partition("gives no text: ")[2] or str(raised.value)

    document = {"text": f"So: {question}"}
    assert message([document] * 2) == "2 documents, 2 with a question of the test; give another corpus"
    assert message([document, {"text": ""}, {"text": "abc"}]) == (
        "3 documents, 1 with a question of the test, 1 without a text, the others with 4 tokens, fewer than a text of "
        "128; give fewer corpus_tokens or another corpus"
    )
    assert message([]) == f"the corpus {path} has no documents; give another corpus"
    rows = [{"p": question, "text": "11"}, {"p": "b", "text": ""}, {"p": "c", "text": "c" * 600}]
    assert message(rows, corpus_prompt="p") == (
        "3 documents, 1 with a question of the test, 1 with more than 512 tokens, 1 without an answer to learn; give a "
        "larger max_length or another corpus"
    )


def test_a_short_test_question_in_the_task_s_words_is_left_out(options: DistillOptions, tmp_path: Path) -> None:
    """A prompt with the task's instructions is not the question alone."""
    path, host = tmp_path / "a.jsonl", make_host(options)
    test = [{**row, "question": "How many are left?"} for row in host.rows().test[:1]]
    written = host.task.doc_to_text(test[0])
    assert written != "How many are left?"
    path.write_text(
        "".join(
            json.dumps({"p": text, "text": "3"}) + "\n"
            for text in (written, f"{written.upper()} \n", f"{written} Now?")
        )
    )
    host = make_host(replace(options, corpus=str(path), corpus_prompt="p"))
    assert host._corpus(test).note["with_test_questions"] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": "gone.jsonl"}, "corpus=gone.jsonl: there is no such file or folder"),
        ({"corpus": "./gone"}, "there is no such file or folder"),
        ({"corpus": "p.json"}, r"corpus=p.json is a file of another kind than .txt or .jsonl"),
        ({"corpus": "five.jsonl"}, "line 3 of five.jsonl: p is 5, not a text; remove it"),
        (
            {"corpus": "mixed"},
            r"line 2 of mixed/2.jsonl has no text in p; it has q, text: name them by .*, or rename them in this document",
        ),
        (
            {"corpus": "many"},
            r"line 1 of many/1.jsonl: p is 0, not a text; remove it",
        ),
        ({"corpus": "no.jsonl"}, r"line 2 of no.jsonl is not valid JSON"),
        (
            {"corpus": "a.jsonl"},
            "it has p: name them by .*, or give corpus_answers=teacher for prompts without answers",
        ),
        (
            {"corpus": "one.jsonl"},
            r"1 texts of the corpus \(texts 1, documents 1, .*give more documents or corpus_texts",
        ),
    ],
)
def test_a_corpus_that_cannot_be_read_is_one_line(
    options: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.json").write_text("[]")
    Path("five.jsonl").write_text('{"p": null, "text": "a"}\n\n{"p": 5, "text": "a"}\n')
    Path("mixed").mkdir()
    Path("mixed/1.jsonl").write_text('{"p": "b", "text": "a"}\n{"p": "b", "text": "a"}\n')
    Path("mixed/2.jsonl").write_text('\n{"q": "b", "text": "a"}\n')
    Path("many").mkdir()
    Path("many/1.jsonl").write_text('{"p": 0, "text": "a"}\n{"p": "b", "text": "a"}\n{"text": "a"}\n')
    Path("many/2.jsonl").write_text('{"p": 1, "text": "a"}\n' * 5)
    Path("no.jsonl").write_text('{"p": "b", "text": "a"}\n{"p": "b"\n\n[]\nb\n')
    Path("a.jsonl").write_text('{"p": "b"}\n')
    Path("one.jsonl").write_text('{"p": "b", "text": "a"}\n')
    with pytest.raises(InputError, match=message) as error:
        distill(replace(options, **OF_TASK, corpus_prompt="p", output=str(tmp_path / "out"), **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", ["", "Say something."])
def test_rows_without_an_answer_to_learn_are_left_out(options: DistillOptions, tmp_path: Path, prompt: str) -> None:
    """One empty answer in a batch of its own, whose prompt may be empty, too; and answers to an empty prompt."""
    path = tmp_path / "a.jsonl"
    rows = [{"p": prompt, "text": text} for text in ("", "an answer", "", "another", "the third")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = replace(options, **OF_TASK, corpus=str(path), corpus_prompt="p", batch=1)
    note = distill(whole)["material"]
    assert note["corpus"]["empty"] == 2 and note["train"] + note["validation"] == note["corpus"]["texts"] == 3
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("", "Some words in a text. " * 9, "", "")))
    windows = make_host(replace(options, **OF_TASK, corpus=str(path), corpus_tokens=32)).examples()
    assert windows.note["corpus"]["empty"] == 3 and all(2 not in text.ids[:-1] for text in windows.train)


def test_problems_without_an_answer_are_left_out(options: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any prompt: the answer is empty, or so is the prompt before a single token, which nothing predicts."""
    host = make_host(replace(options, answer="{}"))
    answers = {0: "", 1: "5", 2: "56"}
    numbers = iter(range(8))
    monkeypatch.setattr(type(host), "prompt", lambda *_: "")
    monkeypatch.setattr(type(host), "target", lambda *_: answers.get(next(numbers), "78"))
    monkeypatch.setattr(host.task.config, "target_delimiter", "")
    examples = host.examples()
    assert examples.note["empty"] == 2 and examples.note["train"] + examples.note["validation"] == 6
    for example in (*examples.train, *examples.validation):
        assert host.items(host.collate([example])) == 2


@pytest.mark.parametrize("answer", ["{}", r"\boxed{{}}"])
def test_what_is_around_an_empty_answer_is_none(
    options: DistillOptions, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """A delimiter comes before it, and the text of `answer` around it."""
    host = make_host(replace(options, answer=answer))
    numbers = iter(range(8))
    monkeypatch.setattr(type(host), "target", lambda *_: {0: "", 1: " \n"}.get(next(numbers), "78"))
    assert host.examples().note["empty"] == 2


def test_a_data_set_by_name(options: DistillOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    seen: list[Any] = []

    def loaded(path: str, **arguments: Any) -> Any:
        seen.append((path, arguments))
        data = datasets.Dataset.from_list([{"text": "Words of a data set, which are read in windows."}] * 3)
        return data if arguments["split"] != "all" else datasets.DatasetDict(train=data)

    monkeypatch.setattr(datasets, "load_dataset", loaded)
    named = replace(options, corpus="some/text", corpus_options={"name": "plain"}, corpus_tokens=20)
    assert len(make_host(named).examples().train) > 6
    assert seen == [("some/text", {"split": "train", "name": "plain"})]
    with pytest.raises(InputError, match="give one split"):
        make_host(replace(named, corpus_options={"split": "all"})).examples()
    with pytest.raises(InputError, match="corpus_options are for data sets"):
        (tmp_path / "a.txt").write_text("text")
        distill(replace(named, corpus=str(tmp_path)))
