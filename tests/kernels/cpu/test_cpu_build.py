"""Compiling on first use: no compiler, a compiler that fails, two processes at once, one OpenMP runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rimuru.kernels import c_library, reference
from rimuru.kernels.cpu import build

PROBE = """
import logging, re, sys, torch
logging.basicConfig(format="LOG %(message)s")
from rimuru.kernels import cpu, reference
x, w = torch.ones(40, 64), torch.ones(300, 64)
assert torch.equal(cpu.linear(x, w), reference.linear(x, w))
print(cpu.linear.__module__)
print(len({line.split()[-1] for line in open("/proc/self/maps") if re.search(r"lib[gi]?omp", line)}))
"""
have_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CC", "cc")), reason="no C compiler here")


def probe(cache: Path, **env: str) -> subprocess.Popen[str]:
    source = str(Path(reference.__file__).parents[2])
    full = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": source, **env}
    return subprocess.Popen(
        [sys.executable, "-c", PROBE], env=full, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str]) -> tuple[list[str], list[str]]:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out.split(), [line for line in err.splitlines() if line.startswith("LOG")]


def test_without_a_compiler_the_twin_serves_and_says_so_once(tmp_path):
    (module, _), logged = finish(probe(tmp_path, CC="/nonexistent"))
    assert module == "rimuru.kernels.reference"
    assert len(logged) == 1
    assert "install gcc or clang" in logged[0]
    assert "/nonexistent" in logged[0]


def test_the_twin_can_be_asked_for(tmp_path):
    (module, _), logged = finish(probe(tmp_path, RIMURU_CPU_KERNELS="torch"))
    assert module == "rimuru.kernels.reference"
    assert len(logged) == 1
    assert not list(tmp_path.iterdir())


def test_an_unknown_choice_is_refused(monkeypatch):
    monkeypatch.setenv("RIMURU_CPU_KERNELS", "fast")
    with pytest.raises(ValueError, match=r"'fast' is neither 'auto' nor 'torch'"):
        build.load()


def test_a_compiler_that_fails_is_reported_with_its_words(tmp_path, monkeypatch, caplog):
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such header" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.load() is None
    assert "no such header" in caplog.text
    assert not list((tmp_path / "cache/rimuru/kernels").iterdir())


@have_compiler
def test_two_processes_may_compile_at_once_and_share_torchs_threads(tmp_path):
    pair = [probe(tmp_path, OMP_NUM_THREADS="2") for _ in range(2)]
    for process in pair:
        (module, runtimes), logged = finish(process)
        assert module == "rimuru.kernels.cpu.ops"
        assert runtimes == "1"
        assert logged == []
    assert [p.suffix for p in (tmp_path / "rimuru/kernels").iterdir()] == [".so"]


@have_compiler
def test_a_damaged_library_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-O0"])
    library = c_library.compiled(build.SOURCE, build._flags())
    library.write_bytes(b"")
    assert build.load() is not None
    assert library.stat().st_size > 0


@have_compiler
def test_a_read_only_cache_does_not_prevent_compiling(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-O0"])
    assert build.load() is not None


@have_compiler
def test_calls_run_on_torchs_own_worker_threads():
    from rimuru.kernels import cpu

    def workers() -> int:
        return len(os.listdir("/proc/self/task"))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x, weight = torch.randn(64, 512), torch.randn(512, 512)
        torch.nn.functional.gelu(torch.randn(1 << 20))  # starts torch's second thread
        started = workers()
        cpu.linear(x, weight)
        assert workers() == started
    finally:
        torch.set_num_threads(before)
