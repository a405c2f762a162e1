"""Dense parameters, fused as the kernels want them, and reachable under their names on disk.

Room: layers. Rule: memory is allocated once, here, and filled in place by the loader; a layer keeps
plain tensors, never a module tree.
"""

from __future__ import annotations

from types import ModuleType

import torch


class DenseWeights:
    """The dense parameters of a model under construction.

    `views` maps each canonical checkpoint name (`layers.0.self_attn.q_proj.weight`) to the tensor
    its values belong in: a whole parameter, or the rows of a fused one.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype
        self.views: dict[str, torch.Tensor] = {}
        self.nbytes = 0

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A new parameter of `shape` under `name`."""
        return self.fuse({name: shape[0]}, *shape[1:])

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter under `name` in memory of the caller's, which is not counted."""
        self.views[name] = tensor
        return tensor

    def fuse(self, rows: dict[str, int], *rest: int) -> torch.Tensor:
        """One tensor `[sum of rows, *rest]` whose row ranges carry the given names, in order."""
        whole = torch.empty((sum(rows.values()), *rest), device=self.device, dtype=self.dtype)
        self.nbytes += whole.numel() * self.dtype.itemsize
        for name, part in zip(rows, whole.split(list(rows.values())), strict=True):
            self.views[name] = part
        return whole


class GatedMlp:
    """SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`, gate and up in one product."""

    __slots__ = ("act", "down", "gate_up", "linear")

    def __init__(self, weights: DenseWeights, ops: ModuleType, name: str, hidden: int, intermediate: int):
        parts = {f"{name}.gate_proj.weight": intermediate, f"{name}.up_proj.weight": intermediate}
        self.gate_up = weights.fuse(parts, hidden)
        self.down = weights.take(f"{name}.down_proj.weight", hidden, intermediate)
        self.linear = ops.linear
        self.act = ops.silu_and_mul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` -> `[T, hidden]`."""
        return self.linear(self.act(self.linear(x, self.gate_up)), self.down)
