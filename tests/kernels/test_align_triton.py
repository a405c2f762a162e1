"""Alignment by expert against a plain sort."""

import pytest
import torch

from rimuru.kernels.triton.align import HEADER, align, max_blocks
from rimuru.kernels.types import EXPERT_ADDRESS, EXPERT_HOST

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def expected(ids: torch.Tensor, table: torch.Tensor, block_m: int):
    """(pool blocks, host blocks, sorted pairs), from `torch.sort` and a loop."""
    flat = ids.flatten().long()
    order = torch.sort(flat, stable=True).indices
    order = order[flat[order] >= 0]
    pool, host, row = [], [], 0
    for e, address in enumerate(table.tolist()):
        count = int((flat == e).sum())
        for start in range(0, count, block_m):
            block = (address & EXPERT_ADDRESS, row + start, min(block_m, count - start))
            (host if address & EXPERT_HOST else pool).append(block)
        row += count
    return pool, host, order.tolist()


@pytest.mark.parametrize("tokens", [1, 7, 64, 400])
@pytest.mark.parametrize("block_m", [16, 64])
def test_plan_is_a_stable_sort_cut_into_blocks(tokens, block_m):
    experts, top_k = 12, 3
    g = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=g).topk(top_k).indices.int()
    ids[torch.rand(ids.shape, generator=g) < 0.1] = -1
    table = (torch.arange(experts) + 5) * 4096
    table[::3] |= EXPERT_HOST
    plan = align(ids.to(DEVICE), table.to(DEVICE), block_m)
    pool, host, order = expected(ids, table, block_m)

    work, head = plan.work.cpu(), HEADER.value
    lists = work[head : head + 8 * plan.room].view(2, plan.room, 4)
    address = lists[..., :2].contiguous().view(torch.int64).squeeze(-1)

    def blocks(which: int, count: int):
        return [(int(address[which, i]), *lists[which, i, 2:].tolist()) for i in range(count)]

    assert work[:3].tolist() == [len(host), 0, 0]
    assert blocks(0, len(pool)) == pool
    assert blocks(1, len(host)) == host
    assert (lists[0, len(pool) :, 3] == 0).all()
    assert work[head + 8 * plan.room :][: len(order)].tolist() == order


@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_room_holds_any_routing(block_m):
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        tokens, top_k, experts = (int(torch.randint(1, n, (), generator=g)) for n in (300, 5, 40))
        top_k = min(top_k, experts)
        # Skewed choices, from nearly uniform to nearly one set of experts for all.
        taste = torch.randn(experts, generator=g) * torch.rand((), generator=g) * 8
        ids = (taste + torch.randn(tokens, experts, generator=g)).topk(top_k).indices
        counts = torch.bincount(ids.flatten(), minlength=experts)
        assert int((-(-counts // block_m)).sum()) <= max_blocks(tokens, top_k, experts, block_m)
