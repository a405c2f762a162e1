"""Experts that come while steps run: promotions beside decode steps, then streamed prefill.

Bits against experts at rest, then a chunk's time against the link and the pool. Twelve MoE layers of
Qwen3-30B's shape, half of their experts in host memory, with rings of many sizes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from harness import Report
from moe_case import QWEN3, Shape

from rimuru.experts.side_copy import CudaLane, SideStreamCopy
from rimuru.experts.store import ExpertStore
from rimuru.experts.stream import CopyEngine, ExpertStream
from rimuru.kernels import triton as kernels
from rimuru.kernels.types import EXPERT_HOST
from rimuru.pool.allocator import Allocator
from rimuru.pool.arena import Arena
from rimuru.pool.geometry import AttentionKind, Kind, PoolSpec, plan_geometry
from rimuru.pool.tables import Table

LAYERS = 12
RING = 128  # staging pages at most: two layers' missing experts
LEAST = 1024  # tokens for which the engine streams
PAUSE = 60_000_000  # cycles, about 30 ms: some 170 experts cross the link
ROUNDS = 60
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
            copy=SideStreamCopy(CudaLane(torch.cuda.Stream()), ahead=RING),
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

    def forward(self, addresses: Addresses, pause_before: int = LAYERS) -> torch.Tensor:
        x = self.x
        for layer, ((weights, ids), row) in enumerate(zip(self.routing, addresses, strict=True)):
            if layer == pause_before:
                torch.cuda._sleep(PAUSE)
            x = x + kernels.moe(x, ids, weights, row, self.model.layout)
        return x

    def touched(self, layer: int) -> list[int]:
        return self.routing[layer][1].unique().tolist()

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


def under_way(report: Report, model: Model, step: Chunk, want: torch.Tensor) -> None:
    """A step launched before the host has seen a copy end reads the page, from the layer on where it is."""
    store, half = model.store, LAYERS // 2
    coming = [(layer, e) for layer in range(half, LAYERS) for e in step.touched(layer) if e < model.lendable]
    table = model.table.device_table
    torch.cuda._sleep(PAUSE)  # the step before, which may still read what lies in the pages
    before = table.clone()
    came = store.promote(coming)
    store.poll()  # issues the copies
    out = step.forward(table, pause_before=half)
    after = table.clone()
    torch.cuda.synchronize()
    report.check("promoted: experts without a page", len(coming) - len(came), 0)
    report.check("promoted: seen by the host", int(store.resident[:, : model.lendable].sum()), 0)
    host = [sum(bool(int(t[x]) & EXPERT_HOST) for x in came) for t in (before.cpu(), after.cpu())]
    report.check("promoted: in the pool before the copies may begin", len(came) - host[0], 0)
    report.check("promoted: in host memory after the step", host[1], 0)
    report.equal("a step that finds promoted experts half way", out, want)
    store.poll()
    report.check("promoted: not resident at the poll", sum(not store.resident[x] for x in came), 0)
    store.demote(came)


def churn(report: Report, model: Model, step: Chunk, want: torch.Tensor) -> None:
    """Steps launched one ahead while experts come and go between them at random, into each other's pages."""
    store, table, rng = model.store, model.table, random.Random(0)
    lent = [(layer, e) for layer in range(LAYERS) for e in range(model.lendable)]
    outs, moved, behind = [], 0, [torch.cuda.Event(), torch.cuda.Event()]
    for turn in range(ROUNDS):
        table.flush(kernels.apply_edits)
        outs.append(step.forward(table.device_table))
        behind[turn % 2].record()
        if turn:
            behind[(turn - 1) % 2].synchronize()
        store.poll()
        store.demote([x for x in lent if store.resident[x] and rng.random() < 0.3])
        moved += len(store.promote(rng.sample(lent, 40)))
        store.poll()
        store.check()
    torch.cuda.synchronize()
    store.poll()
    table.flush(kernels.apply_edits)
    table.check()
    wrong = sum(not torch.equal(out, want) for out in outs)
    report.check(f"steps of {ROUNDS} with other bits while {moved} experts came", wrong, 0)
    store.demote([x for x in lent if store.resident[x]])
    table.flush(kernels.apply_edits)


def promotions(report: Report, model: Model) -> None:
    step = Chunk(model, 4)
    model.missing(0)
    want = step.forward(model.table.device_table)
    model.missing(model.lendable)
    model.free(RING)
    under_way(report, model, step, want)
    model.free(24)  # so that each page goes from hand to hand
    churn(report, model, step, want)
    model.free(RING)


def run(report: Report) -> None:
    model = Model(QWEN3, 64)
    promotions(report, model)
    large = Chunk(model, 4096)
    compare(report, large, 64, (128, 72, 64, 32, 16, 8, 4, 2, 1))
    compare(report, large, 16, (32, 16, 8))
    compare(report, large, 4, (8, 4, 2))
    compare(report, Chunk(model, 1024), 64, (128, 16))
    compare(report, Chunk(model, 512), 64, (128, 16))
    model.stream.check()
    model.store.check()
