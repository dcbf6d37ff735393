"""Read calibration text: windows of token ids from a task's training split or a text file.

Text is tokenised as lm-eval's `hf` tokenises a prompt: every window begins and ends with the special tokens that the
tokenizer adds to a text.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lmeval_prune.architectures import input_device, position_limit
from lmeval_prune.artefacts import Work, read_texts
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.options import TextOptions
from lmeval_prune.tasks.prompts import target_of, text_of, training_documents

logger = logging.getLogger(__name__)
UNREAD = 4  # windows of a text beyond those of the calibration, on which its result is measured


class Batch(NamedTuple):
    """Texts of one forward pass, each of shape (rows, tokens)."""

    ids: Tensor  # token ids
    real: Tensor  # mask of real tokens, 0 for padding
    counted: Tensor  # mask of the tokens that are measured; others are read, too, but do not count


@dataclass(frozen=True)
class CalibrationText:
    """Batches of token ids for calibration."""

    name: str  # source of the text
    batches: tuple[Batch, ...]
    tokenisation: Mapping[str, Any] = field(default_factory=dict)  # special tokens; whether a chat template is applied
    unread: Sequence[Sequence[int]] = field(default=(), compare=False)  # windows that follow in the text
    work: Work | None = field(default=None, compare=False)  # of a scoring of many passes, which goes on after a kill

    @classmethod
    def from_windows(
        cls, name: str, windows: Tensor, batch: int = 8, real: Tensor | None = None, **fields: Any
    ) -> CalibrationText:
        """Split windows of token ids, (windows, tokens), into batches; `fields` are others of the text."""
        real = torch.ones_like(windows) if real is None else real
        return cls(name, tuple(map(Batch, *(x.split(batch) for x in (windows, real, real)))), **fields)

    @classmethod
    def from_answers(
        cls,
        name: str,
        answers: Sequence[tuple[Sequence[int], Sequence[int]]],
        batch: int = 8,
        prompts_count: bool = True,
        tokenisation: Mapping[str, Any] | None = None,
    ) -> CalibrationText:
        """Make a text of prompts and answers, token ids, each pair in a row of its own, padded on the right.

        Without `prompts_count`, only the tokens of the answers are measured.
        """
        answers = sorted(answers, key=lambda pair: len(pair[0]) + len(pair[1]))  # so that batches have little padding
        batches = []
        for start in range(0, len(answers), batch):
            rows = answers[start : start + batch]
            width = max(len(prompt) + len(answer) for prompt, answer in rows)
            ids, real, measured = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
            for row, (prompt, answer) in enumerate(rows):
                length = len(prompt) + len(answer)
                ids[row, :length] = torch.tensor([*prompt, *answer])
                real[row, :length] = 1
                measured[row, 0 if prompts_count else len(prompt) : length] = 1
            batches.append(Batch(ids, real, measured))
        return cls(name, tuple(batches), tokenisation or {})

    @property
    def tokens(self) -> int:
        return int(sum(batch.counted.sum() for batch in self.batches))

    def record(self) -> dict[str, Any]:
        """Return the record of this text that a plan stores."""
        state, all_count = hashlib.sha256(), all(torch.equal(batch.real, batch.counted) for batch in self.batches)
        for batch in self.batches:
            for row, real, counted in zip(*batch, strict=True):
                state.update(repr(row[real.bool()].tolist()).encode())
                if not all_count:
                    state.update(repr(counted[real.bool()].tolist()).encode())
        counts = {"windows": sum(len(batch.ids) for batch in self.batches), "tokens": self.tokens}
        return {"text": self.name, **counts, **self.tokenisation, "sha256": state.hexdigest()[:16]}

    def run(self, model: Any) -> Iterator[Batch]:
        """Run the model, without its output head, on each batch; yield it, on the device, before its forward pass.

        What hooks collect is available in the next iteration.
        """
        with torch.no_grad(), stop_forward_at(getattr(model, "get_output_embeddings", lambda: None)()):
            for batch, inputs in self.inputs(model):
                yield batch
                with suppress(StopForward):
                    getattr(model, "base_model", model)(**inputs)

    def inputs(self, model: Any) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Yield each batch and the model's arguments for it, on the model's device.

        An encoder-decoder reads the batch in both stacks; the decoder inputs are shifted labels, as in lm-eval.
        """
        device = input_device(model)
        for batch in tqdm(self.batches, "calibration", leave=False, delay=30, mininterval=5):
            batch = Batch(*(tensor.to(device) for tensor in batch))
            is_padded = not bool(batch.real.all())
            inputs: dict[str, Any] = {"input_ids": batch.ids}
            if is_padded:
                inputs["attention_mask"] = batch.real
            if getattr(model.config, "is_encoder_decoder", False):
                # a model without a head does not have this method
                shift = getattr(model, "prepare_decoder_input_ids_from_labels", lambda ids: ids)
                inputs["decoder_input_ids"] = shift(batch.ids)
                if is_padded:
                    inputs["decoder_attention_mask"] = batch.real
            yield batch, inputs


class StopForward(Exception):  # noqa: N818 - not an error
    """Ends a forward pass early; holds the output of the module that ended it."""

    def __init__(self, output: Any = None) -> None:
        self.output = output


@contextmanager
def stop_forward_at(module: nn.Module | None, after: bool = False) -> Iterator[None]:
    """Raise `StopForward` before a module runs, or after it, inside the block; do nothing for None."""

    def stop(_: nn.Module, __: Any, output: Any = None) -> None:
        raise StopForward(output)

    with ExitStack() as stack:
        if module is not None and after:
            stack.callback(module.register_forward_hook(stop).remove)
        elif module is not None:
            stack.callback(module.register_forward_pre_hook(stop, prepend=True).remove)
        yield


def check_length(model: Any, tokens: int) -> None:
    """Raise `InputError` if a window has more tokens than the model has positions; the model may have no weights."""
    limit = position_limit(model)
    if limit is not None and tokens > limit:
        raise InputError(f"windows of {tokens} tokens: this model has at most {limit} positions; give fewer --tokens")


def encode(tokenizer: Any, text: str, add_bos_token: bool | None = None) -> list[int]:
    """Tokenise a text as `HFLM.tok_encode` does: without special tokens if it begins with the BOS token."""
    bos = _bos_text(tokenizer)
    special = False if bos is not None and text.startswith(bos) else add_bos_token
    return list(tokenizer.encode(text, **({} if special is None else {"add_special_tokens": special})))


def encode_continuation(tokenizer: Any, text: str) -> list[int]:
    """Tokenise a text that follows another one: without the space that some tokenizers put before a text."""

    def ids_of(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False))

    line, after_line = ids_of("\n"), ids_of(f"\n{text}")
    adds_space = ids_of("\na") != [*line, *ids_of("a")]
    return after_line[len(line) :] if adds_space and after_line[: len(line)] == line else ids_of(text)


def _bos_text(tokenizer: Any) -> str | None:
    bos = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return None if bos is None else str(tokenizer.decode(bos))


def special_tokens(tokenizer: Any, text: str, add_bos_token: bool | None = None) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer adds before and after a window from the middle of a text.

    A chat template may itself begin with the beginning-of-text token, e.g. as the marker of a turn. Then it is removed
    before the text is tokenised, and no tokens are added after a window, as in `encode`.
    """
    plain = text.removeprefix(_bos_text(tokenizer) or "")
    ids, bare = encode(tokenizer, plain, add_bos_token), tokenizer.encode(plain, add_special_tokens=False)
    for start in range(len(ids) - len(bare) + 1):
        if ids[start : start + len(bare)] == bare:
            return ids[:start], ids[start + len(bare) :] if plain == text else []
    raise InputError("the tokenizer splits a text in another way when it adds special tokens; give add_bos_token=false")


def read_calibration(tokenizer: Any, options: TextOptions, source: Any = None) -> CalibrationText:
    """Read calibration windows: paragraphs of a text, texts of a .jsonl file, or training problems with their answers.

    They are shuffled and concatenated. The result is cut into windows, and each gets the special tokens of a prompt.
    `source` is what `training_documents` or `read_texts` has returned, if it was read before.
    """
    windows, tokens, chat = options.windows, options.tokens, options.apply_chat_template
    if options.text is None:
        loaded, documents = source or training_documents(str(options.task))
        pieces = list(documents)
        to_text: Callable[[Any], str] = partial(_written, loaded, chat=tokenizer if chat else None)
        name = f"training split of {options.task}"
    elif chat:
        raise InputError("a text file has no turns; leave out --apply_chat_template, or give --task NAME")
    else:
        path, to_text = Path(options.text), str
        texts, name = source or read_texts(path), f"file {path.name}"
        paragraphs = texts if path.suffix == ".jsonl" else texts[0].split("\n\n")
        pieces = [f"{paragraph.strip()}\n\n" for paragraph in paragraphs if paragraph.strip()]
    random.Random(options.seed).shuffle(pieces)
    before, after = special_tokens(tokenizer, to_text(pieces[0]), options.add_bos_token)
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer.encode(to_text(piece), add_special_tokens=False)
        if len(ids) >= (windows + UNREAD) * tokens:
            break
    every = _windows(ids, tokens, before, after)
    rows, unread = every[:windows], every[windows : windows + UNREAD]
    if not rows:
        raise InputError(f"the text ({name}) has only {len(ids)} tokens; give fewer --tokens")
    if len(rows) < windows:
        logger.warning("the text (%s) gives %d of %d windows", name, len(rows), windows)
    special = {"before": tokenizer.convert_ids_to_tokens(before), "after": tokenizer.convert_ids_to_tokens(after)}
    tokenisation = {"special_tokens": special, "apply_chat_template": chat}
    fields: dict[str, Any] = {"tokenisation": tokenisation, "unread": unread}
    return CalibrationText.from_windows(name, torch.tensor(rows), options.batch, **fields)


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


def _written(task: Any, document: Any, chat: Any = None) -> str:
    """Return a problem with its answer: a worked solution, if it has one; with the template of a `chat` tokenizer."""
    solution = None
    if task.get_config("doc_to_choice") is None:
        solution = next((document[x] for x in ("answer", "solution") if isinstance(document.get(x), str)), None)
    if chat is not None:
        turns = {"user": text_of(task, document), "assistant": solution or target_of(task, document)}
        messages = [{"role": role, "content": content} for role, content in turns.items()]
        return str(chat.apply_chat_template(messages, tokenize=False))
    if "question" in document and solution:
        return f"Question: {document['question']}\nAnswer: {solution}\n\n"
    return f"{text_of(task, document)} {target_of(task, document)}\n\n"
