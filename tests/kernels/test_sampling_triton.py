"""The sampling kernels draw the token that the torch twin draws."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from kernels.kv_cases import DEVICE
from kernels.test_sampling import make_batch

from rimuru.kernels import sampling as twin

kernels = import_module("rimuru.kernels.triton.sampling")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several splits and blocks a row without a vocabulary of real size."""
    monkeypatch.setattr(kernels, "SPLIT", 64)
    monkeypatch.setattr(kernels, "BLOCK", 128)


def draw_both(logits: torch.Tensor, **fields) -> tuple[list[int], list[int]]:
    batch = make_batch(logits.shape[0], **fields)
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "steps"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    logits = logits.to(DEVICE)
    return kernels.choose(logits, batch).tolist(), twin.choose_by_sort(logits, batch).tolist()


CASES = {
    "temperature alone": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.05},
    "top-k and top-p": {"temperature": 1.3, "top_k": 20, "top_p": 0.7},
    "min-p and top-p": {"min_p": 0.02, "top_p": 0.8},
    "everything": {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.01},
    "one token": {"top_p": 0.0, "temperature": 3.0},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_draw_what_the_twin_draws(case, dtype):
    torch.manual_seed(0)
    # Few distinct values in bf16: ties at every threshold.
    logits = (torch.randn(3, 200) * 2).to(dtype)
    got, want = draw_both(logits, seeds=torch.arange(3) * 10**12, steps=torch.arange(3), **CASES[case])
    assert got == want


def test_a_row_without_any_allowed_token_yields_token_zero():
    got, want = draw_both(torch.full((2, 100), float("-inf")), top_p=torch.tensor([0.5, 1.0]))
    assert got == want == [0, 0]


def test_masked_tokens_are_never_drawn():
    logits = torch.full((4, 200), float("-inf"))
    logits[:, [3, 150]] = torch.tensor([0.0, -1.0])
    got, want = draw_both(logits, seeds=torch.arange(4), temperature=2.0, top_k=50, top_p=0.99)
    assert got == want
    assert set(got) <= {3, 150}


def test_a_row_of_nan_yields_a_token_of_the_vocabulary():
    batch = make_batch(1, top_p=0.9)
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "steps"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    assert 0 <= kernels.choose(torch.full((1, 100), float("nan"), device=DEVICE), batch).item() < 100
