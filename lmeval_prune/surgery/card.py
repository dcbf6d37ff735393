"""Model cards: the README.md, with the Hub's front matter, of a checkpoint, an adapter or a GGUF file."""

from __future__ import annotations

import logging
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download, metadata_load
from markupsafe import Markup

from lmeval_prune.architectures.identity import model_name
from lmeval_prune.artefacts import CREATED_BY, write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import (
    auto_model_class,
    has_pruned_layers,
    removal_summary,
    stock_class,
    task_classes,
)
from lmeval_prune.reporting.documents import printable, render

_logger = logging.getLogger(__name__)
CARD = "README.md"
MARKER = "<!-- lmeval-prune may replace this file as long as this line stands in it -->"
PIPELINES = {  # the Hub's task by the auto class that loads a model
    "AutoModelForSeq2SeqLM": None,
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModel": "feature-extraction",
}


def write_card(
    path: Path,
    title: str,
    parent: tuple[str, str | None],
    library: Literal["transformers", "peft", "gguf"],
    tags: Sequence[str],
    removed: Sequence[str],
    pipeline: str | None,
    training: str = "",
    **values: Any,
) -> None:
    """Write a card, unless a file without the marker line stands there.

    `parent` is the model that was pruned, and its revision; `removed` says what was removed, `training` what followed;
    `values` are what else the template reads for this library.
    """
    if path.is_file() and MARKER not in path.read_text(encoding="utf-8", errors="replace"):
        _logger.warning("%s stays as it is: it is not a card of lmeval-prune", path)
        return
    title, fields = printable(title), _base(*parent)
    base = fields["base_model"] if isinstance(fields.get("base_model"), str) else model_name(parent[0])
    tags = [*dict.fromkeys(["lmeval-prune", *tags])]
    data = ModelCardData(library_name=library, pipeline_tag=pipeline, tags=tags, **fields)
    is_ours = Path(sys.argv[0]).stem == "lmeval-prune"  # else a Python program of one's own
    command = printable(shlex.join(["lmeval-prune", *map(shown, sys.argv[1:])])) if is_ours else ""
    marked = {"front_matter": data.to_yaml(), "quoted": shlex.quote(title), "command": command, "marker": MARKER}
    values |= {name: Markup(value) for name, value in marked.items()}
    values |= {"base": base, "license": fields.get("license_name") or fields.get("license"), "created_by": CREATED_BY}
    values |= {"title": title, "library": library, "removed": removed, "training": training}
    write_text(path, str(ModelCard(render(Path(__file__).with_name("card.md.jinja"), **values))))


def write_checkpoint_card(
    folder: Path,
    title: str,
    model: Any,
    manifest: Mapping[str, Any],
    parent: tuple[str, str | None],
    has_tokenizer: bool,
    training: str = "",
) -> None:
    """Write the card of a checkpoint into its folder; other arguments as in `write_card`."""
    name, has_code = auto_class(model), has_pruned_layers(model.config)
    tags = [*pruning_tags(manifest), *(["distilled"] if training else []), *(["custom_code"] if has_code else [])]
    removed, values = removed_lines(manifest), {"has_tokenizer": has_tokenizer, "can_generate": model.can_generate()}
    values |= {"auto_class": name, "has_code": has_code}
    write_card(folder / CARD, title, parent, "transformers", tags, removed, PIPELINES.get(name), training, **values)


def pruning_tags(manifest: Mapping[str, Any]) -> list[str]:
    """Return the tags of a pruned model, among them the methods of all cuts."""
    methods = (stage["plan"]["made"].get("method") for stage in manifest["stages"])
    return ["pruned", *filter(None, methods)] if manifest["stages"] else []


def removed_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Say what all cuts removed, how many parameters are left, and how each was chosen, a line each."""
    if not (stages := manifest["stages"]):
        return []
    lines = [removal_summary(dict(manifest))]
    sizes = zip(stages[0]["parameters"]["before"], stages[-1]["parameters"]["after"], strict=True)
    for name, (before, after) in zip(("parameters", "parameters without embeddings"), sizes, strict=True):
        lines.append(f"{after:,} of {before:,} {name} are left, {1 - after / before:.1%} fewer")
    for number, stage in enumerate(stages, 1):
        made = stage["plan"]["made"]
        text = (made.get("calibration") or {}).get("text")
        calibrated = f", calibrated on {text}" if text else ""
        lines.append(f"stage {number}: chosen by {made.get('method', 'hand')}{calibrated}")
    return [*lines, *manifest["notes"]]


def shown(text: str) -> str:
    """Return a text with absolute paths, also after `=` and commas, by their last part."""
    return re.sub(r"(^|[=,])~?/(?:[^/=,]+/)*(?=[^/])", r"\1", text)


def auto_class(model: Any) -> str:
    """Return the auto class of transformers that loads a checkpoint."""
    stock, usual = stock_class(model), [*PIPELINES]
    if classes := task_classes(stock, model.config):
        return min(classes, key=lambda name: usual.index(name) if name in usual else len(usual))
    is_base = auto_model_class("AutoModel", model.config) is stock
    return "AutoModel" if is_base or has_pruned_layers(model.config) else stock.__name__


def _base(parent: str, revision: str | None) -> dict[str, Any]:
    """Return the front matter's fields about the model that was pruned, as far as they are known."""
    if not parent:  # a model that was never saved
        return {}
    if name := embedded.name_of(parent):
        return {"base_model": embedded.MODELS[name].origin, "license": embedded.MODELS[name].license}
    folder, fields = Path(parent).expanduser(), dict[str, Any]()
    with suppress(Exception):  # no card, no access, no network: error types differ between versions of the client
        path = folder / CARD if folder.is_dir() else hf_hub_download(parent, CARD, revision=revision)
        fields = dict(metadata_load(path) or {})
    cached = re.search(r"models--([^/\\]+)[/\\]snapshots[/\\][^/\\]+$", str(folder))
    base = cached[1].replace("--", "/") if cached else fields.get("base_model") if folder.is_dir() else parent
    known = {key: value for key, value in fields.items() if key.startswith("license") and isinstance(value, str)}
    return {"base_model": base, **known}
