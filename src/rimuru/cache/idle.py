"""Cached blocks nobody reads, in the order in which they should be forgotten.

Room: the cache. Rule: a block becomes idle with the request that read it last, so what is kept is one
entry a request, not one a block; entries that came true again are skipped when their turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator


class Block:
    """A full block that can be found by its key. `key` is None once it must not be found any more."""

    __slots__ = ("key", "pages", "stamp", "users")

    key: bytes | None
    pages: bytes  # one a layer group, int32
    users: int  # slots in whose rows it stands
    stamp: int  # while it has no users, the run that holds it


class IdleBlocks:
    """Blocks without users: least recently used requests first, within one tails before heads.

    A run is the blocks one request left behind, head first. A block that finds a user again stays
    listed but counts no more: its stamp tells.
    """

    def __init__(self) -> None:
        self._runs: deque[tuple[int, list[Block]]] = deque()
        self._stamp = 0
        self._listed = 0
        self.count = 0

    def next_stamp(self) -> int:
        """A stamp for the blocks of the next run."""
        self._stamp += 1
        return self._stamp

    def add(self, stamp: int, run: list[Block]) -> None:
        """Blocks (head first, stamped, without users) that became idle together."""
        self._runs.append((stamp, run))
        self._listed += len(run)
        self.count += len(run)
        if self._listed > 2 * self.count + 4096:
            self._sweep()

    def pop(self, n: int) -> list[Block]:
        """Take out up to `n` blocks, in the order of eviction."""
        out: list[Block] = []
        runs = self._runs
        while len(out) < n and runs:
            stamp, run = runs[0]
            tail = run[len(out) - n :]
            del run[len(out) - n :]
            self._listed -= len(tail)
            tail.reverse()
            out += [block for block in tail if block.stamp == stamp]
            if not run:
                runs.popleft()
        self.count -= len(out)
        return out

    def take(self, block: Block) -> None:
        """An idle block is evicted out of turn or has got a user; the caller marks it so."""
        block.stamp = 0
        self.count -= 1

    def runs(self) -> Iterator[list[Block]]:
        """The idle blocks of each run, head first, least recently used run first."""
        for stamp, run in self._runs:
            yield [b for b in run if b.stamp == stamp]

    def _sweep(self) -> None:
        """Drop what is listed but not idle, so that a hot prefix does not pile up entries."""
        self._runs = deque(
            (stamp, kept) for stamp, run in self._runs if (kept := [b for b in run if b.stamp == stamp])
        )
        self._listed = self.count
