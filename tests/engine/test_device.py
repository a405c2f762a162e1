"""What the machine is asked before anything is allocated."""

import pytest
from support.cores import cap_for, make_bench

from rimuru.engine.device import host_available
from rimuru.errors import MemoryPlanError


def machine(root, limit: str, current: int, cached: int):
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 16000 kB\nMemAvailable: 8000 kB\n")
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    return root


def test_files_that_a_container_has_cached_are_no_memory_that_lacks(tmp_path):
    root = machine(tmp_path, str(6_000_000), 5_500_000, 4_500_000)
    assert host_available(root) == 5_000_000


def test_a_container_without_a_limit_has_what_the_machine_has(tmp_path):
    assert host_available(machine(tmp_path, "max", 5_500_000, 0)) == 8000 * 1024


def test_host_copies_beyond_the_machine_are_refused_before_any_is_made(monkeypatch):
    cap = cap_for("mixtral", 0.5, 512)
    monkeypatch.setattr("rimuru.engine.core.host_available", lambda: 1_000_000)
    with pytest.raises(MemoryPlanError, match=r"lower --host-memory to 900000"):
        make_bench("mixtral", device_memory=cap, host_memory=10**12, memory_policy="reactive")
