"""The pool of a sweep: single heads, random sets of heads, any other variants, and samples of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lmeval_prune.architectures import Head, ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import HeadMask
from lmeval_prune.models.attempts import DENSE, Attempt, attempt_order, parse_temperature
from lmeval_prune.models.head_router import FixedOrderRouter
from lmeval_prune.models.variants import Variant
from lmeval_prune.sprint.options import SweepOptions
from lmeval_prune.sprint.outcomes import OutcomeStore
from lmeval_prune.sprint.policies import greedy_cover

EACH = "each"  # in `sampled`: every variant of the pool but the unpruned model
_SET = re.compile(r"(?P<heads>[1-9]\d{0,5})x(?P<count>[1-9]\d{0,5})")
_SAMPLED = re.compile(r"(?P<variant>.+)@(?P<temperature>[^@#]+)#(?P<first>\d{1,6})(?:-(?P<last>\d{1,6}))?", re.DOTALL)


class SweepPool(FixedOrderRouter):
    """The unpruned model and the variants that a sweep's options name, each decoded greedily, and samples.

    With `attempts` the pool has only those that some question has, unless a question has the whole pool.

    Args:
        options: `heads` or `layers`, `variants`, `random_sets`, `cover`, `sampled`, `attempts` and their settings.

    Attributes:
        question_fields: by task, the document field whose text `attempts` names; the sweep sets it.
    """

    def __init__(self, options: SweepOptions) -> None:
        super().__init__([])
        self.options = options
        self._sets = [_parse_set(text) for text in options.random_sets]
        self._samples = [_parse_samples(text) for text in options.sampled]
        self._listed = {question: _parse_attempts(question, names) for question, names in options.attempts.items()}
        self.question_fields: Mapping[str, str] = {}
        if options.cover:
            OutcomeStore(options.cover).check()

    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        """Look the variants up in the model; see the base class."""
        variants = {variant.name: variant for variant in self._variants(model_map)}
        labels = {variant.record.get("label"): name for name, variant in variants.items()}
        attempts = [DENSE, *variants]
        for text, temperature, draws in self._samples:
            names = [name for name in variants if name != DENSE]
            if text != EACH:
                variant = variants.get(labels.get(text, text)) or Variant.of(text, model_map, self.allowances)
                variants[variant.name] = variant
                names = [variant.name]
            attempts += [str(Attempt(name, temperature, draw)) for name in names for draw in draws]
        listed = list(dict.fromkeys(name for names in self._listed.values() for name in names))
        for name in dict.fromkeys(Attempt.named(attempt).variant for attempt in listed):
            if name != DENSE and name not in variants:
                variants[name] = Variant.named(name, model_map, allowances=self.allowances)
        attempts = listed if self._listed and all(self._listed.values()) else [*attempts, *listed]
        self.records = {name: variant.record for name, variant in variants.items() if variant.record}
        self._pool = attempt_order(attempts)
        self.variants = {DENSE: Variant(), **variants}

    @property
    def repeats(self) -> int:
        """Return the largest number of attempts at a question."""
        return max((len(names) or len(self.pool) for names in self._listed.values()), default=len(self.pool))

    def order(self, request: Any) -> Sequence[str]:
        """Return the attempts at a request's question, of which the last one is repeated up to `repeats`."""
        listed: list[str] = []
        if self._listed:
            listed = self._listed[str(request.doc[self.question_fields[request.task_name]])]
        names: Sequence[str] = listed or self.pool
        return [*names, *[names[-1]] * (self.repeats - len(names))]

    def _variants(self, model_map: ModelMap) -> Iterator[Variant]:
        options, allowances = self.options, self.allowances
        heads = options.heads or "+".join(f"L{layer}H*" for layer in options.pool_layers)
        for head in Head.parse(heads, model_map) if heads else ():
            yield Variant.of(str(head), model_map, allowances)
        for count, number in ((count, number) for count, sets in self._sets for number in range(sets)):
            mask = HeadMask.random(count, f"{options.random_seed}:{count}:{number}", model_map)
            label = f"{count} random heads #{number}" + (f", seed {options.random_seed}" if options.random_seed else "")
            yield Variant.of(str(mask), model_map, allowances, label)
        for label, value in options.variants.items():
            yield Variant.of(value, model_map, allowances, label)
        if options.cover:
            store = OutcomeStore(options.cover).read().greedy()
            for column in greedy_cover(store.z, min(options.cover_size, len(store.pool))):
                if (name := store.pool[column]) != DENSE:
                    yield Variant.named(name, model_map, store.variants.get(name), allowances)


def _parse_set(text: str) -> tuple[int, int]:
    """Parse `HEADSxCOUNT`."""
    match = _SET.fullmatch(text)
    if not match:
        raise InputError(f"random_sets={text!r} must be HEADSxSETS, e.g. 4x10 for ten sets of four heads")
    return int(match["heads"]), int(match["count"])


def _parse_attempts(question: str, names: Any) -> list[str]:
    """Check a question's attempts; `InputError` if they are no list of names."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise InputError(f"attempts: {question[:40]!r} needs a list of attempts, e.g. [dense, L5H3, dense@0.6#0]")
    return list(dict.fromkeys(str(Attempt.named(name)) for name in names))


def _parse_samples(text: str) -> tuple[str, float, Iterable[int]]:
    """Parse `VARIANT@TEMPERATURE#FIRST-LAST`."""
    match = _SAMPLED.fullmatch(text)
    if not match or int(match["last"] or match["first"]) < int(match["first"]):
        raise InputError(
            f"sampled={text!r} must be VARIANT@TEMPERATURE#FIRST-LAST, e.g. dense@0.6#0-15, or {EACH}@0.6#0 for every "
            f"variant of the pool"
        )
    draws = range(int(match["first"]), int(match["last"] or match["first"]) + 1)
    return match["variant"], parse_temperature(match["temperature"], f"sampled={text}"), draws
