"""A model's own answers to training questions: calibration text, what a student learns, and what a student solves.

The decoding engine generates them, greedily or sampled by a seed, through `pruned-hf`, so they are in the answer store
under the keys that any evaluation has: a killed run resumes, and other runs with the same model and questions find
them.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmeval_prune.architectures import map_model, position_limit
from lmeval_prune.errors import InputError
from lmeval_prune.models import generation
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.planning.texts import TextSource
from lmeval_prune.pruners.calibration import CalibrationText, end_token
from lmeval_prune.pruners.options import TextOptions
from lmeval_prune.pruners.schedule import Renew
from lmeval_prune.tasks import compat, tries
from lmeval_prune.tasks.prompts import prompt_of, training_documents

logger = logging.getLogger(__name__)


class Question(NamedTuple):
    """A training question.

    Attributes:
        number: of its document; samples are drawn by it.
        document: document of the task.
        prompt: lm-eval's prompt.
    """

    number: int
    document: Mapping[str, Any]
    prompt: str


class OwnAnswer(NamedTuple):
    """A model's answer: token ids of prompt and answer with the end token, its text, and whether it was cut off."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    cut_off: bool


@dataclass(frozen=True)
class Sampling:
    """How answers are generated.

    Attributes:
        temperature: 0 for greedy answers.
        max_gen_toks: tokens of an answer at most; None: the task's.
        seed: of sampled answers.
    """

    temperature: float = 0.0
    max_gen_toks: int | None = None
    seed: int = 0

    def settings(self, task: Any) -> dict[str, Any]:
        """Return lm-eval's generation settings: the task's, with this length and temperature."""
        kwargs = {"until": []} if task is None else task.get_config("generation_kwargs") or {}
        settings = generation.without_sampling(dict(kwargs))
        if self.max_gen_toks:
            names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_length")
            settings = {name: value for name, value in settings.items() if name not in names}
            settings["max_gen_toks"] = self.max_gen_toks
        return settings | ({"do_sample": True, "temperature": self.temperature} if self.temperature else {})

    def length(self, task: Any) -> int:
        """Return the largest number of tokens of an answer."""
        return generation.answer_limit(self.settings(task))

    def check_room(self, task: Any, name: str, positions: int | None) -> None:
        """Raise `InputError` if answers can be as long as the positions of a model; None: it names no number."""
        length = self.length(task)
        if positions is not None and length >= positions:
            raise InputError(f"max_gen_toks={length} leaves no room for a prompt: {name} has {positions} positions")


@dataclass(frozen=True)
class Answerer:
    """Asks models the questions of a task, or prompts of none.

    Attributes:
        task: a loaded generative task; None: prompts of no task, which have a `source`.
        tokenizer: of the models.
        sampling: how answers are generated.
        responses: folder of the answer store.
        add_bos_token: as lm-eval's model_arg.
        source: what the questions are of, for messages and random numbers; default: the task.
    """

    task: Any
    tokenizer: Any
    sampling: Sampling
    responses: Path
    add_bos_token: bool | None = None
    source: str | None = None

    def answers(self, model: Any, questions: Sequence[Question], disable_tqdm: bool = False) -> list[OwnAnswer]:
        """Return a model's answer to each question, from the store or generated now, with its interventions."""
        bos = {} if self.add_bos_token is None else {"add_bos_token": self.add_bos_token}
        engine = {"engine": "batched", "deterministic": True}
        with _quiet_hf():
            lm = PrunedHFLM(
                model, tokenizer=copy.deepcopy(self.tokenizer), responses=str(self.responses), **engine, **bos
            )
        lm.fixed_seed = self.sampling.seed
        try:
            requests = [self._request(question) for question in questions]
            texts = lm.generate_until(requests, disable_tqdm=disable_tqdm)
            records = lm.stored_records("generate_until", requests)
            pairs = zip(requests, texts, records, strict=True)
            answers = [self._answer(lm, request, text, record) for request, text, record in pairs]
            assert lm.store
            lm.store.compact()
        finally:
            lm.close()
        return answers

    def _request(self, question: Question) -> Any:
        arguments = question.prompt, self.sampling.settings(self.task)
        source = self.source or str(self.task.task_name)
        return compat.request("generate_until", arguments, source, question.number, doc=dict(question.document))

    def _answer(self, lm: PrunedHFLM, request: Any, text: str, record: Mapping[str, Any]) -> OwnAnswer:
        params, _ = generation.engine_settings(lm, request.args[1])
        prompt = generation.prompt_tokens(lm, request, params.max_new_tokens)
        cut_off, tokens = bool(record.get("cut_off")), list(record.get("tokens") or ())
        if not tokens or not (cut_off or tokens[-1] in (params.eos or ())):
            end = [] if cut_off else [end_token(self.tokenizer)]
            tokens = [*self._tokens_of(lm, text, tokens), *end]
        return OwnAnswer(prompt, tuple(tokens), text, cut_off)

    def _tokens_of(self, lm: PrunedHFLM, text: str, generated: list[int]) -> list[int]:
        """Return the generated tokens of a text before a stop text; tokenise it if it has none or ends within one."""
        for count in reversed(range(1, len(generated) + 1)):
            decoded = lm.tok_decode(generated[:count])
            if decoded == text:
                return generated[:count]
            if len(decoded) < len(text):
                break
        encoded: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return encoded

    def outcomes(self, questions: Sequence[Question], answers: Sequence[OwnAnswer]) -> list[bool]:
        """Return whether each answer is right, by the task's own filter and metric; see `choose_metric`."""
        name, _ = tries.choose_metric(self.task)
        documents, texts = [question.document for question in questions], [answer.text for answer in answers]
        return tries.outcomes(self.task, name, documents, texts)


@contextmanager
def _quiet_hf() -> Iterator[None]:
    """Silence the warnings of lm-eval's `hf` that a loaded model is given to it."""
    hf_logger = logging.getLogger("lm_eval.models.huggingface")
    hf_logger.disabled = True
    try:
        yield
    finally:
        hf_logger.disabled = False


# --------------------------------------------------------------------------- calibration


class OwnText(TextSource):
    """Calibration text of a model's own answers to training questions of a task.

    Args:
        skeleton: the model, perhaps without weights.
        tokenizer: of the model.
        options: task, number of questions, sampling.
        responses: folder of the answer store.

    """

    def __init__(self, skeleton: Any, tokenizer: Any, options: TextOptions, responses: Path) -> None:
        if not (model_map := map_model(skeleton)).predicts_next_token:
            raise InputError(f"own answers need a causal language model; this {model_map.model_type} model is none")
        self.options = options
        task, documents = training_documents(str(options.task))
        check_generative(task)
        numbers = list(range(len(documents)))
        random.Random(options.seed).shuffle(numbers)
        numbers = numbers[: options.windows]
        if len(numbers) < options.windows:
            logger.warning("%s has %d of %d training questions", options.task, len(numbers), options.windows)
        chat = tokenizer if options.apply_chat_template else None
        self.questions = [Question(n, documents[n], prompt_of(task, documents[n], chat)) for n in numbers]
        sampling = Sampling(options.sample_temperature, options.max_gen_toks, options.seed)
        sampling.check_room(task, "this model", position_limit(skeleton))
        self.answerer = Answerer(task, tokenizer, sampling, responses, options.add_bos_token)

    def of(self, model: Any) -> CalibrationText:
        """Return the text of a model, with its interventions."""
        options = self.options
        answers = self.answerer.answers(model, self.questions)
        tokenisation = {"apply_chat_template": options.apply_chat_template}
        name = f"own answers to training questions of {options.task}"
        return calibration_text(
            name, answers, self.answerer.sampling, options.prompts_count, options.batch, tokenisation
        )

    def renewed(self, model: Any) -> Renew | None:
        """Return the function that asks the model pruned so far again, every `regenerate` steps."""
        interval = self.options.regenerate
        return (lambda step: None if (step - 1) % interval else self.of(model)) if interval else None


def calibration_text(
    name: str,
    answers: Sequence[OwnAnswer],
    sampling: Sampling,
    prompts_count: bool,
    batch: int = 8,
    tokenisation: Mapping[str, Any] | None = None,
) -> CalibrationText:
    """Make calibration text of own answers, each with its prompt in a row; the arguments are recorded with it."""
    settings = {
        "questions": len(answers),
        "temperature": sampling.temperature,
        "seed": sampling.seed,
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
