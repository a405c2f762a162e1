"""Each layer's window on the pool: its pages of KV or of recurrent state, as the kernels read them.

Room: between the plan and the model. Rule: no bytes move here; a view is the pool, a table and a layout.
"""

from __future__ import annotations

import torch

from rimuru.kernels.types import KVLayout, KVView, RecurrentView, StateLayout, StateView
from rimuru.models.config import ModelConfig
from rimuru.pool.arena import Arena
from rimuru.pool.geometry import Kind, LayerGroup

from .plan import MemoryPlan


def kv_layout(model: ModelConfig, plan: MemoryPlan, group: LayerGroup, dtype: torch.dtype) -> KVLayout:
    """How a page of a KV group is cut."""
    return KVLayout(
        len(group.layers), plan.block_tokens, model.num_kv_heads, model.head_dim, plan.geometry.grain, dtype
    )


def layer_views(
    model: ModelConfig,
    plan: MemoryPlan,
    arena: Arena,
    kv_tables: torch.Tensor,
    state_table: torch.Tensor | None,
    dtype: torch.dtype,
) -> list[KVView | RecurrentView]:
    """One view a layer. kv_tables int32 `[KV groups, slots, blocks]`; state_table int32 `[state groups,
    slots]`, of models with recurrent layers."""
    views: dict[int, KVView | RecurrentView] = {}
    for index, group in enumerate(plan.geometry.groups_of(Kind.KV)):
        layout = kv_layout(model, plan, group, dtype)
        for at, layer in enumerate(group.layers):
            views[layer] = KVView(arena.view(dtype), kv_tables[index], at, layout)
    if (r := model.recurrent) is not None:
        assert state_table is not None
        shape = (r.value_heads, r.key_dim, r.value_dim)
        state = _state_views(plan, arena, state_table, Kind.STATE, shape, torch.float32)
        conv = _state_views(plan, arena, state_table, Kind.CONV, (r.kernel - 1, r.channels), dtype)
        views |= {layer: RecurrentView(state[layer], conv[layer]) for layer in r.layers}
    return [views[layer] for layer in range(model.num_layers)]


def _state_views(
    plan: MemoryPlan,
    arena: Arena,
    table: torch.Tensor,
    kind: Kind,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> dict[int, StateView]:
    """A recurrent layer -> its window on the pages of a kind."""
    views = {}
    for index, group in enumerate(plan.state_groups):
        if group.kind == kind:
            layout = StateLayout(len(group.layers), shape, plan.geometry.grain, dtype)
            for at, layer in enumerate(group.layers):
                views[layer] = StateView(arena.view(dtype), table[index], at, layout)
    return views
