"""The Python face of `kernels.c`: checks, output allocation, and one foreign call each.

Room: the CPU back end. Rule: thin, because a small model's step is made of these calls: no copies,
prebound argument types, raw addresses. An element type without a kernel goes to the torch twin;
shapes, units and meaning are documented there.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .. import reference
from ..types import ExpertLayout, KVView, StepMeta

_NATIVE = (torch.bfloat16, torch.float32)

_P, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES = {
    "linear": [_P, _I, _P, _P, _P, *[_I] * 5],
    "moe": [_P, _I, _P, _P, _P, _P, _P, _I, _P, _P, *[_I] * 8],
    "attention": [_P, _I, _P, _P, _P, _I, _P, _P, _P, *[_I] * 11, _D, _I, _I],
    "qkv_to_cache": [_P, _I, _P, _P, _P, _I, _P, _P, _P, _P, _P, *[_I] * 10, _D, _I, _I],
    "rms_norm": [_P, _I, _P, _I, _P, _P, _P, _I, _I, _D, _I, _I],
    "route": [_P, _I, _P, _P, _P, *[_I] * 7],
    "silu_and_mul": [_P, _I, _P, *[_I] * 4],
}
# Giving up the GIL costs a wait of milliseconds where another Python thread is busy (a server's event
# loop), so only calls that compute for longer than a few microseconds do.
_HOLDS_GIL = ("qkv_to_cache", "rms_norm", "route", "silu_and_mul")

_c: dict[str, Any] = {}


def bind(libraries: tuple[ctypes.CDLL, ctypes.PyDLL] | None) -> bool:
    """Bind the functions of the compiled library; False where there is none."""
    if libraries is None:
        return False
    for name, arguments in _SIGNATURES.items():
        function = getattr(libraries[name in _HOLDS_GIL], f"rimuru_{name}")
        function.argtypes = arguments
        function.restype = ctypes.c_int
        _c[name] = function
    return True


def _done(status: int) -> None:
    if status != 0:
        raise MemoryError("the CPU kernels could not allocate their scratch memory")


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x itself where its rows are contiguous, at whatever distance from each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    dtype = x.dtype
    if (
        dtype not in _NATIVE
        or weight.dtype != dtype
        or (bias is not None and bias.dtype != dtype)
        or x.dim() != 2
        or not weight.is_contiguous()
    ):
        return reference.linear(x, weight, bias)
    (m, k), n = x.shape, weight.shape[0]
    if weight.shape[1] != k:
        raise ValueError(f"linear: x has {k} columns, weight {weight.shape[1]}")
    x = _rows(x)
    out = x.new_empty((m, n))
    _done(
        _c["linear"](
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            m,
            n,
            k,
            dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
    )
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = x.dtype
    if dtype not in _NATIVE or weight.dtype != dtype or x.dim() != 2:
        return reference.rms_norm(x, weight, eps, residual)
    x = _rows(x)
    m, n = x.shape
    out, total = x.new_empty((m, n)), x
    if residual is not None:
        residual, total = _rows(residual), x.new_empty((m, n))
    _done(
        _c["rms_norm"](
            x.data_ptr(),
            x.stride(0),
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            total.data_ptr(),
            m,
            n,
            eps,
            dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
    )
    return out, total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in _NATIVE or x.dim() != 2:
        return reference.silu_and_mul(x)
    x = _rows(x)
    m, n = x.shape[0], x.shape[1] // 2
    out = x.new_empty((m, n))
    _c["silu_and_mul"](
        x.data_ptr(), x.stride(0), out.data_ptr(), m, n, x.dtype is torch.bfloat16, torch.get_num_threads()
    )
    return out


def qkv_to_cache(
    qkv: torch.Tensor,
    q_heads: int,
    kv: KVView,
    meta: StepMeta,
    rope: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    lay, dtype = kv.layout, qkv.dtype
    mixed = any(w is not None and w.dtype != dtype for w in (q_norm, k_norm))
    if dtype not in _NATIVE or lay.dtype != dtype or mixed:
        return reference.qkv_to_cache(qkv, q_heads, kv, meta, rope, q_norm, k_norm, eps)
    qkv = _rows(qkv)
    tokens, dim, table = qkv.shape[0], lay.head_dim, kv.table
    assert meta.positions.dtype is meta.token_slots.dtype is table.dtype is torch.int32
    assert rope.dtype is torch.float32
    q = qkv.new_empty((tokens, q_heads, dim))
    norm_all = 0
    if q_norm is not None:
        norm_all |= q_norm.numel() != dim
    if k_norm is not None:
        norm_all |= (k_norm.numel() != dim) << 1
    _done(
        _c["qkv_to_cache"](
            qkv.data_ptr(),
            qkv.stride(0),
            q.data_ptr(),
            kv.pool.data_ptr(),
            table.data_ptr(),
            table.stride(0),
            meta.positions.data_ptr(),
            meta.token_slots.data_ptr(),
            rope.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            norm_all,
            tokens,
            q_heads,
            lay.heads,
            dim,
            lay.block_tokens,
            lay.grain_elems,
            kv.layer * lay.layer_elems,
            lay.kv_elems,
            rope.shape[1],
            eps,
            dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
    )
    return q


def attention(q: torch.Tensor, kv: KVView, meta: StepMeta, scale: float, window: int = 0) -> torch.Tensor:
    lay, dtype = kv.layout, q.dtype
    if dtype not in _NATIVE or lay.dtype != dtype:
        return reference.attention(q, kv, meta, scale, window)
    if q.stride(-1) != 1 or q.stride(1) != lay.head_dim:
        q = q.contiguous()
    tokens, q_heads, dim = q.shape
    table = kv.table
    assert meta.query_start.dtype is meta.slots.dtype is meta.seq_lens.dtype is table.dtype is torch.int32
    out = q.new_zeros((tokens, q_heads * dim))
    _done(
        _c["attention"](
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            kv.pool.data_ptr(),
            table.data_ptr(),
            table.stride(0),
            meta.query_start.data_ptr(),
            meta.slots.data_ptr(),
            meta.seq_lens.data_ptr(),
            meta.seq_lens.shape[0],
            meta.max_query_len,
            meta.max_seq_len,
            q_heads,
            lay.heads,
            dim,
            lay.block_tokens,
            lay.grain_elems,
            kv.layer * lay.layer_elems,
            lay.kv_elems,
            window,
            scale,
            dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
    )
    return out


def route(
    logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    normalize: bool = True,
    bias: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.dtype not in _NATIVE or (bias is not None and bias.dtype != torch.float32):
        return reference.route(logits, top_k, scoring, normalize, bias, live)
    logits = _rows(logits)
    m, experts = logits.shape
    if not 0 < top_k <= experts:
        raise ValueError(f"route: top_k {top_k} is not within the {experts} experts")
    weights = torch.empty((m, top_k), dtype=torch.float32)
    ids = torch.empty((m, top_k), dtype=torch.int32)
    _done(
        _c["route"](
            logits.data_ptr(),
            logits.stride(0),
            None if bias is None else bias.data_ptr(),
            weights.data_ptr(),
            ids.data_ptr(),
            m,
            experts,
            top_k,
            scoring == "sigmoid",
            normalize,
            logits.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
    )
    if live is not None:
        padding = live[:, None] < 0
        weights.masked_fill_(padding, 0.0)
        ids.masked_fill_(padding, -1)
    return weights, ids


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    layout: ExpertLayout,
    touched: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype = x.dtype
    mixed = any(t is not None and t.dtype != dtype for t in (shared, gate))
    if dtype not in _NATIVE or layout.dtype != dtype or mixed:
        return reference.moe(x, ids, weights, table, layout, touched, shared, gate)
    x, ids, weights = _rows(x), ids.contiguous(), weights.contiguous()
    if shared is not None:
        shared = _rows(shared)
        gate = None if gate is None else gate.contiguous()
    assert ids.dtype is torch.int32
    assert weights.dtype is torch.float32
    assert table.dtype is torch.int64
    assert table.is_contiguous()
    tokens, hidden = x.shape
    out = x.new_empty((tokens, hidden))
    _done(
        _c["moe"](
            x.data_ptr(),
            x.stride(0),
            ids.data_ptr(),
            weights.data_ptr(),
            table.data_ptr(),
            None if touched is None else touched.data_ptr(),
            None if shared is None else shared.data_ptr(),
            0 if shared is None else shared.stride(0),
            None if gate is None else gate.data_ptr(),
            out.data_ptr(),
            tokens,
            ids.shape[1],
            table.shape[0],
            hidden,
            layout.intermediate,
            layout.down_offset,
            dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
    )
    return out


def move_pages(
    pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor, grain: int, nbytes: int
) -> None:
    base = pool.data_ptr()
    for a, b in zip(source.tolist(), target.tolist(), strict=True):
        ctypes.memmove(base + b * grain, base + a * grain, nbytes)
