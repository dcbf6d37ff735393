"""Calibration text: windows of token ids, drawn by a seed from a task's training split or a text file, and hashed."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmeval_prune.errors import InputError, first_line
from lmeval_prune.tasks.named import load_task, task_manager

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalibrationText:
    """Batches that a model is run on.

    Attributes:
        name: where the text comes from.
        batches: token ids (rows, tokens), and which are real, (rows, tokens).
    """

    name: str
    batches: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, name: str, windows: Tensor, batch: int = 8, real: Tensor | None = None) -> CalibrationText:
        """Text as windows of token ids, (windows, tokens)."""
        real = torch.ones_like(windows) if real is None else real
        return cls(name, tuple(zip(windows.split(batch), real.split(batch), strict=True)))

    def about(self) -> dict[str, Any]:
        """What a plan says of it."""
        state = hashlib.sha256()
        for row, own in ((row, own) for batch in self.batches for row, own in zip(*batch, strict=True)):
            state.update(repr(row[own.bool()].tolist()).encode())
        windows = sum(len(ids) for ids, _ in self.batches)
        tokens = int(sum(real.sum() for _, real in self.batches))
        return {"text": self.name, "windows": windows, "tokens": tokens, "sha256": state.hexdigest()[:16]}

    def run(self, model: Any, last: nn.Module | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the model on each batch; yields it before its forward pass.

        Args:
            model: the model.
            last: what comes after this module is left out.
        """
        with torch.no_grad(), stopping_after(last) if last else nullcontext():
            for ids, real, inputs in self.inputs(model):
                yield ids, real
                with suppress(Reached):
                    model(**inputs)

    def inputs(self, model: Any) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Of each batch, on the model's device: token ids, which are real, and what the model is called with.

        An encoder-decoder reads a batch in both stacks.
        """
        device = next(model.parameters()).device
        for ids, real in self.batches:
            ids, real = ids.to(device), real.to(device)
            inputs: dict[str, Any] = {"input_ids": ids}
            if not bool(real.all()):
                inputs["attention_mask"] = real
            if getattr(model.config, "is_encoder_decoder", False):
                inputs["decoder_input_ids"] = ids
                inputs |= {"decoder_attention_mask": real} if not bool(real.all()) else {}
            yield ids, real, inputs


class Reached(Exception):  # noqa: N818 - the end of a run, no failure
    """A module has been run, and nothing after it is wanted.

    Args:
        output: of the module.
    """

    def __init__(self, output: Any) -> None:
        super().__init__("a module has been run, and nothing after it is wanted")
        self.output = output


@contextmanager
def stopping_after(module: nn.Module) -> Iterator[None]:
    """Inside the block, `Reached` is raised when a module has been run."""

    def stop(_: nn.Module, __: Any, output: Any) -> None:
        raise Reached(output)

    handle = module.register_forward_hook(stop)
    try:
        yield
    finally:
        handle.remove()


def check_length(model: Any, tokens: int) -> None:
    """Refuse windows that are longer than a model has positions; of one without weights, too.

    Raises:
        InputError: they are.
    """
    names = ("max_position_embeddings", "max_seq_len")  # MPT calls them so
    limit = next((known for name in names if isinstance(known := getattr(model.config, name, None), int)), None)
    if limit is None or limit < 1:
        return
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit -= module.padding_idx + 1  # RoBERTa's first ones stand for padding
    if tokens > limit:
        raise InputError(f"windows of {tokens} tokens: this model has at most {limit} positions; give fewer --tokens")


def read_calibration(
    tokenizer: Any,
    text: str | None,
    task: str | None,
    windows: int = 64,
    tokens: int = 128,
    batch: int = 8,
    seed: int = 0,
) -> CalibrationText:
    """Draw windows of a text.

    A file's paragraphs, or a task's training problems with their answers, are put in an order that the seed gives and
    read until there are enough tokens.

    Args:
        tokenizer: of the model.
        text: a text file.
        task: a task of lm-eval's with a training split; instead of `text`.
        windows, tokens: how many windows of how many tokens.
        batch: windows a forward pass.
        seed: of the order.

    Raises:
        InputError: there is no text, or not enough for one window.
    """
    if (text is None) == (task is None):
        raise InputError("give the calibration text: either --task NAME (its training split) or --text FILE")
    if min(windows, tokens - 1, batch) < 1:
        raise InputError("windows and batch must be at least 1, tokens at least 2")
    pieces = list(_paragraphs(Path(text)) if text is not None else _problems(str(task)))
    name = f"file {Path(text).name}" if text is not None else f"training split of {task}"
    random.Random(seed).shuffle(pieces)
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        if len(ids) >= windows * tokens:
            break
    found = min(windows, len(ids) // tokens)
    if not ids:
        raise InputError(f"the calibration text ({name}) is empty; give another")
    if not found:
        raise InputError(
            f"the calibration text ({name}) has {len(ids)} tokens, less than a window of {tokens}; give a "
            f"longer text, or fewer --tokens"
        )
    if found < windows:
        logger.warning("the calibration text (%s) gives %d of %d windows of %d tokens", name, found, windows, tokens)
    return CalibrationText.of(name, torch.tensor(ids[: found * tokens]).reshape(found, tokens), batch)


def _paragraphs(path: Path) -> Iterator[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"the calibration text {path} is no text in UTF-8 ({first_line(error)}); convert it, "
            f"e.g. iconv -f latin1 -t utf-8"
        ) from None
    except OSError as error:
        raise InputError(f"the calibration text {path} cannot be read ({first_line(error)})") from None
    return (f"{piece.strip()}\n\n" for piece in content.split("\n\n") if piece.strip())


def _problems(name: str) -> Iterator[str]:
    """Problems of a task's training split with their answers."""
    task = load_task(task_manager([name], {"data_split": "train"}), name)
    try:
        docs = _training_docs(name, task)
        first = next(docs, None)
    except InputError:
        raise
    except Exception as error:  # a task may fail in any way of its own
        raise InputError(f"the training split of {name} cannot be read ({first_line(error)})") from error
    return (_with_answer(task, doc) for doc in chain([first] if first is not None else [], docs))


def _training_docs(name: str, task: Any) -> Iterator[Any]:
    if "prune_data" in (task.get_config("dataset_kwargs") or {}):  # ours have read data_split
        docs: Iterable[Any] = task.test_docs()
    elif task.has_training_docs():
        docs = task.training_docs()
    else:
        raise InputError(f"task {name} has no training split; name another task, or give --text FILE")
    return iter(docs)


def _with_answer(task: Any, doc: Any) -> str:
    """A problem and its answer: with the working, where the data has it."""
    worked = next((doc[name] for name in ("answer", "solution") if isinstance(doc.get(name), str)), None)
    if "question" in doc and worked:
        return f"Question: {doc['question']}\nAnswer: {worked}\n\n"
    target = task.doc_to_target(doc)
    if isinstance(target, int):
        target = task.doc_to_choice(doc)[target]
    target = target[0] if isinstance(target, list) and target else target
    return f"{task.doc_to_text(doc)} {target}\n\n"
