"""Streamed prefill: bits against experts at rest, then a chunk's time against the link and the pool.

Twelve MoE layers of Qwen3-30B's shape, half of their experts in host memory, with rings of many sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from harness import Report
from moe_case import QWEN3, Shape

from rimuru.experts.store import ExpertStore
from rimuru.experts.stream import CopyEngine, ExpertStream
from rimuru.kernels import triton as kernels
from rimuru.pool.allocator import Allocator
from rimuru.pool.arena import Arena
from rimuru.pool.geometry import AttentionKind, Kind, PoolSpec, plan_geometry
from rimuru.pool.tables import Table

LAYERS = 12
RING = 128  # staging pages at most: two layers' missing experts
LEAST = 1024  # tokens for which the engine streams
BAR = 1.1  # over the longer of link and compute, where half is missing; of less, the ends of a cut weigh more

Addresses = Sequence  # of one layer each: a row of addresses, or passes of rows


class Model:
    """`LAYERS` MoE layers whose first `lendable` experts lie in host memory and, for comparison, in a twin
    on the device as well; the others in the pool."""

    def __init__(self, shape: Shape, lendable: int) -> None:
        self.shape, self.lendable, self.layout = shape, lendable, shape.layout()
        kv = AttentionKind("kv", tuple(range(48)), bytes_per_token_per_layer=2048, block_tokens=16)
        geometry = plan_geometry(PoolSpec(attention=(kv,), expert_bytes=self.layout.page_bytes))
        self.cls = geometry.class_of(Kind.EXPERT)
        resident = LAYERS * (shape.experts - lendable)
        per_root = max(1, geometry.classes[self.cls].per_parent)
        self.allocator = Allocator(geometry, -(-(resident + RING) // per_root) * geometry.huge_bytes)
        self.arena = Arena(self.allocator.roots * geometry.huge_bytes, "cuda")
        self.table = Table((LAYERS, shape.experts), torch.int64, "cuda")
        self.store = ExpertStore(
            self.layout, LAYERS, shape.experts, allocator=self.allocator, page_class=self.cls,
            arena=self.arena, table=self.table, lendable=LAYERS * lendable, resident=resident,
        )  # fmt: skip
        generator = torch.Generator("cuda").manual_seed(0)
        for layer in range(LAYERS):
            for expert in range(shape.experts):
                for part in self.store.sink(layer, expert):
                    part.copy_(
                        torch.randn(part.shape, generator=generator, device="cuda") * part.shape[1] ** -0.5
                    )
        page = self.layout.page_bytes
        self.twin = torch.empty((LAYERS, lendable, page), dtype=torch.uint8, device="cuda")
        for layer in range(LAYERS):
            for expert in range(lendable):
                self.twin[layer, expert].copy_(self.store.host_page(layer, expert))
        self.host = self.table.mirror[:, :lendable].copy()
        places = torch.arange(LAYERS * lendable).view(LAYERS, lendable) * page + self.twin.data_ptr()
        self.rest = places.numpy()
        self.held: list[int] = []
        self.stream = ExpertStream(
            self.layout, self.store.host_page, table=self.table, allocator=self.allocator,
            page_class=self.cls, arena=self.arena, top_k=shape.top_k, poison=True,
        )  # fmt: skip

    def missing(self, per_layer: int) -> None:
        """Have the table point at host memory for that many experts a layer, at the twin for the others."""
        for layer in range(LAYERS):
            row = [*self.host[layer, :per_layer].tolist(), *self.rest[layer, per_layer:].tolist()]
            self.table.stage_run(layer * self.shape.experts, row)
        self.table.flush(kernels.apply_edits)
        torch.cuda.synchronize()

    def free(self, pages: int) -> None:
        """Leave that many pages of the pool free."""
        self.allocator.give(self.cls, self.held, "others")
        self.held = self.allocator.take(self.cls, self.allocator.obtainable(self.cls) - pages, "others")


class Chunk:
    """A prompt chunk's hidden states and routings."""

    def __init__(self, model: Model, tokens: int) -> None:
        shape, generator = model.shape, torch.Generator("cuda").manual_seed(1)
        self.tokens, self.model = tokens, model
        self.x = torch.randn((tokens, shape.hidden), generator=generator, device="cuda").bfloat16()
        score = torch.randn((LAYERS, tokens, shape.experts), generator=generator, device="cuda")
        self.routing = [kernels.route(s, shape.top_k, "softmax", True) for s in score]

    def forward(self, addresses: Addresses) -> torch.Tensor:
        x = self.x
        for (weights, ids), row in zip(self.routing, addresses, strict=True):
            x = x + kernels.moe(x, ids, weights, row, self.model.layout)
        return x

    def streamed(self) -> torch.Tensor:
        # Also where it would not pay: that is for the times to show.
        with self.model.stream.step(max(self.tokens, LEAST)) as passes:
            assert passes is not None
            return self.forward(passes)


def timed(fn: Callable[[], torch.Tensor], rounds: int = 3) -> tuple[float, float, torch.Tensor]:
    """Milliseconds on the device and on the host (median), from an idle device on; and what came out."""
    fn()
    device, host = [], []
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        begin.record()
        out = fn()
        end.record()
        host.append((time.perf_counter() - start) * 1e3)
        end.synchronize()
        device.append(begin.elapsed_time(end))
    return statistics.median(device), statistics.median(host), out


def link_ms(model: Model, per_layer: int) -> float:
    """The copy engine's time for the missing experts, one after the other."""
    engine = CopyEngine(model.arena.device)
    target = torch.empty(model.layout.page_bytes, dtype=torch.uint8, device="cuda")
    pairs = [(target, model.store.host_page(i, e)) for i in range(LAYERS) for e in range(per_layer)]

    def copy() -> torch.Tensor:
        engine.fence()
        engine.copy(pairs)
        engine.wait(engine.mark())
        return target

    return timed(copy)[0]


def compare(report: Report, chunk: Chunk, per_layer: int, rings: tuple[int, ...]) -> None:
    model = chunk.model
    name = f"{chunk.tokens} tokens, {per_layer} of {model.shape.experts} on the host"
    model.missing(0)
    resident, _, want = timed(lambda: chunk.forward(model.table.device_table))
    model.missing(per_layer)
    link = link_ms(model, per_layer)
    floor = max(link, resident)
    rate = LAYERS * per_layer * model.layout.page_bytes / link / 1e6
    report.say(f"{name}: all resident {resident:.2f} ms, link {link:.2f} ms ({rate:.1f} GB/s)")
    in_place, _, out = timed(lambda: chunk.forward(model.table.device_table), rounds=2)
    report.equal(f"{name}: in place", out, want)
    report.bar(f"{name}: in place", in_place / floor, "x floor")
    for ring in rings:
        model.free(ring)
        device, host, out = timed(chunk.streamed)
        report.equal(f"{name}: ring of {ring}", out, want)
        bar = BAR if ring >= 16 and 2 * per_layer >= model.shape.experts else None
        report.bar(f"{name}: ring of {ring}", device / floor, "x floor", bar)
        report.say(f"{name}: ring of {ring}: {device:.2f} ms, {host:.2f} ms of them the host's")
        model.stream.check()
    model.free(RING)


def run(report: Report) -> None:
    model = Model(QWEN3, 64)
    large = Chunk(model, 4096)
    compare(report, large, 64, (128, 72, 64, 32, 16, 8, 4, 2, 1))
    compare(report, large, 16, (32, 16, 8))
    compare(report, large, 4, (8, 4, 2))
    compare(report, Chunk(model, 1024), 64, (128, 16))
    compare(report, Chunk(model, 512), 64, (128, 16))
    model.stream.check()
    model.store.check()
