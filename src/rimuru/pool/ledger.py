"""What keeps a page from being reused or moved besides its owner: references, pins, epochs, tags.

Room: the pool. Rule: sparse; a page that is simply held costs nothing here.

On the compute stream stream order alone makes reuse safe. An *epoch* guards a page whose last user
is another stream, another device or the host: it goes back to the allocator when the event that ends
the use has passed. Until then the page counts as *coming*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

from .allocator import Allocator
from .errors import CorruptPoolError, ForeignPageError, InUseError, PageError


class Event(Protocol):
    """Anything that knows whether it has passed; `torch.cuda.Event` is one."""

    def query(self) -> bool: ...


class StepEvent:
    """An event on a counter of steps: it has passed when `done()` is at least `step`."""

    __slots__ = ("done", "step")

    def __init__(self, step: int, done: Callable[[], int]):
        self.step = step
        self.done = done

    def query(self) -> bool:
        return self.done() >= self.step


class Ledger:
    """References, pins, epochs and (in debug mode) owner tags of an allocator's pages.

    Pages are grain indices; all methods take the page class by index, as the allocator does.
    """

    def __init__(self, allocator: Allocator, debug: bool = False):
        self.allocator = allocator
        self.debug = debug
        self._references: dict[tuple[int, int], int] = {}  # beyond the first
        self._pins: dict[tuple[int, int], int] = {}
        self._waiting: deque[tuple[Event, int, list[int], Hashable]] = deque()
        self._awaited: set[tuple[int, int]] = set()  # the pages in `_waiting`
        self._coming: dict[int, int] = {}
        self._tags: dict[tuple[int, int], Hashable] = {}

    # ---------------------------------------------------------------- references

    def retain(self, cls: int, page: int) -> int:
        """One more user of a page that is held; how many there are now."""
        n = self._references.get((cls, page), 1) + 1
        self._references[cls, page] = n
        return n

    def drop(self, cls: int, page: int) -> int:
        """One user less; at 0 the caller, who was the last, gives the page back."""
        n = self._references.pop((cls, page), 1) - 1
        if n > 1:
            self._references[cls, page] = n
        return n

    def references(self, cls: int, page: int) -> int:
        """Users of a page that is held."""
        return self._references.get((cls, page), 1)

    # ---------------------------------------------------------------- pins

    def pin(self, cls: int, page: int) -> None:
        """The page must stay where it is; pins nest."""
        self._pins[cls, page] = self._pins.get((cls, page), 0) + 1

    def unpin(self, cls: int, page: int) -> None:
        """Undo one `pin`. Raises PageError for a page without one."""
        n = self._pins.get((cls, page), 0)
        if n == 0:
            raise PageError(f"page {page} (class {cls}) is not pinned", page)
        if n == 1:
            del self._pins[cls, page]
        else:
            self._pins[cls, page] = n - 1

    def pinned(self, cls: int, page: int) -> bool:
        """Whether the page must stay where it is: pinned, shared, or waiting for an epoch."""
        key = (cls, page)
        return key in self._pins or key in self._references or key in self._awaited

    # ---------------------------------------------------------------- epochs

    def give_after(self, cls: int, pages: Iterable[int], owner: Hashable, event: Event) -> None:
        """Give `pages` back once `event` has passed. `poll` does it; until then they are coming.

        Raises `InUseError` for a page that is pinned or has other users; nothing changes then.
        """
        pages = list(pages)
        self._refuse_if_used(cls, pages, owner)
        if event.query():
            self._return(cls, pages, owner)
            return
        self._waiting.append((event, cls, pages, owner))
        self._awaited.update((cls, page) for page in pages)
        self._coming[cls] = self._coming.get(cls, 0) + len(pages)

    def poll(self) -> int:
        """Return the pages whose event has passed to the allocator; how many those were."""
        returned = 0
        for _ in range(len(self._waiting)):
            event, cls, pages, owner = self._waiting.popleft()
            if event.query():
                self._return(cls, pages, owner)
                self._awaited.difference_update((cls, page) for page in pages)
                self._coming[cls] -= len(pages)
                returned += len(pages)
            else:
                self._waiting.append((event, cls, pages, owner))
        return returned

    def coming(self, cls: int) -> int:
        """Pages of a class that wait for an event and will be free without further action."""
        return self._coming.get(cls, 0)

    def give(self, cls: int, pages: Iterable[int], owner: Hashable) -> None:
        """`Allocator.give` for pages without pins and other users; raises `InUseError` otherwise."""
        pages = list(pages)
        self._refuse_if_used(cls, pages, owner)
        self._return(cls, pages, owner)

    def _refuse_if_used(self, cls: int, pages: list[int], owner: Hashable) -> None:
        for page in pages:
            if (cls, page) in self._pins:
                raise InUseError(f"page {page} (class {cls}, owner {owner!r}) is pinned", page, owner)
            if (cls, page) in self._references:
                n = self._references[cls, page]
                raise InUseError(f"page {page} (class {cls}, owner {owner!r}) has {n} users", page, owner)
            if (cls, page) in self._awaited:
                raise InUseError(
                    f"page {page} (class {cls}, owner {owner!r}) already waits for its epoch", page, owner
                )
            if self.debug and self._tags.get((cls, page), owner) != owner:
                tag = self._tags[cls, page]
                raise ForeignPageError(
                    f"page {page} (class {cls}) is tagged {tag!r}, not {owner!r}", page, owner
                )

    def _return(self, cls: int, pages: list[int], owner: Hashable) -> None:
        self.allocator.give(cls, pages, owner)
        for page in pages:
            self._tags.pop((cls, page), None)

    # ---------------------------------------------------------------- debug

    def tag(self, cls: int, pages: Iterable[int], owner: Hashable) -> None:
        """Debug mode: note who took pages. Raises `InUseError` if one is tagged already."""
        if not self.debug:
            return
        pages = list(pages)
        for page in pages:
            if (cls, page) in self._tags:
                tag = self._tags[cls, page]
                raise InUseError(
                    f"page {page} (class {cls}) was handed out twice, first to {tag!r}", page, owner
                )
        for page in pages:
            self._tags[cls, page] = owner

    def check(self) -> None:
        """Recount; `CorruptPoolError` where references, pins or waiting pages cannot be right."""
        counted: dict[int, int] = {}
        for _, cls, pages, _ in self._waiting:
            counted[cls] = counted.get(cls, 0) + len(pages)
        if counted != {c: n for c, n in self._coming.items() if n}:
            raise CorruptPoolError(f"pages waiting {counted} differ from pages counted {self._coming}")
        if {(cls, page) for _, cls, pages, _ in self._waiting for page in pages} != self._awaited:
            raise CorruptPoolError("the pages that wait differ from those listed as waiting")
        if any(n < 2 for n in self._references.values()):
            raise CorruptPoolError("a reference count below two is stored")
        if any(n < 1 for n in self._pins.values()):
            raise CorruptPoolError("a pin count below one is stored")
