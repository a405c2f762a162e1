"""Table edits and page moves against plain indexing."""

from __future__ import annotations

import pytest
import torch
from kernels.kv_cases import DEVICE

from rimuru.kernels import reference
from rimuru.kernels.triton import tables


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 700])
def test_edits_reach_their_cells_and_no_other(dtype, count):
    torch.manual_seed(0)
    table = torch.randint(1 << 30, (40, 50), dtype=dtype, device=DEVICE)
    want = table.clone()
    index = torch.randperm(2000)[:count].to(DEVICE)
    # Addresses use all 63 bits where the table holds them.
    value = torch.randint(
        (1 << 62) if dtype == torch.int64 else (1 << 30), (count,), dtype=dtype, device=DEVICE
    )
    tables.apply_edits(table, index, value)
    reference.apply_edits(want, index, value)
    assert torch.equal(table, want)


def test_edits_refuse_a_strided_table():
    with pytest.raises(ValueError, match="contiguous"):
        tables.apply_edits(torch.zeros(4, 4).T, torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("nbytes", [4096, 70_000, 65_536])
def test_moved_pages_arrive_whole_and_touch_nothing_else(nbytes):
    torch.manual_seed(1)
    grain, stride, pages = 4096, -(-nbytes // 4096), 6
    pool = torch.randint(256, (pages * stride * grain,), dtype=torch.uint8, device=DEVICE)
    order = (torch.randperm(pages) * stride).int().to(DEVICE)
    want = pool.clone()
    tables.move_pages(pool, order[:3], order[3:], grain, nbytes)
    reference.move_pages(want, order[:3], order[3:], grain, nbytes)
    assert torch.equal(pool, want)


def test_pages_that_are_not_aligned_are_refused():
    pool, one = torch.zeros(4096, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        tables.move_pages(pool, one, one, 2048, 1001)
