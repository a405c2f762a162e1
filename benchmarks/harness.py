"""What the sections of `gpu_check` share: the report, its bars, and timing by graph replay."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch


@dataclass
class Check:
    section: str
    name: str
    error: float
    limit: float
    ok: bool


@dataclass
class Bar:
    """A measured value beside what it must reach (`bar`) and what the chip could do (`floor`)."""

    section: str
    name: str
    measured: float
    unit: str
    bar: float | None
    floor: float | None
    higher_is_better: bool
    ok: bool


@dataclass
class Report:
    section: str = ""
    checks: list[Check] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {self.section}: {text}", flush=True)

    def check(self, name: str, error: float, limit: float) -> None:
        """A comparison with the twin. NaN never passes."""
        ok = bool(error <= limit)  # not numpy's, which JSON does not know
        self.checks.append(Check(self.section, name, error, limit, ok))
        self.say(f"{'ok  ' if ok else 'FAIL'} {name}: error {error:.2e}, limit {limit:.1e}")

    def close(self, name: str, out: torch.Tensor, reference: torch.Tensor, limit: float) -> None:
        error = (out.double() - reference.double()).norm() / reference.double().norm()
        self.check(name, error.item(), limit)

    def equal(self, name: str, out: torch.Tensor, reference: torch.Tensor) -> None:
        """Bit for bit; counts the elements that differ."""
        self.check(name, float((out != reference).sum().item()), 0.0)

    def bar(
        self, name: str, measured: float, unit: str, bar: float | None = None,
        floor: float | None = None, higher_is_better: bool = False,
    ) -> None:  # fmt: skip
        ok = bar is None or bool(measured >= bar if higher_is_better else measured <= bar)
        self.bars.append(Bar(self.section, name, measured, unit, bar, floor, higher_is_better, ok))
        self.say(f"{name}: {measured:.2f} {unit}" + ("" if bar is None else f" (bar {bar:.2f})"))

    def table(self) -> str:
        lines = [f"{'bar':58} {'measured':>10} {'bar':>9} {'floor':>9} {'to floor':>8}  unit"]
        for b in self.bars:
            bar = "" if b.bar is None else f"{b.bar:.2f}"
            floor = "" if b.floor is None else f"{b.floor:.2f}"
            ratio = "" if not b.floor else f"{b.measured / b.floor:.2f}"
            flag = "" if b.ok else "  MISSED"
            name = f"{b.section}: {b.name}"
            lines.append(f"{name:58} {b.measured:10.2f} {bar:>9} {floor:>9} {ratio:>8}  {b.unit}{flag}")
        failed, missed = sum(not c.ok for c in self.checks), sum(not b.ok for b in self.bars)
        lines.append(f"{len(self.checks)} checks, {failed} failed; {len(self.bars)} bars, {missed} missed")
        return "\n".join(lines)

    def dump(self, path: str, **facts: object) -> None:
        with open(path, "w") as f:
            json.dump(
                facts | {"checks": [asdict(c) for c in self.checks], "bars": [asdict(b) for b in self.bars]},
                f, indent=1,
            )  # fmt: skip


def capture(fn: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`fn` in a CUDA graph, after a warm-up outside it (compilation, handles)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph


def replay_times(
    variants: dict[str, Callable[[], object]], calls: int = 1, rounds: int = 5, budget_ms: float = 30.0
) -> dict[str, float]:
    """Microseconds a call of each variant: graph replay, interleaved, the median of `rounds`.

    Each variant is a function that makes `calls` calls on data large enough, or different enough
    from call to call, that the cache holds none of it. `budget_ms` is the time of one round.
    """
    graphs = {name: capture(fn) for name, fn in variants.items()}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def measure(graph: torch.cuda.CUDAGraph, count: int) -> float:
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    counts = {}
    for name, graph in graphs.items():
        graph.replay()
        counts[name] = max(2, min(200, int(budget_ms / max(measure(graph, 2), 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name].append(measure(graph, counts[name]))
    return {name: statistics.median(s) * 1e3 / calls for name, s in samples.items()}


def device_copy_rate(nbytes: int = 2 << 30) -> float:
    """TB/s of a kernel that copies on the device, bytes read plus written: the bytes ceiling."""
    a = torch.randint(0, 1 << 30, (nbytes // 4,), dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    # Not `copy_`: captured in a graph that is a memcpy node, and slower than any kernel.
    return 2 * nbytes / replay_times({"copy": lambda: torch.bitwise_not(a, out=b)})["copy"] / 1e6
