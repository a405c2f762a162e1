"""What the machine is asked before anything is allocated."""

import pytest
from support.cores import cap_for, make_bench

from rimuru.engine.config import EngineConfig
from rimuru.engine.device import host_available
from rimuru.errors import ConfigError, MemoryPlanError


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


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("device_memory", 24e9, "--device-memory must be a whole number"),
        ("device_memory", -5, "--device-memory must be at least 1"),
        ("host_memory", -1, "--host-memory must be at least 1"),
        ("max_num_seqs", 2.5, "--max-num-seqs must be a whole number"),
        ("max_num_seqs", "8", "--max-num-seqs must be a whole number, got '8'"),
        ("max_num_seqs", True, "--max-num-seqs must be a whole number"),
        ("seed", "x", "--seed must be a whole number"),
        ("max_model_len", 1, "--max-model-len must be at least 2"),
        ("max_boundary_wait", float("inf"), "--max-boundary-wait"),
        ("max_boundary_wait", "soon", "--max-boundary-wait"),
        ("ttft_slo", float("nan"), "--ttft-slo must be more than 0"),
        ("itl_slo", float("inf"), "--itl-slo must be more than 0"),
        ("itl_slo", "100", "--itl-slo must be more than 0"),
        ("gpu_memory_utilization", "0.9", "--gpu-memory-utilization"),
    ],
)
def test_a_value_that_can_never_work_is_named(field, value, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig("model", **{field: value}).check()
