"""Which cached blocks to forget so that whole parents come back.

Room: the cache. Rule: a ranking only, over arrays of all idle blocks; the cache carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from rimuru.pool import Allocator

from .idle import Block


def pages_of(blocks: Iterable[Block], groups: int) -> np.ndarray:
    """The pages of blocks, int32 `[blocks, groups]`."""
    return np.frombuffer(b"".join([block.pages for block in blocks]), np.int32).reshape(-1, groups)


def cheapest_parents(
    runs: Sequence[Sequence[Block]], allocator: Allocator, groups_of: Mapping[int, Sequence[int]]
) -> Iterator[list[tuple[int, int]]]:
    """Parents that hold nothing but idle blocks, each as what has to go: (run, the length it keeps).

    runs: idle blocks, head first, least recently used run first. groups_of: page class -> its layer groups.
    The price of a parent is what has to be computed again: its blocks and, as a prefix is found from its
    head, the blocks behind them. Cheapest first, then least recently used.
    """
    lengths = np.array(list(map(len, runs)), np.int64)
    pages = pages_of((block for run in runs for block in run), sum(map(len, groups_of.values())))
    run = np.repeat(np.arange(len(runs)), lengths)
    at = np.arange(len(pages)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    orders, offers, done = [], [], 0
    for cls, groups in groups_of.items():
        homes = allocator.parents_of(cls, pages[:, groups]).ravel()
        order = np.argsort(homes, kind="stable")  # in a parent by run, in a run by place
        homes, blocks = homes[order], order // len(groups)
        fresh = np.diff(homes, prepend=-1) != 0
        heads = fresh | (np.diff(run[blocks], prepend=-1) != 0)
        first = np.flatnonzero(fresh)
        last = np.append(first[1:], len(homes))
        prices = np.add.reduceat(np.where(heads, lengths[run[blocks]] - at[blocks], 0), first)
        newest = run[blocks[last - 1]]
        loads = np.array([allocator.load(cls, home) for home in homes[first].tolist()], np.int64)
        offers.append(np.stack([newest, prices, first + done, last + done])[:, last - first == loads])
        orders.append(blocks)
        done += len(blocks)
    newest, prices, first, last = np.concatenate(offers, axis=1)
    blocks = np.concatenate(orders)
    for offer in np.lexsort((newest, prices)).tolist():
        mine = blocks[first[offer] : last[offer]]
        yield list(zip(run[mine].tolist(), at[mine].tolist(), strict=True))
