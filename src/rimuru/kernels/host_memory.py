"""Host memory that a GPU reads in place: exact size, huge pages, registered as far as the limit goes.

Room: the one place that maps and pins host memory. Rule: never torch's pinned allocator, which
rounds to powers of two; a pin that fails leaves a pageable remainder and says how much, it does
not fail the start.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

MAX_THREADS = 16
HUGE = 2 << 20  # bytes of a huge page, and the alignment the kernel needs to give one
_PORTABLE_MAPPED = 0x1 | 0x2  # cudaHostRegisterPortable | cudaHostRegisterMapped


def threads() -> int:
    """How many threads touch or fill host memory at the same time."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


class HostMemory:
    """`nbytes` of zeroed host memory at a fixed address.

    With `pin`, the first `pinned_bytes` are registered with the GPU driver: kernels read them by
    address and copies from them are asynchronous. They are touched before, by several threads: left to
    the driver, the pages of 48 GiB took 15.5 s. `pin_limit` caps the bytes; where the driver refuses, an
    eighth less is tried until it fits. `pinned_bytes < nbytes` is the caller's to
    handle: the remainder is ordinary memory. On a machine without a GPU nothing is pinned.
    """

    def __init__(self, nbytes: int, pin: bool = True, pin_limit: int | None = None) -> None:
        if nbytes <= 0:
            raise ValueError(f"host memory needs a positive size, got {nbytes} bytes")
        self.nbytes = nbytes
        self.pinned_bytes = 0
        # One huge page more than asked, to align the start; what is not touched takes no memory.
        self._map = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            try:
                self._map.madvise(getattr(mmap, advice))
            except OSError:
                continue  # a kernel built without it: slower to touch, nothing else changes
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._base = whole.data_ptr()
        start = -self._base % HUGE
        self.tensor = whole[start : start + nbytes]  # uint8 [nbytes]
        self.address = self.tensor.data_ptr()
        if pin and torch.cuda.is_available():
            self._pin(nbytes if pin_limit is None else min(nbytes, pin_limit))

    def _touch(self, nbytes: int) -> None:
        """Have the system give the first `nbytes` their pages."""
        # Small memory is spread over the threads too: a huge page takes most of a millisecond.
        pages, step = self.tensor.numpy(), min(64 << 20, max(1, nbytes // threads() // HUGE) * HUGE)

        def touch(start: int) -> None:
            pages[start : min(start + step, nbytes) : mmap.PAGESIZE] = 0

        with ThreadPoolExecutor(threads(), "host-memory") as pool:
            list(pool.map(touch, range(0, nbytes, step)))

    def _pin(self, want: int) -> None:
        self._touch(want)
        driver = torch.cuda.cudart()
        for eighths in range(8, 0, -1):
            size = want * eighths // 8
            if eighths < 8 or want < self.nbytes:
                size -= size % mmap.PAGESIZE
            # One registration, because a copy may not cross from one into the next.
            if not size:
                continue
            if int(driver.cudaHostRegister(self.address, size, _PORTABLE_MAPPED)) == 0:
                self.pinned_bytes = size
                self._release(size, want)
                # A map that goes while still registered leaves its addresses taken: a later map there could
                # not be registered. At exit the driver lets go by itself.
                self._unpin = weakref.finalize(self, _unregister, self.address)
                self._unpin.atexit = False
                return
            _forget_error()

    def _release(self, start: int, end: int) -> None:
        """Give back the pages touched in vain: a caller may have no use for memory that is not pinned."""
        start = self.address - self._base + -(-start // HUGE) * HUGE
        if (end := self.address - self._base + end) > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def pinned(self, offset: int, nbytes: int) -> bool:
        """Whether a GPU may read `[offset, offset + nbytes)` in place."""
        return offset >= 0 and offset + nbytes <= self.pinned_bytes

    def close(self) -> None:
        """Unregister. No work that reads this memory may be in flight; the map goes with its last view."""
        if self.pinned_bytes:
            self._unpin()
            self.pinned_bytes = 0

    def check(self) -> None:
        """Raise AssertionError unless the memory is where and what it says."""
        assert self.tensor.numel() == self.nbytes
        assert self.tensor.data_ptr() == self.address
        assert self.address % HUGE == 0
        assert 0 <= self.pinned_bytes <= self.nbytes


def _unregister(address: int) -> None:
    torch.cuda.synchronize()  # nothing may read through the registration any more
    status = int(torch.cuda.cudart().cudaHostUnregister(address))
    if status:
        _forget_error()
        raise RuntimeError(f"cudaHostUnregister failed with error {status}")


def _forget_error() -> None:
    """The runtime keeps a failed call's error for whoever asks next: ask now, so that no launch is blamed."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
