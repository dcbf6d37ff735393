"""Causal language models as hosts of distillation: they learn the answers of a task's training problems."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from lmeval_prune.athena.data import other_folds, question_key, without_test
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.pruned import load_pretrained, read_manifest, save_checkpoint
from lmeval_prune.checkpoints.skeleton import UNREADABLE, skeleton_of
from lmeval_prune.distillation.host import NOTE, Host, Material, Seen, note_of
from lmeval_prune.distillation.losses import answer_divergence
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.models.identity import tokenizer_fingerprint
from lmeval_prune.pruners.calibration import encode
from lmeval_prune.tasks.data import DATA, load
from lmeval_prune.tasks.named import load_task, task_manager

IGNORED = -100  # label of what is not learned


@dataclass(frozen=True)
class Text:
    """A problem with its answer as tokens; the answer begins at `start`."""

    ids: list[int]
    start: int


class LanguageHost(Host):
    """See the base class."""

    metric, greater = "eval_task", False

    def __init__(self, options: DistillOptions) -> None:
        super().__init__(options)
        if options.task is None:
            raise InputError("name the task whose training problems are learned: task, e.g. prune_asdiv_a_equation")
        self.task = options.task

    @cached_property
    def tokenizer(self) -> Any:
        """The model's."""
        return self._tokenizer(self.options.pretrained)

    def _tokenizer(self, name: str) -> Any:
        try:
            found = AutoTokenizer.from_pretrained(embedded.resolve(name), trust_remote_code=False)
        except (*UNREADABLE, KeyError) as error:
            raise InputError(f"{name} has no tokenizer that can be read ({first_line(error)})") from error
        if found.eos_token_id is None:
            raise InputError(f"the tokenizer of {name} has no token that ends a text; set its eos_token")
        return found

    def skeleton(self, folder: str) -> Any:
        """See the base class."""
        bare = skeleton_of(folder)
        if getattr(bare.config, "is_encoder_decoder", False) or not bare.can_generate():
            raise InputError(
                f"{folder} ({bare.config.model_type}) is neither a causal language model nor an ATHENA "
                f"(`lmeval-prune athena train`); name one of these"
            )
        return bare

    def check_teacher(self, folder: str) -> None:
        """Tokens and width of the output; see the base class."""
        widths = [skeleton_of(one).config.get_text_config().vocab_size for one in (folder, self.options.pretrained)]
        if widths[0] != widths[1] or (
            tokenizer_fingerprint(self._tokenizer(folder)) != tokenizer_fingerprint(self.tokenizer)
        ):
            raise InputError(
                f"the teacher {folder} has another vocabulary than {self.options.pretrained}; name a teacher with the "
                f"same tokenizer"
            )

    def read(self, folder: str) -> nn.Module:
        """See the base class."""
        model: Any = load_pretrained(folder)
        found: nn.Module = model.to(torch.promote_types(model.dtype, torch.float32))
        return found

    def write(
        self, model: Any, manifest: dict[str, Any], folder: Path, beside: Callable[[Path], None] | None = None
    ) -> None:
        """See the base class."""
        save_checkpoint(folder, model, manifest, self.tokenizer, beside, [embedded.resolve(self.options.pretrained)])

    # ------------------------------------------------------------------ what it learns

    def seen(self, folder: str) -> Seen:
        """See the base class."""
        found = read_manifest(embedded.resolve(folder)) or {}
        if "trained_on" not in found and (Path(folder) / NOTE).is_file():
            found = note_of(folder)["material"]
        return Seen.of(found)

    def material(self) -> Material:
        """See the base class."""
        asked = self.options
        task = task_named(self.task, asked.data_dir)
        rows, test, names = self._splits(task)
        first = rows[0] if rows else {}
        field = "question" if "question" in first else None
        if field is None:  # of another's task: what is asked is the question
            rows, test = ([{**row, "question": self._prompt(task, row)} for row in some] for some in (rows, test))
        own, repeated = without_test(rows, test, names, asked.test or "test")
        random.Random(asked.seed).shuffle(own)
        own = own[: asked.limit]
        made = [(self._text(task, row), question_key(row)) for row in own]
        short = [(one, key) for one, key in made if len(one.ids) <= asked.max_length and one.start < len(one.ids)]
        texts, keys = [one for one, _ in short], [key for _, key in short]
        share = 0.1 if asked.validation is None else asked.validation
        count = round(share * len(texts))
        train, validation = texts[count:], texts[:count]
        seen = self.all_seen(Seen(frozenset(keys[count:]), frozenset(keys[:count])), test, asked.test or "test")
        if not train or (share and not validation):
            raise InputError(
                f"{len(texts)} of {len(own)} problems are too few to train and validate; raise limit, validation or "
                f"max_length"
            )
        about = {
            "train": len(train),
            "validation": len(validation),
            "too_long": len(own) - len(texts),
            "repeated": repeated,
            "splits": {"task": asked.task, "test": asked.test, "train": names},
            **seen.content(),
        }
        return Material(train, validation, [len(one.ids) for one in train], about)

    def _splits(self, task: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
        """Rows to train on, those of the test, and what the former are called."""
        asked = self.options
        given = task.get_config("dataset_kwargs") or {}
        try:
            if name := given.get("prune_data"):
                test = asked.test or given.get("prune_test", "test")
                splits = asked.train or (("train",) if "train" in DATA[name].splits else other_folds(name, test))
                if test in splits:
                    raise InputError(f"the training split {test} is the test split; leave it out of train")
                rows = [dict(row) for split in splits for row in load(name, split, asked.data_dir)]
                return rows, [dict(row) for row in load(name, test, asked.data_dir)], ", ".join(splits)
            if asked.train or asked.test:
                raise InputError(f"train and test name splits of our own tasks; leave them out for {asked.task}")
            if not task.has_training_docs():
                raise InputError(f"task {asked.task} has no training split; name another task")
            tested = task.test_docs() if task.has_test_docs() else task.validation_docs()
            return [dict(row) for row in task.training_docs()], [dict(row) for row in tested or ()], "train"
        except InputError:
            raise
        except Exception as error:  # a task may fail in any way of its own
            raise InputError(f"the training split of {asked.task} cannot be read ({first_line(error)})") from error

    def _prompt(self, task: Any, row: Mapping[str, Any]) -> str:
        """What lm-eval would ask."""

        def as_chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        shots = task.get_config("num_fewshot") or 0
        if not self.options.chat:
            return str(task.fewshot_context(row, shots))
        if not self.tokenizer.chat_template:
            raise InputError(f"{self.options.pretrained} has no chat template; leave out chat")
        return str(task.fewshot_context(row, shots, apply_chat_template=True, chat_template=as_chat))

    def _text(self, task: Any, row: dict[str, Any]) -> Text:
        asked = self.options
        if asked.answer_field is not None:
            if not isinstance(row.get(asked.answer_field), str):
                raise InputError(f"the documents of {asked.task} have no text in answer_field={asked.answer_field}")
            target = row[asked.answer_field]
        else:
            target = task.doc_to_target(row)
            if isinstance(target, int):
                target = task.doc_to_choice(row)[target]
            target = target[0] if isinstance(target, list) and target else target
        answer = ("" if asked.chat else task.get_config("target_delimiter")) + asked.answer.replace("{}", str(target))
        question = encode(self.tokenizer, self._prompt(task, row))
        ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return Text([*question, *ids, self.tokenizer.eos_token_id], len(question))

    def collate(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Padded on the right; see the base class."""
        longest = max(len(one.ids) for one in examples)
        padding = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0

        def padded(rows: Iterable[list[int]], value: int) -> Tensor:
            return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

        labels = padded(([IGNORED] * one.start + one.ids[one.start :] for one in examples), IGNORED)
        found = {
            "input_ids": padded((one.ids for one in examples), padding),
            "attention_mask": padded(([1] * len(one.ids) for one in examples), 0),
            "labels": labels,
        }
        if self.can_keep_some:  # logits of prompts are not computed
            found["logits_to_keep"] = (labels[:, 1:] != IGNORED).any(0).nonzero()[:, 0]
        return found

    @cached_property
    def can_keep_some(self) -> bool:
        """Whether the model can leave out logits that nobody reads."""
        return "logits_to_keep" in inspect.signature(self.skeleton(self.options.pretrained).forward).parameters

    def items(self, inputs: Mapping[str, Any]) -> int:
        """Tokens of answers."""
        return int((inputs["labels"][:, 1:] != IGNORED).sum())

    def task_loss(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """See the base class."""
        return cross_entropy(*_of_answers(outputs, inputs), reduction="sum")

    def response_loss(self, taught: Any, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """See the base class."""
        teacher, student = (_of_answers(some, inputs)[0] for some in (taught, outputs))
        return answer_divergence(teacher, student, self.options.temperature)


def _of_answers(outputs: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits that predict tokens of answers, (tokens, vocabulary), in float32 at least, and these tokens."""
    labels, columns = inputs["labels"][:, 1:], inputs.get("logits_to_keep")
    logits = outputs.logits[:, :-1] if columns is None else outputs.logits
    labels = labels if columns is None else labels[:, columns]
    chosen = logits[labels != IGNORED]
    return chosen.to(torch.promote_types(chosen.dtype, torch.float32)), labels[labels != IGNORED]


def task_named(name: str, data_dir: str | None) -> Any:
    """A task of lm-eval's.

    Raises:
        InputError: there is none.
    """
    return load_task(task_manager({"data_dir": data_dir} if data_dir else {}), name)
