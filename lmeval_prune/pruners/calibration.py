"""Read calibration text: windows of token ids from a task's training split or a text file.

Text is tokenised as lm-eval's `hf` tokenises a prompt: every window begins and ends with the special tokens that the
tokenizer adds to a text.
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
    """Batches of token ids for calibration."""

    name: str  # source of the text
    batches: tuple[tuple[Tensor, Tensor], ...]  # token ids (rows, tokens); mask of real tokens, 0 for padding
    tokenisation: Mapping[str, Any] = field(default_factory=dict)  # special tokens; whether a chat template is applied

    @classmethod
    def from_windows(
        cls,
        name: str,
        windows: Tensor,
        batch: int = 8,
        real: Tensor | None = None,
        tokenisation: Mapping[str, Any] | None = None,
    ) -> CalibrationText:
        """Split windows of token ids, (windows, tokens), into batches."""
        real = torch.ones_like(windows) if real is None else real
        return cls(name, tuple(zip(windows.split(batch), real.split(batch), strict=True)), tokenisation or {})

    @property
    def tokens(self) -> int:
        """Number of real tokens."""
        return int(sum(real.sum() for _, real in self.batches))

    def record(self) -> dict[str, Any]:
        """Return the record of this text that a plan stores."""
        state = hashlib.sha256()
        for row, real in ((row, real) for batch in self.batches for row, real in zip(*batch, strict=True)):
            state.update(repr(row[real.bool()].tolist()).encode())
        counts = {"windows": sum(len(ids) for ids, _ in self.batches), "tokens": self.tokens}
        return {"text": self.name, **counts, **self.tokenisation, "sha256": state.hexdigest()[:16]}

    def run(self, model: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the model, without its output head, on each batch.

        Yields:
            Token ids and mask of a batch, on the model's device, before the forward pass of this batch. What hooks
            collect is available in the next iteration.
        """
        with torch.no_grad(), stop_forward_at(getattr(model, "get_output_embeddings", lambda: None)()):
            for ids, real, inputs in self.inputs(model):
                yield ids, real
                with suppress(StopForward):
                    getattr(model, "base_model", model)(**inputs)

    def inputs(self, model: Any) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Yield token ids, mask and model arguments of each batch, on the model's device.

        An encoder-decoder reads the batch in both stacks; the decoder inputs are shifted labels, as in lm-eval.
        """
        device = next(model.parameters()).device
        for ids, real in self.batches:
            ids, real = ids.to(device), real.to(device)
            is_padded = not bool(real.all())
            inputs: dict[str, Any] = {"input_ids": ids}
            if is_padded:
                inputs["attention_mask"] = real
            if getattr(model.config, "is_encoder_decoder", False):
                # a model without a head does not have this method
                shift = getattr(model, "prepare_decoder_input_ids_from_labels", lambda ids: ids)
                inputs["decoder_input_ids"] = shift(ids)
                if is_padded:
                    inputs["decoder_attention_mask"] = real
            yield ids, real, inputs


class StopForward(Exception):  # noqa: N818 - not an error
    """Ends a forward pass early; `output` holds the inputs or the output of the module that ended it."""

    def __init__(self, output: Any) -> None:
        super().__init__("the forward pass ends here")
        self.output = output


@contextmanager
def stop_forward_at(module: nn.Module | None, after: bool = False) -> Iterator[None]:
    """Raise `StopForward` before a module runs, or after it, inside the block; do nothing for None."""

    def stop(_: nn.Module, values: Any, output: Any = None) -> None:
        raise StopForward(output if after else values)

    with ExitStack() as stack:
        if module is not None:
            hook = module.register_forward_hook(stop) if after else module.register_forward_pre_hook(stop, prepend=True)
            stack.callback(hook.remove)
        yield


def check_length(model: Any, tokens: int) -> None:
    """Raise `InputError` if a window has more tokens than the model has positions; the model may have no weights."""
    limit = position_limit(model)
    if limit is not None and tokens > limit:
        raise InputError(f"windows of {tokens} tokens: this model has at most {limit} positions; give fewer --tokens")


def encode(tokenizer: Any, text: str, add_bos_token: bool | None = None) -> list[int]:
    """Tokenise a text with special tokens as lm-eval's `hf` tokenises a prompt (`HFLM.tok_encode`).

    No special tokens are added if the text begins with the beginning-of-text token, as chat templates write it.
    """
    special = False if _begins_with_bos(tokenizer, text) else add_bos_token
    return list(tokenizer.encode(text, **({} if special is None else {"add_special_tokens": special})))


def _begins_with_bos(tokenizer: Any, text: str) -> bool:
    bos = _bos_token_id(tokenizer)
    return bos is not None and text.startswith(tokenizer.decode(bos))


def _bos_token_id(tokenizer: Any) -> int | None:
    """Return the id of the beginning-of-text token; like lm-eval, fall back to the end-of-text token."""
    bos: int | None = tokenizer.bos_token_id
    return tokenizer.eos_token_id if bos is None else bos


def special_tokens(tokenizer: Any, text: str, add_bos_token: bool | None = None) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer adds before and after a window from the middle of a text.

    A chat template may itself begin with the beginning-of-text token, e.g. as the marker of a turn. Then it is removed
    before the text is tokenised, and no tokens are added after a window, as in `encode`.
    """
    plain = text
    if _begins_with_bos(tokenizer, text):
        plain = text.removeprefix(tokenizer.decode(_bos_token_id(tokenizer)))
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
    """Read calibration windows.

    The paragraphs of a file, or a task's training problems with their answers, are shuffled and concatenated. The
    result is cut into windows, and each gets the special tokens of a prompt. Arguments as in `TextOptions`.
    """
    if (text is None) == (task is None):
        raise InputError("give the calibration text: either --task NAME (its training split) or --text FILE")
    if min(windows, tokens - 1, batch) < 1:
        raise InputError("windows and batch must be at least 1, tokens at least 2")
    if apply_chat_template:
        _check_chat(tokenizer, text)
    name, pieces, to_text = _source(tokenizer, text, task, apply_chat_template)
    if not pieces:
        raise InputError(f"the calibration text ({name}) is empty; give another")
    random.Random(seed).shuffle(pieces)
    before, after = special_tokens(tokenizer, to_text(pieces[0]), add_bos_token)
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer.encode(to_text(piece), add_special_tokens=False)
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
    tokenisation = {"special_tokens": special, "apply_chat_template": apply_chat_template}
    return CalibrationText.from_windows(name, torch.tensor(rows), batch, tokenisation=tokenisation)


def _source(
    tokenizer: Any, text: str | None, task: str | None, apply_chat_template: bool
) -> tuple[str, list[Any], Callable[[Any], str]]:
    """Return the name of a source, its paragraphs or problems, and a function that converts one of them to text."""
    if text is not None:
        return f"file {Path(text).name}", _paragraphs(Path(text)), str
    loaded, problems = _problems(str(task))
    to_text = partial(_as_chat, tokenizer, loaded) if apply_chat_template else partial(_as_text, loaded)
    return f"training split of {task}", problems, to_text


def _windows(ids: list[int], tokens: int, before: list[int], after: list[int]) -> list[list[int]]:
    """Cut token ids into windows with special tokens; do not repeat them before a slice that begins with them."""
    if tokens <= len(before) + len(after):
        raise InputError(f"a window of {tokens} tokens has no room beside its special tokens; give more --tokens")
    rows, start = list[list[int]](), 0
    while start < len(ids):
        prefix = [] if ids[start : start + len(before)] == before else before
        content = ids[start : start + tokens - len(prefix) - len(after)]
        rows += [[*prefix, *content, *after]]
        start += len(content)
    return [row for row in rows if len(row) == tokens]


def _check_chat(tokenizer: Any, text: str | None) -> None:
    if text is not None:
        raise InputError("a text file has no turns; leave out --apply_chat_template, or give --task NAME")
    if not tokenizer.chat_template:
        raise InputError("the tokenizer has no chat template; leave out --apply_chat_template")


def _paragraphs(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"the calibration text {path} is not UTF-8 ({first_line(error)}); convert it, e.g. iconv -f latin1 -t utf-8"
        ) from None
    except OSError as error:
        raise InputError(f"the calibration text {path} cannot be read ({first_line(error)})") from None
    return [f"{piece.strip()}\n\n" for piece in content.split("\n\n") if piece.strip()]


def _problems(name: str) -> tuple[Any, list[Any]]:
    """Return a task and the problems of its training split."""
    task = load_task(task_manager({"data_split": "train"}), name)
    try:
        return task, list(_training_docs(name, task))
    except InputError:
        raise
    except Exception as error:  # tasks raise errors of any type
        raise InputError(f"the training split of {name} cannot be read ({first_line(error)})") from error


def _training_docs(name: str, task: Any) -> Iterable[Any]:
    docs: Iterable[Any]
    if "prune_data" in (
        task.get_config("dataset_kwargs") or {}
    ):  # a task of this package: `data_split` has chosen the split that is its test split
        docs = task.test_docs()
    elif task.has_training_docs():
        docs = task.training_docs()
    else:
        raise InputError(f"task {name} has no training split; name another task, or give --text FILE")
    return docs


def _as_text(task: Any, doc: Any) -> str:
    """Write a problem and its answer, with the worked solution if the data has it."""
    solution = _solution(doc)
    if "question" in doc and solution:
        return f"Question: {doc['question']}\nAnswer: {solution}\n\n"
    return f"{task.doc_to_text(doc)} {_target(task, doc)}\n\n"


def _as_chat(tokenizer: Any, task: Any, doc: Any) -> str:
    """Write lm-eval's prompt as user turn, and the answer as assistant turn."""
    turns = {"user": task.doc_to_text(doc), "assistant": _solution(doc) or _target(task, doc)}
    messages = [{"role": role, "content": str(content)} for role, content in turns.items()]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TemplateError as error:
        raise InputError(f"the chat template fails ({first_line(error)}); leave out --apply_chat_template") from error


def _solution(doc: Any) -> str | None:
    return next((doc[name] for name in ("answer", "solution") if isinstance(doc.get(name), str)), None)


def _target(task: Any, doc: Any) -> Any:
    target = task.doc_to_target(doc)
    if isinstance(target, int):
        target = task.doc_to_choice(doc)[target]
    return target[0] if isinstance(target, list) and target else target
