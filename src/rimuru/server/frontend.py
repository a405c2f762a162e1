"""From token ids to an engine and back as text: one `Job` a request, one `Delta` an output.

Room: between the HTTP routes and the `EngineClient`. Rule: whatever ends a job (its end, a stop
string, a client that left, a deadline, an error) closes the engine's iterators, so nothing runs on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from rimuru.engine.client import EngineClient
from rimuru.engine.request import MAX_SEED, FinishReason, SamplingParams, TokenLogprobs
from rimuru.engine.text import TextStream, Vocabulary
from rimuru.errors import RequestError

from .errors import ApiError
from .metrics import Metrics
from .prompts import Prompts
from .settings import ServerSettings


@dataclass(slots=True)
class Delta:
    """What came since the last one for choice `index`; `finish` marks its last."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0

    def absorb(self, later: Delta) -> None:
        """Append a later delta of the same choice."""
        self.text += later.text
        self.tokens += later.tokens
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish, self.stop_reason = later.finish, later.stop_reason


class Job:
    """One HTTP request: every prompt times `params.n` choices, numbered prompt by prompt."""

    def __init__(
        self,
        frontend: Frontend,
        kind: str,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        model: str,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ):
        self.frontend = frontend
        self.id = f"{kind}-{request_id or uuid.uuid4().hex}"
        self.model = model
        self.created = int(time.time())
        self.arrival = time.perf_counter()
        self.prompts = prompts
        self.params = params
        self.priority = priority
        self.cache_salt = cache_salt
        self.prompt_tokens = sum(map(len, prompts))
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.expired = False
        self._engine_ids: list[str] = []

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Deltas of all choices as they come. Closing it aborts what still runs.

        Raises `RequestError` before the first delta where the engine refuses the request, `ApiError`
        when a choice fails, the deadline passes or the server shuts down.
        """
        limit = self.frontend.settings.request_timeout
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(limit, self._expire) if limit else None
        n = self.params.n
        try:
            async with aclosing(
                merge([self._choice(i, i // n) for i in range(n * len(self.prompts))])
            ) as all_:
                async for delta in all_:
                    self.completion_tokens += len(delta.tokens)
                    yield delta
        finally:
            if deadline:
                deadline.cancel()

    async def _choice(self, index: int, prompt: int) -> AsyncGenerator[Delta, None]:
        front, params = self.frontend, self.params
        if params.n > 1 or len(self.prompts) > 1:
            step = index % params.n
            seed = params.seed
            if seed is not None:
                seed = seed + step if seed + step <= MAX_SEED else seed - step
            params = dataclasses.replace(params, n=1, seed=seed)
        text = TextStream(front.vocabulary, params)
        interval = front.settings.stream_interval
        gathered: Delta | None = None
        async with front.track(self, index) as life:
            outputs = front.client.generate(
                life.engine_id,
                self.prompts[prompt],
                params,
                priority=self.priority,
                cache_salt=self.cache_salt,
            )
            async with aclosing(cast(AsyncGenerator[Any, None], outputs)):
                async for out in outputs:
                    first = life.on_output(len(out.tokens))
                    if out.finish in (FinishReason.ERROR, FinishReason.ABORT):
                        life.reason = out.finish
                        raise self._failure(out.finish, out.error)
                    piece = text.push(out.tokens, out.finish, out.stop_reason)
                    delta = Delta(index, piece, out.tokens, out.logprobs)
                    if text.consumed != len(out.tokens):
                        delta.tokens = out.tokens[: text.consumed]
                        delta.logprobs = out.logprobs and out.logprobs[: text.consumed]
                    delta.finish, delta.stop_reason = text.finish, text.stop_reason
                    if first:
                        delta.prompt_logprobs = out.prompt_logprobs
                        delta.num_cached = out.num_cached
                        if index % self.params.n == 0:
                            self.cached_tokens += out.num_cached
                    if interval > 1 and not first:
                        if gathered is None:
                            gathered = delta
                        else:
                            gathered.absorb(delta)
                        if text.finish is None and len(gathered.tokens) < interval:
                            continue
                        delta, gathered = gathered, None
                    if text.finish is not None:
                        life.reason = text.finish
                        yield delta
                        return
                    yield delta
            raise ApiError(500, "The engine ended this request without saying why.")

    def _failure(self, finish: FinishReason, error: str | None) -> ApiError:
        if finish is FinishReason.ERROR:
            return ApiError(500, error or "The request failed in the engine.")
        if self.expired:
            limit = self.frontend.settings.request_timeout
            return ApiError(
                504, f"The request took longer than --request-timeout {limit:g} s and was stopped."
            )
        if self.frontend.draining:
            return ApiError(503, "The server is shutting down; the request was stopped before its end.")
        return ApiError(500, error or "The request was aborted in the engine.")

    def _expire(self) -> None:
        self.expired = True
        self.frontend.abort_soon(self._engine_ids)


class _Life:
    """One choice in the engine: its id, and the times the histograms need."""

    def __init__(self, frontend: Frontend, job: Job, index: int):
        self.frontend = frontend
        self.job = job
        # Never used twice, as a client may reuse its own: what the engine still sends for an aborted
        # request must not reach the next one.
        self.engine_id = f"{job.id}-{index}-{next(frontend.serial):x}"
        self.reason: FinishReason = FinishReason.ABORT  # until something else ends it
        self.first_at = 0.0
        self.last_at = 0.0
        self.num_tokens = 0

    async def __aenter__(self) -> _Life:
        self.frontend.active[self.engine_id] = self
        self.frontend.waiting[self.engine_id] = self.job.arrival
        self.job._engine_ids.append(self.engine_id)
        return self

    def on_output(self, tokens: int) -> bool:
        """Note an output; True for the first."""
        now = time.perf_counter()
        metrics = self.frontend.metrics
        first = not self.first_at
        if first:
            self.first_at = now
            self.frontend.waiting.pop(self.engine_id, None)
            metrics.ttft.observe(now - self.job.arrival)
        elif tokens:
            gap = (now - self.last_at) / tokens
            for _ in range(tokens):
                metrics.inter_token.observe(gap)
        self.last_at = now
        self.num_tokens += tokens
        return first

    async def __aexit__(self, *exc: object) -> None:
        front = self.frontend
        front.active.pop(self.engine_id, None)
        front.waiting.pop(self.engine_id, None)
        front.metrics.on_finish(self.reason, time.perf_counter() - self.job.arrival)
        if self.num_tokens > 1:
            front.metrics.per_token.observe((self.last_at - self.first_at) / (self.num_tokens - 1))


class Frontend:
    """The state all requests of a server share."""

    def __init__(self, client: EngineClient, prompts: Prompts, settings: ServerSettings):
        self.client = client
        self.info = client.info
        self.prompts = prompts
        self.vocabulary = Vocabulary(prompts.backend)
        self.settings = settings
        self.metrics = Metrics(client, settings.served_names[0])
        self.active: dict[str, _Life] = {}
        self.waiting: dict[str, float] = {}  # engine ids without a first token yet, oldest first
        self.draining = False
        self.serial = itertools.count()
        self._aborts: set[asyncio.Task[Any]] = set()

    def track(self, job: Job, index: int) -> _Life:
        return _Life(self, job, index)

    def admit(self, model: str | None, priority: int) -> str:
        """The name to answer under, or `ApiError`: 404 unknown model, 429 queue full, 503 shutting down."""
        names = self.settings.served_names
        if model is not None and model not in names:
            raise ApiError(
                404,
                f"The model {model!r} does not exist here; this server serves {', '.join(names)}.",
                "model",
            )
        if priority and not self.settings.honour_priority:
            raise RequestError("priority needs --scheduling-policy priority", "priority")
        if self.draining:
            raise ApiError(503, "The server is shutting down.", headers={"retry-after": "5"})
        limit = self.settings.max_queue
        if limit is not None and len(self.waiting) >= limit:
            # What the oldest has waited is the best guess of what the next one would.
            waited = time.perf_counter() - min(self.waiting.values(), default=time.perf_counter())
            raise ApiError(
                429,
                f"{len(self.waiting)} requests wait for their first token already (--max-queue {limit}).",
                headers={"retry-after": str(min(30, max(1, round(waited))))},
            )
        return model or names[0]

    def abort_soon(self, engine_ids: list[str]) -> None:
        """Ask the engine to stop these; their iterators then end with `abort`."""
        for engine_id in engine_ids:
            task = asyncio.ensure_future(self.client.abort(engine_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def drain(self, limit: float) -> None:
        """Refuse new requests, let running ones end for `limit` seconds, then stop the rest."""
        self.draining = True
        end = time.perf_counter() + limit
        while self.active and time.perf_counter() < end:
            await asyncio.sleep(0.05)
        self.abort_soon(list(self.active))
        end = time.perf_counter() + 2.0
        while self.active and time.perf_counter() < end:
            await asyncio.sleep(0.02)


async def merge(streams: list[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Items of all streams as they come; the first exception ends all, closing closes all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield delta
        return
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncIterator[Delta]) -> None:
        try:
            async for delta in stream:
                queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as exc:
            queue.put_nowait(exc)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
