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
            assert r["tma"] == ("specialised" in name), (name, r)


@pytest.mark.timeout(300)  # seconds of work, but the assembler for sm_120 is slow on a busy machine
@pytest.mark.parametrize("chip", sorted(SHARED_LIMIT))
def test_every_bfloat16_tile_compiles(chip):
    reports = compiled("moe_usual", chip)
    check(reports, chip)
    # Three stages of (16 + 64) x 128 bf16: the loads are pipelined, so the address's alignment is known.
    decode = [r for name, r in reports.items() if "16x64x128" in name]
    assert decode
    assert all(r["shared"] >= 3 * (16 + 64) * 128 * 2 for r in decode)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chip", sorted(SHARED_LIMIT))
def test_every_tile_and_small_kernel_compiles(chip):
    check(compiled("moe", chip), chip)
