"""Random operations on a pool with every kind of page, checked against what they must mean.

    python tests/pool/fuzz.py [--ops 10000000] [--seed 0] [--check-every 1000]

One process holds a KV cache with shared prefixes, experts, states, moves, epochs and limits over one
allocator. Every read of a block is compared with what was written into it (a word a page, moved with
the page), every `check()` runs at the interval given, and at the end nothing may be left.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from shapes import every_kind

from rimuru.cache import KVCache, extend_keys
from rimuru.pool import Allocator, Kind, Ledger, Shortage, StepEvent

SLOTS, TOKENS = 12, 4


class Fuzz:
    """The pool and a memory of what every page holds."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.plan = every_kind()
        self.pool = Allocator(self.plan, 12 * self.plan.huge_bytes)
        self.ledger = Ledger(self.pool)
        classes = [g.page_class for g in self.plan.groups_of(Kind.KV)]
        self.groups = len(classes)
        self.cache = KVCache(self.pool, classes, TOKENS, SLOTS, 64)
        self.keys: dict[int, list[bytes]] = {}
        self.total: dict[int, int] = {}
        self.words: dict[tuple[int, int], object] = {}  # (group, page) -> what was written there
        self.filled: dict[int, int] = {}  # leading blocks of a slot that were written
        fixed = (Kind.EXPERT, Kind.EXPERT_PACKED, Kind.STATE, Kind.CONV)
        self.fixed = [c for k in fixed for c in self.plan.classes_of(k)]
        self.held: dict[tuple[int, int], list[int]] = {}
        self.step = self.done = 0
        self.ops = [getattr(self, name) for name in dir(self) if name.startswith("do_")]

    def run(self, ops: int, check_every: int) -> None:
        for i in range(ops):
            self.rng.choice(self.ops)()
            if i % check_every == 0:
                self.check()
        self.finish()

    def check(self) -> None:
        self.pool.check()
        self.cache.check()
        self.ledger.check()
        for slot in self.total:
            self.read(slot)

    def read(self, slot: int) -> None:
        for group in range(self.groups):
            for i, page in enumerate(self.cache.row(slot, group)[: self.filled[slot]]):
                assert self.words[group, page] == (self.keys[slot][i]), (
                    f"slot {slot} reads another's block {i}"
                )

    def write(self, slot: int) -> None:
        upto = min(self.total[slot], len(self.keys[slot]))
        for group in range(self.groups):
            row = self.cache.row(slot, group)
            for i in range(self.filled[slot], upto):
                self.words[group, row[i]] = self.keys[slot][i]
        self.filled[slot] = upto

    # ---------------------------------------------------------------- requests

    def do_begin(self) -> None:
        slot = self.rng.randrange(SLOTS)
        if slot in self.total:
            return
        keys: list[bytes] = []
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 40))]
        extend_keys(keys, tokens, TOKENS, b"fuzz")
        hit = self.cache.match(keys)
        self.cache.admit(slot, keys, hit)
        self.keys[slot], self.total[slot], self.filled[slot] = keys, hit, hit
        self.read(slot)

    def do_grow(self) -> None:
        slot = self.rng.randrange(SLOTS)
        if slot in self.total:
            total = min(64, self.total[slot] + self.rng.choice((1, 1, 2, 9)))
            if not self.cache.grow(slot, total, self.rng.random() < 0.7):
                self.total[slot] = total
                self.write(slot)

    def do_decode(self) -> None:
        slots = [s for s in self.total if self.total[s] < 64]
        totals = [self.total[s] + 1 for s in slots]
        short = self.cache.grow_many(slots, totals)
        for slot, total in zip(slots, totals, strict=True):
            if slot not in short:
                self.total[slot] = total
                self.write(slot)

    def do_commit(self) -> None:
        slot = self.rng.randrange(SLOTS)
        if slot in self.total:
            self.cache.commit(slot, self.keys[slot], self.filled[slot])

    def do_end_or_abort(self) -> None:
        slot = self.rng.randrange(SLOTS)
        if slot in self.total:
            self.read(slot)
            self.cache.release(slot)
            del self.total[slot], self.keys[slot], self.filled[slot]

    def do_evict(self) -> None:
        if self.rng.random() < 0.2:
            (self.cache.evict if self.rng.random() < 0.7 else self.cache.evict_parents)(self.rng.randrange(4))

    def do_compact(self) -> None:
        if self.rng.random() < 0.2:
            most = self.rng.choice((100_000, 10_000_000))
            moves = self.cache.compact(
                most, lambda cls, page: page % 7 == 0, self.rng.random() < 0.5, self.rng.choice((None, 1))
            )
            group_class = [g.page_class for g in self.plan.groups_of(Kind.KV)]
            for m in moves:  # sources and targets are disjoint
                for group, cls in enumerate(group_class):
                    if cls == m.cls and (group, m.source) in self.words:
                        self.words[group, m.target] = self.words.pop((group, m.source))

    # ---------------------------------------------------------------- other tenants

    def do_take(self) -> None:
        cls, owner = self.rng.choice(self.fixed), self.rng.randrange(3)
        got = self.pool.take(cls, self.rng.randrange(1, 4), owner)
        if not isinstance(got, Shortage):
            self.held.setdefault((cls, owner), []).extend(got)

    def do_give(self) -> None:
        if self.held:
            cls, owner = self.rng.choice(list(self.held))
            pages = self.held.pop((cls, owner))
            if self.rng.random() < 0.3:
                assert self.pool.held_by(cls, owner) >= len(pages)
            n = self.rng.randrange(1, len(pages) + 1)
            if pages[n:]:
                self.held[cls, owner] = pages[n:]
            if self.rng.random() < 0.5:
                self.ledger.give_after(cls, pages[:n], owner, StepEvent(self.step + 2, lambda: self.done))
            else:
                self.ledger.give(cls, pages[:n], owner)

    def do_step(self) -> None:
        self.step += 1
        self.done = max(self.done, self.step - self.rng.randrange(3))
        self.ledger.poll()

    def do_move_the_boundary(self) -> None:
        if self.rng.random() < 0.3:
            kind = self.rng.choice((Kind.KV, Kind.EXPERT))
            self.pool.set_limit(kind, self.rng.choice((None, None, 5, 40)))

    def finish(self) -> None:
        for slot in list(self.total):
            self.cache.release(slot)
        self.cache.reset_prefix()
        self.done = self.step + 10
        self.ledger.poll()
        for (cls, owner), pages in self.held.items():
            self.pool.give(cls, pages, owner)
        self.check_empty()

    def check_empty(self) -> None:
        self.pool.check()
        assert self.pool.whole_free() == self.pool.roots, "pages leaked"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="random operations on the page pool")
    parser.add_argument("--ops", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=1000)
    args = parser.parse_args(argv)
    start, done = time.monotonic(), 0
    while done < args.ops:
        n = min(100_000, args.ops - done)
        Fuzz(args.seed + done).run(n, args.check_every)
        done += n
        print(f"{done:>12,} operations, {time.monotonic() - start:.0f} s, no fault", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
