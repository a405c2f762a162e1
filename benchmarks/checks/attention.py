"""Paged attention: against the torch twin over a poisoned pool, then bytes and flops a second."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from harness import Report, capture, replay_times

from rimuru.kernels import reference
from rimuru.kernels.triton import attention
from rimuru.kernels.types import KVLayout, KVView, StepMeta

COPY_RATE = 4.22  # TB/s, device-to-device copy on an H200, bytes read plus written
FA3_PREFILL = 690.0  # TFLOP/s of fa3-fwd 0.0.3 on an H200, 32 heads of 128, 8,192 tokens
GRAIN = 8192
BF16 = torch.bfloat16
SHAPES = {  # layer group, q heads
    "Qwen3-30B": (KVLayout(48, 16, 4, 128, GRAIN, BF16), 32),
    "Qwen1.5-MoE": (KVLayout(12, 16, 16, 128, GRAIN, BF16), 16),
}
LOADS = [(32, 1024), (128, 1024), (32, 4096), (1, 32_768), (8, 32_768)]  # sequences, tokens each


def make_step(
    layout: KVLayout, lengths: list[int], queries: list[int], pool: torch.Tensor, layer: int = 0
) -> tuple[KVView, StepMeta]:
    """Sequences on random pages of `pool` (uint8), their last `queries` tokens being this step's."""
    stride = -(-layout.page_bytes // layout.grain)
    need = [-(-n // layout.block_tokens) for n in lengths]
    order = (torch.randperm(pool.numel() // (stride * layout.grain))[: sum(need)] * stride).int()
    if len(order) < sum(need):
        raise ValueError(f"the pool holds {len(order)} pages, not {sum(need)}")
    slots = torch.randperm(len(lengths)).int()
    table = torch.zeros(len(lengths), max(need), dtype=torch.int32)
    for slot, pages in zip(slots.tolist(), order.split(need), strict=True):
        table[slot, : len(pages)] = pages
    positions = [torch.arange(n - q, n).clamp_min(0) for n, q in zip(lengths, queries, strict=True)]
    triples = zip(slots.tolist(), lengths, queries, strict=True)
    owners = [torch.full((q,), s if n else -1) for s, n, q in triples]
    meta = StepMeta(
        torch.cat(positions).int().cuda(),
        torch.cat(owners).int().cuda(),
        torch.tensor([0, *queries]).cumsum(0).int().cuda(),
        slots.cuda(),
        torch.tensor(lengths, dtype=torch.int32).cuda(),
        max(queries),
        max(lengths),
    )
    return KVView(pool.view(layout.dtype), table.cuda(), layer, layout), meta


def fill(kv: KVView, meta: StepMeta, lengths: list[int]) -> None:
    """Random K and V for every token of every sequence, written by the torch twin."""
    lay = kv.layout
    width = lay.heads * lay.head_dim
    positions = torch.cat([torch.arange(n) for n in lengths]).int().cuda()
    owners = meta.slots.repeat_interleave(meta.seq_lens)
    everything = StepMeta(positions, owners, meta.query_start, meta.slots, meta.seq_lens, 1, 1)
    still = torch.cat([torch.ones(max(lengths), 1), torch.zeros(max(lengths), 1)], dim=1).cuda()
    qkv = torch.randn(sum(lengths), 3 * width, device="cuda").to(lay.dtype)
    reference.qkv_to_cache(qkv, lay.heads, kv, everything, still)


@triton.jit
def _read_kernel(source_ptr, sums_ptr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    words = tl.load(source_ptr + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + block, tl.sum(words, 0))


def read_time(pool: torch.Tensor, nbytes: int, calls: int) -> float:
    """Microseconds of a launch that only reads (and sums) `nbytes` in a row: what so few bytes can reach."""
    words = pool.view(torch.int32)
    size, block = nbytes // 4, 4096
    sums = torch.empty(size // block, dtype=torch.int32, device=pool.device)
    calls = min(calls, len(words) // size)

    def step() -> None:
        for i in range(calls):
            _read_kernel[(size // block,)](words[i * size :], sums, block, num_warps=4)

    return replay_times({"read": step}, calls=calls)["read"]


def _replayed(*args) -> torch.Tensor:
    """What attention writes into a poisoned output when a graph replays it."""
    outs: list[torch.Tensor] = []
    graph = capture(lambda: outs.append(attention(*args)))
    outs[-1].fill_(float("nan"))
    graph.replay()
    return outs[-1].clone()


def padded(meta: StepMeta, seqs: int, tokens: int) -> StepMeta:
    """A mixed step as a captured graph holds it: sequences without a token, tokens without a sequence."""

    def longer(x: torch.Tensor, size: int, value: int) -> torch.Tensor:
        return torch.cat([x, x.new_full((size - len(x),), value)])

    return StepMeta(
        longer(meta.positions, tokens, 0),
        longer(meta.token_slots, tokens, -1),
        longer(meta.query_start, seqs + 1, int(meta.query_start[-1])),
        longer(meta.slots, seqs, 0),
        longer(meta.seq_lens, seqs, 0),
        tokens,
        4 * meta.max_seq_len,
    )


def check_padded(report: Report) -> None:
    """A captured mixed step that is mostly padding, against the twin: every row, those of nobody too."""
    for model, (layout, q_heads) in SHAPES.items():
        lengths, queries = [900, 33, 2500, 400], [1, 1, 1, 130]
        pool = torch.full((2 << 30,), 255, dtype=torch.uint8, device="cuda")
        kv, exact = make_step(layout, lengths, queries, pool, layer=1)
        fill(kv, exact, lengths)
        meta = padded(exact, 128, 512)
        q = torch.randn(512, q_heads, layout.head_dim, device="cuda").to(layout.dtype)
        want = reference.attention(q, kv, meta, 0.09)
        got = _replayed(q, kv, meta, 0.09)
        report.close(f"{model}, captured mixed step", got, want, 4e-3)
        rest = int(exact.query_start[-1])
        report.equal(f"{model}, captured mixed step, rows of nobody", got[rest:], want[rest:])


def check(report: Report) -> None:
    cases = [
        # name, dtype, KV heads, q heads, head size, window, lengths, queries
        ("decode GQA", BF16, 4, 32, 128, 0, [1, 900, 5000, 0, 17, 33_000], [1] * 6),
        ("decode, a wide block a sequence", BF16, 4, 32, 128, 0, [1000, 1, 0, *range(500, 529)], [1] * 32),
        ("decode, wide blocks split", BF16, 4, 32, 128, 0, [20_000], [1]),
        ("decode, wide blocks split, window", BF16, 4, 32, 128, 900, [20_000], [1]),
        ("decode MHA", BF16, 16, 16, 128, 0, [1025, 64, 300], [1] * 3),
        ("decode 64", torch.float16, 8, 64, 64, 0, [700, 2100], [1] * 2),
        ("decode 256", BF16, 2, 16, 256, 0, [700, 2100], [1] * 2),
        ("decode window", BF16, 4, 32, 128, 512, [700, 2100, 5], [1] * 3),
        ("decode fp32", torch.float32, 4, 32, 128, 0, [700, 2100], [1] * 2),
        ("prompt", BF16, 4, 32, 128, 0, [2000, 1, 130], [2000, 1, 130]),
        ("chunk after a prefix, with decode", BF16, 4, 32, 128, 0, [3000, 900, 2049], [700, 1, 2]),
        ("prompt MHA", BF16, 16, 16, 128, 0, [1500], [1500]),
        ("prompt 64", torch.float16, 8, 16, 64, 0, [1000, 333], [1000, 300]),
        ("prompt 256", BF16, 2, 16, 256, 0, [1000, 333], [1000, 300]),
        ("prompt window", BF16, 4, 32, 128, 512, [2000, 600], [1500, 600]),
        ("prompt fp32", torch.float32, 4, 32, 128, 0, [600, 200], [500, 200]),
        ("prompt fp32 256", torch.float32, 1, 4, 256, 0, [300], [200]),
    ]
    limits = {torch.float32: 1e-6, torch.float16: 6e-4, BF16: 4e-3}  # relative to the result's norm
    for name, dtype, heads, q_heads, dim, window, lengths, queries in cases:
        layout = KVLayout(3, 16, heads, dim, GRAIN, dtype)
        pool = torch.full((2 << 30,), 255, dtype=torch.uint8, device="cuda")  # NaN in every dtype
        kv, meta = make_step(layout, lengths, queries, pool, layer=1)
        fill(kv, meta, lengths)
        q = torch.randn(sum(queries), q_heads, dim, device="cuda").to(dtype)
        want = reference.attention(q, kv, meta, dim**-0.5, window)
        got = attention(q, kv, meta, dim**-0.5, window)
        report.close(name, got, want, limits[dtype])
        report.equal(f"{name}, again", attention(q, kv, meta, dim**-0.5, window), got)
        if max(queries) == 1:
            replayed = _replayed(q, kv, meta, dim**-0.5, window)
            report.equal(f"{name}, in a graph", replayed, got)


def decode(report: Report, pool: torch.Tensor) -> None:
    for model, (layout, q_heads) in SHAPES.items():
        for seqs, length in LOADS:
            kv, meta = make_step(layout, [length] * seqs, [1] * seqs, pool)
            q = torch.randn(seqs, q_heads, layout.head_dim, device="cuda", dtype=layout.dtype)
            views = [KVView(kv.pool, kv.table, i, layout) for i in range(layout.layers)]

            def step(views=views, q=q, meta=meta):
                for view in views:
                    attention(q, view, meta, 0.09)

            micros = replay_times({"decode": step}, calls=len(views))["decode"]
            nbytes = seqs * length * layout.layer_elems // layout.block_tokens * layout.dtype.itemsize
            share = 0.9 if seqs >= 32 else 0.8
            name = f"decode {model}, {seqs} x {length}"
            report.bar(
                name,
                nbytes / micros / 1e6,
                "TB/s",
                share * COPY_RATE,
                COPY_RATE,
                True,
            )
            read = read_time(pool, nbytes, len(views))
            report.bar(f"{name}, over a plain read ({read:.1f} us)", micros / read, "x")


def mixed(report: Report, pool: torch.Tensor) -> None:
    """Decode beside a chunk of a prompt: as a graph of 128 sequences and 512 tokens, and as it is."""
    for model, (layout, q_heads) in SHAPES.items():
        for seqs, length in ((64, 1024), (4, 1024), (16, 4096)):
            kv, exact = make_step(layout, [length] * seqs + [1024], [1] * seqs + [256], pool)
            views = [KVView(kv.pool, kv.table, i, layout) for i in range(min(12, layout.layers))]
            q = torch.randn(512, q_heads, layout.head_dim, device="cuda", dtype=layout.dtype)
            cases = {"exact": (q[: seqs + 256], exact), "padded": (q, padded(exact, 128, 512))}

            def step(case, views=views):
                for view in views:
                    attention(case[0], view, case[1], 0.09)

            runs = {name: lambda case=case, step=step: step(case) for name, case in cases.items()}
            micros = replay_times(runs, calls=len(views))
            name = f"mixed {model}, {seqs} x {length} and 256 of a prompt"
            # As good as an eager step, whose blocks are counted on the host; 2 us for finding out.
            report.bar(name, micros["padded"], "us", micros["exact"] + 2, micros["exact"])


def prefill(report: Report, pool: torch.Tensor) -> None:
    for model, (layout, q_heads) in SHAPES.items():
        for length, new in ((8192, 8192), (32_768, 4096)):
            kv, meta = make_step(layout, [length], [new], pool)
            q = torch.randn(new, q_heads, layout.head_dim, device="cuda", dtype=layout.dtype)
            # Each alone: in turns with FA3, which draws more power, ours ran 13 % slower and FA3 5 % faster.
            times = replay_times({"ours": lambda q=q, kv=kv, meta=meta: attention(q, kv, meta, 0.09)})
            if fa3 := _fa3(q, layout, length):
                times |= replay_times({"FA3": fa3})
            flops = 4 * layout.head_dim * q_heads * (new * length - new * (new - 1) // 2)
            rate = {name: flops / micros / 1e6 for name, micros in times.items()}
            peer = rate.get("FA3", FA3_PREFILL if new == length else None)
            name = f"prefill {model}, {new} of {length}"
            report.bar(name, rate["ours"], "TFLOP/s", peer and 0.6 * peer, peer, True)


def _fa3(q: torch.Tensor, layout: KVLayout, length: int):
    """FlashAttention-3 on the same sizes, over contiguous K and V; None where it is not installed."""
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        return None
    k, v = torch.randn(2, 1, length, layout.heads, layout.head_dim, device="cuda", dtype=layout.dtype)
    return lambda: flash_attn_func(q[None], k, v, softmax_scale=0.09, causal=True)


def run(report: Report) -> None:
    check(report)
    check_padded(report)
    torch.cuda.empty_cache()
    # Random bits with the top exponent bit cleared: values below 2 in magnitude, no NaN.
    pool = torch.randint(-(2**31), 2**31 - 1, (28 << 28,), dtype=torch.int32, device="cuda")
    pool &= 0xBFFFBFFF - (1 << 32)
    decode(report, pool.view(torch.uint8))
    mixed(report, pool.view(torch.uint8))
    prefill(report, pool.view(torch.uint8))
