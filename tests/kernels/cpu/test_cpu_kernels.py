"""The compiled CPU kernels against the torch twin, and each row's independence of its batch."""

from __future__ import annotations

import pytest
import torch
from kernels.kv_cases import make_layout, make_step

from rimuru.kernels import backend_for, cpu, reference
from rimuru.kernels.types import EXPERT_HOST, ExpertLayout

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
# Both sides accumulate in float32, in different orders: sums of K <= 1,600 values of order 1 differ by a few
# 1e-6. In bfloat16 the two sums may then round to neighbouring values, which lie 2^-7 apart (relative).
REL = {torch.bfloat16: 2**-7, torch.float32: 1e-5}

pytestmark = pytest.mark.skipif(
    not cpu.linear.__module__.endswith("ops"), reason="the CPU kernels are not compiled here"
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def close(got: torch.Tensor, want: torch.Tensor, rounds: int = 1) -> None:
    """Equal up to `rounds` roundings, relative to each value or to 1/8 of the largest."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    rel = REL[got.dtype] * rounds
    torch.testing.assert_close(got, want, rtol=rel, atol=rel * want.float().abs().max().item() / 8)


# ---- linear ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 576), (37, 100), (64, 16), (960, 576), (130, 1601)])
def test_linear_agrees_with_the_twin(dtype, n, k):
    weight, bias = torch.randn(n, k).mul(k**-0.5).to(dtype), torch.randn(n).to(dtype)
    for m in (0, 1, 2, 3, 4, 5, 7, 16, 70):
        x = torch.randn(m, k).to(dtype)
        if m == 0:
            assert cpu.linear(x, weight).shape == (0, n)
            continue
        # The twin in float32: torch's own bfloat16 product rounds the sum before it adds the bias.
        want = reference.linear(x.float(), weight.float(), bias.float()).to(dtype)
        close(cpu.linear(x, weight, bias), want)
        close(cpu.linear(x, weight), reference.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_reads_a_slice_of_wider_rows(dtype):
    wide, weight = torch.randn(9, 200).to(dtype), torch.randn(24, 75).to(dtype)
    part = wide[:, 50:125]
    close(cpu.linear(part, weight), reference.linear(part, weight))
    close(cpu.linear(wide.t()[:75].t(), weight), reference.linear(wide[:, :75], weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 100, 576])
def test_a_row_of_linear_does_not_depend_on_its_batch(dtype, k):
    x, weight = torch.randn(70, k).to(dtype), torch.randn(61, k).to(dtype)
    alone = torch.cat([cpu.linear(x[i : i + 1], weight) for i in range(70)])
    for m in (*range(1, 18), 64, 67, 70):
        assert torch.equal(cpu.linear(x[:m], weight), alone[:m])
        assert torch.equal(cpu.linear(x[70 - m :], weight), alone[70 - m :])


def test_the_thread_count_changes_no_bit(two_threads):
    x, weight = torch.randn(33, 576).bfloat16(), torch.randn(700, 576).bfloat16()
    both = cpu.linear(x, weight)
    torch.set_num_threads(1)
    assert torch.equal(cpu.linear(x, weight), both)


def test_linear_keeps_nan_and_infinity_in_their_rows():
    x, weight = torch.ones(3, 32).bfloat16(), torch.ones(8, 32).bfloat16()
    x[1, 5], x[2, 6] = float("nan"), float("inf")
    got = cpu.linear(x, weight)
    assert (got[0] == 32).all()
    assert got[1].isnan().all()
    assert (got[2] == float("inf")).all()


def test_mismatched_columns_are_refused():
    with pytest.raises(ValueError, match="x has 32 columns, weight 48"):
        cpu.linear(torch.ones(1, 32), torch.ones(8, 48))


# ---- rows ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [5, 64, 576, 1000])
@pytest.mark.parametrize("m", [1, 3, 70])
def test_rms_norm_agrees_with_the_twin(dtype, m, n):
    x, residual, weight = (torch.randn(*s).to(dtype) for s in ((m, n), (m, n), (n,)))
    close(cpu.rms_norm(x, weight, 1e-5)[0], reference.rms_norm(x, weight, 1e-5)[0], rounds=2)
    normed, total = cpu.rms_norm(x, weight, 1e-5, residual)
    want, want_total = reference.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(total, want_total)
    close(normed, want, rounds=2)  # the scale may round the value to its neighbour before the weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), [(1, 7), (3, 96), (40, 1536)])
def test_silu_and_mul_agrees_with_the_twin(dtype, m, n):
    x = (torch.randn(m, 2 * n) * 4).to(dtype)
    x[0, 0], x[0, 1] = 100.0, -100.0
    close(cpu.silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4), (128, 8), (3, 3)])
def test_route_agrees_with_the_twin(dtype, scoring, experts, top_k):
    logits = torch.stack([torch.randperm(experts) for _ in range(50)]).to(dtype) * 0.125
    bias = torch.randperm(experts).float() * 10
    for correction in (None, bias):
        for normalize in (True, False):
            weights, ids = cpu.route(logits, top_k, scoring, normalize, correction)
            want, want_ids = reference.route(logits, top_k, scoring, normalize, correction)
            assert torch.equal(ids, want_ids)
            torch.testing.assert_close(weights, want, rtol=2e-6, atol=1e-9)


def test_padding_tokens_choose_nobody():
    logits, live = torch.randn(4, 9), torch.tensor([2, -1, 0, -1], dtype=torch.int32)
    weights, ids = cpu.route(logits, 3, live=live)
    want, want_ids = reference.route(logits, 3, live=live)
    assert torch.equal(ids, want_ids)
    assert (ids[1::2] == -1).all()
    torch.testing.assert_close(weights, want, rtol=2e-6, atol=1e-9)


def test_equal_scores_go_to_the_lower_expert():
    _, ids = cpu.route(torch.zeros(4, 9), 3)
    assert ids.tolist() == [[0, 1, 2]] * 4


def test_nan_logits_still_choose_distinct_experts():
    _, ids = cpu.route(torch.full((1, 8), float("nan")), 3)
    assert len(set(ids[0].tolist())) == 3
    assert set(ids[0].tolist()) <= set(range(8))


# ---- experts ----


def scattered_experts(layout: ExpertLayout, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert pages in random places of a buffer that is NaN elsewhere: (buffer, tagged addresses)."""
    step = -(-layout.page_bytes // 256) * 256 + 512
    buffer = torch.full((step * (experts + 2) // layout.dtype.itemsize,), float("nan"), dtype=layout.dtype)
    first = -buffer.data_ptr() % 256
    order = torch.randperm(experts) * step + first
    half = layout.gate_up_bytes // layout.dtype.itemsize
    for at in order.tolist():
        page = buffer[at // layout.dtype.itemsize :]
        page[:half] = torch.randn(half).mul(layout.hidden**-0.5).to(layout.dtype)
        start, count = layout.down_offset // layout.dtype.itemsize, layout.hidden * layout.intermediate
        page[start : start + count] = torch.randn(count).mul(layout.intermediate**-0.5).to(layout.dtype)
    return buffer, (order + buffer.data_ptr()) | (torch.arange(experts) % 2 * EXPERT_HOST)


def routing(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    return ids, torch.rand(tokens, top_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("hidden", "inter", "experts", "top_k"), [(64, 96, 8, 2), (50, 37, 5, 3), (576, 200, 4, 1)]
)
def test_moe_agrees_with_the_twin_wherever_experts_lie(dtype, hidden, inter, experts, top_k):
    layout = ExpertLayout(hidden, inter, dtype)
    buffer, table = scattered_experts(layout, experts)
    for tokens in (1, 2, 5, 16, 70):
        x = torch.randn(tokens, hidden).to(dtype)
        ids, weights = routing(tokens, experts, top_k)
        ids[tokens // 2, 0] = -1
        seen, want_seen = torch.ones(experts, dtype=torch.int32), torch.ones(experts, dtype=torch.int32)
        got = cpu.moe(x, ids, weights, table, layout, seen)
        want = reference.moe(x, ids, weights, table, layout, want_seen)
        close(got, want, rounds=2)  # a gate or up value on its neighbour, then the result itself
        assert torch.equal(seen, want_seen)
    del buffer


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_of_moe_depends_neither_on_its_batch_nor_on_where_experts_lie(dtype, two_threads):
    layout = ExpertLayout(72, 88, dtype)
    buffer, table = scattered_experts(layout, 6)
    x, (ids, weights) = torch.randn(67, 72).to(dtype), routing(67, 6, 2)
    alone = torch.cat(
        [cpu.moe(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], table, layout) for i in range(67)]
    )
    for m in (2, 3, 16, 64, 67):
        assert torch.equal(cpu.moe(x[:m], ids[:m], weights[:m], table, layout), alone[:m])
    spare = torch.empty(buffer.numel() + 128, dtype=dtype)
    skip = (buffer.data_ptr() - spare.data_ptr()) % 256 // dtype.itemsize  # addresses keep their low byte
    moved = spare[skip : skip + buffer.numel()].copy_(buffer)
    assert torch.equal(
        cpu.moe(x, ids, weights, table + (moved.data_ptr() - buffer.data_ptr()), layout), alone
    )
    torch.set_num_threads(1)
    assert torch.equal(cpu.moe(x, ids, weights, table, layout), alone)


def test_a_long_prefill_runs_in_chunks_with_the_same_result():
    layout = ExpertLayout(32, 32, torch.float32)
    buffer, table = scattered_experts(layout, 4)
    x, (ids, weights) = torch.randn(1100, 32), routing(1100, 4, 2)
    seen = torch.zeros(4, dtype=torch.int32)
    got = cpu.moe(x, ids, weights, table, layout, seen)
    assert torch.equal(got[1000:], cpu.moe(x[1000:], ids[1000:], weights[1000:], table, layout))
    assert seen.sum() == 2200
    close(got, reference.moe(x, ids, weights, table, layout))
    del buffer


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shared_expert_is_added_before_the_one_rounding(dtype):
    layout = ExpertLayout(50, 37, dtype)
    buffer, table = scattered_experts(layout, 5)
    for tokens in (1, 7, 600):  # 600: two chunks
        x, (ids, weights) = torch.randn(tokens, 50).to(dtype), routing(tokens, 5, 2)
        ids[-1] = -1
        shared, gate = torch.randn(tokens, 80).to(dtype)[:, :50], torch.randn(tokens, 3).to(dtype)[:, 1:2]
        step = (x, ids, weights, table, layout, None, shared)
        plain, gated = cpu.moe(*step), cpu.moe(*step, gate)
        close(plain, reference.moe(*step), rounds=2)
        close(gated, reference.moe(*step, gate), rounds=2)
        assert torch.equal(plain[-1], shared[-1])
        close(gated[-1], (gate[-1].float().sigmoid() * shared[-1].float()).to(dtype))
    del buffer


def test_skipped_tokens_yield_zeros():
    layout = ExpertLayout(32, 32, torch.bfloat16)
    x, ids = torch.randn(3, 32).bfloat16(), torch.full((3, 2), -1, dtype=torch.int32)
    got = cpu.moe(x, ids, torch.ones(3, 2), torch.zeros(4, dtype=torch.int64), layout)
    assert (got == 0).all()


# ---- KV cache ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["none", "head", "all"])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (64, 32), (40, 40), (12, 6)])
def test_qkv_to_cache_writes_what_the_twin_writes(dtype, norm, dim, rotary):
    layout = make_layout(dtype, heads=2, dim=dim)
    queries = [3, 1, 40, 2]
    kv, meta = make_step(layout, [3, 30, 50, 0], queries, fill=False)
    twin, _ = make_step(layout, [3, 30, 50, 0], queries, fill=False)
    qkv = torch.randn(sum(queries), (6 + 4) * dim + 8).to(dtype)[:, : 10 * dim]
    rope = reference.rope_table(64, rotary, 10_000.0, CPU)
    norms: tuple = (None, None)
    if norm != "none":
        norms = tuple(torch.randn(dim * (heads if norm == "all" else 1)).to(dtype) for heads in (6, 2))
    q = cpu.qkv_to_cache(qkv, 6, kv, meta, rope, *norms)
    want = reference.qkv_to_cache(qkv, 6, twin, meta, rope, *norms)
    close(q, want, rounds=2)
    assert torch.equal(kv.pool.isnan(), twin.pool.isnan())  # wrote those places and no others
    close(kv.pool.nan_to_num(), twin.pool.nan_to_num(), rounds=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 20, 600])
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([1], [1]),
        ([17, 0, 5], [1, 1, 1]),
        ([16, 33, 70], [16, 1, 40]),
        ([1300, 9], [1, 1]),
        ([700, 600], [90, 1]),
    ],
)
@pytest.mark.parametrize(("q_heads", "heads", "dim"), [(9, 3, 64), (4, 4, 20)])
def test_attention_agrees_with_the_twin_over_poisoned_pages(
    dtype, window, lengths, queries, q_heads, heads, dim
):
    kv, meta = make_step(make_layout(dtype, heads, dim), lengths, queries)
    q = torch.randn(sum(queries), q_heads, dim).to(dtype)
    got = cpu.attention(q, kv, meta, dim**-0.5, window)
    close(got, reference.attention(q, kv, meta, dim**-0.5, window))
    starts = meta.query_start.tolist()
    for s, length in enumerate(lengths):
        assert length or (got[starts[s] : starts[s + 1]] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 700])
def test_a_query_does_not_depend_on_its_chunk_or_batch(dtype, window, two_threads):
    layout = make_layout(dtype, heads=2, dim=64)
    q = torch.randn(37, 8, 64).to(dtype)
    results = []
    for lengths, queries in (([1200], [37]), ([1200], [1]), ([1200] + [20] * 40, [1] * 41)):
        kv, meta = make_step(layout, lengths, queries)
        for block in range(75):  # the same 1,200 tokens, whichever pages they were given
            page = int(kv.table[meta.slots[0], block]) * layout.grain_elems + layout.layer_elems
            torch.manual_seed(block)
            kv.pool[page : page + layout.layer_elems] = torch.randn(layout.layer_elems).to(dtype)
        rows = torch.cat([q[-queries[0] :], torch.zeros(sum(queries) - queries[0], 8, 64, dtype=dtype)])
        results.append(cpu.attention(rows, kv, meta, 0.125, window)[queries[0] - 1])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# ---- the rest ----


def test_move_pages_and_edits_agree_with_the_twin():
    pool = torch.randint(0, 255, (64 * 40,), dtype=torch.uint8)
    twin = pool.clone()
    source, target = torch.tensor([1, 7, 20]), torch.tensor([30, 4, 11])
    cpu.move_pages(pool, source, target, 64, 100)
    reference.move_pages(twin, source, target, 64, 100)
    assert torch.equal(pool, twin)
    table = torch.zeros(3, 4, dtype=torch.int32)
    cpu.apply_edits(table, torch.tensor([1, 11]), torch.tensor([5, 9]))
    assert table.flatten().nonzero().flatten().tolist() == [1, 11]


def test_half_precision_runs_on_the_twin():
    x, weight = torch.randn(3, 32).half(), torch.randn(8, 32).half()
    assert torch.equal(cpu.linear(x, weight), reference.linear(x, weight))


def test_backend_for_chooses_by_device_and_type():
    assert backend_for(CPU, torch.bfloat16) is cpu
    assert backend_for(CPU, torch.float32) is cpu
    assert backend_for(CPU, torch.float16) is reference


def test_every_function_of_the_twin_is_exposed():
    contract = {n for n, f in vars(reference).items() if getattr(f, "__module__", "") == reference.__name__}
    # Recurrent layers run on the twin here, by `kernels.operation`.
    on_the_twin = {"causal_conv", "gated_delta_rule", "zero_centred_rms_norm"}
    for name in contract - {"tensor_at"} - on_the_twin:
        assert name.startswith("_") or callable(getattr(cpu, name))
