"""The Gluon operations of `moe_specialised` on the CPU: what Triton's interpreter is for its other kernels.

A partition of warps is a thread, a barrier counts arrivals and bytes, an address is an address. What this
shows is that tiles, masks, phases and messages are right; not that the chip's two memory paths are ordered.
"""

from __future__ import annotations

import ctypes
import threading
from types import FunctionType, SimpleNamespace

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from rimuru.kernels.triton import moe_specialised

SIZE = {"bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
TIMEOUT = 30.0  # seconds until a wait is a deadlock


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, kind)).float().numpy()


def raw(address: int, count: int, kind: str) -> torch.Tensor:
    memory = (ctypes.c_char * (count * SIZE[kind])).from_address(address)
    return torch.frombuffer(memory, dtype=getattr(torch, kind))


def read(address: int, count: int, kind: str) -> np.ndarray:
    values = raw(address, count, kind)
    return values.float().numpy() if kind.endswith("16") else values.numpy().copy()


class Array(np.ndarray):
    def to(self, kind):
        if isinstance(kind, tuple):  # a pointer type
            return Pointer(self, kind[1])
        if kind in ("bfloat16", "float16"):
            return rounded(self, kind).view(Array)
        return self.astype(kind)


def array(values, kind=None) -> Array:
    return np.asarray(values, dtype=kind).view(Array)


class Pointer:
    def __init__(self, address, kind: str) -> None:
        self.address, self.kind = array(address, np.int64), kind
        self.dtype = SimpleNamespace(element_ty=kind)

    def __add__(self, elements):
        return Pointer(self.address + np.asarray(elements, np.int64) * SIZE[self.kind], self.kind)

    def to(self, kind):
        return Pointer(self.address, kind[1])


def load(p: Pointer, mask=True, other=0) -> Array:
    address, mask = np.broadcast_arrays(p.address, mask)
    each = zip(address.flat, mask.flat, strict=True)
    values = [read(int(a), 1, p.kind)[0] if m else other for a, m in each]
    return array(values, np.int64).reshape(address.shape)


def store(p: Pointer, values, mask) -> None:
    for address, row, m in zip(*np.broadcast_arrays(p.address, values, mask), strict=True):
        count = int(m.sum())  # columns that are there come first
        assert m[:count].all()
        assert (np.diff(address[:count]) == SIZE[p.kind]).all()
        if count:
            raw(int(address[0]), count, p.kind)[:] = torch.tensor(row[:count])


class Shared:
    def __init__(self, data: np.ndarray, kind: str) -> None:
        self.data, self.kind = data, kind

    def index(self, i):
        return Shared(self.data[int(i)], self.kind)

    def permute(self, order):
        return Shared(self.data.transpose(order), self.kind)

    def _reinterpret(self, kind, shape, layout):
        return Shared(self.data.reshape([int(n) for n in shape]), kind)

    def store(self, values):
        self.data[...] = values

    def load(self, layout):
        return array(self.data.copy())


class Barrier:
    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def note(self, arrivals: int = 0, bytes: int = 0) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += bytes
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == 0 and self.bytes == 0:
                self.missing, self.phase = self.count, self.phase ^ 1
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != phase, TIMEOUT), "deadlock"


class Machine:
    """One launch: `programs` programs of a kernel at once."""

    def __init__(self, programs: int) -> None:
        self.programs, self.program = programs, threading.local()
        self.lock, self.failed = threading.Lock(), []
        self.barriers: dict[int, Barrier] = {}

    def barrier(self, shared: Shared) -> Barrier:
        return self.barriers[shared.data.ctypes.data]

    def parallel(self, calls, program=None) -> None:
        def work(fn, args, program):
            self.program.id = program
            try:
                fn(*args)
            except BaseException as e:
                self.failed.append(e)

        threads = [threading.Thread(target=work, args=(fn, args, program)) for fn, args, program in calls]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if self.failed:
            raise self.failed[0]

    def specialize(self, calls, warps, registers) -> None:
        assert len(warps) == len(registers) == len(calls) - 1
        self.parallel([(fn, args, self.program.id) for fn, args in calls])

    def atomic_add(self, p: Pointer, value: int, sem: str) -> int:
        with self.lock:
            cell = raw(int(p.address), 1, p.kind)
            before = int(cell[0])
            cell[0] = before + value
            return before

    def tma(self, descriptor, at, barrier: Shared, target: Shared, pred=True) -> None:
        if not pred:
            return
        base, shape, strides, block = descriptor
        box = target.data.reshape(block[-2:])
        at = [int(c) for c in at]
        assert all(0 <= c < n for c, n in zip(at[:-2], shape[:-2], strict=True))
        for i in range(block[-2]):
            inside = 0 <= at[-2] + i < shape[-2]
            place = sum(c * s for c, s in zip(at, strides, strict=True)) + i * strides[-2]
            row = read(int(base.address) + place * SIZE[base.kind], block[-1], base.kind) if inside else 0.0
            box[i] = row
        self.barrier(barrier).note(bytes=-box.size * SIZE[base.kind])

    def gather(self, target: Shared, p: Pointer, mask) -> None:
        for i in range(len(target.data)):
            if mask[i, 0]:
                assert (np.diff(p.address[i]) == SIZE[p.kind]).all()
                target.data[i] = read(int(p.address[i, 0]), target.data.shape[1], p.kind)

    def allocate(self, kind: str, shape, layout) -> Shared:
        fill, of = (0, kind) if kind.startswith("int") else (np.nan, "float32")
        return Shared(np.full([int(n) for n in shape], fill, of), kind)

    def start_barrier(self, shared: Shared, count: int) -> None:
        self.barriers[shared.data.ctypes.data] = Barrier(count)

    def names(self) -> dict:
        """The module's globals, with these operations in the place of Gluon's."""

        def nothing(*args, **more):
            return None

        names = {}
        for name, value in vars(moe_specialised).items():
            value = value.value if isinstance(value, gl.constexpr) else value
            fn = getattr(value, "fn", None)
            names[name] = FunctionType(fn.__code__, names, name) if isinstance(fn, FunctionType) else value
        names["gl"] = SimpleNamespace(
            int32="int32", int64="int64", float32="float32", pointer_type=lambda kind: ("pointer", kind),
            BlockedLayout=nothing, SliceLayout=nothing, SwizzledSharedLayout=nothing,
            NVMMADistributedLayout=nothing, constexpr=None,
            program_id=lambda axis: self.program.id, num_programs=lambda axis: self.programs,
            static_range=range, allocate_shared_memory=self.allocate, warp_specialize=self.specialize,
            atomic_add=self.atomic_add, load=load, store=store, convert_layout=lambda x, layout: x,
            arange=lambda first, last, layout: array(np.arange(first, last)),
            where=lambda c, x, y: array(np.where(c, x, y)), minimum=lambda x, y: array(np.minimum(x, y)),
            expand_dims=lambda x, axis: array(np.expand_dims(x, axis)),
            sum=lambda x, axis: array(x.sum(axis)), exp=lambda x: array(np.exp(x)),
            zeros=lambda shape, kind, layout: array(np.zeros(shape, kind)),
            reshape=lambda x, shape: x.reshape(shape), permute=lambda x, order: x.transpose(order),
            split=lambda x: (x[..., 0], x[..., 1]),
        )  # fmt: skip
        names["mbarrier"] = SimpleNamespace(
            MBarrierLayout=nothing, init=self.start_barrier,
            wait=lambda b, phase: self.barrier(b).wait(phase), arrive=lambda b: self.barrier(b).note(1),
            expect=lambda b, count: self.barrier(b).note(1, count),
        )  # fmt: skip
        names["tma"] = SimpleNamespace(
            make_tensor_descriptor=lambda base, shape, strides, block, layout: (base, shape, strides, block),
            async_copy_global_to_shared=self.tma,
        )
        names["async_copy"] = SimpleNamespace(
            async_copy_global_to_shared=self.gather,
            mbarrier_arrive=lambda b, increment_count: self.barrier(b).note(128),
        )
        names["fence_async_shared"] = nothing
        names["warpgroup_mma"] = lambda a, b, acc, is_async: array(acc + a.data @ b.data)
        names["warpgroup_mma_wait"] = lambda n, deps: deps[0]
        return names


def launch(
    programs: int, a: torch.Tensor, out: torch.Tensor, work: torch.Tensor, room: int, **constants
) -> None:
    """`moe_specialised._specialised_kernel[(programs,)]` on tensors in host memory."""
    machine = Machine(programs)
    kernel = machine.names()["_specialised_kernel"]
    kinds = [str(t.dtype).removeprefix("torch.") for t in (a, out, work)]
    pointers = [Pointer(t.data_ptr(), kind) for t, kind in zip((a, out, work), kinds, strict=True)]

    def program(i: int):
        kernel(*pointers, array(room), len(a), **constants)

    machine.parallel([(program, (i,), i) for i in range(programs)])
