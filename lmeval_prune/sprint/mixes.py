"""How a policy's order of variants becomes attempts: dense first, sampled, half and half, a temperature for each try.

A mix is written as entries joined by `+`, used in turn again and again; entries before a `|` are used once, first:

    next                  each try takes the next variant of the order, greedily (SPRINT)
    dense|next            the unpruned model first, then the order
    next@0.6              each try samples under its own variant
    next+dense@0.6        half and half: variants in turn with samples of the unpruned model
    dense|next@0.4+next@0.8   temperature by try
    dense@0.6             plain sampling
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice

from lmeval_prune.errors import InputError
from lmeval_prune.models.attempts import DENSE, Attempt, parse_temperature

NEXT = "next"
_ENTRY = re.compile(rf"(?P<what>{DENSE}|{NEXT})(?:@(?P<temperature>[^@+|]+))?")


@dataclass(frozen=True)
class Entry:
    """A kind of attempt."""

    what: str  # `dense`, or `next` for the next variant of the order
    temperature: float = 0.0

    @classmethod
    def parse(cls, text: str, mix: str) -> Entry:
        """Parse an entry of a mix."""
        match = _ENTRY.fullmatch(text.strip())
        if not match:
            raise InputError(
                f"mix={mix!r}: {text.strip()!r} is neither {DENSE} nor {NEXT}, alone or with a temperature, e.g. "
                f"{NEXT}@0.6; join entries by +, e.g. {DENSE}|{NEXT}"
            )
        temperature = match["temperature"]
        return cls(match["what"], parse_temperature(temperature, f"mix={mix}") if temperature else 0.0)

    def __str__(self) -> str:
        return f"{self.what}@{self.temperature:g}" if self.temperature else self.what


@dataclass(frozen=True)
class Mix:
    """Entries that are used once, then entries that are used in turn.

    Attributes:
        first: entries of the first attempts.
        repeated: entries of the other attempts, again and again.
    """

    first: tuple[Entry, ...] = ()
    repeated: tuple[Entry, ...] = (Entry(NEXT),)

    @classmethod
    def parse(cls, text: str) -> Mix:
        """Parse a mix; `InputError` if it is malformed."""
        first, bar, repeated = text.rpartition("|")
        parts = [tuple(Entry.parse(entry, text) for entry in part.split("+")) for part in (first, repeated) if part]
        if not repeated or (bar and not first) or "|" in first:
            raise InputError(f"mix={text!r} must be ENTRY+… or ENTRY+…|ENTRY+…, e.g. {NEXT} or {DENSE}|{NEXT}")
        mix = cls(*parts) if bar else cls((), parts[0])
        if Entry(DENSE) in mix.repeated:
            raise InputError(
                f"mix={text!r}: greedy {DENSE} gives the same answer again and again; write {DENSE}|… for once, or a "
                f"temperature"
            )
        return mix

    def __str__(self) -> str:
        parts = ["+".join(map(str, entries)) for entries in (self.first, self.repeated) if entries]
        return "|".join(parts)

    @property
    def is_sampling(self) -> bool:
        """Return whether all attempts are samples of the unpruned model at one temperature: exchangeable."""
        entries = {*self.first, *self.repeated}
        return len(entries) == 1 and next(iter(entries)).what == DENSE

    @property
    def uses_order(self) -> bool:
        """Return whether attempts depend on the order."""
        return any(entry.what == NEXT for entry in (*self.first, *self.repeated))

    def attempts(self, order: Sequence[str], count: int) -> list[Attempt]:
        """Return the first attempts for an order of variants.

        `next` skips a variant whose greedy answer an earlier attempt has. Samples begin again at the end of the order.
        """
        return list(islice(self._attempts(order), count))

    def _attempts(self, order: Sequence[str]) -> Iterator[Attempt]:
        draws: Counter[tuple[str, float]] = Counter()
        position = 0
        for entry in chain(self.first, cycle(self.repeated)):
            variant = DENSE
            if entry.what == NEXT:
                steps = range(position, position + len(order))
                free = (i for i in steps if entry.temperature or not draws[order[i % len(order)], 0.0])
                position = next(free, -1)
                if position < 0:
                    raise InputError(
                        f"the pool of mix={self} has only {len(order)} variants for greedy tries; use a larger pool, a "
                        f"task with fewer tries (docs/tasks.md, pass@k), or samples, e.g. {NEXT}@0.6"
                    )
                variant = order[position % len(order)]
                position += 1
            yield Attempt(variant, entry.temperature, draws[variant, entry.temperature])
            draws[variant, entry.temperature] += 1
