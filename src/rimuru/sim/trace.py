"""Request lengths and arrivals, read from CSV traces.

Room: the simulator's input. Rule: no torch; a trace is checked whole before anything runs, and what is
wrong with it is named with file, line and reason.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rimuru.errors import ConfigError

MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come: `at` seconds from the start, lengths in tokens.

    Requests of one `conversation` share their tokens, so that a turn finds the ones before it cached.
    """

    at: float
    prompt: int
    output: int
    conversation: int


def read_trace(path: str | Path) -> list[Arrival]:
    """The rows of a trace with columns `prompt_tokens,output_tokens[,arrival_s][,conv_id]`.

    Rows without arrivals all arrive at 0, rows without a conversation are one each. Raises
    `ConfigError` naming file, line and reason.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return _rows(csv.reader(file), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: not a CSV file: {error}") from None


def _rows(reader, path: str) -> list[Arrival]:
    header: list[str] = next(reader, [])
    columns = {name.strip(): i for i, name in enumerate(header)}
    if len(columns) < len(header):
        twice = next(name for name in columns if sum(h.strip() == name for h in header) > 1)
        raise ConfigError(f"{path}, line 1: two columns {twice!r}")
    for name in ("prompt_tokens", "output_tokens"):
        if name not in columns:
            raise ConfigError(f"{path}, line 1: no column {name!r}; there are {', '.join(columns) or 'none'}")
    prompt, output = columns["prompt_tokens"], columns["output_tokens"]
    at, conversation = columns.get("arrival_s"), columns.get("conv_id")
    rows: list[Arrival] = []
    last = 0.0
    for row in reader:
        line = reader.line_num
        if not row:
            continue
        try:
            if len(row) != len(header):
                raise ValueError(f"{len(row)} values for {len(header)} columns")
            arrival = Arrival(
                0.0 if at is None else _seconds(row[at]),
                _tokens(row[prompt], "prompt_tokens"),
                _tokens(row[output], "output_tokens"),
                len(rows) if conversation is None else _whole(row[conversation], "conv_id"),
            )
            if not last <= arrival.at < float("inf"):
                raise ValueError(f"arrival_s {row[at or 0]} comes before the row above, or is no time")
        except ValueError as error:
            raise ConfigError(f"{path}, line {line}: {error}") from None
        last = arrival.at
        rows.append(arrival)
    if not rows:
        raise ConfigError(f"{path}: no requests in it")
    return rows


def _whole(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} {text[:40]!r} is no whole number") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"arrival_s {text[:40]!r} is no number") from None


def _tokens(text: str, name: str) -> int:
    value = _whole(text, name)
    if not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} must be from 1 to {MAX_TOKENS}, got {value}")
    return value


def shape(
    rows: Sequence[Arrival],
    *,
    requests: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    output_scale: float = 1.0,
    source: str = "the trace",
) -> list[Arrival]:
    """The first `requests` rows, outputs scaled, arriving as a Poisson process of `rate` a second.

    Without a rate they arrive as the trace says. Asking for more requests than the trace has starts
    it over. Raises `ConfigError` for values that cannot be.
    """
    if requests is not None and requests < 1:
        raise ConfigError(f"--requests must be at least 1, got {requests}")
    longest = max(row.output for row in rows)
    if not 0 < output_scale <= MAX_TOKENS / longest:
        raise ConfigError(
            f"--output-scale must be above 0 and leave outputs of at most {MAX_TOKENS} tokens (the longest "
            f"has {longest}), got {output_scale:g}"
        )
    n = len(rows) if requests is None else requests
    if rate is None:
        span = rows[-1].at
        if span == 0 and len(rows) > 1:
            raise ConfigError(f"{source} has no arrival_s column; give --rate")
        starts = [rows[i % len(rows)].at + i // len(rows) * span for i in range(n)]
    else:
        if not 0 < rate < float("inf") or 1 / rate == float("inf"):
            raise ConfigError(f"--rate must be above 0 requests a second, got {rate:g}")
        gaps = np.random.default_rng(seed).exponential(1 / rate, n)
        starts = np.cumsum(gaps).tolist()
    many = max(row.conversation for row in rows) + 1
    return [
        replace(
            row, at=starts[i], output=max(1, round(row.output * output_scale)),
            conversation=row.conversation + i // len(rows) * many,
        )
        for i, row in ((i, rows[i % len(rows)]) for i in range(n))
    ]  # fmt: skip


def square_wave(
    rows: Sequence[Arrival], low: float, high: float, period: float, seconds: float, seed: int = 0
) -> list[Arrival]:
    """Lengths of `rows` arriving at `low` and `high` requests a second by turns of `period` seconds."""
    rng = np.random.default_rng(seed)
    out: list[Arrival] = []
    begin, rate = 0.0, low
    while begin < seconds:
        end = min(begin + period, seconds)
        at = begin + rng.exponential(1 / rate)
        while at < end:
            i = len(out)
            out.append(replace(rows[i % len(rows)], at=at, conversation=i))
            at += rng.exponential(1 / rate)
        begin, rate = end, high if rate == low else low
    return out
