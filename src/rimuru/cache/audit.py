"""The KV cache's books, recounted.

Room: the cache. Rule: reads everything, changes nothing.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from rimuru.pool import CorruptPoolError

from .idle import Block

if TYPE_CHECKING:
    from .kv import KVCache


def audit(cache: KVCache) -> None:
    """`CorruptPoolError` where rows, shared blocks, idle ones and the allocator contradict each other."""

    def require(truth: bool, what: str) -> None:
        if not truth:
            raise CorruptPoolError(what)

    n = cache._groups
    users: dict[int, int] = {}
    records: dict[int, Block] = {}
    private = loose = 0
    pages_seen: set[int] = set()

    def claim(pages: array[int]) -> None:
        for page in pages:
            require(page not in pages_seen, f"page {page} stands in two blocks")
            pages_seen.add(page)

    for slot, row in enumerate(cache._rows):
        have, done = cache._room[slot], cache._committed[slot]
        require(len(row) // n == have, f"slot {slot}: {len(row)} pages are not those of {have} blocks")
        require(cache._only is not None or len(row) == have * n, f"slot {slot}: pages of no block")
        require(
            0 <= done <= cache.held[slot] <= have <= cache.max_blocks,
            f"slot {slot}: {done} published, {cache.held[slot]} used, {have} in the row",
        )
        blocks = [row[at * n : at * n + n] for at in range(have)]
        own = {*cache._private[slot], *range(done, have)}
        shared = [pages.tobytes() for at, pages in enumerate(blocks) if at not in own]
        require(
            shared == [block.pages for block in cache._shared[slot]],
            f"slot {slot}: the row differs from the shared blocks it should show",
        )
        for block in cache._shared[slot]:
            users[id(block)] = users.get(id(block), 0) + 1
            records[id(block)] = block
        for at in own:
            claim(blocks[at])
        claim(row[have * n :])
        private += len(own)
        loose += len(row) - have * n
    idle = [block for run in cache._idle.runs() for block in run]
    require(len(idle) == cache._idle.count, f"{len(idle)} blocks are idle, {cache._idle.count} counted")
    for block in idle:
        require(id(block) not in records, "a block is idle twice or in use")
        require(block.key is not None, "a block is kept for nobody")
        records[id(block)] = block
    for block in records.values():
        require(
            block.users == users.get(id(block), 0),
            f"a block has {users.get(id(block), 0)} users, not {block.users}",
        )
        claim(array("i", block.pages))
        if block.key is not None:
            require(cache._by_key.get(block.key) is block, "a block is not found by its key")
    found = sum(block.key is not None for block in records.values())
    require(found == len(cache._by_key), "a key names a block that is gone")
    blocks_in_rows = sum(cache._room)
    require(
        (blocks_in_rows, loose) == (cache._blocks, cache._loose),
        f"rows hold {blocks_in_rows} blocks and {loose} pages more, "
        f"{cache._blocks} and {cache._loose} counted",
    )
    taken = private + len(records)
    require(taken == cache._taken, f"{taken} blocks are taken, {cache._taken} counted")
    for cls, k in cache._each.items():
        least = taken * k + (loose if cls == cache._only else 0)
        require(cache.allocator.used(cls) >= least, f"class {cls}: blocks need more pages than are out")
    used = {
        span.start for span in cache.allocator.spans() if span.state == "used" and span.cls in cache._each
    }
    require(pages_seen <= used, f"pages {sorted(pages_seen - used)} stand in blocks and are free")
