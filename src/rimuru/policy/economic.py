"""Lend what pays: the boundary where predicted goodput is highest.

Room: the boundary policy. Rule: as in `boundary`; every number comes from the snapshot.

For each number of experts lent, the snapshot's rates say how many requests would run, how long a
step would then take, and so how many tokens a second would come out in time. Up to h* lending is free
(the misses hide behind the step's own reads), beyond it every expert costs link time on every step,
far beyond it more requests may pay for that again: so the maximum is taken over all numbers, not
searched from where we are. Waiting requests and growing ones are held to the same cap; what does not fit
under it waits or is preempted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rimuru.errors import ConfigError

from .boundary import BoundaryPlan, Reactive, Snapshot, _hold, _pages, hidden_experts, preemption_by

SPAN = 0.5  # seconds over which forecasts are averaged
FLAT = 0.005  # gain in goodput for which no expert comes home: forecasts of neighbours scatter as much
FRESH = SPAN / 16  # seconds for which one stands: another would hardly move the average


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is predicted for `lent` experts, arrays of one length."""

    lent: np.ndarray
    running: np.ndarray  # requests at once
    seconds: np.ndarray  # of a decode step
    goodput: np.ndarray  # tokens a second that meet the objectives

    def at(self, lent: int) -> float:
        """Goodput with `lent` experts lent."""
        return float(np.interp(lent, self.lent, self.goodput))


def forecast(
    s: Snapshot,
    *,
    margin: float = 1.1,
    ttft_slo: float | None = None,
    itl_slo: float | None = None,
) -> Forecast | None:
    """Goodput over the numbers of experts that could be lent; None while nothing runs or is measured.

    Misses are taken `margin` times as many as expected, which keeps the choice that far below the
    cliff behind h*. Objectives in seconds: tokens of steps longer than `itl_slo`, and of requests that
    wait longer than `ttft_slo`, count in proportion to how far they miss it.
    """
    if not (s.link_bytes_s and s.hbm_bytes_s and s.touched and s.step_seconds and s.running):
        return None
    lent = _grid(s.lent + s.room_to_lend)
    per_request = s.request_kv_pages or max(1.0, s.kv_used / s.running)
    total_kv = s.kv_used + s.kv_obtainable + s.kv_evictable
    demand = s.running + s.waiting
    if s.max_running:
        demand = min(demand, s.max_running)
    taken = per_request + s.request_slack_pages
    running = np.clip((total_kv + (lent - s.lent) * s.kv_per_expert) / taken, 0, demand)

    growth = running / s.running
    hot = 1 - min(s.touched / s.expert_total, 1 - 1e-9)
    cold = 1 - _miss_rates(s, lent)
    # A prompt touches more than a step of decodes, and so misses more of what is lent.
    more = max(1.0, s.request_prompt_tokens / s.running) if s.request_prompt_tokens else np.inf
    # Now, then for each number lent a step of decodes, then one that holds a prompt: all in one go.
    n = len(lent)
    out = np.concatenate([[s.lent], lent, lent])
    touched = np.empty(2 * n + 1)
    touched[0], touched[1 : n + 1] = s.touched, s.expert_total * (1 - hot**growth)
    touched[n + 1 :] = s.expert_total * (1 - hot**more)
    rate = np.concatenate([[s.missed / max(s.lent, 1)], 1 - cold**growth, 1 - cold**more])
    rate = np.minimum(rate, touched / np.maximum(out, 1))
    kv = np.concatenate([[s.running], running, running]) * per_request * s.kv_page_bytes
    experts = (touched - out * rate) * s.expert_page_bytes / s.hbm_bytes_s
    reads = experts + (s.dense_bytes + kv) / s.hbm_bytes_s
    link = s.expert_page_bytes / s.link_bytes_s
    hiding = experts if s.hiding_layers > 1 else reads
    rate[1:] *= margin
    waits = exposed_misses(out, rate, hiding / link, s.hiding_layers) * link
    fixed = max(0.0, s.step_seconds - float(reads[0] + waits[0]))
    seconds = fixed + (reads + waits)[1 : n + 1]
    streamed = waits[n + 1 :] - waits[1 : n + 1]
    per_prompt = s.prefill_seconds + np.maximum(0.0, streamed)
    prefill = per_prompt / s.request_output_tokens if s.request_output_tokens else 0.0
    goodput = running / np.maximum(seconds + running * prefill, 1e-9)
    if itl_slo is not None:
        goodput = goodput * np.minimum(1.0, itl_slo / np.maximum(seconds, 1e-9))
    if ttft_slo is not None and s.request_output_tokens:
        wait = (demand - running) * s.request_output_tokens / np.maximum(goodput, 1e-9)
        goodput = goodput * np.minimum(1.0, ttft_slo / np.maximum(wait, 1e-9))
    return Forecast(lent, running, seconds, goodput)


def exposed_misses(lent: np.ndarray, rate: np.ndarray, hidden: np.ndarray, layers: int) -> np.ndarray:
    """Expected misses a step that are not hidden, of `lent` experts spread evenly over `layers`.

    Each is missed with probability `rate`; `hidden` misses fit beside the step's reads, in equal parts
    beside each layer. A layer's misses scatter like a binomial variable N, and only what is above its
    part h is exposed: E[max(0, N - h)] = E[N] - h + sum over n < h of (h - n) P(N = n).
    """
    if layers == 1:  # thousands of misses: their scatter is small beside their number
        return np.maximum(0.0, lent * rate - hidden)
    fewer = np.floor(lent / layers)
    h = np.minimum(hidden / layers, fewer + 1)  # a layer misses no more than it lends
    more = lent / layers - fewer  # share of the layers that lend one more
    stay = np.clip(1 - rate, 0.0, 1 - 1e-9)
    each = np.stack([fewer, fewer + 1])
    p = stay**fewer
    p = np.stack([p, p * stay])
    above = each * (1 - stay) - h
    odds = (1 - stay) / np.maximum(stay, 1e-9)
    for n in range(int(np.ceil(h.max()))):
        above += np.maximum(0.0, h - n) * p
        p *= np.maximum(0.0, each - n) * (odds / (n + 1))
    return layers * np.maximum((1 - more) * above[0] + more * above[1], 0.0)


@lru_cache(maxsize=8)
def _grid(limit: int) -> np.ndarray:
    """0 to `limit`, every number at first, then in steps of 3 %: a third of the margin to the cliff."""
    steps = np.geomspace(1, max(limit, 1), 256).round().astype(np.int64)
    return np.unique(np.concatenate([[0], steps[steps <= limit], [limit]]))


def _miss_rates(s: Snapshot, lent: np.ndarray) -> np.ndarray:
    """P(an expert is missed) a step at today's batch when the coldest `lent` experts are out."""
    measured = s.missed / s.lent if s.lent else 0.0
    if not len(s.cold_touches):
        return np.full(len(lent), min(measured or s.touched / s.expert_total, 1 - 1e-9))
    at = lent * ((len(s.cold_touches) - 1) / s.expert_total)
    ideal = np.interp(at, np.arange(len(s.cold_touches)), s.cold_touches)
    rate = ideal / np.maximum(lent, 1)
    expected = float(np.interp(s.lent, lent, rate))
    if measured and expected:
        # What is out now is not exactly the coldest: the ranking is as wrong for other numbers too.
        rate = rate * np.clip(measured / expected, 0.5, 4.0)
    return np.minimum(rate, 1 - 1e-9)


class Economic(Reactive):
    """Lends up to the number with the highest predicted goodput, takes back what does not pay.

    While the machine's rates are not known it does as `Reactive`; while nothing runs, the last best number
    stands. A request that cannot be placed by running ones finishing, or that has stood first in the queue
    for `max_wait` seconds, gets its pages however dear; so does a single running request that grows. Those
    decisions are `forced`.
    """

    name = "economic"

    def __init__(
        self,
        *,
        max_wait: float = 2.0,
        ttft_slo_ms: float | None = None,
        itl_slo_ms: float | None = None,
        margin: float = 1.1,
        payback: float = 2.0,
        reserve: float = 0.1,
        hold: float = 0.25,
        reclaim_limit: int = 16,
    ):
        super().__init__(reserve=reserve, hold=hold, reclaim_limit=reclaim_limit)
        for flag, value in (("--ttft-slo", ttft_slo_ms), ("--itl-slo", itl_slo_ms)):
            if value is not None and value <= 0:
                raise ConfigError(f"{flag} must be more than 0 ms, got {value:g}")
        if max_wait < 0:
            raise ConfigError(f"--max-boundary-wait must be at least 0 seconds, got {max_wait:g}")
        self.max_wait, self.margin, self.payback = max_wait, margin, payback
        self.ttft_slo = None if ttft_slo_ms is None else ttft_slo_ms / 1e3
        self.itl_slo = None if itl_slo_ms is None else itl_slo_ms / 1e3
        self._best = 0  # the last number of experts that was best to lend
        self._outlook: Forecast | None = None
        self._at = 0.0  # when it was made
        self._first: float | None = None  # arrival of the request that stands first
        self._first_since = 0.0

    def decide(self, snapshot: Snapshot) -> BoundaryPlan:
        s = snapshot
        blocked = self._blocked_for(s)
        if not (s.link_bytes_s and s.hbm_bytes_s):
            return super().decide(s)
        if s.shortfall <= 0 and not s.lent:
            self._quiet_since = None
            return _hold(s, s.expert_resident)
        outlook = self._look(s)
        best = self._best
        numbers = {
            "best_lent": best,
            "hidden_experts": hidden_experts(s),
            "shortfall": s.shortfall,
            "blocked_seconds": blocked,
        }
        loses = False
        if outlook is not None:
            now, then = outlook.at(s.lent), outlook.at(best)
            numbers |= {"goodput_now": now, "goodput_best": then}
            gains = then > (1 + FLAT) * now
            loses = s.lent > best and gains and self._repays(s, now, then, s.lent - best)
            if s.lent < best and then < now:
                best = s.lent  # what was best a while ago is so no longer
        if s.shortfall > s.kv_evictable or s.waiting:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = s.now
        if loses:
            # It comes back into pages that running requests free by finishing; nobody is preempted for it.
            plan = self._lend_to(s, best, blocked, numbers)
            back = 0 if plan.forced else min(s.lent - best, self.reclaim_limit)
            return replace(plan, expert_pages=plan.expert_pages + back, cause="loss" if back else plan.cause)
        if s.shortfall > 0:
            return self._lend_to(s, best, blocked, numbers)
        return _hold(s, s.expert_resident) if s.waiting else self._give_back(s)

    def _look(self, s: Snapshot) -> Forecast | None:
        """The forecast averaged over the last `SPAN` seconds, because one step's batch is no load, and the
        best number to lend by it; None while nothing can be said."""
        last, age = self._outlook, s.now - self._at
        if last is not None and 0 <= age < FRESH and s.running:
            return last
        outlook = forecast(s, margin=self.margin, ttft_slo=self.ttft_slo, itl_slo=self.itl_slo)
        if outlook is None:
            return None
        if last is not None and last.lent is outlook.lent and age >= 0:
            share = math.exp(-age / SPAN)
            outlook = replace(outlook, goodput=outlook.goodput + (last.goodput - outlook.goodput) * share)
        self._outlook, self._at = outlook, s.now
        top = int(np.argmax(outlook.goodput))
        best = int(outlook.lent[top])
        if self._repays(s, outlook.at(self._best), float(outlook.goodput[top]), abs(best - self._best)):
            self._best = best
        return outlook

    def _repays(self, s: Snapshot, now: float, then: float, experts: int) -> bool:
        """Whether goodput `then` instead of `now` gains more, in `payback` seconds, than copying so many
        experts costs: what it takes to bring them home, or to take their lending back."""
        return (then - now) * self.payback > now * experts * s.expert_page_bytes / s.link_bytes_s

    def _blocked_for(self, s: Snapshot) -> float:
        """Seconds for which the same request has stood first in the queue."""
        if not s.waiting:
            self._first = None
            return 0.0
        arrival = s.now - s.oldest_wait
        if self._first is None or abs(arrival - self._first) > 1e-6:
            self._first, self._first_since = arrival, s.now
        return s.now - self._first_since

    def _lend_to(self, s: Snapshot, best: int, blocked: float, numbers: dict[str, float]) -> BoundaryPlan:
        cap = min(max(0, best - s.lent), s.room_to_lend)
        hidden = min(cap, max(0, int(hidden_experts(s)) - s.lent))
        lend = min(_pages(s.shortfall, s.kv_per_expert), hidden)
        evict = min(max(0, s.shortfall - lend * s.kv_per_expert), s.kv_evictable)
        short = s.shortfall - lend * s.kv_per_expert - evict
        lend += min(_pages(short, s.kv_per_expert), cap - lend)
        cause = "growth" if s.kv_wanted_running > s.kv_obtainable else "admission"

        # What must be placed now, however dear.
        must = s.kv_wanted_running if s.running <= 1 else 0
        if s.waiting and (not s.running or not s.can_finish or blocked >= self.max_wait):
            must = s.kv_wanted_running + s.kv_wanted_first
        lacking = must - s.kv_obtainable - evict - lend * s.kv_per_expert
        forced = min(_pages(lacking, s.kv_per_expert), s.room_to_lend - lend)
        return BoundaryPlan(
            expert_pages=s.expert_resident - lend - forced,
            evict_pages=evict,
            cause="wait" if forced else cause,
            forced=forced > 0,
            preempt_by=preemption_by(s),
            numbers=numbers,
        )
