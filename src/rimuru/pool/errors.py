"""What can go wrong with a pool, as types.

Room: the pool. Rule: errors are for mistakes of the caller; a pool that is merely full answers
with a value (`Shortage`). Raising one of these leaves every structure as it was.
"""

from __future__ import annotations

from typing import Any


class PoolError(Exception):
    """Root of the pool's errors."""


class GeometryError(PoolError, ValueError):
    """Sizes from which no pool can be planned or built."""


class PageError(PoolError, ValueError):
    """A page was given back, pinned or counted that the caller does not hold.

    `page` is its grain index and `owner` the caller's name for itself.
    """

    def __init__(self, message: str, page: int | None = None, owner: Any = None):
        super().__init__(message)
        self.page = page
        self.owner = owner


class DoubleFreeError(PageError):
    """The page is already free."""


class ForeignPageError(PageError):
    """The page exists but the caller does not hold it."""


class WrongKindError(PageError):
    """The index is no page of this class: another kind lies there, or nothing starts there."""


class InUseError(PageError):
    """The page still has a reference, a pin or an epoch that has not passed."""


class CorruptPoolError(PoolError, AssertionError):
    """`check()` found a structure that contradicts itself; always a bug of this package."""
