"""How many pages the experts may hold now: the boundary between expert weights and KV cache.

Room: the boundary policy. Rule: no torch, no clock, no pool; a plain snapshot comes in, a plan with its
reasons goes out. The engine, the simulator and the planner run the same code.

What is given up, in this order (`docs/policy.md`): free pages, cold experts whose misses the step hides,
cached prefixes, a running request, and only then experts that cost link time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rimuru.errors import ConfigError, MemoryPlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a policy may know of one moment. Pages are counts, times seconds, rates bytes a second.

    A rate or time of 0 means: not known yet.
    """

    now: float
    # experts
    expert_total: int  # experts of the model on this device
    expert_resident: int  # of these, in the pool
    expert_lendable: int  # of the resident, those that have a host copy
    expert_floor: int  # never fewer resident than this
    # pages
    expert_page_bytes: int
    kv_page_bytes: int
    kv_per_expert: int  # KV pages cut from one expert's page
    kv_used: int  # held by requests
    kv_obtainable: int  # free, or free once a free expert page is cut; nothing lent or evicted
    kv_evictable: int = 0  # cached prefixes that no request holds
    # demand
    kv_wanted_running: int = 0  # pages the running requests need now, beyond what they hold
    kv_wanted_waiting: int = 0  # pages the waiting requests need to start (first chunk or whole prompt)
    kv_wanted_first: int = 0  # of these, the oldest one's
    running: int = 0
    waiting: int = 0
    max_running: int = 0  # requests the scheduler lets run at once; 0: no limit
    oldest_wait: float = 0.0
    can_finish: bool = True  # running requests will free pages without help
    # measured
    touched: float = 0.0  # (layer, expert) pairs touched a step
    missed: float = 0.0  # of these, not resident
    cold_touches: Sequence[float] = ()  # touches a step of the coldest 0 ... 1 of all experts, evenly spaced
    step_seconds: float = 0.0  # of a step without a prompt in it
    dense_bytes: float = 0.0  # what every step reads beside experts and KV
    link_bytes_s: float = 0.0
    hbm_bytes_s: float = 0.0
    hiding_layers: int = 1  # parts of a step that hide misses by their own reads only; 1: all beside all
    request_kv_pages: float = 0.0  # mean KV pages a request holds over its life
    request_slack_pages: float = 0.0  # that an admission leaves free for each running one to grow into
    request_output_tokens: float = 0.0  # mean
    request_prompt_tokens: float = 0.0  # mean; where it is not known a prompt touches every expert
    prefill_seconds: float = 0.0  # that a mean request's prompt adds to a step, all experts resident
    recompute_seconds: float = 0.0  # price of a preemption by recomputing
    swap_seconds: float = 0.0  # price of a preemption by swapping; 0: cannot swap

    @property
    def lent(self) -> int:
        return self.expert_total - self.expert_resident

    @property
    def room_to_lend(self) -> int:
        """Experts that may still be demoted."""
        return max(0, min(self.expert_lendable, self.expert_resident - self.expert_floor))

    @property
    def shortfall(self) -> int:
        """KV pages wanted beyond the free ones; negative where pages are left over."""
        return self.kv_wanted_running + self.kv_wanted_waiting - self.kv_obtainable


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryPlan:
    """What to do before this step.

    expert_pages: how many experts may be resident; below the present number, demote, above it,
    promote as free pages allow: whole pages that come free go to experts first. evict_pages: KV pages of
    cached prefixes to drop now. cause: `hold`, `growth`, `admission`, `surplus`, `loss` (more is lent than
    pays), `wait` (forced). preempt_by: the cheaper way, should the scheduler have to preempt.
    """

    expert_pages: int
    evict_pages: int = 0
    cause: str = "hold"
    forced: bool = False
    preempt_by: str = "recompute"
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the pool could hold at start, in pages; prefill buffers and transients are already taken off."""

    pool_pages: int  # expert-size pages in all
    expert_total: int
    expert_lendable: int  # experts that have (or can have) a host copy
    expert_floor: int  # lower limit of resident experts the engine asks for
    expert_page_bytes: int
    kv_page_bytes: int
    kv_per_expert: int
    kv_min: int  # KV pages without which serving makes no sense: one longest request

    @property
    def least_resident(self) -> int:
        """Experts that stay whatever happens: the floor, or those without a host copy."""
        return max(self.expert_floor, self.expert_total - self.expert_lendable)

    @property
    def kv_min_pages(self) -> int:
        """`kv_min` in expert-size pages."""
        return -(-self.kv_min // self.kv_per_expert)


class BoundaryPolicy(Protocol):
    """One interface for the engine, the simulator and the planner."""

    @property
    def name(self) -> str: ...

    def least_resident(self, capacity: Capacity) -> int:
        """The fewest experts this policy will ever keep resident."""

    def start(self, capacity: Capacity) -> int:
        """Experts resident at start. Raises `MemoryPlanError` where serving is impossible."""

    def decide(self, snapshot: Snapshot) -> BoundaryPlan:
        """The plan for this step. Never below the floor, never more victims than are lendable."""


def reachable_kv_pages(policy: BoundaryPolicy, capacity: Capacity) -> int:
    """KV pages with every expert lent that the policy may lend; admission refuses what needs more."""
    return max(0, capacity.pool_pages - policy.least_resident(capacity)) * capacity.kv_per_expert


def start_check(policy: BoundaryPolicy, capacity: Capacity) -> None:
    """Raise `MemoryPlanError` unless the least resident experts and one longest request fit together."""
    resident = policy.least_resident(capacity)
    need = resident + capacity.kv_min_pages
    if need <= capacity.pool_pages:
        return
    c, unit = capacity, capacity.expert_page_bytes
    kv_left = max(0, c.pool_pages - resident) * c.kv_per_expert
    advice = [f"give the pool at least {_gb(need * unit)}"]
    if kv_left:
        advice.append(f"lower --max-model-len (room for {kv_left} of the {c.kv_min} KV pages one such needs)")
    if policy.name in ("fixed", "static"):
        flexible = c.least_resident + c.kv_min_pages
        if flexible <= c.pool_pages:
            advice.append("choose --memory-policy reactive, which lends experts to the KV cache")
    elif c.expert_lendable < c.expert_total - c.expert_floor:
        advice.append("raise --host-memory, so that more experts can be lent")
    raise MemoryPlanError(
        f"memory policy {policy.name!r} keeps {resident} of {c.expert_total} experts resident "
        f"({_gb(resident * unit)}) and needs {_gb(c.kv_min_pages * unit)} of KV cache for one request of "
        f"the longest length, but the pool holds {_gb(c.pool_pages * unit)}: {'; or '.join(advice)}"
    )


def hidden_experts(s: Snapshot, per_expert: float | None = None) -> float:
    """h*: how many experts can be lent before their misses outlast the step's own HBM reads.

    The link carries `HBM time x link rate` bytes beside what hides them: the reads of experts, or of the
    whole step where misses are fetched ahead. An expert lent is missed `per_expert` times a step (by
    default the mean touch rate). 0 where a rate is not known.
    """
    if not (s.link_bytes_s and s.hbm_bytes_s and s.touched):
        return 0.0
    rate = s.touched / s.expert_total if per_expert is None else per_expert
    reads = s.touched * s.expert_page_bytes
    if s.hiding_layers == 1:
        reads += s.dense_bytes + s.kv_used * s.kv_page_bytes
    hidden = reads / s.hbm_bytes_s * s.link_bytes_s / s.expert_page_bytes
    return min(float(s.expert_total), hidden / max(rate, 1e-9))


def preemption_by(s: Snapshot) -> str:
    """The cheaper way to preempt a request."""
    return "swap" if 0 < s.swap_seconds < s.recompute_seconds else "recompute"


class Fixed:
    """Every expert stays resident; KV gets the rest."""

    name = "fixed"

    def least_resident(self, capacity: Capacity) -> int:
        return capacity.expert_total

    def start(self, capacity: Capacity) -> int:
        start_check(self, capacity)
        return capacity.expert_total

    def decide(self, snapshot: Snapshot) -> BoundaryPlan:
        return _hold(snapshot, snapshot.expert_resident)


class Static:
    """`resident` experts stay in the pool, chosen by the residency policy; the boundary never moves."""

    name = "static"

    def __init__(self, resident: int):
        if resident < 0:
            raise ConfigError(f"--resident-experts must be at least 0, got {resident}")
        self.resident = resident

    def least_resident(self, capacity: Capacity) -> int:
        """As many as were asked for. Raises where no pool, however large, could serve with so many."""
        c = capacity
        if self.resident > c.expert_total:
            raise ConfigError(f"--resident-experts {self.resident}: the model has {c.expert_total} experts")
        if self.resident < c.least_resident:
            raise MemoryPlanError(
                f"--resident-experts {self.resident}: at least {c.least_resident} must stay resident "
                f"({c.expert_lendable} of {c.expert_total} experts have a host copy); raise --host-memory "
                f"or --resident-experts"
            )
        return self.resident

    def start(self, capacity: Capacity) -> int:
        start_check(self, capacity)
        return self.resident

    def decide(self, snapshot: Snapshot) -> BoundaryPlan:
        return _hold(snapshot, self.resident)


class Reactive:
    """The paper's rule: lend when KV demand climbs, give back when requests finish.

    Cold experts that the step hides go first, then cached prefixes, then any expert down to the
    floor. Pages come back when nothing waits and more KV is free than the demand plus a reserve,
    `hold` seconds after the last lending at the soonest, and four times the link time the move takes.
    """

    name = "reactive"

    def __init__(self, *, reserve: float = 0.1, hold: float = 0.25, reclaim_limit: int = 16):
        self.reserve, self.hold, self.reclaim_limit = reserve, hold, reclaim_limit
        self._quiet_since: float | None = None

    def least_resident(self, capacity: Capacity) -> int:
        return capacity.least_resident

    def start(self, capacity: Capacity) -> int:
        start_check(self, capacity)
        return min(capacity.expert_total, capacity.pool_pages - capacity.kv_min_pages)

    def decide(self, snapshot: Snapshot) -> BoundaryPlan:
        s = snapshot
        # A cache full of prefixes leaves no page free, and growth that takes theirs disturbs nobody.
        if s.shortfall > s.kv_evictable or s.waiting:
            self._quiet_since = None
            return self._lend(s) if s.shortfall > 0 else _hold(s, s.expert_resident)
        if self._quiet_since is None:
            self._quiet_since = s.now
        return self._lend(s) if s.shortfall > 0 else self._give_back(s)

    def _lend(self, s: Snapshot) -> BoundaryPlan:
        hidden = hidden_experts(s)
        free_to_lend = min(s.room_to_lend, max(0, int(hidden) - s.lent))
        lend = min(_pages(s.shortfall, s.kv_per_expert), free_to_lend)
        short = s.shortfall - lend * s.kv_per_expert
        evict = min(max(short, 0), s.kv_evictable)
        lend += min(_pages(short - evict, s.kv_per_expert), s.room_to_lend - lend)
        return BoundaryPlan(
            expert_pages=s.expert_resident - lend,
            evict_pages=evict,
            cause="growth" if s.kv_wanted_running > s.kv_obtainable else "admission",
            preempt_by=preemption_by(s),
            numbers={"shortfall": s.shortfall, "hidden_experts": hidden},
        )

    def _give_back(self, s: Snapshot) -> BoundaryPlan:
        reserve = s.kv_per_expert + int(self.reserve * s.kv_used)
        spare = -s.shortfall - reserve
        # A cached prefix gives way to an expert whose misses cost link time, not to a hidden one.
        costly = max(0, s.lent - int(hidden_experts(s)))
        from_free = min(max(spare, 0) // s.kv_per_expert, s.lent)
        from_cache = min(max(spare + s.kv_evictable, 0) // s.kv_per_expert, costly)
        back = min(max(from_free, from_cache), self.reclaim_limit)
        copy_seconds = back * s.expert_page_bytes / s.link_bytes_s if s.link_bytes_s else 0.0
        quiet = s.now - self._quiet_since if self._quiet_since is not None else 0.0
        if back == 0 or quiet < max(self.hold, 4 * copy_seconds):
            return _hold(s, s.expert_resident)
        return BoundaryPlan(
            expert_pages=s.expert_resident + back,
            evict_pages=min(max(0, back * s.kv_per_expert - max(spare, 0)), s.kv_evictable),
            cause="surplus",
            preempt_by=preemption_by(s),
            numbers={"spare": spare, "reserve": reserve, "copy_seconds": copy_seconds},
        )


class Swing:
    """For tests: every other step the boundary gives up `fraction` of the experts, then takes them back.

    Demand is still met as `Reactive` would, so that a test can serve requests across the swings.
    """

    name = "swing"

    def __init__(self, fraction: float):
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be in [0, 1], got {fraction}")
        self.fraction = fraction
        self._demand = Reactive(hold=0.0, reclaim_limit=1 << 30)
        self._low = False

    def least_resident(self, capacity: Capacity) -> int:
        return capacity.least_resident

    def start(self, capacity: Capacity) -> int:
        return self._demand.start(capacity)

    def decide(self, snapshot: Snapshot) -> BoundaryPlan:
        s = snapshot
        self._low = not self._low
        plan = self._demand.decide(s)
        if not self._low:
            back = max(0, -s.shortfall) // s.kv_per_expert
            target = max(plan.expert_pages, min(s.expert_total, s.expert_resident + back))
            return BoundaryPlan(expert_pages=target, evict_pages=plan.evict_pages, cause="swing")
        down = min(round(self.fraction * s.expert_total), s.room_to_lend)
        target = min(plan.expert_pages, s.expert_resident - down)
        return BoundaryPlan(expert_pages=target, evict_pages=plan.evict_pages, cause="swing")


class DecisionLog:
    """The last `size` decisions that moved something, with their numbers, and counts of all moves.

    `moves` counts by (policy, cause, direction); direction is `lend`, `reclaim` or `evict`.
    """

    def __init__(self, size: int = 1024):
        self.moves: Counter[tuple[str, str, str]] = Counter()
        self._ring: deque[dict[str, Any]] = deque(maxlen=size)
        self._last: tuple[int, int, int] | None = None

    def note(self, policy: str, snapshot: Snapshot, plan: BoundaryPlan) -> None:
        """Record `plan` unless it holds, or repeats the plan before it in an unchanged situation."""
        state = (snapshot.expert_resident, plan.expert_pages, plan.evict_pages)
        if state == self._last:
            return
        self._last = state
        change = plan.expert_pages - snapshot.expert_resident
        if change:
            self.moves[policy, plan.cause, "reclaim" if change > 0 else "lend"] += 1
        if plan.evict_pages:
            self.moves[policy, plan.cause, "evict"] += 1
        if change or plan.evict_pages:
            self._ring.append(
                {
                    "time": snapshot.now,
                    "policy": policy,
                    "cause": plan.cause,
                    "forced": plan.forced,
                    "resident": snapshot.expert_resident,
                    "expert_pages": plan.expert_pages,
                    "evict_pages": plan.evict_pages,
                    "running": snapshot.running,
                    "waiting": snapshot.waiting,
                    "oldest_wait": snapshot.oldest_wait,
                    **plan.numbers,
                }
            )

    def recent(self, n: int | None = None) -> list[dict[str, Any]]:
        """The last `n` decisions (all that are kept by default), oldest first."""
        records = list(self._ring)
        return records if n is None else records[len(records) - min(n, len(records)) :]


def make_policy(
    name: str,
    *,
    resident_experts: int | None = None,
    max_boundary_wait: float = 2.0,
    ttft_slo_ms: float | None = None,
    itl_slo_ms: float | None = None,
) -> BoundaryPolicy:
    """The policy of `--memory-policy NAME`; waits and objectives are those of `economic`.

    Raises `ConfigError` for names and values that cannot be.
    """
    if name == "static":
        if resident_experts is None:
            raise ConfigError("--memory-policy static needs --resident-experts N")
        return Static(resident_experts)
    if name == "fixed":
        return Fixed()
    if name == "reactive":
        return Reactive()
    if name == "economic":
        from .economic import Economic  # it builds on this module

        return Economic(max_wait=max_boundary_wait, ttft_slo_ms=ttft_slo_ms, itl_slo_ms=itl_slo_ms)
    raise ConfigError(f"--memory-policy {name!r} is unknown; choose one of fixed, static, reactive, economic")


def _hold(s: Snapshot, target: int) -> BoundaryPlan:
    """Move nothing; cached prefixes still make room for requests."""
    evict = min(max(s.shortfall, 0), s.kv_evictable)
    return BoundaryPlan(expert_pages=target, evict_pages=evict, preempt_by=preemption_by(s))


def _pages(kv: int, per_page: int) -> int:
    return max(0, -(-kv // per_page))


def _gb(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e7 else f"{n / 1e6:.2f} MB"
