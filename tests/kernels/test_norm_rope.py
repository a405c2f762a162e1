"""Norm, rotary embedding and KV write against the torch twin."""

from __future__ import annotations

import pytest
import torch
from kernels.kv_cases import DEVICE, make_layout, make_step

from rimuru.kernels import reference
from rimuru.kernels.triton import norm_rope

# Both sides round at the same places; a float32 sum in another order may flip one rounding, and the
# products that follow can carry that to two ulps.
EPS = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(3, 96), (1, 2048)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_matches_its_twin(dtype, tokens, width, with_residual):
    torch.manual_seed(0)
    x, residual = torch.randn(2, tokens, width, device=DEVICE).mul(3).to(dtype)
    weight = torch.rand(width, device=DEVICE).add(0.5).to(dtype)
    extra = residual if with_residual else None
    before = x.clone()
    got, want = norm_rope.rms_norm(x, weight, 1e-5, extra), reference.rms_norm(x, weight, 1e-5, extra)
    torch.testing.assert_close(got[0], want[0], rtol=EPS[dtype], atol=EPS[dtype])
    assert torch.equal(got[1], want[1])
    assert torch.equal(x, before)


def test_rms_norm_reads_a_slice_of_wider_rows():
    wide = torch.randn(4, 100, device=DEVICE)
    weight = torch.ones(32, device=DEVICE)
    got, want = (f(wide[:, 8:40], weight, 1e-6)[0] for f in (norm_rope.rms_norm, reference.rms_norm))
    torch.testing.assert_close(got, want)


CASES = [
    # dtype, KV heads, q heads, head dim, rotary dim, norm
    (torch.float32, 2, 6, 32, 32, "none"),
    (torch.bfloat16, 2, 4, 64, 64, "head"),
    (torch.float16, 1, 2, 64, 64, "head"),
    (torch.float32, 3, 3, 16, 16, "all"),  # OLMoE
    (torch.bfloat16, 4, 4, 16, 16, "all"),
    (torch.float32, 1, 3, 64, 16, "head"),  # partial rotary, Qwen3.5
]


@pytest.mark.parametrize(("dtype", "heads", "q_heads", "dim", "rotary", "norm"), CASES)
def test_keys_and_values_land_in_their_pages(dtype, heads, q_heads, dim, rotary, norm):
    layout = make_layout(dtype, heads, dim)
    kv, meta = make_step(layout, [5, 40, 0, 17], [5, 3, 1, 1], fill=False)
    torch.manual_seed(1)
    qkv = torch.randn(10, (q_heads + 2 * heads) * dim, device=DEVICE).to(dtype)
    rope = reference.rope_table(64, rotary, 10_000.0, DEVICE)
    weights = {
        name: torch.rand(dim if norm == "head" else n * dim, device=DEVICE).add(0.5).to(dtype)
        for name, n in (("q_norm", q_heads), ("k_norm", heads))
        if norm != "none"
    }
    twin_pool = kv.pool.clone()
    got = norm_rope.qkv_to_cache(qkv, q_heads, kv, meta, rope, **weights)
    pool = kv.pool.clone()
    kv.pool.copy_(twin_pool)
    want = reference.qkv_to_cache(qkv, q_heads, kv, meta, rope, **weights)
    torch.testing.assert_close(got, want, rtol=EPS[dtype], atol=EPS[dtype])
    # Everything not written this step is still NaN on both sides.
    torch.testing.assert_close(pool, kv.pool, rtol=EPS[dtype], atol=EPS[dtype], equal_nan=True)
    assert (~kv.pool.isnan()).sum() == 9 * 2 * heads * dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_mul(dtype):
    torch.manual_seed(2)
    x = torch.randn(3, 2 * 1100, device=DEVICE).to(dtype)
    gate, up = x.float().chunk(2, dim=-1)
    want = (torch.nn.functional.silu(gate) * up).to(dtype)
    torch.testing.assert_close(norm_rope.silu_and_mul(x), want, rtol=EPS[dtype], atol=1e-6)
