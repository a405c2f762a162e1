"""Replay recorded routing against residency policies: lru, lfu, static, ours, Belady.

Room: the simulator. Rule: every policy meets the same touches with the same slots, and changes what is
resident only between steps; the numbers are misses, no time is simulated.

`slots` experts of all layers together may be resident. A step's touched experts are all read, the missing
ones over the link; a miss may stay (the bytes have crossed the link anyway) or be dropped again, and each
policy keeps the best `slots` of what was resident or touched by its own measure:

- lru: touched last (of experts touched in the same step, those that were resident stay)
- lfu: touched in most steps so far
- static: the fixed set touched most on the other half of the sequences
- ours: `policy.residency`, which sees counts a step and nothing else
- belady: touched again soonest, known from the future; no policy can miss less
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.errors import ConfigError
from rimuru.policy.residency import ResidencyPolicy

POLICIES = ("lru", "lfu", "static", "ours", "belady")
WARM_UP = 0.1  # share of the steps that fill the slots and are not counted

# step, tokens routed to each expert and residents before, both `[layers x experts]` -> the higher stay
Score = Callable[[int, np.ndarray, np.ndarray], np.ndarray]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `rimuru simulate residency`."""
    parser.add_argument(
        "--trace", required=True, metavar="FILE", help=".npz, one array [tokens, layers, top_k] a sequence"
    )
    parser.add_argument(
        "--slots", default="25%,50%,75%", metavar="N[,N]",
        help="resident experts of all layers together, or a share of them; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--requests", default="1,4,16", metavar="B[,B]", help="interleaved requests; default %(default)s"
    )
    parser.add_argument(
        "--experts", type=int, metavar="N", help="experts a layer; default: the highest id seen, plus 1"
    )
    parser.add_argument(
        "--steps", type=int, default=2500, metavar="N", help="steps at most; default %(default)s"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="order of the sequences; default %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Replay and print a table or JSON."""
    if args.steps < 20:
        raise ConfigError(f"--steps must be at least 20, got {args.steps}")
    if args.seed < 0:
        raise ConfigError(f"--seed must be at least 0, got {args.seed}")
    sequences = load_trace(args.trace)
    least = 1 + max(int(s.max()) for s in sequences)
    experts = least if args.experts is None else args.experts
    if experts < least:
        raise ConfigError(f"--experts must be at least {least}, one more than the highest id, got {experts}")
    total = sequences[0].shape[1] * experts
    slots = [_slots(part, total) for part in args.slots.split(",")]
    batches = [_positive(part, "--requests") for part in args.requests.split(",")]
    rows = [
        row for b in batches for row in replay(sequences, experts, slots, b, steps=args.steps, seed=args.seed)
    ]
    if args.json:
        print(json.dumps({"trace": Path(args.trace).name, "experts_total": total, "results": rows}, indent=1))
    else:
        print(table(rows, total))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`rimuru simulate residency` on its own arguments."""
    parser = argparse.ArgumentParser(prog="rimuru simulate residency", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def load_trace(path: str | Path) -> list[np.ndarray]:
    """The sequences of a recorded trace, integer arrays `[tokens, layers, top_k]` of expert ids.

    Raises `ConfigError` naming the file, the array and what is wrong with it.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as error:
        raise ConfigError(f"{path}: not a routing trace in .npz form ({error})") from None
    shape: tuple[int, ...] | None = None
    for name, array in arrays.items():
        if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer) or 0 in array.shape:
            raise ConfigError(
                f"{path}: array {name} is {array.dtype} {list(array.shape)}; wanted are expert ids, integers "
                f"[tokens, layers, top_k]"
            )
        if shape is not None and array.shape[1:] != shape:
            raise ConfigError(
                f"{path}: array {name} has [layers, top_k] {list(array.shape[1:])}, "
                f"those before it have {list(shape)}"
            )
        if int(array.min()) < 0:
            raise ConfigError(f"{path}: array {name} holds the expert id {int(array.min())}")
        shape = array.shape[1:]
    if len(arrays) < 2:
        raise ConfigError(f"{path}: {len(arrays)} sequences; at least 2 are needed, to learn and to replay")
    return list(arrays.values())


def interleave(sequences: Sequence[np.ndarray], batch: int, experts: int, steps: int) -> np.ndarray:
    """Tokens routed to each expert a step, uint8 `[steps, layers x experts]`, `batch` requests at a time.

    A request that ends makes room for the next; the replay ends when there is none.
    """
    layers = sequences[0].shape[1]
    first = np.arange(layers)[:, None] * experts
    counts = np.zeros((steps, layers * experts), np.uint8)
    queue = iter(sequences)
    lanes = [(sequence, 0) for sequence in islice(queue, batch)]
    for step in range(steps):
        for lane, (sequence, at) in enumerate(lanes):
            if at == len(sequence):
                following = next(queue, None)
                if following is None:
                    return counts[:step]
                sequence, at = following, 0
            np.add.at(counts[step], (sequence[at] + first).ravel(), 1)
            lanes[lane] = sequence, at + 1
    return counts


def misses(counts: np.ndarray, slots: int, score: Score) -> int:
    """Touched and not resident, summed over the steps after the warm-up."""
    resident = np.zeros(counts.shape[1], bool)
    missed, begin = 0, int(len(counts) * WARM_UP)
    for step, count in enumerate(counts):
        touched = count > 0
        if step >= begin:
            missed += int(np.count_nonzero(touched & ~resident))
        candidates = np.flatnonzero(resident | touched)
        if len(candidates) > slots:
            worth = score(step, count, resident)[candidates]
            candidates = candidates[np.argpartition(-worth, slots - 1)[:slots]]
        else:
            score(step, count, resident)
        resident = np.zeros_like(resident)
        resident[candidates] = True
    return missed


def replay(
    sequences: Sequence[np.ndarray],
    experts: int,
    slots: Sequence[int],
    batch: int,
    *,
    steps: int = 2500,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Misses a step of every policy, one row for each number of slots.

    Half of the sequences, drawn by `seed`, is replayed; `static` has learnt from the other half.
    `gap_closed` is the share of the misses between the better of lru and static and Belady that ours
    avoids. Raises `ConfigError` where the trace is too short for so many requests.
    """
    order = np.random.default_rng(seed).permutation(len(sequences))
    half = len(order) // 2
    shown, learnt = [sequences[i] for i in order[:half]], [sequences[i] for i in order[half:]]
    if len(shown) < batch:
        raise ConfigError(f"{batch} interleaved requests need as many sequences; half of the trace is {half}")
    counts = interleave(shown, batch, experts, steps)
    layers = sequences[0].shape[1]
    popular = interleave(learnt, 1, experts, sum(map(len, learnt))).sum(0, dtype=np.int64)
    counted = len(counts) - int(len(counts) * WARM_UP)
    touched = int(np.count_nonzero(counts[len(counts) - counted :]))
    soonest = _next_touch(counts)
    rows = []
    for n in slots:
        scores: dict[str, Score] = {
            "lru": _lru(), "lfu": _lfu(), "ours": _ours(layers, experts),
            "belady": lambda step, count, resident: -soonest[step].astype(np.float32),
        }  # fmt: skip
        missed = {name: misses(counts, n, score) for name, score in scores.items()}
        fixed = np.zeros(counts.shape[1], bool)
        fixed[np.argsort(-popular, kind="stable")[:n]] = True
        missed["static"] = int(np.count_nonzero((counts[len(counts) - counted :] > 0) & ~fixed))
        best, floor = min(missed["lru"], missed["static"]), missed["belady"]
        rows.append(
            {
                "requests": batch,
                "slots": n,
                "steps": counted,
                "touched_per_step": touched / counted,
                "misses_per_step": {name: missed[name] / counted for name in POLICIES},
                "gap_closed": (best - missed["ours"]) / (best - floor) if best > floor else 0.0,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]], total: int) -> str:
    """The rows for people: misses as a share of what was touched."""
    lines = [
        f"{'requests':>8} {'slots':>13} {'touched':>8}"
        + "".join(f"{p:>8}" for p in POLICIES)
        + "  gap closed"
    ]
    for r in rows:
        shares = "".join(f"{r['misses_per_step'][p] / r['touched_per_step']:>8.1%}" for p in POLICIES)
        slots = f"{r['slots']} ({r['slots'] / total:.0%})"
        lines.append(
            f"{r['requests']:>8} {slots:>13} {r['touched_per_step']:>8.1f}{shares}{r['gap_closed']:>12.0%}"
        )
    return "\n".join(lines)


def _lru() -> Score:
    last: np.ndarray | None = None

    def score(step: int, count: np.ndarray, resident: np.ndarray) -> np.ndarray:
        nonlocal last
        if last is None:
            last = np.full(len(count), -1.0)
        last[count > 0] = step
        return last + 0.5 * resident

    return score


def _lfu() -> Score:
    times: np.ndarray | None = None

    def score(step: int, count: np.ndarray, resident: np.ndarray) -> np.ndarray:
        nonlocal times
        times = (0 if times is None else times) + (count > 0).astype(np.int64)
        return times + 0.5 * resident

    return score


def _ours(layers: int, experts: int) -> Score:
    policy = ResidencyPolicy(layers, experts)

    def score(step: int, count: np.ndarray, resident: np.ndarray) -> np.ndarray:
        policy.observe(step, count.reshape(layers, experts))
        return policy.probability().ravel()

    return score


def _next_touch(counts: np.ndarray) -> np.ndarray:
    """The step after each in which an expert is touched again, int32 `[steps, experts]`."""
    following = np.empty(counts.shape, np.int32)
    soonest = np.full(counts.shape[1], np.iinfo(np.int32).max, np.int32)
    for step in range(len(counts) - 1, -1, -1):
        following[step] = soonest
        soonest[counts[step] > 0] = step
    return following


def _slots(text: str, total: int) -> int:
    share = text.strip().endswith("%")
    try:
        value = float(text.strip().rstrip("%"))
        n = int(total * value / 100) if share else int(value)
    except ValueError:
        raise ConfigError(
            f"--slots: cannot read {text!r}; write a number such as 384 or a share such as 50%"
        ) from None
    if not 1 <= n <= total:
        raise ConfigError(f"--slots {text}: the trace has {total} experts, so 1 to {total} slots make sense")
    return n


def _positive(text: str, flag: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(f"{flag}: cannot read {text!r}; write a number of at least 1")
    return int(text)
