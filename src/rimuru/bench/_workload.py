"""What a benchmark sends and when: lengths from a trace or drawn, arrivals, prompts.

Room: benchmarks. Rule: a seed decides everything; a trace is checked whole before the first request.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

from rimuru.errors import ConfigError

MAX_TOKENS = 1 << 20
ARRIVALS = ("poisson", "constant", "burst", "trace")
# Short and common in any language model's vocabulary: a word is about a token.
_WORDS = ("the", "of", "and", "to", "in", "that", "it", "was", "for", "on", "are", "with", "as", "his",
          "they", "be", "at", "one", "have", "this", "from", "or", "had", "by")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send `at` seconds after the start; lengths in tokens."""

    at: float
    prompt: int
    output: int


def add_arguments(parser: argparse.ArgumentParser, num_prompts: int) -> None:
    """Flags for the lengths; names are those of vLLM's benchmarks."""
    parser.add_argument("--trace", metavar="CSV", help="prompt_tokens,output_tokens[,arrival_s]")
    parser.add_argument("--num-prompts", type=int, help=f"default: the trace, else {num_prompts}")
    parser.add_argument("--random-input-len", "--input-len", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--random-output-len", "--output-len", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R",
                        help="draw lengths from (1 - R) to (1 + R) times the given ones")  # fmt: skip
    parser.add_argument("--output-scale", type=float, default=1.0, metavar="F",
                        help="of the trace's output lengths")  # fmt: skip
    parser.set_defaults(default_prompts=num_prompts)


def lengths(args: argparse.Namespace) -> list[Planned]:
    """The requests that the flags ask for; arrivals are the trace's, 0 without them."""
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    if args.trace:
        if not 0 < args.output_scale < math.inf:
            raise ConfigError(f"--output-scale must be above 0, got {args.output_scale:g}")
        rows = [
            replace(r, output=max(1, round(r.output * args.output_scale))) for r in read_trace(args.trace)
        ]
        n, span = args.num_prompts or len(rows), rows[-1].at
        return [
            replace(rows[i % len(rows)], at=rows[i % len(rows)].at + i // len(rows) * span) for i in range(n)
        ]
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {args.random_range_ratio:g}")
    for name in ("random_input_len", "random_output_len"):
        if not 1 <= getattr(args, name) <= MAX_TOKENS:
            raise ConfigError(f"--{name.replace('_', '-')} must be from 1 to {MAX_TOKENS}")
    rng, ratio = random.Random(args.seed), args.random_range_ratio

    def draw(middle: int) -> int:
        return max(1, rng.randint(math.floor(middle * (1 - ratio)), math.ceil(middle * (1 + ratio))))

    n = args.num_prompts or args.default_prompts
    return [Planned(0.0, draw(args.random_input_len), draw(args.random_output_len)) for _ in range(n)]


def read_trace(path: str | Path) -> list[Planned]:
    """The rows of a trace, further columns passed over. Raises `ConfigError` with file, line and reason."""
    rows: list[Planned] = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = {"prompt_tokens", "output_tokens"} - set(reader.fieldnames or ())
            if missing:
                raise ConfigError(f"{path}, line 1: no column {', '.join(sorted(missing))}")
            for row in reader:
                try:
                    rows.append(_row(row, rows[-1].at if rows else 0.0))
                except (ValueError, TypeError) as error:
                    raise ConfigError(f"{path}, line {reader.line_num}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: not a CSV file: {error}") from None
    if not rows:
        raise ConfigError(f"{path}: no requests in it")
    return rows


def _row(row: dict[str, str], last: float) -> Planned:
    planned = Planned(
        float(row.get("arrival_s") or 0.0), int(row["prompt_tokens"]), int(row["output_tokens"])
    )
    if not last <= planned.at < math.inf:
        raise ValueError(f"arrival_s {planned.at:g} comes before the row above, or is no time")
    for count in (planned.prompt, planned.output):
        if not 1 <= count <= MAX_TOKENS:
            raise ValueError(f"{count} is no count of tokens from 1 to {MAX_TOKENS}")
    return planned


def arrive(
    planned: list[Planned],
    arrival: str,
    rate: float,
    *,
    burstiness: float = 1.0,
    burst: int = 8,
    seed: int = 0,
) -> list[Planned]:
    """The same requests with arrivals at `rate` a second; infinite: all at once.

    poisson: gaps of a gamma distribution with shape `burstiness`, exponential at 1 (vLLM's flag);
    constant: equal gaps; burst: `burst` at a time, equal gaps between; trace: as the trace has it.
    """
    if arrival == "trace":
        if len(planned) > 1 and planned[-1].at == 0:
            raise ConfigError("--arrival trace needs a trace with a column arrival_s")
        return planned
    if not rate > 0:
        raise ConfigError(f"--request-rate must be above 0 requests a second, got {rate:g}")
    if rate == math.inf:
        return [replace(p, at=0.0) for p in planned]
    if arrival == "burst":
        if burst < 1:
            raise ConfigError(f"--burst-size must be at least 1, got {burst}")
        return [replace(p, at=i // burst * burst / rate) for i, p in enumerate(planned)]
    if arrival == "constant":
        return [replace(p, at=i / rate) for i, p in enumerate(planned)]
    if not burstiness > 0:
        raise ConfigError(f"--burstiness must be above 0, got {burstiness:g}")
    rng, at, out = random.Random(seed), 0.0, []
    for p in planned:
        out.append(replace(p, at=at))
        at += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return out


def token_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """Random token ids; the first few of a vocabulary are left out, being special in most."""
    low = min(100, vocab_size // 4)
    return random.Random(seed).choices(range(low, vocab_size), k=length)


def text_prompt(length: int, seed: int) -> str:
    """Random words, about a token each."""
    return " ".join(random.Random(seed).choices(_WORDS, k=length))


def percentile(values: list[float], share: float) -> float:
    """Linear between neighbours, as numpy has it; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
