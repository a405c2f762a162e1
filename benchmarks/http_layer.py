"""How many streamed tokens a second the HTTP layer carries, and what it adds to a token's way.

A stub engine makes tokens in another process's server; this process is the client: N streams of chat
over plain sockets, one token a chunk. Two measurements: `rate`, tokens as fast as they go, and
`paced`, every stream at a fixed interval, where the added inter-token latency shows.

    python benchmarks/http_layer.py [--streams 64] [--tokens 400] [--api chat|completions]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Row(NamedTuple):
    """One run: tokens a second over all streams, p99 gap between tokens in s, CPU time a token."""

    rate: float
    p99_gap: float
    server_us: float
    client_us: float


def serve(fd: int, delay: float) -> None:
    """The server's process: the application over the stub engine, on an inherited socket."""
    sys.path.insert(0, str(ROOT / "tests"))
    import uvicorn
    from server.stub_engine import StubEngine
    from support.tiny import tiny_tokenizer

    from rimuru.models.tokenizer import Tokenizer
    from rimuru.server.app import create_app
    from rimuru.server.frontend import Frontend
    from rimuru.server.prompts import Prompts
    from rimuru.server.settings import ServerSettings

    tokenizer = Tokenizer(tiny_tokenizer())
    words = tokenizer.encode("the of and to in that it was for on are with as his they be at one " * 200)
    engine = StubEngine(
        max_model_len=16384, answer=lambda prompt, params: words[: params.max_tokens], delay=delay
    )
    frontend = Frontend(engine, Prompts(tokenizer, engine.info), ServerSettings(["stub"]))
    uvicorn.run(create_app(frontend), fd=fd, log_level="error", loop="auto", http="httptools")


async def stream(port: int, path: str, tokens: int) -> list[float]:
    """One request; the arrival time of each event with text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    body = json.dumps({"stream": True, "max_tokens": tokens, "ignore_eos": True, **prompt}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    arrivals: list[float] = []
    tail = b""
    while b"[DONE]" not in tail:
        data = await reader.read(65536)
        if not data:
            raise RuntimeError(f"the connection ended early: {tail!r}")
        now = time.perf_counter()
        arrivals += [now] * data.count(b'"finish_reason"')
        tail = (tail + data)[-64:]
    writer.close()
    expected = tokens + ("chat" in path)  # chat begins with a chunk that has the role only
    if len(arrivals) != expected:
        raise RuntimeError(f"{len(arrivals)} chunks instead of {expected}")
    return arrivals[-tokens:]


async def load(port: int, path: str, streams: int, tokens: int) -> tuple[float, list[list[float]]]:
    began = time.perf_counter()
    arrivals = await asyncio.gather(*(stream(port, path, tokens) for _ in range(streams)))
    return time.perf_counter() - began, arrivals


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(path: str, streams: int, tokens: int, delay: float, repeats: int) -> list[Row]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        fd = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve-fd", str(fd), "--delay", str(delay)], pass_fds=[fd]
        )
        try:
            port = listener.getsockname()[1]
            await load(port, path, streams, 10)  # waits for the server, warms it up
            rows = []
            for _ in range(repeats):
                before = cpu_seconds(server.pid), cpu_seconds(os.getpid())
                seconds, arrivals = await load(port, path, streams, tokens)
                gaps = [b - a for row in arrivals for a, b in itertools.pairwise(row)]
                made = streams * tokens
                rows.append(
                    Row(
                        rate=made / seconds,
                        p99_gap=statistics.quantiles(gaps, n=100)[98],
                        server_us=(cpu_seconds(server.pid) - before[0]) / made * 1e6,
                        client_us=(cpu_seconds(os.getpid()) - before[1]) / made * 1e6,
                    )
                )
            return rows
        finally:
            server.terminate()
            server.wait(10)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--api", choices=["chat", "completions"], default="chat")
    parser.add_argument(
        "--interval", type=float, default=0.02, help="seconds a token in the paced measurement"
    )
    parser.add_argument("--serve-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--delay", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve_fd is not None:
        serve(args.serve_fd, args.delay)
        return 0
    path = "/v1/chat/completions" if args.api == "chat" else "/v1/completions"
    rate = asyncio.run(measure(path, args.streams, args.tokens, 0.0, args.repeats))
    paced = asyncio.run(measure(path, args.streams, args.tokens // 4, args.interval, args.repeats))
    print(f"{args.streams} streams, {args.tokens} tokens each, {path}, client included")
    print("  rate:  " + ", ".join(f"{row.rate:,.0f}" for row in rate) + " tokens/s")
    server, client = min(row.server_us for row in rate), min(row.client_us for row in rate)
    print(f"  CPU time a token: server {server:.0f} us, client {client:.0f} us")
    added = ", ".join(f"{(row.p99_gap - args.interval) * 1e3:.1f}" for row in paced)
    print(f"  paced at {args.interval * 1e3:g} ms a token: p99 gap above the interval {added} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
