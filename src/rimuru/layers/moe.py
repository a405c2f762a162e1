"""A MoE feed-forward whose experts lie wherever the expert table says.

Room: layers. Rule: the router and the shared expert are dense parameters; routed experts are never
owned here, only their addresses are passed on.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

import torch

from rimuru.kernels import operation
from rimuru.kernels.types import ExpertLayout, MoeBlock
from rimuru.layers.linear import DenseWeights, GatedMlp


class SparseMoe:
    """The norm before it, router, routed experts, and optionally one shared expert behind a sigmoid gate.

    Router probabilities and the weights of the chosen experts stay in float32 whatever the model's
    dtype.
    """

    __slots__ = ("block", "index", "run")

    def __init__(
        self,
        weights: DenseWeights,
        ops: ModuleType,
        name: str,
        index: int,
        layout: ExpertLayout,
        experts: int,
        top_k: int,
        *,
        norm: torch.Tensor,
        eps: float,
        zero_centred: bool,
        normalize: bool,
        scoring: str = "softmax",
        shared: int = 0,
        shared_gate: bool = False,
    ):
        """`index` counts MoE layers from 0: this layer's row of the expert table. `norm`, `eps` and
        `zero_centred`: the norm before the router."""
        hidden = layout.hidden
        # The shared expert's gate is one more row of the router: one product gives both.
        rows = {f"{name}.gate.weight": experts}
        if shared_gate:
            rows[f"{name}.shared_expert_gate.weight"] = 1
        router = weights.fuse(rows, hidden)
        mlp = GatedMlp(weights, ops, f"{name}.shared_expert", hidden, shared) if shared else None
        self.index = index
        self.block = MoeBlock(
            norm, eps, router, experts, top_k, layout, scoring, normalize,
            shared_gate_up=mlp.gate_up if mlp else None, shared_down=mlp.down if mlp else None,
            zero_centred=zero_centred,
        )  # fmt: skip
        self.run = operation(ops, "moe_block")

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        next_norm: torch.Tensor,
        addresses: torch.Tensor | Iterable[torch.Tensor],
        touched: torch.Tensor | None,
        live: torch.Tensor,
        routed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention's output and the residual, both `[T, hidden]` -> the next layer's normed input, and its
        residual. next_norm `[hidden]`: the weight of the norm that comes after.

        addresses int64 `[experts]`, or an iterable of such rows (`moe` of the triton back end); touched int32
        `[experts]`; live int32 `[T]`, negative for a padding token, which goes to no expert. routed `[T,
        experts]`: logits in place of the router's.
        """
        return self.run(x, residual, self.block, addresses, next_norm, touched, live, routed)
