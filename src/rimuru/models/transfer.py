"""Ranges of files to tensors, by several threads.

Room: models. Rule: bytes are copied once on the host. A destination in host memory that has the stored
dtype is read into where it lies; every other one is reached through staging buffers, two a thread, so that
a GPU fetches from one while the other is being filled. What adjoins in a file is read together.

A read of some megabytes is a handful of calls that leave the interpreter's lock; with many threads each of
them costs more than the work in between. So nothing is done a tensor at a time that can be done a read at a
time, and where tensors go is found out before the threads begin.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import torch

from rimuru.errors import CheckpointError
from rimuru.kernels.host_memory import HostMemory, threads
from rimuru.models.safetensors_file import DTYPES, StoredTensor

# Bytes read at a time. Threads of an H200's host with 16 cores read 42 GB/s out of the page cache so, and 64
# in a quarter of it; but then they wait for the interpreter's lock, and 29 GB/s became 10. Without a GPU,
# buffers take from the memory that is served from.
CHUNK_BYTES = {"cuda": 16 << 20, "cpu": 2 << 20}
MAX_READERS = 12  # threads; with more the lock costs more than they bring
_MOST_PIECES = 512  # in one read; the system takes 1,024 destinations
_REPORT_SECONDS = 0.1


class Piece:
    """Values of a stored tensor and the flat, contiguous tensor they go to."""

    __slots__ = ("direct", "end", "start", "stored", "target")

    def __init__(self, stored: StoredTensor, start: int, target: torch.Tensor):
        """`start`: their byte offset in the file."""
        dtype = DTYPES[stored.dtype]
        self.stored, self.start, self.target = stored, start, target
        self.end = start + target.numel() * dtype.itemsize
        # Whether the file's bytes are the target's, in host memory.
        self.direct = target.dtype == dtype and not target.is_cuda

    def continued_by(self, other: Piece) -> bool:
        """Whether one read can serve both."""
        mine, its = self.stored, other.stored
        return (
            other.start == self.end and other.direct == self.direct and its.dtype == mine.dtype
            and its.file is mine.file
        )  # fmt: skip


@dataclass(slots=True)
class Chunk:
    """Pieces that one read serves."""

    pieces: list[Piece]
    descriptor: int  # of the open file

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def direct(self) -> bool:
        return self.pieces[0].direct

    def place(self, at: int) -> str:
        """For messages: the file, and the tensor at a byte offset in it."""
        stored = next(p.stored for p in reversed(self.pieces) if p.start <= at)
        return f"{stored.file}: {stored.name}"


class Transfer:
    """Threads and buffers for one load to `device`, made while the caller finds out what to load.

    with Transfer(device) as transfer:
        transfer.run(pieces, on_done)
    """

    def __init__(self, device: torch.device):
        self._gpu = device if device.type == "cuda" else None
        self._size = CHUNK_BYTES[device.type]
        self._workers = min(MAX_READERS, threads())
        self._pool = ThreadPoolExecutor(self._workers, "loader")
        self._memory = self._pool.submit(HostMemory, 2 * self._workers * self._size, self._gpu is not None)

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._memory.result().close()

    def run(self, pieces: Iterable[Piece], progress: Callable[[int], None]) -> None:
        """Fill the targets of all `pieces`, on the device or in host memory; returns when all have arrived.

        The iterable is exhausted before the first read, and `progress(bytes so far)` is called on the calling
        thread. Raises `CheckpointError` naming the file and the tensor where one cannot be read.
        """
        files: dict[Path, int] = {}
        done = [0] * self._workers
        stop = Event()

        def work(worker: int) -> None:
            buffers: list[_Buffer] = []
            while (chunk := next(todo, None)) is not None and not stop.is_set():
                if not chunk.direct and not buffers:
                    at = 2 * worker * self._size
                    memory = self._memory.result().tensor[at : at + 2 * self._size]
                    buffers = [_Buffer(half, self._gpu) for half in memory.chunk(2)]
                buffers.reverse()
                _move(chunk, *buffers[:1])
                done[worker] += chunk.end - chunk.start

        try:
            chunks = []
            for joined in _chunks(pieces, self._size):
                file = joined[0].stored.file
                if file not in files:
                    files[file] = _open(file)
                chunks.append(Chunk(joined, files[file]))
            todo = iter(chunks)  # of a list: taking the next is one step for all threads
            workers = [self._pool.submit(work, i) for i in range(self._workers)]
            while wait(workers, _REPORT_SECONDS, FIRST_EXCEPTION).not_done and not _failed(workers):
                progress(sum(done))
            stop.set()
            for ended in workers:
                ended.result()
            if self._gpu is not None:
                torch.cuda.synchronize(self._gpu)
        finally:
            stop.set()
            self._pool.shutdown()
            for handle in files.values():
                os.close(handle)
        progress(sum(done))


def _failed(workers: list[Future[None]]) -> bool:
    return any(w.done() and w.exception() is not None for w in workers)


def _chunks(pieces: Iterable[Piece], most: int) -> Iterator[list[Piece]]:
    """Pieces that one read of at most `most` bytes can serve; larger ones are cut."""
    chunk: list[Piece] = []
    room = 0
    for piece in pieces:
        for part in _cut(piece, most):
            size = part.end - part.start
            if chunk and not (size <= room and chunk[-1].continued_by(part) and len(chunk) < _MOST_PIECES):
                yield chunk
                chunk = []
            room = (room if chunk else most) - size
            chunk.append(part)
    if chunk:
        yield chunk


def _cut(piece: Piece, most: int) -> Iterator[Piece]:
    if piece.end - piece.start <= most:
        yield piece
        return
    itemsize = DTYPES[piece.stored.dtype].itemsize
    step = most // itemsize
    for at in range(0, piece.target.numel(), step):
        yield Piece(piece.stored, piece.start + at * itemsize, piece.target[at : at + step])


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None


class _Buffer:
    """Staging memory, and an event behind the copies out of it."""

    __slots__ = ("bytes", "drained", "memory", "stream")

    def __init__(self, memory: torch.Tensor, gpu: torch.device | None):
        self.memory = memory  # uint8
        self.bytes = memoryview(memory.numpy())
        self.drained = None if gpu is None else torch.cuda.Event()
        self.stream = None if gpu is None else torch.cuda.current_stream(gpu)


def _move(chunk: Chunk, buffer: _Buffer | None = None) -> None:
    """One read, and the copies to where its bytes belong."""
    pieces, size = chunk.pieces, chunk.end - chunk.start
    if buffer is None or chunk.direct:
        _read(chunk, [memoryview(p.target.view(torch.uint8).numpy()) for p in pieces])
        return
    if buffer.drained is not None:
        buffer.drained.synchronize()
    _read(chunk, [buffer.bytes[:size]])
    values = buffer.memory[:size].view(DTYPES[pieces[0].stored.dtype])
    targets = [p.target for p in pieces]
    torch._foreach_copy_(targets, values.split([len(t) for t in targets]), non_blocking=True)
    if buffer.drained is not None:
        buffer.drained.record(buffer.stream)


def _read(chunk: Chunk, views: list[memoryview]) -> None:
    """Fill `views` with the bytes of `chunk`."""
    at, end = chunk.start, chunk.end
    while at < end:
        try:
            count = os.preadv(chunk.descriptor, views, at)
        except OSError as error:
            raise CheckpointError(f"{chunk.place(at)} cannot be read: {error.strerror}") from None
        if not count:
            raise CheckpointError(f"{chunk.place(at)} is truncated; fetch the file again")
        at += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
