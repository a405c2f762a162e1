"""Four chats at once with a real server whose memory cap cannot hold the model's experts.

Room: demo; a client of the command line and of HTTP, like any user. Rule: it judges what it shows, and
exits with an error where the answers or the bytes are not what they must be.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rimuru.errors import RimuruError

from .build import ensure_demo
from .display import Chat, Lines, Panes

# The first is worded so that the likeliest token leads by 1.5 or more at every step up to "Paris": bf16
# moves logits by up to a few tenths. Without its second sentence the lead is 0.1.
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Why is the sky blue?",
    "Give me three tips for learning to cook.",
    "Tell me a short story about a lighthouse keeper.",
)
ANSWER_TOKENS = 180
# The 240 experts alone are 1.27 GB; this leaves room for fewer than half beside the other weights and a
# step's workspace. At the start KV holds one request of the model's length; four chats need more, so
# experts must lend pages.
DEVICE_MEMORY = 800_000_000
# The policy that moves the boundary for everybody who waits: it shows the machinery at work.
SERVE_FLAGS = (
    "--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "256",
    "--memory-policy", "reactive",
)  # fmt: skip
START_SECONDS = 300
STOP_SECONDS = 40
POLL_SECONDS = 0.1


@dataclass(slots=True)
class PoolWatch:
    """What `/rimuru/pool` said over the run: the snapshot with most KV in use, the last one, and the
    numbers of resident experts that were seen."""

    peak: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    resident: set[int] = field(default_factory=set)

    def add(self, snapshot: dict[str, Any]) -> None:
        self.last = snapshot
        self.resident.add(snapshot["experts_resident"])
        if not self.peak or kv_bytes(snapshot) > kv_bytes(self.peak):
            self.peak = snapshot


def main(argv: Sequence[str] | None = None) -> int:
    """Build, serve, ask, report; 0 where all went as it must."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: the server must end too
    try:
        need_extras()
        folder = ensure_demo()
        print(f"model: {folder}")
        with running_server() as (url, server):
            chats, watch, moves = asyncio.run(converse(url))
        found = faults(chats, watch, server.returncode)
    except RimuruError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(report(watch, moves))
    for fault in found:
        print(f"demo failed: {fault}", file=sys.stderr)
    return 1 if found else 0


def need_extras() -> None:
    for module in ("gguf", "rich", "httpx", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(module) is None:
            raise RimuruError(
                f"{module} is not installed: `make setup`, or pip install '.[server,demo]' in the checkout"
            )


@contextlib.contextmanager
def running_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`rimuru serve demo` under the cap, ready to answer; ended with SIGTERM afterwards."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--host", "127.0.0.1", "--port", str(port), "--device-memory", str(DEVICE_MEMORY), *SERVE_FLAGS]
    command = [sys.executable, "-m", "rimuru.cli", "serve", "demo", *flags]
    print(f"$ rimuru {' '.join(command[3:])}")
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=scratch, env=dict(os.environ)
            )
        try:
            wait_until_healthy(url, server, log)
            yield url, server
        finally:
            server.terminate()
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Return when `/health` answers 200. Raises `RimuruError` with the end of the server's log."""
    import httpx

    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                print(f"server ready after {waited:.0f} s")
                return
        ended = server.poll() is not None
        if ended or waited > START_SECONDS:
            what = f"ended with code {server.returncode}" if ended else f"not ready after {waited:.0f} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise RimuruError(f"the server {what}; its last lines:\n{tail}")
        if sys.stdout.isatty():
            print(f"\rloading, {waited:.0f} s ", end="", flush=True)
        time.sleep(0.25)


async def converse(url: str) -> tuple[list[Chat], PoolWatch, dict[str, int]]:
    """All questions at once; their answers, the pool meanwhile, and the boundary's moves by name."""
    import httpx

    chats = [Chat(question) for question in QUESTIONS]
    watch = PoolWatch()
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(300)) as client:
        watch.add(await pool_snapshot(client))
        watcher = asyncio.create_task(poll(client, watch))
        with Panes(chats) if sys.stdout.isatty() else Lines(chats) as display:
            try:
                await asyncio.gather(*(ask(client, chat, display) for chat in chats))
            except httpx.HTTPError as error:
                raise RimuruError(f"the server broke off: {error!r}") from None
            finally:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
        watch.add(await pool_snapshot(client))
        metrics = (await client.get("/metrics")).text
    return chats, watch, boundary_moves(metrics)


async def poll(client: Any, watch: PoolWatch) -> None:
    while True:
        watch.add(await pool_snapshot(client))
        await asyncio.sleep(POLL_SECONDS)


async def pool_snapshot(client: Any) -> dict[str, Any]:
    response = await client.get("/rimuru/pool")
    response.raise_for_status()
    return response.json()


async def ask(client: Any, chat: Chat, display: Panes | Lines) -> None:
    """Stream one answer into `chat`."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": chat.question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode()
            raise RimuruError(f"the server refused {chat.question!r}: {response.status_code} {text}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RimuruError(f"{chat.question!r} broke off: {event['error']['message']}")
            for choice in event["choices"]:
                chat.answer += choice["delta"].get("content") or ""
                chat.finish = choice.get("finish_reason") or chat.finish
            display.show(chat)


def boundary_moves(metrics: str) -> dict[str, int]:
    """`rimuru_boundary_moves_total` of a Prometheus exposition, by "direction, cause"."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        f"{sample.labels['direction']}, {sample.labels['cause']}": int(sample.value)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "rimuru_boundary_moves_total"
    }


def kv_bytes(snapshot: dict[str, Any]) -> int:
    return sum(page["bytes"] for state, page in snapshot["kinds"].get("kv", {}).items() if state == "used")


def faults(chats: Sequence[Chat], watch: PoolWatch, exit_code: int | None) -> list[str]:
    """What contradicts the demo's claim, in words; empty where nothing does."""
    found = []
    if "Paris" not in chats[0].answer:
        found.append(f"asked for the capital of France, the model said {chats[0].answer!r}")
    for chat in chats:
        if not chat.answer.strip() or chat.finish not in ("stop", "length"):
            found.append(f"{chat.question!r} ended as {chat.finish!r} with {chat.answer!r}")
    if not 0 < watch.last["device_peak_bytes"] <= DEVICE_MEMORY:
        found.append(
            f"device bytes reached {watch.last['device_peak_bytes']:,}, the cap is {DEVICE_MEMORY:,}"
        )
    if max(watch.resident) >= watch.last["experts_total"]:
        found.append("every expert was resident: the cap is not tight")
    if not kv_bytes(watch.peak):
        found.append("the pool never held KV")
    if exit_code != 0:
        found.append(f"the server ended with code {exit_code} when told to stop")
    return found


def report(watch: PoolWatch, moves: dict[str, int]) -> str:
    """What the pool held when KV held most, and how the boundary moved."""
    peak, mib = watch.peak, 2**20
    lines = [f"the pool ({peak['pool_bytes'] / mib:.1f} MiB) when KV held most:"]
    for kind, states in sorted(peak["kinds"].items()):
        for state, held in sorted(states.items()):
            if held["bytes"]:
                share = held["bytes"] / peak["pool_bytes"]
                size = f"{held['bytes'] / mib:8.1f} MiB {share:6.1%} {held['pages']:6} pages"
                lines.append(f"  {kind:<8} {state:<9} {size}")
    least, most = min(watch.resident), max(watch.resident)
    by_name = "; ".join(f"{count} x {name}" for name, count in sorted(moves.items()) if count)
    lines += [
        f"experts in the pool: {least} to {most} of {peak['experts_total']}, the others read from the host",
        f"the boundary moved {sum(moves.values())} times ({by_name or 'never'})",
        f"device bytes at the peak: {watch.last['device_peak_bytes']:,} of {DEVICE_MEMORY:,} allowed",
    ]
    return "\n".join(lines)
