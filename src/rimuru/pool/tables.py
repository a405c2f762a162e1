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
        self._runs: list[np.ndarray] = []  # edited many at a time

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
        if stop - start == 1:
            self._cells.append(start)
        else:
            self._runs.append(np.arange(start, stop))

    def stage_many(self, index: np.ndarray, value: np.ndarray) -> None:
        """Set many cells; where an index repeats, its last value counts."""
        self._flat[index] = value
        self._runs.append(np.asarray(index, dtype=np.int64))

    @property
    def staged(self) -> int:
        """Edits that wait for `flush` (a cell edited twice counts twice)."""
        return len(self._cells) + sum(map(len, self._runs))

    def flush(self, apply: Apply) -> int:
        """Hand the edited cells to `apply(device_table, index int64 [n], value [n])`; returns n.

        The indices are distinct and ascending, the values those of the mirror.
        """
        if not self._cells and not self._runs:
            return 0
        parts = [*self._runs, np.array(self._cells, dtype=np.int64)]
        index = np.unique(np.concatenate(parts))
        self._cells.clear()
        self._runs.clear()
        where, value = self._ring.send(index, self._flat[index])
        apply(self.device_table, where, value)
        return len(index)

    def check(self) -> None:
        """With nothing staged the device's table equals the mirror (this waits for the device)."""
        if self.staged:
            return
        if not np.array_equal(self.device_table.cpu().numpy(), self.mirror):
            raise CorruptPoolError(f"the table {self.shape} on the device differs from its mirror")


class KVTables:
    """Block tables int32 `[groups, slots, blocks]` of grain indices, one row a running request."""

    def __init__(self, groups: int, slots: int, blocks: int, device: torch.device | str = "cpu"):
        self.groups, self.slots, self.blocks = groups, slots, blocks
        self.table = Table((groups, slots, blocks), torch.int32, device)

    @property
    def device_table(self) -> torch.Tensor:
        """int32 `[groups, slots, blocks]` on the device."""
        return self.table.device_table

    def stage_row(self, group: int, slot: int, block: int, pages: Sequence[int]) -> None:
        """Set a slot's pages from `block` on."""
        if block + len(pages) > self.blocks:
            raise IndexError(f"blocks {block} to {block + len(pages)} of a row with {self.blocks}")
        self.table.stage_run((group * self.slots + slot) * self.blocks + block, pages)

    def flush(self, apply: Apply) -> int:
        """See `Table.flush`."""
        return self.table.flush(apply)

    def check(self) -> None:
        """See `Table.check`."""
        self.table.check()
