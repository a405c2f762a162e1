"""What a safetensors file holds and where in it.

Room: models. Rule: reads headers only, and believes nothing in them that the file's size contradicts.

Layout of a file: header length (8 bytes, little-endian), header (JSON: name -> dtype, shape and
offsets into the data), data.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from pathlib import Path

import torch

from rimuru.errors import CheckpointError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_ITEMSIZE = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_MAX_HEADER = 1 << 28  # bytes; the largest checkpoints in use have headers of a few MiB


@dataclass(slots=True)
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
            shape = tuple(map(int, entry["shape"]))
            found.append(StoredTensor(name, file, str(entry["dtype"]), shape, data + start, end - start))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise corrupt("the header is not that of a safetensors file") from None
    found.sort(key=attrgetter("start"))
    at = data
    for t in found:
        wide = _ITEMSIZE.get(t.dtype)
        if t.start != at or t.nbytes < 0 or (wide is not None and t.nbytes != prod(t.shape) * wide):
            raise corrupt(f"the offsets of {t.name} do not fit its shape or its neighbours")
        at += t.nbytes
    if at != size:
        raise corrupt(f"it has {size} bytes, its header speaks of {at}")
    return found
