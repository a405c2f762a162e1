"""A gated delta layer: attention replaced by a state of fixed size that every token updates.

Room: layers. Rule: as `attention`: all that does not change between steps is settled in `__init__`,
and what a sequence has left behind is read and written where its pages lie.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from rimuru.kernels import operation
from rimuru.kernels.types import RecurrentView, StepMeta
from rimuru.layers.linear import DenseWeights


class GatedDeltaNet:
    """Gated DeltaNet (Yang et al., 2025) of one layer: convolution, delta rule, gated norm, projection.

    `fused`: q, k, v, z come from `in_proj_qkvz` and b, a from `in_proj_ba`, the rows of each key head
    together (Qwen3-Next); otherwise from `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`.
    """

    __slots__ = (
        "conv", "conv_op", "delta_rule", "dims", "dt_bias", "eps", "fused", "heads", "in_proj", "linear",
        "log_decay", "norm", "norm_op", "out",
    )  # fmt: skip

    def __init__(
        self,
        weights: DenseWeights,
        ops: ModuleType,
        name: str,
        hidden: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        *,
        eps: float,
        fused: bool,
    ):
        keys, values = key_heads * key_dim, value_heads * value_dim
        rows = (
            {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * value_heads}
            if fused
            else {"in_proj_qkv": 2 * keys + values, "in_proj_z": values,
                  "in_proj_b": value_heads, "in_proj_a": value_heads}
        )  # fmt: skip
        self.in_proj = weights.fuse({f"{name}.{p}.weight": n for p, n in rows.items()}, hidden)
        self.conv = weights.take(f"{name}.conv1d.weight", 2 * keys + values, 1, kernel)[:, 0]
        self.log_decay = weights.take(f"{name}.A_log", value_heads)
        self.dt_bias = weights.take(f"{name}.dt_bias", value_heads)
        self.norm = weights.take(f"{name}.norm.weight", value_dim)
        self.out = weights.take(f"{name}.out_proj.weight", hidden, values)
        self.heads, self.dims = (key_heads, value_heads), (key_dim, value_dim)
        self.eps, self.fused = eps, fused
        self.linear, self.norm_op = ops.linear, ops.rms_norm
        self.conv_op = operation(ops, "causal_conv")
        self.delta_rule = operation(ops, "gated_delta_rule")

    def forward(self, x: torch.Tensor, meta: StepMeta, view: RecurrentView) -> torch.Tensor:
        """x `[T, hidden]` -> `[T, hidden]`; each sequence's state moves on by its tokens of the step."""
        (key_heads, value_heads), (key_dim, value_dim) = self.heads, self.dims
        keys = key_heads * key_dim
        qkv, z, b, a = self._split(self.linear(x, self.in_proj))
        mixed = self.conv_op(qkv, self.conv, view.conv, meta)
        q, k, v = mixed.tensor_split([keys, 2 * keys], dim=-1)
        decay = -self.log_decay.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        core = self.delta_rule(
            q.view(-1, key_heads, key_dim), k.view(-1, key_heads, key_dim),
            v.view(-1, value_heads, value_dim), decay, b.sigmoid(), view.state, meta,
        )  # fmt: skip
        normed, _ = self.norm_op(core.view(-1, value_dim), self.norm, self.eps)
        gated = (normed.float() * F.silu(z.reshape(-1, value_dim).float())).to(x.dtype)
        return self.linear(gated.view(len(x), -1), self.out)

    def _split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The projections' outputs as q with k and v, z, b, a: each `[T, n]`, head after head."""
        (key_heads, value_heads), (key_dim, value_dim) = self.heads, self.dims
        keys, values = key_heads * key_dim, value_heads * value_dim
        if not self.fused:
            return mixed.split([2 * keys + values, values, value_heads, value_heads], dim=-1)
        per, tokens = value_heads // key_heads, len(mixed)
        qkvz, ba = mixed.split([2 * (keys + values), 2 * value_heads], dim=-1)
        sizes = [key_dim, key_dim, per * value_dim, per * value_dim]
        parts = qkvz.view(tokens, key_heads, -1).split(sizes, dim=-1)
        q, k, v, z = (part.reshape(tokens, -1) for part in parts)
        b, a = (part.reshape(tokens, -1) for part in ba.view(tokens, key_heads, -1).split(per, dim=-1))
        return torch.cat([q, k, v], dim=-1), z, b, a
