"""Rates of the CPU back end and of its torch twin, in one run, on the demo model's shapes.

    python benchmarks/cpu_kernels.py [--layers 30] [--threads 2] [--seconds 1] [--no-twin]

Every layer has its own weights, so that a decode step reads them from memory and not from a cache.
Times are the best of several passes. A decode step is every kernel of one (no sampling, no engine);
its bytes count the dense weights only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch

from rimuru.kernels import cpu, reference
from rimuru.kernels.types import ExpertLayout, KVLayout, KVView, StepMeta

HIDDEN, INTER, EXPERTS, TOP_K, VOCAB = 576, 1536, 8, 2, 49152
Q_HEADS, KV_HEADS, DIM, BLOCK, CONTEXT = 9, 3, 64, 16, 256
QKV = (Q_HEADS + 2 * KV_HEADS) * DIM


class Demo:
    """The demo model's weights and a pool that holds `CONTEXT` tokens for each of `streams` streams."""

    def __init__(self, layers: int, streams: int, dtype: torch.dtype) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype).uniform_(-0.05, 0.05)

        self.dtype, self.layers = dtype, layers
        self.layout = ExpertLayout(HIDDEN, INTER, dtype)
        page = self.layout.page_bytes
        self.experts = torch.empty(layers * EXPERTS * page + 256, dtype=torch.uint8)
        self.experts[: self.experts.numel() // 4 * 4].view(dtype).uniform_(-0.05, 0.05)
        first = self.experts.data_ptr() + -self.experts.data_ptr() % 256
        self.table = first + torch.arange(layers * EXPERTS).view(layers, EXPERTS) * page
        self.qkv = [weight(QKV, HIDDEN) for _ in range(layers)]
        self.out = [weight(HIDDEN, HIDDEN) for _ in range(layers)]
        self.router = [weight(EXPERTS, HIDDEN) for _ in range(layers)]
        self.norm = torch.ones(HIDDEN, dtype=dtype)
        self.head = weight(VOCAB, HIDDEN)
        self.kv = KVLayout(layers, BLOCK, KV_HEADS, DIM, 2048, dtype)
        blocks, stride = CONTEXT // BLOCK, -(-self.kv.page_bytes // self.kv.grain)
        self.pages = torch.arange(streams * blocks, dtype=torch.int32).view(streams, blocks) * stride
        self.pool = torch.zeros(streams * blocks * stride * self.kv.grain_elems, dtype=dtype)
        self.rope = reference.rope_table(CONTEXT, DIM, 10_000.0, torch.device("cpu"))

    def meta(self, streams: int) -> StepMeta:
        every = torch.arange(streams, dtype=torch.int32)
        last = torch.full((streams,), CONTEXT - 1, dtype=torch.int32)
        starts = torch.arange(streams + 1, dtype=torch.int32)
        return StepMeta(last, every, starts, every, last + 1, 1, CONTEXT)

    def qkv_layers(self, x: torch.Tensor, ops: ModuleType) -> None:
        for weight in self.qkv:
            ops.linear(x, weight)

    def moe_layers(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, ops: ModuleType) -> None:
        for table in self.table:
            ops.moe(x, ids, weights, table, self.layout)

    def logits(self, x: torch.Tensor, ops: ModuleType) -> torch.Tensor:
        return ops.linear(x, self.head)

    def step(self, x: torch.Tensor, meta: StepMeta, ops: ModuleType) -> torch.Tensor:
        residual = None
        for i in range(self.layers):
            view = KVView(self.pool, self.pages, i, self.kv)
            h, residual = ops.rms_norm(x, self.norm, 1e-5, residual)
            q = ops.qkv_to_cache(ops.linear(h, self.qkv[i]), Q_HEADS, view, meta, self.rope)
            h = ops.linear(ops.attention(q, view, meta, DIM**-0.5), self.out[i])
            h, residual = ops.rms_norm(h, self.norm, 1e-5, residual)
            weights, ids = ops.route(ops.linear(h, self.router[i]), TOP_K)
            x = ops.moe(h, ids, weights, self.table[i], self.layout)
        return ops.linear(ops.rms_norm(x, self.norm, 1e-5, residual)[0], self.head)


def best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest call."""
    call()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


class Table:
    """One row a case, one column a back end."""

    def __init__(self, sides: list[ModuleType], repeats: int, seconds: float) -> None:
        self.sides, self.repeats, self.seconds = sides, repeats, seconds

    def row(self, what: str, call: Callable[..., object], tokens: int, nbytes: int, macs: int) -> None:
        """`call(side)` runs the case `repeats` times; the counts are of one."""
        times = [best(partial(call, side), self.seconds) / self.repeats for side in self.sides]
        cells = [
            f"{t * 1e3:8.3f} ms {nbytes / t / 1e9:5.1f} GB/s {2 * macs / t / 1e9:6.1f} GFLOP/s"
            f" {tokens / t:8.0f} tok/s"
            for t in times
        ]
        print(f"{what:26}{' |'.join(cells)}  x{times[-1] / times[0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time spent on each cell")
    parser.add_argument("--no-twin", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype, layers = getattr(torch, args.dtype), args.layers
    demo, size = Demo(layers, 16, dtype), dtype.itemsize
    sides = [cpu] if args.no_twin else [cpu, reference]
    names = ", ".join(side.__name__.rsplit(".", 1)[1] for side in sides)
    print(f"{args.dtype}, {args.threads} threads, {layers} layers; columns: {names}; last: ratio")

    def hidden(m: int) -> torch.Tensor:
        return torch.randn(m, HIDDEN).to(dtype)

    table, once = Table(sides, layers, args.seconds), Table(sides, 1, args.seconds)
    for m in (1, 4, 16, 64, 512):
        x, macs = hidden(m), QKV * HIDDEN
        table.row(f"linear {m}x{HIDDEN}x{QKV}", partial(demo.qkv_layers, x), m, macs * size, m * macs)
    for m in (1, 16):
        x, macs = hidden(m), VOCAB * HIDDEN
        once.row(f"linear {m}x{HIDDEN}x{VOCAB}", partial(demo.logits, x), m, macs * size, m * macs)
    for m in (1, 4, 16, 64, 512):
        weights, ids = reference.route(torch.randn(m, EXPERTS), TOP_K)
        macs, read = 3 * HIDDEN * INTER, len(ids.unique())
        experts = partial(demo.moe_layers, hidden(m), ids, weights)
        table.row(f"moe {m} tokens, {read} experts", experts, m, read * macs * size, m * TOP_K * macs)
    for m in (1, 4, 16):
        dense = layers * (QKV + HIDDEN + EXPERTS) * HIDDEN + VOCAB * HIDDEN
        macs = m * (dense + layers * TOP_K * 3 * HIDDEN * INTER)
        step = partial(demo.step, hidden(m), demo.meta(m))
        once.row(f"decode step, {m} streams", step, m, dense * size, macs)


if __name__ == "__main__":
    main()
