"""Every MoE kernel that ships compiles for every chip: no spills, shared memory within its limit."""

import pytest
from kernels.compile_only import SHARED_LIMIT, compiled


def check(reports: dict[str, dict], chip: int) -> None:
    assert reports
    for name, r in reports.items():
        assert r["spills"] == 0, (name, r)
        assert r["shared"] <= SHARED_LIMIT[chip], (name, r)
        if chip == 90 and "fp32" not in name and ("gate_up" in name or "down" in name):
            rows = int(name.split()[-1].split("x")[0])
            assert r["wgmma"] == (rows >= 64), (name, r)


def test_decode_products_compile_for_hopper():
    reports = compiled("moe", 90, first=2)
    check(reports, 90)
    # Three stages of (16 + 64) x 128 bf16: the loads are pipelined, so the address's alignment is known.
    assert all(r["shared"] >= 3 * (16 + 64) * 128 * 2 for r in reports.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", sorted(SHARED_LIMIT))
def test_every_shipped_tile_compiles(chip):
    check(compiled("moe", chip), chip)
