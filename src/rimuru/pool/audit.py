"""The allocator's books, recounted.

Room: the pool. Rule: reads everything, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .errors import CorruptPoolError
from .levels import FULL, Level


def audit(levels: Sequence[Level], parent_of: Callable[[Level, int], int]) -> None:
    """`CorruptPoolError` where the books of the levels contradict themselves or each other."""

    def require(truth: bool, what: str) -> None:
        if not truth:
            raise CorruptPoolError(what)

    require(not FULL, "the shared empty set was written to")
    for level in levels:
        name, up = level.name, level.parent
        filed = {p: n for n, b in enumerate(level.buckets) for p in b}
        bits = sum(1 << n for n, b in enumerate(level.buckets) if b)
        require(bits == level.filled, f"{name}: bucket bits differ from buckets")
        owned: dict[int, set[int]] = {}
        for owner, holding in level.held.items():
            for parent, mine in (
                *((p, set(level.range_of(p))) for p in holding.whole), *holding.parts.items()
            ):  # fmt: skip
                seen = owned.setdefault(parent, set())
                require(bool(mine), f"{name}: {owner!r} holds an empty part of {parent}")
                require(not seen & mine, f"{name}: pages {sorted(seen & mine)} have two owners")
                seen |= mine
        whole = [p for holding in level.held.values() for p in holding.whole]
        require(not any(p in level.split for p in whole), f"{name}: a parent held whole is listed twice")
        cut = {**level.split, **dict.fromkeys(whole, FULL)}
        require(owned.keys() <= cut.keys(), f"{name}: pages of uncut parents have owners")
        for parent, pages in cut.items():
            require(pages <= set(level.range_of(parent)), f"{name}: parent {parent} lists foreign pages")
            require(not pages & owned.get(parent, set()), f"{name}: free pages of {parent} have an owner")
            if up is not None:
                require(len(pages) < level.per, f"{name}: parent {parent} is whole but not merged")
                require(filed.get(parent, 0) == len(pages), f"{name}: parent {parent} is misfiled")
                home = parent_of(up, parent)
                require(
                    home in up.split and parent not in up.split[home],
                    f"{name}: cut parent {parent} counts as free one level up",
                )
                require(
                    not any(parent in h.parts.get(home, ()) or home in h.whole for h in up.held.values()),
                    f"{name}: cut parent {parent} has an owner one level up",
                )
        require(filed.keys() <= cut.keys(), f"{name}: a bucket lists a parent that is not cut")
        free = sum(map(len, cut.values()))
        require(free == level.free, f"{name}: {free} pages are free, {level.free} counted")
        require(up is None or len(cut) == level.cut, f"{name}: {len(cut)} parents, {level.cut} counted")
        used = len(cut) * level.per - free - sum(child.cut for child in level.children)
        require(used == level.used, f"{name}: {used} pages are used, {level.used} counted")
        require(sum(map(len, owned.values())) <= used, f"{name}: more pages have owners than are used")
