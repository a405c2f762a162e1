"""A decode step's small operations by graph replay: compositions of plain launches beside the fused ones.

    PYTHONPATH=src python benchmarks/step_latency.py [--only linear,block,layer]

Every size is timed in one graph of several calls on different weights, so that no cache holds them.
Floors are bytes over 4.2 TB/s. The fused results are compared with the plain ones first.

Predictions, before the first run (one H200):

1. `rows` (one to four rows): 1 us over the bytes at every shape, because all of a program's weights are
   asked for before it waits; cuBLAS takes 3-4 us over them and another 2 for a bias or split sums.
2. `few` (one to eight rows): 1.2 us over the bytes where all of the weight is held at once.
3. `moe_block` of one token: 41 us for Qwen1.5-MoE (138 MB: 33 us), where the plain launches take 74;
   26 us for Qwen3-30B (75 MB: 18 us) beside 42. Rows beat tiles up to 4 tokens by 2 us, lose at 8.
4. A layer with attention over 1,024 tokens, batch 1: 62 us and 47 us.
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from checks.attention import make_step
from harness import replay_times
from moe_case import QWEN3, QWEN15, Layer

from rimuru.kernels import reference
from rimuru.kernels import triton as kernels
from rimuru.kernels.triton import router
from rimuru.kernels.types import KVLayout, KVView, MoeBlock

RATE = 4.2e6  # bytes a microsecond
BF16 = torch.bfloat16
lin = import_module("rimuru.kernels.triton.linear")  # the package's attribute of that name is the function


def draw(*shape: int) -> torch.Tensor:
    x = torch.randn(shape, device="cuda", dtype=BF16)
    return x * shape[-1] ** -0.5 if len(shape) > 1 else x


def row(name: str, times: dict[str, float], floor: float) -> None:
    values = "  ".join(f"{k} {v:.2f}" for k, v in times.items())
    print(f"{name:34} floor {floor:7.2f}  {values}", flush=True)


def linears() -> None:
    for n, k in ((6144, 2048), (5120, 2048), (2048, 2048), (2048, 4096), (151_936, 2048)):
        copies = max(2, min(24, (300 << 20) // (2 * n * k)))
        weights, bias = [draw(n, k) for _ in range(copies)], draw(n)
        for tokens in (1, 2, 8):
            linear_times(weights, bias, draw(tokens, k) * k**0.5)


def linear_times(weights: list[torch.Tensor], bias: torch.Tensor, x: torch.Tensor) -> None:
    (tokens, k), n = x.shape, len(bias)
    calls = {"cublas": lambda w: F.linear(x, w, bias)}
    if tokens <= 2:
        calls["rows"] = partial(lin.rows_linear, x, bias=bias)
    if tokens <= lin.FEW and n < 100_000:
        calls["few"] = partial(lin.few_linear, x, bias=bias)
    want = F.linear(x.float(), weights[0].float(), bias.float())
    for name, call in calls.items():
        error = ((call(weights[0]).float() - want).norm() / want.norm()).item()
        if not error < 5e-3:
            print(f"WRONG {name} {n} x {k}, {tokens} rows: {error}", flush=True)
    graphs = {name: partial(lambda c: [c(w) for w in weights], call) for name, call in calls.items()}
    times = replay_times(graphs, calls=len(weights), rounds=3, budget_ms=3)
    row(f"linear {tokens} x {n} x {k}", times, weights[0].nbytes / RATE)


class Block:
    """A MoE block of a model's shape, its shared expert included, with experts scattered over a pool."""

    def __init__(self, shape, shared: int, normalize: bool):
        self.layer, hidden = Layer(shape), shape.hidden
        self.block = MoeBlock(
            norm=torch.rand(hidden, device="cuda").to(BF16), eps=1e-6,
            router=draw(shape.experts + (shared > 0), hidden), experts=shape.experts, top_k=shape.top_k,
            layout=self.layer.layout, normalize=normalize,
            shared_gate_up=draw(2 * shared, hidden) if shared else None,
            shared_down=draw(hidden, shared) if shared else None,
        )  # fmt: skip
        self.next_norm = torch.rand(hidden, device="cuda").to(BF16)
        self.touched = torch.zeros(shape.experts, dtype=torch.int32, device="cuda")

    def steps(self, tokens: int, count: int):
        hidden = self.layer.shape.hidden
        return [tuple(draw(tokens, hidden) * hidden**0.5 for _ in range(2)) for _ in range(count)]

    def fused(self, x: torch.Tensor, residual: torch.Tensor):
        return kernels.moe_block(x, residual, self.block, self.layer.scattered, self.next_norm, self.touched)

    def plain(self, x: torch.Tensor, residual: torch.Tensor):
        b = self.block
        h, residual = kernels.rms_norm(x, b.norm, b.eps, residual)
        logits = F.linear(h, b.router)
        weights, ids = kernels.route(logits[:, : b.experts], b.top_k, b.scoring, b.normalize)
        shared = gate = None
        if b.shared_gate_up is not None:
            shared = F.linear(kernels.silu_and_mul(F.linear(h, b.shared_gate_up)), b.shared_down)
            gate = logits[:, b.experts]
        y = kernels.moe(h, ids, weights, self.layer.scattered, b.layout, self.touched, shared, gate)
        return kernels.rms_norm(y, self.next_norm, b.eps, residual)

    def nbytes(self, step: tuple[torch.Tensor, torch.Tensor]) -> int:
        (x, residual), b = step, self.block
        h, _ = kernels.rms_norm(x, b.norm, b.eps, residual)
        _, ids = kernels.route(F.linear(h, b.router)[:, : b.experts], b.top_k)
        dense = sum(w.nbytes for w in (b.router, b.shared_gate_up, b.shared_down) if w is not None)
        return dense + int(ids.unique().numel()) * b.layout.page_bytes


def check(block: Block, tokens: int) -> None:
    """Fused against plain; and the same bits from every replay of a graph of dependent launches."""
    steps = block.steps(tokens, 4)
    for step in steps:
        for got, want in zip(block.fused(*step), block.plain(*step), strict=True):
            error = ((got.float() - want.float()).norm() / want.float().norm()).item()
            if not error < 1e-2:
                print(f"WRONG block {block.layer.shape.name} {tokens} tokens: {error}", flush=True)
    want = [block.fused(*s)[0].clone() for s in steps]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [block.fused(*s)[0] for s in steps]
    differ = 0
    for _ in range(50):
        graph.replay()
        differ += sum(not torch.equal(a, b) for a, b in zip(got, want, strict=True))
    if differ:
        print(f"WRONG block {block.layer.shape.name} {tokens} tokens: {differ} of 200 replays", flush=True)


def head(block: Block, steps: list) -> None:
    for x, residual in steps:
        _, _, scores = router.norm_router(x, residual, block.block)
        router.choose_experts(scores, block.block, block.layer.scattered, block.touched, None)


def block_times(block: Block, tokens: int) -> None:
    check(block, tokens)
    steps = block.steps(tokens, 8)
    variants = {
        "plain": lambda: [block.plain(*s) for s in steps],
        "fused": lambda: [block.fused(*s) for s in steps],
    }
    if tokens <= 16:
        variants["its head alone"] = partial(head, block, steps)
    times = replay_times(variants, calls=len(steps), rounds=3, budget_ms=4)
    row(f"block {block.layer.shape.name} {tokens}", times, sum(map(block.nbytes, steps)) / len(steps) / RATE)


class Stack:
    """Eight layers' attention of a model's shape around one MoE block; decode at context 1,024."""

    def __init__(self, block: Block, q_heads: int, heads: int, count: int, biased: bool):
        self.block, self.q_heads, self.count = block, q_heads, count
        rows, hidden = (q_heads + 2 * heads) * 128, 2048
        self.layout = KVLayout(layers=8, block_tokens=16, heads=heads, head_dim=128, grain=8192, dtype=BF16)
        self.weights = [(draw(rows, hidden), draw(hidden, q_heads * 128)) for _ in range(8)]
        self.bias = draw(rows) if biased else None
        self.head = None if biased else torch.rand(128, device="cuda").to(BF16)
        self.rope = reference.rope_table(4096, 128, 1e6, torch.device("cuda"))

    def step(self, linear, after, start, views, meta) -> torch.Tensor:
        x, residual = start
        for (qkv, out), kv in zip(self.weights, views, strict=True):
            wide = linear(x, qkv, self.bias)
            q = kernels.qkv_to_cache(wide, self.q_heads, kv, meta, self.rope, self.head, self.head)
            x = linear(kernels.attention(q, kv, meta, 128**-0.5), out, None)
            x, residual = after(x, residual)
        return x

    def times(self, tokens: int) -> None:
        kv_bytes = tokens * 1024 * self.layout.heads * 512  # of a layer
        pool = torch.zeros(8 * kv_bytes + (64 << 20), dtype=torch.uint8, device="cuda")
        pool.view(BF16).normal_()
        kv, meta = make_step(self.layout, [1024] * tokens, [1] * tokens, pool)
        meta.max_seq_len = 2048  # the bound of a captured step
        views = [KVView(kv.pool, kv.table, layer, self.layout) for layer in range(8)]
        [start] = self.block.steps(tokens, 1)
        variants = {
            "plain": partial(self.step, F.linear, self.block.plain, start, views, meta),
            "fused, cuBLAS": partial(self.step, F.linear, self.block.fused, start, views, meta),
            "fused": partial(self.step, kernels.linear, self.block.fused, start, views, meta),
        }
        times = replay_times(variants, calls=len(self.weights), rounds=3, budget_ms=8)
        nbytes = sum(w.nbytes for w in self.weights[0]) + kv_bytes + self.block.nbytes(start)
        row(f"layer {self.block.layer.shape.name} {tokens}", times, nbytes / RATE)
        total = "  ".join(f"{k} {v * self.count / 1e3:.2f}" for k, v in times.items())
        print(f"  all layers, ms: {total}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="layer,block,linear")
    chosen = parser.parse_args().only.split(",")
    torch.manual_seed(0)
    if {"block", "layer"} & set(chosen):
        every = [Block(QWEN15, 5632, False), Block(QWEN3, 0, True)]
        if "layer" in chosen:
            for stack in (Stack(every[0], 16, 16, 24, True), Stack(every[1], 32, 4, 48, False)):
                for tokens in (1, 2, 8, 32):
                    stack.times(tokens)
        if "block" in chosen:
            for block in every:
                for tokens in (1, 2, 8, 16, 32):
                    block_times(block, tokens)
        del every
    if "linear" in chosen:
        linears()


if __name__ == "__main__":
    main()
