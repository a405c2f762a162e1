"""Attention and the rest of a step fit their chip: no spills, shared memory, wgmma on Hopper."""

from __future__ import annotations

import pytest
from kernels.compile_only import SHARED_LIMIT, compiled


@pytest.mark.parametrize(
    ("subject", "chip"),
    [
        ("attention", 90),
        pytest.param("attention", 80, marks=pytest.mark.slow),
        pytest.param("attention", 89, marks=pytest.mark.slow),
        pytest.param("attention", 120, marks=pytest.mark.slow),
        pytest.param("attention_fp32", 90, marks=pytest.mark.slow),
        pytest.param("attention_fp32", 89, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
def test_attention_kernels_fit_their_chip(subject, chip):
    reports = compiled(subject, chip)
    # Float32 serves checks of correctness; its prompt kernel may spill a few words.
    limit = 64 if subject == "attention_fp32" else 0
    assert {n: r["spills"] for n, r in reports.items() if r["spills"] > limit} == {}
    assert {n: r["shared"] for n, r in reports.items() if r["shared"] > SHARED_LIMIT[chip]} == {}
    if chip == 90:
        assert {
            n for n, r in reports.items() if n.startswith("prompt") and "fp32" not in n and not r["wgmma"]
        } == set()


@pytest.mark.parametrize("chip", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.timeout(300)
def test_the_rest_of_a_step_fits_its_chip(chip):
    reports = compiled("step_parts", chip)
    # The search for the k-th score holds five values a lane beside the logits; a dozen words of them spill.
    limits = {name: 64 if name.startswith("filter") else 0 for name in reports}
    assert {n: r["spills"] for n, r in reports.items() if r["spills"] > limits[n]} == {}
    assert {n: r["shared"] for n, r in reports.items() if r["shared"] > SHARED_LIMIT[chip]} == {}
