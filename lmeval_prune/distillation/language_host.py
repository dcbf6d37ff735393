"""Distil causal language models on the answers of a task's training problems, and of the teacher to prompts.

A problem that the teacher is asked gives its answer, if it is right, or else its target. A prompt gives the answer, if
it has an end. Prompts with questions of the test are left out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lmeval_prune.architectures import position_limit, takes_logits_to_keep
from lmeval_prune.artefacts import digest, read_artefact, read_lines, write_artefact
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import load_pretrained, read_manifest, save_checkpoint, skeleton_of
from lmeval_prune.comparison import tokens
from lmeval_prune.comparison.distance import cells
from lmeval_prune.distillation.host import Host, TrainingExamples
from lmeval_prune.distillation.losses import answer_divergence
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError
from lmeval_prune.models.identity import vocabulary_digest
from lmeval_prune.planning.own_answers import Answerer, Question, calibration_text, check_generative, responses_folder
from lmeval_prune.pruners.calibration import CalibrationText, encode, encode_continuation
from lmeval_prune.surgery.card import shown, write_checkpoint_card
from lmeval_prune.tasks.loading import load_task, task_manager
from lmeval_prune.tasks.prompts import answer_delimiter, exemplars_of, prompt_of, question_of, target_of, text_of
from lmeval_prune.training.questions import (
    QuestionSearch,
    TrainingQuestions,
    documents_digest,
    drop_test_questions,
    normalised_question,
    other_folds,
    question_keys,
    split_by_question,
)

TASK = "prune_asdiv_a_equation"  # default
LESSONS, LESSONS_SCHEMA = "lessons.json", ("lmeval-prune/lessons", 1)  # texts and counts, by part of the examples
COMPARED = 32  # validation problems on which the distance from the unpruned model is measured
IGNORED = -100  # label of tokens without a loss


class Text(NamedTuple):
    """Token ids of a text, of which those from `start` on are learned.

    A training problem has its question, and learns the task's target. A prompt that the teacher answers has a question
    without a document, with its text (in the chat template, if that is used), and nothing to learn yet.
    """

    ids: list[int]
    start: int
    question: Question | None = None

    @property
    def is_problem(self) -> bool:
        return self.question is not None and bool(self.question.document)


class Rows(NamedTuple):
    """Training and test documents of a task; none without a task."""

    train: list[dict[str, Any]]  # drawn by the seed
    test: list[dict[str, Any]]
    names: str  # of the training splits
    repeated: int  # training documents that were dropped because they are in the test, too


class LanguageHost(Host):
    """A causal language model as a host."""

    def __init__(self, options: DistillOptions) -> None:
        super().__init__(options if options.task or options.prompts else replace(options, task=TASK))

    # ------------------------------------------------------------------ models

    def skeleton(self, folder: str) -> Any:
        skeleton = skeleton_of(folder)
        if getattr(skeleton.config, "is_encoder_decoder", False) or not skeleton.can_generate():
            raise InputError(
                f"{folder} ({skeleton.config.model_type}) is neither a causal language model nor an ATHENA"
            )
        return skeleton

    def check_teacher(self, folder: str) -> None:
        if vocabulary_digest(self.tokenizer_of(folder)) != vocabulary_digest(self.tokenizer):
            raise InputError(f"the teacher {folder} has another vocabulary than {self.options.pretrained}")

    def check(self) -> None:
        super().check()
        if self.options.calibrate_on == "own" or self.options.train_on == "teacher":
            check_generative(self.task)

    def read(self, folder: str) -> nn.Module:
        model: Any = load_pretrained(folder)
        wide: nn.Module = model.to(torch.promote_types(model.dtype, torch.float32))
        return wide

    def write(self, model: Any, manifest: dict[str, Any], folder: Path, add_files: Callable[[Path], None]) -> None:
        parent = embedded.resolve(self.options.pretrained)
        save_checkpoint(folder, model, manifest, self.tokenizer, add_files, parent)

    def write_card(self, model: Any, manifest: dict[str, Any], note: dict[str, Any], folder: Path) -> None:
        options, training = self.options, ""
        if options.epochs:
            source = shown(" and ".join(filter(None, (options.task, options.prompts))))
            name = shown(options.other_teacher or options.pretrained)
            teacher = f", taught by {name}" if options.uses_teacher else ""
            training = f"Trained after each stage on {note['material']['train']} texts of {source}{teacher}."
            if distance := note["stages"][-1].get("distance"):
                kld, same = (cells(distance)[name] for name in ("mean KLD", "same top p (%)"))
                training += f" From the unpruned model on texts like these: mean KLD {kld}, same top token {same}%."
        title = Path(options.output).resolve().name
        write_checkpoint_card(folder, title, model, manifest, (options.pretrained, None), True, training)

    def questions_of(self, folder: str) -> TrainingQuestions:
        return TrainingQuestions.from_artefact(read_manifest(embedded.resolve(folder)) or {})

    @cached_property
    def positions(self) -> int | None:
        """The fewest positions of the model and its teacher; None: neither names a number."""
        names = filter(None, (self.options.pretrained, self.options.other_teacher))
        return min(filter(None, (position_limit(skeleton_of(name)) for name in names)), default=None)

    @property
    def max_length(self) -> int:
        return min(self.options.max_length, self.positions or self.options.max_length)

    # ------------------------------------------------------------------ data

    @cached_property
    def task(self) -> Any:
        metadata = {"data_dir": self.options.data_dir} if self.options.data_dir else {}
        return load_task(task_manager(metadata), str(self.options.task))

    @cached_property
    def test(self) -> str | None:
        """Test split; None: the task's own. Of data in folds that is all of them, and the first fold is the test."""
        options = self.options
        data = options.task and (self.task.get_config("dataset_kwargs") or {}).get("prune_data")
        if options.test or not data:
            return options.test
        from lmeval_prune.tasks.data import DATA

        return "fold0" if "fold0" in DATA[data].splits and "train" not in DATA[data].splits else None

    @cached_property
    def rows(self) -> Rows:
        """The task's documents, each with its `question`."""
        options = self.options
        if not options.task:
            return Rows([], [], "", 0)
        arguments = self.task.get_config("dataset_kwargs") or {}
        if data := arguments.get("prune_data"):
            from lmeval_prune.tasks.data import DATA, load  # needs `datasets`, which other documents do not

            test, names = self.test or arguments.get("prune_test", "test"), "train"
            if "train" not in DATA[data].splits:
                names = "+".join(other_folds(data, test))
            parts = [load(data, split, options.data_dir) for split in (names, test)]
        elif options.test:
            raise InputError(f'test: the YAML file of {options.task} names its splits; give --test ""')
        else:
            tested, names = self.task.test_docs if self.task.has_test_docs() else self.task.validation_docs, "train"
            parts = [self.task.training_docs(), tested() or ()]
        train, test_rows = ([dict(row) for row in part] for part in parts)
        if "question" not in (train or [{}])[0]:
            train, test_rows = ([{**x, "question": question_of(self.task, x)} for x in y] for y in (train, test_rows))
        drawn, repeated = drop_test_questions(train, test_rows, self.test or "test")
        random.Random(options.seed).shuffle(drawn)
        return Rows(drawn[: options.limit], test_rows, names.replace("+", ", "), repeated)

    def prompt(self, row: Mapping[str, Any]) -> str:
        return prompt_of(self.task, row, self.tokenizer if self.options.chat else None)

    @cached_property
    def drawn_texts(self) -> list[tuple[str, str, str]]:
        """Prompt, delimiter and target of each document of the training."""
        return [
            (self.prompt(row), answer_delimiter(self.task, row, self.options.chat), target_of(self.task, row))
            for row in self.rows.train
        ]

    def contents(self) -> dict[str, str]:
        exemplars = exemplars_of(self.task) if self.options.task else []
        tested = self.rows.test if self.options.prompts else []  # prompts are searched for these
        problems = documents_digest(self.rows.train, tested, *filter(None, [exemplars]))
        return {"problems": problems, "task_prompts": digest(self.drawn_texts)}

    def examples(self) -> TrainingExamples:
        options, rows = self.options, self.rows
        problems = list[Text]()
        for number, (row, (prompt, delimiter, target)) in enumerate(zip(rows.train, self.drawn_texts, strict=True)):
            answer = encode_continuation(self.tokenizer, delimiter + options.answer.replace("{}", target))
            before = encode(self.tokenizer, prompt)
            ids, start = [*before, *answer, self.tokenizer.eos_token_id], max(1, len(before))
            if target.strip() and start < len(ids) - 1:  # else nothing to learn, whatever is around it
                problems.append(Text(ids, start, Question(number, row, prompt)))
        short = [problem for problem in problems if len(problem.ids) <= self.max_length]
        prompts, counts = self.prompts(rows.test) if options.prompts else ([], {})
        first = short if options.task else prompts  # those of them that are validated on
        share = 0.1 if options.validation is None else options.validation
        validation, remaining = split_by_question(first, map(self._wording, first), round(share * len(first)))
        if not remaining or (share and not validation):
            raise InputError(f"{len(first)} texts are too few to train and validate; raise limit or max_length")
        train = [*remaining, *(prompts if options.task else [])]
        asked, held_out = ([text for text in part if text.is_problem] for part in (train, validation))
        keys = (question_keys(text.question.document for text in part if text.question) for part in (asked, held_out))
        questions = self.all_questions(TrainingQuestions(*keys), rows.test, self.test or "test")
        note = {
            "train": len(train),
            "validation": len(validation),
            "too_long": len(problems) - len(short),
            "empty": len(rows.train) - len(problems),
            "repeated": rows.repeated,
            **({"prompts": counts} if prompts else {}),
            "splits": {"task": options.task, "test": self.test, "train": rows.names},
            **questions.to_artefact(),
        }
        lengths = [len(text.ids) for text in train]
        return TrainingExamples(train, validation, lengths, note, problems=held_out, questions=asked)

    def _wording(self, text: Text) -> Hashable:
        """Return what differs between texts of training and validation: the question of a problem; else all tokens."""
        if text.question and text.is_problem:
            return normalised_question(text_of(self.task, text.question.document))
        return tuple(text.ids)

    def prompts(self, test: Sequence[Mapping[str, Any]]) -> tuple[list[Text], dict[str, int]]:
        """Return the prompts that the teacher answers, without test questions and drawn by the seed, and counts."""
        options, prompts = self.options, dict[str, Text]()
        as_written = {self.prompt(row) for row in test} if options.task else ()
        search = QuestionSearch((str(row["question"]) for row in test), as_written)
        lines = read_lines(str(options.prompts))
        random.Random(options.seed).shuffle(lines)
        counts = {"documents": 0, "with_test_questions": 0, "too_long": 0, "empty": 0, "repeated": 0}
        for line in lines:
            prompt = rendered = line["prompt"]
            if options.chat:
                turns = [{"role": "user", "content": prompt}]
                rendered = str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
            spaced, ids = " ".join(prompt.split()), encode(self.tokenizer, rendered)
            counts["documents"] += 1
            if any(map(search.is_in, {prompt, rendered})):
                counts["with_test_questions"] += 1
            elif not spaced:
                counts["empty"] += 1
            elif spaced in prompts:
                counts["repeated"] += 1
            elif len(ids) >= self.max_length:
                counts["too_long"] += 1
            else:
                prompts[spaced] = Text(ids, len(ids), Question(len(prompts), {}, rendered))
            if len(prompts) == options.limit:
                break
        return list(prompts.values()), {"prompts": len(prompts), **counts}

    @cached_property
    def answerer(self) -> Answerer:
        options = self.options
        task = self.task if options.task and self.task.get_config("output_type") == "generate_until" else None
        sampling: dict[str, Any] = {"max_gen_toks": options.max_gen_toks, "seed": options.seed}
        return Answerer(task, self.tokenizer, responses_folder(None, Path(options.output)), **sampling)

    def taught(self, examples: TrainingExamples, work: Path) -> TrainingExamples:
        process, path, asks_problems = PartialState(), work / LESSONS, self.options.train_on == "teacher"
        parts: dict[str, Sequence[Text]] = {"train": examples.train, "validation": examples.validation}
        if process.is_main_process and not path.is_file():
            print("asking the teacher", flush=True)
            teacher: Any = self.read(self.options.other_teacher or self.options.pretrained).to(process.device)
            texts_of, counts_of = dict[str, Any](), dict[str, Any]()
            for part, texts in parts.items():
                problems, prompts = ([text for text in texts if text.is_problem is each] for each in (True, False))
                for name, own in ((part, problems if asks_problems else []), (f"{part}_prompts", prompts)):
                    if own:
                        lessons, counts_of[name] = self.learned(teacher, own)
                        texts_of[name] = [text[:2] for text in lessons]
            write_artefact(path, *LESSONS_SCHEMA, {"texts": texts_of, "counts": counts_of})
        process.wait_for_everyone()
        content, _ = read_artefact(path, *LESSONS_SCHEMA)
        answers, counts = content["texts"], content["counts"]
        train, validation = (
            [Text(*text) for name in (part, f"{part}_prompts") for text in answers.get(name, ())]
            + [text for text in texts if text.is_problem and not asks_problems]
            for part, texts in parts.items()
        )
        if not train or (examples.validation and not validation) or answers.get("train_prompts") == []:
            raise InputError(f"of the teacher's answers too few are whole ({counts}); give another max_gen_toks")
        note, lengths = {**examples.note, "lessons": counts}, [len(text.ids) for text in train]
        return replace(examples, train=train, validation=validation, lengths=lengths, note=note)

    def learned(self, teacher: Any, texts: Sequence[Text]) -> tuple[list[Text], dict[str, int]]:
        """Ask the teacher problems, or prompts; return what is learned of its answers, and counts.

        Kept is a right answer that has an end, of at most `max_length` tokens with its prompt. A problem without one
        keeps its target. A prompt is too long to ask if it leaves no room for an answer; one of which the model read
        the end alone is too long, too.
        """
        answerer, are_problems = self.answerer, texts[0].is_problem
        room = math.inf if are_problems or self.positions is None else self.positions - answerer.length
        asked = [text for text in texts if len(text.ids) <= room]
        questions = [text.question for text in asked if text.question]
        if not are_problems:  # which may have the settings of a task
            questions = [question._replace(number=number) for number, question in enumerate(questions)]
            answerer = replace(answerer, source="prompts")
        answers = answerer.answers(teacher, questions)
        rights = answerer.outcomes(questions, answers) if are_problems else [True] * len(answers)
        results = list[Text]()
        counts = {"questions": len(texts), **({"right": sum(rights)} if are_problems else {})}
        counts |= {"cut_off": sum(answer.cut_off for answer in answers), "too_long": len(texts) - len(asked), "kept": 0}
        for text, answer, is_right in zip(asked, answers, rights, strict=True):
            is_whole, ids = is_right and not answer.cut_off, [*answer.prompt, *answer.tokens]
            fits = len(answer.prompt) >= text.start and len(ids) <= self.max_length
            counts["too_long"] += is_whole and not fits
            counts["kept"] += is_whole and fits
            if is_whole and fits:
                results.append(Text(ids, len(answer.prompt)))
            elif are_problems:
                results.append(Text(text.ids, text.start))
        return results, counts | ({"unsolved": len(texts) - counts["kept"]} if are_problems else {})

    def calibration(self, examples: TrainingExamples, model: Any) -> CalibrationText:
        if self.options.calibrate_on == "task":
            return super().calibration(examples, model)
        questions = [problem.question for problem in self.drawn(examples.questions)]
        answers = self.answerer.answers(model, questions)
        name = f"own answers to {len(questions)} training problems"
        return calibration_text(name, self.answerer, answers, prompts_count=False)

    def collate(self, examples: Sequence[Any]) -> dict[str, Any]:
        longest = max(len(text.ids) for text in examples)
        padding = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0

        def padded(rows: Iterable[list[int]], value: int) -> Tensor:
            return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

        labels = padded(([IGNORED] * text.start + text.ids[text.start :] for text in examples), IGNORED)
        inputs: dict[str, Any] = {
            "input_ids": padded((text.ids for text in examples), padding),
            "attention_mask": padded(([1] * len(text.ids) for text in examples), 0),
            "labels": labels,
        }
        if self.takes_logits_to_keep:  # skip the logits of prompts
            inputs["logits_to_keep"] = (labels[:, 1:] != IGNORED).any(0).nonzero()[:, 0]
        return inputs

    @cached_property
    def takes_logits_to_keep(self) -> bool:
        return takes_logits_to_keep(self.skeleton(self.options.pretrained))

    def compared_texts(self, examples: TrainingExamples) -> list[tokens.Text]:
        # problems with their targets, one text each, whatever the student learns
        texts = examples.problems or examples.validation or examples.questions or examples.train
        return [
            tokens.Text(tuple(text.ids[: text.start]), tuple(text.ids[text.start :]), ("", number))
            for number, text in enumerate(texts[:COMPARED])
        ]

    # ------------------------------------------------------------------ losses

    def items(self, inputs: Mapping[str, Any]) -> int:
        return int((inputs["labels"][:, 1:] != IGNORED).sum())

    def loss(self, outputs: Any, inputs: Mapping[str, Any], teacher: Any = None) -> dict[str, Tensor]:
        terms = {"task": cross_entropy(*_answer_logits(outputs, inputs), reduction="sum")}
        if teacher is not None:
            expected, actual = (_answer_logits(each, inputs)[0] for each in (teacher, outputs))
            rows = min(expected.shape[-1], actual.shape[-1])  # padding rows belong to no token
            terms["response"] = answer_divergence(expected[:, :rows], actual[:, :rows], self.options.temperature)
        return terms


def _answer_logits(outputs: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the logits of answer tokens, (tokens, vocabulary) in at least float32, and these tokens."""
    labels, columns = inputs["labels"][:, 1:], inputs.get("logits_to_keep")
    logits = outputs.logits[:, :-1] if columns is None else outputs.logits
    labels = labels if columns is None else labels[:, columns]
    chosen = logits[labels != IGNORED]
    return chosen.to(torch.promote_types(chosen.dtype, torch.float32)), labels[labels != IGNORED]
