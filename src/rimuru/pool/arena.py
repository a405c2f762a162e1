"""The bytes: one uint8 tensor that is allocated once and never moves.

Room: the pool. Rule: addresses and views only; who holds which page is the allocator's business.
The device's arena and the host's are the same class; on a CPU they are two ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .errors import GeometryError

ALIGN = 256  # bytes; where the first page starts


class Arena:
    """`nbytes` of memory on `device`, seen as pages, flat typed tensors or raw addresses.

    `buffer`: a uint8 tensor to use instead of a fresh one (exact-size pinned host memory, say); it
    must hold at least `nbytes` after its start is aligned to 256 bytes. `pinned` asks torch for
    page-locked host memory. Raises GeometryError for sizes that do not fit.
    """

    def __init__(
        self,
        nbytes: int,
        device: torch.device | str = "cpu",
        pinned: bool = False,
        buffer: torch.Tensor | None = None,
    ):
        if nbytes <= 0:
            raise GeometryError(f"an arena of {nbytes} bytes; it must hold at least one")
        if buffer is None:
            buffer = torch.empty(nbytes + ALIGN, dtype=torch.uint8, device=device, pin_memory=pinned)
        elif buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise GeometryError("an arena's buffer must be a flat, contiguous uint8 tensor")
        skip = -buffer.data_ptr() % ALIGN
        if buffer.numel() < skip + nbytes:
            raise GeometryError(
                f"the buffer has {buffer.numel():,} bytes; {nbytes:,} and {skip} for alignment are needed"
            )
        self.nbytes = nbytes
        self.device = buffer.device
        self.data = buffer[skip : skip + nbytes]  # uint8 [nbytes]
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._used = 0
        self._peak = 0

    @property
    def address(self) -> int:
        """Address of the first byte, a multiple of 256."""
        return self.data.data_ptr()

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole arena as a flat tensor of `dtype` (a remainder of bytes is left out)."""
        if dtype not in self._views:
            whole = self.nbytes - self.nbytes % dtype.itemsize
            self._views[dtype] = self.data[:whole].view(dtype)
        return self._views[dtype]

    def page(self, index: int, grain: int, nbytes: int) -> torch.Tensor:
        """The `nbytes` of the page at grain `index`, as uint8. Raises GeometryError past the end."""
        start = index * grain
        if index < 0 or start + nbytes > self.nbytes:
            raise GeometryError(
                f"page {index} (grain {grain}, {nbytes} bytes) lies outside an arena of {self.nbytes:,} bytes"
            )
        return self.data[start : start + nbytes]

    def poison(self, indices: Iterable[int], grain: int, nbytes: int) -> None:
        """Fill pages with 0xFF: a NaN in every float format, -1 in every signed integer."""
        for index in indices:
            self.page(index, grain, nbytes).fill_(0xFF)

    def account(self, used: int) -> None:
        """Note that `used` bytes hold data now; the peak follows."""
        self._used = used
        self._peak = max(self._peak, used)

    @property
    def used_bytes(self) -> int:
        """Bytes that hold data, as last noted by `account`."""
        return self._used

    @property
    def peak_bytes(self) -> int:
        """The most bytes that ever held data, as noted by `account`."""
        return self._peak
