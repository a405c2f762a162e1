"""A real server on a real socket over the stub engine, and the clients that talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from support.tiny import tiny_tokenizer

from rimuru.models.tokenizer import Tokenizer
from rimuru.server.app import create_app
from rimuru.server.frontend import Frontend
from rimuru.server.prompts import Prompts
from rimuru.server.settings import ServerSettings
from server.stub_engine import StubEngine


@dataclass
class Live:
    """A running server: its address, its engine, its state."""

    url: str
    engine: StubEngine
    frontend: Frontend
    loop: asyncio.AbstractEventLoop

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, **options)

    def call(self, work: Callable[[], Any]) -> Any:
        """Run something on the server's own loop."""

        async def inner() -> Any:
            result = work()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(inner(), self.loop).result(10)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it never came to be"
            time.sleep(0.005)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Callable[..., Live]]:
    """`serve(engine, **settings)` starts a server that lives as long as the test."""
    with contextlib.ExitStack() as stack:

        def start(
            engine: StubEngine | None = None,
            template: str | None = None,
            trust_request_template: bool = False,
            **settings: Any,
        ) -> Live:
            engine = engine or StubEngine()
            prompts = Prompts(tokenizer, engine.info, template, trust_request_template)
            frontend = Frontend(engine, prompts, ServerSettings(**{"served_names": ["stub"], **settings}))
            return stack.enter_context(listening(frontend, engine))

        yield start


@contextlib.contextmanager
def listening(frontend: Frontend, engine: StubEngine) -> Iterator[Live]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(create_app(frontend), log_level="error", timeout_graceful_shutdown=1)
        )
        loops: list[asyncio.AbstractEventLoop] = []

        async def main() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(sockets=[listener])

        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield Live(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, frontend, loops[0])
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive(), "the server did not stop"
