"""Load on any OpenAI server: when tokens come, how many, and how many requests met their objectives.

Room: benchmarks; a client, imports nothing of the server. Rule: one connection a request on a plain
socket, so that the client's own time stays small; result keys are those of `vllm bench serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import ssl
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rimuru.errors import ConfigError, RimuruError

from . import _workload
from ._workload import Planned

OBJECTIVES = ("ttft", "tpot", "e2el")
CHAT = "/v1/chat/completions"
DEFAULT_VOCAB = 1000  # where a server does not tell its own: ids that any vocabulary has
_LINE_LIMIT = 1 << 22


@dataclass(slots=True)
class Outcome:
    """One request. Times in seconds; `gaps` are those between chunks with text."""

    planned: Planned
    error: str = ""
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    began: float = 0.0  # since the start of the run

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Target:
    """A server and how to ask it."""

    def __init__(self, args: argparse.Namespace):
        parts = urlsplit(args.base_url or f"http://{args.host}:{args.port}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {args.base_url!r}: write it as http://host:port")
        self.host, self.tls = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.key = args.api_key
        self.endpoint = args.endpoint
        self.model: str = args.model or ""
        self.vocab_size = DEFAULT_VOCAB
        self.extra = _extra_body(args)

    async def discover(self, tokenizer_vocab: int | None) -> None:
        """Name of the model and size of its vocabulary, as far as the server tells."""
        if not self.model:
            status, body = await self.get("/v1/models")
            try:
                self.model = json.loads(body)["data"][0]["id"]
            except (ValueError, LookupError, TypeError):
                raise RimuruError(f"/v1/models answered {status} and lists no model; give --model") from None
        if tokenizer_vocab is None:
            status, body = await self.get("/tokenizer_info")
            if status == 200:
                self.vocab_size = int(json.loads(body).get("vocab_size", DEFAULT_VOCAB))
        else:
            self.vocab_size = tokenizer_vocab

    async def get(self, path: str) -> tuple[int, bytes]:
        async with _Exchange(self, "GET", path, b"") as answer:
            return answer.status, b"".join([part async for part in answer.parts()])

    def body(self, planned: Planned, seed: int) -> bytes:
        """The request as JSON. Chat carries words, completions carry token ids of exact count."""
        asked: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": planned.output}
        if self.endpoint == CHAT:
            content = _workload.text_prompt(planned.prompt, seed)
            asked["messages"] = [{"role": "user", "content": content}]
        else:
            asked["prompt"] = _workload.token_prompt(planned.prompt, self.vocab_size, seed)
        asked["stream_options"] = {"include_usage": True}
        return json.dumps({**asked, **self.extra}).encode()

    async def send(self, planned: Planned, seed: int, start: float) -> Outcome:
        """One streamed request, timed from before the connection is made."""
        body = self.body(planned, seed)
        began = last = time.perf_counter()
        out = Outcome(planned, began=began - start)
        pieces = []
        chunks = 0
        try:
            async with _Exchange(self, "POST", self.endpoint, body) as answer:
                if answer.status != 200:
                    said = b"".join([part async for part in answer.parts()])
                    out.error = f"{answer.status}: {said[:300].decode(errors='replace')}"
                    return out
                async for event in answer.events():
                    now = time.perf_counter()
                    if "error" in event:
                        out.error = str(event["error"].get("message", event["error"]))
                        return out
                    usage = event.get("usage")
                    if usage:
                        out.prompt_tokens = usage.get("prompt_tokens") or 0
                        out.output_tokens = usage.get("completion_tokens") or 0
                    text = _text_of(event)
                    if text is None:
                        continue
                    pieces.append(text)
                    chunks += 1
                    if chunks == 1:
                        out.ttft = now - began
                    else:
                        out.gaps.append(now - last)
                    last = now
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            out.error = f"{type(error).__name__}: {error}"
            return out
        if not chunks:
            out.error = "the stream held no output"
        out.latency = last - began
        out.text = "".join(pieces)
        out.prompt_tokens = out.prompt_tokens or planned.prompt
        out.output_tokens = out.output_tokens or chunks
        return out


def _text_of(event: dict[str, Any]) -> str | None:
    """The output in a chunk; None where there is none (a chat's role, the usage)."""
    choices = event.get("choices")
    if not choices:
        return None
    delta = choices[0].get("delta")
    if delta is None:
        return choices[0].get("text")
    said = (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")
    return said or None


class _Exchange:
    """One HTTP/1.1 request on a connection of its own, its answer read as it comes."""

    def __init__(self, target: Target, method: str, path: str, body: bytes):
        self.target = target
        key = f"authorization: Bearer {target.key}\r\n" if target.key else ""
        self.request = (
            f"{method} {target.prefix}{path} HTTP/1.1\r\nhost: {target.host}:{target.port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{key}connection: close\r\n\r\n"
        ).encode() + body
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> _Exchange:
        tls = ssl.create_default_context() if self.target.tls else None
        self.reader, self.writer = await asyncio.open_connection(
            self.target.host, self.target.port, ssl=tls, limit=_LINE_LIMIT
        )
        self.writer.write(self.request)
        status = await self.reader.readline()
        try:
            self.status = int(status.split()[1])
        except (IndexError, ValueError):
            raise OSError(f"no HTTP answer: {status[:80]!r}") from None
        while (line := (await self.reader.readline()).strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.lower()] = value.strip()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.close()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body, its transfer coding taken off."""
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            length = self.headers.get("content-length")
            yield await (self.reader.readexactly(int(length)) if length else self.reader.read())
            return
        while size := int((await self.reader.readline()).split(b";")[0], 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Objects of the server-sent events, up to `[DONE]`."""
        held = b""
        async for part in self.parts():
            *lines, held = (held + part).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)


async def run_load(target: Target, planned: list[Planned], max_concurrency: int | None, seed: int) -> Any:
    """Send every request at its time; outcomes in that order, and the seconds until the last ended."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    start = time.perf_counter()

    async def one(index: int, request: Planned) -> Outcome:
        await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
        if gate is None:
            return await target.send(request, seed + index, start)
        async with gate:
            return await target.send(request, seed + index, start)

    outcomes = await asyncio.gather(*(one(i, p) for i, p in enumerate(planned)))
    return outcomes, time.perf_counter() - start


def summarise(
    outcomes: list[Outcome], seconds: float, goodput: dict[str, float], shares: list[float]
) -> dict:
    """Counts, rates and latencies under vLLM's keys; latencies in ms, over the requests that succeeded."""
    good = [o for o in outcomes if not o.error]
    prompt, output = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(_met(o, goodput) for o in good) / seconds if goodput else None,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "max_concurrent_requests": _most_at_once(outcomes),
    }
    series = {
        "ttft": [o.ttft for o in good],
        "tpot": [o.tpot for o in good if o.output_tokens > 1],
        "itl": [gap for o in good for gap in o.gaps],
        "e2el": [o.latency for o in good],
    }
    for name, values in series.items():
        ms = [value * 1000 for value in values]
        result[f"mean_{name}_ms"] = statistics.fmean(ms) if ms else 0.0
        result[f"median_{name}_ms"] = _workload.percentile(ms, 50)
        result[f"std_{name}_ms"] = statistics.pstdev(ms) if ms else 0.0
        for share in shares:
            result[f"p{share:g}_{name}_ms"] = _workload.percentile(ms, share)
    return result


def _met(outcome: Outcome, goodput: dict[str, float]) -> bool:
    took = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(took[name] * 1000 <= limit for name, limit in goodput.items())


def _most_at_once(outcomes: list[Outcome]) -> int:
    edges = [(o.began, 1) for o in outcomes] + [(o.began + o.latency, -1) for o in outcomes]
    now = most = 0
    for _, step in sorted(edges):
        now += step
        most = max(most, now)
    return most


def details(outcomes: list[Outcome]) -> dict[str, Any]:
    """The lists that `--save-detailed` adds, one entry a request."""
    return {
        "input_lens": [o.prompt_tokens or o.planned.prompt for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.gaps for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def _objectives(words: list[str]) -> dict[str, float]:
    out = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = -1.0
        if name not in OBJECTIVES or not value > 0:
            raise ConfigError(f"--goodput {word!r}: write NAME:MILLISECONDS, NAME of {', '.join(OBJECTIVES)}")
        out[name] = value
    return out


def _extra_body(args: argparse.Namespace) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if args.ignore_eos:
        extra["ignore_eos"] = True
    if args.temperature is not None:
        extra["temperature"] = args.temperature
    if args.extra_body:
        try:
            extra.update(json.loads(args.extra_body))
        except (ValueError, TypeError):
            raise ConfigError("--extra-body must be a JSON object") from None
    return extra


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="rimuru bench serve", description=(__doc__ or "").split("\n")[0])
    out.add_argument("--base-url", help="the server, with or without /v1")
    out.add_argument("--host", default="127.0.0.1")
    out.add_argument("--port", type=int, default=8000)
    out.add_argument("--endpoint", default="/v1/completions", choices=["/v1/completions", CHAT])
    out.add_argument("--model", help="name at the server; its first model otherwise")
    out.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="or OPENAI_API_KEY")
    out.add_argument("--vocab-size", type=int, help="for random ids; the server's /tokenizer_info otherwise")
    _workload.add_arguments(out, num_prompts=1000)
    out.add_argument("--seed", type=int, default=0)
    out.add_argument(
        "--request-rate", type=float, metavar="PER_S", help="default: all at once, or the trace's"
    )
    out.add_argument("--arrival", choices=_workload.ARRIVALS, help="default poisson, or the trace's own")
    out.add_argument("--burstiness", type=float, default=1.0, help="shape of poisson's gaps; 1: exponential")
    out.add_argument("--burst-size", type=int, default=8, metavar="N", help="requests at a time with burst")
    out.add_argument("--max-concurrency", type=int, metavar="N")
    out.add_argument("--ignore-eos", action="store_true", help="every output has its full length")
    out.add_argument("--temperature", type=float)
    out.add_argument("--extra-body", metavar="JSON", help="further fields of every request")
    out.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft, tpot and e2el limits")
    out.add_argument("--metric-percentiles", default="99", metavar="P,P")
    out.add_argument("--num-warmups", type=int, default=1, help="requests before the clock starts")
    out.add_argument("--save-result", action="store_true", help="write the JSON to --result-filename")
    out.add_argument("--save-detailed", action="store_true", help="with one entry a request")
    out.add_argument("--result-filename", default="bench-serve.json")
    out.add_argument("--json", action="store_true", help="print the JSON instead of a table")
    return out


def main(argv: list[str] | None = None) -> int:
    """`rimuru bench serve`; 1 when no request succeeded."""
    args = parser().parse_args(argv)
    planned = _workload.lengths(args)
    timed = args.trace and planned[-1].at > 0 and args.request_rate is None
    arrival = args.arrival or ("trace" if timed else "poisson")
    rate = math.inf if args.request_rate is None else args.request_rate
    planned = _workload.arrive(
        planned, arrival, rate, burstiness=args.burstiness, burst=args.burst_size, seed=args.seed
    )
    goodput = _objectives(args.goodput)
    try:
        shares = [float(word) for word in args.metric_percentiles.split(",")]
    except ValueError:
        raise ConfigError("--metric-percentiles must be numbers with commas between") from None
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    target = Target(args)

    async def measure() -> Any:
        try:
            await target.discover(args.vocab_size)
            for i in range(args.num_warmups):
                warm = await target.send(Planned(0.0, planned[0].prompt, planned[0].output), i, 0.0)
                if warm.error:
                    raise RimuruError(f"the first request failed: {warm.error}")
        except OSError as error:
            raise RimuruError(f"no server answers at {target.host}:{target.port} ({error})") from None
        return await run_load(target, planned, args.max_concurrency, args.seed)

    outcomes, seconds = asyncio.run(measure())
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if args.endpoint == CHAT else "openai",
        "backend": "openai-chat" if args.endpoint == CHAT else "openai",
        "label": None,
        "model_id": target.model,
        "tokenizer_id": target.model,
        "num_prompts": len(planned),
        "request_rate": "inf" if rate == math.inf else rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **summarise(outcomes, seconds, goodput, shares),
    }
    if args.save_detailed:
        result |= details(outcomes)
    if args.save_result or args.save_detailed:
        Path(args.result_filename).write_text(json.dumps(result), encoding="utf-8")
    print(json.dumps(result) if args.json else table(result, shares))
    for error in sorted({o.error for o in outcomes if o.error})[:5]:
        print(f"failed: {error}", file=sys.stderr)
    return 0 if result["completed"] else 1


def table(result: dict[str, Any], shares: list[float]) -> str:
    """The result for people."""
    lines = [f"{result['completed']} requests in {result['duration']:.2f} s, {result['failed']} failed"]
    rows = [
        ("requests/s", "request_throughput"),
        ("requests/s within the objectives", "request_goodput"),
        ("output tokens/s", "output_throughput"),
        ("all tokens/s", "total_token_throughput"),
    ]
    lines += [f"{name:<34}{result[key]:>12.2f}" for name, key in rows if result[key] is not None]
    columns = ["mean", "median", *(f"p{share:g}" for share in shares)]
    lines.append(f"{'ms':<34}" + "".join(f"{name:>12}" for name in columns))
    for name in ("ttft", "tpot", "itl", "e2el"):
        lines.append(f"{name:<34}" + "".join(f"{result[f'{c}_{name}_ms']:>12.2f}" for c in columns))
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
