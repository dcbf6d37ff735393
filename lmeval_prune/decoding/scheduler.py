"""The decoding loop: which sequences run in each forward pass, and the computation that they share.

All requests with the same prompt are a *prompt group*. Its *leader* is the request with the highest first pruned layer
(the unpruned request, if there is one). The leader decodes like any sequence; the inputs of the first pruned layers of
the other requests, its *followers*, are kept. While a follower chooses the leader's tokens, its computation below its
first pruned layer is the leader's. So it runs only the layers from there up, on the prompt and on a stretch of the
leader's answer in one pass, and compares its choices with the stretch. From the first different token on, it decodes
like any sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import torch

from lmeval_prune.decoding.drafts import Drafter
from lmeval_prune.decoding.model_runner import Chunk, ModelRunner
from lmeval_prune.decoding.sampling import Sampler, near_tied_argmax
from lmeval_prune.decoding.sequence import PromptGroup, Sequence
from lmeval_prune.settings import Natural, Settings

PASS = 2048  # largest number of prompt tokens in a pass, unless a single prompt is longer; running rows wait for it


@dataclass
class Statistics:
    """Counters of the engine's runs."""

    answers: int = 0
    answer_tokens: int = 0
    prompt_tokens: int = 0  # of leaders
    follow_tokens: int = 0  # tokens of prompts and leaders' answers that followers run from their first pruned layer up
    followed: int = 0  # answer tokens that followers share with their leader
    steps: int = 0
    step_rows: int = 0
    step_tokens: int = 0
    drafted: int = 0
    draft_accepted: int = 0
    alone: int = 0  # near-ties decided in a batch of one
    layer_tokens: int = 0  # tokens × layers
    head_tokens: int = 0  # tokens whose logits were computed


@dataclass(frozen=True)
class Schedule(Settings):
    """Switches and bounds of the engine's optimisations.

    Attributes:
        share: share the computation of equal prompts.
        follow: number of tokens of the leader's answer that a follower checks in a pass; 0 shares the prompt only.
        refill: start a waiting request as soon as a row is free; otherwise when the whole batch has ended.
        drafts: largest number of draft tokens of a row; 0 for none.
        budget: largest number of tokens in a decoding step with drafts. Default: measured, the number of tokens that
            take twice as long as one token.
    """

    share: bool = True
    follow: Natural = 16
    refill: bool = True
    drafts: Natural = 8
    budget: Natural | None = None


@dataclass
class Scheduler:
    """The decoding loop over prompt groups."""

    runner: ModelRunner
    waiting: deque[PromptGroup]  # groups that have not started
    sampler: Sampler
    statistics: Statistics
    schedule: Schedule  # with a budget, and `follow=0` unless `share`
    deterministic: bool  # decide near-ties in a batch of one
    max_leaders: int  # largest number of running leaders with followers
    on_step: Callable[[int], None] = lambda _: None  # called with the number of tokens in incomplete answers
    ready: deque[PromptGroup] = field(default_factory=deque)  # groups whose followers can start
    active: list[Sequence] = field(default_factory=list)  # sequence i is in slot i
    drafter: Drafter = field(default_factory=Drafter)

    def answers(self) -> Iterator[Sequence]:
        """Yield each sequence when it ends."""
        before = (self.statistics.layer_tokens, self.statistics.head_tokens)
        while self.waiting or self.ready or self.active:
            with torch.inference_mode():
                if self.schedule.refill or not self.active:
                    self._admit()
                if not any(row.ended for row in self.active):
                    self._step()
                self.on_step(sum(len(row.answer) for row in self.active))
                ended = self._remove_ended()
            self.statistics.layer_tokens = before[0] + self.runner.layer_tokens
            self.statistics.head_tokens = before[1] + self.runner.head_tokens
            yield from ended

    # ------------------------------------------------------------------ starting and ending

    def _admit(self) -> None:
        """Fill free slots: first with followers that can start, then with new leaders.

        If no group waits and the followers of all running leaders fit into the free slots, they start at once, before
        their leaders' answers are complete: steps with few rows would cost more than sharing saves. Running rows wait
        for at most one pass of prompts, and the followers' checks after it.
        """
        rows_wait = bool(self.active)
        while len(self.active) < self.runner.cache.count:
            if self.ready:
                self._start_followers()
            elif not self._start_leaders():
                leading = [row.group for row in self.active if row.kept_layers]
                free = self.runner.cache.count - len(self.active)
                if self.waiting or not leading or sum(len(group.followers) for group in leading) > free:
                    return
                for group in leading:
                    self._release_followers(group)
                continue
            if rows_wait:
                return

    def _has_room(self, row: Sequence, tokens: int, logits: int = 0) -> bool:
        """Return whether `row` fits into a pass that already has these numbers of tokens and logits."""
        fits = tokens + len(row.request.prompt) + (self.schedule.follow if logits else 0) <= PASS
        fits = fits and logits < PASS // 4
        return len(self.active) < self.runner.cache.count and (fits or not tokens)

    def _activate(self, row: Sequence) -> Sequence:
        """Assign the next slot to a sequence."""
        params = row.request.params
        row.slot = len(self.active)
        row.end_tokens = self.sampler.stopping.ends(params)
        row.max_tokens = min(params.max_new_tokens, self.runner.cache.length - len(row.request.prompt))
        self.active.append(row)
        return row

    def _start_leaders(self) -> bool:
        """Run the prompts of new leaders; return whether there were any."""
        leading = sum(bool(row.kept_layers) for row in self.active)
        rows: list[Sequence] = []
        tokens = 0
        while self.waiting and self._has_room(self.waiting[0].leader, tokens):
            group = self.waiting[0]
            if group.followers and leading >= self.max_leaders:
                break
            leading += bool(group.followers)
            tokens += len(group.leader.request.prompt)
            rows.append(self._activate(self.waiting.popleft().leader))
        if not rows:
            return False
        prompts = [row.request.prompt for row in rows]
        logits = self._forward(rows, prompts, [len(prompt) - 1 for prompt in prompts])
        choices = self._argmax(logits, rows)
        for i, row in enumerate(rows):
            row.cached = len(prompts[i])
            self.statistics.prompt_tokens += row.cached
            self._append_tokens(row, logits, slice(i, i + 1), [], choices)
            if not self.schedule.follow:
                self._release_followers(row.group)
        return True

    def _release_followers(self, group: PromptGroup) -> None:
        """Copy the leader's keys and values for its followers, and let them start."""
        if group.followers and not group.leader_tokens:
            leader = group.leader
            leader.kept_layers = frozenset()
            group.leader_tokens = leader.tokens if self.schedule.follow else list(leader.request.prompt)
            group.leader_cache = self.runner.cache.snapshot(leader.slot, leader.cached, group.followers[0].first_layer)
            self.ready.append(group)

    def _start_followers(self) -> None:
        """Start followers with the same first pruned layer: run that layer and those above."""
        first = self.ready[0].followers[0].first_layer
        rows: list[Sequence] = []
        inputs: dict[int, torch.Tensor] = {}  # by group, inputs of layer `first` at the leader's tokens except the last
        tokens = logits = 0
        for group in self.ready:
            queue = group.followers
            while queue and queue[0].first_layer == first and self._has_room(queue[0], tokens, logits):
                rows.append(self._activate(queue.popleft()))
                inputs.setdefault(id(group), torch.cat(group.layer_inputs[first]))
                tokens += len(rows[-1].request.prompt) + self.schedule.follow
                logits += 1 + self.schedule.follow
        following = rows
        while following:
            following = self._follow(following, first, [inputs[id(row.group)] for row in following])
        for row in rows:
            group = row.group
            self.runner.cache.restore(row.slot, group.leader_cache, min(row.cached, len(inputs[id(group)])), first)
            self.statistics.followed += _common_length(row.tokens, group.leader_tokens) - len(row.request.prompt)
        for group in [group for group in self.ready if not group.followers]:
            self.ready.remove(group)
            group.leader_cache, group.layer_inputs = [], {}

    def _follow(self, rows: list[Sequence], first: int, inputs: list[torch.Tensor]) -> list[Sequence]:
        """Run a stretch of the leader's answer in each row; return the rows that chose the same tokens."""
        stretches, hidden, skips = [], [], []
        for row, known in zip(rows, inputs, strict=True):
            prompt, start = len(row.request.prompt), row.cached
            stop = min(max(start, prompt) + self.schedule.follow, len(known))
            stretches.append(row.group.leader_tokens[start:stop])
            hidden.append(known[start:stop])
            skips.append(max(prompt - 1 - start, 0))  # logits are needed from the prompt's last token on
        logits = self._forward(rows, stretches, skips, first, torch.cat(hidden))
        choices = self._argmax(logits, rows)
        matching, line = [], 0
        for row, known, stretch, skip in zip(rows, inputs, stretches, skips, strict=True):
            leader_tokens, stop = row.group.leader_tokens, row.cached + len(stretch)
            lines = slice(line, line + len(stretch) - skip)
            line = lines.stop
            row.cached += skip + 1
            self._append_tokens(row, logits, lines, leader_tokens[row.cached : stop], choices)
            if not row.ended and stop < len(known) and row.tokens == leader_tokens[: stop + 1]:
                matching.append(row)
        self.statistics.follow_tokens += sum(map(len, stretches))
        return matching

    def _remove_ended(self) -> list[Sequence]:
        """Remove ended rows and fill their slots."""
        ended = [row for row in reversed(self.active) if row.ended]  # reversed: no ended row is moved
        for row in ended:
            row.group.unanswered -= 1
            if row is row.group.leader:
                self._release_followers(row.group)
            if self.schedule.drafts:
                self.drafter.add(row)
            self._fill_slot(row.slot)
        self.statistics.answers += len(ended)
        self.statistics.answer_tokens += sum(len(row.answer) for row in ended)
        return ended

    def _fill_slot(self, slot: int) -> None:
        """Fill a free slot, so that rows occupy the first slots, and longer rows earlier blocks.

        The longest row of each later block moves to the block before it; the last row fills the last block's slot.
        """
        block = self.runner.cache.block
        while later := self.active[(slot // block + 1) * block :][:block]:
            slot = self._move(max(later, key=lambda row: row.cached), slot)
        if slot < len(self.active) - 1:
            self._move(self.active[-1], slot)
        self.active.pop()

    def _move(self, row: Sequence, slot: int) -> int:
        """Move a row to a free slot; return the slot that becomes free."""
        self.runner.cache.move(row.slot, slot, row.cached)
        free, row.slot, self.active[slot] = row.slot, slot, row
        return free

    # ------------------------------------------------------------------ computing

    def _forward(
        self, rows: Items[Sequence], tokens: Items[Items[int]], skips: Items[int] | None = None, *args: Any
    ) -> torch.Tensor:
        """Run new tokens of some rows, keep the layer inputs for their followers, and return the logits."""
        batch = [
            Chunk(row.slot, row.cached, row.mask, new, skip, row.kept_layers)
            for row, new, skip in zip(rows, tokens, skips or [0] * len(rows), strict=True)
        ]
        logits, kept = self.runner.forward(batch, *args)
        for row, inputs in zip(rows, kept, strict=True):
            for layer, hidden in inputs.items():
                row.group.layer_inputs.setdefault(layer, []).append(hidden)
        return logits

    def _step(self) -> None:
        """Decode the next token of each row, or several with accepted drafts."""
        rows = self.active
        drafts: list[list[int]] = [[] for _ in rows]
        budget = self.schedule.budget or 0
        if self.schedule.drafts and budget > len(rows):
            drafts = self.drafter.propose(rows, self.schedule.drafts, budget - len(rows))
        logits = self._forward(rows, [[row.answer[-1], *draft] for row, draft in zip(rows, drafts, strict=True)])
        self.statistics.steps += 1
        self.statistics.step_rows += len(rows)
        self.statistics.step_tokens += len(logits)
        choices = self._argmax(logits, rows)
        line = 0
        for row, draft in zip(rows, drafts, strict=True):
            lines = slice(line, line + 1 + len(draft))
            line = lines.stop
            row.cached += 1
            appended = self._append_tokens(row, logits, lines, draft, choices)
            self.statistics.drafted += len(draft)
            self.statistics.draft_accepted += appended - 1
            for layer in row.kept_layers:  # without the inputs of rejected drafts
                pieces = row.group.layer_inputs[layer]
                pieces[-1] = pieces[-1][:appended]

    def _argmax(self, logits: torch.Tensor, rows: Items[Sequence]) -> list[tuple[int, bool]]:
        """Return for each line of the logits the argmax, and whether it is a near-tie to decide alone.

        Empty if no row takes the argmax.
        """
        if not any(row.request.params.takes_argmax for row in rows):
            return []
        tokens = logits.float().argmax(-1).tolist()  # in float32 for each model type, as in `generate`
        near_ties = near_tied_argmax(logits) if self.deterministic else [False] * len(tokens)
        return list(zip(tokens, near_ties, strict=True))

    def _append_tokens(
        self, row: Sequence, logits: torch.Tensor, lines: slice, draft: Items[int], choices: Items[tuple[int, bool]]
    ) -> int:
        """Choose tokens while they match the draft, append them to the answer, and return their number.

        `lines` are the row's lines of `logits` and of `choices` (see `_argmax`): one after the last token in the cache,
        and one after each draft token. Accepted draft tokens count as cached.
        """
        params, answer = row.request.params, row.answer
        for i, line in enumerate(range(lines.start, lines.stop)):
            token = self._choose(row, logits[line], choices[line] if params.takes_argmax else None)
            answer.append(token)
            row.ended = token in row.end_tokens or len(answer) >= row.max_tokens
            if params.stop and not row.ended:
                row.ended = self.sampler.stopping.has_stop_text(answer, params.stop)
            if row.ended or i == len(draft) or token != draft[i]:
                break
            row.cached += 1
        return i + 1

    def _choose(self, row: Sequence, logits: torch.Tensor, choice: tuple[int, bool] | None) -> int:
        """Choose the next token: the argmax of `choice`, or by the sampler; near-ties in a batch of one."""
        token, near_tie = choice or (-1, self.deterministic and self.sampler.near_tie(logits, row.request, row.answer))
        if near_tie:
            self.statistics.alone += 1
            logits = self.runner.forward_alone(row.tokens, row.mask)
            token = int(logits.float().argmax())
        return token if choice else self.sampler.choose(logits, row.request, row.answer)


def _common_length(tokens: Items[int], others: Items[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))
