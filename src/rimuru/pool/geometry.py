"""From a model's sizes to pages: their bytes, the split tree, the layer groups, and what is wasted.

Room: the pool. Rule: plain arithmetic on plain data, standard library only; one call, one answer.

The tree has at most three levels: a root ("huge") page is cut into expert pages, and an expert
page into KV pages. A parent yields `floor(parent / page)` children and the remainder is unused, so
nothing has to divide evenly. Levels of equal size collapse into one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .errors import GeometryError

KIB, MIB = 1 << 10, 1 << 20
GRAINS = (16 * KIB, 8 * KIB, 4 * KIB, 2 * KIB)
FINE_GRAINS = (KIB, 512, 256)  # toy models only: their experts are a few KiB
MAX_GRAINS = 2**31 - 1  # tables hold grain indices as int32
MAX_EXPERTS_PER_HUGE = 64


class Kind(enum.IntEnum):
    """What a page holds."""

    KV = 0
    STATE = 1
    CONV = 2
    EXPERT = 3
    EXPERT_PACKED = 4


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Attention layers that cache alike: "full", "sliding", a latent (MLA), a compressed stream.

    `bytes_per_token_per_layer` counts K and V of this rank. A block is `block_tokens` tokens.
    """

    name: str
    layers: tuple[int, ...]
    bytes_per_token_per_layer: int
    block_tokens: int = 16

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.bytes_per_token_per_layer * self.block_tokens


@dataclass(frozen=True, slots=True)
class RecurrentKind:
    """Layers that keep a state of fixed size a request (recurrent or convolution state)."""

    layers: tuple[int, ...]
    bytes_per_layer: int


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What a model wants to keep in the pool, on one rank.

    `expert_bytes`, `packed_bytes`: the payload of one expert's page, raw and losslessly packed;
    None where the model has none or the format is not used.
    """

    attention: tuple[AttentionKind, ...]
    expert_bytes: int | None = None
    packed_bytes: int | None = None
    state: RecurrentKind | None = None
    conv: RecurrentKind | None = None


@dataclass(frozen=True, slots=True)
class PageClass:
    """One size class of the split tree. `parent` is the index of the class it is cut from."""

    name: str
    kind: Kind | None  # None: a huge page that is only ever split
    payload_bytes: int
    page_bytes: int
    parent: int | None
    per_parent: int  # 0 for the root


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose blocks (or states) share one page of class `page_class`."""

    name: str
    kind: Kind
    layers: tuple[int, ...]
    page_class: int
    payload_bytes: int
    block_tokens: int = 0  # 0 for states, which do not grow with tokens


@dataclass(frozen=True, slots=True)
class Geometry:
    """The plan of a pool: class 0 is the root, every other class is cut from an earlier one."""

    grain: int
    huge_bytes: int
    classes: tuple[PageClass, ...]
    groups: tuple[LayerGroup, ...]
    waste: dict[Kind, float] = field(default_factory=dict)
    bound: float = 0.02

    @property
    def worst_waste(self) -> float:
        """The largest waste of any kind, as a fraction of the bytes it takes."""
        return max(self.waste.values(), default=0.0)

    def classes_of(self, kind: Kind) -> list[int]:
        """Indices of the page classes of a kind."""
        return [i for i, c in enumerate(self.classes) if c.kind == kind]

    def class_of(self, kind: Kind) -> int:
        """Index of the one page class of a kind; GeometryError where there is none or several."""
        found = self.classes_of(kind)
        if len(found) != 1:
            raise GeometryError(f"{kind.name} has {len(found)} page classes, not one")
        return found[0]

    def groups_of(self, kind: Kind) -> list[LayerGroup]:
        """The layer groups of a kind, in order."""
        return [g for g in self.groups if g.kind == kind]

    def page_grains(self, cls: int) -> int:
        """Grains from one page of a class to the next in the same parent."""
        return self.classes[cls].page_bytes // self.grain

    def cost(self, cls: int) -> float:
        """Pool bytes one page takes, with its share of what its parents leave unused."""
        c = self.classes[cls]
        return c.page_bytes if c.parent is None else self.cost(c.parent) / c.per_parent

    def roots(self, pool_bytes: int) -> int:
        """Whole huge pages in a pool of `pool_bytes`."""
        return pool_bytes // self.huge_bytes

    def _splits(self) -> list[str]:
        """What a page of each size may be: a line for every class that others are cut from."""
        lines = []
        for i, c in enumerate(self.classes):
            cut = [f"{other.per_parent} {other.name}" for other in self.classes if other.parent == i]
            itself = [] if c.kind is None else [f"1 {c.name}"]
            if cut:
                lines.append(f"{_size(c.page_bytes)} = {' or '.join(itself + cut)}")
        return lines

    def describe(self) -> str:
        """The plan as a table: split tree, page sizes, layer groups, waste by kind."""
        lines = [f"grain {_size(self.grain)}, huge page {_size(self.huge_bytes)}", *self._splits(), ""]
        row = "{:<26}{:>12}{:>12}{:>12}  {}"
        lines.append(row.format("page class", "page", "payload", "per parent", "layer groups"))

        def show(cls: int, depth: int) -> None:
            c = self.classes[cls]
            runs: dict[tuple[str, int], int] = {}
            for g in self.groups:
                if g.page_class == cls:
                    key = (g.name.split(".")[0], len(g.layers))
                    runs[key] = runs.get(key, 0) + 1
            held = "; ".join(f"{name} {n} x {size} layers" for (name, size), n in runs.items())
            per = "-" if c.parent is None else str(c.per_parent)
            text = row.format("  " * depth + c.name, _size(c.page_bytes), _size(c.payload_bytes), per, held)
            lines.append(text.rstrip())
            for child, other in enumerate(self.classes):
                if other.parent == cls:
                    show(child, depth + 1)

        show(0, 0)
        lines.append("")
        over = "" if self.worst_waste <= self.bound else f"  (over the bound of {self.bound:.0%})"
        lines.append("waste " + ", ".join(f"{k.name} {w:.2%}" for k, w in self.waste.items()) + over)
        return "\n".join(lines)


def plan_geometry(spec: PoolSpec, *, bound: float = 0.02, max_huge_bytes: int = 64 * MIB) -> Geometry:
    """Plan a pool for `spec`: the smallest huge page, then the fewest layer groups, then the least
    waste and the largest grain, for which no kind wastes more than `bound`.

    The waste of a kind is `1 - payload / bytes taken` if the whole pool were that kind. The huge page
    passes `max_huge_bytes` only where one expert (or four packed ones) does. Sizes for which no plan
    meets the bound get the plan with the least waste; `Geometry.worst_waste` tells.
    Raises GeometryError for an empty or negative size.
    """
    _check_spec(spec)

    def rank(g: Geometry) -> tuple[int, int, float, int]:
        return g.huge_bytes, len(g.groups), g.worst_waste, -g.grain

    plans = [_plan(spec, grain, bound, max_huge_bytes) for grain in GRAINS]
    good = [g for g in plans if g.worst_waste <= bound]
    if not good:
        plans += [_plan(spec, grain, bound, max_huge_bytes) for grain in FINE_GRAINS]
        good = [g for g in plans if g.worst_waste <= bound]
    return min(good, key=rank) if good else min(plans, key=lambda g: (g.worst_waste, *rank(g)))


def _check_spec(spec: PoolSpec) -> None:
    sizes = {"expert": spec.expert_bytes, "packed expert": spec.packed_bytes}
    for a in spec.attention:
        sizes[f"{a.name} KV token"] = a.bytes_per_token_per_layer
        sizes[f"{a.name} KV block (tokens)"] = a.block_tokens
    for name, r in (("state", spec.state), ("conv", spec.conv)):
        sizes[name] = None if r is None else r.bytes_per_layer
    for name, value in sizes.items():
        if value is not None and value <= 0:
            raise GeometryError(f"{name} has {value} bytes; a page must hold at least one")
    layers = [a.layers for a in spec.attention]
    layers += [r.layers for r in (spec.state, spec.conv) if r is not None]
    if not all(layers):
        raise GeometryError("a layer kind without layers cannot be planned; leave it out")
    if not layers and spec.expert_bytes is None and spec.packed_bytes is None:
        raise GeometryError("nothing to plan: no attention, no state and no experts")


@dataclass(frozen=True, slots=True)
class _Cut:
    """One way to lay `layers` of a kind on pages of a parent."""

    sizes: tuple[int, ...]  # layers of each group
    waste: float


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _size(n: float) -> str:
    if n >= MIB:
        return f"{n / MIB:.2f} MiB"
    return f"{n / KIB:g} KiB"


def _balanced(layers: int, groups: int) -> tuple[int, ...]:
    small, extra = divmod(layers, groups)
    return (small + 1,) * extra + (small,) * (groups - extra)


def _cut(layers: int, layer_bytes: int, parent: int, grain: int, bound: float, even: bool) -> _Cut | None:
    """The fewest groups within the bound, else those with the least waste; None if no page fits.

    `even` asks for groups of one size, so that all of them share one page class.
    """
    best = None
    for groups in range(1, layers + 1):
        if even and layers % groups:
            continue
        sizes = _balanced(layers, groups)
        if _up(sizes[0] * layer_bytes, grain) > parent:
            continue
        taken = sum(parent / (parent // _up(s * layer_bytes, grain)) for s in sizes)
        cut = _Cut(sizes, 1 - layers * layer_bytes / taken)
        if cut.waste <= bound:
            return cut
        if best is None or cut.waste < best.waste:
            best = cut
    return best


def _plan(spec: PoolSpec, grain: int, bound: float, max_huge: int) -> Geometry:
    """The best plan with one grain: the smallest huge page within the bound, else the least waste."""
    experts = [_up(n, grain) for n in (spec.expert_bytes, spec.packed_bytes) if n is not None]
    if len(experts) == 2:
        # Four packed experts are three raw ones, up to padding: one huge page holds either.
        raw, packed = experts
        unit = max(4 * packed, 3 * raw)
    elif experts:
        unit = experts[0]
    else:
        recurrent = [r.bytes_per_layer for r in (spec.state, spec.conv) if r is not None]
        unit = max([_up(len(a.layers) * a.layer_bytes, grain) for a in spec.attention] + recurrent)
        unit = _up(unit, grain)
    best: Geometry | None = None
    for times in range(1, MAX_EXPERTS_PER_HUGE + 1):
        huge = unit * times
        if times > 1 and huge > max_huge:
            break
        plan = _plan_huge(spec, grain, huge, bound)
        if plan is None:
            continue
        if plan.worst_waste <= bound:
            return plan
        if best is None or plan.worst_waste < best.worst_waste:
            best = plan
    if best is None:
        # Not even one layer's page fits the largest huge page allowed: take that page as the unit.
        largest = max(
            [a.layer_bytes for a in spec.attention]
            + [r.bytes_per_layer for r in (spec.state, spec.conv) if r is not None]
        )
        best = _plan_huge(spec, grain, _up(_up(largest, grain), unit), bound)
        assert best is not None, "a page that is a multiple of every unit holds every kind"
    return best


def _plan_huge(spec: PoolSpec, grain: int, huge: int, bound: float) -> Geometry | None:
    """The tree under a huge page of `huge` bytes; None where some page does not fit into it."""
    classes: list[PageClass] = [PageClass("huge", None, huge, huge, None, 0)]
    groups: list[LayerGroup] = []
    waste: dict[Kind, float] = {}

    def add(name: str, kind: Kind, payload: int, parent: int) -> int:
        page = _up(payload, grain)
        for i, c in enumerate(classes):
            if c.kind == kind and c.page_bytes == page and c.parent == parent:
                return i
        classes.append(PageClass(name, kind, payload, page, parent, classes[parent].page_bytes // page))
        return len(classes) - 1

    parents = [0]  # what KV and CONV may be cut from, preferred first
    for kind, payload in ((Kind.EXPERT, spec.expert_bytes), (Kind.EXPERT_PACKED, spec.packed_bytes)):
        if payload is None:
            continue
        per = huge // _up(payload, grain)
        if per == 0:
            return None
        waste[kind] = 1 - per * payload / huge
        cls = add(kind.name, kind, payload, 0)
        if classes[cls].page_bytes == huge:
            classes[0] = replace(classes.pop(), parent=None, per_parent=0)
        elif len(parents) == 1:
            parents.insert(0, cls)

    def place(
        prefix: str, kind: Kind, layers: Sequence[int], layer_bytes: int, choices: Sequence[int], tokens: int
    ) -> tuple[int, float] | None:
        """Cut one kind's layers from the first parent within the bound; payload and bytes taken."""
        even = kind != Kind.KV  # fewer KV groups make a cheaper step; states gain nothing from it
        cuts = [
            (p, _cut(len(layers), layer_bytes, classes[p].page_bytes, grain, bound, even)) for p in choices
        ]
        fit = [(p, c, 1 - (1 - c.waste) * _use(classes, p)) for p, c in cuts if c is not None]
        if not fit:
            return None
        parent, cut, lost = next((f for f in fit if f[2] <= bound), min(fit, key=lambda f: f[2]))
        start = 0
        for i, size in enumerate(cut.sizes):
            name = prefix if len(cut.sizes) == 1 else f"{prefix}.{i}"
            cls = add(prefix, kind, size * layer_bytes, parent)
            groups.append(
                LayerGroup(name, kind, tuple(layers[start : start + size]), cls, size * layer_bytes, tokens)
            )
            start += size
        payload = len(layers) * layer_bytes
        return payload, payload / (1 - lost)

    for a in spec.attention:
        placed = place(a.name, Kind.KV, a.layers, a.layer_bytes, parents, a.block_tokens)
        if placed is None:
            return None
        waste[Kind.KV] = max(waste.get(Kind.KV, 0.0), 1 - placed[0] / placed[1])
    for name, kind, r, choices in (
        ("state", Kind.STATE, spec.state, [0]),
        ("conv", Kind.CONV, spec.conv, parents),
    ):
        if r is None:
            continue
        placed = place(name, kind, r.layers, r.bytes_per_layer, choices, 0)
        if placed is None:
            return None
        waste[kind] = 1 - placed[0] / placed[1]
    if len(classes) == 2 and classes[0].kind is None and classes[1].per_parent == 1:
        only = classes.pop()
        classes[0] = replace(only, page_bytes=huge, parent=None, per_parent=0)
        groups = [replace(g, page_class=0) for g in groups]
    return Geometry(grain, huge, tuple(classes), tuple(groups), waste, bound)


def _use(classes: Sequence[PageClass], cls: int) -> float:
    """The share of the pool that is usable when it is all cut into pages of `cls`."""
    c = classes[cls]
    if c.parent is None:
        return 1.0
    return c.page_bytes * c.per_parent / classes[c.parent].page_bytes * _use(classes, c.parent)
