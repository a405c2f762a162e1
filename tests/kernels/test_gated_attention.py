"""The attention layer of hybrid models on the Triton back end against the torch twin."""

from __future__ import annotations

import importlib

import torch
from kernels.kv_cases import DEVICE, make_layout, make_step

from rimuru.kernels import reference
from rimuru.layers.attention import GatedAttention
from rimuru.layers.linear import DenseWeights


def test_gated_attention_is_the_twin_s():
    heads, q_heads, dim, hidden = 2, 4, 64, 96
    rope = reference.rope_table(64, 16, 10_000.0, DEVICE)
    results = []
    for ops in (reference, importlib.import_module("rimuru.kernels.triton")):
        weights = DenseWeights(DEVICE, torch.float32)
        shape = ("attention", hidden, q_heads, heads, dim, rope)
        layer = GatedAttention(weights, ops, *shape, qk_norm="head", eps=1e-5)
        torch.manual_seed(0)
        for parameter in weights.views.values():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
        kv, meta = make_step(make_layout(torch.float32, heads, dim), [5, 18], [5, 1], seed=2)
        kv.pool[kv.pool.isnan()] = 0.0  # the step's own tokens are written by the layer
        x = torch.randn(6, hidden, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        results.append(layer.forward(x, meta, kv))
    torch.testing.assert_close(*results, atol=2e-5, rtol=2e-5)
