"""A MoE feed-forward whose experts lie wherever the expert table says.

Room: layers. Rule: the router and the shared expert are dense parameters; routed experts are never
owned here, only their addresses are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType

import torch

from rimuru.kernels.types import ExpertLayout
from rimuru.layers.linear import DenseWeights, GatedMlp

# Tokens up to which the shared expert runs beside the routed ones: few rows leave multiprocessors idle.
BESIDE = 512


class SparseMoe:
    """Router, routed experts, and optionally one shared expert behind a sigmoid gate.

    Router probabilities and the weights of the chosen experts stay in float32 whatever the model's
    dtype.
    """

    __slots__ = (
        "experts", "gated", "index", "layout", "linear", "moe", "normalize", "route", "router", "scoring",
        "shared", "top_k",
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
        # The shared expert's gate is one more row of the router: one product gives both.
        rows = {f"{name}.gate.weight": experts}
        if shared_gate:
            rows[f"{name}.shared_expert_gate.weight"] = 1
        self.router = weights.fuse(rows, hidden)
        self.shared = GatedMlp(weights, ops, f"{name}.shared_expert", hidden, shared) if shared else None
        self.experts, self.gated = experts, shared_gate
        self.linear, self.route, self.moe = ops.linear, ops.route, ops.moe

    def forward(
        self,
        x: torch.Tensor,
        addresses: torch.Tensor | Iterable[torch.Tensor],
        touched: torch.Tensor | None,
        live: torch.Tensor,
        routed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x `[T, hidden]` -> `[T, hidden]`.

        addresses int64 `[experts]`, or an iterable of such rows (`moe` of the triton back end); touched int32
        `[experts]`; live int32 `[T]`, negative for a padding token, which goes to no expert. routed `[T,
        experts]`: logits in place of the router's.
        """
        logits = self.linear(x, self.router)
        gate = logits[:, self.experts] if self.gated else None
        shared: torch.Tensor | Callable[[], torch.Tensor] | None = None
        if self.shared is not None:
            beside = x.is_cuda and len(x) <= BESIDE
            shared = self._beside(x) if beside else self.shared.forward(x)
        chosen = logits[:, : self.experts] if routed is None else routed
        weights, ids = self.route(chosen, self.top_k, self.scoring, self.normalize, live=live)
        return self.moe(x, ids, weights, addresses, self.layout, touched, shared, gate)

    def _beside(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start the shared expert on a stream of its own; the result, where it is needed."""
        assert self.shared is not None
        here, side = torch.cuda.current_stream(x.device), side_stream(x.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            shared = self.shared.forward(x)

        def joined() -> torch.Tensor:
            here.wait_stream(side)
            return shared

        return joined


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which work may run beside the current one; one for all layers."""
    return torch.cuda.Stream(device)
