"""The experts as tenants of a simulated pool: pages and bytes are counted, nothing is moved.

Room: the simulator's stand-in for `rimuru.experts.store`. Rule: the protocol of
`rimuru.engine.memory.Experts`, the same lendable experts and the same first residents as the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rimuru.pool import Allocator, Shortage

OWNER = "experts"
Expert = tuple[int, int]  # (MoE layer, expert)


class CountedExperts:
    """`layers x experts` experts over an allocator; `link_bytes` counts what promotions brought in."""

    def __init__(
        self,
        layers: int,
        experts: int,
        *,
        allocator: Allocator,
        page_class: int,
        lendable: int,
        resident: int,
    ):
        rank = np.arange(experts)[None, :] * layers + np.arange(layers)[:, None]
        self.lendable = rank < lendable
        self.resident = np.zeros((layers, experts), bool)
        self.in_flight = np.zeros((layers, experts), bool)  # none ever: a promotion is charged at once
        self.link_bytes = 0
        self._allocator, self._class = allocator, page_class
        self._bytes = allocator.geometry.classes[page_class].page_bytes
        self._page: dict[Expert, int] = {}
        # Those that never leave come first, then the lendable ones, evenly over the layers.
        order = np.argsort(np.where(self.lendable, rank, -1), axis=None, kind="stable")[:resident]
        came = self._bring(zip(*(i.tolist() for i in np.divmod(order, experts)), strict=True))
        if len(came) < resident:
            raise MemoryError(f"the pool holds {len(came)} of the {resident} experts resident at start")

    def promote(self, experts: Sequence[Expert]) -> list[Expert]:
        """Bring experts in, in order, while pages last; returns those that came."""
        came = self._bring(experts)
        self.link_bytes += len(came) * self._bytes
        return came

    def _bring(self, experts: Iterable[Expert]) -> list[Expert]:
        coming = [x for x in dict.fromkeys(experts) if x not in self._page]
        pages = self._take(len(coming))
        coming = coming[: len(pages)]
        for x, page in zip(coming, pages, strict=True):
            self._page[x] = page
            self.resident[x] = True
        return coming

    def demote(self, experts: Sequence[Expert]) -> None:
        """Drop resident, lendable experts; their pages are free at once."""
        for x in experts:
            if x not in self._page or not self.lendable[x]:
                raise ValueError(f"expert {x[1]} of MoE layer {x[0]} cannot be demoted")
        for x in experts:
            self.resident[x] = False
        self._allocator.give(self._class, [self._page.pop(x) for x in experts], OWNER)

    def check(self) -> None:
        """Assert that masks, pages and the allocator agree."""
        assert len(self._page) == int(self.resident.sum()), "a resident expert without a page"
        assert all(self.resident[x] for x in self._page), "a page without its expert"
        assert self._allocator.held_by(self._class, OWNER) == len(self._page), "pages lost"
        assert (self.resident | self.lendable).all(), "an expert that lies nowhere"

    def _take(self, n: int) -> list[int]:
        got = self._allocator.take(self._class, n, OWNER) if n else []
        if isinstance(got, Shortage):
            got = self._allocator.take(self._class, got.obtainable, OWNER) if got.obtainable else []
        assert not isinstance(got, Shortage), "the allocator refused what it had offered"
        return got
