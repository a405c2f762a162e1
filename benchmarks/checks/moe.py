"""The fused MoE: against its twin, against itself for every residency, then against its bars."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from harness import Report, device_copy_rate, replay_times
from moe_case import QWEN3, QWEN15, Layer, Routing, Shape, grouped_mm

from checks.host_memory import read_rate
from rimuru.kernels import reference
from rimuru.kernels import triton as kernels
from rimuru.kernels.host_memory import HostMemory
from rimuru.kernels.triton.ahead import compiling
from rimuru.kernels.triton.moe_tiles import choose
from rimuru.kernels.types import EXPERT_HOST, MoeBlock

DENSE = 790.0  # TFLOP/s of an 8192^3 bf16 product on an H200 at rest; measured anew where it is the floor
TWIN = ("rms_norm", "linear", "route", "silu_and_mul")
# ||out - twin|| / ||twin||. Both round the activation and each expert's output to the dtype: a unit
# in the last place here and there, 2^-8 for bf16 and 2^-11 for fp16, of which a fraction differs.
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
# Sizes that are no whole steps of any tile; of whole steps but not of whole tiles; of whole tiles.
CASES = {
    Shape("odd", 24, 6, 320, 208): (tuple(LIMIT), (1, 7, 16, 17, 60, 130, 700, 1500)),
    Shape("ragged", 24, 6, 320, 192): ((torch.bfloat16,), (300, 1500)),
    QWEN3: ((torch.bfloat16,), (1, 32, 128, 1024, 4096)),
}


def poisoned(layer: Layer, r: Routing, table: torch.Tensor, touched: torch.Tensor) -> torch.Tensor:
    """`moe` after its transient memory, which it takes from the allocator, was filled with NaN."""
    rubbish = torch.full((64 << 20,), float("nan"), device="cuda")
    del rubbish
    return kernels.moe(r.x, r.ids, r.weights, table, layer.layout, touched)


def check_router(report: Report) -> None:
    for experts, k in ((60, 4), (128, 8), (160, 6), (256, 8)):
        for scoring in ("softmax", "sigmoid"):
            logits = torch.randn(333, experts, device="cuda")
            bias = torch.randn(experts, device="cuda") * 0.1
            weights, ids = kernels.route(logits, k, scoring, True, bias)
            want, want_ids = reference.route(logits, k, scoring, True, bias)
            report.equal(f"route {scoring} {k} of {experts}: ids", ids, want_ids)
            report.close(f"route {scoring} {k} of {experts}: weights", weights, want, 1e-6)


def compile_ahead() -> None:
    """Most kernels of what follows, on all cores."""
    with compiling():
        for shape, (dtypes, sizes) in (CASES | {QWEN15: CASES[QWEN3]}).items():
            for dtype in dtypes:
                layer = Layer(shape, dtype)
                for r in map(layer.routing, sizes):
                    kernels.moe(r.x, r.ids, r.weights, layer.scattered, layer.layout)


def check_twin(report: Report) -> None:
    for shape, (dtypes, sizes) in CASES.items():
        for dtype in dtypes:
            layer = Layer(shape, dtype)
            for tokens in sizes:
                r = layer.routing(tokens)
                r.ids[0, 0] = -1
                touched = torch.zeros(shape.experts, dtype=torch.int32, device="cuda")
                out = poisoned(layer, r, layer.scattered, touched)
                name = f"{shape.name} {str(dtype)[6:]} {tokens} tokens"
                report.close(name, out, layer.twin(r), LIMIT[dtype])
                counts = torch.bincount(r.ids.flatten() + 1, minlength=shape.experts + 1)[1:]
                report.equal(f"{name}: touched", touched, counts.int())
                if tokens <= 130:
                    size = shape.experts * layer.layout.page_bytes
                    scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
                    gathered = kernels.moe_gather(
                        r.x, r.ids, r.weights, layer.scattered, layer.layout, scratch
                    )
                    report.equal(f"{name}: gather", gathered, out)


def check_long_residency(report: Report) -> None:
    """A long prefill: the same bits with experts in host memory, in passes, and on every run."""
    layer = Layer(QWEN3)
    page, r = layer.layout.page_bytes, layer.routing(2048)
    memory = HostMemory(6 * page)
    memory.tensor.view(6, page).copy_(layer.pool[:6])
    mixed = layer.scattered.clone()
    mixed[:6] = (torch.arange(6) * page + memory.address | EXPERT_HOST).cuda()
    even = torch.arange(QWEN3.experts, device="cuda") % 2 == 0
    touched = torch.zeros(QWEN3.experts, dtype=torch.int32, device="cuda")
    want = poisoned(layer, r, layer.scattered, touched)
    passes = (layer.scattered * even, mixed * ~even)
    for name, table in (("again", layer.scattered), ("6 experts on the host", mixed), ("two passes", passes)):
        report.equal(f"{QWEN3.name} 2048 tokens, {name}", poisoned(layer, r, table, touched), want)
    memory.close()


def check_block(report: Report) -> None:
    """A whole MoE half, with and without a shared expert, against the twins; tokens of padding among them."""
    for shape, shared in ((QWEN15, 5632), (QWEN3, 0)):
        layer, hidden = Layer(shape), shape.hidden

        def draw(*size: int) -> torch.Tensor:
            return (torch.randn(size, device="cuda") * size[-1] ** -0.5).bfloat16()

        block = MoeBlock(
            norm=torch.rand(hidden, device="cuda").bfloat16(), eps=1e-6,
            router=draw(shape.experts + (shared > 0), hidden), experts=shape.experts, top_k=shape.top_k,
            layout=layer.layout, shared_gate_up=draw(2 * shared, hidden) if shared else None,
            shared_down=draw(hidden, shared) if shared else None,
        )  # fmt: skip

        def moe(x, ids, weights, table, layout, touched, dense, gate, layer=layer):
            out = layer.twin(Routing(x, ids, weights))
            return out if dense is None else out + gate.float().sigmoid()[:, None] * dense

        twin = SimpleNamespace(**{name: getattr(reference, name) for name in TWIN}, moe=moe)
        for tokens in (1, 2, 8, 16, 33, 128, 300):
            x, residual = draw(tokens, hidden) * 40, draw(tokens, hidden) * 40
            live = torch.arange(tokens, device="cuda", dtype=torch.int32)
            live[1::3] = -1
            step = (x, residual, block, layer.scattered, block.norm, None, live)
            want = reference.moe_block(*step, ops=twin)
            rubbish = torch.full((64 << 20,), float("nan"), device="cuda")
            del rubbish
            for name, got, expected in zip(("normed", "sum"), kernels.moe_block(*step), want, strict=True):
                report.close(f"block {shape.name} {tokens} tokens: {name}", got, expected, 2 * LIMIT[x.dtype])


def fill(layer: Layer, r: Routing) -> float:
    """Useful rows over computed rows of the plan's tiles (half tiles count as half)."""
    m = choose(r.ids.shape[0], layer.shape.top_k, layer.shape.experts, layer.dtype, r.x.device)[0].m
    counts = torch.bincount(r.ids.flatten(), minlength=layer.shape.experts)
    step = m // 2 if m >= 128 else m
    return (counts.sum() / (-(-counts // step) * step).sum()).item()


def time_resident(report: Report, layer: Layer, copy_rate: float) -> None:
    shape = layer.shape
    for tokens in (1, 8, 32, 128, 1024, 8192, 16384):
        sets = [layer.routing(tokens) for _ in range(8 if tokens <= 128 else 2)]
        grouped = [layer.grouped(r) for r in sets]

        def ours(table: torch.Tensor, sets=sets):
            return lambda: [kernels.moe(r.x, r.ids, r.weights, table, layer.layout) for r in sets]

        variants = {
            "scattered": ours(layer.scattered),
            "contiguous": ours(layer.contiguous),
            "grouped": lambda grouped=grouped: [grouped_mm(layer, g) for g in grouped],
        }
        dense = DENSE
        if tokens >= 8192:
            # In the same rounds, because under a load like this the card's clock gives way.
            square = torch.randn((8192, 8192), device="cuda").to(layer.dtype)
            variants["dense"] = lambda square=square: torch.mm(square, square)
        times = replay_times(variants, calls=len(sets), budget_ms=15)
        if tokens >= 8192:
            dense = 2 * 8192**3 / times["dense"] / len(sets) / 1e6
        us, nbytes = times["scattered"], sum(layer.expert_bytes(r) for r in sets) / len(sets)
        floor = max(nbytes / copy_rate / 1e6, shape.flops(tokens) / dense / 1e6)
        name = f"{shape.name} {tokens}"
        report.bar(f"{name}: whole call", us, "us", None, floor)
        if tokens in (32, 128):
            report.bar(f"{name}: expert bytes", nbytes / us / 1e6, "TB/s", 4.0, copy_rate, True)
        if tokens >= 8192:
            report.say(f"{name}: tile fill {fill(layer, sets[0]):.3f}")
            bar = 520 if tokens == 8192 else None
            report.bar(f"{name}: rate", shape.flops(tokens) / us / 1e6, "TFLOP/s", bar, dense, True)
        limit = 1.01 if tokens <= 256 else 1.02
        report.bar(f"{name}: scattered over contiguous", us / times["contiguous"], "x", limit)
        grouped_us = times["grouped"]
        report.bar(f"{name}: over torch grouped_mm ({grouped_us:.0f} us)", us / grouped_us, "x", 1.0)


def time_host(report: Report, layer: Layer, some: tuple[int, ...]) -> None:
    """A step of 32 tokens with `n` touched experts in host memory, against the link and HBM."""
    shape, page = layer.shape, layer.layout.page_bytes
    memory = HostMemory(shape.experts * page)
    memory.tensor.view(shape.experts, page).copy_(layer.pool[: shape.experts])
    rate = read_rate(memory, memory.nbytes // (1 << 20) * (1 << 20))
    report.say(f"{shape.name}: kernel reads of {memory.nbytes >> 20} MiB at {rate:.1f} GB/s")
    sets = [layer.routing(32) for _ in range(8)]

    def tables(n: int) -> list[torch.Tensor]:
        out = []
        for r in sets:
            used = r.ids.unique().cpu()
            table = layer.scattered.cpu().clone()
            for e in used[torch.randperm(used.numel())[:n]].tolist():
                table[e] = memory.address + e * page | EXPERT_HOST
            out.append(table.cuda())
        return out

    def ours(chosen: list[torch.Tensor]):
        return lambda: [
            kernels.moe(r.x, r.ids, r.weights, t, layer.layout) for r, t in zip(sets, chosen, strict=True)
        ]

    variants = {n: tables(n) for n in (0, *some)}
    want = [kernels.moe(r.x, r.ids, r.weights, layer.scattered, layer.layout) for r in sets]
    for n in some:
        for got, expected in zip(ours(variants[n])(), want, strict=True):
            if not torch.equal(got, expected):
                report.equal(f"{shape.name}: {n} experts on the host", got, expected)
                break
        else:
            report.check(f"{shape.name}: {n} experts on the host, same bits", 0, 0)
    times = replay_times({str(n): ours(t) for n, t in variants.items()}, calls=len(sets))
    report.bar(f"{shape.name} 32: all resident", times["0"], "us")
    for n in some:
        link = n * page / rate / 1e3
        floor = max(link, times["0"])
        report.bar(f"{shape.name} 32: {n} experts on the host", times[str(n)], "us", 1.05 * floor + 20, floor)
    memory.close()


def run(report: Report) -> None:
    compile_ahead()
    check_router(report)
    check_twin(report)
    check_long_residency(report)
    check_block(report)
    rate = device_copy_rate()
    report.bar("device copy, read and write", rate, "TB/s", higher_is_better=True)
    for shape, some in ((QWEN15, (1, 3, 6)), (QWEN3, (1, 3, 6, 12))):
        layer = Layer(shape)
        time_resident(report, layer, rate)
        time_host(report, layer, some)
