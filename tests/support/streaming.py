"""A small pool of experts, some in host memory, and the stream that brings them in for a step."""

from __future__ import annotations

import numpy as np
import torch

from rimuru.experts.store import ExpertStore, copy_now
from rimuru.experts.stream import ExpertStream
from rimuru.kernels import reference
from rimuru.kernels.types import EXPERT_ADDRESS, ExpertLayout
from rimuru.pool.allocator import Allocator
from rimuru.pool.arena import Arena
from rimuru.pool.geometry import AttentionKind, Kind, PoolSpec, plan_geometry
from rimuru.pool.tables import Table

LAYERS, EXPERTS, TOP_K = 4, 6, 2
MANY = 200  # tokens that are worth streaming for
LAYOUT = ExpertLayout(hidden=48, intermediate=32, dtype=torch.float32)


class House:
    """A pool with `free` expert pages beside the resident experts, a store, and a stream."""

    def __init__(self, resident: int, free: int, seed: int = 0, *, promote=copy_now, poison=True, **options):
        kv = AttentionKind("kv", (0, 1), bytes_per_token_per_layer=256, block_tokens=8)
        geometry = plan_geometry(PoolSpec(attention=(kv,), expert_bytes=LAYOUT.page_bytes))
        cls = geometry.class_of(Kind.EXPERT)
        per_root = max(1, geometry.classes[cls].per_parent)
        self.allocator = Allocator(geometry, -(-max(1, resident + free) // per_root) * geometry.huge_bytes)
        self.cls = cls
        self.arena = Arena(self.allocator.roots * geometry.huge_bytes)
        self.table = Table((LAYERS, EXPERTS), torch.int64)
        self.store = ExpertStore(
            LAYOUT, LAYERS, EXPERTS, allocator=self.allocator, page_class=cls, arena=self.arena,
            table=self.table, lendable=LAYERS * EXPERTS, resident=resident, copy=promote,
            poison=poison,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                for part in self.store.sink(layer, expert):
                    part.copy_(torch.randn(part.shape, generator=generator) / 7)
        # In any order, so that layers differ in how many of their experts are missing.
        shuffled = np.random.default_rng(seed).permutation(LAYERS * EXPERTS).tolist()
        self.store.fill_initial(divmod(i, EXPERTS) for i in shuffled)
        self.allocator.take(cls, self.allocator.obtainable(cls) - free, "others")
        self.table.flush(reference.apply_edits)
        self.stream = ExpertStream(
            LAYOUT, self.store.host_page, table=self.table, allocator=self.allocator, page_class=cls,
            arena=self.arena, top_k=TOP_K, poison=poison, **options,
        )  # fmt: skip

    @property
    def missing(self) -> np.ndarray:
        return ~self.store.resident

    def bytes_at(self, entry: int) -> torch.Tensor:
        return reference.tensor_at(entry & EXPERT_ADDRESS, (LAYOUT.page_bytes,), torch.uint8)

    def check(self) -> None:
        self.stream.check()
        self.store.check()
        self.allocator.check()
