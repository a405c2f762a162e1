"""MoE layers to measure: the shapes of real models, random experts in a pool, random routings."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from rimuru.kernels.types import ExpertLayout


@dataclass(frozen=True)
class Shape:
    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def layout(self, dtype: torch.dtype = torch.bfloat16) -> ExpertLayout:
        return ExpertLayout(self.hidden, self.intermediate, dtype)

    def flops(self, tokens: int) -> float:
        return 2.0 * 3 * tokens * self.top_k * self.hidden * self.intermediate


QWEN15 = Shape("Qwen1.5-MoE", 60, 4, 2048, 1408)
QWEN3 = Shape("Qwen3-30B-A3B", 128, 8, 2048, 768)


@dataclass(frozen=True)
class Routing:
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Layer:
    """One MoE layer twice in one pool: as a contiguous stack, and scattered over shuffled pages."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        self.shape, self.dtype = shape, dtype
        self.layout = shape.layout(dtype)
        page, count = self.layout.page_bytes, shape.experts
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.pool = torch.empty((3 * count, page), dtype=torch.uint8, device="cuda")
        scale = shape.hidden**-0.5
        for e in range(count):
            part = self.pool[e].view(dtype)
            part.copy_(torch.randn(part.numel(), generator=self.generator, device="cuda") * scale)
        slots = count + torch.randperm(2 * count, generator=torch.Generator().manual_seed(seed))[:count]
        self.pool[slots.cuda()] = self.pool[:count].clone()
        base = self.pool.data_ptr()
        self.contiguous = (base + torch.arange(count) * page).cuda()
        self.scattered = (base + slots * page).cuda()

    def part(self, down: bool) -> torch.Tensor:
        """The stack of one product as `[E, N, K]`, strided by the page."""
        s, lay = self.shape, self.layout
        n, k = (s.hidden, s.intermediate) if down else (2 * s.intermediate, s.hidden)
        flat = self.pool.view(-1).view(self.dtype)
        size = self.dtype.itemsize
        offset = lay.down_offset // size if down else 0
        return flat.as_strided((s.experts, n, k), (lay.page_bytes // size, k, 1), offset)

    def routing(self, tokens: int) -> Routing:
        s, g = self.shape, self.generator
        x = torch.randn((tokens, s.hidden), generator=g, device="cuda").to(self.dtype)
        score = torch.rand((tokens, s.experts), generator=g, device="cuda")
        weights, ids = score.softmax(-1).topk(s.top_k)
        return Routing(x, ids.int(), (weights / weights.sum(-1, keepdim=True)).float())

    def expert_bytes(self, routing: Routing) -> int:
        return int(routing.ids.unique().numel()) * self.layout.page_bytes

    def twin(self, r: Routing) -> torch.Tensor:
        """`rimuru.kernels.reference.moe` on this layer's stack: that twin reads host addresses only."""
        out = torch.zeros(r.x.shape, dtype=torch.float32, device="cuda")
        gate_up, down = self.part(False), self.part(True)
        for e in r.ids.unique().tolist():
            if e < 0:
                continue
            row, choice = (r.ids == e).nonzero(as_tuple=True)
            gate, up = F.linear(r.x[row], gate_up[e]).chunk(2, dim=-1)
            act = (F.silu(gate.float()) * up.float()).to(self.dtype)
            out.index_add_(0, row, F.linear(act, down[e]).float() * r.weights[row, choice, None])
        return out.to(self.dtype)

    def grouped(self, r: Routing) -> SimpleNamespace:
        """Inputs of torch's grouped_mm, sorted beforehand: what it is spared, we pay inside `moe`."""
        flat = r.ids.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=self.shape.experts).cumsum(0).int()
        return SimpleNamespace(x=r.x[order // self.shape.top_k].contiguous(), ends=ends)


def grouped_mm(layer: Layer, g: SimpleNamespace) -> torch.Tensor:
    """The two products and the activation by `torch._grouped_mm`, without routing and weighted sum."""
    gate, up = torch._grouped_mm(g.x, layer.part(False).transpose(1, 2), offs=g.ends).chunk(2, dim=-1)
    return torch._grouped_mm(F.silu(gate) * up, layer.part(True).transpose(1, 2), offs=g.ends)
