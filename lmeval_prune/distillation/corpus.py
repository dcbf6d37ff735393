"""Read a text corpus as training text: windows of tokens, or prompts with answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmeval_prune.artefacts import content_digest, digest, numbered_lines, read_lines, read_texts
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.pruners.calibration import encode, encode_continuation, end_token, special_tokens

SUFFIXES = (".txt", ".jsonl")
FILES = (*SUFFIXES, ".json", ".csv", ".parquet", ".gz", ".zst")  # endings of files, not of names of data sets
SHARED_WORDS = 13  # consecutive words of a test question that exclude a document, or all of a shorter question
LEAST_WORDS = 8  # of a question that texts are searched for: shorter ones meet by chance (GPT-3, arXiv 2005.14165, C)
_WORD = re.compile(r"\w+")
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")  # Chinese and Japanese: no spaces between words


class Text(NamedTuple):
    """Token ids of a text; those from `start` on are learned."""

    ids: list[int]
    start: int


class Prompt(NamedTuple):
    """A prompt that the teacher answers, as in the chat template if that is used, and its token ids."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Corpus:
    """Texts of a corpus, in an order drawn by the seed.

    Attributes:
        texts: windows, prompts with answers, or prompts.
        note: for `distillation.json`.
    """

    texts: list[Text | Prompt]
    note: dict[str, Any]


def counts_text(note: Mapping[str, Any]) -> str:
    """Return the whole numbers of a note as text: `documents 3, empty 1`."""
    return ", ".join(f"{name} {count}" for name, count in note.items() if isinstance(count, int))


def corpus_identity(corpus: str) -> str:
    """Return a digest of the files of a local corpus; the name of a data set."""
    digests: dict[str, list[str]] = {}
    for path in _files(corpus):
        digests.setdefault(path.name, []).append(content_digest(path))
    single = {name: contents if len(contents) > 1 else contents[0] for name, contents in digests.items()}
    return digest(single) if single else corpus


def check_corpus(options: DistillOptions) -> None:
    """Raise an `InputError` if the corpus has no suitable files, or options do not suit it."""
    path = Path(str(options.corpus))
    if _files(str(path)):
        if options.corpus_options:
            raise InputError(f"corpus_options are for data sets, and {path} is a local corpus; leave them out")
    elif path.exists():
        problem = "has no files" if path.is_dir() else "is a file of another kind than"
        raise InputError(f"corpus={path} {problem} {' or '.join(SUFFIXES)}; name another folder or file")
    elif path.suffix in FILES or path.is_absolute() or str(options.corpus).startswith((".", "~")):
        raise InputError(f"corpus={path}: there is no such file or folder")


def read_corpus(
    options: DistillOptions,
    tokenizer: Any,
    test: Iterable[str],
    as_prompt: Any = str,
    positions: int | None = None,
    test_prompts: Collection[str] = (),
) -> Corpus:
    """Read the texts of a corpus in which `QuestionSearch` finds no test question.

    Args:
        options: the corpus, and how much of it is read.
        tokenizer: the model's tokenizer.
        test: test questions.
        as_prompt: function that puts a prompt into the chat template.
        positions: largest number of tokens of a text that the models take; None: any.
        test_prompts: prompts of the test as the task writes them, which are test questions, too.

    Raises:
        InputError: the corpus cannot be read, or gives no text.
    """
    rows = _rows(options)
    order = list(range(len(rows)))
    random.Random(options.seed).shuffle(order)
    search = QuestionSearch(test, test_prompts)
    texts: list[Text | Prompt] = []
    windows = _Windows(tokenizer, within(options.corpus_tokens, positions))
    max_length = within(options.max_length, positions)
    counts = {"documents": 0, "with_test_questions": 0, "too_long": 0, "empty": 0}
    if options.corpus_answers == "teacher":
        counts["repeated"] = 0
    answered_prompts = set[str]()  # prompts that the teacher answers
    for index in order:
        prompt, text = _fields(rows, index, options)
        rendered = as_prompt(prompt) if options.corpus_prompt else ""
        counts["documents"] += 1
        if search.matches(text, prompt) or search.is_prompt(rendered):
            counts["with_test_questions"] += 1
        elif options.corpus_answers == "teacher":
            ids = encode(tokenizer, rendered)
            if not prompt.strip():
                counts["empty"] += 1
            elif (spaced := " ".join(prompt.split())) in answered_prompts:
                counts["repeated"] += 1
            elif len(ids) >= max_length:
                counts["too_long"] += 1
            else:
                answered_prompts.add(spaced)
                texts.append(Prompt(rendered, ids))
        elif options.corpus_prompt:
            answered = answered_text(tokenizer, encode(tokenizer, rendered), text)
            if not has_answer(answered):
                counts["empty"] += 1
            elif len(answered.ids) > max_length:
                counts["too_long"] += 1
            else:
                texts.append(answered)
        elif ids := tokenizer.encode(text, add_special_tokens=False):
            texts += windows.add(ids)
        else:
            counts["empty"] += 1
        if len(texts) >= options.corpus_texts:
            break
    texts = texts[: options.corpus_texts]
    if not texts:
        raise InputError(_reason_of_no_text(options, counts, max_length, windows))
    return Corpus(texts, {"name": options.corpus, "texts": len(texts), **counts})


def _reason_of_no_text(options: DistillOptions, counts: Mapping[str, int], max_length: int, windows: _Windows) -> str:
    """Return the message for a corpus without a text: what became of its documents, and what to give."""
    if not counts["documents"]:
        return f"the corpus {options.corpus} has no documents; give another corpus"
    empty = "an answer to learn" if options.corpus_prompt else "a text"
    empty = "a prompt" if options.corpus_answers == "teacher" else empty
    reasons = {
        "with_test_questions": "with a question of the test",
        "too_long": f"with more than {max_length} tokens",
        "empty": f"without {empty}",
    }
    parts = [f"{counts[name]} {reason}" for name, reason in reasons.items() if counts[name]]
    remedies = ["a larger max_length"] if counts["too_long"] else []
    if leftover_tokens := len(windows.ids):
        parts.append(
            f"the {'others' if parts else 'whole'} with {leftover_tokens} tokens, fewer than a text of {windows.tokens}"
        )
        remedies.append("fewer corpus_tokens")
    documents = ", ".join([f"{counts['documents']} documents", *parts])
    remedy = " or ".join([*remedies, "another corpus"])
    return f"the corpus {options.corpus} gives no text: {documents}; give {remedy}"


def within(length: int, positions: int | None) -> int:
    """Return a number of tokens, at most that of the positions; None: any."""
    return length if positions is None else min(length, positions)


def answered_text(tokenizer: Any, prompt: Sequence[int], answer: str) -> Text:
    """Return the token ids of a prompt with an answer and the end token; nothing predicts a first token."""
    ids = encode_continuation(tokenizer, answer)
    return Text([*prompt, *ids, end_token(tokenizer)], max(1, len(prompt)))


def has_answer(text: Any) -> bool:
    """Return whether a prompt with an answer (a `Text` or `Problem`) has a token to learn beside the end token."""
    return bool(text.start < len(text.ids) - 1)


class QuestionSearch:
    """Test questions, which texts are searched for.

    Questions without words are skipped. Those of fewer than 8 words, which other texts can have by chance, and
    `prompts` are only compared with whole prompts. Each Chinese or Japanese character counts as a word.
    """

    def __init__(self, questions: Iterable[str], prompts: Iterable[str] = ()) -> None:
        self.runs: dict[int, set[tuple[str, ...]]] = {}
        in_words = {words for question in questions if (words := _words(question))}
        self.prompts = in_words | {words for prompt in prompts if (words := _words(prompt))}
        for words in in_words:
            if sum(max(1, len(_UNSPACED.findall(word))) for word in words) >= LEAST_WORDS:
                length = min(len(words), SHARED_WORDS)
                self.runs.setdefault(length, set()).update(_runs(words, length))

    def is_prompt(self, text: str) -> bool:
        """Return whether a text is a question or prompt of the test, whatever its case and spaces."""
        return _words(text) in self.prompts

    def matches(self, text: str, prompt: str = "") -> bool:
        """Return whether prompt and text have 13 consecutive words of a question, or all of a shorter one's.

        Of questions with fewer than 8 words: whether the prompt is one.
        """
        words = _words(f"{prompt}\n{text}")
        return _words(prompt) in self.prompts or any(
            not runs.isdisjoint(_runs(words, length)) for length, runs in self.runs.items()
        )


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.lower()))


def _runs(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + length]) for start in range(len(words) - length + 1))


class _Windows:
    """Cuts consecutive documents, separated by the end-of-text token, into windows of equal length."""

    def __init__(self, tokenizer: Any, tokens: int) -> None:
        self.end, self.tokens, self.ids = end_token(tokenizer), tokens, list[int]()
        self.before = special_tokens(tokenizer, "a text")[0]
        self.length = tokens - len(self.before)
        if self.length < 1:
            raise InputError(f"corpus_tokens={tokens} leaves no room beside the special tokens; give more")

    def add(self, ids: Iterable[int]) -> Iterator[Text]:
        """Add a document's tokens, and yield the windows that are full."""
        self.ids += [*ids, self.end]
        while len(self.ids) >= self.length:
            yield Text([*self.before, *self.ids[: self.length]], max(1, len(self.before)))
            self.ids = self.ids[self.length :]


# ---------------------------------------------------------------- sources


def _files(corpus: str) -> list[Path]:
    """Return the files of a local corpus, in order; none for the name of a data set."""
    path = Path(corpus)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.is_file() and file.suffix in SUFFIXES]


def _rows(options: DistillOptions) -> Sequence[Mapping[str, Any]]:
    """Return the documents of a local corpus or of a data set."""
    corpus = str(options.corpus)
    if files := _files(corpus):
        return [row for file in files for row in _rows_of(file, options.corpus_field)]
    import datasets

    try:
        data = datasets.load_dataset(corpus, **{"split": "train", **options.corpus_options})
    except Exception as error:  # datasets raises errors of any type
        raise InputError(
            f"corpus={corpus} is neither a file or folder nor a data set that can be loaded ({first_line(error)}); "
            f"give its configuration in corpus_options, e.g. name=wikitext-2-raw-v1"
        ) from error
    if not isinstance(data, datasets.Dataset):
        raise InputError(f"corpus={corpus}: give one split in corpus_options, e.g. split=train")
    rows: Any = data
    return rows


def _rows_of(file: Path, field: str) -> list[dict[str, Any]]:
    if file.suffix == ".jsonl":
        rows: list[dict[str, Any]] = read_lines(file)
        return rows
    return [{field: text} for text in read_texts(file)]


def _name_of(index: int, corpus: str) -> str:
    """Return where a document of a corpus is, for messages: its file and line, or its number in a data set."""
    index_in_file = index
    for file in _files(corpus):
        lines = [0]
        if file.suffix == ".jsonl":
            lines = [number for number, _ in numbered_lines(file)]
        if index_in_file < len(lines):
            return f"line {lines[index_in_file]} of {file}" if lines[index_in_file] else str(file)
        index_in_file -= len(lines)
    return f"document {index + 1} of the corpus {corpus}"


def _fields(rows: Sequence[Mapping[str, Any]], index: int, options: DistillOptions) -> tuple[str, str]:
    """Return the prompt of a document, which may be empty, and its text; `InputError` if the document lacks them."""
    if mistake := _mistake(rows[index], options):
        raise InputError(f"{_name_of(index, str(options.corpus))}{mistake}")
    row = rows[index]
    texts = ["" if row[name] is None else str(row[name]) for name in _field_names(options).values()]
    return (texts[0], "".join(texts[1:])) if options.corpus_prompt else ("", texts[0])


def _field_names(options: DistillOptions) -> dict[str, str]:
    """Return the fields of a document that are read, by the options that name them."""
    fields = {"corpus_prompt": options.corpus_prompt} if options.corpus_prompt else {}
    return fields | ({"corpus_field": options.corpus_field} if options.corpus_answers == "data" else {})


def _mistake(row: Mapping[str, Any], options: DistillOptions) -> str:
    """Return what a document lacks, as the end of a message that begins with its name; empty if it lacks nothing."""
    fields = _field_names(options)
    for name in fields.values():
        if row.get(name) is not None and not isinstance(row[name], str):
            return f": {name} is {json.dumps(row[name], default=str):.40}, not a text; remove it"
        if name not in row:
            names = ", ".join(row) or "no fields"
            unanswered = ", or give corpus_answers=teacher for prompts without answers" if len(fields) > 1 else ""
            return (
                f" has no text in {name}; it has {names}: name them by {' and '.join(fields)}{unanswered}, or rename "
                f"them in this document"
            )
    return ""
