"""The decoding loop: which sequences run in each forward pass, and the computation that they share.

All requests with the same prompt are a *prompt group*. One of them is the *leader*: the unpruned request, or else the
one whose first pruned layer is highest. The others are its *followers*.

The leader decodes like any sequence. As long as a follower chooses the leader's tokens, both compute the same below the
follower's first pruned layer. So the engine keeps the leader's inputs to that layer, and the follower starts there: one
pass runs the prompt and a few tokens of the leader's answer, and compares the follower's choices with these tokens.
After the first difference, the follower decodes like any sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import torch

from lmeval_prune.architectures.precision import refuse_nan
from lmeval_prune.config import Natural, Settings
from lmeval_prune.decoding.groups import PromptGroup, Sequence
from lmeval_prune.decoding.model_runner import Chunk, ModelRunner
from lmeval_prune.decoding.sampling import Sampler, near_tied_argmax
from lmeval_prune.decoding.tree import common_length

FREE_SHARE = 0.04  # share of free rows from which waiting prompts are started: a pass delays all running rows
LEAST_PASS = 512  # tokens of a pass from which matrix products are nearly as fast as they get


@dataclass(frozen=True)
class Schedule(Settings):
    """Switches and bounds of the engine's optimisations.

    Attributes:
        share: share the computation of equal prompts.
        prefix: run the first tokens of several prompts once for each mask, if this saves at least this number of
            tokens; 0 runs each prompt as a whole.
        copied_prefix: largest number of tokens of a prefix that is copied into the slots of its sequences; longer ones
            are stored once, and their attention is computed separately.
        follow: number of tokens of the leader's answer that a follower checks in a pass; 0 shares the prompt only.
        refill: start a waiting request as soon as a row is free; otherwise when the whole batch has ended.
    """

    share: bool = True
    prefix: Natural = 64
    copied_prefix: Natural = 128
    follow: Natural = 16
    refill: bool = True


@dataclass
class Scheduler:
    """The decoding loop over prompt groups."""

    runner: ModelRunner
    waiting: deque[PromptGroup]  # groups that have not started
    sampler: Sampler
    schedule: Schedule  # `follow` is 0 if `share` is false
    deterministic: bool  # decide near-ties in a batch of one
    max_leaders: int  # largest number of leaders with followers that run at the same time
    ready: deque[PromptGroup] = field(default_factory=deque)  # groups whose followers can start
    active: list[Sequence] = field(default_factory=list)  # sequence i is in slot i

    def __post_init__(self) -> None:
        self.capacity, self.statistics = self.runner.cache.count, self.runner.statistics

    def answers(self) -> Iterator[Sequence]:
        while self.waiting or self.ready or self.active:
            with torch.inference_mode():
                if self._starts_requests():
                    self._admit()
                if not any(row.ended for row in self.active):
                    self._step()
                ended = self._remove_ended()
            yield from ended

    # ------------------------------------------------------------------ starting and ending

    def _admit(self) -> None:
        """Fill free slots: first with followers that can start, then with new leaders.

        If no leader can start, the followers of running leaders start before their leaders' answers are complete, as
        far as they fit into the free slots: steps with few rows would cost more than sharing saves. If rows are
        running, only one pass with new prompts (and the followers' checks after it) delays them.
        """
        was_running = bool(self.active)
        while len(self.active) < self.capacity:
            if self.ready:
                self._start_followers()
            elif not self._start_leaders():
                groups = self._groups_that_fit()
                if not groups:
                    return
                for group in groups:
                    self._release_followers(group)
                continue
            if was_running:
                return

    def _starts_requests(self) -> bool:
        """Return whether to run prompts now: beside running rows, a small pass waits for requests that can join it."""
        if not (self.active and self.schedule.refill):
            return not self.active
        rows = self._next_rows()
        if not rows:
            return bool(self._groups_that_fit())
        tokens = sum(len(row.prompt) for row in rows)
        is_full = len(self.active) + len(rows) == self.capacity
        others_may_join = is_full or any(row.kept_layers for row in self.active)
        return tokens >= LEAST_PASS or len(rows) >= FREE_SHARE * self.capacity or not others_may_join

    def _next_rows(self) -> list[Sequence]:
        """Return the requests that can start in the free slots: followers with the same first layer, or leaders."""
        if not self.ready:
            return self._next_leaders()
        first = self.ready[0].followers[0].first_layer
        rows = (row for group in self.ready for row in group.followers if row.first_layer == first)
        return list(islice(rows, self.capacity - len(self.active)))

    def _next_leaders(self) -> list[Sequence]:
        """Return the leaders that can start in the free slots, at most `max_leaders` with followers."""
        leading, rows = sum(bool(row.kept_layers) for row in self.active), []
        for group in islice(self.waiting, self.capacity - len(self.active)):
            if group.followers and leading >= self.max_leaders:
                break
            leading += bool(group.followers)
            rows.append(group.leader)
        return rows

    def _groups_that_fit(self) -> list[PromptGroup]:
        """Return groups of running leaders whose followers fit into the free slots."""
        leading = [row.group for row in self.active if row.kept_layers]
        rows = accumulate((len(group.followers) for group in leading), initial=len(self.active))
        return [group for group, end in zip(leading, list(rows)[1:], strict=True) if end <= self.capacity]

    def _has_room(self, row: Sequence, tokens: int, logits: int = 0) -> bool:
        """Return whether `row` fits into a pass that already has these numbers of tokens and logits."""
        if len(self.active) >= self.capacity:
            return False
        if not tokens:  # the first row of a pass always fits
            return True
        checked = self.schedule.follow if logits else 0  # tokens of the leader's answer
        return tokens + len(row.prompt) + checked <= self.runner.largest_pass and logits < self.runner.largest_pass // 4

    def _activate(self, row: Sequence) -> Sequence:
        row.slot = len(self.active)
        row.end_tokens = self.sampler.stopping.ends(row.request.params)
        shared = row.group.prefix
        prefix = shared.for_mask(row.mask, self.runner) if shared else None
        self.runner.cache.begin(row.slot, prefix, is_copied=bool(shared and shared.is_copied))
        self.active.append(row)
        return row

    def _start_leaders(self) -> bool:
        rows: list[Sequence] = []
        tokens = 0
        for leader in self._next_leaders():
            if not self._has_room(leader, tokens):
                break
            tokens += len(leader.prompt)
            self.waiting.popleft()
            rows.append(self._activate(leader))
        if not rows:
            return False
        prompts = [row.prompt for row in rows]
        logits = self._forward(rows, prompts, [len(prompt) - 1 for prompt in prompts])
        choices = self._argmax(logits, rows)
        for i, row in enumerate(rows):
            row.cached = len(prompts[i])
            self.statistics.prompt_tokens += row.cached
            self._append_tokens(row, logits, i, choices)
            if not self.schedule.follow:
                self._release_followers(row.group)
        return True

    def _release_followers(self, group: PromptGroup) -> None:
        """Copy the leader's keys and values for its followers, and let them start (once per group)."""
        if group.followers and not group.leader_tokens:
            leader = group.leader
            leader.kept_layers = frozenset()
            group.leader_tokens = leader.tokens if self.schedule.follow else list(leader.prompt)
            group.leader_cache = self.runner.cache.snapshot(leader.slot, leader.cached, group.followers[0].first_layer)
            self.ready.append(group)

    def _start_followers(self) -> None:
        """Start followers with the same first pruned layer: run that layer and those above."""
        first = self.ready[0].followers[0].first_layer
        rows: list[Sequence] = []
        # by group: inputs of layer `first` at all tokens of the leader but the last one, which the leader never ran
        inputs: dict[int, torch.Tensor] = {}
        tokens = logits = 0
        for group in self.ready:
            queue = group.followers
            while queue and queue[0].first_layer == first and self._has_room(queue[0], tokens, logits):
                rows.append(self._activate(queue.popleft()))
                inputs.setdefault(id(group), torch.cat(group.layer_inputs[first]))
                tokens += len(rows[-1].prompt) + self.schedule.follow
                logits += 1 + self.schedule.follow
        following = rows  # rows that have chosen the leader's tokens until now
        while following:
            following = self._follow(following, first, [inputs[id(row.group)] for row in following])
        for row in rows:
            group = row.group
            common = min(row.cached, len(inputs[id(group)]))
            self.runner.cache.restore(row.slot, group.leader_cache, common, first)
            self.statistics.followed += common_length(row.tokens, group.leader_tokens) - len(row.prompt)
        for group in [group for group in self.ready if not group.followers]:
            self.ready.remove(group)
            group.leader_cache, group.layer_inputs = [], {}

    def _follow(self, rows: list[Sequence], first: int, inputs: list[torch.Tensor]) -> list[Sequence]:
        """Run the next tokens of the leader in each row; return the rows that chose the same tokens."""
        leading, hidden, skips = [], [], []
        for row, layer_inputs in zip(rows, inputs, strict=True):
            prompt, start = len(row.prompt), row.cached
            stop = min(max(start, prompt) + self.schedule.follow, len(layer_inputs))
            leading.append(row.group.leader_tokens[start:stop])
            hidden.append(layer_inputs[start:stop])
            skips.append(max(prompt - 1 - start, 0))  # logits are needed from the prompt's last token on
        logits = self._forward(rows, leading, skips, first, torch.cat(hidden))
        choices = self._argmax(logits, rows)
        matching, first_entry = [], 0
        for row, layer_inputs, tokens, skip in zip(rows, inputs, leading, skips, strict=True):
            leader_tokens, stop = row.group.leader_tokens, row.cached + len(tokens)
            row.cached += skip + 1
            self._append_tokens(row, logits, first_entry, choices, leader_tokens[row.cached : stop])
            first_entry += len(tokens) - skip
            if not row.ended and stop < len(layer_inputs) and row.tokens == leader_tokens[: stop + 1]:
                matching.append(row)
        self.statistics.follow_tokens += sum(map(len, leading))
        return matching

    def _remove_ended(self) -> list[Sequence]:
        ended = [row for row in reversed(self.active) if row.ended]  # reversed: no ended row is moved
        for row in ended:
            if row.group.prefix:
                row.group.prefix.answered()
            if row is row.group.leader:
                self._release_followers(row.group)
            self._release_slot(row.slot)
        self.statistics.answers += len(ended)
        self.statistics.answer_tokens += sum(len(row.answer) for row in ended)
        return ended

    def _release_slot(self, slot: int) -> None:
        """Close the gap at a slot that becomes free, so that n running rows are in the first n slots.

        Longer rows stay in earlier blocks: the longest row of the next block moves to the free slot, then the same for
        the slot that it leaves. In the last block, the last row moves.
        """
        block = self.runner.cache.block or 1 << 30
        while next_block := self.active[(start := (slot // block + 1) * block) : start + block]:
            slot = self._move(max(next_block, key=lambda row: row.cached), slot)
        if slot < len(self.active) - 1:
            self._move(self.active[-1], slot)
        self.active.pop()
        self.runner.cache.prefixes[len(self.active)] = None

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
        logits, layer_inputs = self.runner.forward(batch, *args)
        refuse_nan(logits[:, 0])
        for row, inputs in zip(rows, layer_inputs, strict=True):
            for layer, hidden in inputs.items():
                row.group.layer_inputs.setdefault(layer, []).append(hidden)
        return logits

    def _step(self) -> None:
        rows = self.active
        logits = self._forward(rows, [[row.answer[-1]] for row in rows])
        self.statistics.steps += 1
        choices = self._argmax(logits, rows)
        for entry, row in enumerate(rows):
            row.cached += 1
            self._append_tokens(row, logits, entry, choices)

    def _argmax(self, logits: torch.Tensor, rows: Items[Sequence]) -> list[tuple[int, bool]]:
        """Return the argmax of each row of the logits, and whether it is a near-tie to decide in a batch of one.

        The list is empty if no request takes the argmax.
        """
        if not any(row.request.params.takes_argmax for row in rows):
            return []
        tokens = logits.float().argmax(-1).tolist()  # in float32 for each model type, as in `generate`
        near_ties = near_tied_argmax(logits).tolist() if self.deterministic else [False] * len(tokens)
        return list(zip(tokens, near_ties, strict=True))

    def _append_tokens(
        self,
        row: Sequence,
        logits: torch.Tensor,
        first: int,
        choices: Items[tuple[int, bool]],
        leading: Items[int] = (),
    ) -> None:
        """Choose tokens while they are the leading ones, and append them to the answer.

        `first` is the row's first entry in `logits` and in `choices` (see `_argmax`), after its last cached token. One
        more follows after each leading token. Leading tokens that are chosen count as cached.
        """
        request, answer = row.request, row.answer
        for entry, led in enumerate((*leading, None), first):
            scores = logits[entry]
            if request.params.takes_argmax:
                token, near_tie = choices[entry]
            else:
                near_tie = self.deterministic and self.sampler.near_tie(scores, request, answer)
            if near_tie:  # decide in a batch of one
                self.statistics.alone += 1
                scores = self.runner.forward_alone([*request.prompt, *answer], row.mask)
                token = int(scores.float().argmax())
            if not request.params.takes_argmax:
                token = self.sampler.choose(scores, request, answer)
            answer.append(token)
            row.ended = token in row.end_tokens or len(answer) >= row.max_tokens
            if request.params.stop and not row.ended:
                row.ended = self.sampler.stopping.has_stop_text(answer, request.params.stop)
            if row.ended or token != led:
                return
            row.cached += 1
