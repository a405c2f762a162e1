"""A MoE feed-forward whose experts lie wherever the expert table says.

Room: layers. Rule: the router and the shared expert are dense parameters; routed experts are never
owned here, only their addresses are passed on.
"""

from __future__ import annotations

from types import ModuleType

import torch

from rimuru.kernels.types import ExpertLayout
from rimuru.layers.linear import DenseWeights, GatedMlp


class SparseMoe:
    """Router, routed experts, and optionally one shared expert behind a sigmoid gate.

    Router probabilities and the weights of the chosen experts stay in float32 whatever the model's
    dtype.
    """

    __slots__ = (
        "index", "layout", "linear", "moe", "normalize", "route", "router", "scoring", "shared",
        "shared_gate", "top_k",
    )  # fmt: skip

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
        normalize: bool,
        scoring: str = "softmax",
        shared: int = 0,
        shared_gate: bool = False,
    ):
        """`index` counts MoE layers from 0: this layer's row of the expert table."""
        hidden = layout.hidden
        self.index, self.layout = index, layout
        self.top_k, self.normalize, self.scoring = top_k, normalize, scoring
        self.router = weights.take(f"{name}.gate.weight", experts, hidden)
        self.shared = GatedMlp(weights, ops, f"{name}.shared_expert", hidden, shared) if shared else None
        self.shared_gate = (
            weights.take(f"{name}.shared_expert_gate.weight", 1, hidden) if shared_gate else None
        )
        self.linear, self.route, self.moe = ops.linear, ops.route, ops.moe

    def forward(self, x: torch.Tensor, addresses: torch.Tensor, touched: torch.Tensor | None) -> torch.Tensor:
        """x `[T, hidden]`, addresses int64 `[experts]`, touched int32 `[experts]` -> `[T, hidden]`."""
        weights, ids = self.route(self.linear(x, self.router), self.top_k, self.scoring, self.normalize)
        out = self.moe(x, ids, weights, addresses, self.layout, touched)
        if self.shared is None:
            return out
        shared = self.shared.forward(x)
        if self.shared_gate is None:
            return out + shared
        return torch.addcmul(out, self.linear(x, self.shared_gate).sigmoid_(), shared)
