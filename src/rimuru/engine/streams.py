"""The front end's half of an engine client: one stream of outputs a request.

Room: shared by every `EngineClient`. Rule: knows nothing of where the core runs; a stream that closes
for whatever reason tells the core to drop its request.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable

from rimuru.errors import EngineDeadError, RequestError

from .request import FinishReason, SamplingParams, TokenOutput


class StreamingClient(ABC):
    """Hands out streams and fills them; subclasses carry commands to the core and outputs back.

    Everything here runs on the front end's loop.
    """

    def __init__(self) -> None:
        self._streams: dict[str, asyncio.Queue[TokenOutput | Exception]] = {}
        # The core's name of each open request. It is used once, because what an earlier request of the
        # same id still had coming may arrive after that one was dropped.
        self._names: dict[str, str] = {}
        self._count = itertools.count()
        self._dead: BaseException | None = None

    @abstractmethod
    def _submit(
        self, request_id: str, tokens: list[int], params: SamplingParams, priority: int, cache_salt: str
    ) -> None:
        """Send a request on its way; a refusal comes back through `_refuse`."""

    @abstractmethod
    def _drop(self, request_id: str) -> None:
        """Have the core forget a request, whatever state it is in."""

    def _alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine stopped: {self._dead}")

    def _dispatch(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.put_nowait(error)

    def _fail_all(self) -> None:
        for stream in self._streams.values():
            stream.put_nowait(EngineDeadError(f"the engine stopped: {self._dead}"))

    async def generate(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[TokenOutput]:
        """See `EngineClient.generate`."""
        self._alive()
        if request_id in self._names:
            raise RequestError(f"request id {request_id!r} is already in use", "request_id")
        stream: asyncio.Queue[TokenOutput | Exception] = asyncio.Queue()
        name = self._names[request_id] = f"{request_id}#{next(self._count)}"
        self._streams[name] = stream
        done = False
        try:
            self._submit(name, tokens, params, priority, cache_salt)
            while not done:
                item = await stream.get()
                if isinstance(item, Exception):
                    done = True
                    raise item
                done = item.finish is not None
                item.request_id = request_id
                if item.error_param is not None:
                    raise RequestError(item.error or "the request is wrong", item.error_param)
                yield item
        finally:
            del self._streams[name], self._names[request_id]
            if not done:
                self._drop(name)

    async def abort(self, request_id: str) -> None:
        """Ends the request; its stream closes with `FinishReason.ABORT`."""
        name = self._names.get(request_id)
        if name is not None:
            self._drop(name)
            self._streams[name].put_nowait(TokenOutput(request_id, [], finish=FinishReason.ABORT))
