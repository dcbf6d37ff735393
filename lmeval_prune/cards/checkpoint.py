"""Card of a cut checkpoint, from its manifest and its class."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmeval_prune.cards.card import EXAMPLE_TASK, LIBRARY, Card, code, command_section, quoted, table
from lmeval_prune.cards.origin import Origin
from lmeval_prune.checkpoints.loading import auto_model_class, has_pruned_layers, stock_class, task_classes
from lmeval_prune.checkpoints.pruned import MANIFEST, blocks_text, checkpoint_columns
from lmeval_prune.reporting.documents import escape_markdown, inline_code

# The Hub's task by the end of a class's name; the auto class of that end loads it.
PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": None,
    "ForSeq2SeqLM": None,
    "ForImageTextToText": "image-text-to-text",
    "": "feature-extraction",
}
UNTRAINED = (
    "Nothing was trained after the removal, so answers differ from those of the unpruned model: how much, and whether "
    "that is good enough, has to be measured on your own task."
)
INHERITED = "Limits and biases of the original model remain."


@dataclass(frozen=True)
class Training:
    """What a card says about the training of a model.

    Attributes:
        sections: Markdown by heading.
        has_teacher: whether the model learned the answers of another one.
        datasets: names on the Hub of the data sets.
        is_trained: false without epochs: a model that was only pruned.
    """

    sections: Mapping[str, str]
    has_teacher: bool
    datasets: Sequence[str] = ()
    is_trained: bool = True

    @property
    def tags(self) -> list[str]:
        """Tags of the front matter."""
        return ["distilled"] if self.has_teacher else []

    @property
    def words(self) -> str:
        """Continuation of a sentence about the model."""
        if not self.is_trained:
            return ""
        return ", trained to answer like it" if self.has_teacher else ", trained further"


def checkpoint_card(
    title: str,
    model: Any,
    manifest: Mapping[str, Any],
    origin: Origin,
    has_tokenizer: bool,
    training: Training | None = None,
) -> Card:
    """Return the card of a checkpoint that `cut` or `distill` writes.

    Args:
        title: name of its folder.
        model: the smaller model.
        manifest: manifest of the checkpoint.
        origin: the unpruned model.
        has_tokenizer: whether a tokenizer is written beside it.
        training: how it was trained, if it was.
    """
    return Card(
        title,
        origin,
        "finetune",
        "transformers",
        [*pruning_tags(manifest, training), *(["custom_code"] if _has_code(model) else [])],
        f"{origin.text}{without(manifest)}{training.words if training else ''}.",
        {
            "What was removed": what_was_removed(manifest),
            "How it was made": command_section(plans(manifest)),
            "How to load it": how_to_load(title, model, has_tokenizer),
            **(training.sections if training else {}),
            "Limits": INHERITED if training and training.is_trained else f"{UNTRAINED} {INHERITED}",
        },
        PIPELINES.get(auto_class(model).removeprefix("AutoModel")),
        training.datasets if training else (),
    )


def pruning_tags(manifest: Mapping[str, Any], training: Training | None = None) -> list[str]:
    """Return the tags of a pruned model, among them the methods of all stages."""
    provenances = [stage["plan"].get("made", {}) for stage in manifest["stages"]]
    methods = [str(provenance["method"]) for provenance in provenances if "method" in provenance]
    is_pruned = bool(without(manifest))
    return [*(["pruned"] if is_pruned else []), *(training.tags if training else []), *(methods if is_pruned else [])]


def what_was_removed(manifest: Mapping[str, Any], notes: Iterable[str] | None = None) -> str:
    """Return a table of sizes before and after all stages, and notes (default: those of the stages)."""
    first, columns = manifest["stages"][0], checkpoint_columns(dict(manifest))
    parent, removed = first["parent"], columns["removed"]
    rows = []
    counts = [stage.get("parameters") for stage in manifest["stages"]]
    if counts[0] and counts[-1]:  # manifests of earlier versions lack them
        for position, name in enumerate(("parameters", "parameters without embeddings")):
            rows.append(_row(name, counts[0]["before"][position], counts[-1]["after"][position]))
    heads = list(parent["heads"].values())
    totals = {
        "attention heads": (sum(shape[0] for shape in heads), removed["heads"]),
        "key-value heads": (sum(shape[1] for shape in heads), removed["kv_heads"]),
        "feed-forward channels": (sum(parent["channels"].values()), removed["channels"]),
        **({"layers": (len(heads), removed["layers"])} if removed.get("layers") else {}),
    }
    rows += [_row(name, before, before - gone) for name, (before, gone) in totals.items() if before]
    lines = [table(rows, "")]
    if removed.get("blocks"):
        names = blocks_text(manifest["stages"])
        count = f"{removed['blocks']} attention and feed-forward blocks were removed as a whole"
        lines.append(f"{count}{f': {names}' if names else ''}.")
    if notes is None:
        notes = (note for stage in manifest["stages"] for note in stage["notes"])
    return "\n\n".join([*lines, *(f"Note: {escape_markdown(note)}." for note in dict.fromkeys(notes))])


def _row(name: str, before: int, after: int) -> dict[str, str]:
    share = f"{1 - after / before:.1%}" if before else ""
    return {"": name, "before": f"{before:,}", "after": f"{after:,}", "removed": share}


def without(manifest: Mapping[str, Any]) -> str:
    """Say in a few words what all stages removed, as a continuation; empty if nothing was.

    Blocks are also those of whole layers, and heads and channels also those of blocks.
    """
    counts = checkpoint_columns(dict(manifest))["removed"] if manifest["stages"] else {}
    names = {"layers": "layers", "blocks": "blocks", "heads": "attention heads", "channels": "feed-forward channels"}
    words = [f"{n:,} {name[:-1] if n == 1 else name}" for key, name in names.items() if (n := counts.get(key))]
    if not words:
        zeroed = any(stage["notes"] for stage in manifest["stages"])
        return ", with some of its weights set to zero" if zeroed else ""
    total = f"{words.pop(0)}: in all " if counts.get("blocks") and words[1:] else ""  # experts have no channels
    return f", without {total}" + " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def plans(manifest: Mapping[str, Any], file: str = f"`{MANIFEST}`") -> str:
    """Say which method chose what was removed, in each stage; `file` has the details."""
    lines = []
    for stage in manifest["stages"]:
        provenance = stage["plan"].get("made", {})
        if not provenance and not without({**manifest, "stages": [stage]}):
            lines.append("nothing was removed")
            continue
        chosen = f"by the method {inline_code(provenance['method'])}" if provenance.get("method") else "by hand"
        removal = f": {escape_markdown(provenance['removes'])}" if provenance.get("removes") else ""
        text = (provenance.get("calibration") or {}).get("text")
        lines.append(f"chosen {chosen}{removal}{f'; calibrated on {escape_markdown(text)}' if text else ''}")
    if len(lines) > 1:
        text = "\n".join(f"{number}. Stage {number}: {line}." for number, line in enumerate(lines, 1))
    else:
        text = f"What was removed was {lines[0]}." if lines[0].startswith("chosen") else f"{lines[0].capitalize()}."
    return f"{text}\n\nAll settings, and what was removed where, are in {file}."


def how_to_load(title: str, model: Any, has_tokenizer: bool) -> str:
    """Return a program that loads a checkpoint and runs it."""
    name = auto_class(model)
    extra = ", trust_remote_code=True" if _has_code(model) else ""
    classes = ", ".join(sorted([name, *(["AutoTokenizer"] if has_tokenizer else [])]))
    can_generate = bool(getattr(model, "can_generate", bool)())
    lines = [
        *([] if has_tokenizer else ["import torch"]),
        f"from transformers import {classes}",
        "",
        f"name = {quoted(title)}  # this folder, or its name on the Hub",
        f"model = {name}.from_pretrained(name{extra})",
    ]
    if has_tokenizer:
        lines += [
            "tokenizer = AutoTokenizer.from_pretrained(name)",
            'inputs = tokenizer("The capital of France is", return_tensors="pt")',
        ]
    else:
        lines.append('inputs = {"input_ids": torch.tensor([[1, 2, 3]])}  # it has no tokenizer')
    if can_generate:
        lines.append("output = model.generate(**inputs, max_new_tokens=20)")
        lines.append("print(tokenizer.decode(output[0]))" if has_tokenizer else "print(output)")
    else:
        lines.append("print(model(**inputs)[0].shape)")
    return "\n\n".join([code("python", "\n".join(lines)), *_other_ways(title, model, can_generate)])


def _other_ways(title: str, model: Any, can_generate: bool) -> list[str]:
    ways = []
    if _has_code(model):
        ways.append(
            f"Its layers differ in size, which no stock class of transformers can express: the class is in "
            f"`modeling_pruned.py` of this folder. Where {LIBRARY} is installed, "
            f"`lmeval_prune.load_pretrained` loads it without remote code."
        )
    else:
        ways.append(f"It is a stock `{type(model).__name__}`: {LIBRARY} is not needed.")
    if can_generate:
        command = f"lm_eval --model pruned-hf --model_args pretrained={shlex.quote(title)} --tasks {EXAMPLE_TASK}"
        ways.append(f"Evaluate it with {LIBRARY} and lm-evaluation-harness, by this or any other task: `{command}`.")
    return ways


def auto_class(model: Any) -> str:
    """Return the auto class of transformers that loads a checkpoint."""
    stock = stock_class(model)
    classes = task_classes(stock, model.config)
    usual = [f"AutoModel{end}" for end in ("ForSeq2SeqLM", "ForCausalLM", *PIPELINES)]
    if classes:
        return min(classes, key=lambda name: usual.index(name) if name in usual else len(usual))
    is_base = auto_model_class("AutoModel", model.config) is stock
    return "AutoModel" if is_base or _has_code(model) else stock.__name__


def _has_code(model: Any) -> bool:
    return has_pruned_layers(model.config)
