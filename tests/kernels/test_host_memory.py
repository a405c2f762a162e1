"""Host memory: exact size, aligned, zeroed, and ordinary memory without a GPU."""

import mmap
from pathlib import Path

import pytest
import torch

from rimuru.kernels.host_memory import HUGE, HostMemory


def test_exact_size_zeroed_and_aligned():
    memory = HostMemory(3 * HUGE + 12_345)
    memory.check()
    assert memory.tensor.numel() == 3 * HUGE + 12_345
    assert memory.address % HUGE == 0
    assert not memory.tensor.any()


def test_writes_are_seen_at_the_address():
    memory = HostMemory(4096, pin=False)
    memory.tensor.view(torch.int32)[7] = 42
    assert memory.tensor.data_ptr() == memory.address
    assert memory.tensor[28] == 42
    assert memory.pinned_bytes == 0
    assert not memory.pinned(0, 1)


def test_a_view_outlives_the_close():
    memory = HostMemory(8192, pin=False)
    view = memory.tensor[4096:]
    view.fill_(9)
    memory.close()
    del memory
    assert (view == 9).all()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_what_the_driver_refuses_to_register_is_given_back(monkeypatch):
    """The calls a driver gets, without one: it takes up to 43 of 64 MiB."""
    asked = []

    class Driver:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            asked.append(size)
            return int(size > 43 << 20)

        def cudaHostUnregister(self, address: int) -> int:
            return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver())
    monkeypatch.setattr("rimuru.kernels.host_memory._forget_error", lambda: None)
    before = resident_bytes()
    memory = HostMemory(64 << 20)
    assert asked == [n << 20 for n in (64, 56, 48, 40)]
    assert memory.pinned_bytes == 40 << 20
    assert resident_bytes() - before < 46 << 20
    assert not memory.tensor.any()
    memory.check()
    memory.close()
    assert memory.pinned_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to pin for")
def test_pin_limit_leaves_a_pageable_remainder():
    memory = HostMemory(8 * HUGE, pin_limit=5 * HUGE)
    assert memory.pinned_bytes == 5 * HUGE
    assert memory.pinned(HUGE, 4 * HUGE)
    assert not memory.pinned(HUGE, 4 * HUGE + 1)
    memory.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to pin for")
def test_memory_dropped_without_a_close_can_be_registered_again_and_blames_nobody():
    for size in (8 * HUGE, 4 * HUGE, 9 * HUGE, 2 * HUGE):  # maps that come to lie on the same addresses
        memory = HostMemory(size)
        assert memory.pinned_bytes == size
        del memory
    torch.zeros(4, device="cuda")  # raises the error of an earlier call, if one was left behind


def test_an_empty_request_is_an_error():
    with pytest.raises(ValueError, match="positive size, got 0 bytes"):
        HostMemory(0)
