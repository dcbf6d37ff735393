"""Read a text corpus as training text: windows of tokens, or prompts with answers."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmeval_prune.artefacts import content_digest, digest, read_lines
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.pruners.calibration import encode, special_tokens

SUFFIXES = (".txt", ".jsonl")
SHARED_WORDS = 13  # consecutive words of a test question that exclude a document, or all of a shorter question


class Text(NamedTuple):
    """Token ids of a text; those from `start` on are learned."""

    ids: list[int]
    start: int


@dataclass(frozen=True)
class Corpus:
    """Texts of a corpus, in an order drawn by the seed.

    Attributes:
        texts: windows, or prompts with answers.
        note: for `distillation.json`.
    """

    texts: list[Text]
    note: dict[str, Any]


def corpus_identity(corpus: str) -> str:
    """Return a digest of the files of a local corpus; the name of a data set."""
    files = _files(corpus)
    return digest({path.name: content_digest(path) for path in files}) if files else corpus


def check_corpus(options: DistillOptions) -> None:
    """Raise an `InputError` if the corpus has no suitable files, or options do not suit it."""
    path = Path(str(options.corpus))
    if _files(str(path)):
        if options.corpus_options:
            raise InputError(f"corpus_options are for data sets, and {path} is a local corpus; leave them out")
    elif path.exists():
        raise InputError(f"corpus={path} has no files {' or '.join(SUFFIXES)}; name another folder or file")


def read_corpus(options: DistillOptions, tokenizer: Any, test: Iterable[str], as_prompt: Any = str) -> Corpus:
    """Read the texts of a corpus that share no 13 words with a test question.

    Args:
        options: the corpus, and how much of it is read.
        tokenizer: the model's tokenizer.
        test: test questions.
        as_prompt: function that puts a prompt into the chat template.

    Raises:
        InputError: the corpus cannot be read, or has less than a window.
    """
    rows = _rows(options)
    order = list(range(len(rows)))
    random.Random(options.seed).shuffle(order)
    search, skipped = QuestionSearch(test), 0
    texts: list[Text] = []
    windows = _Windows(tokenizer, options.corpus_tokens)
    used = 0
    for index in order:
        prompt, text = _fields(rows[index], options)
        used += 1
        if search.found_in(f"{prompt}\n{text}"):
            skipped += 1
        elif options.corpus_prompt:
            texts += _answered(tokenizer, as_prompt(prompt), text, options.max_length)
        else:
            texts += windows.add(text)
        if len(texts) >= options.corpus_texts:
            break
    texts = texts[: options.corpus_texts]
    if not texts:
        raise InputError(
            f"the corpus {options.corpus} has no text of {options.corpus_tokens} tokens in its {used} documents; give "
            f"fewer corpus_tokens, or another corpus"
        )
    note = {"name": options.corpus, "texts": len(texts), "documents": used, "with_test_questions": skipped}
    return Corpus(texts, note)


class QuestionSearch:
    """Test questions, which texts are searched for."""

    def __init__(self, questions: Iterable[str]) -> None:
        self.runs: dict[int, set[tuple[str, ...]]] = {}
        for question in questions:
            words = _words(question)
            length = min(len(words), SHARED_WORDS)
            self.runs.setdefault(length, set()).update(_runs(words, length))

    def found_in(self, text: str) -> bool:
        """Return whether a text has 13 consecutive words of a question, or all words of a shorter one."""
        words = _words(text)
        return any(not runs.isdisjoint(_runs(words, length)) for length, runs in self.runs.items())


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _runs(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + length]) for start in range(len(words) - length + 1))


class _Windows:
    """Cuts consecutive documents, separated by the end-of-text token, into windows of equal length."""

    def __init__(self, tokenizer: Any, tokens: int) -> None:
        self.tokenizer, self.ids = tokenizer, list[int]()
        self.before = special_tokens(tokenizer, "a text")[0]
        self.length = tokens - len(self.before)
        if self.length < 1:
            raise InputError(f"corpus_tokens={tokens} leaves no room beside the special tokens; give more")

    def add(self, text: str) -> Iterator[Text]:
        """Add a document, and yield the windows that are full."""
        self.ids += [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        while len(self.ids) >= self.length:
            yield Text([*self.before, *self.ids[: self.length]], max(1, len(self.before)))
            self.ids = self.ids[self.length :]


def _answered(tokenizer: Any, prompt: str, answer: str, most: int) -> list[Text]:
    """Tokenize a prompt with its answer; nothing if they are too long."""
    ids = encode(tokenizer, prompt)
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    text = Text([*ids, *answer_ids, tokenizer.eos_token_id], len(ids))
    return [text] if len(text.ids) <= most else []


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
    try:
        return [{field: file.read_text(encoding="utf-8")}]
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not UTF-8 ({first_line(error)}); convert it, e.g. iconv -f latin1 -t utf-8"
        ) from None


def _fields(row: Mapping[str, Any], options: DistillOptions) -> tuple[str, str]:
    """Return the prompt of a document, which may be empty, and its text."""
    names = [options.corpus_prompt, options.corpus_field] if options.corpus_prompt else [options.corpus_field]
    for name in names:
        if not isinstance(row.get(name), str):
            raise InputError(
                f"a document of the corpus {options.corpus} has no text in {name}; it has "
                f"{', '.join(row) or 'no fields'}: name them by corpus_field and corpus_prompt"
            )
    texts = [row[name] for name in names]
    return (texts[0], texts[1]) if options.corpus_prompt else ("", texts[0])
