"""Page tables at fixed addresses, edited from the host in stream order.

Room: the pool. Rule: the host's mirror is the truth; an edit changes it at once and the device's
copy at the next `flush`, all cells of a flush together, each cell once with its last value.

Edits travel through a ring of staging buffers. On a GPU each buffer is page-locked and guarded by an
event recorded behind its copy: it is written again only when that event has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from .errors import CorruptPoolError

Apply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class Event(Protocol):
    """What guards a buffer; `torch.cuda.Event` is one."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


_NUMPY: dict[torch.dtype, Any] = {torch.int32: np.int32, torch.int64: np.int64}


def _cuda_event() -> Event:
    event = torch.cuda.Event()
    event.record()
    return event


class StagingRing:
    """`depth` pairs of host buffers (cell indices, values) in turn, each guarded by an event.

    `record()` makes an event behind the work launched so far; None where copies are done at once.
    """

    def __init__(self, depth: int, dtype: torch.dtype, device: torch.device):
        self.device = device
        self.dtype = dtype
        self.record: Callable[[], Event] | None = _cuda_event if device.type == "cuda" else None
        self._pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * depth
        self._events: list[Event | None] = [None] * depth
        self._turn = 0

    def send(self, index: np.ndarray, value: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """`index` (int64) and `value` on the device; waits if the buffer is still in flight."""
        if self.record is None:
            return torch.from_numpy(index), torch.from_numpy(value)
        turn, n = self._turn, len(index)
        self._turn = (turn + 1) % len(self._pairs)
        event = self._events[turn]
        if event is not None and not event.query():
            event.synchronize()
        pair = self._pairs[turn]
        if pair is None or len(pair[0]) < n:
            room = max(1024, 1 << (n - 1).bit_length())
            pinned = self.device.type == "cuda"
            pair = self._pairs[turn] = (
                torch.empty(room, dtype=torch.int64, pin_memory=pinned),
                torch.empty(room, dtype=self.dtype, pin_memory=pinned),
            )
        pair[0].numpy()[:n] = index
        pair[1].numpy()[:n] = value
        sent = (
            pair[0][:n].to(self.device, non_blocking=True),
            pair[1][:n].to(self.device, non_blocking=True),
        )
        self._events[turn] = self.record()
        return sent


class Table:
    """A table of `shape` on `device` with a host mirror. Cells start at `fill`.

    `device_table`: the tensor kernels read, int32 or int64, at one address for life.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        fill: int = 0,
        ring: int = 4,
    ):
        self.shape = tuple(shape)
        self.device_table = torch.full(self.shape, fill, dtype=dtype, device=device)
        self.mirror = np.full(self.shape, fill, dtype=_NUMPY[dtype])
        self._flat = self.mirror.reshape(-1)
        self._ring = StagingRing(ring, dtype, self.device_table.device)
        self._cells: list[int] = []  # edited one at a time
        self._runs: list[tuple[int, int]] = []  # edited one after the other, as (start, stop)
        self._many: list[np.ndarray] = []  # edited many at a time

    def stage(self, index: int, value: int) -> None:
        """Set one cell, by its index in the flattened table."""
        if index < 0:
            raise IndexError(f"cell {index} of a table")
        self._flat[index] = value
        self._cells.append(index)

    def stage_run(self, start: int, values: Sequence[int]) -> None:
        """Set the cells from `start` on (flattened)."""
        stop = start + len(values)
        if stop > self._flat.size or start < 0:
            raise IndexError(f"cells {start} to {stop} of a table with {self._flat.size}")
        self._flat[start:stop] = values
        self.mark(start, stop)

    def mark(self, start: int, stop: int) -> None:
        """The cells from `start` to `stop` of the mirror have been set."""
        if stop - start == 1:
            self._cells.append(start)
        else:
            self._runs.append((start, stop))

    def stage_many(self, index: np.ndarray, value: np.ndarray) -> None:
        """Set many cells; where an index repeats, its last value counts."""
        self._flat[index] = value
        self._many.append(np.asarray(index, dtype=np.int64))

    @property
    def staged(self) -> int:
        """Edits that wait for `flush` (a cell edited twice counts twice)."""
        runs = sum(stop - start for start, stop in self._runs)
        return len(self._cells) + runs + sum(map(len, self._many))

    def flush(self, apply: Apply) -> int:
        """Hand the edited cells to `apply(device_table, index int64 [n], value [n])`; returns n.

        The indices are distinct and ascending, the values those of the mirror.
        """
        if not self._cells and not self._runs and not self._many:
            return 0
        parts = [*self._many, np.array(self._cells, dtype=np.int64), _cells_of(self._runs)]
        index = np.unique(np.concatenate(parts))
        self._cells.clear()
        self._runs.clear()
        self._many.clear()
        where, value = self._ring.send(index, self._flat[index])
        apply(self.device_table, where, value)
        return len(index)

    def check(self) -> None:
        """With nothing staged the device's table equals the mirror (this waits for the device)."""
        if self.staged:
            return
        if not np.array_equal(self.device_table.cpu().numpy(), self.mirror):
            raise CorruptPoolError(f"the table {self.shape} on the device differs from its mirror")


def _cells_of(runs: Sequence[tuple[int, int]]) -> np.ndarray:
    """The cells of runs of cells, int64."""
    if not runs:
        return np.zeros(0, np.int64)
    start, stop = np.array(runs, dtype=np.int64).T
    length = stop - start
    before = np.cumsum(length) - length
    return np.arange(length.sum()) + np.repeat(start - before, length)


class KVTables:
    """Block tables int32 `[groups, slots, blocks]` of grain indices, one row a running request."""

    def __init__(self, groups: int, slots: int, blocks: int, device: torch.device | str = "cpu"):
        self.groups, self.slots, self.blocks = groups, slots, blocks
        self.table = Table((groups, slots, blocks), torch.int32, device)

    @property
    def device_table(self) -> torch.Tensor:
        """int32 `[groups, slots, blocks]` on the device."""
        return self.table.device_table

    def stage_blocks(self, slot: int, block: int, pages: Sequence[int]) -> None:
        """Set a slot's blocks from `block` on. pages: of one block after the other, each group's in turn."""
        groups, table = self.groups, self.table
        stop = block + len(pages) // groups
        if stop > self.blocks or block < 0:
            raise IndexError(f"blocks {block} to {stop} of a row with {self.blocks}")
        at = slot * self.blocks
        if groups == 1:
            table.stage_run(at + block, pages)
            return
        table.mirror[:, slot, block:stop] = np.asarray(pages, np.int32).reshape(-1, groups).T
        for start in range(at, groups * self.slots * self.blocks, self.slots * self.blocks):
            table.mark(start + block, start + stop)

    def flush(self, apply: Apply) -> int:
        """See `Table.flush`."""
        return self.table.flush(apply)

    def check(self) -> None:
        """See `Table.check`."""
        self.table.check()
