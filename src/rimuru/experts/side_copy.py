"""Promotions beside the running steps: copies on a stream of their own, a few experts at a time.

Room: between the expert store and the link. Rule: a page is written only after every step launched
before it was asked for, because such a step may still read the expert, or write the KV, that lay there.

What is ordered by what, with steps launched ahead of their results:

- A demoted expert's page goes to KV, or to streamed prefill: their writes are launched later on the compute
  stream than the steps that may read the expert.
- The same page goes to a promotion: the copy stream waits for an event recorded on the compute stream when
  the promotion is asked for. A page that a request gave back is covered alike.
- A promoted expert is read in host memory until its copy has ended, and then in its page: the copy stream
  writes the device's table entry right behind the bytes. A step under way that comes to the layer after that
  finds the page, and does not read over the link what has just crossed it. A step reads an entry once, and
  before and after the bytes are the same.
- That entry is written once, before the event. The host demotes no expert whose event it has not seen, so
  what a demotion writes comes later. Of edits staged before the promotion one may come later too, and names
  the host copy: right as well, and mended by the edit staged when the host sees the event.

The link is one queue, and the copy engine knows no priorities. So promotions queue on the host: they are
issued when the store is polled, and no more of them at a time than `ahead`, which bounds what streamed
prefill can find before it.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .store import Arrival, Event

logger = logging.getLogger("rimuru.experts")


class Lane(Protocol):
    """A stream for copies beside the compute stream."""

    def launched(self) -> Any:
        """A mark behind all work launched on the compute stream so far."""
        ...

    def copy(self, arrival: Arrival, after: Any) -> Event:
        """Copy once the mark is reached, then write the table entry; the event is behind both."""
        ...


class CudaLane:
    """`stream`, beside whichever stream is current. Sources must be page-locked, or a copy waits.

    Where the driver does not let a stream write memory, the entries are left to the host's edits.
    """

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream
        self._write = _stream_write()

    def launched(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.stream.device).record_event()

    def copy(self, arrival: Arrival, after: torch.cuda.Event) -> torch.cuda.Event:
        self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            arrival.to.copy_(arrival.source, non_blocking=True)
        if self._write is not None:
            # Flags 0: with the driver's fence behind what the stream wrote before, for kernels that run now
            # as well. A copy of eight bytes is ordered for its own stream, and no more is promised.
            failed = self._write(self.stream.cuda_stream, arrival.cell.data_ptr(), arrival.entry, 0)
            if failed:
                logger.warning("streams cannot write memory here (error %d): promotions show later", failed)
                self._write = None
        return self.stream.record_event()


def _stream_write() -> Any:
    """The driver's `cuStreamWriteValue64(stream, address, value, flags)`; None where it has none."""
    try:
        write = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue64_v2
    except (OSError, AttributeError):
        return None
    write.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint
    return write


class _Asked:
    """One call's copies; an `Event` that asks for more of them whenever it is queried."""

    def __init__(self, side: SideStreamCopy, count: int):
        self._side, self.left = side, count

    def query(self) -> bool:
        self._side.pump()
        return self.left == 0


class SideStreamCopy:
    """The `copy` of an `ExpertStore` whose steps are launched ahead.

    Nothing is issued by the call itself but by `pump`, which the store's `poll` reaches through the event.
    At most `ahead` experts are on the link, or in its queue, at one time.
    """

    def __init__(self, lane: Lane, ahead: int = 4):
        if ahead < 1:
            raise ValueError(f"{ahead} experts at a time; at least 1 must be able to move")
        self._lane, self._ahead = lane, ahead
        self._waiting: deque[tuple[Arrival, Any, _Asked]] = deque()
        self._issued: deque[tuple[Event, _Asked]] = deque()

    @property
    def pending(self) -> int:
        """Copies that have not ended, as far as the last `pump` saw."""
        return len(self._waiting) + len(self._issued)

    def __call__(self, arrivals: Sequence[Arrival]) -> Event:
        after, asked = self._lane.launched(), _Asked(self, len(arrivals))
        self._waiting.extend((arrival, after, asked) for arrival in arrivals)
        return asked

    def pump(self) -> None:
        """Note the copies that ended and issue as many more; never waits."""
        while self._issued and self._issued[0][0].query():
            self._issued.popleft()[1].left -= 1
        while self._waiting and len(self._issued) < self._ahead:
            arrival, after, asked = self._waiting.popleft()
            self._issued.append((self._lane.copy(arrival, after), asked))

    def check(self) -> None:
        """Assert that no more is on its way than may be, and that every call waits for its own copies."""
        assert len(self._issued) <= self._ahead, "more copies at a time than were allowed"
        calls = Counter([call for _, call in self._issued] + [call for _, _, call in self._waiting])
        assert all(call.left == n for call, n in calls.items()), "a call waits for another's copies"
