"""Who holds which page: split on demand, merge on the last free, never a partial answer.

Room: the pool. Rule: integers only. A page is the index of its first grain; a full pool is a value
(`Shortage`), a mistake of the caller is a typed error, and both leave the pool as it was.

Placement: an owner keeps taking from the parent it took from last; then whole parents for as many
pages as fill them; then the open parent with the fewest free pages that are enough, so that nearly
full parents fill up and nearly empty ones get the chance to come back whole.

Longer than 500 lines because every method here reads and writes the same counters; what only reads
them is in `audit`, what they are in `levels`, the choice of moves in `compact`.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from .audit import audit
from .errors import (
    DoubleFreeError,
    ForeignPageError,
    GeometryError,
    PageError,
    WrongKindError,
)
from .geometry import MAX_GRAINS, Geometry, Kind
from .levels import FULL, ROOT, Holding, Level

_TAIL = attrgetter("tail")


@dataclass(frozen=True, slots=True)
class Shortage:
    """The pages asked for are not there. Nothing was taken; `obtainable` could have been."""

    obtainable: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Pages of one kind: held by owners, free inside open parents, and parents cut for it."""

    used: int
    free: int
    parents: int


class Span(NamedTuple):
    """`grains` grains from `start` on: a page of class `cls` that is used or free, or the end of a
    parent that is too short for a page ("lost")."""

    start: int
    grains: int
    cls: int
    state: str


class Allocator:
    """The page pool's books for one arena of `pool_bytes`, planned by `geometry`.

    Classes are named by their index in `geometry.classes`. Owners are any hashable; None means
    "nobody in particular", the owner of pages that outlive the request that took them.
    """

    def __init__(self, geometry: Geometry, pool_bytes: int):
        roots = geometry.roots(pool_bytes)
        if roots < 1:
            raise GeometryError(
                f"a pool of {pool_bytes:,} bytes holds no page of {geometry.huge_bytes:,} bytes; "
                f"give at least {geometry.huge_bytes:,}"
            )
        if roots * geometry.page_grains(0) > MAX_GRAINS:
            raise GeometryError(
                f"a pool of {pool_bytes:,} bytes has more than 2^31 grains of {geometry.grain} bytes; "
                f"the most is {MAX_GRAINS * geometry.grain:,}"
            )
        self.geometry = geometry
        self.roots = roots
        self._levels: list[Level] = []
        for i, c in enumerate(geometry.classes):
            parent = None if c.parent is None else self._levels[c.parent]
            per = roots if parent is None else c.per_parent
            level = Level(i, c.name, c.kind, geometry.page_grains(i), per, parent)
            if parent is not None:
                parent.children.append(level)
            self._levels.append(level)
        root = self._levels[0]
        root.split[ROOT] = set(root.range_of(ROOT))
        root.free = roots
        self._kind_limits: dict[Kind, int] = {}
        self._by_kind = {k: [lv for lv in self._levels if lv.kind == k] for k in Kind}

    # ---------------------------------------------------------------- asking

    def obtainable(self, cls: int) -> int:
        """Pages of a class that `take` would give now, free parents split and limits kept."""
        level = self._levels[cls]
        return max(0, min(self._room(level), self._allowed(level)))

    def excess(self, cls: int) -> int:
        """Pages of a class held beyond its limit (0 where within it, or without one)."""
        return max(0, -self._allowed(self._levels[cls]))

    def obtainable_together(self, each: Mapping[int, int]) -> int:
        """How many bundles of `each[cls]` pages per class could be taken now, all from one pool."""
        most = min(self.obtainable(cls) // n for cls, n in each.items())
        if len(each) == 1:
            return most
        least = 0
        while least < most:
            middle = (least + most + 1) // 2
            if self._fits({cls: n * middle for cls, n in each.items()}):
                least = middle
            else:
                most = middle - 1
        return least

    def used(self, cls: int) -> int:
        """Pages of a class that owners hold."""
        return self._levels[cls].used

    def free_inside(self, cls: int) -> int:
        """Pages of a class that are free in parents cut for it."""
        return self._levels[cls].free

    def held_by(self, cls: int, owner: Hashable) -> int:
        """Pages of a class that one owner holds."""
        level = self._levels[cls]
        holding = level.held.get(owner)
        if holding is None:
            return 0
        return len(holding.whole) * level.per + sum(map(len, holding.parts.values()))

    def counts(self, kind: Kind) -> Counts:
        """Pages of a kind, over all its classes."""
        levels = self._by_kind[kind]
        return Counts(
            sum(lv.used for lv in levels),
            sum(lv.free for lv in levels),
            sum(lv.cut for lv in levels),
        )

    def whole_free(self) -> int:
        """Root pages that are free and uncut."""
        return self._levels[0].free

    # ---------------------------------------------------------------- limits

    def set_limit(self, target: int | Kind, pages: int | None) -> None:
        """The boundary: the most pages a class, or all classes of a kind, may hold. None: no limit.

        Pages held beyond a new limit stay; `take` gives none until they are back under it.
        """
        if pages is not None and pages < 0:
            raise ValueError(f"a limit of {pages} pages; the least is 0")
        if not isinstance(target, Kind):
            self._levels[target].limit = pages
        elif pages is None:
            self._kind_limits.pop(target, None)
        else:
            self._kind_limits[target] = pages
        for level in self._levels:
            level.limited = level.limit is not None or level.kind in self._kind_limits
            level.quick = level.parent if level.simple and not level.limited else None

    # ---------------------------------------------------------------- taking

    def take(
        self,
        cls: int,
        n: int,
        owner: Hashable,
        ahead: int = 0,
        unit: int = 1,
        near: int | None = None,
        sparing: bool = False,
    ) -> list[int] | Shortage:
        """Take `n` pages for `owner`, all or none.

        `ahead` asks for up to that many pages more, in multiples of `unit`, and only from the parent
        that gives the last of the `n`: pages reserved so never keep a parent from merging alone.
        The list is then longer than `n`. `near`: a page of this class whose parent to try first;
        without it that is the parent the owner took from last. `sparing` cuts no more parents than it
        must, wherever the pages then lie. Raises ValueError for a negative count.
        """
        level = self._levels[cls]
        if n < 1 or ahead < 0:
            if n == 0:
                return []
            raise ValueError(f"cannot take {n} pages ({ahead} ahead)")
        up = level.parent
        room = level.free + level.per * up.free if level.simple and up else self._room(level)
        if level.limited:
            room = min(room, self._allowed(level))
        if n + ahead > room:
            if n > room:
                return Shortage(max(0, room))
            ahead = room - n
        self._unstack(level)
        holding = level.held.get(owner)
        if holding is None:
            holding = Holding()
            if owner is not None:
                level.held[owner] = holding
        tail = holding.tail if near is None else self._parent_of(level, near)
        pages: list[int] = []
        need = n
        if level.split.get(tail):
            pages = self._draw(level, holding, tail, n, ahead, unit)
            need -= len(pages)
        while sparing and need > 0 and level.filled:
            pages += self._draw(level, holding, self._choose_open(level, need), need, 0, 1)
            need = n - len(pages)
        if need > 0 and up is not None:
            whole, rest = divmod(need, level.per)
            if rest and rest + ahead >= level.per and not (level.per - rest) % unit:
                whole += 1  # what is asked for ahead is all that a new parent would have left
            if whole:
                parents = self._new_parents(level, whole)
                pages += level.pages_in(parents).ravel().tolist()
                if owner is None:
                    level.split.update(dict.fromkeys(parents, FULL))
                else:
                    holding.whole.extend(parents)
                need = n - len(pages)
        while need > 0:
            home = self._choose(level, need, ahead)
            if home is None:
                pages += self._draw_new(level, holding, need, ahead, unit)
            else:
                pages += self._draw(level, holding, home, need, ahead, unit)
            need = n - len(pages)
        level.used += len(pages)
        return pages

    def take_whole(self, cls: int, parents: int, owner: Hashable, near: int | None = None) -> bytes | None:
        """All pages of `parents` fresh parents, int32 each: what `take` does for as many, at a fraction
        of its cost.

        None where `take` must decide: the class is not cut from the root or has a limit, too few root
        pages are free, or the parent that `take` would try first has free pages.
        """
        level = self._levels[cls]
        root = level.quick
        if root is None or root.free < parents:
            return None
        holding = level.held.get(owner)
        if holding is None:
            if near is not None and level.split.get(near - near % root.stride):
                return None
            if owner is not None:
                holding = level.held[owner] = Holding()
        elif level.split.get(holding.tail):
            return None
        fresh = self._cut_roots(level, root, parents)
        if parents == 1:
            (parent,) = fresh
            if holding is None:
                level.split[parent] = FULL
            else:
                holding.whole.append(parent)
            return array("i", level.range_of(parent)).tobytes()
        if holding is None:
            level.split.update(dict.fromkeys(fresh, FULL))
        else:
            holding.whole += fresh
        return level.pages_in(fresh).tobytes()

    def take_whole_each(
        self, cls: int, owners: Sequence[Hashable], nears: Sequence[int] | None = None
    ) -> bytes | None:
        """`take_whole` of one parent for each of several owners, one after the other; None where it would
        be for one of them, and then nobody got anything. With `nears` for nobody in particular."""
        level = self._levels[cls]
        root, n, split = level.quick, len(owners), level.split
        if root is None or root.free < n:
            return None
        if nears is not None:
            stride = root.stride
            if any(split.get(near - near % stride) for near in nears):
                return None
            fresh = self._cut_roots(level, root, n)
            split.update(dict.fromkeys(fresh, FULL))
            return level.pages_in(fresh).tobytes()
        held = level.held
        holdings = [held.get(owner) or Holding() for owner in owners]
        if any(map(split.get, map(_TAIL, holdings))):
            return None
        held.update(zip(owners, holdings, strict=True))
        fresh = self._cut_roots(level, root, n)
        for holding, parent in zip(holdings, fresh, strict=True):
            holding.whole.append(parent)
        return level.pages_in(fresh).tobytes()

    def _cut_roots(self, level: Level, root: Level, parents: int) -> array[int]:
        """Free root pages, cut for a level and all their pages counted as used."""
        root.free -= parents
        level.cut += parents
        level.used += parents * level.per
        return self._pop_roots(root, parents)

    @staticmethod
    def _pop_roots(root: Level, n: int) -> array[int]:
        """Remove `n` of the root's free pages; `free` is the caller's to count."""
        stack = root.stack
        if len(stack) >= n:
            pages = stack[-n:]
            del stack[-n:]
            return pages
        pop = root.split[ROOT].pop
        pages = stack[:]
        pages.extend([pop() for _ in range(n - len(stack))])
        del stack[:]
        return pages

    @staticmethod
    def _unstack(level: Level) -> None:
        """Enter the root's stacked pages into its set of free pages, where single ones can be found."""
        if level.stack:
            level.split[ROOT].update(level.stack)
            del level.stack[:]

    def _choose(self, level: Level, need: int, ahead: int) -> int | None:
        """The parent to draw from: an open one with room for all, a new one (None), an open one with
        room for what is needed, the emptiest open one. Among equals the fullest."""
        up = level.parent
        if up is None:
            return ROOT
        filled = level.filled
        if need + ahead < level.per:
            enough = filled >> need + ahead << need + ahead
            if enough:
                return next(reversed(level.buckets[(enough & -enough).bit_length() - 1]))
        if up.free if level.simple else self._room(up):
            return None
        return self._choose_open(level, need)

    @staticmethod
    def _choose_open(level: Level, need: int) -> int:
        filled = level.filled
        enough = filled >> need << need or 1 << filled.bit_length() - 1
        return next(reversed(level.buckets[(enough & -enough).bit_length() - 1]))

    def _draw_new(self, level: Level, holding: Holding, need: int, ahead: int, unit: int) -> list[int]:
        """Cut a new parent and take up to `need` pages (and some ahead) of it into a holding."""
        (parent,) = self._new_parents(level, 1)
        n, per = need, level.per
        if n < per and ahead:
            extra = min(per - n, ahead)
            n += extra - extra % unit
        n = min(n, per)
        every = level.range_of(parent)
        pages = list(every[:n])
        level.split[parent] = set(every[n:]) if n < per else FULL
        level.free += per - n
        level.file(parent, 0, per - n)
        holding.parts[parent] = set(pages)
        holding.tail = parent
        return pages

    def _draw(
        self, level: Level, holding: Holding, parent: int, need: int, ahead: int, unit: int
    ) -> list[int]:
        """Take up to `need` pages (and some ahead) of one split parent into a holding."""
        free = level.split[parent]
        before = len(free)
        n = need
        if n < before and ahead:
            extra = min(before - n, ahead)
            n += extra - extra % unit
        if n >= before:
            n = before
            pages = sorted(free)
            level.split[parent] = set() if parent == ROOT else FULL
            drawn = free
        else:
            pop = free.pop
            pages = [pop() for _ in range(n)]
            drawn = set(pages)
        level.free -= n
        level.file(parent, before, before - n)
        mine = holding.parts.get(parent)
        if mine is None:
            holding.parts[parent] = drawn
        else:
            mine |= drawn
        holding.tail = parent
        return pages

    def _new_parents(self, level: Level, n: int) -> Sequence[int]:
        """Up to `n` pages of the parent level, to be cut for `level`. They belong to no owner."""
        source = level.parent
        assert source is not None
        if source.parent is None:
            pages = self._pop_roots(source, min(n, source.free))
            source.free -= len(pages)
            level.cut += len(pages)
            return pages
        n = min(n, self._room(source))
        level.cut += n
        nobody = Holding()
        out: list[int] = []
        while len(out) < n:
            # One at a time is fullest first: what is nearly full fills up, so that the rest can merge.
            home = self._choose(source, 1, 0)
            if home is None:
                out += self._draw_new(source, nobody, n - len(out), 0, 1)
            else:
                out += self._draw(source, nobody, home, n - len(out), 0, 1)
        return out

    # ---------------------------------------------------------------- giving back

    def give(self, cls: int, pages: Iterable[int], owner: Hashable) -> None:
        """Give pages back; a parent whose last page returns merges, upwards as far as it goes.

        With owner None the pages must be disowned ones. Raises `DoubleFreeError`, `ForeignPageError`
        or `WrongKindError`, naming page and owner, before anything changes.
        """
        level = self._levels[cls]
        pages = list(pages)
        by_parent = self._by_parent(level, pages)
        n = len(pages)
        self._unstack(level)
        holding = level.held.get(owner)
        if holding is not None:
            self._settle(level, holding)
        else:
            if owner is None:
                for other in level.held.values():
                    self._settle(level, other)
            for child in level.children:  # so that a page that is cut is known to be
                for other in child.held.values():
                    self._settle(child, other)
        if n != sum(map(len, by_parent.values())):
            page = next(p for i, p in enumerate(pages) if p in pages[:i])
            raise DoubleFreeError(f"page {page} is in the list twice (owner {owner!r})", page, owner)
        for parent, mine in by_parent.items():
            if not self._may_give(level, parent, mine, owner, holding):
                raise self._diagnosis(level, parent, mine, owner, holding)
        if owner is None:
            self._refuse_owned(level, by_parent)
        if holding is not None:
            for parent, mine in by_parent.items():
                held = holding.parts[parent]
                held -= mine
                if not held:
                    del holding.parts[parent]
            if not holding.parts:
                del level.held[owner]
        level.used -= n
        self._put_back(level, by_parent)

    def give_all(self, cls: int, owner: Hashable) -> int:
        """Give back every page of a class that `owner` holds; how many that were."""
        level = self._levels[cls]
        holding = level.held.pop(owner, None)
        if holding is None:
            return 0
        n = len(holding.whole) * level.per + sum(map(len, holding.parts.values()))
        level.used -= n
        if holding.whole:
            self._merge(level, holding.whole)
        if holding.parts:
            self._put_back(level, holding.parts)
        return n

    def disown(self, cls: int, owner: Hashable) -> None:
        """The pages of `owner` stay taken but belong to nobody; `give(..., None)` returns them."""
        level = self._levels[cls]
        holding = level.held.pop(owner, None)
        if holding is not None and holding.whole:
            level.split.update(dict.fromkeys(holding.whole, FULL))

    def spans(self) -> list[Span]:
        """What lies where, in the order of addresses and without gaps: for maps and gauges."""
        self._unstack(self._levels[0])
        out: list[Span] = []
        for level in self._levels:
            cut = {p for child in level.children for p in child.split}
            cut |= {p for child in level.children for h in child.held.values() for p in h.whole}
            whole = {p: FULL for holding in level.held.values() for p in holding.whole}
            for parent, free in {**level.split, **whole}.items():
                for page in level.range_of(parent):
                    if page not in cut:
                        out.append(Span(page, level.stride, level.index, "free" if page in free else "used"))
                if level.parent is not None and level.span < level.parent.stride:
                    rest = level.parent.stride - level.span
                    out.append(Span(parent + level.span, rest, level.index, "lost"))
        return sorted(out)

    # ---------------------------------------------------------------- moving

    def open_parents(self, cls: int) -> dict[int, tuple[set[int], set[int]]]:
        """Parents of a class with both used and free pages, as (used, free); see `compact`."""
        level = self._levels[cls]
        return {
            parent: (set(level.range_of(parent)) - level.split[parent], set(level.split[parent]))
            for bucket in level.buckets
            for parent in bucket
        }

    def pages_of(self, cls: int, parent: int) -> set[int]:
        """All pages of a parent cut for this class."""
        return set(self._levels[cls].range_of(parent))

    def is_cut(self, cls: int, page: int) -> bool:
        """Whether a page of this class is cut into smaller ones, so that it cannot move."""
        return any(
            page in child.split or any(page in h.whole for h in child.held.values())
            for child in self._levels[cls].children
        )

    def parent_of(self, cls: int, page: int) -> int:
        """The parent in which a page of this class lies (-1: the pool itself)."""
        return self._parent_of(self._levels[cls], page)

    def parents_of(self, cls: int, pages: np.ndarray) -> np.ndarray:
        """`parent_of` of an array of pages of a class that is not the root's."""
        return self._parent_of(self._levels[cls], pages)

    def roots_of(self, pages: Any) -> Any:
        """The root pages, by number, in which pages of any class (an array, or one) lie."""
        return pages // self._levels[0].stride

    def load(self, cls: int, parent: int) -> int:
        """Used pages of a parent cut for this class."""
        level = self._levels[cls]
        return level.per - len(level.split.get(parent, FULL))

    def parents(self, cls: int) -> int:
        """Parents cut for this class."""
        return self._levels[cls].cut

    def move(self, cls: int, moves: Collection[tuple[int, int]]) -> None:
        """Enter page moves (source, target) in the books: targets get the sources' owners, sources
        become free. Raises `PageError` for a source that is not used or a target that is not free;
        nothing changes then.
        """
        level = self._levels[cls]
        sources = [source for source, _ in moves]
        targets = [target for _, target in moves]
        given, filled = self._by_parent(level, sources), self._by_parent(level, targets)
        self._unstack(level)
        for holding in level.held.values():
            if not given.keys().isdisjoint(holding.whole):
                self._settle(level, holding)
        for child in level.children:
            for other in child.held.values():
                self._settle(child, other)
        for parent, pages in given.items():
            if not self._may_give(level, parent, pages, None, None):
                raise self._diagnosis(level, parent, pages, None, None)
        for parent, pages in filled.items():
            if not pages <= level.split.get(parent, FULL):
                page = min(pages - level.split.get(parent, FULL))
                raise PageError(f"page {page} of class {level.name} is no free page to move to", page)
        if len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
            raise PageError("a page is moved, or moved to, twice")
        new = dict(moves)
        for holding in level.held.values():
            for parent in holding.parts.keys() & given.keys():
                leaving = holding.parts[parent] & given[parent]
                holding.parts[parent] -= leaving
                if not holding.parts[parent]:
                    del holding.parts[parent]
                for target in map(new.__getitem__, leaving):
                    holding.parts.setdefault(self._parent_of(level, target), set()).add(target)
        for parent, pages in filled.items():
            free = level.split[parent]
            before = len(free)
            level.split[parent] = free - pages if len(pages) < before or parent == ROOT else FULL
            level.free -= len(pages)
            level.file(parent, before, before - len(pages))
        self._put_back(level, given)

    @staticmethod
    def _settle(level: Level, holding: Holding) -> None:
        """Enter parents held whole into the books like any other."""
        if holding.whole:
            level.split.update(dict.fromkeys(holding.whole, FULL))
            for parent in holding.whole:
                holding.parts[parent] = set(level.range_of(parent))
            holding.whole = array("i")

    def _by_parent(self, level: Level, pages: list[int]) -> dict[int, set[int]]:
        """Pages by the parent they lie in. Neighbours in the list are mostly neighbours in a parent."""
        by_parent: dict[int, set[int]] = {}
        start = stop = 0
        mine: set[int] = set()
        for page in pages:
            if start <= page < stop:
                mine.add(page)
                continue
            parent = self._parent_of(level, page)
            known = by_parent.get(parent)
            if known is None:
                known = by_parent[parent] = set()
            mine = known
            mine.add(page)
            if parent != ROOT:
                start, stop = parent, parent + level.span
        return by_parent

    def _parent_of(self, level: Level, page: Any) -> Any:
        """The parent of a page or, where there is one, of each page of an array."""
        if level.parent is None:
            return ROOT
        if level.simple:
            return page - page % level.parent.stride
        strides = []
        up: Level | None = level.parent
        while up is not None:
            strides.append(up.stride)
            up = up.parent
        base = 0
        for stride in reversed(strides):
            base = base + (page - base) // stride * stride
        return base

    @staticmethod
    def _refuse_owned(level: Level, by_parent: Mapping[int, set[int]]) -> None:
        """What is given back in nobody's name must not be somebody's."""
        for owner, holding in level.held.items():
            for parent, pages in by_parent.items():
                if not pages.isdisjoint(holding.parts.get(parent, FULL)):
                    page = min(pages & holding.parts[parent])
                    raise ForeignPageError(
                        f"page {page} is held by {owner!r} (class {level.name}, given back as nobody's)", page
                    )

    @staticmethod
    def _may_give(
        level: Level, parent: int, pages: set[int], owner: Hashable, holding: Holding | None
    ) -> bool:
        if holding is not None:
            # What is held is taken, uncut and of this class.
            return pages <= holding.parts.get(parent, FULL)
        if owner is not None:
            return False
        free = level.split.get(parent)
        if free is None or not free.isdisjoint(pages):
            return False
        if not pages.issubset(level.range_of(parent)):
            return False
        return not any(page in child.split for child in level.children for page in pages)

    @staticmethod
    def _diagnosis(
        level: Level, parent: int, pages: set[int], owner: Hashable, holding: Holding | None
    ) -> PageError:
        """Why `_may_give` refused, for the first page at fault."""
        free = level.split.get(parent)
        mine = FULL if holding is None else holding.parts.get(parent, FULL)
        for page in sorted(pages):
            who = f"(class {level.name}, owner {owner!r})"
            if page not in level.range_of(parent):
                return WrongKindError(f"page {page} is no page of this class {who}", page, owner)
            if free is None:
                return WrongKindError(f"page {page} lies in nothing cut for this class {who}", page, owner)
            if page in free:
                return DoubleFreeError(f"page {page} is free already {who}", page, owner)
            if any(page in child.split for child in level.children):
                return WrongKindError(f"page {page} is cut into smaller pages {who}", page, owner)
            if owner is not None and page not in mine:
                return ForeignPageError(f"page {page} is not held by its giver {who}", page, owner)
        raise AssertionError("refused without a reason")

    def _put_back(self, level: Level, by_parent: Mapping[int, set[int]]) -> None:
        """Make pages free again, without questions; merge the parents that become whole."""
        whole = []
        for parent, pages in by_parent.items():
            free = level.split[parent]
            before = len(free)
            after = before + len(pages)
            if after == level.per and parent != ROOT:
                level.free -= before
                level.file(parent, before, after)
                del level.split[parent]
                whole.append(parent)
            else:
                if before or parent == ROOT:
                    free.update(pages)
                else:
                    level.split[parent] = pages
                level.free += len(pages)
                level.file(parent, before, after)
        if whole:
            self._merge(level, whole)

    def _merge(self, level: Level, parents: Sequence[int]) -> None:
        """Hand whole parents back to the level they were cut from."""
        source = level.parent
        assert source is not None
        level.cut -= len(parents)
        if source.parent is None:
            source.stack.extend(parents)
            source.free += len(parents)
            return
        by_parent: dict[int, set[int]] = {}
        for page in parents:
            by_parent.setdefault(self._parent_of(source, page), set()).add(page)
        self._put_back(source, by_parent)

    # ---------------------------------------------------------------- arithmetic

    def _room(self, level: Level) -> int:
        """Pages free or obtainable by cutting, limits on holding aside."""
        room, each, up = level.free, level.per, level.parent
        while up is not None:
            room += each * up.free
            each *= up.per
            up = up.parent
        return room

    def _allowed(self, level: Level) -> int:
        """Pages the limits still allow; negative where more are held."""
        allowed = MAX_GRAINS if level.limit is None else level.limit - level.used
        if level.kind is not None and level.kind in self._kind_limits:
            used = sum(lv.used for lv in self._by_kind[level.kind])
            allowed = min(allowed, self._kind_limits[level.kind] - used)
        return allowed

    def _fits(self, wanted: Mapping[int, int]) -> bool:
        """Whether all of `wanted` (pages by class) could be taken, one class after the other."""
        demand = [wanted.get(i, 0) for i in range(len(self._levels))]
        for kind, limit in self._kind_limits.items():
            levels = self._by_kind[kind]
            more = sum(wanted.get(lv.index, 0) for lv in levels)
            if more and more + sum(lv.used for lv in levels) > limit:
                return False
        for level in reversed(self._levels):
            short = demand[level.index] - level.free
            if short <= 0:
                continue
            if level.parent is None:
                return False
            demand[level.parent.index] += -(-short // level.per)
        return True

    # ---------------------------------------------------------------- checking

    def check(self) -> None:
        """Recount everything; `CorruptPoolError` where the books contradict themselves."""
        self._unstack(self._levels[0])
        audit(self._levels, self._parent_of)
