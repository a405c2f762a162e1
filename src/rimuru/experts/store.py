"""Where every expert lies: its host copy, its page in the pool, and the address the kernels read.

Room: the experts as tenants of the pool. Rule: only this file has expert bytes moved or edits of the EXPERT
table staged; it decides nothing. The kernels read each expert where it lies, in the pool or in host
memory, so a demotion is one table edit and moves no bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from rimuru.errors import MemoryPlanError
from rimuru.kernels.host_memory import HostMemory
from rimuru.kernels.types import EXPERT_HOST, ExpertLayout
from rimuru.pool.allocator import Allocator, Shortage
from rimuru.pool.arena import Arena
from rimuru.pool.tables import Table

logger = logging.getLogger("rimuru.experts")

OWNER = "experts"
Expert = tuple[int, int]  # (MoE layer, expert)


class Event(Protocol):
    """Something that will have happened; a CUDA event is one."""

    def query(self) -> bool: ...


class Arrival(NamedTuple):
    """An expert's way into the pool."""

    to: torch.Tensor  # uint8 [page_bytes], its page
    source: torch.Tensor  # the same bytes in host memory
    cell: torch.Tensor  # int64 [], its entry in the device's EXPERT table
    entry: int  # what belongs there once the page holds the bytes


# Starts copying; None where the bytes have arrived on return. Whoever copies later may write the device's
# entries itself, each after its bytes and before the event: both addresses hold the same expert then.
Copy = Callable[[Sequence[Arrival]], Event | None]


def copy_now(arrivals: Sequence[Arrival]) -> None:
    """Copy on the calling thread (or the current stream), complete for whatever is ordered after it."""
    for arrival in arrivals:
        arrival.to.copy_(arrival.source)


def lendable_within(pinned: int, page_bytes: int, lendable: int, total: int, resident: int) -> int:
    """How many experts can have a host copy where the machine page-locks `pinned` bytes for them.

    Logs a warning where that is fewer than `lendable`: the others then stay in the pool for good. Raises
    `MemoryPlanError` where more than `resident` of the `total` would have to.
    """
    if (possible := min(lendable, pinned // page_bytes)) == lendable:
        return lendable
    said = (
        f"the machine page-locks {pinned:,} of {lendable * page_bytes:,} bytes of host memory for experts, "
        f"so {total - possible:,} of {total:,} experts must stay on the device"
    )
    if total - possible > resident:
        raise MemoryPlanError(
            f"{said}, where {resident:,} have room; raise the limit (ulimit -l, or the container's), or "
            f"--device-memory by {(total - possible - resident) * page_bytes:,} bytes"
        )
    logger.warning("%s; the boundary has less to move", said)
    return possible


class ExpertStore:
    """`layers x experts` experts of one layout, `lendable` of which have a host copy.

    An expert without a host copy lives in the pool for good. The lendable ones are spread evenly over
    the layers; they begin in host memory and come and go by `promote` and `demote`. `resident` is how
    many experts `fill_initial` brings into the pool.

    `table` is the EXPERT table, int64 `[layers, experts]` of raw addresses, those in host memory tagged
    so. `copy` moves an expert's bytes into the pool; the mirror changes only when it is done. With
    `poison` a page given back is filled with NaN. On a GPU only page-locked memory can be read in
    place: raises `MemoryPlanError` where the machine locks less than the experts outside the pool need.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        layers: int,
        experts: int,
        *,
        allocator: Allocator,
        page_class: int,
        arena: Arena,
        table: Table,
        lendable: int,
        resident: int,
        copy: Copy = copy_now,
        poison: bool = False,
    ):
        total = layers * experts
        if not 0 <= lendable <= total or not total - lendable <= resident <= total:
            raise ValueError(
                f"{total} experts, {lendable} lendable: {resident} cannot be resident "
                f"({total - lendable} to {total} can)"
            )
        self.layout, self.layers, self.experts = layout, layers, experts
        self._allocator, self._class, self._grain = allocator, page_class, allocator.geometry.grain
        self._arena, self._table, self._copy, self._poison = arena, table, copy, poison
        self._start = resident
        self._memory, self._host = None, None
        size = layout.page_bytes
        if lendable:
            gpu = arena.device.type == "cuda"
            self._memory = HostMemory(lendable * size, pin=gpu)
            if gpu:
                lendable = lendable_within(self._memory.pinned_bytes, size, lendable, total, resident)
            self._host = Arena(self._memory.nbytes, buffer=self._memory.tensor)
        # Rank of an expert in an order that walks the layers in turn.
        rank = np.arange(experts)[None, :] * layers + np.arange(layers)[:, None]
        self.lendable = rank < lendable
        self.resident = np.zeros((layers, experts), bool)  # the kernels read it from the pool
        self._page = np.full((layers, experts), -1, np.int64)  # its grain index; -1: no page
        self._host_slot = np.where(self.lendable, rank, -1)
        self._arriving: list[tuple[Event, list[Expert]]] = []
        self._leaving: list[tuple[Event, list[int]]] = []

    # -- what there is -----------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Bytes of all host copies."""
        return int(np.count_nonzero(self.lendable)) * self.layout.page_bytes

    @property
    def resident_bytes(self) -> int:
        """Payload bytes of the experts that hold a page."""
        return int(np.count_nonzero(self._page >= 0)) * self.layout.page_bytes

    @property
    def in_flight(self) -> np.ndarray:
        """Bool `[layers, experts]`: holds a page, but its bytes are still on their way."""
        return (self._page >= 0) & ~self.resident

    @property
    def arriving(self) -> int:
        """Experts whose bytes are on their way."""
        return sum(len(experts) for _, experts in self._arriving)

    @property
    def leaving_pages(self) -> int:
        """Pages that will be free when the steps that may read them have finished."""
        return sum(len(pages) for _, pages in self._leaving)

    def host_page(self, layer: int, expert: int) -> torch.Tensor:
        """The `[page_bytes]` bytes of a lendable expert's host copy."""
        assert self._host is not None, "no expert has a host copy"
        size = self.layout.page_bytes
        return self._host.page(int(self._host_slot[layer, expert]), size, size)

    # -- loading -----------------------------------------------------------------------------------

    def sink(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The expert's gate_up `[2 * intermediate, hidden]` and down `[hidden, intermediate]`, to be
        written by the loader: of its host copy, or of its page where it will never leave the pool.

        Asking again gives the same memory. Raises `MemoryError` where the pool has no page left.
        """
        if self.lendable[layer, expert]:
            if not self._table.mirror[layer, expert]:
                self._point(layer, expert)
            return self._parts(self.host_page(layer, expert))
        if self._page[layer, expert] < 0:
            pages = self._take(1)
            if not pages:
                raise MemoryError(f"no page left in the pool for expert {expert} of MoE layer {layer}")
            self._page[layer, expert] = pages[0]
            self.resident[layer, expert] = True
            self._point(layer, expert)
        return self._parts(self._pool_page(layer, expert))

    def fill_initial(self, order: Iterable[Expert] | None = None, pages: int | None = None) -> int:
        """After loading: bring experts in, in `order`, until `pages` are resident or the pool is full.

        By default as many as were asked for at construction, evenly over the layers. Returns how many
        are resident then: nothing runs yet, so the copies are waited for.
        """
        want = (self._start if pages is None else pages) - int(np.count_nonzero(self._page >= 0))
        if order is None:
            flat = np.argsort(self._host_slot, axis=None)
            order = zip(*(i.tolist() for i in np.divmod(flat, self.experts)), strict=True)
        absent = [x for x in order if self._page[x] < 0]
        self._bring(absent[: max(0, want)], copy_now)
        return int(np.count_nonzero(self._page >= 0))

    # -- moving ------------------------------------------------------------------------------------

    def promote(self, experts: Sequence[Expert]) -> list[Expert]:
        """Bring experts into the pool, in order, while pages last; returns those that got a page.

        Experts that hold a page already are left out. Where the copy takes its time, they become
        resident at the `poll` after its end.
        """
        return self._bring(experts, self._copy)

    def demote(self, experts: Sequence[Expert], until: Event | None = None) -> None:
        """Drop the pool copies of resident, lendable experts.

        Their pages are free at once, which is right where the next use is ordered after the table edit
        (the same stream, or a CPU); else pass the event after which no step reads them any more, and
        they are free at the `poll` after it. Raises `ValueError`, changing nothing, for an expert that
        is not resident or has no host copy.
        """
        going = list(dict.fromkeys(experts))
        for x in going:
            if not self.resident[x] or not self.lendable[x]:
                state = "not resident" if self.lendable[x] else "without a host copy"
                raise ValueError(f"expert {x[1]} of MoE layer {x[0]} cannot be demoted: it is {state}")
        pages = [int(self._page[x]) for x in going]
        for x in going:
            self._page[x] = -1
            self.resident[x] = False
            self._point(*x)
        if until is None:
            self._give(pages)
        elif pages:
            self._leaving.append((until, pages))

    def poll(self) -> None:
        """Note the copies that arrived and free the pages that nobody reads any more; never waits."""
        arrived = [experts for event, experts in self._arriving if event.query()]
        if arrived:
            self._arriving = [a for a in self._arriving if a[1] not in arrived]
            for experts in arrived:
                self._arrive(experts)
        free = [pages for event, pages in self._leaving if event.query()]
        if free:
            self._leaving = [g for g in self._leaving if g[1] not in free]
            for pages in free:
                self._give(pages)

    # -- truth -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that table, pages and masks tell one story."""
        addresses = np.where(self.resident, self._pool_address(self._page), self._host_entry(self._host_slot))
        loaded = self._table.mirror != 0
        assert np.array_equal(self._table.mirror[loaded], addresses[loaded]), "EXPERT table off its experts"
        assert not (self.resident & (self._page < 0)).any(), "resident without a page"
        assert (self.resident | self.lendable)[loaded].all(), "an expert that lies nowhere"
        arriving = {x for _, experts in self._arriving for x in experts}
        assert arriving == set(zip(*(i.tolist() for i in np.nonzero(self.in_flight)), strict=True))
        held = self._page[self._page >= 0].tolist() + [p for _, pages in self._leaving for p in pages]
        assert len(set(held)) == len(held), "two experts in one page"
        slots = self._host_slot[self.lendable]
        assert np.array_equal(np.sort(slots), np.arange(len(slots))), "host copies overlap"

    # -- how it is done ----------------------------------------------------------------------------

    def _bring(self, experts: Sequence[Expert], copy: Copy) -> list[Expert]:
        coming = [x for x in dict.fromkeys(experts) if self._page[x] < 0]
        pages = self._take(len(coming))
        coming = coming[: len(pages)]
        for x, page in zip(coming, pages, strict=True):
            self._page[x] = page
        if coming:
            # In the order of the layers: a step under way may find an expert before it comes to its layer.
            done = copy([self._arrival(x) for x in sorted(coming)])
            if done is None:
                self._arrive(coming)
            else:
                self._arriving.append((done, coming))
        return coming

    def _arrival(self, x: Expert) -> Arrival:
        entry = int(self._pool_address(self._page[x]))
        return Arrival(self._pool_page(*x), self.host_page(*x), self._table.device_table[x], entry)

    def _take(self, n: int) -> list[int]:
        """Up to `n` pages."""
        got = self._allocator.take(self._class, n, OWNER) if n else []
        if isinstance(got, Shortage):
            got = self._allocator.take(self._class, got.obtainable, OWNER) if got.obtainable else []
        assert not isinstance(got, Shortage), "the allocator refused what it had offered"
        return got

    def _give(self, pages: list[int]) -> None:
        if self._poison:
            self._arena.poison(pages, self._grain, self.layout.page_bytes)
        self._allocator.give(self._class, pages, OWNER)

    def _arrive(self, experts: Iterable[Expert]) -> None:
        for x in experts:
            self.resident[x] = True
            self._point(*x)

    def _point(self, layer: int, expert: int) -> None:
        """Stage the table edit that tells the kernels where the expert lies."""
        x = layer, expert
        if self.resident[x]:
            address = int(self._pool_address(self._page[x]))
        else:
            address = int(self._host_entry(self._host_slot[x]))
        self._table.stage(layer * self.experts + expert, address)

    def _pool_address(self, page: np.ndarray) -> np.ndarray:
        return self._arena.address + page * self._grain

    def _host_entry(self, slot: np.ndarray) -> np.ndarray:
        base = self._host.address if self._host else 0
        return base + slot * self.layout.page_bytes | EXPERT_HOST

    def _pool_page(self, layer: int, expert: int) -> torch.Tensor:
        return self._arena.page(int(self._page[layer, expert]), self._grain, self.layout.page_bytes)

    def _parts(self, page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a page's `[page_bytes]` bytes as gate_up and down."""
        lay = self.layout
        gate_up = page[: lay.gate_up_bytes].view(lay.dtype).view(2 * lay.intermediate, lay.hidden)
        down = page[lay.down_offset : lay.down_offset + lay.gate_up_bytes // 2].view(lay.dtype)
        return gate_up, down.view(lay.hidden, lay.intermediate)
