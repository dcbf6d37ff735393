"""The decoding loop: which sequences run in each forward pass, and the computation that they share.

All requests with the same prompt are a *prompt group*. One of them is the *leader*: the unpruned request, or else the
one whose first pruned layer is highest. The others are its *followers*.

The leader runs the prompt. Below its own first pruned layer a follower would compute the same, so the leader's inputs
to that layer are kept, and the follower runs the prompt from there up. Then each decodes by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, takewhile

import torch

from lmeval_prune.architectures.precision import refuse_nan
from lmeval_prune.config import Natural, Settings
from lmeval_prune.decoding.groups import PromptGroup, Sequence
from lmeval_prune.decoding.model_runner import Chunk, ModelRunner
from lmeval_prune.decoding.sampling import Sampler, near_tied_argmax

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
    """

    share: bool = True
    prefix: Natural = 64
    copied_prefix: Natural = 128


@dataclass
class Scheduler:
    """The decoding loop over prompt groups."""

    runner: ModelRunner
    waiting: deque[PromptGroup]  # groups that have not started
    sampler: Sampler
    deterministic: bool  # decide near-ties in a batch of one
    max_leaders: int  # largest number of leaders whose prompts are kept for followers at the same time
    ready: deque[PromptGroup] = field(default_factory=deque)  # groups whose followers can start
    active: list[Sequence] = field(default_factory=list)  # sequence i is in slot i

    def __post_init__(self) -> None:
        self.capacity = self.runner.cache.count

    def answers(self) -> Iterator[Sequence]:
        while self.waiting or self.ready or self.active:
            with torch.inference_mode():
                is_running = bool(self.active)
                while (rows := self._next_rows()) and (not is_running or self._is_worth_a_pass(rows)):
                    self._start(rows)
                    if is_running:  # one pass with new prompts delays them
                        break
                if not any(row.ended for row in self.active):
                    self._step()
                ended = self._remove_ended()
            yield from ended

    # ------------------------------------------------------------------ starting and ending

    def _is_worth_a_pass(self, rows: list[Sequence]) -> bool:
        """Return whether to run prompts beside running rows: a small pass waits for requests that can join it."""
        tokens = sum(len(row.prompt) for row in rows)
        others_may_join = len(self.active) + len(rows) == self.capacity
        return tokens >= LEAST_PASS or len(rows) >= FREE_SHARE * self.capacity or not others_may_join

    def _next_rows(self) -> list[Sequence]:
        """Return the requests that can start in the free slots: followers with the same first layer, or leaders."""
        free = self.capacity - len(self.active)
        if self.ready:
            first = self.ready[0].followers[0].first_layer
            following = (takewhile(lambda row: row.first_layer == first, group.followers) for group in self.ready)
            return list(islice(chain.from_iterable(following), free))
        leading, rows = 0, []
        for group in islice(self.waiting, free):
            leading += bool(group.followers)
            if leading > self.max_leaders:
                break
            rows.append(group.leader)
        return rows

    def _start(self, rows: list[Sequence]) -> None:
        """Run the prompts of followers or of leaders, as many as fit into a pass, and choose their first tokens."""
        ends = accumulate(len(row.prompt) for row in rows)
        rows = [row for row, end in zip(rows, ends, strict=True) if end <= self.runner.largest_pass] or rows[:1]
        follows, first, hidden, batch = bool(self.ready), 0, None, []
        if follows:
            first = rows[0].first_layer
            hidden = torch.cat([row.group.layer_inputs[first] for row in rows])
        for row in rows:
            (row.group.followers if follows else self.waiting).popleft()
            row.slot = len(self.active)
            shared = row.group.prefix
            prefix = shared.for_mask(row.mask, self.runner) if shared else None
            self.runner.cache.begin(row.slot, prefix, is_copied=bool(shared and shared.is_copied))
            self.active.append(row)
            keep = frozenset[int]() if follows else frozenset(later.first_layer for later in row.group.followers)
            batch.append(Chunk(row.slot, 0, row.mask, row.prompt, len(row.prompt) - 1, keep))
        logits, layer_inputs = self.runner.forward(batch, first, hidden)
        for row, inputs in zip(rows, layer_inputs, strict=True):
            group = row.group
            if follows:
                self.runner.cache.restore(row.slot, group.leader_cache[:first])
            elif group.followers:
                highest, group.layer_inputs = group.followers[0].first_layer, inputs
                group.leader_cache = self.runner.cache.snapshot(row.slot, len(row.prompt), highest)
                self.ready.append(group)
        for group in [group for group in self.ready if not group.followers]:
            self.ready.remove(group)
            group.leader_cache, group.layer_inputs = [], {}
        self._append_tokens(rows, logits)

    def _remove_ended(self) -> list[Sequence]:
        ended = [row for row in reversed(self.active) if row.ended]  # reversed: no ended row is moved
        for row in ended:
            if row.group.prefix:
                row.group.prefix.answered()
            self._release_slot(row.slot)
        self.runner.statistics.answers += len(ended)
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

    def _step(self) -> None:
        """Decode the next token of each row."""
        logits, _ = self.runner.forward([Chunk(row.slot, row.cached, row.mask, row.answer[-1:]) for row in self.active])
        self._append_tokens(self.active, logits)

    def _append_tokens(self, rows: Items[Sequence], logits: torch.Tensor) -> None:
        """Choose the next token of each row from its logits, (rows, vocabulary), and append it to the answer."""
        refuse_nan(logits[:, 0])
        tokens, near_ties = [0] * len(rows), [False] * len(rows)
        if any(row.request.params.takes_argmax for row in rows):
            tokens = logits.float().argmax(-1).tolist()  # in float32 for each model type, as in `generate`
            near_ties = near_tied_argmax(logits).tolist() if self.deterministic else near_ties
        for row, scores, token, near_tie in zip(rows, logits, tokens, near_ties, strict=True):
            request, answer = row.request, row.answer
            takes_argmax = request.params.takes_argmax
            if not takes_argmax:
                near_tie = self.deterministic and self.sampler.near_tie(scores, request, answer)
            if near_tie:  # decided in a batch of one
                scores = self.runner.forward_alone(request.prompt, answer, row.mask)
                token = int(scores.float().argmax())
            if not takes_argmax:
                token = self.sampler.choose(scores, request, answer)
            answer.append(token)
            row.ended = len(answer) >= row.max_tokens or self.sampler.stopping.stopped(answer, request.params)
