"""Seconds that one batch takes from prompt to last token, without a server.

Room: benchmarks. Rule: prompts differ from run to run, so that no prefix is found cached; result keys are
those of `vllm bench latency`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from rimuru.engine.request import SamplingParams
from rimuru.errors import ConfigError

from . import _offline, _workload

SHARES = (10, 25, 50, 75, 90, 99)


def main(argv: list[str] | None = None) -> int:
    """`rimuru bench latency`."""
    parser = argparse.ArgumentParser(prog="rimuru bench latency", description=(__doc__ or "").split("\n")[0])
    _offline.add_arguments(parser)
    parser.add_argument("--input-len", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--output-len", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-iters-warmup", type=int, default=3)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--output-json", metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of a line")
    args = parser.parse_args(argv)
    for name, low in (("input_len", 1), ("output_len", 1), ("batch_size", 1), ("num_iters", 1)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(args, name)}")
    llm = _offline.load(args)
    params = SamplingParams(temperature=1.0, max_tokens=args.output_len, ignore_eos=True)
    vocab = llm.info.vocab_size

    def seconds(turn: int) -> float:
        prompts = [
            _workload.token_prompt(args.input_len, vocab, turn * args.batch_size + i)
            for i in range(args.batch_size)
        ]
        began = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - began

    times = [seconds(turn) for turn in range(args.num_iters_warmup + args.num_iters)][args.num_iters_warmup :]
    result = {
        "avg_latency": statistics.fmean(times),
        "latencies": times,
        "percentiles": {str(share): _workload.percentile(times, share) for share in SHARES},
    }
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(result), encoding="utf-8")
    print(
        json.dumps(result)
        if args.json
        else f"mean {result['avg_latency']:.4f} s, "
        + ", ".join(f"p{s} {result['percentiles'][str(s)]:.4f} s" for s in SHARES)  # type: ignore[index]
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
