"""Shapes that kernels agree on: how bytes lie inside a page, and what a step's batch looks like.

Room: the vocabulary of `rimuru.kernels`. Rule: plain data only; nothing here launches work, and
nothing here imports another room of the package.

Every back end (`reference`, `cpu`, `triton`) implements the functions documented in
`rimuru.kernels.reference` with exactly these types.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

ALIGN = 256  # bytes; each part of an expert page starts on this boundary

# An expert's address is a multiple of ALIGN, so its low byte is free for a tag.
EXPERT_HOST = 0x80  # the page lies in host memory; a hint that orders work and changes no result
EXPERT_FORMAT = 0x0F  # 0: as the layout says; the other values are reserved for packed pages
EXPERT_ADDRESS = ~0xFF  # `entry & EXPERT_ADDRESS` is the address


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one layer group's KV page lies in memory.

    A page holds `block_tokens` tokens of `layers` attention layers:

        [layer of group][K, V][token][head][dim]

    The page starts at `table_entry * grain` bytes from the pool's base.
    """

    layers: int
    block_tokens: int
    heads: int
    head_dim: int
    grain: int  # bytes
    dtype: torch.dtype

    @property
    def kv_elems(self) -> int:
        """Elements between the K and the V of one layer inside a page."""
        return self.block_tokens * self.heads * self.head_dim

    @property
    def layer_elems(self) -> int:
        return 2 * self.kv_elems

    @property
    def grain_elems(self) -> int:
        return self.grain // self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Payload bytes of a page (the pool may pad it to the grain)."""
        return self.layers * self.layer_elems * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVView:
    """One attention layer's window on the pool.

    `pool` is the whole pool reinterpreted as a flat tensor of `layout.dtype`; element
    `(page, k_or_v, token, head, dim)` of this layer is at
    `table_entry * grain_elems + layer * layer_elems + k_or_v * kv_elems
    + (token * heads + head) * head_dim + dim`, computed in int64.
    """

    pool: torch.Tensor  # [pool elements], layout.dtype
    table: torch.Tensor  # int32 [slots, blocks], grain indices of this layer's group
    layer: int  # index inside the group
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How one layer group's STATE or CONV page lies in memory: `[layer of group][*shape]`.

    shape: of STATE `(value heads, key dim, value dim)`, in float32; of CONV `(kernel - 1, channels)`,
    the last inputs of the convolution, oldest first. The page starts at `table_entry * grain` bytes
    from the pool's base.
    """

    layers: int
    shape: tuple[int, ...]
    grain: int  # bytes
    dtype: torch.dtype

    @property
    def layer_elems(self) -> int:
        return prod(self.shape)

    @property
    def grain_elems(self) -> int:
        return self.grain // self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Payload bytes of a page (the pool may pad it to the grain)."""
        return self.layers * self.layer_elems * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateView:
    """One recurrent layer's window on the states of all slots.

    The layer's values of a slot begin at element `table[slot] * grain_elems + layer * layer_elems`
    of `pool`, computed in int64.
    """

    pool: torch.Tensor  # [pool elements], layout.dtype
    table: torch.Tensor  # int32 [slots], grain indices of this layer's group
    layer: int  # index inside the group
    layout: StateLayout


@dataclass(frozen=True, slots=True)
class RecurrentView:
    """What a gated delta layer keeps of a sequence: its state and the convolution's last inputs."""

    state: StateView
    conv: StateView


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How one expert of one layer lies in its page: gate_up then down, each part 256-byte aligned.

    gate_up  [2 * intermediate, hidden]   rows: all of gate, then all of up
    down     [hidden, intermediate]
    """

    hidden: int
    intermediate: int
    dtype: torch.dtype

    @property
    def gate_up_bytes(self) -> int:
        return 2 * self.intermediate * self.hidden * self.dtype.itemsize

    @property
    def down_offset(self) -> int:
        """Bytes from the start of the page to `down`."""
        return _up(self.gate_up_bytes, ALIGN)

    @property
    def page_bytes(self) -> int:
        """Payload bytes of a page (the pool may pad it to the grain)."""
        return self.down_offset + _up(self.hidden * self.intermediate * self.dtype.itemsize, ALIGN)


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """The dense parameters of a MoE feed-forward and of the norm before it, in the model's dtype.

    router `[E, H]`, or `[E + 1, H]` where its last row is the gate of the shared expert. The shared
    expert of `S` columns: shared_gate_up `[2 * S, H]` (gate, then up), shared_down `[H, S]`. bias: float32
    `[E]`, corrects the choice of experts and not their weights.
    """

    norm: torch.Tensor  # [H]
    eps: float
    router: torch.Tensor
    experts: int
    top_k: int
    layout: ExpertLayout
    scoring: str = "softmax"
    normalize: bool = True
    bias: torch.Tensor | None = None
    shared_gate_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None
    zero_centred: bool = False  # RMSNorm with the weight 1 + weight, here and in the norm after it


@dataclass(slots=True)
class StepMeta:
    """What attention needs to know of a step: which tokens belong to which sequence.

    A step holds `S` sequences and `T` tokens; the tokens of a sequence are adjacent and in order.
    Padding sequences (for captured graphs) have `seq_lens == 0` and write nowhere.
    """

    positions: torch.Tensor  # int32 [T], position of each token in its sequence
    token_slots: torch.Tensor  # int32 [T], table row of each token's sequence; -1: do not write
    query_start: torch.Tensor  # int32 [S + 1]
    slots: torch.Tensor  # int32 [S], table row of each sequence
    seq_lens: torch.Tensor  # int32 [S], tokens in the cache after this step's were written
    max_query_len: int  # host value; 1 means a pure decode step
    max_seq_len: int  # host value, an upper bound of seq_lens
