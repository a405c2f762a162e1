"""Attention and the rest of a step fit their chip: no spills, shared memory, wgmma on Hopper."""

from __future__ import annotations

import pytest
from kernels.compile_only import SHARED_LIMIT, compiled


def check(reports: dict[str, dict], chip: int) -> None:
    assert reports
    assert {n: r["spills"] for n, r in reports.items() if r["spills"]} == {}
    assert {n: r["shared"] for n, r in reports.items() if r["shared"] > SHARED_LIMIT[chip]} == {}
    if chip == 90:
        products = {n for n in reports if n.startswith("prompt") and "fp32" not in n}
        assert {n for n in products if not reports[n]["wgmma"]} == set()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chip", sorted(SHARED_LIMIT))
def test_attention_draws_and_moves_fit_their_chip(chip):
    check(compiled("attention+sampling", chip), chip)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", sorted(SHARED_LIMIT))
def test_attention_of_other_shapes_fits_its_chip(chip):
    check(compiled("attention_more", chip), chip)


@pytest.mark.parametrize("chip", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.timeout(300)
def test_the_rest_of_a_step_fits_its_chip(chip):
    check(compiled("step_parts", chip), chip)
