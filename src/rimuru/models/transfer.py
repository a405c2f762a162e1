"""Ranges of files to tensors, by several threads.

Room: models. Rule: bytes are copied once on the host. What is stored as it is served goes through
`transfer.c`, whose threads stay out of the interpreter: to host memory where it lies, to a GPU through
staging buffers, two a thread, so that the copy engine fetches from one while the other is being filled. What
has to be converted takes torch, a tensor at a time; so does everything where C cannot be compiled.

Reading begins with the first tensors that are known; where the others go is found out meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from threading import Event

import torch

from rimuru.errors import CheckpointError
from rimuru.kernels import c_library
from rimuru.kernels.host_memory import HostMemory, threads
from rimuru.models.safetensors_file import DTYPES, StoredTensor

logger = logging.getLogger("rimuru.models")

# Bytes read at a time. The staging buffers of all threads should fit a processor's last cache; without a GPU
# they take from the memory that is served from.
CHUNK_BYTES = {"cuda": 4 << 20, "cpu": 2 << 20}
MAX_READERS = 12
SOURCE = Path(__file__).with_name("transfer.c")
_REPORT_SECONDS = 0.1
_RANGE = struct.Struct("@5q")  # `range` of transfer.c
_PUBLISHED = 32  # ranges that threads are told of at a time


class Piece:
    """Values of a stored tensor and the flat, contiguous tensor they go to."""

    __slots__ = ("end", "start", "stored", "target")

    def __init__(self, stored: StoredTensor, start: int, target: torch.Tensor):
        """`start`: their byte offset in the file."""
        self.stored, self.start, self.target = stored, start, target
        self.end = start + target.numel() * DTYPES[stored.dtype].itemsize


class Transfer:
    """Threads and buffers for one load to `device`, made while the caller finds out what to load.

    with Transfer(device) as transfer:
        transfer.run(pieces, progress)
    """

    def __init__(self, device: torch.device):
        self._gpu = device if device.type == "cuda" else None
        self._size = CHUNK_BYTES[device.type]
        self._workers = min(MAX_READERS, threads())
        self._pool = ThreadPoolExecutor(self._workers, "loader")
        self._memory = self._pool.submit(HostMemory, 2 * self._workers * self._size, self._gpu is not None)
        self._library = self._pool.submit(_library)

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False)  # none works any more, and threads that used a GPU end slowly
        self._memory.result().close()

    def run(self, pieces: Iterable[Piece], progress: Callable[[int], None]) -> None:
        """Fill the targets of all `pieces`, on the device or in host memory; returns when all have arrived.

        `progress(bytes so far)` is called on the calling thread. Raises `CheckpointError` naming the file and
        the tensor where one cannot be read.
        """
        files: dict[Path, int] = {}
        others: list[tuple[Piece, int]] = []
        todo = iter(others)  # of a list: taking the next is one step for all threads
        converted = [0] * self._workers
        ranges = _Ranges(self._library.result(), self._gpu)

        def work(worker: int) -> None:
            memory = self._memory.result().tensor.chunk(self._workers)[worker]
            ranges.move(memory)  # returns when all others are known too
            buffers: list[_Buffer] = []
            while not ranges.stopped and (job := next(todo, None)) is not None:
                buffers = buffers[::-1] or [_Buffer(half, self._gpu) for half in memory.chunk(2)]
                _convert(*job, buffers[0])
                converted[worker] += job[0].end - job[0].start

        tasks = [self._pool.submit(work, i) for i in range(self._workers)]
        try:
            for piece in _cut(pieces, self._size):
                file = piece.stored.file
                if file not in files:
                    files[file] = _open(file)
                if not ranges.add(piece, files[file]):
                    others.append((piece, files[file]))
                if ranges.stopped:
                    break
            ranges.close()
            while wait(tasks, _REPORT_SECONDS, FIRST_EXCEPTION).not_done and not _failed(tasks):
                progress(ranges.moved + sum(converted))
            ranges.stop()
            for task in tasks:
                task.result()
            if others and self._gpu is not None:
                torch.cuda.synchronize(self._gpu)
        finally:
            ranges.stop()
            wait(tasks)
            for descriptor in files.values():
                os.close(descriptor)
        progress(ranges.moved + sum(converted))


def _failed(tasks: list[Future[None]]) -> bool:
    return any(t.done() and t.exception() is not None for t in tasks)


def _cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
    """Pieces of at most `most` bytes."""
    for piece in pieces:
        if piece.end - piece.start <= most:
            yield piece
            continue
        itemsize = DTYPES[piece.stored.dtype].itemsize
        step = most // itemsize
        for at in range(0, piece.target.numel(), step):
            yield Piece(piece.stored, piece.start + at * itemsize, piece.target[at : at + step])


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None


def _unreadable(piece: Piece, error: str | None) -> CheckpointError:
    """`error`: what the system says; None where the file ends too early."""
    place = f"{piece.stored.file}: {piece.stored.name}"
    if error is None:
        return CheckpointError(f"{place} is truncated; fetch the file again")
    return CheckpointError(f"{place} cannot be read: {error}")


# -- as stored -------------------------------------------------------------------------------------


class _Work(ctypes.Structure):
    """`work` of transfer.c."""

    _fields_ = (
        ("ranges", ctypes.c_void_p), ("ready", ctypes.c_int64), ("taken", ctypes.c_int64),
        ("moved", ctypes.c_int64), ("closed", ctypes.c_int32), ("stopped", ctypes.c_int32),
    )  # fmt: skip


class _Failure(ctypes.Structure):
    """`failure` of transfer.c."""

    _fields_ = (("range", ctypes.c_int64), ("error", ctypes.c_int32), ("status", ctypes.c_int32))


class _Driver(ctypes.Structure):
    """`driver` of transfer.c."""

    FUNCTIONS = (
        "cuCtxSetCurrent", "cuMemcpyHtoDAsync_v2", "cuEventCreate", "cuEventRecord", "cuEventSynchronize",
        "cuEventDestroy_v2",
    )  # fmt: skip
    _fields_ = tuple((name, ctypes.c_void_p) for name in (*FUNCTIONS, "context", "stream"))

    @classmethod
    def of(cls, gpu: torch.device) -> _Driver:
        """Copies go to the stream that is current on the calling thread."""
        index = torch.cuda.current_device() if gpu.index is None else gpu.index
        stream = torch.cuda.current_stream(gpu).cuda_stream
        library, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        if status := library.cuDevicePrimaryCtxRetain(ctypes.byref(context), index):
            raise RuntimeError(f"cuDevicePrimaryCtxRetain failed with error {status}")
        library.cuDevicePrimaryCtxRelease(index)  # torch holds it
        functions = (ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in cls.FUNCTIONS)
        return cls(*functions, context, stream)


class _Ranges:
    """What `transfer.c` moves, written down by one thread while others move it.

    Without a library, or where bytes are not served as they are stored, `add` declines.
    """

    def __init__(self, libraries: tuple[ctypes.CDLL, ctypes.PyDLL] | None, gpu: torch.device | None):
        self._libraries = libraries
        self._driver = None if gpu is None or libraries is None else _Driver.of(gpu)
        self._work = _Work()
        self._pieces: list[Piece] = []
        # Tables of ranges; threads may still read one that has become too small.
        self._kept = [bytearray(_RANGE.size << 10)]
        self._all_known = Event()

    def add(self, piece: Piece, descriptor: int) -> bool:
        """Have a piece moved; False where that is not for here."""
        target = piece.target
        if self._libraries is None or target.dtype != DTYPES[piece.stored.dtype]:
            return False
        count, table = len(self._pieces), self._kept[-1]
        if (count + 1) * _RANGE.size > len(table):
            table = table + bytes(len(table))
            self._kept.append(table)
        size = piece.end - piece.start
        _RANGE.pack_into(
            table, count * _RANGE.size, descriptor, piece.start, size, target.data_ptr(), target.is_cuda
        )
        self._pieces.append(piece)
        if count % _PUBLISHED == 0:
            self._publish(closed=False)
        return True

    def close(self) -> None:
        """No more pieces will come."""
        self._publish(closed=True)
        self._all_known.set()

    def _publish(self, closed: bool) -> None:
        if self._libraries is not None:
            table = (ctypes.c_char * len(self._kept[-1])).from_buffer(self._kept[-1])
            self._libraries[1].rimuru_publish(self._work, table, len(self._pieces), closed)

    def stop(self) -> None:
        """Have `move` return early on all threads."""
        self._work.stopped = 1
        self._all_known.set()

    @property
    def stopped(self) -> bool:
        return bool(self._work.stopped)

    @property
    def moved(self) -> int:
        """Bytes so far."""
        return self._work.moved

    def move(self, memory: torch.Tensor) -> None:
        """On one of several threads: move pieces until there are no more. `memory` holds its two buffers."""
        if self._libraries is None:
            self._all_known.wait()
            return
        why = _Failure()
        self._libraries[0].rimuru_move(self._work, self._driver, memory.data_ptr(), len(memory) // 2, why)
        if why.status:
            raise RuntimeError(f"a copy to the GPU failed: CUDA driver error {why.status}")
        if why.range >= 0:
            raise _unreadable(self._pieces[why.range], os.strerror(why.error) if why.error else None)


@cache
def _library() -> tuple[ctypes.CDLL, ctypes.PyDLL] | None:
    """transfer.c, compiled, as (releases the GIL, holds it); None where that is not possible."""
    try:
        libraries = c_library.load(SOURCE, ["-std=gnu11", "-O2", "-fPIC"])
    except OSError as error:
        logger.warning("weights load more slowly: %s could not be compiled (%s)", SOURCE.name, error)
        return None
    work, driver, failure = map(ctypes.POINTER, (_Work, _Driver, _Failure))
    move, publish = libraries[0].rimuru_move, libraries[1].rimuru_publish
    move.argtypes, move.restype = [work, driver, ctypes.c_void_p, ctypes.c_int64, failure], None
    publish.argtypes, publish.restype = [work, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int], None
    return libraries


# -- to be converted -------------------------------------------------------------------------------


class _Buffer:
    """Staging memory, and an event behind the copies out of it."""

    __slots__ = ("bytes", "drained", "memory", "stream")

    def __init__(self, memory: torch.Tensor, gpu: torch.device | None):
        self.memory = memory  # uint8
        self.bytes = memoryview(memory.numpy())
        self.drained = None if gpu is None else torch.cuda.Event()
        self.stream = None if gpu is None else torch.cuda.current_stream(gpu)


def _convert(piece: Piece, descriptor: int, buffer: _Buffer) -> None:
    """One read, and the copy to where its values belong."""
    target, dtype, size = piece.target, DTYPES[piece.stored.dtype], piece.end - piece.start
    if target.dtype == dtype and not target.is_cuda:
        _read(piece, descriptor, memoryview(target.view(torch.uint8).numpy()))
        return
    if buffer.drained is not None:
        buffer.drained.synchronize()
    _read(piece, descriptor, buffer.bytes[:size])
    target.copy_(buffer.memory[:size].view(dtype), non_blocking=True)
    if buffer.drained is not None:
        buffer.drained.record(buffer.stream)


def _read(piece: Piece, descriptor: int, view: memoryview) -> None:
    """Fill `view` with the bytes of `piece`."""
    at = piece.start
    while view:
        try:
            count = os.preadv(descriptor, [view], at)
        except OSError as error:
            raise _unreadable(piece, error.strerror) from None
        if not count:
            raise _unreadable(piece, None)
        at += count
        view = view[count:]
