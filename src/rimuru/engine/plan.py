"""Where every byte will go, decided before a weight is read.

Room: between configuration and the engine; `rimuru plan` prints it. Rule: no torch, integers of
bytes, the same numbers the engine then allocates. A plan that cannot start is refused with the
table and with values that do start.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from math import ceil

from rimuru.errors import ConfigError, MemoryPlanError
from rimuru.policy.boundary import BoundaryPolicy, Capacity, make_policy
from rimuru.pool.geometry import (
    Geometry,
    Kind,
    LayerGroup,
    PoolSpec,
    plan_geometry,
)

from .config import EngineConfig
from .sizes import GPU_DRIVER, GRANT, Sizes

FIXED_KINDS = ("sliding", "window")  # attention whose KV does not grow with a request
STREAM_PAGES = 16  # of the ring for a large step's missing experts, beside what the pool has free
ROOMY = 1024  # tokens a request; memory is short where `max_num_seqs` of such requests have no room


@dataclass(frozen=True, slots=True)
class KVUnits:
    """How KV is counted against experts: in pages where all groups' pages are alike, else in blocks."""

    per_block: int  # units a 16-token block takes over all groups
    per_expert: int  # units cut from one expert's page
    page_bytes: int  # pool bytes of one unit
    experts_per_huge: int
    # Of each page class of a block: its pages, how many a parent holds, the parent in expert pages.
    parents: tuple[tuple[float, int, int], ...]

    @classmethod
    def of(cls, geometry: Geometry, expert_class: int) -> KVUnits:
        groups = [g for g in geometry.groups_of(Kind.KV) if not g.name.startswith(FIXED_KINDS)]
        block = min(g.block_tokens for g in groups)
        costs = [geometry.cost(g.page_class) * block / g.block_tokens for g in groups]
        alike = max(costs) == min(costs)
        unit = costs[0] if alike else sum(costs)
        expert = geometry.cost(expert_class)
        parents = []
        for c in sorted({g.page_class for g in groups}):
            n = sum(block / g.block_tokens for g in groups if g.page_class == c)
            parent = geometry.classes[c].parent
            size = geometry.cost(c if parent is None else parent)
            parents.append((n, geometry.classes[c].per_parent or 1, round(size / expert)))
        return cls(
            per_block=len(costs) if alike else 1, per_expert=int(expert / unit + 1e-6),
            page_bytes=int(unit), experts_per_huge=round(geometry.huge_bytes / expert),
            parents=tuple(parents),
        )  # fmt: skip

    def pages_for(self, blocks: int) -> int:
        """Expert-size pages that hold so many blocks: each page class in parents of its own."""
        return sum(ceil(blocks * n / per) * size for n, per, size in self.parents)

    def blocks_in(self, expert_pages: int) -> int:
        """Blocks that so many expert-size pages hold."""
        # What the scarcest class allows alone is the most; rounding to whole parents may take from it.
        most = min(int(max(0, expert_pages) // size * per / n) for n, per, size in self.parents)
        return bisect_right(range(1, most + 1), expert_pages, key=self.pages_for)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and what they hold. `pool_bytes` is a whole number of huge pages."""

    device_bytes: int
    weights_bytes: int  # everything that is not an expert: always on the device
    workspace_bytes: int  # an upper bound of one step's activations and logits
    tables_bytes: int
    driver_bytes: int  # of a GPU's driver, kernels and graphs; 0 on a CPU
    streaming_bytes: int  # where prefill finds experts that come from host memory; 0 where none do
    pool_bytes: int
    geometry: Geometry
    expert_class: int  # index of the EXPERT page class
    units: KVUnits
    expert_pages: int  # the most experts the pool could hold
    experts_total: int
    experts_resident: int  # at start
    experts_floor: int  # never fewer than these are resident
    experts_lendable: int
    host_bytes: int  # the lendable experts' host copies
    embedding_host_bytes: int  # the embedding table, where it is read in host memory; else 0
    block_tokens: int
    kv_tokens: int  # held beside the experts resident at start
    kv_tokens_reachable: int  # with every lendable expert lent
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    notes: list[str] = field(default_factory=list)
    state_bytes: int = 0  # pool bytes of one request's recurrent state; 0 for models without

    @property
    def state_groups(self) -> list[LayerGroup]:
        """The layer groups whose pages a request owns once: STATE, then CONV."""
        return state_groups(self.geometry)

    @property
    def state_blocks(self) -> int:
        """Blocks of KV that take as much of the pool as one request's recurrent state."""
        return -(-self.state_bytes // (self.units.per_block * self.units.page_bytes))

    @property
    def max_request_tokens(self) -> int:
        """The longest request that memory can ever hold, prompt and output together."""
        return min(self.max_model_len, self.kv_tokens_reachable)

    def requests_of(self, tokens: int, reachable: bool) -> int:
        """How many requests of `tokens` tokens fit at one time, at most `max_num_seqs`."""
        have = (self.kv_tokens_reachable if reachable else self.kv_tokens) // self.block_tokens
        held = -(-tokens // self.block_tokens)
        first = state_pages(self.geometry, self.units, 1)  # already taken off

        def fits(n: int) -> bool:
            states = (state_pages(self.geometry, self.units, n) - first) * self.units.per_expert
            return n * held * self.units.per_block + states <= have * self.units.per_block

        return sum(map(fits, range(1, self.max_num_seqs + 1)))

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, for `rimuru plan --json`."""
        geometry = self.geometry
        lengths = {"512": 512, "4096": 4096, "full": self.max_model_len}
        return {
            "device_bytes": self.device_bytes,
            "weights_bytes": self.weights_bytes,
            "workspace_bytes": self.workspace_bytes,
            "tables_bytes": self.tables_bytes,
            "driver_bytes": self.driver_bytes,
            "streaming_bytes": self.streaming_bytes,
            "pool_bytes": self.pool_bytes,
            "host_bytes": self.host_bytes,
            "embedding_host_bytes": self.embedding_host_bytes,
            "huge_page_bytes": geometry.huge_bytes,
            "grain_bytes": geometry.grain,
            "kinds": {
                c.name: {"page_bytes": c.page_bytes, "pages": int(self.pool_bytes / geometry.cost(i) + 1e-6)}
                for i, c in enumerate(geometry.classes)
                if c.kind is not None
            },
            "layer_groups": [{"name": g.name, "layers": list(g.layers)} for g in geometry.groups],
            "state_bytes": self.state_bytes,
            "experts_total": self.experts_total,
            "experts_resident": self.experts_resident,
            "experts_lendable": self.experts_lendable,
            "kv_tokens": self.kv_tokens,
            "kv_tokens_reachable": self.kv_tokens_reachable,
            "max_model_len": self.max_model_len,
            "max_request_tokens": self.max_request_tokens,
            "max_requests": {k: self.requests_of(n, False) for k, n in lengths.items()},
            "max_requests_reachable": {k: self.requests_of(n, True) for k, n in lengths.items()},
            "notes": self.notes,
        }

    def describe(self) -> str:
        """The table printed at start."""
        aside = self.embedding_host_bytes
        rows = [
            ("device memory (cap)", show(self.device_bytes)),
            ("  weights outside the pool", show(self.weights_bytes)),
            *([("  (embedding table: in host memory)", show(aside))] if aside else []),
            ("  workspace of a step", show(self.workspace_bytes)),
            ("  page tables", show(self.tables_bytes)),
            *([("  driver, kernels, graphs", show(self.driver_bytes))] if self.driver_bytes else []),
            *([("  experts on their way", show(self.streaming_bytes))] if self.streaming_bytes else []),
            ("  page pool", show(self.pool_bytes)),
            ("experts resident / all", f"{self.experts_resident:,} / {self.experts_total:,}"),
            ("experts lendable (host copies)", f"{self.experts_lendable:,} ({show(self.host_bytes)})"),
            ("KV tokens at start / reachable", f"{self.kv_tokens:,} / {self.kv_tokens_reachable:,}"),
            *([("recurrent state of a request", show(self.state_bytes))] if self.state_bytes else []),
        ]
        lengths = [n for n in (512, 4096) if n < self.max_model_len]
        for tokens in (*lengths, self.max_model_len):
            fits = f"{self.requests_of(tokens, False):,} / {self.requests_of(tokens, True):,}"
            rows.append((f"requests of {tokens:,} tokens, start / reachable", fits))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes), "", self.geometry.describe()])


def state_groups(geometry: Geometry) -> list[LayerGroup]:
    """See `MemoryPlan.state_groups`."""
    return [*geometry.groups_of(Kind.STATE), *geometry.groups_of(Kind.CONV)]


def state_pages(geometry: Geometry, units: KVUnits, sets: int) -> int:
    """Expert-size pages that hold the states of so many requests, each class in parents of its own."""
    classes = [g.page_class for g in state_groups(geometry)]
    expert = geometry.huge_bytes / units.experts_per_huge
    pages = 0
    for cls in set(classes):
        n, c = classes.count(cls) * sets, geometry.classes[cls]
        parents = n if c.parent is None else -(-n // c.per_parent)
        size = geometry.cost(cls if c.parent is None else c.parent)
        pages += parents * round(size / expert)
    return pages


def show(n: int) -> str:
    """Bytes for people: three digits and a binary unit."""
    value = float(n)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def make_boundary(config: EngineConfig) -> BoundaryPolicy:
    """The boundary policy the flags ask for."""
    return make_policy(
        config.memory_policy,
        resident_experts=config.resident_experts,
        max_boundary_wait=config.max_boundary_wait,
        ttft_slo_ms=config.ttft_slo,
        itl_slo_ms=config.itl_slo,
    )


def plan_memory(
    config: EngineConfig,
    sizes: Sizes,
    *,
    device_available: int,
    host_available: int,
    device_is_host: bool,
    reserve: int | None = None,
) -> MemoryPlan:
    """Lay out the device's and the host's memory for `config`; all sizes in bytes.

    Without `device_memory` a GPU gives its share and a CPU what the model can use, at most half of
    what is free. `reserve` stands for workspace and tables where they are known otherwise. Raises
    `MemoryPlanError` (too small, naming values that start) or `ConfigError`.
    """
    positions = sizes.positions
    max_len = config.max_model_len or positions
    if max_len > positions:
        raise ConfigError(f"--max-model-len {max_len} is above the model's {positions} positions")
    geometry = plan_geometry(sizes.spec)
    expert_class = geometry.class_of(Kind.EXPERT)
    total = sizes.experts
    blocks = -(-max_len // config.block_size)
    weights = sizes.weights + max_len * sizes.rope_row
    workspace, driver = sizes.workspace, 0
    if not device_is_host:
        workspace, driver = sizes.gpu, GPU_DRIVER
    columns = sum(blocks if g.kind == Kind.KV else 1 for g in geometry.groups)
    tables = columns * config.max_num_seqs * 4 + total * 12 + GRANT * 16
    if reserve is not None:
        workspace, tables, driver = reserve, 0, 0
    fixed = weights + workspace + tables + driver
    units = KVUnits.of(geometry, expert_class)
    if units.per_expert < 1:
        raise ConfigError(
            f"--block-size {config.block_size}: the KV of one block takes {show(units.page_bytes)}, but "
            f"an expert that leaves makes room for {show(geometry.classes[expert_class].page_bytes)}"
            + _smaller_block(sizes.spec, config.block_size)
        )

    one_state = state_pages(geometry, units, 1)

    def roots(experts: int, kv_blocks: int, states: int = 1) -> int:
        """Huge pages that hold so many experts, blocks and states, each kind in parents of its own."""
        pages = experts + units.pages_for(kv_blocks)
        return -(-(pages + state_pages(geometry, units, states)) // units.experts_per_huge)

    everything = roots(total, config.max_num_seqs * blocks, config.max_num_seqs)
    cap = config.device_memory
    if cap is None:
        share = device_available * (0.5 if device_is_host else config.gpu_memory_utilization)
        cap = min(int(share), fixed + everything * geometry.huge_bytes)

    expert_bytes = geometry.classes[expert_class].page_bytes
    kept = total if config.resident_experts is None else config.resident_experts
    gpu = not device_is_host and reserve is None
    aside = 0
    if gpu:
        enough = max(blocks, config.max_num_seqs * min(blocks, -(-ROOMY // config.block_size)))
        left = cap - fixed - (STREAM_PAGES * expert_bytes if kept < total else 0)
        short = left // geometry.huge_bytes < roots(total, enough, config.max_num_seqs)
        # A step reads one row a token of it: no other bytes are as cheap to do without.
        aside = sizes.embedding if short and sizes.embedding < host_available else 0
        weights, fixed = weights - aside, fixed - aside

    def lendable_under(cap: int) -> int:
        """Experts that get a host copy."""
        # Where everything fits at once no expert can ever have to leave, and none needs a copy.
        fits = max(0, cap - fixed) // geometry.huge_bytes >= everything and kept >= total
        if fits or config.memory_policy == "fixed":
            return 0
        budget = config.host_memory
        if budget is None:
            budget = max(0, int((host_available - aside) * 0.8) - (cap if device_is_host else 0))
        return min(total, budget // expert_bytes)

    lendable, streaming = lendable_under(cap), 0
    policy = make_boundary(config)
    # A length the user asked for is a promise; the model's own length is only a wish.
    least_blocks = blocks if config.max_model_len else 1

    def lay_out() -> tuple[int, Capacity]:
        huge = max(0, cap - fixed - streaming) // geometry.huge_bytes
        return huge, Capacity(
            pool_pages=huge * units.experts_per_huge, expert_total=total, expert_lendable=lendable,
            expert_floor=0, expert_page_bytes=expert_bytes, kv_page_bytes=units.page_bytes,
            kv_per_expert=units.per_expert,
            kv_min=units.pages_for(least_blocks) * units.per_expert + one_state * units.per_expert,
        )  # fmt: skip

    huge, capacity = lay_out()
    floor = policy.least_resident(capacity)
    if lendable and gpu and (huge < roots(floor, least_blocks) or policy.start(capacity) < total):
        # Where all experts begin resident those lent later are few, and read in place.
        streaming = STREAM_PAGES * expert_bytes
        huge, capacity = lay_out()
    fixed += streaming
    if huge < roots(floor, least_blocks):
        parts = [
            ("weights outside the pool", weights, ""),
            ("workspace of a step", workspace, "--max-num-batched-tokens, --max-num-seqs"),
            ("page tables", tables, "--max-num-seqs, --max-model-len"),
            *([("driver, kernels, graphs", driver, "a CUDA context's own")] if driver else []),
            *([("experts on their way", streaming, f"{STREAM_PAGES} pages")] if streaming else []),
            (
                "experts that must stay", roots(floor, 0, 0) * geometry.huge_bytes,
                f"{floor:,} of {total:,}: policy {config.memory_policy}, {lendable:,} have a host copy",
            ),
            (
                "KV of one request", least_blocks * units.per_block * units.page_bytes,
                f"of {least_blocks * config.block_size:,} tokens",
            ),
        ]  # fmt: skip
        if one_state:
            parts.append(("state of one request", one_state * expert_bytes, "recurrent layers"))
        starts = 0
        while starts < (starts := fixed + roots(floor, least_blocks) * geometry.huge_bytes):
            # A larger cap may leave the host copies less, so that more experts must stay.
            floor = policy.least_resident(replace(capacity, expert_lendable=lendable_under(starts)))
        advice = [f"what would start: --device-memory {starts} ({show(starts)})"]
        if device_is_host:
            copies = lendable_under(starts) * expert_bytes
            advice.append(
                f"device and host are one memory on a CPU: that cap and the {show(copies)} of host copies it "
                f"leaves are {show(starts + copies)} together; {show(host_available)} is free"
            )
        if least_blocks < blocks:
            whole = starts + (roots(floor, blocks) - roots(floor, least_blocks)) * geometry.huge_bytes
            advice.append(f"with one request of full length, {max_len:,} tokens: --device-memory {whole}")

        def starts_with(**changes: object) -> bool:
            try:
                plan_memory(
                    replace(config, **changes), sizes, device_available=device_available,  # type: ignore[arg-type]
                    host_available=host_available, device_is_host=device_is_host, reserve=reserve,
                )  # fmt: skip
            except MemoryPlanError:
                return False
            return True

        if config.memory_policy in ("fixed", "static"):
            if starts_with(memory_policy="reactive", resident_experts=None):
                advice.append("or --memory-policy reactive: experts that do not fit stay in host memory")
        elif lendable < total:
            every = total * expert_bytes
            least = policy.least_resident(replace(capacity, expert_lendable=total))
            lent = fixed - streaming + (STREAM_PAGES * expert_bytes if gpu else 0)
            lent += roots(least, least_blocks) * geometry.huge_bytes
            # On a CPU both must lie in what is free.
            most = min(starts - 1, host_available - every) if device_is_host else starts - 1
            if cap <= most and starts_with(host_memory=every):
                given = "now" if config.host_memory else "by default it is what this machine can spare"
                advice.append(
                    f"or --host-memory {every} ({show(every)}), so that every expert may leave the device; "
                    f"{given}, {show(lendable * expert_bytes)}"
                )
            elif lent <= most and starts_with(host_memory=every, device_memory=lent):
                advice.append(
                    f"or, so that every expert may leave the device: --host-memory {every} ({show(every)}) "
                    f"with --device-memory {lent} ({show(lent)})"
                )
        raise MemoryPlanError(_refusal(config, cap, parts, advice))
    resident = policy.start(capacity)
    reachable = units.blocks_in(capacity.pool_pages - floor - one_state) * config.block_size
    tokens = units.blocks_in(capacity.pool_pages - resident - one_state) * config.block_size
    notes = list(sizes.notes)
    if tokens * 4 < reachable:
        notes.append("KV begins with what experts leave free, and grows as they lend pages on demand")
    if reachable < max_len:
        full = fixed + roots(floor, blocks) * geometry.huge_bytes
        notes.append(
            f"the longest request memory can hold has {reachable:,} tokens, the model's length is "
            f"{max_len:,}; --device-memory {full} ({show(full)}) holds one of full length"
        )
    return MemoryPlan(
        device_bytes=cap, weights_bytes=weights, workspace_bytes=workspace, tables_bytes=tables,
        driver_bytes=driver, streaming_bytes=streaming,
        pool_bytes=huge * geometry.huge_bytes, geometry=geometry, expert_class=expert_class, units=units,
        expert_pages=capacity.pool_pages, experts_total=total, experts_resident=resident,
        experts_floor=floor, experts_lendable=lendable, host_bytes=lendable * expert_bytes,
        embedding_host_bytes=aside, block_tokens=config.block_size,
        kv_tokens=tokens, kv_tokens_reachable=reachable, max_model_len=max_len,
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens, notes=notes,
        state_bytes=round(sum(geometry.cost(g.page_class) for g in state_groups(geometry))),
    )  # fmt: skip


def _smaller_block(spec: PoolSpec, block: int) -> str:
    """The rest of a refusal: a block size that works, where there is one."""
    while block > 1:
        block //= 2
        attention = tuple(replace(a, block_tokens=block) for a in spec.attention)
        geometry = plan_geometry(replace(spec, attention=attention))
        if KVUnits.of(geometry, geometry.class_of(Kind.EXPERT)).per_expert:
            return f"; --block-size {block} works"
    return ""


def _refusal(config: EngineConfig, cap: int, parts: list[tuple[str, int, str]], advice: list[str]) -> str:
    lines = [f"{show(cap)} of device memory ({cap} bytes) cannot start {config.model}; needed at least:"]
    for name, size, why in parts:
        lines.append(f"  {name:<26}{show(size):>12}" + (f"   ({why})" if why else ""))
    return "\n".join([*lines, *advice])
