"""Who holds which page: KV blocks of the running requests, cached prefixes, resident experts.

Room: between the scheduler and the pool. Rule: pure Python and numpy, stepped by the engine and the
simulator alike; it carries out what the boundary policy decides and decides nothing of its own but
the order: free pages first, then the policy's plan, and only then a preemption by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rimuru.cache.kv import KVCache, Move
from rimuru.cache.prefix import extend_keys, new_seed
from rimuru.cache.state import StateCache
from rimuru.policy.boundary import BoundaryPlan, BoundaryPolicy, DecisionLog, Snapshot
from rimuru.policy.cost import CostModel
from rimuru.policy.residency import ResidencyPolicy

from .plan import MemoryPlan
from .request import Request

if TYPE_CHECKING:
    from .scheduler import Scheduler

RECONSIDER = 16  # steps after which the boundary is looked at again without any demand
PROMOTIONS = (2, 64)  # experts brought in after a step: at least, and at most
IDLE_SHARE = 0.65  # of the time that a step's misses leave the link may go to promotions
DEAR_GAIN = 0.25  # touches a step; a copy that steps wait for is repaid where its gain is more
MOVE_BYTES = 256 << 20  # of one page class moved at a time: 0.2 ms of an H200's memory, read and written


def promotions_idle(step_seconds: float, missed: float, link_seconds: float) -> int:
    """How many experts a step's misses leave the link time to bring in: those cost next to nothing.

    missed: experts a step; link_seconds: what the link takes for one.
    """
    return int(IDLE_SHARE * max(0.0, step_seconds / link_seconds - missed))


def promotions_worth(gains: np.ndarray, idle: int) -> np.ndarray:
    """Which promotions to make, bool `[n]`: the first `idle`, and those that repay a copy steps wait for.

    gains: how many more touches a step each will serve, the greatest first. What is ranked high is ranked too
    high, and the next ranking undoes it: a gain lasts about `1 / DEAR_GAIN` steps.
    """
    return (np.arange(len(gains)) < idle) | (gains > DEAR_GAIN)


class Experts(Protocol):
    """The experts as tenants: the engine's store moves bytes, the simulator's only counts them."""

    resident: np.ndarray  # bool [L, E]
    lendable: np.ndarray  # bool [L, E], those with a host copy

    @property
    def in_flight(self) -> np.ndarray:
        """Bool `[L, E]`: those with a page whose bytes are on their way."""
        ...

    def promote(self, experts: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Bring experts in while pages last; returns those that came."""
        ...

    def demote(self, experts: list[tuple[int, int]]) -> None:
        """Drop the pool copies of resident, lendable experts; their pages are free at once."""
        ...

    def check(self) -> None: ...


class Memory:
    """The tenants of one pool, and the boundary between them."""

    def __init__(
        self,
        cache: KVCache,
        experts: Experts,
        residency: ResidencyPolicy,
        boundary: BoundaryPolicy,
        plan: MemoryPlan,
        on_freed: Callable[[list[tuple[int, int]]], None] | None = None,
        states: StateCache | None = None,
        move_pages: Callable[[int, Sequence[int], Sequence[int]], None] | None = None,
    ):
        """`on_freed` is told the (class, page) of KV and state pages given back, before anybody fills them.
        `states`: the recurrent states of a hybrid model. `move_pages(class, sources, targets)` copies whole
        pages, after every step launched before and before the tables are flushed for the next; without it
        pages stay where they are.
        """
        self.cache, self.experts, self.residency, self.boundary = cache, experts, residency, boundary
        self.states, self.state_blocks = states, plan.state_blocks
        self.plan, self.units = plan, plan.units
        self._expert_bytes = plan.geometry.classes[plan.expert_class].page_bytes
        self.block_tokens = plan.block_tokens
        self.max_request_tokens = plan.max_request_tokens
        self.prefix_caching = cache.prefix_caching
        self.held = cache.held
        self.log = DecisionLog()
        self.target = int(experts.resident.sum())  # experts the boundary allows to be resident
        self.expert_hits = self.expert_misses = 0
        self.promotions = self.demotions = 0
        self.cost: CostModel | None = None  # the machine's rates, where they are known
        self._on_freed, self._move_pages = on_freed, move_pages
        self.moved_bytes = 0  # by `compact`
        self._seed = new_seed()
        self._touched = self._missed = self.step_seconds = 0.0
        self._steps = self._decodes = 0
        self._considered = 0
        self._cold: Sequence[float] = ()
        self._ranked = -RECONSIDER  # the step at which `_cold` was made

    def know(self, cost: CostModel) -> None:
        """Tell the policies the machine's rates; again whenever a fit of them has moved."""
        self.cost = cost

    @property
    def missing_share(self) -> float:
        """Share of the experts that is not resident."""
        total = self.plan.experts_total
        return 1 - int(np.count_nonzero(self.experts.resident)) / total if total else 0.0

    @property
    def arriving(self) -> bool:
        """Whether experts are on their way into the pool: none of those can leave before it is there."""
        return bool(self.experts.in_flight.any())

    # -- what the scheduler asks for -------------------------------------------------------

    def extend_keys(self, request: Request) -> None:
        """Bring the request's prefix-cache keys up to its full blocks."""
        known = request.tokens[: -request.unknown] if request.unknown else request.tokens
        extend_keys(request.block_keys, known, self.block_tokens, self._seed, request.cache_salt)

    def match(self, keys: list[bytes]) -> int:
        """The most leading blocks that a request may start after: cached, and with a recurrent model the
        state at their end as well."""
        blocks = self.cache.match(keys)
        return blocks if self.states is None else self.states.match(keys[:blocks])

    def try_admit(
        self,
        slot: int,
        keys: list[bytes],
        hit: int,
        blocks: int,
        slack: int,
        scheduler: Scheduler,
        now: float,
    ) -> bool:
        """Give a waiting request its cached blocks and fresh ones up to `blocks`; all or nothing.

        `slack` blocks must stay free beside them.
        """
        states, start = self.states, keys[hit - 1] if hit else None
        self.cache.admit(slot, keys, hit)  # holds the hits, so that making room cannot evict them
        if states is not None and start is not None:
            states.hold(start)
        admitted = (
            (states is None or self._place_state(slot, start, scheduler, now))
            and self.make_room(blocks - hit + slack, scheduler, now)
            and self.cache.grow(slot, blocks, True) == 0
        )
        if states is not None and start is not None:
            states.let_go(start)
            if admitted:
                self.poison_freed()
                states.resume(slot, start)
        if not admitted:
            self.release(slot)
        return admitted

    def _place_state(self, slot: int, start: bytes | None, scheduler: Scheduler, now: float) -> bool:
        """Give a slot pages for its state. A request that starts from a checkpoint can do without: it
        takes over the checkpoint's own where no others are to be had for nothing."""
        states, cache = self.states, self.cache
        assert states is not None
        if states.acquire(slot):
            return True
        if states.drop(self._is_cached) and states.acquire(slot):
            return True
        if start is not None:
            return True
        if states.evict(1) and states.acquire(slot):
            return True
        # From here on whole parents have to come back: from what is reserved or lies apart, from experts,
        # from cached prefixes.
        parents = -(-self.plan.state_bytes // self._expert_bytes)
        if cache.take_back_reserved() and states.acquire(slot):
            return True
        if self.compact(parents) and states.acquire(slot):
            return True
        resident = -1
        while resident != (resident := int(np.count_nonzero(self.experts.resident))):
            self._consider(scheduler, now, wanted=cache.free_blocks() + self.state_blocks)
            if states.acquire(slot):
                return True
        if self.compact(parents, over_cached=True) and states.acquire(slot):
            return True
        while cache.evict(self.state_blocks):
            if states.acquire(slot):
                return True
        return False

    def _is_cached(self, key: bytes) -> bool:
        return self.cache.match([key]) == 1

    def can_save_state(self) -> bool:
        """Whether `save_state` would find pages."""
        return self.states is not None and self.prefix_caching and self.states.can_save()

    def save_state(self, slot: int, keys: list[bytes], blocks: int) -> None:
        """Keep a copy of a slot's state, which is that of the end of its first `blocks` blocks."""
        if self.states is not None and self.prefix_caching:
            self.poison_freed()
            self.states.save(slot, keys[:blocks])

    def grow(self, wanted: list[tuple[int, int]]) -> None:
        """Give running requests (slot, blocks in all); `make_room` has said that it fits."""
        slots, totals = zip(*wanted, strict=True)
        short = self.cache.grow_many(slots, totals)
        assert not short, f"slots {short} lack blocks that were free a moment ago"

    def commit(self, slot: int, keys: list[bytes], blocks: int) -> None:
        """Publish the first `blocks` blocks of a slot for sharing."""
        self.cache.commit(slot, keys, blocks)

    def release(self, slot: int) -> None:
        """Take a slot's pages back; published blocks stay cached until somebody needs them."""
        self.cache.release(slot)
        if self.states is not None:
            self.states.release(slot)

    def reset_prefix(self) -> None:
        """Forget every cached prefix that no request holds, and every state to start one from."""
        self.cache.reset_prefix()
        if self.states is not None:
            self.states.evict(self.states.checkpoints)

    def room(self) -> int:
        """Blocks that can be had now, cached ones that nobody holds included."""
        return self.cache.free_blocks() + self.cache.evictable_blocks()

    def make_room(self, blocks: int, scheduler: Scheduler, now: float) -> bool:
        """Have `blocks` blocks free or evictable, asking the boundary for more where they are not."""
        if blocks <= self.cache.free_blocks():
            return True
        states = self.states
        if states is not None and states.drop(self._is_cached) and blocks <= self.cache.free_blocks():
            return True
        self._ask(blocks, scheduler, now)
        while blocks > self.room():
            if states is None or not (self.compact(1) or states.evict(1)):
                return False
        return True

    def _ask(self, blocks: int, scheduler: Scheduler, now: float) -> None:
        """Consult the boundary until `blocks` blocks can be had or it gives no more.

        An expert or a checkpoint that left is no room yet where its page was cut from one that others share;
        but once no checkpoint is left to give, the boundary lends experts instead.
        """
        while True:
            room, left = self.room(), self._may_leave()
            self._consider(scheduler, now, wanted=blocks)
            given = self.room() > room or self._may_leave() < left
            if blocks <= self.room() or not given:
                return

    def _may_leave(self) -> int:
        """Experts in the pool and checkpoints."""
        checkpoints = 0 if self.states is None else self.states.checkpoints
        return int(np.count_nonzero(self.experts.resident)) + checkpoints

    # -- after each step -------------------------------------------------------------------

    def after_step(
        self, touched: np.ndarray, scheduler: Scheduler, now: float, seconds: float, prompt_tokens: int = 0
    ) -> None:
        """Learn from a step what it touched, int `[L, E]`, and let the boundary move.

        The averages that the boundary sees are those of steps without a prompt's tokens.
        """
        hit = touched > 0
        resident = self.experts.resident
        pairs = int(np.count_nonzero(hit))
        missed = pairs - int(np.count_nonzero(hit & resident))
        self.expert_hits += pairs - missed
        self.expert_misses += missed
        self._steps += 1
        if not prompt_tokens:
            self._decodes += 1
            weight = max(0.1, 1 / self._decodes)
            self._touched += (pairs - self._touched) * weight
            self._missed += (missed - self._missed) * weight
            self.step_seconds += (seconds - self.step_seconds) * weight
        if not self.plan.experts_lendable:
            return
        whole = self.target >= self.plan.experts_total and resident.all()
        if whole and not scheduler.waiting and self._steps % RECONSIDER:
            return
        # Also where nothing is lent: who is cold decides whether the first lending pays.
        self.residency.observe(self._steps, touched)
        if whole:
            return
        if self._steps - self._considered >= RECONSIDER or self.boundary.name == "swing":
            self._consider(scheduler, now, wanted=0)
        self._promote()

    def rest(self, scheduler: Scheduler, now: float) -> None:
        """Between requests: let the boundary give pages back to the experts."""
        self._consider(scheduler, now, wanted=0)
        self._promote()

    def _consider(self, scheduler: Scheduler, now: float, wanted: int) -> None:
        self._considered = self._steps
        before = self._snapshot(scheduler, now, wanted)
        plan = self.boundary.decide(before)
        self.log.note(self.boundary.name, before, plan)
        self._apply(plan, before.expert_resident)

    def _snapshot(self, scheduler: Scheduler, now: float, wanted: int) -> Snapshot:
        units, plan, experts = self.units, self.plan, self.experts
        per_block = units.per_block
        resident = int(np.count_nonzero(experts.resident | experts.in_flight))
        oldest = scheduler.oldest_wait
        used, evictable = self.cache.counts().used, self.cache.evictable_blocks()
        if self.states is not None:
            used += self.states.active * self.state_blocks
            evictable += self.states.checkpoints * self.state_blocks
        known: dict[str, Any] = {}
        if self.cost is not None:
            cost = self.cost
            known = {
                "dense_bytes": cost.model.dense_bytes,
                "link_bytes_s": cost.card.link_bytes_s / max(cost.factors.link, 1e-9),
                "hbm_bytes_s": cost.card.hbm_bytes_s / max(cost.factors.hbm, 1e-9),
                "hiding_layers": cost.hiding_layers,
                "prefill_seconds": cost.factors.mix + cost.recompute_seconds(scheduler.mean_prompt),
                "recompute_seconds": cost.recompute_seconds(
                    scheduler.mean_prompt + scheduler.mean_output / 2
                ),
            }
        return Snapshot(
            now=now, expert_total=plan.experts_total, expert_resident=resident,
            expert_lendable=int(np.count_nonzero(experts.resident & experts.lendable)),
            expert_floor=plan.experts_floor,
            expert_page_bytes=self._expert_bytes,
            kv_page_bytes=units.page_bytes, kv_per_expert=units.per_expert, kv_used=used * per_block,
            kv_obtainable=self.cache.free_blocks() * per_block,
            kv_evictable=evictable * per_block,
            kv_wanted_running=wanted * per_block if scheduler.growing else 0,
            kv_wanted_waiting=0 if scheduler.growing else wanted * per_block,
            kv_wanted_first=0 if scheduler.growing else wanted * per_block,
            running=len(scheduler.running), waiting=len(scheduler.waiting),
            oldest_wait=0.0 if oldest is None else now - oldest, can_finish=bool(scheduler.running),
            max_running=scheduler.max_num_seqs, touched=self._touched, missed=self._missed,
            cold_touches=self._cold_touches(), step_seconds=self.step_seconds,
            request_kv_pages=used * per_block / len(scheduler.running) if scheduler.running else 0.0,
            request_slack_pages=scheduler.slack_blocks * per_block,
            request_output_tokens=scheduler.mean_output, request_prompt_tokens=scheduler.mean_prompt, **known,
        )  # fmt: skip

    def _cold_touches(self) -> Sequence[float]:
        """The residency policy's forecast of misses, and what a step hides of them, renewed at times."""
        if self._steps - self._ranked >= RECONSIDER and self.plan.experts_lendable:
            self._ranked = self._steps
            if self.residency.probability().any():
                self._cold = self.residency.cold_touches().tolist()
            if self.cost is not None:
                layers = self.experts.resident.shape[0]
                self.residency.hide(round(self.cost.hidden_experts_per_layer(self._touched / layers), 1))
        return self._cold

    def _apply(self, plan: BoundaryPlan, resident: int) -> None:
        self.target = plan.expert_pages
        if plan.evict_pages:
            self._evict(-(-plan.evict_pages // self.units.per_block))
        if plan.expert_pages < resident:
            self._demote(resident - plan.expert_pages)

    def _evict(self, blocks: int) -> None:
        """Forget cached prefixes worth `blocks` blocks: KV first, then states, those without KV at once."""
        blocks -= self.cache.evict(blocks)
        if self.states is not None:
            self.states.drop(self._is_cached)
            if blocks > 0:
                self.states.evict(-(-blocks // self.state_blocks))

    def _demote(self, n: int) -> None:
        experts = self.experts
        victims = self.residency.victims(n, experts.resident, experts.lendable)
        experts.demote(victims)
        self.demotions += len(victims)

    def _promote(self) -> None:
        """Bring in the experts most worth it, as far as the boundary and free pages allow."""
        experts, residency = self.experts, self.residency
        held = experts.resident | experts.in_flight
        room = max(0, self.target - int(np.count_nonzero(held)))
        idle, most = self._promotions_allowed()
        if room:
            self._whole_pages(min(room, idle), min(room, 4 * idle))
        swaps = residency.promotions(
            held, most, free=min(room, most), lendable=experts.lendable, in_use=experts.in_flight
        )
        if not swaps:
            return
        p = residency.probability()
        gains = np.array([p[s.promote] - (0.0 if s.demote is None else p[s.demote]) for s in swaps])
        swaps = [swap for swap, worth in zip(swaps, promotions_worth(gains, idle), strict=True) if worth]
        self.poison_freed()
        leaving = [s.demote for s in swaps if s.demote is not None]
        experts.demote(leaving)
        came = experts.promote([s.promote for s in swaps])
        self.demotions += len(leaving)
        self.promotions += len(came)

    def _promotions_allowed(self) -> tuple[int, int]:
        """Experts that may be brought in now: without asking what they gain, and at most."""
        least, most = PROMOTIONS
        if self.boundary.name == "swing":
            return self.plan.experts_total, self.plan.experts_total
        if self.cost is None or self.cost.card.link_bytes_s >= self.cost.card.hbm_bytes_s:
            return least, least  # unknown, or one memory for both: copies would only cost
        link_seconds = self._expert_bytes / self.cost.card.link_bytes_s
        idle = promotions_idle(self.step_seconds, self._missed, link_seconds)
        return max(least, min(most, idle)), most

    def _whole_pages(self, experts: int, lot: int) -> None:
        """Where fewer than `experts` expert pages are free, make it `lot`, from pages reserved ahead, from
        such as lie apart and from cached prefixes: looking at all of those is not for every step."""
        cache, cls = self.cache, self.plan.expert_class
        if cache.allocator.obtainable(cls) >= experts:
            return
        # The cheapest first: pages moved cost a copy on the device, prefixes forgotten a computation.
        for make in (
            lambda parents: cache.take_back_reserved(),
            self.compact,
            cache.evict_parents,
            lambda parents: self.compact(parents, over_cached=True),
            cache.evict_parents,
        ):
            lacking = lot - cache.allocator.obtainable(cls)
            if lacking <= 0:
                return
            make(lacking)

    def compact(self, parents: int | None = None, over_cached: bool = False) -> int:
        """Move pages of KV and states together, so that `parents` of their parents come back whole (None:
        as many as can be); the bytes moved. `over_cached`: see `KVCache.compact`.

        Experts do not move: one that can leave its page has a host copy and is demoted instead.
        """
        if self._move_pages is None:
            return 0
        self.poison_freed()  # of what was given back before, some will be filled now
        classes = self.plan.geometry.classes
        before = self.moved_bytes
        moved: dict[int, list[Move]] = {}
        for move in self.cache.compact(MOVE_BYTES, over_cached=over_cached, parents=parents):
            moved.setdefault(move.cls, []).append(move)
        for cls, moves in moved.items():
            self._move_pages(cls, [m.source for m in moves], [m.target for m in moves])
            self.moved_bytes += len(moves) * classes[cls].page_bytes
        if self.states is not None:
            for cls, n in self.states.compact(MOVE_BYTES, parents).items():
                self.moved_bytes += n * classes[cls].page_bytes
        return self.moved_bytes - before

    def poison_freed(self) -> None:
        """Report the pages given back since the last call; call it before pages are filled."""
        if self._on_freed is not None:
            self._on_freed(self.cache.freed() + (self.states.freed() if self.states else []))

    # -- truth -----------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that every page is accounted for in each part."""
        self.cache.check()
        self.experts.check()
        if self.states is not None:
            self.states.check()
        held = int(np.count_nonzero(self.experts.resident | self.experts.in_flight))
        assert held >= self.plan.experts_floor, "below the floor"
