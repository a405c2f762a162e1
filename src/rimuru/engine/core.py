"""The engine: one model, one pool, and the loop that steps them.

Room: where all rooms meet. Rule: a step reads as a straight line, schedule -> launch -> update -> memory;
everything a step needs to decide is decided by the part it belongs to. On a GPU a step is launched before the
last one is updated, so that the host works while the device does.

A little over 500 lines: what is built in which order, and how a step passes through it, is read in one place.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rimuru import kernels
from rimuru.cache.kv import KVCache
from rimuru.cache.state import StateCache
from rimuru.errors import ConfigError, MemoryPlanError, RequestError
from rimuru.experts.side_copy import CudaLane, SideStreamCopy
from rimuru.experts.store import Copy, ExpertStore, copy_now
from rimuru.experts.stream import CopyEngine, ExpertStream
from rimuru.kernels.host_memory import HostMemory
from rimuru.models.config import ModelConfig, load_model_config
from rimuru.models.decoder import Decoder
from rimuru.models.loader import dummy_weights, load_weights
from rimuru.models.registry import build_model, resolve_model
from rimuru.policy.residency import ResidencyPolicy
from rimuru.pool.allocator import Allocator
from rimuru.pool.arena import Arena
from rimuru.pool.geometry import Kind
from rimuru.pool.tables import KVTables, Table

from .batch import BatchBuilder
from .budget import PromptBudget
from .client import EngineInfo
from .config import EngineConfig
from .device import available_memory, choose_device, choose_dtype, host_available, small_stacks
from .dummy_routing import make_dummy_routing
from .grammar import Grammars
from .graphs import GraphRunner
from .memory import PROMOTIONS, Memory
from .plan import MemoryPlan, make_boundary, plan_memory, show
from .rates import Rates, card_of
from .request import FinishReason, Request, SamplingParams, TokenOutput
from .runner import Launched, Runner
from .sampling_state import SamplingState
from .scheduler import Scheduler
from .sizes import sizes_of
from .stats import EngineStats, PoolStats
from .step_io import StepIO
from .views import kv_layout, layer_views

logger = logging.getLogger("rimuru.engine")

NAMED_MODELS = {"demo": "rimuru.demo.build:ensure_demo"}

MAX_UNREAD = 65_536  # samples kept for `stats` while nobody asks for it

STUCK_SECONDS = 30.0  # after which an idle engine gives up a request it cannot place

Progress = Callable[[str, float], None]


def local_models() -> dict[str, Callable[[], Path]]:
    """Models that go by a name of ours. Entry points, because their rooms lie above this one."""

    def load(entry: str) -> Callable[[], Path]:
        module, function = entry.split(":")
        return lambda: getattr(importlib.import_module(module), function)()

    return {name: load(entry) for name, entry in NAMED_MODELS.items()}


def plan_for(config: EngineConfig) -> MemoryPlan:
    """The memory plan of `config`, without reading a weight."""
    config.check()
    model = load_model_config(
        resolve_model(config.model, config.revision, local=local_models(), weights=False)
    )
    return _plan(config, model, choose_device(config.device), choose_dtype(config.dtype, model.dtype))


def _plan(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype, aside: bool = True
) -> MemoryPlan:
    """`aside`: the embedding table may lie in host memory."""
    sizes = sizes_of(model, config, dtype.itemsize)
    return plan_memory(
        config,
        sizes if aside else replace(sizes, embedding=0),
        device_available=available_memory(device),
        host_available=host_available(),
        device_is_host=device.type == "cpu",
    )


def check_tokens(tokens: list[int], vocab_size: int) -> None:
    """Raise `RequestError` for ids outside the vocabulary: they would read beyond the embedding."""
    if not all(type(t) is int for t in tokens):
        bad = next(t for t in tokens if type(t) is not int)
        raise RequestError(f"the prompt holds {bad!r} where a token id must be a whole number", "prompt")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        bad = next(t for t in tokens if not 0 <= t < vocab_size)
        raise RequestError(f"the prompt holds token id {bad}; ids go from 0 to {vocab_size - 1}", "prompt")


def prompt_budget(config: EngineConfig, device: torch.device) -> PromptBudget | None:
    """What gathers prompts by predicted time; None where steps are to be the same on every run, and on a CPU,
    where no link makes a few prompt tokens as dear as many."""
    if config.schedule_replay or device.type != "cuda":
        return None
    return PromptBudget.of(config.ttft_slo, config.itl_slo)


class EngineCore:
    """A model that answers requests. Not thread-safe: one thread owns it.

    `progress(what, share)` is called while loading, with a share from 0 to 1.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None):
        config.check()
        report = progress or (lambda what, share: None)
        self.config = config
        weights = config.load_format != "dummy"
        path = resolve_model(config.model, config.revision, local=local_models(), weights=weights)
        self.model_config = model = load_model_config(path)
        self.device = choose_device(config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of the thread that owns this: kernels go where it points
            small_stacks(self.device)
        self.dtype = choose_dtype(config.dtype, model.dtype)
        self.plan = _plan(config, model, self.device, self.dtype)
        self._check_host()
        self._embedding = self._embedding_aside(model)
        logger.info("memory plan\n%s", self.plan.describe())
        torch.manual_seed(config.seed)
        self._check_kernels(model)
        self._build(path, model, report)
        self.grammars = Grammars(
            config.tokenizer or path, config.trust_remote_code, model.vocab_size, model.eos_ids
        )
        self.steps = 0
        self._stuck_since: float | None = None
        self._under_way: tuple[Launched, float] | None = None  # and when it was launched
        self._updated_at = 0.0
        self.stalled = False  # the last step found work but could place none of it
        self._step_tokens: list[int] = []
        self.info = EngineInfo(
            model=config.model, model_path=str(path), max_model_len=self.plan.max_model_len,
            max_request_tokens=self.plan.max_request_tokens, vocab_size=model.vocab_size,
            eos_ids=frozenset(model.eos_ids), dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device), memory_policy=config.memory_policy, plan=self.plan.describe(),
        )  # fmt: skip

    def _build(self, path, model: ModelConfig, report: Progress) -> None:
        config, plan, geometry = self.config, self.plan, self.plan.geometry
        self._engine = CopyEngine(self.device) if self.device.type == "cuda" else None  # the link's one queue
        self.rates = Rates(model, plan, card_of(self.device), self.dtype.itemsize)
        try:
            self.arena = Arena(plan.pool_bytes, self.device)
        except RuntimeError as error:  # also torch.OutOfMemoryError
            free = available_memory(self.device)
            raise MemoryPlanError(
                f"a pool of {plan.pool_bytes} bytes does not fit {self.device}, which has {free} bytes; "
                f"lower --device-memory (now {plan.device_bytes})"
            ) from error
        allocator = Allocator(geometry, plan.pool_bytes)
        slots, blocks = config.max_num_seqs, -(-plan.max_model_len // config.block_size)
        kv_groups = geometry.groups_of(Kind.KV)
        kv_tables = KVTables(len(kv_groups), slots, blocks, self.device)
        layers = len(model.moe_layers)
        expert_table = Table((layers, model.num_experts), torch.int64, self.device)
        backend = kernels.backend_for(self.device, self.dtype)
        table = None
        if self._embedding is not None:
            table = self._embedding.tensor.view(self.dtype).view(model.vocab_size, model.hidden_size)
        net = build_model(model, backend, self.device, self.dtype, plan.max_model_len, table)
        self.model = net
        if config.dummy_routing is not None:
            net.routing = make_dummy_routing(
                config.dummy_routing, model, self.device, slots=config.max_num_seqs, model=config.model,
                seed=config.seed,
            )  # fmt: skip
            logger.info(net.routing.describe())
        self.store = ExpertStore(
            net.expert_layout, layers, model.num_experts, allocator=allocator,
            page_class=plan.expert_class, arena=self.arena, table=expert_table,
            lendable=plan.experts_lendable, resident=plan.experts_resident, poison=config.debug_pool,
            copy=self._promotions(),
        )  # fmt: skip
        if (lendable := int(self.store.lendable.sum())) < plan.experts_lendable:
            # The machine locks less memory than was planned with: what can be lent, and with it the longest
            # request, is less.
            fits = lendable * geometry.classes[plan.expert_class].page_bytes
            less, aside = replace(config, host_memory=max(1, fits)), self._embedding is not None
            plan = _plan(less, model, self.device, self.dtype, aside)
            # The pool stands already; pages for streamed experts, if there are none now, do not go to it.
            if (more := plan.pool_bytes - self.arena.nbytes) > 0:
                less = replace(less, device_memory=plan.device_bytes - more)
                plan = _plan(less, model, self.device, self.dtype, aside)
            self.plan = plan
            logger.warning("memory plan with what can be page-locked\n%s", plan.describe())
        if config.load_format == "dummy":
            dummy_weights(net, config.seed, self.store.sink)
        else:
            load_weights(path, net, self.store.sink, progress=report)
        self.store.fill_initial()
        self._tables, self._expert_table, self._ops = kv_tables, expert_table, backend
        cache = KVCache(
            allocator, [g.page_class for g in kv_groups], config.block_size, slots, blocks,
            kv_tables, config.enable_prefix_caching, track_freed=config.debug_pool,
        )  # fmt: skip
        states = None
        if plan.state_groups:
            self._state_table = Table((len(plan.state_groups), slots), torch.int32, self.device)
            states = StateCache(
                allocator, [g.page_class for g in plan.state_groups], slots, self._state_table,
                self._copy_pages, track_freed=config.debug_pool,
            )  # fmt: skip
        self.memory = Memory(
            cache, self.store, ResidencyPolicy(layers, model.num_experts),
            make_boundary(config), plan, on_freed=self._poison if config.debug_pool else None, states=states,
            move_pages=self._copy_pages,
        )  # fmt: skip
        self.memory.know(self.rates.cost)
        self.scheduler = Scheduler(
            self.memory, max_num_seqs=slots, max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.max_model_len, budget=prompt_budget(config, self.device),
        )  # fmt: skip
        self.runner = self._make_runner(net, expert_table.device_table, report)

    def _check_host(self) -> None:
        """Refuse host copies that this machine cannot hold: the system would end the process on the way."""
        need, have = self.plan.host_bytes + self.plan.embedding_host_bytes, host_available()
        if need > have:
            raise MemoryPlanError(
                f"host copies of {self.plan.experts_lendable:,} experts take {need:,} bytes ({show(need)}), "
                f"and this machine has {have:,} ({show(have)}) to spare; "
                f"lower --host-memory to {int(0.9 * have)}"
            )

    def _embedding_aside(self, model: ModelConfig) -> HostMemory | None:
        """Page-locked memory for the embedding table, where the plan has it in host memory. Where the machine
        does not lock as much, the table stays on the device, by another plan."""
        if not (size := self.plan.embedding_host_bytes):
            return None
        memory = HostMemory(size)
        if memory.pinned_bytes == size:
            return memory
        logger.warning(
            "the machine page-locks %s of the embedding table's %s: it stays on the device",
            show(memory.pinned_bytes), show(size),
        )  # fmt: skip
        memory.close()
        self.plan = _plan(self.config, model, self.device, self.dtype, aside=False)
        return None

    def _make_runner(self, net: Decoder, table: torch.Tensor, report: Progress) -> Runner:
        config, plan, model = self.config, self.plan, self.model_config
        states = self._state_table.device_table if plan.state_groups else None
        views = layer_views(model, plan, self.arena, self._tables.device_table, states, self.dtype)
        slots = config.max_num_seqs
        builder = BatchBuilder(config.max_num_batched_tokens, slots)
        sampling = SamplingState(slots, model.vocab_size, self.device)
        experts = (len(model.moe_layers), model.num_experts)
        if self.device.type != "cuda":
            touched = torch.zeros(experts, dtype=torch.int32, device=self.device)
            return Runner(net, views, table, touched, builder, sampling, self.device)
        io = StepIO(max(config.max_num_batched_tokens, slots), slots, experts, self.device)
        stream = None
        if plan.experts_lendable:
            stream = ExpertStream(
                net.expert_layout, self.store.host_page, table=self._expert_table,
                allocator=self.memory.cache.allocator, page_class=plan.expert_class, arena=self.arena,
                top_k=model.top_k, copies=self._engine, poison=config.debug_pool,
                reserve=plan.streaming_bytes // net.expert_layout.page_bytes,
            )  # fmt: skip
        runner = GraphRunner(
            net, views, table, builder, sampling, io, max_tokens=config.max_num_batched_tokens,
            max_seqs=slots, max_model_len=plan.max_model_len, stream=stream,
            # A recurrent layer counts a step's sequences on the host, and its checkpoints are copied after
            # the step.
            overlaps=model.recurrent is None,
        )  # fmt: skip
        self._flush_tables()
        for group in plan.geometry.groups:  # compiled now, so that nothing is while requests wait
            self._copy_pages(group.page_class, [0], [0])
        cell = torch.zeros(1, dtype=torch.int64, device=self.device)
        kv_table = self._tables.device_table
        self._ops.apply_edits(kv_table, cell, kv_table.view(-1)[:1].clone())
        runner.prepare(capture=model.recurrent is None and not config.enforce_eager, report=report)
        return runner

    def _promotions(self) -> Copy:
        """How promotions reach the pool: beside the steps, where steps run ahead of the host."""
        if self._engine is None or self.model_config.recurrent is not None:
            return copy_now
        return SideStreamCopy(CudaLane(self._engine.stream), ahead=PROMOTIONS[1])

    def _check_kernels(self, model: ModelConfig) -> None:
        """Refuse, before a weight is read, what the GPU's kernels do not serve."""
        if self.device.type != "cuda":
            return
        from rimuru.kernels.triton.attention import check_supported

        try:
            for group in self.plan.geometry.groups_of(Kind.KV):
                check_supported(kv_layout(model, self.plan, group, self.dtype), model.num_heads)
        except ValueError as error:
            raise ConfigError(
                f"{self.config.model} on {self.device}: {error}; --device cpu serves it"
            ) from None

    def _copy_pages(self, cls: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages of a class, in the order of the steps."""
        geometry = self.plan.geometry
        pages = torch.tensor([source, target], dtype=torch.int32, pin_memory=self.device.type == "cuda")
        pages = pages.to(self.device, non_blocking=True)
        self._ops.move_pages(
            self.arena.data, pages[0], pages[1], geometry.grain, geometry.classes[cls].payload_bytes
        )

    # -- requests --------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queue one sequence. Raises `RequestError` where it can never be served as asked."""
        params.check(self.model_config.vocab_size)
        check_tokens(tokens, self.model_config.vocab_size)
        limit = self.plan.max_request_tokens - len(tokens)
        eos = frozenset() if params.ignore_eos else self.info.eos_ids
        request = Request(
            request_id, list(tokens), params,
            max_tokens=params.max_tokens if params.max_tokens is not None else max(limit, 1),
            stop_ids=eos | frozenset(params.stop_token_ids), eos_ids=eos, arrival=time.monotonic(),
            priority=priority, cache_salt=cache_salt,
        )  # fmt: skip
        if params.grammar is None:
            self.scheduler.add(request)
        else:
            self.scheduler.check_admissible(request)
            self.grammars.begin(request)

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored. Its pages are free when this returns."""
        self.grammars.forget(request_id)
        self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.grammars.waiting) or self._under_way is not None

    def _admit_compiled(self, now: float) -> list[TokenOutput]:
        """Queue the requests whose grammars are ready; the outputs of those whose are wrong."""
        refused = []
        for request, error in self.grammars.ready(now):
            try:
                if error is not None:
                    raise error
                self.scheduler.add(request)
            except RequestError as wrong:
                refused.append(
                    TokenOutput(
                        request.request_id, [], finish=FinishReason.ERROR, error=str(wrong),
                        error_param=wrong.param or "grammar",
                    )
                )  # fmt: skip
        return refused

    # -- the loop --------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Schedule and launch a step, then update with the last that ended. Returns what requests gained."""
        began = time.monotonic()
        outputs = self._admit_compiled(began) if self.grammars.waiting else []
        ended, self._under_way = self._under_way, None
        self.store.poll()
        plan = self.scheduler.schedule(began)
        self.memory.poison_freed()
        self.stalled = not plan.requests and ended is None
        if plan.requests:
            self._stuck_since = None
            self._flush_tables()
            launched = self.runner.launch(plan)
            self.scheduler.advance(plan)
            if self.runner.overlaps:
                self._under_way = launched, began
            else:
                ended = launched, began
        else:
            outputs += plan.failed
        if ended is not None:
            outputs += self._update(*ended)
        elif self.stalled:
            self.memory.rest(self.scheduler, began)
            outputs += self._give_up(began)
        return outputs

    def _update(self, ended: Launched, launched_at: float) -> list[TokenOutput]:
        """Take in what a step chose and touched."""
        plan = ended.plan
        result, touched = ended.result()
        self.store.poll()  # what arrived while it ran was read in its page for most of the layers
        now = time.monotonic()
        took = now - max(launched_at, self._updated_at)  # the device had the step before to finish
        self._updated_at = now
        if self.rates.observe(plan, touched, self.store.resident, took):
            self.memory.know(self.rates.cost)
        outputs = self.scheduler.update(plan, result, now)
        prompt_tokens = plan.num_tokens - len(plan.requests)  # 0 in a step of decodes
        self.memory.after_step(touched, self.scheduler, now, took, prompt_tokens)
        self.steps += 1
        self._step_tokens.append(plan.num_tokens)
        for unread in (self._step_tokens, self.scheduler.samples):
            if len(unread) > MAX_UNREAD:
                del unread[: MAX_UNREAD // 2]
        if self.config.debug_pool:
            self.check()
        return outputs

    def _give_up(self, now: float) -> list[TokenOutput]:
        """Fail the first request in the queue where nothing has run for long and it still finds no room.

        Admission should have refused it: this is the net below a wrong count, so that nobody waits for ever.
        """
        if self.scheduler.running or not self.scheduler.waiting:
            self._stuck_since = None
            return []
        if self._stuck_since is None:
            self._stuck_since = now
        if now - self._stuck_since < STUCK_SECONDS:
            return []
        request = self.scheduler.waiting[0][3]
        logger.error("request %s finds no room in an idle engine; it is given up", request.request_id)
        self._stuck_since = None
        return [
            self.scheduler.fail(request, "memory for this request cannot be found; ask for fewer tokens", now)
        ]

    def _flush_tables(self) -> None:
        """Apply what was staged since the last step, on the stream the step will run on."""
        self._tables.flush(self._ops.apply_edits)
        self._expert_table.flush(self._ops.apply_edits)
        if self.plan.state_groups:
            self._state_table.flush(self._ops.apply_edits)

    def _poison(self, pages: list[tuple[int, int]]) -> None:
        """Debug mode: whoever reads a page that is nobody's reads NaN."""
        geometry = self.plan.geometry
        for cls, page in pages:
            self.arena.poison([page], geometry.grain, geometry.classes[cls].page_bytes)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix that no request holds."""
        self.memory.reset_prefix()
        return True

    # -- what it says of itself ------------------------------------------------------------

    def pool_stats(self) -> PoolStats:
        """Pages and bytes by kind and state; they sum to the pool."""
        cache, geometry, units = self.memory.cache, self.plan.geometry, self.plan.units
        groups = geometry.groups_of(Kind.KV)
        block_bytes, per_block = sum(geometry.classes[g.page_class].page_bytes for g in groups), len(groups)
        expert_bytes = geometry.classes[self.plan.expert_class].page_bytes
        resident = int((self.store.resident | self.store.in_flight).sum())
        blocks = cache.counts()
        tenants = {("kv", "used"): blocks.used, ("kv", "cached"): blocks.cached}
        pages = {key: n * per_block for key, n in tenants.items()}
        sizes = {key: n * block_bytes for key, n in tenants.items()}
        if (states := self.memory.states) is not None:
            for group in self.plan.state_groups:
                size = geometry.classes[group.page_class].page_bytes
                for name, n in (("used", states.active), ("cached", states.checkpoints)):
                    key = (group.kind.name.lower(), name)
                    pages[key] = pages.get(key, 0) + n
                    sizes[key] = sizes.get(key, 0) + n * size
        pages["expert", "resident"], sizes["expert", "resident"] = resident, resident * expert_bytes
        free = self.plan.pool_bytes - sum(sizes.values())
        pages["free", "free"] = free // units.page_bytes
        sizes["free", "free"] = free
        return PoolStats(self.plan.pool_bytes, sizes, pages)

    def stats(self) -> EngineStats:
        """A snapshot; the samples of finished requests and steps are handed over once."""
        s, m = self.scheduler, self.memory
        pool = self.pool_stats()
        reachable = self.plan.kv_tokens_reachable // self.plan.block_tokens
        out = EngineStats(
            running=len(s.running), waiting=len(s.waiting),
            kv_usage=m.cache.counts().used / reachable if reachable else 0.0, pool=pool, steps=self.steps,
            prompt_tokens=s.prompt_tokens, generation_tokens=s.generation_tokens,
            prefix_queries=s.prefix_queries, prefix_hits=s.prefix_hits, preemptions=dict(s.preemptions),
            preempted_tokens=s.preempted_tokens, boundary_moves=dict(m.log.moves),
            expert_hits=m.expert_hits, expert_misses=m.expert_misses, promotions=m.promotions,
            demotions=m.demotions, moved_bytes=m.moved_bytes,
            experts_resident=int(self.store.resident.sum()),
            experts_total=self.plan.experts_total, host_bytes=self.plan.host_bytes,
            device_peak_bytes=self.device_peak_bytes, finished=s.samples, step_tokens=self._step_tokens,
        )  # fmt: skip
        s.samples, self._step_tokens = [], []
        return out

    @property
    def device_peak_bytes(self) -> int:
        """The most bytes taken on the device so far: on a GPU the allocator's word and the driver's share, a
        count on a CPU.

        The count is what lies in the arena, the weights and the tables, plus the plan's bound for
        the activations of a step, which a CPU does not account for.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device) + self.plan.driver_bytes
        tables = (
            self._tables.device_table.nbytes
            + self._expert_table.device_table.nbytes
            + self.runner.touched.nbytes
        )
        if self.plan.state_groups:
            tables += self._state_table.device_table.nbytes
        return self.arena.nbytes + self.model.nbytes + tables + self.plan.workspace_bytes

    def check(self) -> None:
        """Assert every structure's own truth; between steps only."""
        self.scheduler.check()
        sizes = self.pool_stats().bytes_by
        assert all(n >= 0 for n in sizes.values()), f"negative share of the pool: {sizes}"
