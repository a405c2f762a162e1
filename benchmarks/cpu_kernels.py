"""Rates of the CPU back end and of its torch twin, in one run, on the demo model's shapes.

    python benchmarks/cpu_kernels.py [--layers 30] [--threads 2] [--no-twin]

Every layer has its own weights, so that a decode step reads them from memory and not from a cache.
Times are the best of several passes; "step" adds up every kernel of one decode step (no sampling).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
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

    def step(self, ops: ModuleType, x: torch.Tensor, meta: StepMeta) -> torch.Tensor:
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


def best(call: Callable[[], object], seconds: float = 1.0, least: int = 3) -> float:
    """Seconds of the fastest call."""
    call()
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def report(what: str, seconds: dict[str, float], nbytes: float, flop: float, note: str = "") -> None:
    columns = [f"{s * 1e3:9.3f} ms {nbytes / s / 1e9:6.1f} GB/s {flop / s / 1e9:7.1f} GFLOP/s" for s in seconds.values()]
    times = list(seconds.values())
    ratio = f"  x{times[1] / times[0]:.1f}" if len(times) > 1 else ""
    print(f"{what:34}{'  |'.join(columns)}{ratio}{note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--no-twin", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    demo = Demo(args.layers, 16, dtype)
    sides: dict[str, ModuleType] = {"cpu": cpu} if args.no_twin else {"cpu": cpu, "twin": reference}
    print(f"{args.dtype}, {args.threads} threads, {args.layers} layers; columns: {', '.join(sides)}")
    size = dtype.itemsize

    for m in (1, 4, 16, 64, 512):
        x = torch.randn(m, HIDDEN).to(dtype)
        seconds = {n: best(lambda: [o.linear(x, w) for w in demo.qkv]) / args.layers for n, o in sides.items()}  # noqa: B023
        report(f"linear {m} x {HIDDEN} x {QKV}", seconds, QKV * HIDDEN * size, 2 * m * QKV * HIDDEN)
    for m in (1, 16):
        x = torch.randn(m, HIDDEN).to(dtype)
        seconds = {n: best(lambda: o.linear(x, demo.head)) for n, o in sides.items()}  # noqa: B023
        report(f"linear {m} x {HIDDEN} x {VOCAB}", seconds, VOCAB * HIDDEN * size, 2 * m * VOCAB * HIDDEN)
    for m in (1, 4, 16, 64, 512):
        x = torch.randn(m, HIDDEN).to(dtype)
        weights, ids = reference.route(torch.randn(m, EXPERTS), TOP_K)
        seconds = {
            n: best(lambda: [o.moe(x, ids, weights, t, demo.layout) for t in demo.table]) / args.layers  # noqa: B023
            for n, o in sides.items()
        }
        expert = 3 * HIDDEN * INTER
        report(f"moe {m} tokens", seconds, len(ids.unique()) * expert * size, 2 * m * TOP_K * expert)
    for m in (1, 4, 16):
        x, meta = torch.randn(m, HIDDEN).to(dtype), demo.meta(m)
        seconds = {n: best(lambda: demo.step(o, x, meta), 2.0) for n, o in sides.items()}  # noqa: B023
        rates = " / ".join(f"{m / s:.0f}" for s in seconds.values())
        print(f"decode step, {m:2} streams: {', '.join(f'{s * 1e3:.1f} ms' for s in seconds.values())} = {rates} tokens/s")


if __name__ == "__main__":
    main()
