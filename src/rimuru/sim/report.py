"""What a simulation says at its end: numbers, a table, plots.

Room: the simulator's output. Rule: reads a finished simulation, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rimuru.errors import ConfigError

from .engine import Hardware, Simulation
from .svg import Line, Panel, page

POINTS = 240  # of a curve, and slices of time that they stand for; more would not show
DOTS = 600


def summary(
    sim: Simulation, *, ttft_slo_ms: float | None = None, itl_slo_ms: float | None = None
) -> dict[str, Any]:
    """Plain data: times in seconds, lengths in tokens, `link_bytes` host to device.

    With objectives, `goodput_tokens_per_s` counts the tokens of requests that met them: first token
    within `ttft_slo_ms`, mean time of the other tokens within `itl_slo_ms`.
    """
    samples, series, memory = sim.scheduler.samples, sim.series, sim.memory
    span = sim.now or 1.0
    ttft = np.array([s.ttft for s in samples])
    tpot = np.array([s.decode_time / max(1, s.output_tokens - 1) for s in samples])
    tokens = np.array([s.output_tokens for s in samples])
    pairs = memory.expert_hits + memory.expert_misses
    out: dict[str, Any] = {
        "requests": len(samples),
        "refused": len(sim.refused),
        "seconds": sim.now,
        "steps": len(series.clock),
        "output_tokens_per_s": float(tokens.sum()) / span,
        "peak_concurrency": max(series.running, default=0),
        "mean_concurrency": _over_time(series.running, series.seconds),
        "preemptions": sum(sim.scheduler.preemptions.values()),
        "ttft_mean_s": _mean(ttft),
        "ttft_p50_s": _percentile(ttft, 50),
        "ttft_p99_s": _percentile(ttft, 99),
        "tpot_mean_s": _mean(tpot),
        "itl_p99_s": _percentile(np.asarray(sim.gaps), 99),
        "step_max_s": max(series.seconds, default=0.0),
        "link_bytes": int(sum(series.link_bytes)),
        "experts_resident_mean": _over_time(series.resident, series.seconds),
        "experts_resident_least": min(series.resident, default=sim.plan.experts_resident),
        "expert_hit_rate": memory.expert_hits / pairs if pairs else 1.0,
        "prefix_hit_rate": sim.scheduler.prefix_hits / max(1, sim.scheduler.prefix_queries),
        "boundary_moves": {
            f"{cause} {direction}": n for (_, cause, direction), n in sorted(memory.log.moves.items())
        },
    }
    if ttft_slo_ms is not None or itl_slo_ms is not None:
        met = (ttft * 1e3 <= (ttft_slo_ms or np.inf)) & (tpot * 1e3 <= (itl_slo_ms or np.inf))
        out["goodput_tokens_per_s"] = float(tokens[met].sum()) / span
        out["met_objectives"] = float(met.mean()) if len(met) else 0.0
    return out


def assumptions(sim: Simulation, hardware: Hardware) -> dict[str, Any]:
    """Everything the result rests on beside the trace."""
    plan, card = sim.plan, hardware.card
    return {
        "model": sim.config.model,
        "gpu": card.name,
        "hbm_bytes_s": card.hbm_bytes_s,
        "link_bytes_s": card.link_bytes_s,
        "bf16_flops": card.bf16_flops,
        "overlap": hardware.overlap,
        "factors": asdict(hardware.factors),
        "routing": sim.routing.name,
        "device_memory": plan.device_bytes,
        "bytes_outside_pool": plan.device_bytes - plan.pool_bytes,
        "experts_total": plan.experts_total,
        "experts_lendable": plan.experts_lendable,
        "max_num_seqs": sim.config.max_num_seqs,
        "max_num_batched_tokens": sim.config.max_num_batched_tokens,
        "prefix_caching": sim.config.enable_prefix_caching,
    }


COLUMNS: tuple[tuple[str, str, float, str], ...] = (
    ("output_tokens_per_s", "tok/s", 1, ",.0f"),
    ("seconds", "s", 1, ",.1f"),
    ("steps", "steps", 1, ",d"),
    ("peak_concurrency", "peak", 1, ",d"),
    ("mean_concurrency", "mean", 1, ",.1f"),
    ("preemptions", "preempt", 1, ",d"),
    ("ttft_mean_s", "TTFT s", 1, ",.3f"),
    ("ttft_p99_s", "p99 s", 1, ",.2f"),
    ("tpot_mean_s", "TPOT ms", 1e3, ",.1f"),
    ("experts_resident_mean", "experts", 1, ",.0f"),
    ("link_bytes", "link GB", 1e-9, ",.1f"),
)


def table(results: Mapping[str, Mapping[str, Any]], first: str = "policy") -> str:
    """One line a result, columns aligned."""
    rows = [[first, *(label for _, label, _, _ in COLUMNS)]]
    for name, result in results.items():
        cells = [
            format(result[key] * scale if scale != 1 else result[key], form)
            for key, _, scale, form in COLUMNS
        ]
        rows.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells))
    return "\n".join(lines)


def plots(title: str, sims: Mapping[str, Simulation]) -> str:
    """Concurrency, queue, boundary, KV, step time, link use and TTFT over time, as one SVG page."""
    curves: dict[str, list[Line]] = {}

    def add(panel: str, line: Line) -> None:
        curves.setdefault(panel, []).append(line)

    for name, sim in sims.items():
        s = sim.series
        if not s.clock:
            continue
        clock = np.asarray(s.clock)
        slices = np.floor(clock / clock[-1] * POINTS)  # a step belongs to the one in which it ends
        starts = np.flatnonzero(np.diff(slices, prepend=-1.0))
        ends = np.append(starts[1:], len(clock))
        seconds = np.add.reduceat(np.asarray(s.seconds), starts)

        def most(values: Sequence[float], starts: np.ndarray = starts) -> list[float]:
            return np.maximum.reduceat(np.asarray(values), starts).tolist()

        def total(values: Sequence[float], starts: np.ndarray = starts) -> np.ndarray:
            return np.add.reduceat(np.asarray(values, float), starts)

        x = clock[ends - 1].tolist()
        lent = sim.plan.experts_total - np.minimum.reduceat(np.asarray(s.resident), starts)
        steps = ends - starts
        add("running", Line(name, x, most(s.running), steps=True))
        add("waiting", Line(name, x, most(s.waiting), steps=True))
        add("lent", Line(name, x, lent.tolist(), steps=True))
        kv = np.asarray(most(s.kv_blocks)) * sim.plan.block_tokens
        add("kv", Line(name, x, kv.tolist(), steps=True))
        add("step", Line(name, x, (seconds / steps * 1e3).tolist()))
        add("rate", Line(name, x, (total(s.outputs) / seconds).tolist()))
        add("link", Line(name, x, (total(s.link_bytes) / seconds / 1e9).tolist()))
        firsts = sim.first_tokens[:: max(1, len(sim.first_tokens) // DOTS)]
        add("ttft", Line(name, [at + wait for at, wait in firsts], [wait for _, wait in firsts], dots=True))
    panels = [
        Panel("Running", "requests", curves.get("running", [])),
        Panel("Waiting", "requests", curves.get("waiting", [])),
        Panel("Boundary: lent to KV", "experts", curves.get("lent", [])),
        Panel("KV in use", "tokens", curves.get("kv", [])),
        Panel("Step time", "ms", curves.get("step", []), log=True),
        Panel("Output", "tokens/s", curves.get("rate", [])),
        Panel("Link use, host to device", "GB/s", curves.get("link", [])),
        Panel("Time to first token, when it came", "s", curves.get("ttft", []), log=True),
    ]
    return page(title, panels)


def check_writable(path: str) -> None:
    """Raise `ConfigError` where no file can be written at `path`; before a simulation, not after it."""
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"--plots {path}: cannot be written: {error.strerror}") from None


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _percentile(values: np.ndarray, q: float) -> float:
    return float(np.percentile(values, q)) if len(values) else 0.0


def _over_time(values: Sequence[float], seconds: Sequence[float]) -> float:
    span = sum(seconds)
    return float(np.dot(values, seconds)) / span if span else 0.0
