"""Every attention kernel that ships fits its chip: no spills, shared memory, wgmma on Hopper."""

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
    assert {n: r["spills"] for n, r in reports.items() if r["spills"]} == {}
    assert {n: r["shared"] for n, r in reports.items() if r["shared"] > SHARED_LIMIT[chip]} == {}
    if chip == 90:
        assert {
            n for n, r in reports.items() if n.startswith("prompt") and "fp32" not in n and not r["wgmma"]
        } == set()
