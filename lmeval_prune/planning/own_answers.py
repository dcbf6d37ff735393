"""Calibration text: what is read, or a model's own answers to training questions, from which students learn, too.

The decoding engine generates them, greedily or sampled by a seed, through `pruned-hf`, so they are in the answer store
under the keys that any evaluation has: a killed run resumes, and other runs with the same model and questions find
them.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmeval_prune.architectures import map_model
from lmeval_prune.errors import InputError
from lmeval_prune.models import generation
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.pruners.calibration import CalibrationText, check_length, read_calibration
from lmeval_prune.pruners.options import TextOptions
from lmeval_prune.pruners.schedule import Renew
from lmeval_prune.tasks import compat, tries
from lmeval_prune.tasks.prompts import prompt_of, training_documents

logger = logging.getLogger(__name__)


class Question(NamedTuple):
    """A training question."""

    number: int  # of its document; samples are drawn by it
    document: Mapping[str, Any]
    prompt: str  # lm-eval's


class OwnAnswer(NamedTuple):
    """A model's answer: token ids of prompt and answer with the EOS token, its text, and whether it was cut off."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    cut_off: bool


@dataclass(frozen=True)
class Answerer:
    """Asks models the questions of a task, or prompts of none."""

    task: Any  # loaded, generative; None: prompts of no task, which have a `source`
    tokenizer: Any
    responses: Path  # folder of the answer store
    temperature: float = 0.0  # 0: greedy answers
    max_gen_toks: int | None = None  # tokens of an answer at most; None: the task's
    seed: int = 0  # of sampled answers
    add_bos_token: bool | None = None  # as lm-eval's model_arg
    source: str | None = None  # what the questions are of, for messages and random numbers; None: the task

    @property
    def settings(self) -> dict[str, Any]:
        """lm-eval's generation settings: the task's, with this length and temperature."""
        kwargs = {"until": []} if self.task is None else self.task.get_config("generation_kwargs") or {}
        settings = generation.without_sampling(dict(kwargs))
        if self.max_gen_toks:
            names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_length")
            settings = {name: value for name, value in settings.items() if name not in names}
            settings["max_gen_toks"] = self.max_gen_toks
        return settings | ({"do_sample": True, "temperature": self.temperature} if self.temperature else {})

    @property
    def length(self) -> int:
        return generation.answer_limit(self.settings)

    def answers(self, model: Any, questions: Sequence[Question]) -> list[OwnAnswer]:
        """Return a model's answer to each question, from the store or generated now, with its interventions."""
        settings: dict[str, Any] = {"engine": "batched", "deterministic": True, "responses": str(self.responses)}
        if self.add_bos_token is not None:
            settings["add_bos_token"] = self.add_bos_token
        hf_logger = logging.getLogger("lm_eval.models.huggingface")
        hf_logger.disabled = True  # it warns that it is given a loaded model
        try:
            lm = PrunedHFLM(model, tokenizer=copy.deepcopy(self.tokenizer), **settings)
        finally:
            hf_logger.disabled = False
        lm.fixed_seed = self.seed
        try:
            source, settings = self.source or str(self.task.task_name), self.settings
            requests = [
                compat.request("generate_until", (x.prompt, settings), source, x.number, doc=dict(x.document))
                for x in questions
            ]
            texts = lm.generate_until(requests)
            records = lm.stored_records("generate_until", requests)
            pairs = zip(requests, texts, records, strict=True)
            answers = [self._answer(lm, request, text, record) for request, text, record in pairs]
            assert lm.store
            lm.store.compact()
        finally:
            lm.close()
        return answers

    def _answer(self, lm: PrunedHFLM, request: Any, text: str, record: Mapping[str, Any]) -> OwnAnswer:
        params, _ = generation.engine_settings(lm, request.args[1])
        prompt = generation.prompt_tokens(lm, request, params.max_new_tokens)
        cut_off, tokens = bool(record.get("cut_off")), list(record.get("tokens") or ())
        if not tokens or not (cut_off or tokens[-1] in (params.eos or ())):
            end = [] if cut_off else [int(self.tokenizer.eos_token_id)]
            # what was generated before a stop string; the text is tokenised if it has no tokens or ends within one
            heads = (tokens[:count] for count in range(len(tokens), 0, -1))
            own = next((head for head in heads if lm.tok_decode(head) == text), None)
            tokens = [*(self.tokenizer.encode(text, add_special_tokens=False) if own is None else own), *end]
        return OwnAnswer(prompt, tuple(tokens), text, cut_off)

    def outcomes(self, questions: Sequence[Question], answers: Sequence[OwnAnswer]) -> list[bool]:
        """Return whether each answer is right, by the task's own filter and metric; see `choose_metric`."""
        name, _ = tries.choose_metric(self.task)
        documents, texts = [question.document for question in questions], [answer.text for answer in answers]
        return tries.outcomes(self.task, name, documents, texts)


# --------------------------------------------------------------------------- calibration


def text_source(
    skeleton: Any, tokenizer: Any, options: TextOptions, responses: Path, source: Any = None
) -> Callable[[Any], tuple[CalibrationText, Renew | None]]:
    """Return a function that gives a model with its weights its text, and the function that renews it, if any does.

    `InputError` if the skeleton, a model perhaps without weights, cannot read or answer. `source`: see
    `read_calibration`.
    """
    if options.calibrate_on == "own":
        own = OwnText(skeleton, tokenizer, options, responses, source)
        return lambda model: (own.of(model), own.renewed(model))
    check_length(skeleton, options.tokens)
    text = read_calibration(tokenizer, options, source)
    return lambda model: (text, None)


class OwnText:
    """Calibration text of a model's own answers to training questions of a task; the skeleton may have no weights."""

    def __init__(self, skeleton: Any, tokenizer: Any, options: TextOptions, responses: Path, source: Any) -> None:
        if not (model_map := map_model(skeleton)).predicts_next_token:
            raise InputError(f"own answers need a causal language model; this {model_map.model_type} model is none")
        self.options = options
        task, documents = source or training_documents(str(options.task))
        check_generative(task)
        numbers = list(range(len(documents)))
        random.Random(options.seed).shuffle(numbers)
        numbers = numbers[: options.windows]
        if len(numbers) < options.windows:
            logger.warning("%s has %d of %d training questions", options.task, len(numbers), options.windows)
        chat = tokenizer if options.apply_chat_template else None
        self.questions = [Question(n, documents[n], prompt_of(task, documents[n], chat)) for n in numbers]
        sampling = (options.sample_temperature, options.max_gen_toks, options.seed)
        self.answerer = Answerer(task, tokenizer, responses, *sampling, options.add_bos_token)

    def of(self, model: Any) -> CalibrationText:
        """Return the text of a model, with its interventions."""
        options = self.options
        answers = self.answerer.answers(model, self.questions)
        name = f"own answers to training questions of {options.task}"
        tokenisation = {"apply_chat_template": options.apply_chat_template}
        return calibration_text(name, self.answerer, answers, options.prompts_count, options.batch, tokenisation)

    def renewed(self, model: Any) -> Renew | None:
        """Return the function that asks the model pruned so far again, every `regenerate` steps."""
        interval = self.options.regenerate
        return (lambda step: None if (step - 1) % interval else self.of(model)) if interval else None


def calibration_text(
    name: str,
    answerer: Answerer,
    answers: Sequence[OwnAnswer],
    prompts_count: bool,
    batch: int = 8,
    tokenisation: Mapping[str, Any] | None = None,
) -> CalibrationText:
    """Make calibration text of own answers, each with its prompt in a row; the arguments are recorded with it."""
    settings = {
        "questions": len(answers),
        "temperature": answerer.temperature,
        "seed": answerer.seed,
        "prompts_count": prompts_count,
        "cut_off": sum(answer.cut_off for answer in answers),
    }
    rows = [(answer.prompt, answer.tokens) for answer in answers]
    record = {**(tokenisation or {}), "own_answers": settings}
    return CalibrationText.from_answers(name, rows, batch, prompts_count, record)


def check_generative(task: Any) -> None:
    """Raise `InputError` for a task whose questions are not answered by generated texts."""
    if task.get_config("output_type") != "generate_until":
        raise InputError(f"task {task.task_name} is not generative, and own answers are generated; name another task")


def responses_folder(responses: str | None, output: Path) -> Path:
    return Path(responses) if responses else output.with_name(f"{output.name.removesuffix('.json')}.responses")
