"""What the engine reports of itself: gauges of the pool, counters of work, samples of latency.

Room: plain data of the engine. Rule: no torch; cheap enough to fill on every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PoolStats:
    """Bytes of the pool by kind and state; the values of `bytes_by` sum to `pool_bytes`.

    Keys are `(kind, state)`: ("kv", "used"), ("kv", "cached"), ("kv", "reserved"),
    ("expert", "resident"), ("state", ...), ("free", "free"), ("waste", "padding").
    `pages_by` counts pages with the same keys.
    """

    pool_bytes: int = 0
    bytes_by: dict[tuple[str, str], int] = field(default_factory=dict)
    pages_by: dict[tuple[str, str], int] = field(default_factory=dict)


@dataclass(slots=True)
class RequestSample:
    """One finished request, for the histograms. Times in seconds."""

    finish: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    queue_time: float
    prefill_time: float
    decode_time: float
    ttft: float
    e2e: float


@dataclass(slots=True)
class EngineStats:
    """A snapshot. Counters only grow; the two sample lists hold what came since the last snapshot."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # used / reachable KV bytes, 0..1
    pool: PoolStats = field(default_factory=PoolStats)
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    preemptions: dict[str, int] = field(default_factory=dict)  # by cause
    preempted_tokens: int = 0  # computed tokens lost to preemption
    boundary_moves: dict[tuple[str, str, str], int] = field(default_factory=dict)  # policy, cause, direction
    expert_hits: int = 0  # (layer, expert) touched while resident
    expert_misses: int = 0  # touched while in host memory
    promotions: int = 0
    demotions: int = 0
    moved_bytes: int = 0  # of KV and state pages, moved together so that whole parents come free
    experts_resident: int = 0
    experts_total: int = 0
    host_bytes: int = 0  # experts' host copies
    device_peak_bytes: int = 0
    finished: list[RequestSample] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
