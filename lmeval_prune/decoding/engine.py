"""The decoding engine: many answers at once, each under its own head mask.

A *question* is all requests with one prompt. Its request with the highest first pruned layer (the unpruned
one, if there is one) leads. The leader decodes like any row, and what enters the layers at which its siblings
start to differ is kept. Each sibling then *follows* the leader: as long as it chooses the same tokens, all
that it needs below its first pruned layer is known, so it runs the layers from there up, on the prompt and on
a stretch of the leader's answer at once, and checks whether it would have written that stretch. Where it
differs, it goes on alone, as one row of the common batch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from lmeval_prune.architectures import AttentionMap, find_attention
from lmeval_prune.decoding.layers import Gates
from lmeval_prune.decoding.lookup import GrowingLookup, Lookup
from lmeval_prune.decoding.plain import decode_plainly
from lmeval_prune.decoding.requests import Request
from lmeval_prune.decoding.sampling import choose, is_plain
from lmeval_prune.decoding.slots import Layout, Slots, Span, Unsupported
from lmeval_prune.decoding.stops import Stops
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.row_masks import MaskTable, RowMasks

logger = logging.getLogger(__name__)
ATTENTION = "lmeval_prune_slots"  # our name among transformers' attention functions
NEAR_TIE = 1e-3  # logits closer than this are decided alone when `deterministic`


@dataclass
class Row:
    """A request that is being decoded in a slot.

    Attributes:
        request: what is decoded.
        question: the question it belongs to.
        mask: number of its mask.
        slot: where its keys and values are.
        stored: how many tokens (of prompt and answer) the slot holds.
        answer: the tokens chosen so far; the last one is not yet stored.
        own: lookup in prompt and answer; made when drafts are first asked for.
    """

    request: Request
    question: Question
    mask: int
    slot: int = -1
    stored: int = 0
    answer: list[int] = field(default_factory=list)
    own: GrowingLookup | None = None
    ended: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.request.prompt, *self.answer]


@dataclass
class Question:
    """The requests with one prompt.

    Attributes:
        leader: the row that is decoded first.
        followers: the others, by first pruned layer, highest first.
        first_layers: first pruned layer of each mask number (the number of layers, if it prunes nothing).
        kept: layer → what entered it, (tokens, width), in the leader's run over prompt and answer.
        shared: the leader's keys and values below the highest first layer of a follower.
        lookup: answers found so far, for drafts.
    """

    leader: Row | None = None
    followers: deque[Row] = field(default_factory=deque)
    kept: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    shared: list[torch.Tensor] = field(default_factory=list)
    lookup: Lookup | None = None
    led: list[int] = field(default_factory=list)  # the leader's prompt and answer
    open: int = 0  # requests without an answer yet


@dataclass
class Statistics:
    """What a run did: counts of tokens, and seconds."""

    answers: int = 0
    answer_tokens: int = 0
    leader_prompt_tokens: int = 0
    follow_tokens: int = 0  # prompt and leader's tokens run by followers, from their first layer up
    followed: int = 0  # answer tokens that followers took over from their leader
    steps: int = 0
    step_rows: int = 0
    step_tokens: int = 0
    drafted: int = 0
    draft_accepted: int = 0
    alone: int = 0  # near-ties decided alone
    layer_tokens: int = 0  # tokens × layers run
    head_tokens: int = 0  # tokens whose logits were computed
    seconds: dict[str, float] = field(default_factory=dict)


class Engine:
    """Decodes requests with different masks together.

    Args:
        model: a stock causal model of transformers.
        tokenizer: needed for stop texts.
        attention: the model's `find_attention`, where it is at hand.
        max_rows: answers decoded at once. Default: as many as memory holds, at most 128 (512 on a GPU).
        memory: bytes for keys, values and kept hidden states. Default: half of what is free.
        follow: tokens of the leader's answer that a follower checks at a time; 0 shares the prompt only.
        share: whether requests with one prompt share what is equal among them.
        refill: whether a waiting request enters as soon as a row is free; else a batch ends as a whole.
        drafts: at most so many tokens are proposed to a row by lookup; 0 for none.
        budget: tokens of a decoding step up to which drafts are proposed. Default: measured at the start,
            as the number of tokens whose step takes twice as long as a step of one.
        deterministic: decide near-ties (two largest logits closer than 1e-3) by running that answer alone, so
            that a result does not depend on what is decoded beside it.
        progress: show a progress bar.

    Raises:
        InputError: a number is out of range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        attention: AttentionMap | None = None,
        max_rows: int | None = None,
        memory: int | None = None,
        follow: int = 16,
        share: bool = True,
        refill: bool = True,
        drafts: int = 8,
        budget: int | None = None,
        deterministic: bool = False,
        progress: bool = False,
    ) -> None:
        for name, value, least in (
            ("max_rows", max_rows, 1), ("memory", memory, 1), ("follow", follow, 0), ("drafts", drafts, 0),
            ("budget", budget, 0),
        ):  # fmt: skip
            if value is not None and value < least:
                raise InputError(f"{name} must be at least {least}, not {value}")
        self.model = model
        self.attention = attention or find_attention(model)
        self.stops = Stops(tokenizer)
        self.max_rows, self.memory = max_rows, memory
        self.follow = follow if share else 0
        self.share, self.refill = share, refill
        self.drafts, self.budget = drafts, budget
        self.deterministic = deterministic
        self.progress = progress
        self.device = next(model.parameters()).device
        self.statistics = Statistics()
        self._unsupported: str | None = None
        self._checked = False
        self._rows = RowMasks()

    # ------------------------------------------------------------------ the run

    def decode(self, requests: Sequence[Request]) -> Iterator[tuple[Request, list[int]]]:
        """Answer the requests; each answer is yielded as soon as it is there, in any order.

        The model is the engine's until the iterator ends or is closed.

        Args:
            requests: in the order in which questions are wanted; equal prompts are decoded together.

        Yields:
            A request and the tokens of its answer, the end token included.

        Raises:
            InputError: a mask does not fit the model, a prompt leaves no room in the model's context, or stop
                texts cannot be looked for.
        """
        for settings in {request.settings for request in requests}:
            self.stops.check(settings)
        for request in requests:
            if len(request.prompt) >= self.context:
                raise InputError(
                    f"a prompt of {len(request.prompt)} tokens leaves no room in a context of {self.context}"
                )
            if request.mask:
                request.mask.heads(self.attention)
        if not requests:
            return
        reason = self.unsupported()
        if reason:
            logger.warning(
                "%s is decoded by plain generate with one mask a row: %s", self.attention.model_type, reason
            )
        found = decode_plainly(self, requests) if reason else self._decode(requests)
        with tqdm(total=len(requests), unit="answer", disable=not self.progress, desc="decoding") as bar:
            try:
                for request, answer in found:
                    bar.update()
                    yield request, answer
            finally:
                found.close()

    @property
    def context(self) -> int:
        """Tokens that the model's positions allow."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 1 << 30)

    def unsupported(self) -> str | None:
        """Why this model cannot be run by the engine and falls back to `generate`; None if it can."""
        if not self._checked:
            self._checked = True
            try:
                self._check_model()
            except (Unsupported, InputError, AttributeError, TypeError, ValueError, RuntimeError, KeyError) as error:
                self._unsupported = str(error).splitlines()[0] if str(error) else type(error).__name__
        return self._unsupported

    def _check_model(self) -> None:
        """Compare the engine's logits with the model's own, on a few tokens in two rows.

        Raises:
            Unsupported: they differ, or the model lies on several devices.
        """
        if len({parameter.device for parameter in self.model.parameters()}) > 1:
            raise Unsupported("its layers are on several devices")
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention", "sliding_attention"}:
            raise Unsupported(f"it has layers of type {', '.join(sorted(kinds))}")
        size = int(config.vocab_size)
        tokens = torch.arange(12, device=self.device).mul_(7).remainder_(size).unsqueeze(0)
        with torch.inference_mode():
            expected = self.model(tokens, use_cache=False).logits[0].float()
            with self._installed([None], 2, 16):
                rows = [Row(Request((1,)), Question(), 0, slot=slot) for slot in range(2)]
                got = []
                for part in (tokens[0, :8], tokens[0, 8:11], tokens[0, 11:]):
                    got.append(self._forward(rows, [part.tolist()] * 2, need="all").view(2, -1, size)[1])
                    for row in rows:
                        row.stored += len(part)
        difference = (torch.cat(got).float() - expected).abs().max()
        if not difference <= 0.02 * expected.abs().max():
            raise Unsupported(f"its logits differ by {float(difference):.2g} from the model's own")

    @contextmanager
    def _installed(self, masks: Sequence[Any], rows: int, length: int) -> Iterator[None]:
        """The model with our attention, gates and masks in it."""
        from transformers import AttentionInterface

        self._slots = Slots(rows, length)
        AttentionInterface.register(ATTENTION, self._slots.attend)
        before = self.model.config._attn_implementation
        with ExitStack() as stack:
            self._gates = Gates(self.model, self.attention)
            stack.enter_context(self._rows.applied_to(self.model, self.attention))
            stack.enter_context(self._gates.installed())
            self._table: MaskTable = self._rows.table(masks)
            stack.callback(_use_attention, self.model, before)
            _use_attention(self.model, ATTENTION)
            try:
                yield
            finally:
                del self._slots

    def _decode(self, requests: Sequence[Request]) -> Iterator[tuple[Request, list[int]]]:
        questions, masks = self._questions(requests)
        longest = max(min(len(r.prompt) + r.settings.max_new_tokens, self.context) for r in requests)
        count = min(self._fitting(longest), len(requests))
        self._budget = self.budget
        with self._installed(masks, count, longest):
            self._waiting = deque(questions)
            self._ready: deque[Question] = deque()
            self._active: list[Row] = []
            self._size = count
            while self._waiting or self._ready or self._active:
                with torch.inference_mode():
                    if self.refill or not self._active:
                        self._admit()
                    if self._active and not any(row.ended for row in self._active):
                        self._step()
                    ended = self._leave()
                for row in ended:
                    self.statistics.answers += 1
                    self.statistics.answer_tokens += len(row.answer)
                    yield row.request, row.answer

    def _questions(self, requests: Sequence[Request]) -> tuple[list[Question], list[Any]]:
        """Group requests by prompt, and number their masks."""
        numbers: dict[Any, int] = {None: 0}
        masks: list[Any] = [None]
        self._first = [len(self.attention)]
        order = {layer.name: i for i, layer in enumerate(self.attention)}
        groups: dict[Any, list[Row]] = {}
        for place, request in enumerate(requests):
            if request.mask not in numbers:
                assert request.mask is not None
                numbers[request.mask] = len(masks)
                masks.append(request.mask)
                lost = [order[layer.name] for layer, _ in request.mask.by_layer(self.attention)]
                self._first.append(min(lost, default=len(self.attention)))
            row = Row(request, Question(), numbers[request.mask])
            groups.setdefault(request.prompt if self.share else place, []).append(row)
        questions = []
        for rows in groups.values():
            rows.sort(key=lambda row: -self._first[row.mask])  # stable: requests keep their order otherwise
            question = Question(rows[0], deque(rows[1:]), open=len(rows))
            for row in rows:
                row.question = question
            questions.append(question)
        return questions, masks

    def _fitting(self, length: int) -> int:
        """How many answers of `length` tokens memory holds, kept hidden states counted in."""
        size = next(self.model.parameters()).element_size()
        width = self.model.config.get_text_config().hidden_size
        stored = sum(layer.groups * (layer.query_dim + layer.head_dim) for layer in self.attention)
        per_row = length * size * (stored * (2 if self.share else 1) + width * min(8, len(self.attention)))
        memory = self.memory or _free_memory(self.device) // 2
        most = self.max_rows or (512 if self.device.type == "cuda" else 128)
        fitting = min(most, memory // per_row)
        if fitting < 1:
            raise InputError(f"one answer of {length} tokens needs {per_row} bytes, more than memory={memory}")
        return int(fitting)

    # ------------------------------------------------------------------ coming and going

    def _admit(self) -> None:
        """Fill free slots: followers of finished leaders first, then new leaders."""
        while (free := self._size - len(self._active)) > 0:
            if self._ready:
                self._start_followers(self._ready[0], free)
                if not self._ready[0].followers:
                    self._ready.popleft()
            elif self._waiting and len(self._leading()) <= self._size // 2:
                self._start_leader(self._waiting.popleft())
            else:
                return

    def _leading(self) -> list[Row]:
        return [row for row in self._active if row.question.leader is row and row.question.followers]

    def _enter(self, row: Row) -> None:
        row.slot = len(self._active)
        self._active.append(row)

    def _start_leader(self, question: Question) -> None:
        row = question.leader
        assert row is not None
        self._enter(row)
        prompt = list(row.request.prompt)
        logits = self._forward([row], [prompt], need="last")
        self.statistics.leader_prompt_tokens += len(prompt)
        row.stored = len(prompt)
        self._take(row, logits, [])
        if not self.follow:
            self._ready_to_follow(row)

    def _ready_to_follow(self, leader: Row) -> None:
        """Keep what followers need of the leader's run so far."""
        question = leader.question
        if question.followers and not question.led:
            question.led = leader.tokens if self.follow else list(leader.request.prompt)
            highest = max(self._first[row.mask] for row in question.followers)
            question.shared = self._slots.take(leader.slot, leader.stored, highest)
            self._ready.append(question)

    def _start_followers(self, question: Question, free: int) -> None:
        """Start followers with one first layer: run the prompt and the leader's answer from there up."""
        first = self._first[question.followers[0].mask]
        rows: list[Row] = []
        while question.followers and len(rows) < free and self._first[question.followers[0].mask] == first:
            rows.append(question.followers.popleft())
            self._enter(rows[-1])
        kept = torch.cat(question.kept[first])
        prompt = len(rows[0].request.prompt)
        following = list(rows)
        place, until = 0, prompt + self.follow
        while following:
            until = min(until, len(question.led) - 1 if self.follow else prompt)
            until = max(until, prompt)
            stretch = question.led[place:until]
            hidden = kept[place:until].repeat(len(following), 1).unsqueeze(0)
            skip = max(prompt - 1 - place, 0)  # the prompt's logits are needed at its last token only
            logits = self._forward(
                following, [stretch] * len(following), need=skip, start=first, hidden=hidden
            ).view(len(following), len(stretch) - skip, -1)
            self.statistics.follow_tokens += len(following) * len(stretch)
            drafts = question.led[max(place + 1, prompt) : until]
            still = []
            picks = self._picks(logits.flatten(0, 1), following)
            for i, row in enumerate(following):
                row.stored = max(place, prompt - 1) + 1
                before = len(row.answer)
                self._take(row, logits[i], drafts, picks[i * logits.shape[1] :])
                self.statistics.followed += sum(
                    a == b for a, b in zip(row.answer[before:], drafts + question.led[until : until + 1], strict=False)
                )
                if not row.ended and len(row.tokens) == until + 1 and row.tokens[-1:] == question.led[until : until + 1]:
                    still.append(row)
            place, following = until, still
            until += self.follow
            if not self.follow or place >= len(question.led) - 1:
                break
        for row in rows:
            self._slots.put(row.slot, question.shared, row.stored, first)
        if not question.followers:
            question.shared, question.kept = [], {}

    def _leave(self) -> list[Row]:
        """Take ended rows out; the last rows move into their slots."""
        ended = [row for row in self._active if row.ended]
        for row in ended:
            question = row.question
            if row is question.leader:
                self._ready_to_follow(row)
            question.open -= 1
            if self.drafts and question.open:
                question.lookup = question.lookup or Lookup()
                question.lookup.add(row.tokens)
            last = self._active.pop()
            if last is not row:
                self._slots.move(last.slot, row.slot, last.stored)
                last.slot = row.slot
                self._active[row.slot] = last
        return ended

    # ------------------------------------------------------------------ computing

    def _forward(
        self,
        rows: Sequence[Row],
        tokens: Sequence[list[int]],
        need: str | int,
        start: int = 0,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model on new tokens of some rows and store their keys and values.

        Args:
            rows: in the order of their slots.
            tokens: new tokens of each row.
            need: whose logits are needed: `"all"`, each row's `"last"` token, or all of each row but the
                first so many.
            start, hidden: see `Route`.

        Returns:
            Logits, (tokens needed, vocabulary).
        """
        spans: list[Span] = []
        for row, new in zip(rows, tokens, strict=True):
            last = spans[-1] if spans else None
            if last and last.slot + len(last.starts) == row.slot and last.tokens == len(new):
                spans[-1] = Span(last.slot, (*last.starts, row.stored), last.tokens)
            else:
                spans.append(Span(row.slot, (row.stored,), len(new)))
        layout = Layout(spans, self.device)
        keep = {layer for row in rows for layer in self._wanted(row)} if not start else set()
        index = [row.mask for row, new in zip(rows, tokens, strict=True) for _ in new]
        flat = [token for new in tokens for token in new]
        ends, at = [], 0
        for new in tokens:
            first = {"all": 0, "last": len(new) - 1}.get(need, need)  # type: ignore[call-overload]
            ends += range(at + int(first), at + len(new))
            at += len(new)
        self._slots.layout = layout
        with (
            self._rows.using(self._table, torch.tensor([index])),
            self._gates.routed(start, hidden, keep) as route,
        ):
            ids = torch.tensor([flat], device=self.device)
            logits = self.model(
                input_ids=ids,
                position_ids=layout.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=slice(None) if len(ends) == len(flat) else torch.tensor(ends, device=self.device),
            ).logits[0]
        self._slots.layout = None
        self.statistics.layer_tokens += len(flat) * (len(self.attention) - start)
        self.statistics.head_tokens += len(ends)
        if route.kept:
            at = 0
            for row, new in zip(rows, tokens, strict=True):
                for layer in self._wanted(row):
                    row.question.kept.setdefault(layer, []).append(route.kept[layer][0, at : at + len(new)])
                at += len(new)
        return logits

    def _wanted(self, row: Row) -> set[int]:
        """Layers whose input is kept for followers while this row runs."""
        question = row.question
        if row is not question.leader or (not self.follow and row.answer):
            return set()
        return {self._first[follower.mask] for follower in question.followers}

    def _step(self) -> None:
        """One more token for every row, or several where drafts are right."""
        rows = self._active
        drafts = self._proposals(rows)
        tokens = [[row.answer[-1], *draft] for row, draft in zip(rows, drafts, strict=True)]
        logits = self._forward(rows, tokens, need="all")
        self.statistics.steps += 1
        self.statistics.step_rows += len(rows)
        self.statistics.step_tokens += logits.shape[0]
        picks = self._picks(logits, rows)
        at = 0
        for row, draft in zip(rows, drafts, strict=True):
            count = 1 + len(draft)
            row.stored += 1
            taken = self._take(row, logits[at : at + count], draft, picks[at : at + count])
            self.statistics.drafted += len(draft)
            self.statistics.draft_accepted += taken - 1
            if row is row.question.leader and taken < count:  # what it kept for rejected drafts goes
                for parts in row.question.kept.values():
                    parts[-1] = parts[-1][:taken]
            at += count

    def _proposals(self, rows: Sequence[Row]) -> list[list[int]]:
        """Drafts by lookup, as long as the step stays within the budget."""
        none: list[list[int]] = [[] for _ in rows]
        if not self.drafts:
            return none
        if self._budget is None:
            self._budget = self._measured_budget()
        room = self._budget - len(rows)
        if room <= 0:
            return none
        each = min(self.drafts, max(1, room // len(rows)))
        for i, row in enumerate(rows):
            left = row.request.settings.max_new_tokens - len(row.answer) - 1
            left = min(left, self._slots.length - row.stored - 1, each, room)
            if left <= 0:
                continue
            if row.own is None:
                row.own = GrowingLookup()
            tokens = row.tokens
            row.own.extend(tokens[len(row.own.text) :])
            size, draft = row.own.propose(tokens[-Lookup.LONGEST :], left)
            if row.question.lookup:
                longer, other = row.question.lookup.propose(tokens[-Lookup.LONGEST :], left)
                draft = other if longer >= size else draft
            none[i] = draft
            room -= len(draft)
        return none

    def _measured_budget(self) -> int:
        """The number of tokens whose step takes twice as long as a step of one token, up to 256."""
        module = max((m for m in self.model.modules() if isinstance(m, nn.Linear)), key=lambda m: m.in_features)

        def seconds(tokens: int) -> float:
            x = torch.zeros(tokens, module.in_features, device=self.device, dtype=module.weight.dtype)
            best = float("inf")
            for _ in range(4):
                begin = time.perf_counter()
                for _ in range(8):
                    out = module(x)
                out.sum().item()
                best = min(best, time.perf_counter() - begin)
            return best

        one, tokens = seconds(1), 2
        while tokens <= 256 and seconds(tokens) < 2 * one:
            tokens *= 2
        return tokens // 2

    def _picks(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        """The largest logit's token for each line, if some row wants just that."""
        if any(is_plain(row.request.settings) for row in rows):
            return logits.float().argmax(-1).tolist()
        return [-1] * len(logits)

    def _take(self, row: Row, logits: torch.Tensor, draft: Sequence[int], picks: Sequence[int] | None = None) -> int:
        """Choose tokens from the logits, as long as the drafts are right.

        Args:
            row: its `stored` counts what was stored up to the first of these logits, as if there were no draft.
            logits: (1 + drafts, vocabulary).
            draft: tokens that the logits after the first assume.
            picks: tokens of the largest logits.

        Returns:
            How many tokens were added.
        """
        picks = self._picks(logits, [row]) if picks is None else picks
        limit = min(row.request.settings.max_new_tokens, self._slots.length - len(row.request.prompt))
        for i in range(len(draft) + 1):
            token = self._choose(row, logits[i], picks[i])
            row.answer.append(token)
            if self.stops.ended(row.answer, row.request.settings) or len(row.answer) >= limit:
                row.ended = True
                return i + 1
            if i < len(draft) and token == draft[i]:
                row.stored += 1
            else:
                return i + 1
        raise AssertionError("unreachable")

    def _choose(self, row: Row, logits: torch.Tensor, pick: int) -> int:
        plain = is_plain(row.request.settings)
        if self.deterministic:
            best = logits.float().topk(2).values
            if not plain or float(best[0] - best[1]) < NEAR_TIE:
                logits = self._alone(row)
                pick = int(logits.float().argmax())
        return pick if plain else choose(logits, row.request, row.answer)

    def _alone(self, row: Row) -> torch.Tensor:
        """Logits after a row's tokens, run by themselves: they depend on nothing else."""
        self.statistics.alone += 1
        ids = torch.tensor([row.tokens], device=self.device)
        self._slots.layout = None
        with self._rows.using(self._table, torch.tensor([[row.mask] * ids.shape[1]])), self._gates.routed():
            return self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, 0]


def _use_attention(model: Any, name: str) -> None:
    model.config._attn_implementation = name


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)
