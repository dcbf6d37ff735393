"""Calibration text: windows of token ids, drawn by a seed from a task's training split or a text file, and hashed.

Text is read as lm-eval's `hf` reads a prompt: every window begins and ends with the special tokens that the tokenizer
puts around a text, if it has such.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from torch import Tensor, nn

from lmeval_prune.architectures import position_limit
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.tasks.loading import load_task, task_manager

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalibrationText:
    """Batches that a model is run on.

    Attributes:
        name: where the text comes from.
        batches: token ids (rows, tokens), and which are real, (rows, tokens).
        reading: how the text was read: the special tokens of a window, and whether by the chat template.
    """

    name: str
    batches: tuple[tuple[Tensor, Tensor], ...]
    reading: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        windows: Tensor,
        batch: int = 8,
        real: Tensor | None = None,
        reading: Mapping[str, Any] | None = None,
    ) -> CalibrationText:
        """Make it of windows of token ids, (windows, tokens)."""
        real = torch.ones_like(windows) if real is None else real
        return cls(name, tuple(zip(windows.split(batch), real.split(batch), strict=True)), reading or {})

    @property
    def tokens(self) -> int:
        """Number of real tokens."""
        return int(sum(real.sum() for _, real in self.batches))

    def about(self) -> dict[str, Any]:
        """Return what a plan says of it."""
        state = hashlib.sha256()
        for row, real in ((row, real) for batch in self.batches for row, real in zip(*batch, strict=True)):
            state.update(repr(row[real.bool()].tolist()).encode())
        counts = {"windows": sum(len(ids) for ids, _ in self.batches), "tokens": self.tokens}
        return {"text": self.name, **counts, **self.reading, "sha256": state.hexdigest()[:16]}

    def run(self, model: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the model on each batch, up to its output head; what hooks collect of a batch is there in the next turn.

        Yields:
            Before the forward pass of each batch, on the model's device: its token ids, and which are real.
        """
        with torch.no_grad(), stopping_at(getattr(model, "get_output_embeddings", lambda: None)()):
            for ids, real, inputs in self.inputs(model):
                yield ids, real
                with suppress(Reached):
                    getattr(model, "base_model", model)(**inputs)

    def inputs(self, model: Any) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Yield each batch on the model's device: token ids, which are real, and arguments of the model.

        An encoder-decoder reads a batch in both stacks; its decoder begins as for lm-eval, which gives it labels.
        """
        device = next(model.parameters()).device
        for ids, real in self.batches:
            ids, real = ids.to(device), real.to(device)
            inputs: dict[str, Any] = {"input_ids": ids}
            if not bool(real.all()):
                inputs["attention_mask"] = real
            if getattr(model.config, "is_encoder_decoder", False):
                begin = getattr(
                    model, "prepare_decoder_input_ids_from_labels", lambda ids: ids
                )  # a bare stack has none
                inputs["decoder_input_ids"] = begin(ids)
                inputs |= {"decoder_attention_mask": real} if not bool(real.all()) else {}
            yield ids, real, inputs


class Reached(Exception):  # noqa: N818 - the end of a run, no failure
    """Ends a run of a model that has gone as far as is needed.

    Args:
        output: what has come out by then.
    """

    def __init__(self, output: Any) -> None:
        super().__init__("the model has been run as far as is needed")
        self.output = output


@contextmanager
def stopping_at(module: nn.Module | None, after: bool = False) -> Iterator[None]:
    """Raise `Reached` inside the block instead of running a module, or after it was run; None is never run."""

    def stop(_: nn.Module, values: Any, output: Any = None) -> None:
        raise Reached(output if after else values)

    with ExitStack() as stack:
        if module is not None:
            hook = module.register_forward_hook(stop) if after else module.register_forward_pre_hook(stop, prepend=True)
            stack.callback(hook.remove)
        yield


def check_length(model: Any, tokens: int) -> None:
    """Refuse windows that are longer than a model has positions; of one without weights, too.

    Raises:
        InputError: they are.
    """
    limit = position_limit(model)
    if limit is not None and tokens > limit:
        raise InputError(f"windows of {tokens} tokens: this model has at most {limit} positions; give fewer --tokens")


def encode(tokenizer: Any, text: str, add_bos_token: bool | None = None) -> list[int]:
    """Return a text's token ids with special tokens, as lm-eval's `hf` reads a prompt (`HFLM.tok_encode`).

    Args:
        tokenizer: of the model.
        text: the prompt; one that begins with the beginning-of-text token, as chat templates write it, gets no second.
        add_bos_token: as for lm-eval's `hf`; None for what the tokenizer does by itself.
    """
    special = False if _begins(tokenizer, text) else add_bos_token
    return list(tokenizer.encode(text, **({} if special is None else {"add_special_tokens": special})))


def _begins(tokenizer: Any, text: str) -> bool:
    """Return whether a text begins with the token that lm-eval takes for the beginning of a text."""
    first = _prefix_token_id(tokenizer)
    return first is not None and text.startswith(tokenizer.decode(first))


def _prefix_token_id(tokenizer: Any) -> int | None:
    bos: int | None = tokenizer.bos_token_id
    return tokenizer.eos_token_id if bos is None else bos


def special_tokens(tokenizer: Any, text: str, add_bos_token: bool | None = None) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer itself puts before and after a stretch of a text.

    A text that begins with the beginning-of-text token, as chat templates write it, has none after it, as of `encode`.
    Whether there is one before a stretch from its middle is read from the rest: the template's own token may be that of
    a turn.

    Raises:
        InputError: the tokenizer reads the text itself in another way when it adds them.
    """
    plain = text.removeprefix(tokenizer.decode(_prefix_token_id(tokenizer))) if _begins(tokenizer, text) else text
    whole, bare = encode(tokenizer, plain, add_bos_token), tokenizer.encode(plain, add_special_tokens=False)
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :] if plain == text else []
    raise InputError("the tokenizer splits a text in another way when it adds special tokens; give add_bos_token=false")


def read_calibration(
    tokenizer: Any,
    text: str | None,
    task: str | None,
    windows: int = 64,
    tokens: int = 128,
    batch: int = 8,
    seed: int = 0,
    apply_chat_template: bool = False,
    add_bos_token: bool | None = None,
) -> CalibrationText:
    """Draw windows of a text.

    A file's paragraphs, or a task's training problems with their answers, are put in an order that the seed gives and
    read one after another. Each window is a stretch of that, between the special tokens of a prompt.

    Args:
        tokenizer: of the model.
        text: a text file.
        task: a task of lm-eval's with a training split; instead of `text`.
        windows, tokens: how many windows of how many tokens, special tokens included.
        batch: windows a forward pass.
        seed: of the order.
        apply_chat_template: write a problem as the user's turn and its answer as the assistant's.
        add_bos_token: as of `encode`.

    Raises:
        InputError: there is no text, or not enough for one window, or there are no turns.
    """
    if (text is None) == (task is None):
        raise InputError("give the calibration text: either --task NAME (its training split) or --text FILE")
    if min(windows, tokens - 1, batch) < 1:
        raise InputError("windows and batch must be at least 1, tokens at least 2")
    if apply_chat_template:
        check_chat(tokenizer, text)
    name, pieces, write = _source(tokenizer, text, task, apply_chat_template)
    if not pieces:
        raise InputError(f"the calibration text ({name}) is empty; give another")
    random.Random(seed).shuffle(pieces)
    before, after = special_tokens(tokenizer, write(pieces[0]), add_bos_token)
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer.encode(write(piece), add_special_tokens=False)
        if len(ids) >= windows * tokens:
            break
    rows = _windows(ids, tokens, before, after)[:windows]
    if not rows:
        raise InputError(
            f"the calibration text ({name}) has {len(ids)} tokens, less than a window of {tokens}; give a "
            f"longer text, or fewer --tokens"
        )
    if len(rows) < windows:
        logger.warning(
            "the calibration text (%s) gives %d of %d windows of %d tokens", name, len(rows), windows, tokens
        )
    special = {"before": tokenizer.convert_ids_to_tokens(before), "after": tokenizer.convert_ids_to_tokens(after)}
    reading = {"special_tokens": special, "apply_chat_template": apply_chat_template}
    return CalibrationText.of(name, torch.tensor(rows), batch, reading=reading)


def _source(
    tokenizer: Any, text: str | None, task: str | None, apply_chat_template: bool
) -> tuple[str, list[Any], Callable[[Any], str]]:
    """Return the name of a text, its pieces, and what writes a piece."""
    if text is not None:
        return f"file {Path(text).name}", list(_paragraphs(Path(text))), str
    loaded, pieces = _problems(str(task))
    write = partial(_as_chat, tokenizer, loaded) if apply_chat_template else partial(_as_text, loaded)
    return f"training split of {task}", pieces, write


def _windows(ids: list[int], tokens: int, before: list[int], after: list[int]) -> list[list[int]]:
    """Cut ids into stretches between special tokens, but for those that begin with them, as a conversation does."""
    if tokens <= len(before) + len(after):
        raise InputError(f"a window of {tokens} tokens has no room beside its special tokens; give more --tokens")
    rows, start = list[list[int]](), 0
    while start < len(ids):
        prefix = [] if ids[start : start + len(before)] == before else before
        stretch = ids[start : start + tokens - len(prefix) - len(after)]
        rows += [[*prefix, *stretch, *after]]
        start += len(stretch)
    return [row for row in rows if len(row) == tokens]


def check_chat(tokenizer: Any, text: str | None) -> None:
    """Refuse to write turns where there are none, or no template for them.

    Raises:
        InputError: saying which.
    """
    if text is not None:
        raise InputError("a text file has no turns; leave out --apply_chat_template, or give --task NAME")
    if not tokenizer.chat_template:
        raise InputError("the tokenizer has no chat template; leave out --apply_chat_template")


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


def _problems(name: str) -> tuple[Any, list[Any]]:
    """Return a task, and the problems of its training split."""
    task = load_task(task_manager({"data_split": "train"}), name)
    try:
        return task, list(_training_docs(name, task))
    except InputError:
        raise
    except Exception as error:  # a task may fail in any way of its own
        raise InputError(f"the training split of {name} cannot be read ({first_line(error)})") from error


def _training_docs(name: str, task: Any) -> Iterable[Any]:
    if "prune_data" in (task.get_config("dataset_kwargs") or {}):  # ours have read data_split
        docs: Iterable[Any] = task.test_docs()
    elif task.has_training_docs():
        docs = task.training_docs()
    else:
        raise InputError(f"task {name} has no training split; name another task, or give --text FILE")
    return docs


def _as_text(task: Any, doc: Any) -> str:
    """Write a problem and its answer: with the working, where the data has it."""
    worked = _working(doc)
    if "question" in doc and worked:
        return f"Question: {doc['question']}\nAnswer: {worked}\n\n"
    return f"{task.doc_to_text(doc)} {_target(task, doc)}\n\n"


def _as_chat(tokenizer: Any, task: Any, doc: Any) -> str:
    """Write what lm-eval would ask as the user's turn, and the answer as the assistant's."""
    turns = {"user": task.doc_to_text(doc), "assistant": _working(doc) or _target(task, doc)}
    messages = [{"role": role, "content": str(content)} for role, content in turns.items()]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TemplateError as error:
        raise InputError(f"the chat template fails ({first_line(error)}); leave out --apply_chat_template") from error


def _working(doc: Any) -> str | None:
    return next((doc[name] for name in ("answer", "solution") if isinstance(doc.get(name), str)), None)


def _target(task: Any, doc: Any) -> Any:
    target = task.doc_to_target(doc)
    if isinstance(target, int):
        target = task.doc_to_choice(doc)[target]
    return target[0] if isinstance(target, list) and target else target
