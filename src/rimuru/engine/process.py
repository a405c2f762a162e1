"""The engine in a process of its own, reached over a socket.

Room: one implementation of `EngineClient`, and the loop of the process behind it. Rule: each side
watches the other's life itself, not a timer: a process that is gone is noticed at once, one that hangs
after `STALL_SECONDS`; nothing waits for the dead.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import faulthandler
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import zmq

import rimuru.errors
from rimuru.errors import EngineDeadError, RequestError, RimuruError

from . import wire
from .client import EngineInfo
from .config import EngineConfig
from .request import SamplingParams
from .stats import EngineStats
from .streams import StreamingClient

logger = logging.getLogger("rimuru.engine")

STALL_SECONDS = 300.0  # a step that takes longer is reported as dead
STATS_SECONDS = 0.5  # how long `stats` waits for the step under way before it answers from memory
CLOSE_SECONDS = 5.0  # a core that was told to stop has so long to finish its step
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SOCKET_PATH_LIMIT = 107  # bytes, of sockaddr_un


class ProcessClient(StreamingClient):
    """`EngineClient` over a core in a child process. Create, `await start()`, use, `await close()`."""

    info: EngineInfo

    def __init__(self, config: EngineConfig, progress: Callable[[str, float], None] | None = None):
        super().__init__()
        self._config, self._progress = config, progress
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ping: tuple[asyncio.Future[Any], float] | None = None  # one that waits, and since when
        self._stats_call: asyncio.Future[Any] | None = None
        self._stats = EngineStats()
        self._process: Any = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """The core's process id."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process and load the model there; raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        self._folder = _private_folder()
        self._context = zmq.Context()
        self._inbox, self._outbox = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for end in (self._inbox, self._outbox):
            end.set_hwm(0)  # a message is never dropped for want of room
            end.linger = 0
        self._inbox.bind(f"ipc://{self._folder}/out")
        self._outbox.connect(f"ipc://{self._folder}/in")  # where the core will bind
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        spawn = multiprocessing.get_context("spawn")
        level = logging.getLogger().getEffectiveLevel()
        self._process = spawn.Process(
            target=run_core, args=(self._config, self._folder, level), name="rimuru-engine", daemon=True
        )
        self._process.start()
        # Registered after multiprocessing's own exit handler and so run before it: that one sends
        # SIGTERM, which the core leaves to its parent, and would wait for ever.
        atexit.register(self._process.kill)
        self._loop.add_reader(int(self._inbox.getsockopt(zmq.FD)), self._receive)
        self._loop.add_reader(self._process.sentinel, self._on_exit)
        self._receive()
        try:
            self.info = await self._ready
        except BaseException:
            await self.close()
            raise

    # -- what comes from the core ----------------------------------------------------------

    def _receive(self) -> None:
        # The descriptor only tells of changes, so everything there is must be taken.
        while True:
            try:
                raw = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(wire.decode_event(raw))

    def _take(self, event: Any) -> None:
        match event:
            case wire.Outputs():
                self._dispatch(wire.unpack_outputs(event))
            case wire.Refused(request_id, message, param):
                self._refuse(request_id, RequestError(message, param))
            case wire.Answer(number, value, error):
                future = self._calls.pop(number)
                if isinstance(value, EngineStats):
                    # Samples are handed over once: those that came too late for their call go with these.
                    value.finished[:0] = self._stats.finished
                    value.step_tokens[:0] = self._stats.step_tokens
                    self._stats = value
                if not future.done():
                    if error is None:
                        future.set_result(value)
                    else:
                        future.set_exception(RuntimeError(error))
            case wire.Loading(what, share):
                if self._progress:
                    self._progress(what, share)
            case wire.Ready(info):
                self._ready.set_result(info)
            case wire.Failed(kind, message):
                self._ready.set_exception(_error_of(kind, message))
            case wire.Died(message):
                self._die(EngineDeadError(message))

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._receive()  # its last words
        self._process.join()
        self._die(EngineDeadError(_obituary(self._process.exitcode)))

    def _die(self, cause: BaseException) -> None:
        if self._dead is not None:
            return
        self._dead = cause
        if not self._closing:
            logger.error("%s", cause)
        if not self._ready.done():
            self._ready.set_exception(cause)
        self._fail_all()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(f"the engine stopped: {cause}"))
                future.exception()  # whoever waited may be gone; that is no news then
        self._calls.clear()

    # -- what goes to the core -------------------------------------------------------------

    def _send(self, message: wire.Message) -> None:
        if self._dead is None:
            self._outbox.send(wire.encode(message), zmq.NOBLOCK)

    def _submit(
        self, request_id: str, tokens: list[int], params: SamplingParams, priority: int, cache_salt: str
    ) -> None:
        params.check(self.info.vocab_size)  # what cannot cross the socket is refused on this side
        self._send(wire.Add(request_id, wire.pack_tokens(tokens), params, priority, cache_salt))

    def _drop(self, request_id: str) -> None:
        self._send(wire.Abort(request_id))

    def _call(self, method: str) -> asyncio.Future[Any]:
        self._alive()
        number, future = next(self._numbers), self._loop.create_future()
        self._calls[number] = future
        self._send(wire.Call(number, method))
        return future

    async def stats(self) -> EngineStats:
        """A snapshot; during a long step the last one, without its samples, after half a second."""
        self._alive()
        call = self._stats_call
        if call is None or call.done():
            call = self._stats_call = self._call("stats")
        await asyncio.wait([call], timeout=STATS_SECONDS)
        if call.done():
            call.result()
        found, self._stats = self._stats, _without_samples(self._stats)
        return found

    async def reset_prefix_cache(self) -> bool:
        return await self._call("reset_prefix_cache")

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the process ended or one step has hung for minutes."""
        self._alive()
        if self._ping is None or self._ping[0].done():
            self._ping = self._call("ping"), time.monotonic()
        elif time.monotonic() - self._ping[1] > STALL_SECONDS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)  # prints where every thread of it stands
            await asyncio.sleep(0.2)
            self._process.kill()
            self._die(EngineDeadError(f"one step has taken more than {STALL_SECONDS:.0f} s"))
            self._alive()

    async def close(self) -> None:
        """End the process, gently if it listens; every stream still open gets `EngineDeadError`."""
        if self._closing or self._process is None:
            return
        self._closing = True
        self._send(wire.Stop())
        await asyncio.to_thread(self._process.join, CLOSE_SECONDS if self._ready_well() else 0.0)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        self._loop.remove_reader(self._process.sentinel)
        self._loop.remove_reader(int(self._inbox.getsockopt(zmq.FD)))
        self._die(EngineDeadError("the engine was closed"))
        atexit.unregister(self._process.kill)
        self._inbox.close()
        self._outbox.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ready_well(self) -> bool:
        return self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None


def _without_samples(stats: EngineStats) -> EngineStats:
    return dataclasses.replace(stats, finished=[], step_tokens=[])


def _private_folder() -> str:
    """A folder for the sockets that nobody else can enter, with a path that sockets accept."""
    folder = tempfile.mkdtemp(prefix="rimuru-")
    if len(os.fsencode(folder)) + len("/out") <= _SOCKET_PATH_LIMIT:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="rimuru-", dir="/tmp")


def _error_of(kind: str, message: str) -> Exception:
    """The error that loading raised there, as its own class where it is one of ours."""
    found = getattr(rimuru.errors, kind, None)
    if isinstance(found, type) and issubclass(found, RimuruError):
        return found(message)
    return RuntimeError(f"{kind}: {message}")


def _obituary(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        number = -exitcode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = "; the system may be out of memory" if number == signal.SIGKILL else ""
        return f"the engine's process was killed by {name}{hint}"
    return f"the engine's process ended with code {exitcode}"


# -- the core's process ------------------------------------------------------------------------


def run_core(config: EngineConfig, folder: str, log_level: int) -> None:
    """The whole life of the core's process: load, serve until told to stop."""
    # A terminal or a supervisor signals both processes; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _leave_a_core()  # before torch is imported, which reads it then
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=log_level, format=LOG_FORMAT)
    threading.Thread(target=_die_with_parent, args=(folder,), name="rimuru-parent", daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for end in (inbox, outbox):
        end.set_hwm(0)
        end.linger = 1000
    inbox.bind(f"ipc://{folder}/in")
    outbox.connect(f"ipc://{folder}/out")
    try:
        _CoreLoop(config, inbox, outbox).run()
    finally:
        inbox.close()
        outbox.close()
        context.term()


def _leave_a_core() -> None:
    """Keep OpenMP off one core, the front end's, unless the user says how many threads there are.

    Between short operations its threads spin, and a front end that has to share a core with them costs more
    tokens than the last thread brings.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores - 1)))


def _die_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)  # in the middle of a step too: nobody waits for it


class _CoreLoop:
    """Commands in, steps, outputs out."""

    def __init__(self, config: EngineConfig, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]):
        self.config, self.inbox, self.outbox = config, inbox, outbox

    def send(self, message: wire.Message) -> None:
        self.outbox.send(wire.encode(message))

    def run(self) -> None:
        from .core import EngineCore  # brings torch, whose import may fail: reported like all of loading

        try:
            core = EngineCore(self.config, lambda what, share: self.send(wire.Loading(what, share)))
        except Exception as error:
            if not isinstance(error, RimuruError):
                logger.exception("loading failed")
            self.send(wire.Failed(type(error).__name__, str(error)))
            return
        self.send(wire.Ready(core.info))
        try:
            self.serve(core)
        except BaseException as error:
            logger.exception("the engine stopped")
            self.send(wire.Died(f"{type(error).__name__}: {error}"))

    def serve(self, core: Any) -> None:
        while True:
            if not core.has_work:
                self.inbox.poll()
            while True:
                try:
                    raw = self.inbox.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                command = wire.decode_command(raw)
                if isinstance(command, wire.Stop):
                    return
                self.obey(core, command)
            if core.has_work:
                outputs = core.step()
                if outputs:
                    self.outbox.send(wire.pack_outputs(outputs))
                elif core.stalled:
                    self.inbox.poll(1)  # nothing fits until something outside changes

    def obey(self, core: Any, command: Any) -> None:
        match command:
            case wire.Add(request_id, tokens, params, priority, salt):
                try:
                    core.add(
                        request_id, wire.unpack_tokens(tokens), params, priority=priority, cache_salt=salt
                    )
                except RequestError as error:
                    self.send(wire.Refused(request_id, str(error), error.param))
            case wire.Abort(request_id):
                core.abort(request_id)
            case wire.Call(number, "ping"):
                self.send(wire.Answer(number, None, None))
            case wire.Call(number, method):
                try:
                    self.send(wire.Answer(number, getattr(core, method)(), None))
                except Exception as error:
                    logger.exception("%s failed", method)
                    self.send(wire.Answer(number, None, f"{type(error).__name__}: {error}"))
