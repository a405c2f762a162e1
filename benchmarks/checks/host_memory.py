"""Host memory that kernels read in place: pinned bytes, and the rate of reads over the link."""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl
from harness import Report

from rimuru.experts.side_copy import CudaLane, SideStreamCopy
from rimuru.experts.store import Arrival
from rimuru.kernels import host_memory
from rimuru.kernels.host_memory import HostMemory

EXPERT = 9 << 20  # bytes; Qwen3-30B's


@triton.jit
def _stream_kernel(address, order, out, count, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Read chunks of `WORDS` int32 words in the given order; their sums go to `out` (one a chunk)."""
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        base = (address + tl.load(order + i) * (WORDS * 4)).to(tl.pointer_type(tl.int32))
        base = tl.multiple_of(base, 256)
        total = tl.zeros([BLOCK], tl.int32)
        for at in tl.range(0, WORDS, BLOCK, num_stages=4):
            total += tl.load(base + at + tl.arange(0, BLOCK))
        tl.store(out + i, tl.sum(total, axis=0))


def read_rate(memory: HostMemory, nbytes: int, programs: int = 96, skip: int = 0) -> float:
    """GB/s of kernel reads of `nbytes` of pinned memory after `skip`, 64 KiB chunks in random order."""
    chunk = 64 << 10
    order = torch.randperm(nbytes // chunk).cuda() + skip // chunk
    out = torch.empty(order.numel(), dtype=torch.int32, device="cuda")

    def launch(count: int) -> None:
        _stream_kernel[(programs,)](memory.address, order, out, count, WORDS=chunk // 4, BLOCK=2048)

    launch(64)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    launch(order.numel())
    end.record()
    end.synchronize()
    return nbytes / begin.elapsed_time(end) / 1e6


def dropped(report: Report) -> None:
    """Memory that goes without a close: the next map on its addresses can be registered, and no launch is
    blamed for what the driver refused before."""
    pinned = []
    for huge_pages in (8, 4, 9, 2, 16):
        memory = HostMemory(huge_pages << 21)
        pinned.append(memory.pinned_bytes - memory.nbytes)
        del memory
    report.check("maps dropped without a close: bytes that were not registered", -sum(pinned), 0)
    kept = HostMemory(64 << 20)
    status = int(torch.cuda.cudart().cudaHostRegister(kept.address, 1 << 20, 0))  # twice: refused
    host_memory._forget_error()
    torch.zeros(4, device="cuda")
    report.check("a refused registration leaves its error to nobody", float(status == 0), 0)
    kept.close()


def beside_steps(report: Report) -> None:
    """A promotion waits for what was launched before it, and lets what is launched later go ahead."""
    memory = HostMemory(64 << 20)
    memory.tensor.fill_(1)
    page = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    side = SideStreamCopy(CudaLane(torch.cuda.Stream()))
    torch.cuda._sleep(200_000_000)  # cycles, about 0.1 s
    seen = page.clone()
    entry = torch.zeros(1, dtype=torch.int64, device="cuda")
    asked = side([Arrival(page, memory.tensor, entry, page.data_ptr())])
    early = asked.query()  # issues the copy
    torch.cuda._sleep(200_000_000)
    behind = torch.cuda.Event()
    behind.record()
    while not asked.query():
        pass
    late = behind.query()
    report.check("a promotion is over before its wait", float(early), 0)
    report.check("a promotion waits for later launches", float(late), 0)
    report.equal("a launched step still reads what lay in the page", seen, torch.zeros_like(seen))
    torch.cuda.synchronize()
    report.equal("a promoted page", page.cpu(), memory.tensor)
    report.check("a promoted page's entry", float(entry.item() != page.data_ptr()), 0)
    memory.close()


def run(report: Report) -> None:
    dropped(report)
    beside_steps(report)
    gib = 1 << 30
    small = HostMemory(64 << 20, pin_limit=48 << 20)
    small.check()
    report.check("a pin limit leaves a pageable remainder", abs(small.pinned_bytes - (48 << 20)), 0)
    small.tensor.random_(0, 256)
    for name, part in (("pinned", small.tensor[: 48 << 20]), ("pageable", small.tensor[48 << 20 :])):
        report.equal(f"copy from the {name} part", part.cuda().cpu(), part)
    small.close()

    with open("/proc/meminfo") as f:
        free = int(next(line for line in f if "MemAvailable" in line).split()[1]) << 10
    nbytes = min(48 * gib, (free - 8 * gib) // gib * gib)
    begin = time.monotonic()
    memory = HostMemory(nbytes)
    mapped = time.monotonic() - begin
    report.bar(f"map, touch and register {nbytes >> 30} GiB", mapped, "s", 2.0 / 40 * (nbytes >> 30))
    report.bar("pinned bytes over stored bytes", memory.pinned_bytes / nbytes, "x", 1.02)
    memory.check()
    for programs in (32, 96, 384):
        rate = max(read_rate(memory, 4 * gib, programs, skip=n * 8 * gib) for n in range(3))
        bar = 49.0 if programs == 96 else None
        report.bar(f"kernel reads, {programs} programs", rate, "GB/s", bar, 54.5, higher_is_better=True)
    target = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    source = memory.tensor[: 64 << 20]
    target.copy_(source, non_blocking=True)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(16):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    rate = 16 * (64 << 20) / start.elapsed_time(end) / 1e6
    report.bar("copy engine, 64 MiB", rate, "GB/s", higher_is_better=True)
    memory.close()
