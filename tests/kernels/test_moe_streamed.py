"""The Triton MoE over experts that a stream brings in passes, against the same experts at rest."""

import pytest
import torch
from support.streaming import EXPERTS, LAYERS, LAYOUT, MANY, TOP_K, House

from rimuru.kernels import triton

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="reads host pools; see gpu_check")


def test_a_model_computes_the_same_bits_streamed_in_place_and_resident():
    tokens, layers = 8, 1
    house = House(resident=9, free=2)
    every = House(resident=LAYERS * EXPERTS, free=0)
    generator = torch.Generator().manual_seed(2)
    routers = torch.randn(layers, EXPERTS, LAYOUT.hidden, generator=generator)

    def forward(addresses):
        x = torch.randn(tokens, LAYOUT.hidden, generator=torch.Generator().manual_seed(3))
        touched = torch.zeros(layers, EXPERTS, dtype=torch.int32)
        for layer in range(layers):
            weights, ids = triton.route(x @ routers[layer].T, TOP_K, "softmax", True)
            x = x + triton.moe(x, ids, weights, addresses[layer], LAYOUT, touched[layer])
        return x, touched

    resident, counts = forward(every.table.device_table)
    in_place, _ = forward(house.table.device_table)
    with house.stream.step(MANY) as passes:
        streamed, streamed_counts = forward(passes)
    assert house.stream.streamed_experts > 0
    assert torch.equal(resident, in_place)
    assert torch.equal(resident, streamed)
    assert torch.equal(counts, streamed_counts)
