"""Recursive distillation: stages, heads, going on after a kill, equal losses however batches are put together, refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lmeval_prune import InputError, load_pretrained, map_model
from lmeval_prune.athena import checkpoint, training
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.checkpoints.loading import read_manifest
from lmeval_prune.cli import main
from lmeval_prune.distillation import language_host, recursion
from lmeval_prune.distillation.host import read_note
from lmeval_prune.distillation.losses import LayerMap, turn_off_map_dropout
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill, make_host, stage_pruning
from lmeval_prune.distillation.trainer import (
    DistillTrainer,
    PaddedOrder,
    collate_with_padding,
    padded,
)
from lmeval_prune.interventions.attention_call import eager_attention
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.surgery.cut import cut, cut_to
from lmeval_prune.training.trainer import BatchesByLength, draw
from tests.athena_hosts import language_options, train_options
from tests.conftest import ROOT
from tests.kills import Killed, counted
from tests.tiny_models import tiny

pytestmark = pytest.mark.usefixtures("no_pictures")
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> TrainOptions:
    """A host, trained for one epoch on 20 problems; 4 for validation, 6 for the test."""
    options = train_options(tmp_path_factory.mktemp("dense"), epochs=1)
    training.train(options)
    return options


def two_stages(dense: TrainOptions, output: Path, **changes: Any) -> DistillOptions:
    """Two stages of two epochs; each removes two of eight heads."""
    settings = {"ratio": 0.5, "stages": 2, "epochs": 2, "calibration": 6, "rate": 1e-3, **changes}
    return DistillOptions(dense.output, str(output), data_dir=dense.data_dir, **settings)


@pytest.fixture
def athena(dense: TrainOptions, tmp_path: Path) -> DistillOptions:
    return two_stages(dense, tmp_path / "student")


@pytest.fixture
def language(tiny_folder: Path, tmp_path: Path) -> DistillOptions:
    """A language model with grouped queries."""
    return language_options(tiny_folder, tmp_path)


def losses(folder: str) -> list[list[tuple[str, float]]]:
    names = ("loss", "task", "response", "feature", "eval_loss", "eval_task", "eval_accuracy")
    stages = read_note(Path(folder))["stages"]
    return [[(name, row[name]) for row in stage["log"] for name in names if name in row] for stage in stages]


def weights(folder: str) -> dict[str, torch.Tensor]:
    if (Path(folder) / "athena.json").is_file():
        return checkpoint.read(folder).state_dict()
    return load_pretrained(folder).state_dict()


def assert_same(output: str, other: str, tolerance: float = 1e-6) -> None:
    for stage, again in zip(losses(output), losses(other), strict=True):
        assert [name for name, _ in stage] == [name for name, _ in again]
        assert [value for _, value in stage] == pytest.approx([value for _, value in again], abs=tolerance)
    expected, actual = weights(output), weights(other)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=tolerance)


def killed_at(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Patch a function to raise `Killed` at its n-th call."""
    counted(patch, owner, name, call - 1)


# ---------------------------------------------------------------- stages


def test_two_stages_of_athena(athena: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recursion, "draw", draw)
    note = distill(athena)
    first, second = note["stages"]
    assert [stage["removed"]["heads"] for stage in note["stages"]] == [2, 2]
    left = {label: len(heads) for label, heads in second["heads"].items()}
    assert sum(left.values()) == 4
    for label, heads in second["heads"].items():
        assert set(heads) < set(range(4)) or left[label] == 4
        assert set(heads) <= set(first["heads"][label])
    assert note["material"]["splits"] == {"data": "asdiv_a", "test": "fold0", "train": []}
    model = checkpoint.read(athena.output)
    assert [layer.heads for layer in map_model(model.encoder).attention] == list(left.values())
    assert second["parameters"] == sum(x.numel() for x in model.parameters())
    manifest = read_manifest(f"{athena.output}/encoder")
    assert manifest is not None
    assert [stage["removed"]["heads"] for stage in manifest["stages"]] == [2, 2]
    for stage in note["stages"]:
        rows = [row for row in stage["log"] if "loss" in row]
        assert len(rows) == 2
        for row in rows:
            assert row["loss"] == pytest.approx(0.5 * row["task"] + 0.5 * (row["response"] + row["feature"]))
    assert {"distillation.json", "distillation.png", "distillation.svg"} <= {
        path.name for path in Path(athena.output).iterdir()
    }
    assert not Path(f"{athena.output}.distilling").exists()


def test_a_language_model(language: DistillOptions) -> None:
    note = distill(replace(language, stages=2, pruning={"unit": "balanced", "ffn_ratio": 0.25, "ffn_method": "random"}))
    assert [stage["removed"]["heads"] for stage in note["stages"]] == [2, 2]
    model = load_pretrained(language.output)
    assert sum(layer.heads for layer in map_model(model).attention) == 4
    assert sum(block.channels for block in map_model(model).feed_forward) == 72
    assert model.lm_head.weight.shape[0] == model.config.vocab_size
    manifest = read_manifest(language.output)
    assert manifest is not None
    assert len(manifest["stages"]) == 2
    logged = {name for stage in losses(language.output) for name, _ in stage}
    assert logged == {"loss", "task", "response", "feature", "eval_loss", "eval_task"}
    assert_distance(language, note["stages"][-1]["distance"])


def assert_distance(options: DistillOptions, distance: dict[str, Any]) -> None:
    """Check that it is that of the last stage from the unpruned model, on the answers of the validation problems."""
    dense, student = (load_pretrained(path).float() for path in (options.pretrained, options.output))
    values = []
    for text in make_host(options).examples().validation:
        with torch.no_grad():
            p, q = (
                model(torch.tensor([text.ids])).logits[0, text.start - 1 : -1].log_softmax(-1)
                for model in (dense, student)
            )
        values += [sum(float(a.exp() * (a - b)) for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)]
    assert distance["documents"] == 2 and distance["tokens"] == len(values)
    assert distance["mean_kld"] == pytest.approx(sum(values) / len(values), rel=1e-3) and distance["mean_kld"] > 0


def test_only_answer_tokens_have_labels(language: DistillOptions) -> None:
    host = make_host(language)
    material = host.examples()
    assert (len(material.train), len(material.validation)) == (6, 2)
    text = material.train[0]
    decode = host.tokenizer.decode  # type: ignore[attr-defined]
    assert decode(text.ids[: text.start]).endswith("Do not compute it.")
    answer = decode(text.ids[text.start :])
    assert answer.startswith(" \\boxed{")
    assert answer.endswith("}</s>")
    inputs = host.collate(material.train[:3])
    counted = sum(len(text.ids) - text.start for text in material.train[:3])
    assert host.items(inputs) == counted
    in_chat = make_host(replace(language, chat=True))
    text = in_chat.examples().train[0]
    prompt = in_chat.tokenizer.decode(text.ids[: text.start])  # type: ignore[attr-defined]
    assert prompt.startswith("u: ")
    assert prompt.endswith("a:")


def trainer_of(options: DistillOptions, folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """A trainer whose student is the teacher itself."""
    host = make_host(options)
    student, teacher = (host.read(options.pretrained).to(dtype) for _ in range(2))
    layers = map_model(host.backbone(student)).attention
    same = LayerMap({x.label: x.label for x in layers}, {x.label: list(range(x.heads)) for x in layers})
    return DistillTrainer(host, student, teacher, same, host.examples(), folder)


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "gpt_bigcode", "gptj", "llama", "opt", "bloom", "phi"])
def test_maps_are_compared_before_dropout(family: str) -> None:
    """Models return their maps after dropout; other dropout of attention modules stays."""
    drops = {name: 0.5 for name in tiny(family).config.to_dict() if "att" in name and "drop" in name}
    model = tiny(family, **drops)
    ids = torch.arange(3, 17).reshape(2, 7)

    def dropped() -> bool:
        with torch.no_grad(), eager_attention(model):
            rows = model(input_ids=ids, output_attentions=True).attentions[0].sum(-1)
        return not torch.allclose(rows, torch.ones_like(rows))

    def others() -> list[float]:
        inner = [named for layer in map_model(model).attention for named in layer.module.named_modules()]
        return [x.p for name, x in inner if isinstance(x, torch.nn.Dropout) and ("resid" in name or "output" in name)]

    before = others()
    assert len(drops) == 1
    assert dropped() is False
    model.train()
    assert dropped()
    turn_off_map_dropout(map_model(model))
    assert dropped() is False
    assert others() == before


@pytest.mark.parametrize("normalize", ["none", "teacher"])
def test_the_loss_is_eq_6_and_7_literally(language: DistillOptions, tmp_path: Path, normalize: Any) -> None:
    """Token by token, of a student with other weights."""
    options = replace(language, temperature=3.0, normalize=normalize, distill_weight=0.7, task_weight=0.2)
    trainer = trainer_of(options, tmp_path / "work")
    with torch.no_grad():
        for parameter in trainer.student.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)).double()
    inputs = trainer.host.collate(trainer.examples.train[:3])
    assert len(inputs["logits_to_keep"]) < inputs["labels"].shape[1] / 2
    with eager_attention(trainer.student), eager_attention(trainer.teacher), torch.no_grad():
        trainer.model.eval()
        loss = float(trainer.compute_loss(trainer.model, dict(inputs)))
        outputs = [
            model(inputs["input_ids"], attention_mask=inputs["attention_mask"], output_attentions=True)
            for model in (trainer.teacher, trainer.student)
        ]
    task = response = items = 0.0
    for row in range(3):
        for index in range(1, inputs["labels"].shape[1]):
            label = int(inputs["labels"][row, index])
            if label < 0:
                continue
            p, q = ((x.logits[row, index - 1] / 3.0).softmax(-1) for x in outputs)
            response += float((p * (p / q).log()).sum())
            task -= float(outputs[1].logits[row, index - 1].softmax(-1)[label].log())
            items += 1
    lengths = inputs["attention_mask"].sum(1).tolist()
    feature = 0.0
    relative, layers = normalize == "teacher", len(outputs[0].attentions)
    for expected, actual in zip(outputs[0].attentions, outputs[1].attentions, strict=True):
        rows, heads = [], expected.shape[1]
        for i, n in enumerate(lengths):
            a, b = expected[i, :, :n, :n], actual[i, :, :n, :n]
            squares = (a - b).square().sum(-1)
            rows += (squares / a.square().sum(-1) if relative else squares).flatten().tolist()
        feature += sum(rows) / heads / sum(n if relative else n * n for n in lengths) / layers
    expected_loss = 0.7 * (9 * response / items + feature) + 0.2 * task / items
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    del inputs["logits_to_keep"]  # of a family that computes all of them
    with eager_attention(trainer.student), eager_attention(trainer.teacher), torch.no_grad():
        assert float(trainer.compute_loss(trainer.model, dict(inputs))) == pytest.approx(loss, rel=1e-9)


def test_stages_follow_the_schedule() -> None:
    base = map_model(tiny("bert", num_attention_heads=8, num_hidden_layers=3))
    target = PruneOptions(0.5, steps=3, budget="heads")
    for allocation, left, expected in (("global", 24, 4), ("global", 20, 4), ("uniform", 24, 3)):
        shares = target.shares(1 if left == 24 else 2)
        assert stage_pruning(target, shares, base, _left(base, left), allocation).ratio * left == pytest.approx(
            expected
        )


def _left(base: Any, heads: int) -> Any:
    class Left:
        total_heads = heads

        def channels(self) -> dict[str, int]:
            return dict(base.channels())

    return Left()


# ---------------------------------------------------------------- going on


@pytest.fixture(scope="module")
def whole(dense: TrainOptions, tmp_path_factory: pytest.TempPathFactory) -> DistillOptions:
    """Without interruption."""
    options = two_stages(dense, tmp_path_factory.mktemp("whole") / "student", trainer={"save_steps": 2})
    distill(options)
    return options


def test_a_single_update_has_a_learning_rate(language: DistillOptions) -> None:
    """All of it would be warmup, at a rate of 0."""
    [stage] = distill(replace(language, batch=8, limit=8))["stages"]
    assert [row["learning_rate"] for row in stage["log"] if "learning_rate" in row] == [language.rate]


def test_interrupted_distillation_ends_the_same(language: DistillOptions, tmp_path: Path) -> None:
    """Killed within the training of the second stage; the output head is the embedding."""
    tied = tmp_path / "tied"
    shutil.copytree(language.pretrained, tied)
    vocabulary = json.loads((tied / "config.json").read_text())["vocab_size"]
    model = tiny("llama", vocab_size=vocabulary, max_position_embeddings=512, tie_word_embeddings=True)
    model.save_pretrained(tied)
    options = replace(language, pretrained=str(tied), stages=2, epochs=2, output=str(tmp_path / "one"))
    distill(options)
    written = load_pretrained(options.output)
    assert written.lm_head.weight is written.model.embed_tokens.weight
    again = replace(options, output=str(tmp_path / "two"))
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, DistillTrainer, "training_step", 8)
        with pytest.raises(Killed):
            distill(again)
    assert not Path(again.output).exists()
    before = read_note(tmp_path / "two.distilling" / "stage1")
    distill(again)
    assert_same(options.output, again.output)
    assert before["stages"] == read_note(again.output)["stages"][:1]
    assert not Path(f"{again.output}.distilling").exists()


def test_complete_distillation_is_not_repeated_and_other_options_are_refused(whole: DistillOptions) -> None:
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, recursion, "check", 1)
        distill(whole)
    with pytest.raises(InputError, match="epochs=2, now it is 3"):
        distill(replace(whole, epochs=3))


# files of a model, and a text in each that is replaced
FILES = {
    "athena": [
        ("encoder/config.json", "1e-12", "1e-3"),
        ("encoder/tokenizer.json", '"clean_text": true', '"clean_text": false'),
        ("athena.json", '"max_kept": ', '"max_kept": 1'),
    ],
    "language": [
        ("config.json", '"rope_theta": 10000.0', '"rope_theta": 100.0'),
        ("tokenizer.json", '"normalizer": null', '"normalizer": {"type": "Lowercase"}'),
        ("chat_template.jinja", "a:", "A:"),
    ],
}


@pytest.mark.parametrize(("kind", "ends"), [("athena", True), ("language", False)])
def test_what_was_read_may_not_change(
    kind: str, ends: bool, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither problems nor files of model and teacher, after a kill and after the end; one line says which did."""
    options = request.getfixturevalue(kind)
    model, data, teacher = (tmp_path / name for name in ("model", "data", "teacher"))
    for source, target in ((options.pretrained, model), (options.data_dir, data), (options.pretrained, teacher)):
        shutil.copytree(source, target)
    options = replace(options, pretrained=str(model), teacher=str(teacher), data_dir=str(data), stages=2, epochs=0)
    with monkeypatch.context() as patch:
        killed_at(patch, recursion, "cut", 2)
        with pytest.raises(Killed):
            distill(options)
    if ends:
        distill(options)
    changes: list[tuple[str, Path, str, str]] = [
        ("problems", data / "asdiv.jsonl", '"body": "', '"body": "Look at '),
        ("problems", data / "asdiv.jsonl", "(things)", "(other things)"),
        *(
            (f"{part}_files.{name}".replace("model_", "pretrained_"), tmp_path / part / name, *more)
            for part in ("model", "teacher")
            for name, *more in FILES[kind]
        ),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(type(make_host(options)), "read", lambda *_: pytest.fail("weights were read"))
        for words, path, old, new in changes:
            before = path.read_text()
            assert old in before
            path.write_text(before.replace(old, new))
            with pytest.raises(InputError, match=rf"student\S* was made with {re.escape(words)}=") as error:
                distill(options)
            assert "\n" not in str(error.value)
            path.write_text(before)
    config = model / FILES[kind][0][0]
    config.write_text(re.sub('("transformers_version": ").*?"', r'\g<1>1"', config.read_text()))  # as if written again
    (model / "plan.json").write_text("{}")
    assert len(distill(options)["stages"]) == 2


def test_each_stage_has_its_own_order_and_dropout(athena: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, orders = [], []

    def seen(self: Any) -> Any:
        seeds.append(torch.initial_seed())
        orders.append(list(self._get_train_sampler()))
        assert self.args.seed == seeds[-1]
        return {"best_epoch": 0, "log": []}

    monkeypatch.setattr(DistillTrainer, "run", seen)
    distill(replace(athena, epochs=1, seed=3))
    assert seeds == [1003, 2003]
    assert orders[0] != orders[1]


# ---------------------------------------------------------------- batches


def plain_descent(patch: pytest.MonkeyPatch) -> None:
    """Plain SGD over problems in order: Adam would amplify rounding."""
    patch.setattr(BatchesByLength, "__iter__", lambda self: iter(range(len(self))))
    patch.setattr(DistillTrainer, "get_optimizer_cls_and_kwargs", lambda *_: (torch.optim.SGD, {}))


@pytest.mark.parametrize("kind", [pytest.param("athena", marks=pytest.mark.long), "language"])
def test_accumulated_batches_are_one_large_batch(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, dense: TrainOptions
) -> None:
    options = replace(request.getfixturevalue(kind), stages=1, epochs=1, rate=0.05)
    if kind == "athena":
        options = replace(options, pretrained=still_host(dense, tmp_path), validation=0.0)
    outputs = []
    for batch, accumulate in ((2, 3), (6, 1)):
        trainer = {"max_grad_norm": 1e9, "weight_decay": 0.0, "gradient_accumulation_steps": accumulate}
        variant = replace(options, batch=batch, trainer=trainer, output=str(tmp_path / str(batch)))
        with pytest.MonkeyPatch.context() as patch:
            plain_descent(patch)
            distill(variant)
        outputs.append(variant.output)
    assert_same(outputs[0], outputs[1], 1e-6 if kind == "athena" else 1e-9)


@pytest.mark.parametrize("batch", [3, 4, 5, 7])
def test_processes_share_an_epoch_without_repeats(athena: DistillOptions, tmp_path: Path, batch: int) -> None:
    """Two processes count the same items as a single process; one may be idle at the end."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    trainer = trainer_of(replace(athena, batch=batch, terms=("response",)), tmp_path / "work")
    host, material, examples = trainer.host, trainer.examples, trainer.examples.train
    order = BatchesByLength(material.lengths, batch, 1)
    dataset = padded(examples, 2 * batch)
    shards = [
        list(BatchSamplerShard(BatchSampler(PaddedOrder(order, len(dataset)), batch, False), 2, process))
        for process in (0, 1)
    ]
    assert sorted(index for shard in shards for indices in shard for index in indices if index < 20) == list(range(20))
    alone = [list(order)[i : i + batch] for i in range(0, 20, batch)]
    processes = [
        [collate_with_padding(host, examples[0], [dataset[x] for x in indices]) for indices in shard]
        for shard in shards
    ]
    for update, batches in enumerate(zip(*processes, strict=True)):
        expected = [host.collate([examples[x] for x in indices]) for indices in alone[2 * update : 2 * update + 2]]
        assert trainer.counts(batches).tolist() == trainer.counts(expected).tolist()
    idle = [inputs for batches in processes for inputs in batches if "idle" in inputs]
    assert len(idle) == len(alone) % 2
    trainer.model.eval()
    for inputs in idle:
        assert float(trainer.compute_loss(trainer.model, inputs)) == 0
        assert {name: float(over) for name, (_, over) in trainer._validation_sums.items()} == dict.fromkeys(
            ("task", "response"), 0.0
        )
        assert all(float(total) == 0 for total, _ in trainer._validation_sums.values())


def still_host(dense: TrainOptions, folder: Path) -> str:
    """The host without dropout."""
    model = checkpoint.read(dense.output)
    model.encoder.config.update(STILL)
    model.settings = replace(model.settings, dropout=0.0)
    checkpoint.write(model, folder / "still")
    return str(folder / "still")


# ---------------------------------------------------------------- refusals


def test_the_defaults_of_a_language_model_run(language: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model and an output alone: three stages on the folds of ASDiv-A."""
    monkeypatch.setenv("LMEVAL_PRUNE_DATA", str(language.data_dir))
    note = distill(DistillOptions(language.pretrained, language.output, ratio=0.75, epochs=1))
    assert len(note["stages"]) == 3 and note["material"]["splits"]["task"] == "prune_asdiv_a_equation"


def test_tuning_questions_are_refused_as_test(language: DistillOptions, tmp_path: Path) -> None:
    """Fine-tuning is distillation without pruning and teacher."""
    tuned = replace(language, ratio=0.0, distill_weight=0.0, task_weight=1.0, output=str(tmp_path / "tuned"))
    (stage,) = distill(tuned)["stages"]
    assert {name for row in stage["log"] for name in row} >= {"loss", "task"}
    assert not {"response", "feature"} & {name for row in stage["log"] for name in row}
    assert stage["removed"]["heads"] == 0
    distill(replace(language, pretrained=tuned.output, epochs=0))
    with pytest.raises(InputError, match=r"was trained on \d of the 6 questions of the test split fold1"):
        distill(replace(language, pretrained=tuned.output, test="fold1", output=str(tmp_path / "other")))


def test_questions_of_ancestors_and_teachers_are_refused_as_test(
    language: DistillOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a grandparent, of a cut copy, and of the teacher."""
    tuning = replace(language, ratio=0.0, distill_weight=0.0, task_weight=1.0, limit=None, validation=0.0, batch=24)

    def tuned(fold: str, **changes: Any) -> str:
        """Train on a fold alone."""
        monkeypatch.setattr(language_host, "other_folds", lambda *_: [fold])
        options = replace(tuning, **{"output": str(tmp_path / fold), **changes})
        distill(options)
        return options.output

    first = tuned("fold1")
    second = tuned("fold2", pretrained=first)
    cut_to(
        tmp_path / "cut", load_pretrained(first), Plan(("L0H0", "L0H1")), AutoTokenizer.from_pretrained(first)
    )  # fmt: skip
    for changes in (
        {"pretrained": second},
        {"pretrained": str(tmp_path / "cut")},
        {"teacher": first, "distill_weight": 0.5},
    ):
        with pytest.raises(InputError, match=r"was trained on 6 of the 6 questions of the test split fold1"):
            tuned("fold3", test="fold1", **changes)
    trained_on = read_note(second)["material"]["trained_on"]
    assert len(trained_on) == 12
    assert (read_manifest(second) or {})["trained_on"] == trained_on


def test_training_questions_are_refused_as_validation(
    athena: DistillOptions, language: DistillOptions, tmp_path: Path
) -> None:
    for changes in ({"validation": 0.4}, {"limit": 12}):
        with pytest.raises(InputError, match=r"of the \d+ validation problems"):
            distill(replace(athena, **changes))
    tuned = replace(language, ratio=0.0, limit=None, output=str(tmp_path / "tuned"), batch=24)
    distill(tuned)
    for changes in ({"seed": 1}, {"validation": 0.5}):
        with pytest.raises(InputError, match=r"of the \d+ validation problems"):
            distill(replace(tuned, pretrained=tuned.output, output=str(tmp_path / "other"), **changes))
    material = make_host(replace(tuned, pretrained=tuned.output)).examples()
    assert material.note["validated_on"] == read_note(tuned.output)["material"]["validated_on"]
    assert len(material.note["validated_on"]) == len(material.validation) == 6


def test_a_model_that_was_only_pruned_was_trained_on_nothing(language: DistillOptions, tmp_path: Path) -> None:
    """Without epochs the pruner reads problems; a training afterwards may choose any of them for validation."""
    pruned = replace(language, epochs=0, limit=None)
    material = distill(pruned)["material"]
    assert material["trained_on"] == material["validated_on"] == [] and material["train"] > material["validation"] > 0
    assert (read_manifest(pruned.output) or {})["trained_on"] == []
    assert "Nothing was trained" in Path(pruned.output, "README.md").read_text()
    later = replace(
        pruned, pretrained=pruned.output, teacher=pruned.pretrained, ratio=0.0, epochs=1, seed=1, batch=24,
        output=str(tmp_path / "later"),
    )  # fmt: skip
    trained = distill(later)["material"]
    assert len(trained["trained_on"]) == trained["train"] + trained["validation"]
    with pytest.raises(InputError, match=r"was trained on 6 of the 6 questions of the test split fold1"):
        distill(replace(later, pretrained=later.output, epochs=0, test="fold1", output=str(tmp_path / "test")))


def test_models_with_fillers_are_refused(language: DistillOptions, tmp_path: Path) -> None:
    """A zeroed head in a group is one; layers and blocks that lose all go as a whole."""
    model = load_pretrained(language.pretrained)
    cut_to(tmp_path / "head", model, Plan(("L0H1",)))
    with pytest.raises(InputError, match=r"was cut with zeroed fillers \(L0\)"):
        distill(replace(language, pretrained=str(tmp_path / "head"), ratio=0.0, output=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
    for plan in (
        Plan(tuple(f"L0H{head}" for head in range(4)), allow_empty_layer=True),
        Plan(channels={"L1": "0-47"}, allow_empty_layer=True),
    ):
        assert not cut(model, plan).manifest["stages"][-1]["removed"]["fillers"]


def test_existing_files_at_the_output_are_kept(athena: DistillOptions, dense: TrainOptions) -> None:
    Path(athena.output).mkdir()
    (Path(athena.output) / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not a distilled model"):
        distill(athena)
    assert (Path(athena.output) / "notes.txt").read_text() == "mine"
    with pytest.raises(InputError, match="is not a distilled model"):
        distill(replace(athena, output=athena.pretrained))


def test_the_command(athena: DistillOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"distill:\n  pretrained: {athena.pretrained}\n  output: {athena.output}\n  data_dir: {athena.data_dir}\n"
        f"  stages: 1\n  epochs: 0\n  ratio: 0.25\n  options: {{alpha: 1.0}}\n"
    )
    assert main(["distill", "--config", str(recipe)]) == 0
    stdout = capsys.readouterr().out
    assert "2 heads removed;" in stdout
    assert main(["distill", "--config", str(recipe), "--epochs", "3"]) == 2
    assert "was made with " in capsys.readouterr().err


@pytest.mark.long
def test_two_processes_equal_one(athena: DistillOptions, dense: TrainOptions, tmp_path: Path) -> None:
    import subprocess
    import sys
    from dataclasses import asdict

    options = replace(
        athena, pretrained=still_host(dense, tmp_path), batch=4, rate=0.05
    )  # five batches of twenty problems, four for validation: the second process has less to do
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "import pytest\n"
        "from lmeval_prune.distillation.options import DistillOptions\n"
        "from lmeval_prune.distillation.recursion import distill\n"
        "from tests.test_distillation import plain_descent\n"
        "plain_descent(pytest.MonkeyPatch())\n"
        "distill(DistillOptions(**json.loads(sys.argv[1])))\n"
    )
    for processes, accumulate in ((1, 2), (2, 1)):
        trainer = {"max_grad_norm": 1e9, "weight_decay": 0.0, "gradient_accumulation_steps": accumulate}
        variant = replace(options, trainer=trainer, output=str(tmp_path / f"of{processes}"))
        completed = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}",
             str(script), json.dumps(asdict(variant))],
            check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, capture_output=True, text=True,
        )  # fmt: skip
        assert completed.stdout.count("stage 1 of 2: training") == 1
    assert_same(str(tmp_path / "of1"), str(tmp_path / "of2"), 1e-5)
