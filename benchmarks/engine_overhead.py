"""Output tokens a second through HTTP with a model so small that the engine's own time is nearly all of it.

A random Qwen3-MoE (4 layers, hidden 128, 8 experts) is served by `rimuru serve` on the CPU in float32 and,
where `--peer` names one, by another server of the OpenAI API on the same machine. Both are started first,
then measured in turn, round by round, with the same client, so that whatever else runs meets both alike. The
best round counts. CPU time a token, over all processes of a server, depends less on what else runs. Requests
have 32 prompt tokens, and every output has its full length.

    python benchmarks/engine_overhead.py [--streams 1 4 16] [--rounds 5] [--json out.json]
    python benchmarks/engine_overhead.py \
        --peer "vllm serve {model} --port {port} --dtype float32 --enforce-eager"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from rimuru.bench import serve as bench
from rimuru.bench._workload import Planned

PROMPT = 32
VOCAB = 640
SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
         "max_position_embeddings": 4096}  # fmt: skip
START_SECONDS = 400.0  # a peer may compile its kernels first


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[tuple[str, int]]:
    """A server's process, once its `/health` answers; its address and process id."""
    with open(log, "wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + START_SECONDS
    try:
        while True:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{shlex.join(command)} does not serve:\n{log.read_text()[-3000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                break
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def own_model() -> str:
    """The folder of a random checkpoint, made once."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support.tiny import tiny_checkpoint

    return str(tiny_checkpoint("qwen3_moe", **SHAPE))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def rate(url: str, streams: int, tokens: int, seed: int) -> float:
    """Output tokens a second over `streams` requests sent at once."""
    words = ["--base-url", url, "--ignore-eos", "--temperature", "0", "--vocab-size", str(VOCAB)]
    target = bench.Target(bench.parser().parse_args(words))

    async def measure() -> tuple[list[bench.Outcome], float]:
        await target.discover(VOCAB)
        return await bench.run_load(target, [Planned(0.0, PROMPT, tokens)] * streams, None, seed)

    outcomes, seconds = asyncio.run(measure())
    failed = [o.error for o in outcomes if o.error]
    made = sum(o.output_tokens for o in outcomes)
    if failed or made != streams * tokens:
        raise SystemExit(f"{url}: {made} tokens instead of {streams * tokens}: {failed[:1]}")
    return made / seconds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer", help="command of another server, with {model} and {port} in it")
    parser.add_argument("--model", help="folder of another checkpoint with a vocabulary of 640 at least")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write every round there")
    args = parser.parse_args(argv)
    model = args.model or own_model()
    ports = {"rimuru": free_port()}
    commands = {
        "rimuru": [
            sys.executable, "-m", "rimuru.cli", "serve", model, "--host", "127.0.0.1", "--port",
            str(ports["rimuru"]), "--dtype", "float32", "--device", "cpu", "--device-memory", "200MB",
            "--max-num-seqs", "32",
        ]
    }  # fmt: skip
    if args.peer:
        ports["peer"] = free_port()
        commands["peer"] = shlex.split(args.peer.format(model=model, port=ports["peer"]))
    found: dict[str, dict[int, list[float]]] = {name: {n: [] for n in args.streams} for name in commands}
    cpu: dict[str, dict[int, list[float]]] = {name: {n: [] for n in args.streams} for name in commands}
    loads = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(running(command, ports[name], Path(folder) / name))
            for name, command in commands.items()
        }
        for url, _ in servers.values():  # what is compiled at first use is compiled now
            for streams in args.streams:
                rate(url, streams, 16, 0)
        for turn in range(args.rounds):
            for streams in args.streams:
                for name, (url, pid) in servers.items():
                    before = cpu_seconds(pid)
                    found[name][streams].append(rate(url, streams, args.tokens, turn))
                    cpu[name][streams].append((cpu_seconds(pid) - before) / streams / args.tokens * 1e6)
            loads.append(os.getloadavg()[0])
    print(f"output tokens/s, best of {args.rounds}; load of the machine {min(loads):.1f} to {max(loads):.1f}")
    for name, by_streams in found.items():
        print(f"  {name:<8}" + "".join(f"{n:>4} streams {max(r):>9,.0f}" for n, r in by_streams.items()))
    print("CPU time a token in microseconds, least of the rounds")
    for name, by_streams in cpu.items():
        print(f"  {name:<8}" + "".join(f"{n:>4} streams {min(r):>9,.0f}" for n, r in by_streams.items()))
    if args.peer:
        ratios = {n: max(found["rimuru"][n]) / max(found["peer"][n]) for n in args.streams}
        print(
            "ratio of the rates\n          " + "".join(f"{n:>4} streams {r:>9.2f}" for n, r in ratios.items())
        )
    if args.json:
        Path(args.json).write_text(json.dumps({"loads": loads, "rates": found, "cpu_us": cpu}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
