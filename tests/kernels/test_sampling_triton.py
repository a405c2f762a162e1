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


def batch_on_device(rows: int, **fields) -> twin.SamplingBatch:
    batch = make_batch(rows, **fields)
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "steps"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    return batch


def draw_both(logits: torch.Tensor, **fields) -> tuple[list[int], list[int]]:
    batch, logits = batch_on_device(logits.shape[0], **fields), logits.to(DEVICE)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_and_drawn_rows_share_the_launches(dtype):
    torch.manual_seed(1)
    got, want = draw_both(
        (torch.randn(6, 200) * 2).to(dtype), seeds=torch.arange(6), steps=torch.full((6,), 3),
        temperature=torch.tensor([0.0, 0.8, 0.0, 1.2, 0.0, 2.0]),
        top_k=torch.tensor([5, 5, 0, 0, 0, 9]).int(), top_p=torch.tensor([1.0, 0.9, 0.5, 1.0, 1.0, 0.7]),
    )  # fmt: skip
    assert got == want


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(2, 200, dtype=torch.bfloat16)
    logits[0, [70, 130, 199]] = 1.0  # in three splits
    got, want = draw_both(logits, temperature=0.0)
    assert got == want == [70, 0]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("choose", [kernels.choose, twin.choose])
def test_tokens_go_to_the_outbox_and_to_their_slots(choose, kind):
    torch.manual_seed(2)
    logits = torch.randn(4, 200).to(DEVICE)
    batch = batch_on_device(4, temperature=torch.tensor([0.0, 1.0, 0.0, 1.0]), top_p=0.9)
    want = twin.choose_by_sort(logits, batch)
    latest = torch.full((9,), -7, dtype=kind, device=DEVICE)
    out = torch.full((4,), -7, dtype=kind, device=DEVICE)
    slots = torch.tensor([8, 3, -1, 0], dtype=torch.int32, device=DEVICE)
    assert choose(logits, batch, out=out, latest=latest, slots=slots) is out
    assert torch.equal(out, want.to(kind))
    assert latest.tolist() == [want[3], -7, -7, want[1], -7, -7, -7, -7, want[0]]


def test_padding_rows_of_nan_yield_a_token_of_the_vocabulary_and_reach_no_slot():
    torch.manual_seed(3)
    logits = torch.randn(4, 200)
    logits[1], logits[2] = float("nan"), float("inf")
    batch = batch_on_device(4, temperature=torch.tensor([0.7, 0.0, 0.0, 0.7]), top_k=4)
    latest = torch.full((2,), -7, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([1, -1, -1, 0], dtype=torch.int32, device=DEVICE)
    tokens = kernels.choose(logits.to(DEVICE), batch, latest=latest, slots=slots)
    want = twin.choose_by_sort(logits.to(DEVICE), batch)
    assert all(0 <= t < 200 for t in tokens.tolist())
    assert latest.tolist() == [want[3], want[0]] == tokens[[3, 0]].tolist()


def test_a_row_of_nan_yields_a_token_of_the_vocabulary():
    batch = batch_on_device(1, top_p=0.9)
    assert 0 <= kernels.choose(torch.full((1, 100), float("nan"), device=DEVICE), batch).item() < 100
