"""Clients killed on their sockets wherever requests are: every page comes back, answers stay the same."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from support.cores import cap_for
from support.tiny import tiny_checkpoint, tiny_prompts

import rimuru.engine.core
from rimuru.engine.config import EngineConfig
from rimuru.engine.core import EngineCore
from rimuru.engine.inprocess import InProcessClient
from rimuru.engine.request import Phase, Request
from rimuru.models.tokenizer import Tokenizer
from rimuru.policy.boundary import Swing
from rimuru.server.app import create_app
from rimuru.server.frontend import Frontend
from rimuru.server.prompts import Prompts
from rimuru.server.settings import ServerSettings

# Four run, the rest of a dozen wait; a long prompt takes five steps; memory for part of the experts only.
SHAPE = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "memory_policy": "reactive"}
CLIENTS = 12
MOMENTS = ("queued", "prefill", "decode", "promotion")
PATIENCE = 3.0  # seconds to wait for the moment wanted, after which the kill comes at any


class Site:
    """A server on a real socket over a real core whose boundary moves with every step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer):
        monkeypatch.setattr(rimuru.engine.core, "make_boundary", lambda *args, **options: Swing(0.2))
        cap = cap_for("qwen3_moe", 0.6, 500, **SHAPE)
        self.config = EngineConfig(
            str(tiny_checkpoint("qwen3_moe")), max_model_len=400, dtype="float32", device="cpu",
            device_memory=cap, enable_prefix_caching=False, debug_pool=True, **SHAPE,
        )  # fmt: skip
        self.tokenizer = tokenizer
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = self.listener.getsockname()[:2]
        self.url = f"http://{self.address[0]}:{self.address[1]}"
        self.cores: list[EngineCore] = []
        self.ready = threading.Event()
        self.server: uvicorn.Server | None = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self) -> None:
        client = InProcessClient(self.config)
        await client.start()
        await client._call(self.cores.append)
        self.frontend = Frontend(client, Prompts(self.tokenizer, client.info), ServerSettings(["tiny"]))
        self.server = uvicorn.Server(uvicorn.Config(create_app(self.frontend), log_level="error"))
        self.ready.set()
        await self.server.serve(sockets=[self.listener])
        await client.close()

    @property
    def core(self) -> EngineCore:
        return self.cores[0]

    def request(self, name: str) -> Request | None:
        """The engine's side of a client's request, as far as it is there."""
        for key in list(self.core.scheduler.requests):
            if key.startswith(f"cmpl-{name}-"):
                return self.core.scheduler.requests.get(key)
        return None

    def held(self) -> dict[tuple[str, str], int]:
        return {key: n for key, n in self.core.pool_stats().pages_by.items() if key[0] == "kv"}

    def answer(self) -> list[int]:
        body = {"prompt": tiny_prompts()[6], "max_tokens": 20, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).json()["choices"][0][
            "token_ids"
        ]

    def settle(self) -> None:
        end = time.monotonic() + 3  # far less than what the killed ones had still to generate
        while self.core.has_work or self.frontend.active:
            assert time.monotonic() < end, "something still runs"
            time.sleep(0.01)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Iterator[Site]:
    site = Site(monkeypatch, tokenizer)
    site.thread.start()
    assert site.ready.wait(60), "the engine did not start"
    try:
        yield site
    finally:
        assert site.server is not None
        site.server.should_exit = True
        site.thread.join(20)
        site.listener.close()
        assert not site.thread.is_alive(), "the server did not stop"


async def kill_one(site: Site, name: str, moment: str, rng: random.Random, seen: Counter[str]) -> None:
    """Send a request, wait for `moment`, cut the connection; `seen` counts where it was cut."""
    stream = rng.random() < 0.7
    size = 150 if moment == "prefill" else rng.choice((3, 20, 90))
    body = json.dumps(
        {"prompt": [rng.randrange(3, 640) for _ in range(size)], "max_tokens": 200, "stream": stream,
         "ignore_eos": True, "temperature": 0, "request_id": name, "n": rng.choice((1, 1, 1, 2))}
    ).encode()  # fmt: skip
    _, writer = await asyncio.open_connection(*site.address)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    end = time.monotonic() + PATIENCE
    moved = site.core.memory.promotions
    where = "gone"
    while time.monotonic() < end:
        request = site.request(name)
        if request is not None:
            if request.phase is not Phase.RUNNING:
                where = "queued"
            elif request.num_computed < request.num_prompt:
                where = "prefill"
            else:
                where = "promotion" if site.core.memory.promotions != moved else "decode"
            if where == moment:
                break
        moved = site.core.memory.promotions
        await asyncio.sleep(0.001)
    seen[where] += 1
    if rng.random() < 0.5:
        writer.transport.abort()  # a reset, as of a process that was killed
    else:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def storm(site: Site, kills: int) -> Counter[str]:
    rng, seen, numbers = random.Random(0), Counter[str](), itertools.count()

    async def client() -> None:
        while (number := next(numbers)) < kills:
            await kill_one(site, f"k{number}", MOMENTS[number % len(MOMENTS)], rng, seen)

    async def all_of_them() -> None:
        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    asyncio.run(all_of_them())
    return seen


def test_kills_in_every_phase_leave_the_pool_as_it_was(site: Site) -> None:
    before, baseline = site.answer(), site.held()
    seen = storm(site, 60)
    site.settle()
    assert site.held() == baseline
    assert site.answer() == before
    assert all(seen[moment] for moment in MOMENTS), seen


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_thousand_kills_leave_the_pool_as_it_was(site: Site) -> None:
    before, baseline = site.answer(), site.held()
    seen = storm(site, 1000)
    site.settle()
    assert site.held() == baseline
    assert site.answer() == before
    assert all(seen[moment] >= 30 for moment in MOMENTS), seen
    metrics = httpx.get(f"{site.url}/metrics", timeout=20).text
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in metrics
