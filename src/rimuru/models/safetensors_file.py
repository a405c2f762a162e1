"""The safetensors format, read without a memory map.

Room: models. Rule: bytes go from the file to their destination, through a small bounce buffer only
where they change dtype or device. A mapped file would count its pages as the process's own memory,
a whole shard of them.

Layout of a file: header length (8 bytes, little-endian), header (JSON: name -> dtype, shape and
offsets into the data), data.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from rimuru.errors import CheckpointError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
BOUNCE_BYTES = 4 << 20
_MAX_HEADER = 1 << 28  # bytes; the largest checkpoints in use have headers of a few MiB


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk; `start` is its byte offset in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of a file, in file order. `CheckpointError` where it is corrupt or truncated."""

    def corrupt(why: str) -> CheckpointError:
        return CheckpointError(f"{file}: corrupt or truncated ({why}); fetch the file again")

    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            head = f.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise corrupt(f"a file of {size} bytes cannot have a header of {length}")
            header = json.loads(f.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise corrupt("the header is not JSON") from None
    data, found = 8 + length, []
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = map(int, entry["data_offsets"])
            shape = tuple(int(n) for n in entry["shape"])
            found.append(
                StoredTensor(name, file, str(entry["dtype"]), shape, 8 + length + start, end - start)
            )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise corrupt("the header is not that of a safetensors file") from None
    found.sort(key=lambda t: t.start)
    at = data
    for t in found:
        wide = DTYPES[t.dtype].itemsize if t.dtype in DTYPES else None
        if t.start != at or t.nbytes < 0 or (wide is not None and t.nbytes != prod(t.shape) * wide):
            raise corrupt(f"the offsets of {t.name} do not fit its shape or its neighbours")
        at += t.nbytes
    if at != size:
        raise corrupt(f"it has {size} bytes, its header speaks of {at}")
    return found


class Reader:
    """Copies stored values into tensors; owns the bounce buffer."""

    def __init__(self) -> None:
        self._bounce = torch.empty(BOUNCE_BYTES, dtype=torch.uint8)

    def read(self, file: BinaryIO, stored: StoredTensor, skip: int, target: torch.Tensor) -> None:
        """Fill contiguous `target` from the stored values, `skip` elements after the first.

        `file` is open unbuffered. Raises `CheckpointError` if it ends early.
        """
        dtype = DTYPES[stored.dtype]
        file.seek(stored.start + skip * dtype.itemsize)
        flat = target.view(-1)
        if target.device.type == "cpu" and target.dtype == dtype:
            _fill(file, stored, flat.view(torch.uint8))
            return
        step = BOUNCE_BYTES // dtype.itemsize
        for at in range(0, len(flat), step):
            part = flat[at : at + step]
            raw = self._bounce[: len(part) * dtype.itemsize]
            _fill(file, stored, raw)
            part.copy_(raw.view(dtype))


def _fill(file: BinaryIO, stored: StoredTensor, raw: torch.Tensor) -> None:
    view = memoryview(raw.numpy())
    while view:
        try:
            count = file.readinto(view)  # type: ignore[attr-defined]
        except OSError as error:
            raise CheckpointError(f"{stored.file}: {stored.name} cannot be read: {error.strerror}") from None
        if not count:
            raise CheckpointError(f"{stored.file}: truncated inside {stored.name}; fetch the file again")
        view = view[count:]
