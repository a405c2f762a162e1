"""How long one batch takes, without a server: from prompt to last token, to the first, and a decode step.

Room: benchmarks. Rule: prompts differ from run to run, so that no prefix is found cached; result keys are
those of `vllm bench latency`, for each batch size, beside what they are made of.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

from rimuru.engine.llm import LLM
from rimuru.engine.request import SamplingParams
from rimuru.errors import ConfigError, RimuruError

from . import _offline, _workload
from ._workload import Planned

SHARES = (10, 25, 50, 75, 90, 99)
SPARE = 512  # output tokens that the first of a batch may need until the last decodes too


def decode(
    llm: LLM, batch: int, args: argparse.Namespace, seeds: Iterator[int]
) -> tuple[list[float], float, float]:
    """Milliseconds of each timed decode step of `batch` requests, and `Counters` of those steps.

    Half-way through, the request that came last has `args.context` tokens. Wall clock from one finished step
    to the next.
    """
    prompt, limit = _prompt(llm, args)
    chunks = -(-batch * prompt // llm.config.max_num_batched_tokens)
    wanted = args.settle_steps + args.decode_steps + chunks + SPARE
    params = SamplingParams(max_tokens=min(limit, wanted), ignore_eos=True)
    prompts = [_workload.token_prompt(prompt, llm.info.vocab_size, next(seeds)) for _ in range(batch)]
    outputs = [llm.add_request(ids, params) for ids in prompts]
    try:
        while not all(o.outputs[0].token_ids or o.finished for o in outputs):
            llm.step()
        for _ in range(args.settle_steps):
            llm.step()
        times, counters = [], _offline.Counters(llm)
        for _ in range(args.decode_steps):
            began = time.perf_counter()
            llm.step()
            times.append((time.perf_counter() - began) * 1e3)
            if (running := len(llm.core.scheduler.running)) < batch:
                raise RimuruError(
                    f"only {running} of {batch} requests with {args.context} tokens of context decode at "
                    "once: give more --device-memory, or a smaller --batch-size or --context"
                )
        return times, *counters.read()[1:]
    finally:
        for output in outputs:
            llm.abort_request(output)


def _prompt(llm: LLM, args: argparse.Namespace) -> tuple[int, int]:
    """Tokens of the prompts before timed decode steps, and the most that may follow one."""
    needed = args.settle_steps + args.decode_steps + 1
    prompt = max(1, args.context - args.settle_steps - args.decode_steps // 2)
    limit = min(llm.info.max_model_len, llm.info.max_request_tokens) - prompt
    if limit < needed:
        raise ConfigError(
            f"--context {args.context}: no {needed} output tokens fit behind a prompt of {prompt} "
            "(--max-model-len, --device-memory)"
        )
    return prompt, limit


def measure(llm: LLM, args: argparse.Namespace, batch: int, seeds: Iterator[int]) -> dict[str, Any]:
    """The results of one batch size."""
    planned = [Planned(0.0, args.input_len, args.output_len)] * batch
    loads = []
    for turn in range(args.num_iters_warmup + args.num_iters):
        prompts = [_workload.token_prompt(args.input_len, llm.info.vocab_size, next(seeds)) for _ in planned]
        load = _offline.serve(llm, planned, prompts, seed=turn * batch)
        if turn >= args.num_iters_warmup:
            loads.append(load)
    times = [load.seconds for load in loads]
    ttft = [value * 1e3 for load in loads for value in load.ttft]
    steps, touched, missed = decode(llm, batch, args, seeds)
    return {
        "batch_size": batch,
        "avg_latency": statistics.fmean(times),
        "latencies": times,
        "percentiles": {str(share): _workload.percentile(times, share) for share in SHARES},
        "mean_ttft_ms": statistics.fmean(ttft),
        "p99_ttft_ms": _workload.percentile(ttft, 99),
        "context": args.context,
        "decode_ms": statistics.median(steps),
        "p99_decode_ms": _workload.percentile(steps, 99),
        "touched_per_layer": touched,
        "missed_share": missed,
    }


def main(argv: list[str] | None = None) -> int:
    """`rimuru bench latency`."""
    parser = _offline.parser("latency", __doc__)
    parser.add_argument("--input-len", type=int, metavar="TOKENS", help="default: the context, else 32")
    parser.add_argument("--output-len", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--batch-size", type=_sizes, default=[8], metavar="N[,N]")
    parser.add_argument("--num-iters-warmup", type=int, default=3)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--context", type=int, metavar="TOKENS",
                        help="tokens of a request at the timed decode steps")  # fmt: skip
    parser.add_argument("--decode-steps", type=int, default=40, help="decode steps that are timed")
    parser.add_argument("--settle-steps", type=int, default=16,
                        help="before these; 100 where experts have to find their place")  # fmt: skip
    args = parser.parse_args(argv)
    if args.input_len is None:
        args.input_len = args.context or 32
    if args.context is None:
        args.context = args.input_len + args.output_len // 2
    for name, low in (("input_len", 1), ("output_len", 1), ("num_iters", 1), ("num_iters_warmup", 0),
                      ("context", 1), ("decode_steps", 1), ("settle_steps", 0)):  # fmt: skip
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(args, name)}")
    if not 1 <= min(args.batch_size) <= max(args.batch_size) <= args.max_num_seqs:
        raise ConfigError(f"--batch-size must be from 1 to --max-num-seqs, which is {args.max_num_seqs}")
    llm, start_seconds = _offline.load(args)
    _offline.fit(llm, [Planned(0.0, args.input_len, args.output_len)])
    _prompt(llm, args)
    seeds = itertools.count(args.seed << 20)
    rows = [measure(llm, args, batch, seeds) for batch in args.batch_size]
    # The keys of one batch size are vLLM's; several stand in a list.
    result = {**(rows[0] if len(rows) == 1 else {"batches": rows}), **_offline.facts(llm, start_seconds)}
    _offline.report(args, result, _table(args, rows, result["experts_per_layer"]))
    return 0


def _sizes(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _table(args: argparse.Namespace, rows: list[dict[str, Any]], experts: int) -> str:
    columns = ("batch", "decode ms", "p99", "TTFT ms", "p99", "latency s", "p50", "p99", "touched", "missed")
    lines = [
        f"decode steps at {args.context} tokens of context, touching of {experts} experts a layer:",
        f"TTFT and latency of {args.input_len} tokens in and {args.output_len} out",
        "".join(f"{name:>{6 if name == 'batch' else 10}}" for name in columns),
    ]
    for row in rows:
        lines.append(
            f"{row['batch_size']:>6}{row['decode_ms']:>10.2f}{row['p99_decode_ms']:>10.2f}"
            f"{row['mean_ttft_ms']:>10.1f}{row['p99_ttft_ms']:>10.1f}{row['avg_latency']:>10.4f}"
            f"{row['percentiles']['50']:>10.4f}{row['percentiles']['99']:>10.4f}"
            f"{row['touched_per_layer']:>10.1f}{row['missed_share']:>10.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
