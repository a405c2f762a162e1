"""The engine on a thread of the front end's own process.

Room: one implementation of `EngineClient`. Rule: the core belongs to its thread alone; everything
else reaches it through the inbox, and one step's outputs cross back in one wake-up of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from rimuru.errors import EngineDeadError, RequestError

from .client import EngineInfo
from .config import EngineConfig
from .core import EngineCore
from .request import SamplingParams
from .stats import EngineStats
from .streams import StreamingClient

logger = logging.getLogger("rimuru.engine")

STALL_SECONDS = 300.0  # a step that takes longer is reported as dead


class InProcessClient(StreamingClient):
    """`EngineClient` over a core on a daemon thread. Create, `await start()`, use, `await close()`."""

    info: EngineInfo

    def __init__(self, config: EngineConfig, progress: Callable[[str, float], None] | None = None):
        super().__init__()
        self._config, self._progress = config, progress
        self._inbox: queue.SimpleQueue[Callable[[EngineCore], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat = time.monotonic()
        self._busy = False

    async def start(self) -> None:
        """Load the model on the engine's thread; raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="rimuru-engine", daemon=True)
        self._thread.start()
        self.info = await ready

    # -- the engine's thread ---------------------------------------------------------------

    def _run(self, ready: asyncio.Future[EngineInfo]) -> None:
        assert self._loop is not None
        try:
            core = EngineCore(self._config, self._progress)
        except BaseException as error:
            self._dead = error
            self._loop.call_soon_threadsafe(_settle, ready, None, error)
            return
        self._loop.call_soon_threadsafe(_settle, ready, core.info, None)
        try:
            self._serve(core)
            self._dead = EngineDeadError("the engine was closed")
        except BaseException as error:
            logger.exception("the engine stopped")
            self._dead = error
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self._fail_all)

    def _serve(self, core: EngineCore) -> None:
        while True:
            self._busy = core.has_work
            wait = not self._busy
            while True:
                try:
                    command = self._inbox.get(block=wait)
                except queue.Empty:
                    break
                if command is None:
                    return
                command(core)
                wait = False
            self._beat = time.monotonic()
            self._busy = core.has_work
            if self._busy:
                outputs = core.step()
                if outputs:
                    self._post(self._dispatch, outputs)
                elif core.stalled:
                    time.sleep(0.001)  # nothing fits until something outside changes

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call, *args)

    # -- the front end's loop --------------------------------------------------------------

    def _submit(
        self, request_id: str, tokens: list[int], params: SamplingParams, priority: int, cache_salt: str
    ) -> None:
        def add(core: EngineCore) -> None:
            try:
                core.add(request_id, tokens, params, priority=priority, cache_salt=cache_salt)
            except RequestError as error:
                self._post(self._refuse, request_id, error)

        self._inbox.put(add)

    def _drop(self, request_id: str) -> None:
        self._inbox.put(lambda core: core.abort(request_id))

    async def _call(self, work: Callable[[EngineCore], Any]) -> Any:
        self._alive()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def command(core: EngineCore) -> None:
            try:
                value = work(core)
            except Exception as error:
                self._post(_settle, future, None, error)
            else:
                self._post(_settle, future, value, None)

        self._inbox.put(command)
        while not future.done():  # a dying engine never answers; look up now and then
            await asyncio.wait([future], timeout=0.5)
            if not future.done():
                self._alive()
        return future.result()

    async def stats(self) -> EngineStats:
        return await self._call(lambda core: core.stats())

    async def reset_prefix_cache(self) -> bool:
        return await self._call(lambda core: core.reset_prefix_cache())

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the thread ended or one step has hung for minutes."""
        self._alive()
        if self._thread is None or not self._thread.is_alive():
            raise EngineDeadError("the engine's thread is not running")
        if self._busy and time.monotonic() - self._beat > STALL_SECONDS:
            raise EngineDeadError(f"one step has taken more than {STALL_SECONDS:.0f} s")

    async def close(self) -> None:
        self._inbox.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 30.0)


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
