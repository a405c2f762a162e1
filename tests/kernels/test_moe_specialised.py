"""The products of a long prefill on Hopper: tiles, masks and barriers on the CPU, against plain products."""

import pytest
import torch
import torch.nn.functional as F
from kernels.gluon_on_cpu import launch

from rimuru.kernels import reference
from rimuru.kernels.triton import moe_specialised
from rimuru.kernels.triton.align import align
from rimuru.kernels.types import EXPERT_HOST, ExpertLayout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs the real kernel; see gpu_check")
TOP_K, PROGRAMS = 2, 2


class Layer:
    """Four experts, the second with no row, and a step in which some choices are skipped."""

    def __init__(self, hidden: int, inter: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
        g = torch.Generator().manual_seed(0)
        self.layout = ExpertLayout(hidden, inter, dtype)
        page = self.layout.page_bytes
        self.buffer = torch.randn(4 * page // 2 + 128, generator=g).mul_(hidden**-0.5).to(dtype)
        base = self.buffer.data_ptr() + -self.buffer.data_ptr() % 256
        self.table = base + torch.randperm(4, generator=g) * page
        self.x = torch.randn(tokens, hidden, generator=g).to(dtype)
        self.ids = torch.tensor([0, 2, 3])[torch.rand(tokens, 3, generator=g).topk(TOP_K).indices].int()
        self.ids[torch.rand(self.ids.shape, generator=g) < 0.05] = -1

    def part(self, expert: int, down: bool) -> torch.Tensor:
        lay, at = self.layout, int(self.table[expert])
        if down:
            return reference.tensor_at(at + lay.down_offset, (lay.hidden, lay.intermediate), lay.dtype)
        return reference.tensor_at(at, (2 * lay.intermediate, lay.hidden), lay.dtype)

    def products(self, table: torch.Tensor):
        """(activation by sorted row, output by pair), NaN where nothing was written."""
        lay, pairs = self.layout, self.ids.numel()
        plan = align(self.ids, table, moe_specialised.BLOCK_M)
        outs = []
        for up in (True, False):
            n, k = (2 * lay.intermediate, lay.hidden) if up else (lay.hidden, lay.intermediate)
            a = self.x if up else outs[0].nan_to_num()
            out = torch.full((pairs, lay.intermediate if up else n), float("nan"), dtype=lay.dtype)
            launch(
                PROGRAMS, a, out, plan.work, plan.room,
                PART=0 if up else lay.down_offset, N=n, K=k, TOP_K=TOP_K, GATE_UP=up, LANES=1,
            )  # fmt: skip
            outs.append(out)
        return outs

    def wanted(self):
        flat = self.ids.flatten().long()
        order = torch.sort(flat, stable=True).indices
        order = order[flat[order] >= 0]
        act = torch.full((len(flat), self.layout.intermediate), float("nan"), dtype=self.layout.dtype)
        out = torch.full((len(flat), self.layout.hidden), float("nan"), dtype=self.layout.dtype)
        for row, pair in enumerate(order.tolist()):
            expert = int(flat[pair])
            gate, up = F.linear(self.x[pair // TOP_K].float(), self.part(expert, False).float()).chunk(2)
            rounded = [v.to(self.layout.dtype).float() for v in (gate, up)]
            act[row] = F.silu(rounded[0]) * rounded[1]
            out[pair] = F.linear(act[row].float(), self.part(expert, True).float())
        return act, out


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.nan_to_num().double(), want.nan_to_num().double()
    return ((got - want).norm() / want.norm()).item()


# Blocks of 128 rows, of about 100 and of a few; columns that are and are not whole tiles.
@pytest.mark.parametrize(("hidden", "inter", "tokens"), [(192, 192, 210), (128, 64, 150), (64, 64, 3)])
def test_products_match_plain_ones_wherever_experts_live(hidden, inter, tokens):
    layer = Layer(hidden, inter, tokens)
    wanted = layer.wanted()
    for hosts in ([], [0, 2, 3]):
        table = layer.table.clone()
        table[hosts] |= EXPERT_HOST
        for got, want in zip(layer.products(table), wanted, strict=True):
            assert error(got, want) < 2e-3  # bf16: sums in another order, then one rounding of 2^-9


def test_experts_that_are_not_here_are_left_out():
    layer = Layer(64, 64, 20)
    layer.table[2] = 0
    got = layer.products(layer.table)[1]
    assert torch.equal(got.isnan().all(1), (layer.ids.flatten() < 0) | (layer.ids.flatten() == 2))


def test_only_hopper_takes_them_and_only_with_rows_enough_in_whole_steps(monkeypatch):
    cpu, layout = torch.device("cpu"), ExpertLayout(2048, 768, torch.bfloat16)
    assert not moe_specialised.suits(layout, 8192, 8, 128, cpu)
    monkeypatch.setattr(moe_specialised, "_processors", lambda device: 132)
    assert moe_specialised.suits(layout, 960, 8, 128, cpu)  # 60 rows an expert
    assert not moe_specialised.suits(layout, 959, 8, 128, cpu)
    for other in (ExpertLayout(2048, 208, torch.bfloat16), ExpertLayout(2048, 768, torch.float32)):
        assert not moe_specialised.suits(other, 8192, 8, 128, cpu)
