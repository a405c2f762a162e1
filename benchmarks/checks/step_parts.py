"""The rest of a step: norm, rotary and KV write, table edits, page moves and sampling."""

from __future__ import annotations

import torch
from harness import Report, capture, device_copy_rate, replay_times

from checks.attention import COPY_RATE, SHAPES, make_step
from rimuru.kernels import reference, sampling
from rimuru.kernels.triton import apply_edits, linear, move_pages, qkv_to_cache, rms_norm

PAGE = 3 << 19  # bytes: 1.5 MiB, the KV page of Qwen3-30B
GRAIN = 8192
LIMITS = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}


def check(report: Report) -> None:
    for dtype, limit in LIMITS.items():
        x, residual = torch.randn(2, 100, 2048, device="cuda").to(dtype)
        weight = torch.rand(2048, device="cuda").to(dtype)
        got, want = rms_norm(x, weight, 1e-6, residual), reference.rms_norm(x, weight, 1e-6, residual)
        report.close(f"rms_norm {dtype}", got[0], want[0], limit)
        report.equal(f"rms_norm sum {dtype}", got[1], want[1])

    for dtype in (torch.float16, torch.bfloat16):
        for n, k in ((2048, 4096), (2048, 2048), (6144, 2048), (5120, 2048)):
            x, weight = torch.randn(8, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda").to(dtype)
            bias = torch.randn(n, device="cuda").to(dtype) * k**0.5
            for tokens in (1, 2, 3, 8):
                got = linear(x[:tokens], weight, bias)
                want = reference.linear(x[:tokens].double(), weight.double(), bias.double())
                report.close(f"linear {tokens} x {n} x {k} {dtype}", got, want, LIMITS[dtype])

    rope = reference.rope_table(4096, 128, 1e6, torch.device("cuda"))
    for model, (layout, q_heads) in SHAPES.items():
        pool = torch.full((1 << 30,), 255, dtype=torch.uint8, device="cuda")
        kv, meta = make_step(layout, [900, 300, 17, 0], [500, 1, 17, 3], pool, layer=3)
        qkv = torch.randn(521, (q_heads + 2 * layout.heads) * 128, device="cuda", dtype=layout.dtype)
        for kind, width in (
            ("no", None),
            ("per-head", (128, 128)),
            ("all-head", (q_heads * 128, layout.heads * 128)),
        ):
            norms = (
                [None, None]
                if width is None
                else [torch.rand(n, device="cuda").to(layout.dtype) for n in width]
            )
            pool.fill_(255)
            want = reference.qkv_to_cache(qkv, q_heads, kv, meta, rope, *norms)
            twin = pool.view(layout.dtype).clone()
            pool.fill_(255)
            got = qkv_to_cache(qkv, q_heads, kv, meta, rope, *norms)
            mine = pool.view(layout.dtype)
            report.close(f"qkv_to_cache {model}, {kind} norm: q", got, want, 4e-3)
            report.close(
                f"qkv_to_cache {model}, {kind} norm: pages", mine.nan_to_num(), twin.nan_to_num(), 4e-3
            )
            report.equal(f"qkv_to_cache {model}, {kind} norm: the rest", mine.isnan(), twin.isnan())

    for dtype in (torch.int32, torch.int64):
        table = torch.randint(1 << 30, (48, 128), dtype=dtype, device="cuda")
        want = table.clone()
        index = torch.randperm(6144, device="cuda")[:3000]
        value = torch.randint(1 << (30 if dtype == torch.int32 else 62), (3000,), dtype=dtype, device="cuda")
        apply_edits(table, index, value)
        reference.apply_edits(want, index, value)
        report.equal(f"apply_edits {dtype}", table, want)

    pool = torch.randint(256, (80 * PAGE,), dtype=torch.uint8, device="cuda")
    order = (torch.randperm(80, device="cuda") * (PAGE // GRAIN)).int()
    want = pool.clone()
    move_pages(pool, order[:40], order[40:], GRAIN, PAGE)
    reference.move_pages(want, order[:40], order[40:], GRAIN, PAGE)
    report.equal("move_pages", pool, want)


VOCAB = 151_936
SAMPLERS = {  # temperature, top-k, top-p, min-p
    "temperature": (0.7, 0, 1.0, 0.0),
    "top-p": (0.7, 0, 0.9, 0.0),
    "top-k": (1.0, 50, 1.0, 0.0),
    "top-k and top-p": (0.6, 20, 0.95, 0.0),
    "min-p": (1.0, 0, 1.0, 0.05),
    "all at a high temperature": (2.0, 1000, 0.8, 1e-4),
}


def make_batch(
    seqs: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> sampling.SamplingBatch:
    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((seqs,), value, dtype=dtype, device="cuda")

    seeds = torch.randint(1 << 60, (seqs,), device="cuda")
    return sampling.SamplingBatch(
        column(temperature), column(top_k, torch.int32), column(top_p), column(min_p),
        seeds, torch.arange(seqs, device="cuda"), needs_top=top_k > 0 or top_p < 1,
    )  # fmt: skip


def make_logits(seqs: int) -> torch.Tensor:
    """A flat body with a few hundred likely tokens, in bfloat16, so that values tie."""
    logits = torch.randn(seqs, VOCAB, device="cuda")
    likely = torch.randint(VOCAB, (seqs, 300), device="cuda")
    return logits.scatter_add_(1, likely, 8 * torch.rand(seqs, 300, device="cuda")).bfloat16()


def check_captured_draw(report: Report) -> None:
    """Greedy, drawn and padding rows in one graph, replayed with other parameters in the same tensors."""
    logits, batch = make_logits(64), make_batch(64, 0.8, 20, 0.95, 0.0)
    latest = torch.full((80,), -7, device="cuda")
    out = torch.empty(64, dtype=torch.int32, device="cuda")
    slots = torch.randperm(80, device="cuda")[:64].int()
    graph = capture(lambda: sampling.choose(logits, batch, out=out, latest=latest, slots=slots))
    batch.temperature[::2] = 0
    batch.top_k[::3] = 0
    batch.steps += 1
    logits[60:], slots[60:] = float("nan"), -1
    latest.fill_(-7)
    graph.replay()
    want = sampling.choose_by_sort(logits, batch)
    report.equal("captured draw, greedy rows", out[:60:2], want[:60:2])
    report.check("captured draw, drawn rows that differ", float((out[:60] != want[:60]).sum()), 1.0)
    report.equal("captured draw, latest by slot", latest[slots[:60].long()], out[:60].long())
    report.check("captured draw, slots of nobody", float((latest != -7).sum() - 60), 0.0)
    report.check(
        "captured draw, padding rows outside the vocabulary", float(((out < 0) | (out >= VOCAB)).sum()), 0.0
    )


def draws(report: Report) -> None:
    check_captured_draw(report)
    for name, params in SAMPLERS.items():
        logits, batch = make_logits(64), make_batch(64, *params)
        differ = sampling.choose(logits, batch) != sampling.choose_by_sort(logits, batch)
        # Sums of 150,000 float32 in another order may move top-p's edge past a token.
        report.check(f"draw, {name}: rows that differ", float(differ.sum()), 1.0)
    for seqs in (1, 32, 256):
        logits = make_logits(seqs)
        for name, params in {"greedy": (0.0, 0, 1.0, 0.0), **SAMPLERS}.items():
            batch = make_batch(seqs, *params)
            batch.all_greedy = name == "greedy"
            micros = replay_times({"draw": lambda b=batch, x=logits: sampling.choose(x, b)}, budget_ms=10)[
                "draw"
            ]
            report.bar(f"draw, {name}, {seqs} x {VOCAB}", micros, "us", floor=logits.nbytes / COPY_RATE / 1e6)


def times(report: Report) -> None:
    rate = device_copy_rate()
    report.bar("device-to-device copy", rate, "TB/s", higher_is_better=True)
    pool = torch.randint(256, (2000 * PAGE,), dtype=torch.uint8, device="cuda")
    for pages in (8, 64, 256):
        order = (torch.randperm(2000, device="cuda") * (PAGE // GRAIN)).int()
        parts = order[: 2000 // (2 * pages) * 2 * pages].view(-1, 2, pages)

        def move(parts=parts, pool=pool):
            for source, target in parts:
                move_pages(pool, source, target, GRAIN, PAGE)

        micros = replay_times({"move": move}, calls=len(parts))["move"]
        # A few pages are over before the chip is full: the bar is for batches.
        bar = 0.8 * rate if pages >= 64 else None
        report.bar(f"move {pages} pages of 1.5 MiB", 2 * pages * PAGE / micros / 1e6, "TB/s", bar, rate, True)

    for tokens in (32, 8192):
        copies = max(1, 16384 // tokens) if tokens > 100 else 8
        x, residual = torch.randn(2, copies, tokens, 2048, device="cuda", dtype=torch.bfloat16)
        weight = torch.rand(2048, device="cuda", dtype=torch.bfloat16)

        def norm(x=x, residual=residual, weight=weight):
            for a, b in zip(x, residual, strict=True):
                rms_norm(a, weight, 1e-6, b)

        micros = replay_times({"norm": norm}, calls=copies)["norm"]
        report.bar(
            f"rms_norm with residual, {tokens} x 2048", micros, "us", floor=4 * x[0].nbytes / rate / 1e6
        )

        layout, q_heads = SHAPES["Qwen3-30B"]
        pool = torch.zeros(4 << 30, dtype=torch.uint8, device="cuda")
        lengths = [1024] * 32 if tokens == 32 else [tokens]
        kv, meta = make_step(layout, lengths, [1] * 32 if tokens == 32 else [tokens], pool)
        qkv = torch.randn(copies, tokens, 5120, device="cuda", dtype=torch.bfloat16)
        head = torch.rand(128, device="cuda", dtype=torch.bfloat16)
        rope = reference.rope_table(8192, 128, 1e6, torch.device("cuda"))

        def write(qkv=qkv, kv=kv, meta=meta, head=head, rope=rope, q_heads=q_heads):
            for x in qkv:
                qkv_to_cache(x, q_heads, kv, meta, rope, head, head)

        micros = replay_times({"write": write}, calls=copies)["write"]
        report.bar(
            f"qkv_to_cache Qwen3-30B, {tokens} tokens", micros, "us", floor=2 * qkv[0].nbytes / rate / 1e6
        )


def run(report: Report) -> None:
    check(report)
    times(report)
    draws(report)
