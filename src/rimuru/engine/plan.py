"""Where every byte will go, decided before a weight is read.

Room: between configuration and the engine; `rimuru plan` prints it. Rule: no torch, integers of
bytes, the same numbers the engine then allocates. A plan that cannot start is refused with the
table and with values that do start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rimuru.errors import ConfigError, MemoryPlanError
from rimuru.models.config import ModelConfig
from rimuru.policy.boundary import BoundaryPolicy, Capacity, make_policy
from rimuru.pool.geometry import AttentionKind, Geometry, Kind, PoolSpec, plan_geometry

from .config import EngineConfig

FIXED_KINDS = ("sliding", "window")  # attention whose KV does not grow with a request
GRANT = 256  # alignment of single allocations and of the parts of an expert page, bytes


@dataclass(frozen=True, slots=True)
class KVUnits:
    """How KV is counted against experts: in pages where all groups' pages are alike, else in blocks."""

    per_block: int  # units a 16-token block takes over all groups
    per_expert: int  # units cut from one expert's page
    page_bytes: int  # pool bytes of one unit
    experts_per_huge: int

    @classmethod
    def of(cls, geometry: Geometry, expert_class: int) -> KVUnits:
        groups = [g for g in geometry.groups_of(Kind.KV) if not g.name.startswith(FIXED_KINDS)]
        block = min(g.block_tokens for g in groups)
        costs = [geometry.cost(g.page_class) * block / g.block_tokens for g in groups]
        alike = max(costs) == min(costs)
        unit = costs[0] if alike else sum(costs)
        expert = geometry.cost(expert_class)
        return cls(
            per_block=len(costs) if alike else 1, per_expert=int(expert / unit + 1e-6),
            page_bytes=int(unit), experts_per_huge=round(geometry.huge_bytes / expert),
        )  # fmt: skip

    def blocks_in(self, expert_pages: int) -> int:
        """Blocks that so many expert-size pages hold."""
        return max(0, expert_pages) * self.per_expert // self.per_block


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and what they hold. `pool_bytes` is a whole number of huge pages."""

    device_bytes: int
    weights_bytes: int  # everything that is not an expert: always on the device
    workspace_bytes: int  # an upper bound of one step's activations and logits
    tables_bytes: int
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
    block_tokens: int
    kv_tokens: int  # held beside the experts resident at start
    kv_tokens_reachable: int  # with every lendable expert lent
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    notes: list[str] = field(default_factory=list)

    @property
    def max_request_tokens(self) -> int:
        """The longest request that memory can ever hold, prompt and output together."""
        return min(self.max_model_len, self.kv_tokens_reachable)

    def requests_of(self, tokens: int, reachable: bool) -> int:
        """How many requests of `tokens` tokens fit at one time, at most `max_num_seqs`."""
        have = self.kv_tokens_reachable if reachable else self.kv_tokens
        held = -(-tokens // self.block_tokens) * self.block_tokens
        return min(have // held, self.max_num_seqs)

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, for `rimuru plan --json`."""
        geometry = self.geometry
        lengths = {"512": 512, "4096": 4096, "full": self.max_model_len}
        return {
            "device_bytes": self.device_bytes,
            "weights_bytes": self.weights_bytes,
            "workspace_bytes": self.workspace_bytes,
            "tables_bytes": self.tables_bytes,
            "pool_bytes": self.pool_bytes,
            "host_bytes": self.host_bytes,
            "huge_page_bytes": geometry.huge_bytes,
            "grain_bytes": geometry.grain,
            "kinds": {
                c.name: {"page_bytes": c.page_bytes, "pages": int(self.pool_bytes / geometry.cost(i) + 1e-6)}
                for i, c in enumerate(geometry.classes)
                if c.kind is not None
            },
            "layer_groups": [{"name": g.name, "layers": list(g.layers)} for g in geometry.groups],
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
        rows = [
            ("device memory (cap)", show(self.device_bytes)),
            ("  weights outside the pool", show(self.weights_bytes)),
            ("  workspace of a step", show(self.workspace_bytes)),
            ("  page tables", show(self.tables_bytes)),
            ("  page pool", show(self.pool_bytes)),
            ("experts resident / all", f"{self.experts_resident:,} / {self.experts_total:,}"),
            ("experts lendable (host copies)", f"{self.experts_lendable:,} ({show(self.host_bytes)})"),
            ("KV tokens at start / reachable", f"{self.kv_tokens:,} / {self.kv_tokens_reachable:,}"),
        ]
        for name, tokens in (("512", 512), ("4,096", 4096), ("full length", self.max_model_len)):
            fits = f"{self.requests_of(tokens, False):,} / {self.requests_of(tokens, True):,}"
            rows.append((f"requests of {name} tokens", fits))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes), "", self.geometry.describe()])


def show(n: int) -> str:
    """Bytes for people: three digits and a binary unit."""
    value = float(n)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a plan must know of a model on one device, in bytes where nothing else is said."""

    positions: int  # tokens
    experts: int  # routed, of all layers
    weights: int  # everything outside the routed experts
    rope_row: int  # of the rotary table, a position
    workspace: int
    spec: PoolSpec
    notes: tuple[str, ...] = ()


def sizes_of(model: ModelConfig, config: EngineConfig, itemsize: int) -> Sizes:
    """The sizes of a model that the engine serves."""
    return Sizes(
        positions=model.max_position_embeddings, experts=model.routed_experts,
        weights=model.dense_parameters() * itemsize, rope_row=4 * model.rotary_dim,
        workspace=workspace_bytes(model, config, itemsize),
        spec=pool_spec(model, config.block_size, itemsize),
    )  # fmt: skip


def pool_spec(model: ModelConfig, block_tokens: int, itemsize: int) -> PoolSpec:
    """What the pool must know of a model: bytes of a token's KV and of an expert."""
    inter, hidden = model.moe_intermediate, model.hidden_size
    expert = _up(2 * inter * hidden * itemsize) + _up(hidden * inter * itemsize)
    attention = AttentionKind(
        "kv", tuple(range(model.num_layers)), 2 * model.kv_size * itemsize, block_tokens
    )
    return PoolSpec(attention=(attention,), expert_bytes=expert)


def _up(n: int) -> int:
    return -(-n // GRANT) * GRANT


def workspace_bytes(model: ModelConfig, config: EngineConfig, itemsize: int) -> int:
    """An upper bound of what one step holds at once beside weights and pages.

    Tokens x (residual, norm, qkv, attention out, the MoE's gathered rows, activations and float32
    sum, router), and for each sampled row the logits with the sampler's copies (float32, at most six).
    """
    tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    inter = max(
        model.top_k * 3 * model.moe_intermediate,
        3 * max(model.dense_intermediate or 0, model.shared_intermediate or 0),
    )
    per_token = (6 * model.hidden_size + 2 * heads + inter + model.top_k * model.hidden_size) * itemsize
    per_token += 4 * (2 * model.hidden_size + 4 * model.num_experts)
    rows = max(config.max_num_seqs, 128)
    return tokens * per_token + rows * model.vocab_size * 4 * 6


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
    workspace = sizes.workspace
    tables = len(geometry.groups) * config.max_num_seqs * blocks * 4 + total * 12 + GRANT * 16
    if reserve is not None:
        workspace, tables = reserve, 0
    fixed = weights + workspace + tables
    units = KVUnits.of(geometry, expert_class)

    def roots(experts: int, kv_blocks: int) -> int:
        """Huge pages that hold so many experts and blocks, each kind in parents of its own."""
        pages = experts + -(-kv_blocks * units.per_block // units.per_expert)
        return -(-pages // units.experts_per_huge)

    everything = roots(total, config.max_num_seqs * blocks)
    cap = config.device_memory
    if cap is None:
        share = device_available * (0.5 if device_is_host else config.gpu_memory_utilization)
        cap = min(int(share), fixed + everything * geometry.huge_bytes)
    huge = max(0, cap - fixed) // geometry.huge_bytes

    expert_bytes = geometry.classes[expert_class].page_bytes
    budget = config.host_memory
    if budget is None:
        budget = max(0, int(host_available * 0.8) - (cap if device_is_host else 0))
    # Where everything fits at once no expert can ever have to leave, and none needs a copy.
    can_lend = huge < everything and config.memory_policy != "fixed"
    lendable = min(total, budget // expert_bytes) if can_lend else 0

    policy = make_boundary(config)
    # A length the user asked for is a promise; the model's own length is only a wish.
    least_blocks = blocks if config.max_model_len else 1
    capacity = Capacity(
        pool_pages=huge * units.experts_per_huge, expert_total=total, expert_lendable=lendable,
        expert_floor=0, expert_page_bytes=expert_bytes, kv_page_bytes=units.page_bytes,
        kv_per_expert=units.per_expert, kv_min=least_blocks * units.per_block,
    )  # fmt: skip
    floor = policy.least_resident(capacity)
    if huge < roots(floor, least_blocks):
        parts = [
            ("weights outside the pool", weights, ""),
            ("workspace of a step", workspace, "--max-num-batched-tokens, --max-num-seqs"),
            ("page tables", tables, "--max-num-seqs, --max-model-len"),
            (
                "experts that must stay", roots(floor, 0) * geometry.huge_bytes,
                f"{floor:,} of {total:,}: policy {config.memory_policy}, {lendable:,} have a host copy",
            ),
            ("KV of one request", least_blocks * units.per_block * units.page_bytes, f"length {max_len:,}"),
        ]  # fmt: skip
        starts = fixed + roots(floor, least_blocks) * geometry.huge_bytes
        raise MemoryPlanError(_refusal(config, cap, starts, parts, lendable < total))
    resident = policy.start(capacity)
    reachable = units.blocks_in(capacity.pool_pages - floor) * config.block_size
    notes = []
    if reachable < max_len:
        full = fixed + roots(floor, blocks) * geometry.huge_bytes
        notes.append(
            f"the longest request memory can hold has {reachable:,} tokens, the model's length is "
            f"{max_len:,}; --device-memory {full} ({show(full)}) holds one of full length"
        )
    return MemoryPlan(
        device_bytes=cap, weights_bytes=weights, workspace_bytes=workspace, tables_bytes=tables,
        pool_bytes=huge * geometry.huge_bytes, geometry=geometry, expert_class=expert_class, units=units,
        expert_pages=capacity.pool_pages, experts_total=total, experts_resident=resident,
        experts_floor=floor, experts_lendable=lendable, host_bytes=lendable * expert_bytes,
        block_tokens=config.block_size,
        kv_tokens=units.blocks_in(capacity.pool_pages - resident) * config.block_size,
        kv_tokens_reachable=reachable, max_model_len=max_len, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, notes=notes,
    )  # fmt: skip


def _refusal(
    config: EngineConfig, cap: int, starts: int, parts: list[tuple[str, int, str]], more_host: bool
) -> str:
    lines = [f"{show(cap)} of device memory ({cap} bytes) cannot start {config.model}; needed at least:"]
    for name, size, why in parts:
        lines.append(f"  {name:<26}{show(size):>12}" + (f"   ({why})" if why else ""))
    lines.append(f"what would start: --device-memory {starts} ({show(starts)})")
    if config.memory_policy in ("fixed", "static"):
        lines.append("or --memory-policy reactive, which keeps experts in host memory where they do not fit")
    elif more_host:
        lines.append("or more --host-memory, so that more experts may leave the device")
    return "\n".join(lines)
