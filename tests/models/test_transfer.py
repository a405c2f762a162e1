"""The threads that move what is stored as it is served: nothing overtakes a copy, a failure ends all."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Lock

import pytest
import torch

from rimuru.errors import CheckpointError
from rimuru.models import transfer
from rimuru.models.safetensors_file import StoredTensor
from rimuru.models.transfer import Piece, _Driver, _Ranges

pytestmark = pytest.mark.skipif(transfer._library() is None, reason="no C compiler")

BUFFER = 4096  # bytes


class LazyGpu:
    """A driver that copies as late as it may: when an event behind the copy is waited for."""

    def __init__(self, refuse_after: int | None = None):
        self.pending: list[tuple[int, int, int]] = []
        self.behind: dict[int, int] = {}  # event -> copies that it covers
        self.done = self.launched = self.events = 0
        self.refuse_after = refuse_after
        self.names, self.lock = count(1000), Lock()
        i, p, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
        events = ctypes.POINTER(ctypes.c_void_p)
        kinds = ((p,), (ctypes.c_uint64, p, size, p), (events, ctypes.c_uint), (p, p), (p,), (p,))
        calls = (lambda context: 0, self.copy, self.create, self.record, self.wait, self.destroy)
        self.kept = [ctypes.CFUNCTYPE(i, *k)(call) for k, call in zip(kinds, calls, strict=True)]
        self.table = _Driver(*(ctypes.cast(f, p) for f in self.kept), None, None)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        with self.lock:
            if self.launched == self.refuse_after:
                return 700
            self.launched += 1
            self.pending.append((to, source, nbytes))
        return 0

    def create(self, event, flags: int) -> int:
        with self.lock:
            self.events += 1
            event[0] = next(self.names)
        return 0

    def record(self, event: int, stream: int) -> int:
        with self.lock:
            self.behind[event] = self.launched
        return 0

    def wait(self, event: int) -> int:
        with self.lock:
            while self.done < self.behind[event]:
                ctypes.memmove(*self.pending[self.done])
                self.done += 1
        return 0

    def destroy(self, event: int) -> int:
        with self.lock:
            self.events -= 1
        return 0


class OnGpu:
    """A tensor that says it is on a GPU."""

    dtype, is_cuda = torch.bfloat16, True

    def __init__(self, tensor: torch.Tensor):
        self.numel, self.data_ptr = tensor.numel, tensor.data_ptr


@pytest.fixture
def stored(tmp_path) -> Iterator[tuple[StoredTensor, int, torch.Tensor]]:
    """A file of random bytes, its open descriptor and its content."""
    content = torch.randint(0, 256, (1_000_000,), dtype=torch.uint8)
    file = tmp_path / "model.safetensors"
    file.write_bytes(content.numpy().tobytes())
    descriptor = os.open(file, os.O_RDONLY)
    yield StoredTensor("a", file, "BF16", (500_000,), 0, 1_000_000), descriptor, content
    os.close(descriptor)


def pieces(stored: StoredTensor, target: torch.Tensor, gpu: bool = True) -> Iterator[Piece]:
    """The whole tensor, in pieces of many sizes."""
    at, size = 0, 2
    while at < len(target):
        part = target[at : at + size].view(torch.bfloat16)
        yield Piece(stored, at, OnGpu(part) if gpu else part)  # type: ignore[arg-type]
        at += len(part) * 2
        size = size * 7 % BUFFER & -2 or 2


def move(ranges: _Ranges, threads: int, parts: Iterator[Piece], descriptor: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        buffers = torch.zeros(threads, 2 * BUFFER, dtype=torch.uint8)
        tasks = [pool.submit(ranges.move, buffer) for buffer in buffers]
        for part in parts:
            assert ranges.add(part, descriptor)
        ranges.close()
        for task in tasks:
            task.result()


def of(gpu: LazyGpu | None) -> _Ranges:
    ranges = _Ranges(transfer._library(), None)
    ranges._driver = gpu.table if gpu else None
    return ranges


@pytest.mark.parametrize("threads", [1, 5])
def test_no_buffer_is_filled_before_the_copy_out_of_it_has_ended(stored, threads):
    tensor, descriptor, content = stored
    target, gpu = torch.zeros_like(content), LazyGpu()
    ranges = of(gpu)
    move(ranges, threads, pieces(tensor, target), descriptor)
    assert torch.equal(target, content)
    assert ranges.moved == len(content)
    assert gpu.events == 0


def test_host_memory_is_filled_in_place_by_several_threads(stored):
    tensor, descriptor, content = stored
    target = torch.zeros_like(content)
    ranges = of(None)
    move(ranges, 5, pieces(tensor, target, gpu=False), descriptor)
    assert torch.equal(target, content)


def test_a_refused_copy_ends_all_threads(stored):
    tensor, descriptor, content = stored
    ranges = of(LazyGpu(refuse_after=20))
    with pytest.raises(RuntimeError, match="driver error 700"):
        move(ranges, 5, pieces(tensor, torch.zeros_like(content)), descriptor)
    assert ranges.stopped


def test_a_file_that_ends_early_ends_all_threads(stored):
    tensor, descriptor, content = stored
    os.truncate(tensor.file, 600_000)
    ranges = of(LazyGpu())
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a is truncated"):
        move(ranges, 5, pieces(tensor, torch.zeros_like(content)), descriptor)
    assert ranges.moved <= 600_000


def test_a_read_that_fails_says_why(stored, tmp_path):
    tensor, _, content = stored
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a cannot be read: Is a directory"):
        move(of(None), 2, pieces(tensor, torch.zeros_like(content), gpu=False), folder)
    os.close(folder)


def test_threads_that_wait_for_more_leave_when_told():
    ranges = of(None)
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(ranges.move, torch.zeros(2 * BUFFER, dtype=torch.uint8)) for _ in range(2)]
        ranges.stop()
        for task in tasks:
            task.result(timeout=20)
