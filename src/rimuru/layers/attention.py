"""Attention over paged KV: one fused projection, the write into pages, the read where pages lie.

Room: layers. Rule: all that does not change between steps is settled in `__init__`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from rimuru.kernels import operation
from rimuru.kernels.types import KVView, StepMeta
from rimuru.layers.linear import DenseWeights


class Attention:
    """Grouped-query attention (Ainslie et al., 2023) of one layer.

    `qk_norm`: "none"; "head": RMSNorm over each head of q and k; "all": over all heads together.
    `window` > 0 limits attention to that many last positions. `q_rows`: rows of `q_proj` where it
    gives more than q.
    """

    __slots__ = (
        "attend", "eps", "k_norm", "linear", "out", "out_bias", "q_heads", "q_norm", "qkv", "qkv_bias",
        "rope", "scale", "to_cache", "window",
    )  # fmt: skip

    def __init__(
        self,
        weights: DenseWeights,
        ops: ModuleType,
        name: str,
        hidden: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        rope: torch.Tensor,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: str = "none",
        eps: float = 1e-6,
        window: int = 0,
        q_rows: int | None = None,
    ):
        q_size, kv_size = q_heads * head_dim, kv_heads * head_dim
        rows = {"q_proj": q_rows or q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = weights.fuse({f"{name}.{p}.weight": n for p, n in rows.items()}, hidden)
        self.qkv_bias = weights.fuse({f"{name}.{p}.bias": n for p, n in rows.items()}) if qkv_bias else None
        self.out = weights.take(f"{name}.o_proj.weight", hidden, q_size)
        self.out_bias = weights.take(f"{name}.o_proj.bias", hidden) if output_bias else None
        self.q_norm = self.k_norm = None
        if qk_norm != "none":
            q_norm, k_norm = (head_dim, head_dim) if qk_norm == "head" else (q_size, kv_size)
            self.q_norm = weights.take(f"{name}.q_norm.weight", q_norm)
            self.k_norm = weights.take(f"{name}.k_norm.weight", k_norm)
        self.q_heads, self.rope, self.eps, self.window = q_heads, rope, eps, window
        self.scale = head_dim**-0.5
        self.linear, self.to_cache, self.attend = ops.linear, ops.qkv_to_cache, ops.attention

    def forward(self, x: torch.Tensor, meta: StepMeta, kv: KVView) -> torch.Tensor:
        """x `[T, hidden]` -> `[T, hidden]`; K and V of the step's tokens go into their pages."""
        qkv = self.linear(x, self.qkv, self.qkv_bias)
        q = self.to_cache(qkv, self.q_heads, kv, meta, self.rope, self.q_norm, self.k_norm, self.eps)
        return self.linear(self.attend(q, kv, meta, self.scale, self.window), self.out, self.out_bias)


class ClippedAttention(Attention):
    """Attention whose normalised q, k and v are limited to `[-clip, clip]` before the rotation (OLMoE)."""

    __slots__ = ("clip", "norm")

    def __init__(self, weights: DenseWeights, ops: ModuleType, *args, clip: float, **options):
        super().__init__(weights, ops, *args, **options)
        self.clip = clip
        self.norm = ops.rms_norm

    def forward(self, x: torch.Tensor, meta: StepMeta, kv: KVView) -> torch.Tensor:
        """As `Attention.forward`. The clip lies between norm and rotation, so the norm is done apart."""
        qkv = self.linear(x, self.qkv, self.qkv_bias)
        if self.q_norm is not None and self.k_norm is not None:
            q_size, k_size = self.q_norm.numel(), self.k_norm.numel()
            q, k, v = qkv.split([q_size, k_size, qkv.shape[1] - q_size - k_size], dim=-1)
            q, _ = self.norm(q.contiguous(), self.q_norm, self.eps)
            k, _ = self.norm(k.contiguous(), self.k_norm, self.eps)
            qkv = torch.cat([q, k, v], dim=-1)
        qkv = qkv.clamp_(-self.clip, self.clip)
        q = self.to_cache(qkv, self.q_heads, kv, meta, self.rope, None, None, self.eps)
        return self.linear(self.attend(q, kv, meta, self.scale, self.window), self.out, self.out_bias)


class GatedAttention(Attention):
    """Attention whose `q_proj` gives q and a gate, head by head; its sigmoid scales what attention returns.

    The norms of q and k, where there are any, are zero-centred (Qwen3-Next).
    """

    __slots__ = ("head_dim", "norm")

    def __init__(
        self,
        weights: DenseWeights,
        ops: ModuleType,
        name: str,
        hidden: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        rope: torch.Tensor,
        **options: Any,
    ):
        shape = (name, hidden, q_heads, kv_heads, head_dim, rope)
        super().__init__(weights, ops, *shape, q_rows=2 * q_heads * head_dim, **options)
        self.head_dim = head_dim
        self.norm = operation(ops, "zero_centred_rms_norm")

    def forward(self, x: torch.Tensor, meta: StepMeta, kv: KVView) -> torch.Tensor:
        """As `Attention.forward`. Norms are done before the rotation, which knows only plain ones."""
        tokens, q_size = len(x), self.q_heads * self.head_dim
        both, k, v = self.linear(x, self.qkv, self.qkv_bias).tensor_split(
            [2 * q_size, 2 * q_size + kv.layout.heads * self.head_dim], dim=-1
        )
        q, gate = both.view(tokens, self.q_heads, 2, self.head_dim).unbind(2)
        if self.q_norm is not None and self.k_norm is not None:
            q, _ = self.norm(q.reshape(-1, self.head_dim), self.q_norm, self.eps)
            k, _ = self.norm(k.reshape(-1, self.head_dim), self.k_norm, self.eps)
        qkv = torch.cat([q.reshape(tokens, -1), k.reshape(tokens, -1), v], dim=-1)
        q = self.to_cache(qkv, self.q_heads, kv, meta, self.rope, None, None, self.eps)
        mixed = self.attend(q, kv, meta, self.scale, self.window) * gate.reshape(tokens, -1).sigmoid()
        return self.linear(mixed, self.out, self.out_bias)
