"""One run of the engine: which rows are decoded when, and what they share.

A *question* is all requests with one prompt. Its request with the highest first pruned layer (the unpruned
one, if there is one) leads. The leader decodes like any row, and what enters the layers at which its siblings
start to differ is kept. Each sibling then *follows* the leader: as long as it chooses the same tokens, all
that it needs below its first pruned layer is known, so it runs the layers from there up, on the prompt and on
a stretch of the leader's answer at once, and checks whether it would have written that stretch. Where it
differs, it goes on alone, as one row of the common batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lmeval_prune.architectures import AttentionMap
from lmeval_prune.decoding.lookup import GrowingLookup, Lookup
from lmeval_prune.decoding.machine import Machine, New
from lmeval_prune.decoding.requests import Request
from lmeval_prune.decoding.sampling import choose, is_plain, near_tie
from lmeval_prune.decoding.stops import Stops

PASS = 2048  # tokens of prompts in one pass (or one prompt): rows that are being decoded never wait for long


@dataclass
class Statistics:
    """What runs did, in counts."""

    answers: int = 0
    answer_tokens: int = 0
    prompt_tokens: int = 0  # of leaders
    follow_tokens: int = 0  # of prompts and leaders' answers, run by followers from their first layer up
    followed: int = 0  # answer tokens that followers took over from their leader
    steps: int = 0
    step_rows: int = 0
    step_tokens: int = 0
    drafted: int = 0
    draft_accepted: int = 0
    alone: int = 0  # near-ties decided alone
    layer_tokens: int = 0  # tokens × layers
    head_tokens: int = 0  # tokens whose logits were computed


@dataclass(eq=False)
class Row:
    """A request on its way.

    Attributes:
        request: what is decoded.
        mask: number of its mask.
        first: its first pruned layer; the number of layers, if nothing is pruned.
        question: the question it belongs to.
        slot: where its keys and values are.
        stored: how many tokens (of prompt and answer) the slot holds.
        answer: the tokens chosen so far; the last one is not stored yet.
        ended: whether the answer is complete.
        own: lookup in prompt and answer; made when drafts are first asked for.
    """

    request: Request
    mask: int
    first: int
    question: Question = field(init=False)
    slot: int = -1
    stored: int = 0
    answer: list[int] = field(default_factory=list)
    ended: bool = False
    own: GrowingLookup | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.request.prompt, *self.answer]


@dataclass(eq=False)
class Question:
    """The requests with one prompt.

    Attributes:
        leader: the row that is decoded first.
        followers: rows that have not started, by first pruned layer, highest first.
        led: the tokens that followers follow: the leader's prompt, and its answer.
        kept: layer → what entered it at the tokens of `led`, in pieces (tokens, width).
        shared: the leader's keys and values below the highest first layer of a follower.
        answers: lookup in the answers so far, for drafts.
        left: requests without an answer yet.
    """

    leader: Row
    followers: deque[Row]
    led: list[int] = field(default_factory=list)
    kept: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    shared: list[torch.Tensor] = field(default_factory=list)
    answers: Lookup | None = None
    left: int = 0

    @classmethod
    def of(cls, rows: list[Row]) -> Question:
        """The question of some rows; the first of those with the highest first layer leads."""
        leader, *others = sorted(rows, key=lambda row: -row.first)
        question = cls(leader, deque(others), left=len(rows))
        for row in rows:
            row.question = question
        return question


def questions(requests: Sequence[Request], attention: AttentionMap, share: bool) -> tuple[list[Question], list[Any]]:
    """Group requests by prompt (each by itself unless `share`), and list their masks in the order of their numbers."""
    order = {layer.name: place for place, layer in enumerate(attention)}
    numbers: dict[Any, tuple[int, int]] = {None: (0, len(attention))}
    groups: dict[Any, list[Row]] = {}
    for place, request in enumerate(requests):
        if request.mask and request.mask not in numbers:
            lost = [order[layer.name] for layer, _ in request.mask.by_layer(attention)]
            numbers[request.mask] = (len(numbers), min(lost, default=len(attention)))
        groups.setdefault(request.prompt if share else place, []).append(Row(request, *numbers[request.mask]))
    return [Question.of(rows) for rows in groups.values()], list(numbers)


@dataclass
class Run:
    """Decodes questions on a machine; see `Engine` for the options."""

    machine: Machine
    waiting: deque[Question]
    stops: Stops
    statistics: Statistics
    follow: int
    refill: bool
    drafts: int
    budget: int
    deterministic: bool
    leaders: int  # with followers, at most, at a time
    ready: deque[Question] = field(default_factory=deque)  # their leaders have gone ahead, followers wait
    active: list[Row] = field(default_factory=list)  # row i is in slot i

    def answers(self) -> Iterator[Row]:
        """Rows as they end."""
        before = (self.statistics.layer_tokens, self.statistics.head_tokens)
        while self.waiting or self.ready or self.active:
            with torch.inference_mode():
                if self.refill or not self.active:
                    self._admit()
                if not any(row.ended for row in self.active):
                    self._step()
                ended = self._leave()
            self.statistics.layer_tokens = before[0] + self.machine.layer_tokens
            self.statistics.head_tokens = before[1] + self.machine.head_tokens
            yield from ended

    # ------------------------------------------------------------------ coming and going

    def _admit(self) -> None:
        """Fill free slots: first with followers whose leader has gone ahead, then with new leaders.

        Where these are all there are, and slots for all their followers are free, followers do not wait for the rest of
        their leaders' answers: steps with few rows cost more than what they would take over. Rows that are being
        decoded wait for one pass of prompts, and for its followers to check their leaders' answers.
        """
        others_wait = bool(self.active)
        while len(self.active) < self.machine.slots.count:
            if self.ready:
                self._start_followers()
            elif not self._start_leaders():
                leading = [row.question for row in self.active if self._kept_of(row)]
                free = self.machine.slots.count - len(self.active)
                if self.waiting or not leading or sum(len(question.followers) for question in leading) > free:
                    return
                for question in leading:
                    self._let_follow(question)
                continue
            if others_wait:
                return

    def _room(self, row: Row, tokens: int, logits: int = 0) -> bool:
        """Whether `row` can start in a pass that has so many tokens, and computes so many logits, already."""
        fits = tokens + len(row.request.prompt) + (self.follow if logits else 0) <= PASS and logits < PASS // 4
        return len(self.active) < self.machine.slots.count and (fits or not tokens)

    def _enter(self, row: Row) -> Row:
        row.slot = len(self.active)
        self.active.append(row)
        return row

    def _start_leaders(self) -> bool:
        """Run the prompts of new leaders, if there are any; no more lead at once than memory holds what is kept of."""
        leading = sum(bool(self._kept_of(row)) for row in self.active)
        rows: list[Row] = []
        tokens = 0
        while self.waiting and self._room(self.waiting[0].leader, tokens):
            question = self.waiting[0]
            if question.followers and leading >= self.leaders:
                break
            leading += bool(question.followers)
            tokens += len(question.leader.request.prompt)
            rows.append(self._enter(self.waiting.popleft().leader))
        prompts = [row.request.prompt for row in rows]
        if rows:
            logits = self._forward(rows, prompts, [len(prompt) - 1 for prompt in prompts])
            picks = self._picks(logits, rows)
        for i, row in enumerate(rows):
            row.stored = len(prompts[i])
            self.statistics.prompt_tokens += row.stored
            self._take(row, logits[i : i + 1], [], picks[i : i + 1])
            if not self.follow:
                self._let_follow(row.question)
        return bool(rows)

    def _let_follow(self, question: Question) -> None:
        """Keep what followers need of their leader's slot, and let them start."""
        if question.followers and not question.led:
            leader = question.leader
            question.led = leader.tokens if self.follow else list(leader.request.prompt)
            question.shared = self.machine.slots.take(leader.slot, leader.stored, question.followers[0].first)
            self.ready.append(question)

    def _start_followers(self) -> None:
        """Start followers with one first layer: run the prompt and the leader's answer from there up."""
        first = self.ready[0].followers[0].first
        rows: list[Row] = []
        known: dict[int, torch.Tensor] = {}  # what entered layer `first` at all tokens of `led` but the last
        tokens = logits = 0
        for question in self.ready:
            while (
                question.followers
                and question.followers[0].first == first
                and self._room(question.followers[0], tokens, logits)
            ):
                rows.append(self._enter(question.followers.popleft()))
                known.setdefault(id(question), torch.cat(question.kept[first]))
                tokens += len(rows[-1].request.prompt) + self.follow
                logits += 1 + self.follow
        following = rows
        while following:
            following = self._follow(following, first, [known[id(row.question)] for row in following])
        for row in rows:
            question = row.question
            self.machine.slots.put(row.slot, question.shared, min(row.stored, len(known[id(question)])), first)
            self.statistics.followed += _common(row.tokens, question.led) - len(row.request.prompt)
        for question in [question for question in self.ready if not question.followers]:
            self.ready.remove(question)
            question.shared, question.kept = [], {}

    def _follow(self, rows: list[Row], first: int, known: list[torch.Tensor]) -> list[Row]:
        """Check a stretch of the leader's answer in each row; returns the rows that would have written it all."""
        stretches, hidden, skips = [], [], []
        for row, kept in zip(rows, known, strict=True):
            prompt, place = len(row.request.prompt), row.stored
            until = min(max(place, prompt) + self.follow, len(kept))
            stretches.append(row.question.led[place:until])
            hidden.append(kept[place:until])
            skips.append(max(prompt - 1 - place, 0))  # from the prompt's last token on, logits say what comes next
        logits = self._forward(rows, stretches, skips, first, torch.cat(hidden))
        picks = self._picks(logits, rows)
        still, at = [], 0
        for row, kept, stretch, skip in zip(rows, known, stretches, skips, strict=True):
            led, until = row.question.led, row.stored + len(stretch)
            lines = slice(at, at + len(stretch) - skip)
            at = lines.stop
            row.stored += skip + 1
            self._take(row, logits[lines], led[row.stored : until], picks[lines])
            if not row.ended and until < len(kept) and row.tokens == led[: until + 1]:
                still.append(row)
        self.statistics.follow_tokens += sum(map(len, stretches))
        return still

    def _leave(self) -> list[Row]:
        """Take ended rows out; the last rows move into their slots."""
        ended = [row for row in reversed(self.active) if row.ended]  # reversed: no ended row is moved
        for row in ended:
            question = row.question
            question.left -= 1
            if row is question.leader:
                self._let_follow(question)
            if self.drafts and question.left:
                question.answers = question.answers or Lookup()
                question.answers.add(row.tokens)
            self._close(row.slot)
        self.statistics.answers += len(ended)
        self.statistics.answer_tokens += sum(len(row.answer) for row in ended)
        return ended

    def _close(self, hole: int) -> None:
        """Fill a free slot: rows stay in the first slots, and longer ones stay, block by block, before shorter ones.

        Each block gives its longest row to the block before it, the last one the last row.
        """
        block = self.machine.slots.block
        while following := self.active[(hole // block + 1) * block :][:block]:
            hole = self._move(max(following, key=lambda row: row.stored), hole)
        if hole < len(self.active) - 1:
            self._move(self.active[-1], hole)
        self.active.pop()

    def _move(self, row: Row, slot: int) -> int:
        """Move a row to a free slot; returns the slot that becomes free."""
        self.machine.slots.move(row.slot, slot, row.stored)
        free, row.slot, self.active[slot] = row.slot, slot, row
        return free

    # ------------------------------------------------------------------ computing

    def _kept_of(self, row: Row) -> frozenset[int]:
        """Layers whose input is kept for followers while this row runs."""
        question = row.question
        if row is not question.leader or question.led:
            return frozenset()
        return frozenset(follower.first for follower in question.followers)

    def _forward(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], skips: Sequence[int] | None = None, *args: Any
    ) -> torch.Tensor:
        """Run new tokens of some rows, keep what their followers need, and return the logits."""
        batch = [
            New(row.slot, row.stored, row.mask, new, skip, self._kept_of(row))
            for row, new, skip in zip(rows, tokens, skips or [0] * len(rows), strict=True)
        ]
        logits, kept = self.machine.forward(batch, *args)
        for row, found in zip(rows, kept, strict=True):
            for layer, hidden in found.items():
                row.question.kept.setdefault(layer, []).append(hidden)
        return logits

    def _step(self) -> None:
        """One more token for every row, or several where drafts are right."""
        rows = self.active
        drafts = self._proposals(rows)
        logits = self._forward(rows, [[row.answer[-1], *draft] for row, draft in zip(rows, drafts, strict=True)])
        self.statistics.steps += 1
        self.statistics.step_rows += len(rows)
        self.statistics.step_tokens += len(logits)
        picks = self._picks(logits, rows)
        at = 0
        for row, draft in zip(rows, drafts, strict=True):
            lines = slice(at, at + 1 + len(draft))
            at = lines.stop
            row.stored += 1
            taken = self._take(row, logits[lines], draft, picks[lines])
            self.statistics.drafted += len(draft)
            self.statistics.draft_accepted += taken - 1
            for layer in self._kept_of(row):  # without what was kept for rejected drafts
                pieces = row.question.kept[layer]
                pieces[-1] = pieces[-1][:taken]

    def _proposals(self, rows: Sequence[Row]) -> list[list[int]]:
        """Drafts by lookup, as long as the step stays within the budget."""
        found: list[list[int]] = [[] for _ in rows]
        room = self.budget - len(rows)
        if not self.drafts or room <= 0:
            return found
        each = min(self.drafts, max(1, room // len(rows)))
        for i, row in enumerate(rows):
            left = min(each, room, self._limit(row) - len(row.answer) - 1)
            if left <= 0:
                continue
            tokens = row.tokens
            row.own = row.own or GrowingLookup()
            row.own.extend(tokens[len(row.own.text) :])
            size, found[i] = row.own.propose(tokens, left)
            if row.question.answers:
                longer, other = row.question.answers.propose(tokens, left)
                found[i] = other if longer >= size else found[i]
            room -= len(found[i])
        return found

    def _limit(self, row: Row) -> int:
        return min(row.request.settings.max_new_tokens, self.machine.slots.length - len(row.request.prompt))

    def _picks(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        """The largest logit's token for each line, if some row wants just that."""
        if any(is_plain(row.request.settings) for row in rows):
            # as `generate` does it: float32, whatever the model's type
            return logits.float().argmax(-1).tolist()
        return [-1] * len(logits)

    def _take(self, row: Row, logits: torch.Tensor, draft: Sequence[int], picks: Sequence[int]) -> int:
        """Choose tokens from the logits, as long as the drafts are right.

        Args:
            row: its `stored` counts the tokens up to the first of these logits; right drafts are added to it.
            logits: (1 + drafts, vocabulary).
            draft: tokens that the logits after the first assume.
            picks: tokens of the largest logits.

        Returns:
            How many tokens were added to the answer.
        """
        for i, pick in enumerate(picks):
            token = self._choose(row, logits[i], pick)
            row.answer.append(token)
            row.ended = self.stops.ended(row.answer, row.request.settings) or len(row.answer) >= self._limit(row)
            if row.ended or i == len(draft) or token != draft[i]:
                break
            row.stored += 1
        return i + 1

    def _choose(self, row: Row, logits: torch.Tensor, pick: int) -> int:
        if self.deterministic and near_tie(logits, row.request, row.answer):
            self.statistics.alone += 1
            logits = self.machine.alone(row.tokens, row.mask)
            pick = int(logits.float().argmax())
        return pick if is_plain(row.request.settings) else choose(logits, row.request, row.answer)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
