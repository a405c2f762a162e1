"""Ranges of files to tensors, by several threads.

Room: models. Rule: bytes are copied once on the host. A destination in host memory that has the stored
dtype is read into where it lies; every other one is reached through a ring of staging buffers, from which
a GPU fetches while the next are being filled. What adjoins in a file is read together.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from rimuru.errors import CheckpointError
from rimuru.kernels.host_memory import HostMemory, threads
from rimuru.models.safetensors_file import DTYPES, StoredTensor

# Bytes read at a time, by the model's device: large where each read costs launches, small where buffers
# take from the memory that is served from.
CHUNK_BYTES = {"cuda": 16 << 20, "cpu": 4 << 20}
_MOST_PIECES = 512  # in one read; the system takes 1,024 destinations
_DRAINING = 4  # buffers that a GPU fetches from beside those being filled


@dataclass(slots=True)
class Piece:
    """Values of a stored tensor and the flat, contiguous tensor they go to."""

    stored: StoredTensor
    start: int  # byte offset in the file
    target: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.stored.dtype]

    @property
    def end(self) -> int:
        return self.start + self.target.numel() * self.dtype.itemsize

    @property
    def direct(self) -> bool:
        """Whether the file's bytes are the target's, in host memory."""
        return self.target.device.type == "cpu" and self.target.dtype == self.dtype

    def continued_by(self, other: Piece) -> bool:
        """Whether one read can serve both."""
        return (
            other.start == self.end
            and other.stored.file == self.stored.file
            and other.stored.dtype == self.stored.dtype
            and other.direct == self.direct
        )


class Transfer:
    """Threads and buffers for one load to `device`, made while the caller finds out what to load.

        with Transfer(device) as transfer:
            transfer.run(pieces, on_done)
    """

    def __init__(self, device: torch.device):
        self._device, self._size = device, CHUNK_BYTES[device.type]
        self._workers = threads()
        self._pool = ThreadPoolExecutor(self._workers, "loader")
        self._stages = self._pool.submit(_Stages, self._workers, self._size, device)

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        if not self._stages.cancelled():
            self._stages.result().close()

    def run(self, pieces: Iterable[Piece], on_done: Callable[[int], None]) -> None:
        """Fill the targets of all `pieces`, on the device or in host memory; returns when all have arrived.

        The iterable is advanced and `on_done(bytes)` is called on the calling thread. Raises
        `CheckpointError` naming the file and the tensor where one cannot be read.
        """
        files: dict[Path, int] = {}
        under_way: deque[tuple[Future[None], int]] = deque()

        def finish(most: int) -> None:
            while len(under_way) > most:
                future, nbytes = under_way.popleft()
                future.result()
                on_done(nbytes)

        try:
            for chunk in _chunks(pieces, self._size):
                file = chunk[0].stored.file
                if file not in files:
                    files[file] = _open(file)
                done = self._pool.submit(_move, files[file], chunk, self._stages)
                under_way.append((done, chunk[-1].end - chunk[0].start))
                finish(2 * self._workers)
            finish(0)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            self._pool.shutdown(cancel_futures=True)
            for handle in files.values():
                os.close(handle)


def _chunks(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """Pieces that one read can serve, up to `size` bytes together; larger ones are cut."""
    chunk: list[Piece] = []
    for piece in pieces:
        for part in _cut(piece, size):
            if chunk and not (
                chunk[-1].continued_by(part)
                and part.end - chunk[0].start <= size
                and len(chunk) < _MOST_PIECES
            ):
                yield chunk
                chunk = []
            chunk.append(part)
    if chunk:
        yield chunk


def _cut(piece: Piece, size: int) -> Iterator[Piece]:
    step = size // piece.dtype.itemsize
    if piece.target.numel() <= step:
        yield piece
        return
    for at in range(0, piece.target.numel(), step):
        start = piece.start + at * piece.dtype.itemsize
        yield Piece(piece.stored, start, piece.target[at : at + step])


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None


class _Stage:
    """A staging buffer, and an event behind the copies out of it."""

    __slots__ = ("buffer", "drained")

    def __init__(self, buffer: torch.Tensor, gpu: bool):
        self.buffer = buffer  # uint8
        self.drained = torch.cuda.Event() if gpu else None


class _Stages:
    """Buffers of `size` bytes, in turn."""

    def __init__(self, workers: int, size: int, device: torch.device):
        gpu = device.type == "cuda"
        count = workers + _DRAINING if gpu else workers
        self._memory = HostMemory(count * size, pin=gpu)
        self.free: SimpleQueue[_Stage] = SimpleQueue()
        for at in range(0, count * size, size):
            self.free.put(_Stage(self._memory.tensor[at : at + size], gpu))

    def close(self) -> None:
        self._memory.close()


def _move(descriptor: int, chunk: list[Piece], stages: Future[_Stages]) -> None:
    """One read, and the copies to where its bytes belong."""
    if chunk[0].direct:
        _read(descriptor, chunk, [p.target.view(torch.uint8).numpy() for p in chunk])
        return
    free = stages.result().free
    stage = free.get()
    try:
        if stage.drained is not None:
            stage.drained.synchronize()
        first = chunk[0].start
        _read(descriptor, chunk, [stage.buffer[: chunk[-1].end - first].numpy()])
        for piece in chunk:
            values = stage.buffer[piece.start - first : piece.end - first].view(piece.dtype)
            if values.dtype != piece.target.dtype:
                values = values.to(piece.target.device, non_blocking=True)
            piece.target.copy_(values, non_blocking=True)
        if stage.drained is not None:
            stage.drained.record(torch.cuda.current_stream(chunk[-1].target.device))
    finally:
        free.put(stage)


def _read(descriptor: int, chunk: list[Piece], views: list[np.ndarray]) -> None:
    """Fill `views` with the bytes of `chunk`."""
    file, at, end = chunk[0].stored.file, chunk[0].start, chunk[-1].end

    def name() -> str:
        return next(p.stored.name for p in reversed(chunk) if p.start <= at)

    while at < end:
        try:
            count = os.preadv(descriptor, views, at)
        except OSError as error:
            raise CheckpointError(f"{file}: {name()} cannot be read: {error.strerror}") from None
        if not count:
            raise CheckpointError(f"{file}: truncated inside {name()}; fetch the file again")
        at += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
