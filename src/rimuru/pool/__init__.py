"""The page pool: KV cache, recurrent state and experts as tenants of one piece of memory.

Room: the pool. Rule: imports nothing else of the package. `geometry` and `ledger` need the
standard library only, `allocator` numpy too; `arena` and `tables` need torch and are imported by name.
"""

from .allocator import Allocator, Counts, Shortage, Span
from .errors import (
    CorruptPoolError,
    DoubleFreeError,
    ForeignPageError,
    GeometryError,
    InUseError,
    PageError,
    PoolError,
    WrongKindError,
)
from .geometry import (
    AttentionKind,
    Geometry,
    Kind,
    LayerGroup,
    PageClass,
    PoolSpec,
    RecurrentKind,
    plan_geometry,
)
from .ledger import Ledger, StepEvent

__all__ = [
    "Allocator",
    "AttentionKind",
    "CorruptPoolError",
    "Counts",
    "DoubleFreeError",
    "ForeignPageError",
    "Geometry",
    "GeometryError",
    "InUseError",
    "Kind",
    "LayerGroup",
    "Ledger",
    "PageClass",
    "PageError",
    "PoolError",
    "PoolSpec",
    "RecurrentKind",
    "Shortage",
    "Span",
    "StepEvent",
    "WrongKindError",
    "plan_geometry",
]
