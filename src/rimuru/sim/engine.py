"""The engine on paper: the real scheduler, memory and policies, stepped with predicted times.

Room: the simulator's loop. Rule: every decision is made by the engine's own classes; here is only what
the hardware would do: which experts a step touches (`routing`), and how long it takes (`policy.cost`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from rimuru.cache.kv import KVCache
from rimuru.cache.state import StateCache
from rimuru.engine.budget import PromptBudget
from rimuru.engine.config import EngineConfig
from rimuru.engine.memory import Memory
from rimuru.engine.plan import MemoryPlan, plan_memory
from rimuru.engine.rates import model_cost
from rimuru.engine.request import Phase, Request, SamplingParams
from rimuru.engine.scheduler import Scheduler, StepPlan, StepResult
from rimuru.engine.sizes import sizes_of
from rimuru.errors import RequestError
from rimuru.models.config import DTYPE_BYTES, ModelConfig
from rimuru.policy.boundary import make_policy
from rimuru.policy.cost import GPU, CostModel, Factors, Step
from rimuru.policy.residency import ResidencyPolicy
from rimuru.pool import Allocator, Kind

from .experts import CountedExperts
from .routing import Routing
from .trace import Arrival

STALL = 1e-3  # seconds until a step that could place nothing is tried again
GIVE_UP = 600.0  # simulated seconds without any progress: a policy that waits for ever


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the simulation assumes of the machine, beside the model and the engine's flags.

    `overlap` is `CostModel.overlap`. `reserve_bytes`: device bytes that are neither weights nor pool,
    None for the engine's own bound. `slack_blocks`: see `Scheduler`.
    """

    card: GPU
    factors: Factors = field(default_factory=Factors)
    overlap: str = "layer"
    reserve_bytes: int | None = None
    host_bytes: int = 256 << 30


@dataclass(slots=True)
class Series:
    """What happened at each step, one value a step; `clock` is the step's end in seconds."""

    clock: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    kv_blocks: list[int] = field(default_factory=list)  # used by requests
    tokens: list[int] = field(default_factory=list)  # computed
    outputs: list[int] = field(default_factory=list)  # sampled
    link_bytes: list[float] = field(default_factory=list)


class Simulation:
    """One replica of the engine. `run` it on arrivals, or drive it with `add` and `step`."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        hardware: Hardware,
        routing: Routing,
        *,
        slack_blocks: int = 1,
        gather: bool = True,
        ttft_slo_ms: float | None = None,
        itl_slo_ms: float | None = None,
    ):
        """`slack_blocks`, and without `gather` no predicted step budget: see `Scheduler`."""
        config.check()
        itemsize = DTYPE_BYTES[model.dtype if config.dtype == "auto" else config.dtype]
        self.model, self.config, self.hardware, self.routing = model, config, hardware, routing
        self.plan: MemoryPlan = plan_memory(
            config, sizes_of(model, config, itemsize), device_available=hardware.card.memory_bytes,
            host_available=hardware.host_bytes, device_is_host=False, reserve=hardware.reserve_bytes,
        )  # fmt: skip
        plan, geometry = self.plan, self.plan.geometry
        self.expert_bytes = geometry.classes[plan.expert_class].page_bytes
        self.cost = CostModel(
            model_cost(model, self.expert_bytes, itemsize),
            hardware.card, hardware.factors, hardware.overlap,
        )  # fmt: skip
        allocator = Allocator(geometry, plan.pool_bytes)
        layers = len(model.moe_layers)
        self.experts = CountedExperts(
            layers, model.num_experts, allocator=allocator, page_class=plan.expert_class,
            lendable=plan.experts_lendable, resident=plan.experts_resident,
        )  # fmt: skip
        kv_groups = [g.page_class for g in geometry.groups_of(Kind.KV)]
        cache = KVCache(
            allocator, kv_groups, config.block_size, config.max_num_seqs,
            -(-plan.max_model_len // config.block_size), None, config.enable_prefix_caching,
        )  # fmt: skip
        boundary = make_policy(
            config.memory_policy, resident_experts=config.resident_experts,
            max_boundary_wait=config.max_boundary_wait, ttft_slo_ms=ttft_slo_ms, itl_slo_ms=itl_slo_ms,
        )  # fmt: skip
        residency = ResidencyPolicy(layers, model.num_experts)
        states = None
        if plan.state_groups:
            state_groups = [g.page_class for g in plan.state_groups]
            states = StateCache(allocator, state_groups, config.max_num_seqs)
        self.memory = Memory(
            cache, self.experts, residency, boundary, plan, states=states,
            move_pages=lambda cls, source, target: None,
        )  # fmt: skip
        self.memory.know(self.cost)
        budget = PromptBudget.of(ttft_slo_ms, itl_slo_ms) if gather else None
        self.scheduler = Scheduler(
            self.memory, max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens, max_model_len=plan.max_model_len,
            slack_blocks=slack_blocks, budget=budget,
        )  # fmt: skip
        self.now = 0.0
        self.series = Series()
        self.refused: list[str] = []
        self.first_tokens: list[tuple[float, float]] = []  # arrival and TTFT of those that finished
        self.gaps = array("f")  # seconds from each token to the next of its request, preemptions included
        self._numbers: dict[str, int] = {}
        self._counted = 0  # link bytes of promotions that a step has paid for
        self._moved = 0  # bytes of moved pages that a step has paid for

    # -- requests --------------------------------------------------------------------------------

    def add(self, arrival: Arrival, number: int) -> bool:
        """Queue a request; false, and a line in `refused`, where the engine would refuse it."""
        name = str(number)
        request = Request(
            name, [arrival.conversation] * arrival.prompt, SamplingParams(max_tokens=arrival.output),
            max_tokens=arrival.output, arrival=arrival.at,
        )  # fmt: skip
        try:
            self.scheduler.add(request)
        except RequestError as error:
            self.refused.append(f"request {number}: {error}")
            return False
        self._numbers[name] = number
        return True

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Serve all arrivals (in order of time) to the end."""
        for number, arrival in enumerate(arrivals):
            self.advance(arrival.at)
            self.add(arrival, number)
        self.advance(float("inf"))

    def advance(self, until: float) -> None:
        """Step until the clock has passed `until` or nothing is left to do; then it is at least there."""
        progress = self.now
        while self.now < until and self.scheduler.has_work:
            if self.step():
                progress = self.now
            elif self.now - progress > GIVE_UP:
                raise RuntimeError(
                    f"policy {self.memory.boundary.name} placed nothing for {GIVE_UP:.0f} simulated seconds "
                    f"with {len(self.scheduler.waiting)} requests waiting"
                )
        if self.now < until < float("inf"):
            self.now = until

    # -- one step --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Schedule, charge the time, update. False where nothing could be placed."""
        scheduler, memory, series = self.scheduler, self.memory, self.series
        plan = scheduler.schedule(self.now)
        if not plan.requests:
            memory.rest(scheduler, self.now)
            self.now += STALL
            return False
        touched, prompt_tokens = self._touched(plan)
        seconds, link = self._seconds(plan, touched, prompt_tokens)
        self.now += seconds
        running = len(scheduler.running)
        # A stand-in for the token: the conversation's own number, which the next turn's prompt repeats.
        tokens = [r.tokens[-1] if s else -1 for r, s in zip(plan.requests, plan.samples, strict=True)]
        finished = len(scheduler.samples)
        last = [r.last_token_at for r, s in zip(plan.requests, plan.samples, strict=True) if s]
        scheduler.update(plan, StepResult(tokens), self.now)
        if len(scheduler.samples) > finished:
            self.first_tokens += [
                (r.arrival, r.first_token_at - r.arrival)
                for r in plan.requests
                if r.phase == Phase.FINISHED and r.first_token_at is not None
            ]
        self.gaps.extend(self.now - at for at in last if at is not None)
        memory.after_step(touched, scheduler, self.now, seconds, prompt_tokens)
        series.clock.append(self.now)
        series.seconds.append(seconds)
        series.running.append(running)
        series.waiting.append(len(scheduler.waiting))
        series.resident.append(int(np.count_nonzero(self.experts.resident)))
        series.kv_blocks.append(sum(memory.held))
        series.tokens.append(plan.num_tokens)
        series.outputs.append(sum(plan.samples))
        series.link_bytes.append(link)
        return True

    def _touched(self, plan: StepPlan) -> tuple[np.ndarray, int]:
        """Tokens routed to each expert, int32 `[layers, experts]`, and how many came from prompts."""
        numbers, routing, shape = self._numbers, self.routing, self.experts.resident.shape
        who = [numbers[request.request_id] for request in plan.requests]
        at, prompts = plan.starts, []
        if plan.num_tokens > len(who):
            prompts = [x for x in zip(who, plan.starts, plan.counts, strict=True) if x[2] > 1]
            single = [count == 1 for count in plan.counts]
            who, at = list(compress(who, single)), list(compress(at, single))
        total = routing.decode(who, at) if who else np.zeros(shape[0] * shape[1], np.int32)
        for number, start, count in prompts:
            total += routing.prompt(number, start, count)
        return total.reshape(shape), sum(count for _, _, count in prompts)

    def _seconds(self, plan: StepPlan, touched: np.ndarray, prompt_tokens: int) -> tuple[float, float]:
        """Time of the step, and the bytes it and the promotions before it brought over the link."""
        hit = touched > 0
        resident = self.experts.resident
        missed = np.zeros(1) if resident.all() else np.count_nonzero(hit & ~resident, axis=1)
        context = sum(plan.starts) + plan.num_tokens
        seconds = self.cost.seconds(
            Step(plan.num_tokens, context, prompt_tokens, np.count_nonzero(hit, axis=1), missed)
        )
        promoted = self.experts.link_bytes - self._counted
        self._counted = self.experts.link_bytes
        link = int(missed.sum()) * self.expert_bytes + promoted
        # Moved pages are read and written before the step's own work.
        moved, self._moved = self.memory.moved_bytes - self._moved, self.memory.moved_bytes
        seconds += 2 * moved / self.cost.card.hbm_bytes_s * self.cost.factors.hbm
        # Promotions are copied beside the step, but the link carries one thing at a time.
        return max(seconds, link / self.cost.card.link_bytes_s * self.cost.factors.link), link

    def check(self) -> None:
        """Assert every structure's own truth."""
        self.scheduler.check()
