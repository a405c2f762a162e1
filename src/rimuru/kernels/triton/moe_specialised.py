"""The expert products of a long prefill on Hopper: warps that only load beside warps that only multiply.

Room: `product`, both products of `moe` where experts have rows enough. Rule: the plan and the order of
every sum, and so the bits, are those of `moe`'s other kernel; which program computes a tile, and when,
changes nothing.

One thread block a multiprocessor stays for all tiles. Four warps load: weights with the tensor memory
accelerator (TMA), rows of x, which lie scattered, with plain asynchronous copies. Two warpgroups multiply
64 rows each by the same 256 weight rows. One may be a few steps behind the other, so that its products
hide the other's epilogue; the second skips a block of at most 64 rows. Tiles in the pool are drawn from a
counter in the plan; those of host experts are shared out over `HOST_LANES` programs, as in `moe`.

One TMA descriptor serves all experts: an address is two coordinates of it, in steps of `ALIGN` bytes from
address 0. Every thread block writes its own once; one for each tile would be rewritten while in use.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..types import ALIGN, ExpertLayout
from .align import HEADER, Alignment

BLOCK_M = 128
HOST_LANES = 64
ROWS = 60  # of an expert on average, from which on this kernel is the faster one
_GRAIN = gl.constexpr(ALIGN)
_GRAINS = gl.constexpr(1 << 16)  # of the descriptor's third dimension; the fourth counts these
_HEADER = gl.constexpr(HEADER.value)
_M = gl.constexpr(64)  # rows of a warpgroup
_N = gl.constexpr(256)
_K = gl.constexpr(64)
_HALF = gl.constexpr(128)  # columns of gate, of up, or of one store
_STAGES = gl.constexpr(4)
_MESSAGES = gl.constexpr(2)
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_PAGE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
_FIELDS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _load(
    a, work, room, pair_count, shared,
    PART: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, GATE_UP: gl.constexpr,
    TILES: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """The warps that load. They alone know which tile is next, and tell the others: column, row, rows."""
    a_stages, w_stages, ready, empty, messages, sent, taken = shared
    dtype: gl.constexpr = a.dtype.element_ty
    BOX: gl.constexpr = _HALF if GATE_UP else _N
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    nowhere = (room.to(gl.int64) * 0).to(gl.pointer_type(dtype))
    weights = tma.make_tensor_descriptor(
        nowhere, [1 << 23, _GRAINS, N, K], [_GRAINS * _GRAIN // 2, _GRAIN // 2, K, 1], [1, 1, BOX, _K], _PAGE
    )
    if not GATE_UP:
        rows_of_a = tma.make_tensor_descriptor(a, [pair_count, K], [K, 1], [_M, _K], _SHARED)
    mine = gl.program_id(0)  # the next tile of host experts that is this program's
    host = gl.load(work) * TILES if mine < LANES else 0
    blocks = work + _HEADER
    pairs = blocks + 8 * room
    counter = work + (1 if GATE_UP else 2)
    field = gl.arange(0, 4, _FIELDS)
    i = gl.arange(0, _M, gl.SliceLayout(1, GATHER))
    k = gl.expand_dims(gl.arange(0, _K, gl.SliceLayout(0, GATHER)), 0)
    step, turn, more = 0, 0, True
    while more:
        if mine < host:
            block = blocks + 4 * room + mine // TILES * 4
            column = mine % TILES
            mine += LANES
            rows = gl.load(block + 3)
        else:
            tile = gl.atomic_add(counter, 1, sem="relaxed")
            block = blocks + gl.minimum(tile // TILES, room - 1) * 4
            column = tile % TILES
            rows = gl.where(tile < room * TILES, gl.load(block + 3), 0)
        row = gl.load(block + 2)
        m = turn % _MESSAGES
        mbarrier.wait(taken.index(m), turn // _MESSAGES % 2 ^ 1)
        messages.index(m).store(gl.where(field == 0, column, gl.where(field == 1, row, rows)))
        mbarrier.arrive(sent.index(m))
        turn += 1
        more = rows > 0  # the blocks in use come first
        if more:
            grain = (gl.load(block.to(gl.pointer_type(gl.int64))) + PART) // _GRAIN
            high, low = (grain // _GRAINS).to(gl.int32), (grain % _GRAINS).to(gl.int32)
            if GATE_UP:
                live, also = i < rows, i + _M < rows
                token = gl.load(pairs + row + i, mask=live, other=0) // TOP_K
                other = gl.load(pairs + row + _M + i, mask=also, other=0) // TOP_K
                top = a + gl.expand_dims(token.to(gl.int64) * K, 1) + k
                bottom = a + gl.expand_dims(other.to(gl.int64) * K, 1) + k
                live, also = gl.expand_dims(live, 1), gl.expand_dims(also, 1)
            for start in range(0, K, _K):
                s = step % _STAGES
                mbarrier.wait(empty.index(s), step // _STAGES % 2 ^ 1)
                full, first, second = ready.index(s), a_stages.index(2 * s), a_stages.index(2 * s + 1)
                w = w_stages.index(s)._reinterpret(dtype, [_N // BOX, 1, 1, BOX, _K], _PAGE)
                at = [high, low, column * BOX, start]
                if GATE_UP:
                    up = [high, low, N // 2 + column * BOX, start]
                    mbarrier.expect(full, 2 * _N * _K)
                    tma.async_copy_global_to_shared(weights, at, full, w.index(0))
                    tma.async_copy_global_to_shared(weights, up, full, w.index(1))
                    async_copy.async_copy_global_to_shared(first, top + start, mask=live)
                    async_copy.async_copy_global_to_shared(second, bottom + start, mask=also)
                    async_copy.mbarrier_arrive(full, increment_count=False)
                else:
                    if rows > _M:
                        mbarrier.expect(full, 2 * (_N + 2 * _M) * _K)
                    else:
                        mbarrier.expect(full, 2 * (_N + _M) * _K)
                    tma.async_copy_global_to_shared(weights, at, full, w.index(0))
                    # Rows after the block's are the next expert's: multiplied, and not stored.
                    tma.async_copy_global_to_shared(rows_of_a, [row, start], full, first)
                    below = [row + _M, start]
                    tma.async_copy_global_to_shared(rows_of_a, below, full, second, pred=rows > _M)
                step += 1


@gluon.jit
def _store(out, value, row, live, column, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, WHERE: gl.constexpr):
    c = column + gl.arange(0, _HALF, gl.SliceLayout(0, WHERE))
    value = gl.convert_layout(value.to(out.dtype.element_ty), WHERE)
    keep = gl.expand_dims(live, 1)
    if COLUMNS % WIDTH:
        keep = keep & gl.expand_dims(c < COLUMNS, 0)
    gl.store(out + gl.expand_dims(row.to(gl.int64) * COLUMNS, 1) + gl.expand_dims(c, 0), value, mask=keep)


@gluon.jit
def _multiply(
    out, work, room, shared,
    HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATE_UP: gl.constexpr,
):  # fmt: skip
    """One of the two warpgroups that multiply: rows `64 * HALF` on of every block."""
    a_stages, w_stages, ready, empty, messages, sent, taken = shared
    dtype: gl.constexpr = out.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    WHERE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    field = gl.arange(0, 4, _FIELDS)
    i = gl.arange(0, _M, gl.SliceLayout(1, WHERE))
    pairs = work + _HEADER + 8 * room
    step, turn, more = 0, 0, True
    while more:
        m = turn % _MESSAGES
        mbarrier.wait(sent.index(m), turn // _MESSAGES % 2)
        message = messages.index(m).load(_FIELDS)
        mbarrier.arrive(taken.index(m))
        column = gl.sum(gl.where(field == 0, message, 0), 0)
        row = gl.sum(gl.where(field == 1, message, 0), 0) + HALF * _M
        rows = gl.sum(gl.where(field == 2, message, 0), 0)
        turn += 1
        more = rows > 0
        rows -= HALF * _M
        if rows > 0:
            live = i < rows
            out_row = row + i
            if not GATE_UP:
                out_row = gl.load(pairs + out_row, mask=live, other=0)
            acc = gl.zeros([_M, _N], gl.float32, ACC)
            for start in range(0, K, _K):
                s = step % _STAGES
                mbarrier.wait(ready.index(s), step // _STAGES % 2)
                if GATE_UP:
                    fence_async_shared()  # rows of x came by the other way than the one wgmma reads
                w = w_stages.index(s).permute((1, 0))
                acc = warpgroup_mma(a_stages.index(2 * s + HALF), w, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                if start > 0:
                    mbarrier.arrive(empty.index((step + _STAGES - 1) % _STAGES))
                step += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((step + _STAGES - 1) % _STAGES))
            left, right = gl.split(gl.permute(gl.reshape(acc, [_M, 2, _HALF]), (0, 2, 1)))
            if GATE_UP:
                gate = left.to(dtype).to(gl.float32)
                act = gate / (1.0 + gl.exp(-gate)) * right.to(dtype).to(gl.float32)
                _store(out, act, out_row, live, column * _HALF, N // 2, _HALF, WHERE)
            else:
                _store(out, left, out_row, live, column * _N, N, _N, WHERE)
                _store(out, right, out_row, live, column * _N + _HALF, N, _N, WHERE)
        elif more:
            for _ in range(0, K, _K):
                s = step % _STAGES
                mbarrier.wait(ready.index(s), step // _STAGES % 2)
                mbarrier.arrive(empty.index(s))
                step += 1


@gluon.jit(do_not_specialize=["room", "pair_count"])
def _specialised_kernel(
    a, out, work, room, pair_count,
    PART: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, GATE_UP: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """As `_expert_kernel`. Grid: one program a multiprocessor."""
    dtype: gl.constexpr = a.dtype.element_ty
    TILES: gl.constexpr = (N + _N - 1) // _N
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_stages = gl.allocate_shared_memory(dtype, [2 * _STAGES, _M, _K], _SHARED)
    w_stages = gl.allocate_shared_memory(dtype, [_STAGES, _N, _K], _SHARED)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    messages = gl.allocate_shared_memory(gl.int32, [_MESSAGES, 4], plain)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    sent = gl.allocate_shared_memory(gl.int64, [_MESSAGES, 1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [_MESSAGES, 1], BARRIER)
    for s in gl.static_range(_STAGES):
        # Each loading thread when its rows of x are there, and the bytes of the accelerator.
        mbarrier.init(ready.index(s), 1 + 128 * GATE_UP)
        mbarrier.init(empty.index(s), 2)
    for m in gl.static_range(_MESSAGES):
        mbarrier.init(sent.index(m), 1)
        mbarrier.init(taken.index(m), 2)
    fence_async_shared()
    shared = (a_stages, w_stages, ready, empty, messages, sent, taken)
    gl.warp_specialize(
        [
            (_multiply, (out, work, room, shared, 0, N, K, GATE_UP)),
            (_multiply, (out, work, room, shared, 1, N, K, GATE_UP)),
            (_load, (a, work, room, pair_count, shared, PART, N, K, TOP_K, GATE_UP, TILES, LANES)),
        ],
        [4, 4],
        [224, 56],  # registers; the first, like the second, has 224
    )


@lru_cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU that can run this kernel, 0 of any other device."""
    # Gluon's interface may change with every minor version; `moe` has its other kernel.
    if not triton.__version__.startswith("3.6.") or device.type != "cuda":
        return 0
    if torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def suits(layout: ExpertLayout, tokens: int, top_k: int, experts: int, device: torch.device) -> bool:
    """Whether `product` is for this step: rows enough, sizes that are whole K steps, and the chip."""
    whole = (layout.hidden | layout.intermediate) % _K.value == 0 and layout.dtype.itemsize == 2
    return whole and tokens * top_k >= ROWS * experts and _processors(device) > 0


def product(
    a: torch.Tensor, out: torch.Tensor, plan: Alignment, layout: ExpertLayout, top_k: int, gate_up: bool
) -> None:
    """One product of every block of a plan of `BLOCK_M` rows, as `moe._product`; each product once a plan."""
    triton.set_allocator(_scratch)  # for the descriptors
    n, k = (2 * layout.intermediate, layout.hidden) if gate_up else (layout.hidden, layout.intermediate)
    _specialised_kernel[(_processors(a.device),)](
        a, out, plan.work, plan.room, len(a),
        PART=0 if gate_up else layout.down_offset, N=n, K=k, TOP_K=top_k, GATE_UP=gate_up, LANES=HOST_LANES,
        num_warps=4,
    )  # fmt: skip
