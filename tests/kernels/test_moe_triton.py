"""The Triton MoE against its torch twin, and against itself for every residency."""

import sys

import pytest
import torch

from rimuru.kernels import reference
from rimuru.kernels import triton as kernels
from rimuru.kernels.triton.moe_tiles import choose
from rimuru.kernels.types import EXPERT_HOST, ExpertLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="the twin reads host addresses; see gpu_check")

# ||out - twin|| / ||twin||: both round the activation and each expert's output to the dtype, so a
# fraction of the elements differs by one unit in the last place (2^-8, 2^-11, 2^-24 relative).
LIMIT = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}


class Experts:
    """Random experts on shuffled, NaN-separated pages of one buffer."""

    def __init__(self, count: int, hidden: int, inter: int, dtype: torch.dtype, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.layout = ExpertLayout(hidden, inter, dtype)
        stride = self.layout.page_bytes + 256
        self.buffer = torch.full((count * stride // 4 + 64,), float("nan"))
        base = self.buffer.data_ptr() + -self.buffer.data_ptr() % 256
        self.table = base + torch.randperm(count, generator=g) * stride
        for address in self.table.tolist():
            gate_up = reference.tensor_at(address, (2 * inter, hidden), dtype)
            gate_up.copy_(torch.randn(gate_up.shape, generator=g) * hidden**-0.5)
            down = reference.tensor_at(address + self.layout.down_offset, (hidden, inter), dtype)
            down.copy_(torch.randn(down.shape, generator=g) * inter**-0.5)

    def step(self, tokens: int, top_k: int, seed: int = 1):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, self.layout.hidden, generator=g).to(self.layout.dtype)
        weights, ids = torch.rand(tokens, self.table.numel(), generator=g).topk(top_k)
        return x, ids.int(), weights


def error(out: torch.Tensor, twin: torch.Tensor) -> float:
    return ((out.double() - twin.double()).norm() / twin.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_matches_the_twin(dtype, tokens):
    experts = Experts(6, 128, 96, dtype)
    x, ids, weights = experts.step(tokens, 2)
    out = kernels.moe(x, ids, weights, experts.table, experts.layout)
    assert error(out, reference.moe(x, ids, weights, experts.table, experts.layout)) < LIMIT[dtype]


def test_sizes_that_divide_no_tile():
    experts = Experts(3, 80, 56, torch.bfloat16)
    x, ids, weights = experts.step(19, 2)
    out = kernels.moe(x, ids, weights, experts.table, experts.layout)
    assert error(out, reference.moe(x, ids, weights, experts.table, experts.layout)) < LIMIT[torch.bfloat16]


@pytest.mark.parametrize("tokens", [3, 40])
def test_residency_changes_no_bit(tokens):
    experts = Experts(5, 64, 64, torch.bfloat16)
    x, ids, weights = experts.step(tokens, 3)
    want = kernels.moe(x, ids, weights, experts.table, experts.layout)
    for hosts in (slice(0, 1), slice(1, 4), slice(0, 5)):
        table = experts.table.clone()
        table[hosts] |= EXPERT_HOST
        assert torch.equal(kernels.moe(x, ids, weights, table, experts.layout), want)


@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_that_arrive_in_passes_change_no_bit_and_are_counted_once(tokens):
    experts = Experts(5, 64, 64, torch.bfloat16)
    x, ids, weights = experts.step(tokens, 3)
    want = kernels.moe(x, ids, weights, experts.table, experts.layout)
    touched = torch.zeros(5, dtype=torch.int32)
    asked = []

    def rows():
        for some in ([1, 4], [0], [], [2, 3]):
            row = torch.zeros_like(experts.table)
            row[some] = experts.table[some] | (EXPERT_HOST if 0 in some else 0)
            asked.append(some)
            yield row
        asked.append("done")

    assert torch.equal(kernels.moe(x, ids, weights, rows(), experts.layout, touched), want)
    assert asked[-1] == "done"
    assert torch.equal(touched, torch.bincount(ids.flatten(), minlength=5).int())


def test_more_host_tiles_than_lanes(monkeypatch):
    monkeypatch.setattr(sys.modules["rimuru.kernels.triton.moe"], "HOST_LANES", 2)
    experts = Experts(5, 64, 64, torch.bfloat16)
    x, ids, weights = experts.step(4, 3)
    want = kernels.moe(x, ids, weights, experts.table, experts.layout)
    assert torch.equal(kernels.moe(x, ids, weights, experts.table | EXPERT_HOST, experts.layout), want)


def test_gather_changes_no_bit():
    experts = Experts(5, 64, 64, torch.float32)
    x, ids, weights = experts.step(4, 2)
    room = torch.zeros(5 * experts.layout.page_bytes + 512, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    scratch = room[start : start + 5 * experts.layout.page_bytes]
    out = kernels.moe_gather(x, ids, weights, experts.table, experts.layout, scratch)
    assert torch.equal(out, kernels.moe(x, ids, weights, experts.table, experts.layout))
    with pytest.raises(ValueError, match="bytes of scratch"):
        kernels.moe_gather(x, ids, weights, experts.table, experts.layout, scratch[:-1])
    with pytest.raises(ValueError, match="multiple of 256 bytes"):
        kernels.moe_gather(x, ids, weights, experts.table, experts.layout, room[start + 16 :])


def test_skipped_choices_and_touch_counts():
    experts = Experts(4, 64, 64, torch.float32)
    x, ids, weights = experts.step(6, 2)
    ids[0, 0] = ids[3] = -1
    touched, twin = torch.full((4,), 7, dtype=torch.int32), torch.full((4,), 7, dtype=torch.int32)
    out = kernels.moe(x, ids, weights, experts.table, experts.layout, touched)
    want = reference.moe(x, ids, weights, experts.table, experts.layout, twin)
    assert error(out, want) < LIMIT[torch.float32]
    assert (out[3] == 0).all()
    assert torch.equal(touched, twin)


def test_a_step_where_nobody_chooses_an_expert_is_zero():
    experts = Experts(4, 64, 64, torch.float32)
    x, ids, weights = experts.step(3, 2)
    assert (kernels.moe(x, ids.fill_(-1), weights, experts.table, experts.layout) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shared_expert_is_added_before_the_one_rounding(dtype):
    experts = Experts(4, 64, 64, dtype)
    x, ids, weights = experts.step(6, 2)
    ids[2] = -1
    g = torch.Generator().manual_seed(2)
    shared, logits = torch.randn(6, 64, generator=g).to(dtype), torch.randn(6, 5, generator=g).to(dtype)
    step = (x, ids, weights, experts.table, experts.layout, None, shared)
    plain = kernels.moe(*step)
    assert error(plain, reference.moe(*step)) < LIMIT[dtype]
    assert torch.equal(plain[2], shared[2])
    for gate in (logits[:, 4], logits[:, 4:], logits[:, 1].contiguous()):
        gated = kernels.moe(*step, gate)
        assert error(gated, reference.moe(*step, gate)) < LIMIT[dtype]
        assert torch.equal(gated[2], (gate[2].float().sigmoid() * shared[2].float()).to(dtype))


@pytest.mark.slow
def test_prefill_tiles_match_the_twin():
    for tokens in (300, 900):  # one launch of alignment and three; 64-row and 128-row blocks
        experts = Experts(4, 64, 32, torch.bfloat16)
        x, ids, weights = experts.step(tokens, 2)
        out = kernels.moe(x, ids, weights, experts.table, experts.layout)
        twin = reference.moe(x, ids, weights, experts.table, experts.layout)
        assert error(out, twin) < LIMIT[torch.bfloat16]


def test_wrong_inputs_are_named():
    experts = Experts(2, 64, 64, torch.float32)
    x, ids, weights = experts.step(2, 1)
    with pytest.raises(ValueError, match=r"contiguous x \[2, 64\] torch.float32, not"):
        kernels.moe(x.bfloat16(), ids, weights, experts.table, experts.layout)
    with pytest.raises(ValueError, match=r"no MoE kernel for torch.float64; bfloat16, float16, float32 work"):
        choose(1, 1, 4, torch.float64, DEVICE)


def test_up_to_64_tokens_an_expert_fits_one_block():
    for dtype in LIMIT:
        for tokens in range(1, 65):
            for top_k, count in ((1, 4), (4, 60), (8, 128), (8, 512)):
                if tokens * top_k / count <= 24 or dtype is torch.float32:
                    assert choose(tokens, top_k, count, dtype, DEVICE)[0].m >= min(tokens, 64)
