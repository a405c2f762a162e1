"""How much of the pool's free memory is not in whole expert pages, on replays of request traces.

`python benchmarks/fragmentation.py --shared DIR [--json FILE]` prints the
tables of `docs/benchmarks/fragmentation.md` in some minutes.

Fragmentation is the share of free and evictable bytes in parents that also hold a page in use; pages
reserved ahead count as free. What is left is what experts could have back by forgetting prefixes alone.

The replay runs the page pool's books and the KV cache in virtual time: prompts at 10,000 tokens a
second, 40 output tokens a second and request, requests first come first served, the youngest preempted
where pages run out. Lengths and bursts are the trace's; its clock runs at a pace at which 64 requests
are in service on average. Demand is the peak of the blocks in use when nobody has to wait. The plan is
Qwen3-30B-A3B in bf16: six KV pages of 1.5 MiB an expert page, so that page and byte shares are equal.
Where a trace says how much of a prompt was seen before, that is shared with the last request long
enough; the other traces share nothing, and cached prefixes only fill the pool.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rimuru.cache import KVCache
from rimuru.pool import Allocator, AttentionKind, Kind, PoolSpec, plan_geometry

# Requests of each, so that a replay lasts a minute or more of its own time and seconds of ours.
TRACES = {
    "sharegpt_vllm_style": 800,
    "azure2023_conv": 1200,
    "azure2023_code": 5000,
    "mooncake_conversation": 600,
}
SHARES = (60, 90, 100)
BLOCK, SLOTS, RUNNING = 16, 512, 64
PROMPT_RATE, TOKEN_RATE = 10_000, 40  # tokens a second
STEP = BLOCK / TOKEN_RATE  # seconds in which a request grows by a block
EVERY = 5  # steps between two looks at the pool
MIB = 1 << 20
PLAN = plan_geometry(PoolSpec((AttentionKind("full", tuple(range(48)), 2048),), expert_bytes=9 * MIB))
KV = PLAN.class_of(Kind.KV)
PER = PLAN.classes[KV].per_parent


@dataclass(slots=True)
class Request:
    """One row of a trace; `keys` name its blocks, shared ones included."""

    at: float
    prompt: int
    output: int
    keys: list[bytes]
    made: int = 0
    slot: int = -1
    ready: float = 0.0

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + self.made) // BLOCK)


@dataclass(slots=True)
class Outcome:
    """One replay. Fragmentation in percent, over all looks; times in microseconds a call."""

    trace: str
    share: int
    caching: bool
    moving: bool
    fragmentation: float = 0.0
    worst: float = 0.0
    after: float = 0.0  # right after moving
    open_after: int = 0  # partly used parents right after moving, the most ever seen
    moved_mib: float = 0.0
    forgotten: int = 0  # cached blocks whose place was taken
    moved_share: float = 0.0  # percent of the bytes of KV that were written
    compact_us: float = 0.0
    evict_parents_us: float = 0.0
    looks: int = 0


def load(path: Path, n: int) -> list[Request]:
    """The first `n` requests of a trace, on a clock at which `RUNNING` are in service on average."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(n), strict=False)]
    out: list[Request] = []
    for i, row in enumerate(rows):
        prompt, output = int(row["prompt_tokens"]), int(row["output_tokens"])
        at = float(row.get("arrival_s", i))
        keys = [b"%d:%d" % (i, j) for j in range((prompt + output) // BLOCK)]
        seen = int(row.get("cached_prefix_tokens", 0)) // BLOCK
        if seen:
            donor = next((r for r in reversed(out) if r.prompt // BLOCK >= seen), None)
            if donor is not None:
                keys[:seen] = donor.keys[:seen]
        out.append(Request(at, prompt, output, keys))
    service = sum(r.prompt / PROMPT_RATE + r.output / TOKEN_RATE for r in out)
    pace = service / RUNNING / (out[-1].at - out[0].at)
    for r in out:
        r.at = (r.at - out[0].at) * pace
    return out


class Replay:
    """Requests over one pool of `parents` expert pages."""

    def __init__(self, requests: list[Request], parents: int, caching: bool):
        self.waiting = deque(Request(r.at, r.prompt, r.output, r.keys) for r in requests)
        self.pool = Allocator(PLAN, parents * PLAN.huge_bytes)
        longest = max(r.prompt + r.output for r in requests) // BLOCK + 2
        self.cache = KVCache(self.pool, [KV], BLOCK, SLOTS, longest, prefix_caching=caching)
        self.slots = list(range(SLOTS))
        self.running: list[Request] = []
        self.now = 0.0
        self.written = self.peak = 0

    def step(self) -> None:
        self.now += STEP
        for request in list(self.running):
            if request.slot < 0 or self.now < request.ready:
                continue  # preempted for another of this step, or still reading its prompt
            request.made = min(request.made + BLOCK, request.output)
            before = self.cache.held[request.slot]
            while self.cache.grow(request.slot, request.blocks):
                victim = self.running[-1]
                self.end(victim)
                self.waiting.appendleft(victim)
                if victim is request:
                    break
            if request.slot < 0:
                continue
            self.written += self.cache.held[request.slot] - before
            self.cache.commit(request.slot, request.keys, (request.prompt + request.made) // BLOCK)
            if request.made == request.output:
                self.end(request)
        self.admit()
        self.peak = max(self.peak, self.cache.counts().used)

    def admit(self) -> None:
        while self.waiting and self.waiting[0].at <= self.now and self.slots:
            request = self.waiting[0]
            slot = self.slots[-1]
            hit = min(self.cache.match(request.keys), (request.prompt - 1) // BLOCK)
            self.cache.admit(slot, request.keys, hit)
            room = self.cache.free_blocks() + self.cache.evictable_blocks()
            if room < request.blocks - hit + len(self.running) or self.cache.grow(slot, request.blocks):
                self.cache.release(slot)
                return
            self.waiting.popleft()
            self.slots.pop()
            self.written += request.blocks - hit
            request.slot = slot
            request.ready = self.now + (request.blocks - hit) * BLOCK / PROMPT_RATE
            self.running.append(request)

    def end(self, request: Request) -> None:
        self.cache.release(request.slot)
        self.slots.append(request.slot)
        self.running.remove(request)
        request.slot = -1

    def look(self) -> tuple[int, int, int]:
        """Pages free or evictable, those of them in parents that hold a page in use, and such parents."""
        pool = self.pool
        spare = self.cache.spare_pages(KV)
        homes, n = np.unique(pool.parents_of(KV, spare), return_counts=True)
        in_use = np.array([pool.load(KV, home) for home in homes.tolist()], np.int64) - n
        total = pool.whole_free() * PER + pool.free_inside(KV) + len(spare)
        whole = pool.whole_free() * PER + PER * np.count_nonzero(in_use == 0)
        others = pool.open_parents(KV).keys() - set(homes.tolist())
        return total, total - int(whole), len(others) + int(np.count_nonzero(in_use))


def replay(requests: list[Request], parents: int, outcome: Outcome) -> Outcome:
    """Run one case to its end, looking at the pool while requests wait or arrive."""
    run = Replay(requests, parents, outcome.caching)
    total = split = total_after = split_after = moves = calls = 0
    spent = 0
    steps = 0
    while run.waiting:
        run.step()
        steps += 1
        if steps % EVERY:
            continue
        free, loose, _ = run.look()
        total, split = total + free, split + loose
        outcome.looks += 1
        if free:
            outcome.worst = max(outcome.worst, 100 * loose / free)
        if outcome.moving:
            start = time.thread_time_ns()
            run.cache.take_back_reserved()
            cached = run.cache.evictable_blocks()
            moves += len(run.cache.compact(most=1 << 50, over_cached=outcome.caching))
            outcome.forgotten += cached - run.cache.evictable_blocks()
            spent += time.thread_time_ns() - start
            calls += 1
            free, loose, partly = run.look()
            total_after, split_after = total_after + free, split_after + loose
            outcome.open_after = max(outcome.open_after, partly)
    run.cache.check()
    run.pool.check()
    outcome.fragmentation = 100 * split / max(total, 1)
    if outcome.moving:
        outcome.after = 100 * split_after / max(total_after, 1)
        outcome.moved_mib = moves * PLAN.classes[KV].page_bytes / MIB
        outcome.moved_share = 100 * moves / run.written
        outcome.compact_us = spent / max(calls, 1) / 1000
        if outcome.caching:
            start = time.thread_time_ns()
            run.cache.evict_parents(16)
            outcome.evict_parents_us = (time.thread_time_ns() - start) / 1000
    return outcome


def demand_of(requests: list[Request]) -> int:
    """Blocks in use at the peak when nobody has to wait."""
    blocks = sum(-(-(r.prompt + r.output) // BLOCK) for r in requests)
    run = Replay(requests, blocks // PER + len(requests) + 1, caching=False)
    while run.waiting:
        run.step()
    return run.peak


def table(outcomes: list[Outcome]) -> str:
    """Markdown: a row for each case, without moving and with it side by side."""
    columns = (
        "trace", "pool, % of demand", "prefix caching", "never moved: mean (worst)", "moved: before", "after",
        "partly used parents after, at most", "moved, MiB", "of the KV written", "prefix blocks forgotten",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    still = {(o.trace, o.share, o.caching): o for o in outcomes if not o.moving}
    for o in outcomes:
        if o.moving:
            plain = still[o.trace, o.share, o.caching]
            lines.append(
                f"| {o.trace} | {o.share} | {'on' if o.caching else 'off'} "
                f"| {plain.fragmentation:.1f} % ({plain.worst:.0f} %) | {o.fragmentation:.1f} % "
                f"| {o.after:.1f} % | {o.open_after} | {o.moved_mib:,.0f} "
                f"| {o.moved_share:.2f} % | {o.forgotten:,} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shared", type=Path, required=True, help="directory with data/traces/*.csv")
    parser.add_argument("--trace", choices=TRACES, action="append", help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    for trace in args.trace or TRACES:
        requests = load(args.shared / "data" / "traces" / f"{trace}.csv", TRACES[trace])
        demand = demand_of(requests)
        longest = max(-(-(r.prompt + r.output) // BLOCK) for r in requests)
        for share in SHARES:
            # A request that is alone must fit, whatever the share.
            parents = -(-max(demand * share // 100, longest + 2 * PER) // PER)
            for caching in (False, True):
                for moving in (False, True):
                    outcomes.append(replay(requests, parents, Outcome(trace, share, caching, moving)))
        print(f"{trace}: demand {demand:,} blocks", file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    print(table(outcomes))
    moved = [o for o in outcomes if o.moving]
    cached = [o for o in moved if o.caching]
    mean, most = sum(o.compact_us for o in moved) / len(moved), max(o.compact_us for o in moved)
    evict = max(o.evict_parents_us for o in cached)
    print(f"\nA call of compact: {mean:,.0f} us on average, {most:,.0f} in the dearest case.")
    print(f"A call of evict_parents(16): {evict:,.0f} us in the dearest case.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
