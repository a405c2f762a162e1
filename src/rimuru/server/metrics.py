"""Prometheus metrics: rimuru's own names, and those of vLLM and SGLang that boards and routers query.

Room: the server's view of `EngineStats`. Rule: a token costs one bisection; everything else is done
when somebody asks; a series is there, at 0, before its first event. Only this module calls
`EngineClient.stats`, because a snapshot empties the engine's sample lists.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rimuru.engine.client import EngineClient
from rimuru.engine.request import FinishReason
from rimuru.engine.stats import EngineStats
from rimuru.errors import EngineDeadError

log = logging.getLogger("rimuru.server")

_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
            40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
              5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
         480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
# What the policies give as causes; boards need the series before the first move.
MOVE_CAUSES = ("growth", "admission", "surplus", "loss", "wait")
MOVE_DIRECTIONS = ("lend", "reclaim", "evict")
PREEMPTION_CAUSES = ("memory",)
STATS_SECONDS = 3.0
_LABELS = ("model_name", "engine")


class Histogram:
    """Counts by bucket; `bounds` are inclusive upper bounds, ascending."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts with Prometheus's `le` labels, the last one `+Inf`."""
        total, rows = 0, []
        for bound, count in zip([*map(float, self.bounds), None], self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound is None else str(bound), float(total)))
        return rows


class Metrics(Collector):
    """What requests observed here, and the engine's latest snapshot."""

    def __init__(self, client: EngineClient, model_name: str):
        self.client = client
        self.labels = (model_name, "0")
        self.stats = EngineStats()
        self.ttft = Histogram(_LATENCY)
        self.inter_token = Histogram(_TOKEN_GAP)
        self.per_token = Histogram(_TOKEN_GAP)
        self.e2e = Histogram(_LONG)
        self.queue_time = Histogram(_LONG)
        self.prefill_time = Histogram(_LONG)
        self.decode_time = Histogram(_LONG)
        self.prompt_len = Histogram(_TOKENS)
        self.output_len = Histogram(_TOKENS)
        self.max_tokens = Histogram(_TOKENS)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.http: Counter[tuple[str, str, int]] = Counter()  # route, method, status
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def on_finish(self, reason: FinishReason, seconds: float) -> None:
        self.finished[reason.value] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.e2e.observe(seconds)

    async def refresh(self) -> EngineStats:
        """Take a snapshot and fold its samples in; an engine that is dead or busy leaves the last."""
        try:
            async with asyncio.timeout(STATS_SECONDS):
                stats = await self.client.stats()
        except (EngineDeadError, TimeoutError):
            return self.stats
        for sample in stats.finished:
            self.queue_time.observe(sample.queue_time)
            self.prefill_time.observe(sample.prefill_time)
            self.decode_time.observe(sample.decode_time)
            self.prompt_len.observe(sample.prompt_tokens)
            self.output_len.observe(sample.output_tokens)
            self.max_tokens.observe(sample.max_tokens)
        for tokens in stats.step_tokens:
            self.step_tokens.observe(tokens)
        self.stats = stats
        return stats

    async def watch(self, log_seconds: float | None, every: float = 1.0) -> None:
        """Keep the sample lists short; say what goes on every `log_seconds` while something does."""
        before, since = self.stats, time.monotonic()
        while True:
            await asyncio.sleep(every)
            stats = await self.refresh()
            elapsed = time.monotonic() - since
            if log_seconds is None or elapsed < log_seconds:
                continue
            if stats.steps > before.steps:
                log.info("%s", summary(before, stats, elapsed))
            before, since = stats, time.monotonic()

    async def expose(self, accept: str) -> tuple[bytes, str]:
        """The exposition in the format `accept` prefers, and its content type."""
        await self.refresh()
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        yield from self._own()
        yield from self._vllm()
        yield from self._sglang()

    def _own(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        s = self.stats
        for unit, values in (("bytes", s.pool.bytes_by), ("pages", s.pool.pages_by)):
            family = GaugeMetricFamily(
                f"rimuru_pool_{unit}", f"Pool {unit} by kind and state", labels=["kind", "state"]
            )
            for key, value in values.items():
                family.add_metric(key, value)
            yield family
        yield GaugeMetricFamily("rimuru_pool_size_bytes", "Bytes of the pool", s.pool.pool_bytes)
        moves = CounterMetricFamily(
            "rimuru_boundary_moves", "Moves of the boundary", labels=["policy", "cause", "direction"]
        )
        policy = self.client.info.memory_policy
        none = {(policy, cause, way): 0 for cause in MOVE_CAUSES for way in MOVE_DIRECTIONS}
        for move, value in {**none, **s.boundary_moves}.items():
            moves.add_metric(move, value)
        yield moves
        preemptions = CounterMetricFamily("rimuru_preemptions", "Preempted requests", labels=["cause"])
        for cause, value in {**dict.fromkeys(PREEMPTION_CAUSES, 0), **s.preemptions}.items():
            preemptions.add_metric([cause], value)
        yield preemptions
        for name, help_, value in (
            ("preempted_tokens", "Computed tokens lost to preemption", s.preempted_tokens),
            ("steps", "Steps of the engine", s.steps),
            ("expert_hits", "Experts touched while resident", s.expert_hits),
            ("expert_misses", "Experts touched while in host memory", s.expert_misses),
            ("expert_promotions", "Experts copied into the pool", s.promotions),
            ("expert_demotions", "Experts whose pool copy was dropped", s.demotions),
            ("moved_bytes", "Bytes of KV and state pages moved together", s.moved_bytes),
        ):
            yield CounterMetricFamily(f"rimuru_{name}", help_, value)
        for name, help_, value in (
            ("experts_resident", "Experts in the pool", s.experts_resident),
            ("experts", "Experts of the model", s.experts_total),
            ("host_expert_bytes", "Bytes of the experts' host copies", s.host_bytes),
            ("device_peak_bytes", "Most bytes taken on the device so far", s.device_peak_bytes),
        ):
            yield GaugeMetricFamily(f"rimuru_{name}", help_, value)
        http = CounterMetricFamily(
            "rimuru_http_requests", "HTTP answers", labels=["route", "method", "status"]
        )
        for (route, method, status), value in self.http.items():
            http.add_metric([route, method, str(status)], value)
        yield http

    def _vllm(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        s = self.stats
        for name, help_, value in (
            ("num_requests_running", "Requests in the running batch", s.running),
            ("num_requests_waiting", "Requests waiting", s.waiting),
            ("kv_cache_usage_perc", "Share of the reachable KV cache in use, 0 to 1", s.kv_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", help_, labels=_LABELS)
            gauge.add_metric(self.labels, value)
            yield gauge
        for name, help_, value in (
            ("prompt_tokens", "Prompt tokens computed", s.prompt_tokens),
            ("generation_tokens", "Tokens generated", s.generation_tokens),
            ("num_preemptions", "Preempted requests", sum(s.preemptions.values())),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", s.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", s.prefix_hits),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", help_, labels=_LABELS)
            counter.add_metric(self.labels, value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Finished requests by reason", labels=[*_LABELS, "finished_reason"]
        )
        for reason, value in self.finished.items():
            success.add_metric([*self.labels, reason], value)
        yield success
        for name, help_, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token", self.ttft),
            ("inter_token_latency_seconds", "Time between tokens", self.inter_token),
            ("request_time_per_output_token_seconds", "Mean time a token of a request", self.per_token),
            ("e2e_request_latency_seconds", "Arrival to last token", self.e2e),
            ("request_queue_time_seconds", "Time waiting", self.queue_time),
            ("request_prefill_time_seconds", "Time in prefill", self.prefill_time),
            ("request_decode_time_seconds", "Time in decode", self.decode_time),
            ("request_prompt_tokens", "Prompt tokens of a request", self.prompt_len),
            ("request_generation_tokens", "Generated tokens of a request", self.output_len),
            ("request_max_num_generation_tokens", "Most tokens a request could generate", self.max_tokens),
            ("iteration_tokens_total", "Tokens of a step", self.step_tokens),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", help_, labels=_LABELS)
            family.add_metric(self.labels, histogram.buckets(), histogram.sum)
            yield family
        info = self.client.info
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Cache configuration, as labels",
            labels=["engine", "memory_policy", "max_request_tokens", *map(str, info.details)],
        )
        details = map(str, info.details.values())
        config.add_metric(["0", info.memory_policy, str(info.max_request_tokens), *details], 1)
        yield config

    def _sglang(self) -> Iterator[GaugeMetricFamily | HistogramMetricFamily]:
        s, label = self.stats, self.labels[:1]
        for name, help_, value in (
            ("num_running_reqs", "Requests in the running batch", s.running),
            ("num_queue_reqs", "Requests waiting", s.waiting),
            ("token_usage", "Share of the reachable KV cache in use, 0 to 1", s.kv_usage),
            ("cache_hit_rate", "Share of prompt tokens found in the prefix cache, since the start",
             s.prefix_hits / max(1, s.prefix_queries)),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(f"sglang:{name}", help_, labels=["model_name"])
            gauge.add_metric(label, value)
            yield gauge
        for name, help_, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token", self.ttft),
            ("inter_token_latency_seconds", "Time between tokens", self.inter_token),
            ("e2e_request_latency_seconds", "Arrival to last token", self.e2e),
            ("queue_time_seconds", "Time waiting", self.queue_time),
        ):
            family = HistogramMetricFamily(f"sglang:{name}", help_, labels=["model_name"])
            family.add_metric(label, histogram.buckets(), histogram.sum)
            yield family


def summary(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """One line of what happened between two snapshots."""
    return (
        f"prompt {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tok/s, "
        f"generation {(now.generation_tokens - before.generation_tokens) / seconds:.1f} tok/s, "
        f"running {now.running}, waiting {now.waiting}, KV {now.kv_usage:.1%}, "
        f"experts resident {now.experts_resident}/{now.experts_total}, "
        f"boundary moves {sum(now.boundary_moves.values()) - sum(before.boundary_moves.values())}, "
        f"preemptions {sum(now.preemptions.values()) - sum(before.preemptions.values())}"
    )
