"""A layer's MoE half in few launches, against the composition of the twins."""

import sys

import pytest
import torch
from kernels.test_moe_triton import Experts, error

from rimuru.kernels import reference
from rimuru.kernels import triton as kernels
from rimuru.kernels.types import EXPERT_HOST, MoeBlock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the twin reads host addresses; see gpu_check")

# As for the experts alone, with one more rounding: the norm's.
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}


class Case:
    """A block of `experts` experts of `inter` columns, and a shared one of `slices` times as many."""

    def __init__(self, dtype=torch.bfloat16, experts=6, hidden=72, inter=40, slices=2, gated=True, **options):
        self.pool = Experts(experts, hidden, inter, dtype)
        self.generator = torch.Generator().manual_seed(7)
        options = {"top_k": 3} | options
        self.block = MoeBlock(
            norm=self.draw(hidden), eps=1e-5, router=self.draw(experts + gated, hidden), experts=experts,
            layout=self.pool.layout, **options,
            shared_gate_up=self.draw(2 * slices * inter, hidden) if slices else None,
            shared_down=self.draw(hidden, slices * inter) if slices else None,
        )  # fmt: skip
        self.next_norm = self.draw(hidden)

    def draw(self, *shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=self.generator)
        return (x * shape[-1] ** -0.5 if len(shape) > 1 else 1 + x / 4).to(self.pool.layout.dtype)

    def step(self, tokens: int) -> tuple:
        hidden = self.pool.layout.hidden
        x, residual = (self.draw(tokens, hidden) * hidden**0.5 for _ in range(2))
        return x, residual, self.block, self.pool.table, self.next_norm


def agree(case: Case, tokens: int, **options) -> None:
    step = case.step(tokens)
    touched, twin = torch.zeros(2, case.block.experts, dtype=torch.int32).unbind(0)
    got = kernels.moe_block(*step, touched, **options)
    want = reference.moe_block(*step, twin, **options)
    assert torch.equal(touched, twin)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < LIMIT[a.dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_matches_the_twin(dtype, tokens):
    agree(Case(dtype), tokens)


@pytest.mark.parametrize("slices", [0, 2])
@pytest.mark.parametrize("tokens", [6, 20])
def test_more_tokens_take_tiles(tokens, slices):
    agree(Case(hidden=64, inter=32, slices=slices, gated=slices > 0), tokens)


def test_many_tokens_and_float32_take_the_plain_launches(monkeypatch):
    monkeypatch.setattr(sys.modules["rimuru.kernels.triton.moe_block"], "TOKENS", 4)
    agree(Case(hidden=40, inter=16, slices=1), 5)
    agree(Case(torch.float32, hidden=40, inter=16), 2)


@pytest.mark.parametrize(
    "options",
    [
        {"slices": 0, "gated": False},
        {"slices": 1, "gated": False},
        {"zero_centred": True},
        {"normalize": False},
        {"scoring": "sigmoid", "bias": torch.linspace(-1, 1, 6)},
        {"top_k": 1, "experts": 3},
    ],
)
def test_every_kind_of_block(options):
    for tokens in (1, 3):
        agree(Case(**options), tokens)


def test_padding_goes_to_no_expert():
    live = torch.tensor([4, -1, 0], dtype=torch.int32)
    agree(Case(), 3, live=live)
    agree(Case(), 1, live=live[1:2])


def test_given_logits_take_the_routers_place():
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    agree(Case(), 3, logits=logits)
    agree(Case(), 1, logits=logits[1:2])


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_router_of_nan_still_chooses_distinct_experts():
    case = Case()
    x, residual, *rest = case.step(2)
    touched = torch.zeros(6, dtype=torch.int32)
    kernels.moe_block(x.fill_(float("nan")), residual, *rest, touched)
    assert touched.tolist() == [2, 2, 2, 0, 0, 0]


def test_residency_changes_no_bit(monkeypatch):
    monkeypatch.setattr(sys.modules["rimuru.kernels.triton.moe"], "HOST_LANES", 3)
    case = Case(hidden=32, inter=16, slices=1)
    for tokens in (1, 5):
        x, residual, block, table, norm = case.step(tokens)
        want = kernels.moe_block(x, residual, block, table, norm)
        for hosts in (slice(1, 4), slice(0, 6)):
            tagged = table.clone()
            tagged[hosts] |= EXPERT_HOST
            got = kernels.moe_block(x, residual, block, tagged, norm)
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
