"""Promotions beside the running steps: copies on a stream of their own, a few experts at a time.

Room: between the expert store and the link. Rule: a page is written only after every step launched
before it was asked for, because such a step may still read the expert, or write the KV, that lay there.

What is ordered by what, with steps launched ahead of their results:

- A demoted expert's page goes to KV, or to streamed prefill: their writes are launched later on the compute
  stream than the steps that may read the expert.
- The same page goes to a promotion: the copy stream waits for an event recorded on the compute stream when
  the promotion is asked for. A page that a request gave back is covered alike.
- A promoted expert is read in host memory until the host has seen its copy end; the table edit that names
  the page is staged after that.

The link is one queue, and the copy engine knows no priorities. So promotions queue on the host: they are
issued when the store is polled, and no more of them at a time than `ahead`, which bounds what streamed
prefill can find before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .store import Event


class Lane(Protocol):
    """A stream for copies beside the compute stream."""

    def launched(self) -> Any:
        """A mark behind all work launched on the compute stream so far."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Any) -> Event:
        """Copy once the mark is reached; the event is behind the copy."""
        ...


class CudaLane:
    """`stream`, beside whichever stream is current. `source` must be page-locked, or the copy waits."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream

    def launched(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.stream.device).record_event()

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
        return self.stream.record_event()


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
        self._waiting: deque[tuple[torch.Tensor, torch.Tensor, Any, _Asked]] = deque()
        self._issued: deque[tuple[Event, _Asked]] = deque()

    @property
    def pending(self) -> int:
        """Copies that have not ended, as far as the last `pump` saw."""
        return len(self._waiting) + len(self._issued)

    def __call__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        after, asked = self._lane.launched(), _Asked(self, len(pairs))
        self._waiting.extend((to, source, after, asked) for to, source in pairs)
        return asked

    def pump(self) -> None:
        """Note the copies that ended and issue as many more; never waits."""
        while self._issued and self._issued[0][0].query():
            self._issued.popleft()[1].left -= 1
        while self._waiting and len(self._issued) < self._ahead:
            to, source, after, asked = self._waiting.popleft()
            self._issued.append((self._lane.copy(to, source, after), asked))
