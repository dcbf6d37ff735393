"""A decoding step on buffers with fixed addresses, captured in CUDA graphs.

The step reads the tokens that the step before it chose, and nothing from the host. So the host starts a step before it
has read the tokens of the one before, and a GPU replays it as a graph instead of launching its kernels one by one. On a
CPU the same step runs eagerly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from lmeval_prune.architectures import ModelMap, input_device
from lmeval_prune.decoding.attention import AttentionOptions
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.sampling import (
    Warp,
    cumulative_distribution,
    draw,
    near_tied_argmax,
    near_tied_draw,
)
from lmeval_prune.interventions.applied import without_checks
from lmeval_prune.interventions.attention_call import (
    Attended,
    AttentionCall,
    Packed,
    State,
    StepRows,
    Store,
    StoredTokens,
    replace_attention,
)
from lmeval_prune.interventions.row_masks import LayerKey, MaskTable
from lmeval_prune.kernels.decode_attention import ops
from lmeval_prune.kernels.dispatch import launch_on

_COMPILED: WeakKeyDictionary[nn.Module, Callable[..., torch.Tensor]] = WeakKeyDictionary()  # step of each model
GRAPHS_PER_FUNCTION = 64  # that torch.compile keeps: one for each model, combination of methods and of features

SMALL_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192)
BUCKET_STEP = 64  # difference between larger buckets
TOKEN, LENGTH, ANSWER, SLOT, MASK, LEFT, SAMPLED, ALIVE = range(8)
COLUMNS = 8


def bucket_sizes(capacity: int) -> list[int]:
    """Return the numbers of rows for which a step is captured, up to `capacity`."""
    larger = range(SMALL_BUCKETS[-1] + BUCKET_STEP, capacity, BUCKET_STEP)
    return [size for size in (*SMALL_BUCKETS, *larger) if size < capacity] + [capacity]


@dataclass
class StepResult:
    """The tokens that a step chose. On a GPU the step may still run."""

    logits: torch.Tensor  # (rows of the bucket, vocabulary); the next step overwrites them
    _host: torch.Tensor  # (2, rows)
    _event: Any  # CUDA event behind the copy to the host; None on a CPU

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the step; return the tokens, (rows,), and whether each was a near-tie."""
        if self._event is not None:
            self._event.synchronize()
        tokens, near = self._host.numpy()
        return tokens.copy(), near.astype(bool)


@dataclass
class StaticStep(Store):
    """Decode the next token of each row; keys and values are in a cache's slots.

    Row i works in slot `columns[SLOT, i]`. Rows that fill up a bucket are not alive and work in the last slot, which no
    sequence uses.

    Attributes:
        model_map: a model inside `ModelRunner.attached`.
        cache: the store of prompt passes.
        masks: head masks, to which rows refer by number.
        end_tokens: largest number of end tokens of a request.
        near_ties: report near-ties of the argmax.
        warp: logits processors of sampled rows; None: no row is sampled.
        compiled: run the step through `torch.compile`.
        capacity: largest number of rows.
    """

    capturing_devices: ClassVar[tuple[str, ...]] = ("cuda",)

    model_map: ModelMap
    cache: KVCache
    masks: MaskTable
    end_tokens: int
    near_ties: bool = False
    warp: Warp | None = None
    compiled: bool = False
    rows: StepRows | None = field(default=None, init=False)  # of the running step
    packed: Packed = field(default=Packed((), (), ()), init=False)

    @torch.inference_mode(False)  # so that compiled code sees the same kind of tensors in each run
    def __post_init__(self) -> None:
        self.capacity = self.cache.count - 1
        self.count = self.cache.count
        self._model: Any = self.model_map.model
        self._device = input_device(self._model)
        self._is_gpu = self._device.type == "cuda"
        self._buckets = bucket_sizes(self.capacity)
        width = self.capacity + 1  # wider than all buckets: torch.compile would compile a whole buffer as another case
        if self.compiled:  # a single row would be another case, too
            self._buckets = sorted({max(size, 2) for size in self._buckets})
            width = max(width, COLUMNS) + 1  # equal sizes would be taken for the same size
        # fixed addresses: a graph reads and writes them
        self._columns = torch.zeros(COLUMNS, width, dtype=torch.long, device=self._device)
        self._ends = torch.zeros(width, max(self.end_tokens, 1), dtype=torch.long, device=self._device)
        self._result = torch.zeros(2, width, dtype=torch.long, device=self._device)
        self._stored_lengths: dict[int, torch.Tensor] = {}  # of layers that store only some tokens, (slots,)
        self._keep = self._kept_heads()
        self._uniforms = torch.zeros(
            self.count, self.cache.length if self.warp else 0, dtype=torch.float64, device=self._device
        )
        self._host_columns, self._host_ends = self._pinned(self._columns), self._pinned(self._ends)
        self._host_results = [self._pinned(self._result) for _ in range(3)]  # the host is one step behind
        self._started = 0  # number of steps
        self._graphs: dict[int, tuple[Any, torch.Tensor]] = {}  # graph and logits, by bucket
        self._warm: set[int] = set()  # buckets that have run eagerly
        self._pool: Any = None  # memory of all graphs

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=self._is_gpu)

    # ------------------------------------------------------------------ the host's side

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket for a number of rows."""
        return next(size for size in self._buckets if size >= rows)

    def set_rows(self, columns: np.ndarray, ends: np.ndarray) -> None:
        """Set the rows of the next step; the host must have read the results of all earlier ones.

        `columns` is (`COLUMNS`, rows), `ends` (rows, end tokens), filled up with -1.
        """
        rows = columns.shape[1]
        self._host_columns.zero_()
        self._host_columns[SLOT] = self.capacity
        self._host_columns[:, :rows] = torch.from_numpy(columns)
        self._host_ends.fill_(-1)
        self._host_ends[:rows, : ends.shape[1]] = torch.from_numpy(ends)
        self._columns.copy_(self._host_columns, non_blocking=True)
        self._ends.copy_(self._host_ends, non_blocking=True)

    def admit(self, slots: list[int], uniforms: np.ndarray | None = None) -> None:
        """Prepare slots that prompt passes have filled.

        `uniforms` are the random numbers of the tokens of each answer, (slots, tokens), if there is a `warp`.
        """
        if uniforms is not None:
            self._uniforms[slots, : uniforms.shape[1]] = torch.from_numpy(uniforms).to(self._device)
        for layer, lengths in self.cache.lengths.items():
            if layer not in self._stored_lengths:
                self._stored_lengths[layer] = torch.zeros(self.count, dtype=torch.int32, device=self._device)
            self._stored_lengths[layer][slots] = lengths[slots].int().to(self._device)

    def stop(self, rows: Iterable[int]) -> None:
        """End rows whose last token is not an end token. A step that has started still computes them."""
        for row in rows:
            self._columns[ALIVE, row].zero_()

    def start(self, rows: int) -> StepResult:
        """Start a step of the first `rows` rows. On a GPU, do not wait for it."""
        with launch_on(self._columns):
            return self._start(rows)

    def _start(self, rows: int) -> StepResult:
        """Start a step on the current device."""
        bucket = self.bucket(rows)
        if bucket in self._graphs:
            graph, logits = self._graphs[bucket]
            graph.replay()
        elif self._device.type in self.capturing_devices and bucket in self._warm:
            graph, logits = self._graphs[bucket] = self._capture(bucket)
            graph.replay()
        else:  # compiles the kernels, too
            logits = self._run(bucket)
            self._warm.add(bucket)
        host, event = self._host_results[self._started % len(self._host_results)], None
        self._started += 1
        host.copy_(self._result, non_blocking=True)  # whole buffers: a copy of a part of them waits for the device
        if self._is_gpu:
            event = torch.cuda.Event()
            event.record()
        return StepResult(logits, host[:, :rows], event)

    def check_waiting(self) -> None:
        """Run a step of no sequence, with an error if it waits for the device.

        A capture would fail there, too. But a failed capture leaves PyTorch's allocator and current stream changed.
        """
        self.set_rows(np.zeros((COLUMNS, 0), np.int64), np.zeros((0, 1), np.int64))
        self.start(1).read()  # compiles the kernels and prepares constants, which may wait
        with launch_on(self._columns), _waiting_refused(self._device):
            self._run(self.bucket(1))

    def _capture(self, bucket: int) -> tuple[Any, torch.Tensor]:
        """Capture a step; it does not run."""
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(self._device)
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            logits = self._run(bucket)
        self._pool = graph.pool()
        return graph, logits

    # ------------------------------------------------------------------ the step

    def _run(self, bucket: int) -> torch.Tensor:
        """Run a step of `bucket` rows; return the logits, (rows, vocabulary)."""
        with ExitStack() as stack:
            replace_attention(self.model_map, self, stack)
            if not self.compiled:
                return self._decode(bucket)
            stack.enter_context(without_checks(self._model))
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=GRAPHS_PER_FUNCTION))
            return _compiled_step(self._model)(self, bucket)

    def _decode(self, bucket: int) -> torch.Tensor:
        columns = self._columns[:, :bucket]
        alive = columns[ALIVE] != 0
        self.rows = StepRows(columns[SLOT], columns[LENGTH], columns[MASK], alive, ~alive)
        inputs = {"input_ids": columns[TOKEN][None], "position_ids": columns[LENGTH][None]}
        logits = cast(torch.Tensor, self._model(**inputs, use_cache=False).logits[0])
        self.rows = None
        chosen, near = self._choose(logits, columns)
        self._result[0, :bucket] = chosen
        if near is not None:
            self._result[1, :bucket] = near
        columns[LENGTH] += columns[ALIVE]
        columns[ANSWER] += columns[ALIVE]
        columns[LEFT] -= columns[ALIVE]
        columns[TOKEN] = torch.where(alive, chosen, columns[TOKEN])
        goes_on = (columns[LEFT] > 0) & (chosen[:, None] != self._ends[:bucket]).all(1)
        columns[ALIVE] *= goes_on
        return logits

    def _choose(self, logits: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the next token of each row, (rows,), and whether it is a near-tie, if that is to be reported."""
        scores = logits.float()  # for each model type, as in `generate`
        chosen, near = scores.argmax(-1), near_tied_argmax(logits) if self.near_ties else None
        if self.warp:
            is_sampled, uniforms = columns[SAMPLED] != 0, self._uniforms[columns[SLOT], columns[ANSWER]]
            cumulative = cumulative_distribution(self.warp(scores))
            chosen = torch.where(is_sampled, draw(cumulative, uniforms[:, None])[:, 0], chosen)
            if near is not None and self.warp.temperature:
                tied = near_tied_draw(logits, cumulative, uniforms, 1 / self.warp.temperature)
                near = torch.where(is_sampled, tied, near)
        return chosen, near

    def attend(self, call: AttentionCall) -> Attended:
        """Compute the attention of one token per row, (1, rows, heads, width of values); store it if no handler has."""
        options, rows = AttentionOptions.of(call), cast(StepRows, self.rows)
        layer = call.module.layer_idx
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        query, key, value = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        keep = self._keep.get((call.layer.stack, call.layer.index))
        decode = partial(
            ops.decode,
            query,
            keys,
            values,
            scaling=options.scaling,
            slots=rows.slots,
            keep=keep,
            masks=None if keep is None else rows.masks,
            window=options.window,
            softcap=options.softcap,
        )
        if call.lengths is None:
            out = decode(lengths=rows.lengths, new_key=key, new_value=value, skipped=rows.dead)
            return out.unsqueeze(0), None
        skipped = None if call.query_mask is None else ~call.query_mask
        return decode(lengths=call.lengths, skipped=skipped, positions=self.cache.positions[layer]).unsqueeze(0), None

    def _kept_heads(self) -> dict[LayerKey, torch.Tensor]:
        """Return which heads each mask keeps, (masks, heads) by layer; nothing if no mask prunes."""
        kept_heads: dict[LayerKey, torch.Tensor] = {}
        for layer in self.model_map.attention if self.masks.drops else ():
            key = (layer.stack, layer.index)
            kept_heads[key] = torch.ones(self.masks.count, layer.heads, dtype=torch.bool, device=self._device)
            if key in self.masks.drops:
                kept_heads[key] = ~self.masks.drops[key].view(self.masks.count, layer.heads, -1)[..., 0].to(
                    self._device
                )
        return kept_heads

    def state(self, call: AttentionCall, owner: Hashable, make: Callable[[], State]) -> State:
        """Return a handler's state in a layer; prompt passes have created it."""
        return cast(State, self.cache.states[call.module.layer_idx][owner])

    def stored_tokens(self, call: AttentionCall) -> StoredTokens:
        """Return the storage of a layer that stores only some tokens."""
        return replace(self.cache.stored_tokens(call), lengths=self._stored_lengths[call.module.layer_idx])


@contextmanager
def _waiting_refused(device: torch.device) -> Iterator[None]:
    """Raise an error in the block where PyTorch waits for a CUDA device."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that it does not find every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@cache
def _capture_stream(device: torch.device) -> Any:
    """Return the stream of all captures on a device; PyTorch's default is on the device of its first capture."""
    return torch.cuda.Stream(device)


def _compiled_step(model: nn.Module) -> Callable[..., torch.Tensor]:
    """Return the compiled step of a model; the number of rows is dynamic."""
    if model not in _COMPILED:

        def decode(step: StaticStep, bucket: int) -> torch.Tensor:
            return step._decode(bucket)

        _COMPILED[model] = torch.compile(decode, fullgraph=True, dynamic=True)
    return _COMPILED[model]
