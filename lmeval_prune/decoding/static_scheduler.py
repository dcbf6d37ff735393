"""The decoding loop around a static step: prompts run in packed passes, all other tokens in the step.

The host starts a step before it reads the tokens of the one before, so the device does not wait for the host. The host
keeps its state in arrays, by slot. Before it changes the rows of the step, it reads all results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from collections.abc import Sized
from dataclasses import dataclass, field

import numpy as np

from lmeval_prune.decoding.sampling import uniforms
from lmeval_prune.decoding.scheduler import FREE_SHARE, Scheduler
from lmeval_prune.decoding.sequence import Sequence
from lmeval_prune.decoding.static_step import (
    ANSWER,
    COLUMNS,
    LEFT,
    LENGTH,
    MASK,
    SAMPLED,
    SLOT,
    TOKEN,
    StaticStep,
    StepResult,
)


@dataclass
class StaticScheduler(Scheduler):
    """The decoding loop with a static step; `schedule` has no drafts and `follow=0`."""

    step: StaticStep = field(kw_only=True)

    def __post_init__(self) -> None:
        slots = self.step.count
        self._free_slots = list(reversed(range(self.capacity)))
        self._by_slot: dict[int, Sequence] = {}
        self._prompts = np.zeros(slots, np.int64)  # lengths of the prompts
        self._masks = np.zeros(slots, np.int64)  # numbers of the masks
        self._answers = np.zeros((slots, self.runner.cache.length), np.int64)
        self._lengths = np.zeros(slots, np.int64)  # of the answers
        self._longest = np.zeros(slots, np.int64)  # largest lengths of the answers
        self._ends = np.full((slots, self.step.end_tokens), -1)
        self._running = np.zeros(slots, bool)
        self._is_sampled = np.zeros(slots, bool)  # the step draws the tokens
        self._by_host = np.zeros(slots, bool)  # the host chooses the tokens
        self._stops: list[tuple[str, ...]] = [()]  # distinct stop texts
        self._stop_numbers = np.zeros(slots, np.int64)
        self._may_stop = np.zeros((1, 0), np.int8)  # whether a token may complete a stop text, -1: unknown
        self._rows = np.zeros(0, np.int64)  # slots of the rows of the running step
        self._in_flight: deque[StepResult] = deque()

    @property
    def capacity(self) -> int:
        """Largest number of rows."""
        return self.step.capacity

    def _advance(self) -> None:
        """Start requests, or drop free rows, if it is time; then decode the next tokens."""
        starts_requests = self._starts_requests()
        if starts_requests or self._bucket(self.active) < self._bucket(self._rows):
            self._read_results()
            if starts_requests:
                self._admit()
            self._set_rows()
        if len(self._rows):
            self._step()

    def _unfinished_tokens(self) -> int:
        return int(self._lengths[self._running].sum())

    # ------------------------------------------------------------------ rows

    def _bucket(self, rows: Sized) -> int:
        return self.step.bucket(max(1, len(rows)))

    def _starts_requests(self) -> bool:
        """Return whether to run the prompts of waiting requests now."""
        if not (self.waiting or self.ready):
            return False
        free = self.capacity - len(self.active)
        return not self.active or (self.schedule.refill and free >= max(1, FREE_SHARE * self.capacity))

    def _free_slot(self) -> int:
        return self._free_slots.pop()

    def _release_slot(self, slot: int) -> None:
        self._free_slots.append(slot)
        self.active.remove(self._by_slot.pop(slot))

    def _set_rows(self) -> None:
        """Set the rows of the next step: all running sequences. All results must have been read."""
        new = [row for row in self.active if row.slot not in self._by_slot]
        for row in new:
            self._add(row)
        self.step.admit([row.slot for row in new], self._uniforms(new))
        self._rows = slots = np.array([row.slot for row in self.active if not row.ended], np.int64)
        columns = np.ones((COLUMNS, len(slots)), np.int64)
        lengths = self._lengths[slots]
        columns[TOKEN] = self._answers[slots, lengths - 1]
        columns[LENGTH], columns[ANSWER] = self._prompts[slots] + lengths - 1, lengths
        columns[SLOT], columns[MASK], columns[LEFT] = slots, self._masks[slots], self._longest[slots] - lengths
        columns[SAMPLED] = self._is_sampled[slots]
        self.step.set_rows(columns, self._ends[slots])

    def _add(self, row: Sequence) -> None:
        """Record a sequence whose prompt has run."""
        slot, params, count = row.slot, row.request.params, len(row.answer)
        self._by_slot[slot] = row
        self._prompts[slot], self._masks[slot], self._longest[slot] = len(row.request.prompt), row.mask, row.max_tokens
        self._answers[slot, :count], self._lengths[slot] = row.answer, count
        self._ends[slot] = -1
        self._ends[slot, : len(row.end_tokens)] = row.end_tokens
        self._running[slot] = not row.ended
        self._is_sampled[slot] = self._draws(row)
        self._by_host[slot] = not (params.takes_argmax or self._is_sampled[slot])
        if params.stop not in self._stops:
            self._stops.append(params.stop)
            unknown = np.full((1, self._may_stop.shape[1]), -1, np.int8)
            self._may_stop = np.concatenate([self._may_stop, unknown])
        self._stop_numbers[slot] = self._stops.index(params.stop)

    def _draws(self, row: Sequence) -> bool:
        """Return whether the step draws the tokens of a sequence."""
        warp = self.step.warp
        if warp is None or row.request.params.warping != warp.settings:
            return False
        return not self.deterministic or warp.temperature is not None

    def _uniforms(self, rows: Items[Sequence]) -> np.ndarray | None:
        """Return the random numbers of the tokens of each sequence, (sequences, tokens)."""
        if not self.step.warp:
            return None
        numbers = np.zeros((len(rows), self.runner.cache.length))
        for i, row in enumerate(rows):
            if self._is_sampled[row.slot]:
                numbers[i, : row.max_tokens] = uniforms(row.request.seed, 0, row.max_tokens)
        return numbers

    # ------------------------------------------------------------------ steps

    def _step(self) -> None:
        """Start a step, and read the results of the one before; its own if the host chooses or checks a token."""
        self._in_flight.append(self.step.start(len(self._rows)))
        self.statistics.steps += 1
        self._read_results(0 if self.deterministic or self._by_host[self._rows].any() else 1)

    def _read_results(self, remaining: int = 0) -> None:
        """Read the results of all steps but the last `remaining`."""
        while len(self._in_flight) > remaining:
            self._append(self._in_flight.popleft())

    def _append(self, result: StepResult) -> None:
        """Append the chosen tokens to the answers, and find those that have ended."""
        chosen, near = result.read()
        index = np.flatnonzero(self._running[self._rows])
        slots, tokens = self._rows[index], chosen[index]
        self._count(len(index))
        by_host = np.flatnonzero(self._by_host[slots] | near[index])
        for i in by_host:
            row = self._by_slot[int(slots[i])]
            row.answer = self._answer(row)
            choice = (int(tokens[i]), True) if row.request.params.takes_argmax else None  # True: a near-tie
            tokens[i] = self._choose(row, result.logits[index[i]], choice)
        self._answers[slots, self._lengths[slots]] = tokens
        self._lengths[slots] += 1
        ended = (self._lengths[slots] >= self._longest[slots]) | (tokens[:, None] == self._ends[slots]).any(1)
        stopped = self._has_stopped(slots, tokens, result.logits.shape[-1])
        self.step.stop(index[stopped & ~ended].tolist())
        for slot in slots[ended | stopped].tolist():
            row = self._by_slot[slot]
            row.answer, row.ended, self._running[slot] = self._answer(row), True, False
        if len(by_host):
            self._set_rows()

    def _count(self, rows: int) -> None:
        """Count a step's rows whose tokens are used."""
        self.statistics.step_rows += rows
        self.statistics.step_tokens += rows
        self.runner.layer_tokens += rows * self.runner.layers
        self.runner.head_tokens += rows

    def _has_stopped(self, slots: np.ndarray, tokens: np.ndarray, vocabulary: int) -> np.ndarray:
        """Return which answers contain a stop text; only those are decoded whose last token may complete it."""
        stopped, numbers = np.zeros(len(slots), bool), self._stop_numbers[slots]
        if not numbers.any():
            return stopped
        if self._may_stop.shape[1] < vocabulary:
            self._may_stop = np.full((len(self._stops), vocabulary), -1, np.int8)
        self._may_stop[0] = 0
        for i in np.flatnonzero(self._may_stop[numbers, tokens] < 0):
            stop, token = self._stops[numbers[i]], int(tokens[i])
            self._may_stop[numbers[i], token] = self.sampler.stopping.may_complete(token, stop)
        for i in np.flatnonzero(self._may_stop[numbers, tokens]):
            answer = self._answer(self._by_slot[int(slots[i])])
            stopped[i] = self.sampler.stopping.has_stop_text(answer, self._stops[numbers[i]])
        return stopped

    def _answer(self, row: Sequence) -> list[int]:
        """Return a running answer as a list."""
        tokens: list[int] = self._answers[row.slot, : self._lengths[row.slot]].tolist()
        return tokens
