"""Prefill with experts in host memory: the copy engine brings them ahead of the MoE into free pages.

Room: between the expert store and the eager step. Rule: residency does not change. A streamed step reads
rows of its own, in which the experts on their way point at staging pages. Every copy of a step, its slot
and what it waits for are known before the first one starts.

A large step routes several tiles of rows to nearly every expert, and the MoE kernel reads an expert in
host memory once for each tile. Copied ahead, its bytes cross the link once, at the copy engine's rate, and
while other experts are computed. The staging pages form a ring: the copies of the step, layer by layer,
take its slots in turn. A layer is computed in passes of at most half a ring, each as soon as its experts
are there; a copy into a used slot waits for the pass that read it. So the link rests for nobody, and a
small ring carries as much as a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import torch

from rimuru.kernels.types import EXPERT_HOST, ExpertLayout
from rimuru.pool.allocator import Allocator, Shortage
from rimuru.pool.arena import Arena
from rimuru.pool.tables import Table

OWNER = "prefill streaming"
TILE_ROWS = 128  # rows of the largest tile: an expert in host memory is read once for each
PASSES = 16  # the most a layer is computed in: each is a few launches

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (destination, source) bytes


def worth_streaming(tokens: int, top_k: int, experts: int, tile_rows: int = TILE_ROWS) -> bool:
    """Whether copying a step's missing experts ahead takes the link for less time than reading them in place.

    A copy takes bytes / c at the copy engine's rate c, whether or not a token needs the expert. Reading in
    place takes ceil(R / tile_rows) x bytes / k for an expert of R rows, at the kernel's rate k = 0.92 c.
    While R fits a tile, streaming can gain those 8 % at best, and loses where R = 0: missing experts are
    those that few tokens go to. Beyond a tile every row counts. On average R = tokens x top_k / experts;
    the line is half a tile, where both take the same time.
    """
    return 2 * tokens * top_k >= tile_rows * experts


@dataclass(frozen=True, slots=True)
class Ring:
    """The copies of one step in their order, each int64 `[copies]`, and how far each pass lets them go.

    Passes are numbered through: pass i of layer l is `l * PASSES + i`.
    """

    layer: np.ndarray
    expert: np.ndarray
    turn: np.ndarray  # the pass that reads it
    slot: np.ndarray  # of the staging ring
    passes: np.ndarray  # [layers], at least 1
    ends: np.ndarray  # [layers * PASSES]: copies up to and with this pass's
    released: np.ndarray  # [layers * PASSES + 1]: copies that may start before pass t has been launched


def plan_ring(missing: np.ndarray, slots: int) -> Ring:
    """Give the missing experts of a step, bool `[layers, experts]`, slots of a ring, layer by layer.

    Of a layer with more of them than its passes can hold the last ones have no copy.
    """
    most = int(np.count_nonzero(missing, axis=1).max())
    size = min(slots, max(slots // 2, -(-most // PASSES)))  # experts a pass
    layer, expert = np.nonzero(missing & (np.cumsum(missing, axis=1) <= PASSES * size))
    held = np.bincount(layer, minlength=len(missing))
    rank = np.arange(len(layer)) - np.repeat(np.cumsum(held) - held, held)
    turn = layer * PASSES + rank // max(1, size)
    # No pass has more copies than there are slots, so a slot's last reader is always an earlier pass.
    after = np.full(len(layer), -1)
    after[slots:] = turn[: max(0, len(layer) - slots)]
    turns = len(missing) * PASSES
    return Ring(
        layer,
        expert,
        turn,
        np.arange(len(layer)) % max(1, slots),
        np.maximum(1, -(-held // max(1, size))),
        np.searchsorted(turn, np.arange(turns), side="right"),
        np.searchsorted(after, np.arange(-1, turns), side="right"),
    )


class CopyStream(Protocol):
    """A queue of copies beside the compute stream, done in the order in which they are asked for."""

    def fence(self) -> None:
        """Copies asked for from now on start after the work launched on the compute stream so far."""
        ...

    def copy(self, pairs: Pairs) -> None:
        """Copy page by page."""
        ...

    def mark(self) -> Any:
        """What `wait` takes: the end of the copies asked for so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Work launched on the compute stream from now on starts after the mark."""
        ...


class CopyNow:
    """Copies on the calling thread, for devices without streams."""

    def fence(self) -> None:
        pass

    def copy(self, pairs: Pairs) -> None:
        for to, source in pairs:
            to.copy_(source)

    def mark(self) -> None:
        return None

    def wait(self, mark: Any) -> None:
        pass


class CopyEngine:
    """A CUDA stream for host copies, beside whichever stream is current."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def fence(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def copy(self, pairs: Pairs) -> None:
        with torch.cuda.stream(self.stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        return self.stream.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.stream.device).wait_event(mark)


class LayerPasses:
    """What `moe` takes for a layer's addresses: int64 `[experts]` rows, 0 for the experts of other passes."""

    def __init__(self, stream: ExpertStream, layer: int):
        self._stream, self._layer = stream, layer

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._stream._passes(self._layer)


class ExpertStream:
    """Streams the missing experts of large eager steps.

        with stream.step(tokens) as layers:
            every MoE layer once, in order: moe(..., layers[l], ...)

    `source(layer, expert)` gives the bytes of a host copy, `table` is the EXPERT table. The ring is `reserve`
    pages of its own, beside the pool, and what the pool has free when a step begins, given back when it has
    been launched: whoever takes those next on the compute stream is ordered behind the step.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        source: Callable[[int, int], torch.Tensor],
        *,
        table: Table,
        allocator: Allocator,
        page_class: int,
        arena: Arena,
        top_k: int,
        copies: CopyStream | None = None,
        reserve: int = 0,
        poison: bool = False,
    ):
        self.layout, self._source, self._experts = layout, source, table
        self._allocator, self._class, self._grain = allocator, page_class, allocator.geometry.grain
        self._arena, self._poison = arena, poison
        layers, experts = table.shape
        self._top_k = top_k
        gpu = arena.device.type == "cuda"
        self._copies: CopyStream = copies or (CopyEngine(arena.device) if gpu else CopyNow())
        size = layout.page_bytes
        own = Arena(reserve * size, arena.device) if reserve else None
        self._own = [own.page(i, size, size) for i in range(reserve)] if own else []
        self._layers = [LayerPasses(self, layer) for layer in range(layers)]
        self._room = torch.zeros(layers * PASSES * experts, dtype=torch.int64, device=arena.device)
        self._staging = [torch.zeros(len(self._room), dtype=torch.int64, pin_memory=gpu) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)] if gpu else []
        self.streamed_experts = 0  # copied since the start
        self._ring: Ring | None = None
        self._rows = self._room  # int64 [layers, passes, experts] of the step
        self._pages: list[int] = []  # of the pool, while a step is on
        self._slots: list[torch.Tensor] = []  # the ring: its own pages, then the pool's
        self._ready: dict[int, Any] = {}  # pass -> mark behind its copies
        self._next = 0  # the first copy that has not been asked for

    @property
    def nbytes(self) -> int:
        """Device bytes beside the pool."""
        return self._room.nbytes + len(self._own) * self.layout.page_bytes

    @contextmanager
    def step(self, tokens: int) -> Iterator[Sequence[LayerPasses] | None]:
        """`begin` and `end` around a step."""
        try:
            yield self.begin(tokens)
        finally:
            self.end()

    def begin(self, tokens: int) -> Sequence[LayerPasses] | None:
        """Plan a step and start its first copies; each layer's addresses for `moe`, or None where the
        EXPERT table serves as well. That table must have no edits staged.
        """
        assert self._ring is None, "a step was begun before the last one ended"
        if not worth_streaming(tokens, self._top_k, self._experts.shape[1]):
            return None
        missing = self._experts.mirror & EXPERT_HOST != 0
        each = np.count_nonzero(missing, axis=1)
        if not each.any():
            return None
        self._take(min(2 * int(each.max()), int(each.sum())) - len(self._own))
        if not self._slots:
            return None
        ring = plan_ring(missing, len(self._slots))
        self._upload(ring)
        self.streamed_experts += len(ring.layer)
        self._ring, self._next = ring, 0
        self._issue(int(ring.released[0]))
        return self._layers

    def end(self) -> None:
        """The step has been launched, or given up: give the pages back."""
        if self._ring is None:
            return
        self._copies.wait(self._copies.mark())
        if self._poison:
            for page in self._slots:
                page.fill_(0xFF)
        self._allocator.give(self._class, self._pages, OWNER)
        self._ring, self._pages, self._slots = None, [], []
        self._ready.clear()

    def check(self) -> None:
        """Assert that between steps no page of the pool is held."""
        held = self._allocator.held_by(self._class, OWNER)
        assert held == (0 if self._ring is None else len(self._pages)), "staging pages leaked"
        assert self._ring is not None or not self._ready, "copies that nobody waits for"

    # -- how it is done ----------------------------------------------------------------------------

    def _take(self, wanted: int) -> None:
        """Make the ring, with up to `wanted` pages of the pool."""
        free = self._allocator.obtainable(self._class)
        pages = self._allocator.take(self._class, max(0, min(wanted, free)), OWNER, sparing=True)
        assert not isinstance(pages, Shortage), "the allocator refused what it had offered"
        self._pages, size = pages, self.layout.page_bytes
        self._slots = self._own + [self._arena.page(page, self._grain, size) for page in pages]

    def _upload(self, ring: Ring) -> None:
        """Each pass's row to the device: what is not streamed is read in the first pass, where it lies."""
        layers, experts = self._experts.shape
        shape = layers, int(ring.passes.max()), experts
        n = prod(shape)
        self._staging.reverse()
        self._sent.reverse()
        if self._sent:
            self._sent[0].synchronize()  # of the step before the last one: long past
        rows = self._staging[0].numpy()[:n].reshape(shape)
        rows[:] = 0
        rows[:, 0] = self._experts.mirror
        rows[ring.layer, 0, ring.expert] = 0
        addresses = np.array([page.data_ptr() for page in self._slots])
        rows[ring.layer, ring.turn % PASSES, ring.expert] = addresses[ring.slot]
        self._rows = self._room[:n].view(shape)
        self._rows.view(-1).copy_(self._staging[0][:n], non_blocking=True)
        if self._sent:
            self._sent[0].record()

    def _passes(self, layer: int) -> Iterator[torch.Tensor]:
        """The layer's rows, each behind its copies; what a pass frees is written again once it has run."""
        ring = self._ring
        assert ring is not None, "a streamed layer outside its step"
        for i in range(int(ring.passes[layer])):
            turn = layer * PASSES + i
            if turn in self._ready:
                self._copies.wait(self._ready.pop(turn))
            yield self._rows[layer, i]
            self._issue(int(ring.released[turn + 1]))

    def _issue(self, stop: int) -> None:
        """Ask for the copies up to `stop`, behind what has been launched so far."""
        ring, start = self._ring, self._next
        if ring is None or start == stop:
            return
        self._copies.fence()
        while start < stop:
            turn = int(ring.turn[start])
            end = min(stop, int(ring.ends[turn]))
            self._copies.copy(
                [
                    (self._slots[ring.slot[at]], self._source(int(ring.layer[at]), int(ring.expert[at])))
                    for at in range(start, end)
                ]
            )
            if end == ring.ends[turn]:
                self._ready[turn] = self._copies.mark()
            start = end
        self._next = stop
