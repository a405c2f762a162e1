"""Tokens a second of the engine alone, without a server: all requests at once, or as they arrive.

Room: benchmarks. Rule: outputs have their full length; result keys are those of `vllm bench throughput` and
what an engine that moves experts has to add to them.
"""

from __future__ import annotations

import math

from rimuru.engine.request import SamplingParams

from . import _offline, _workload


def main(argv: list[str] | None = None) -> int:
    """`rimuru bench throughput`."""
    parser = _offline.parser("throughput", __doc__)
    _workload.add_arguments(parser, num_prompts=100)
    parser.add_argument("--request-rate", "--rate", type=float, default=math.inf, metavar="PER_S",
                        help="requests a second; all at once by default")  # fmt: skip
    parser.add_argument("--arrival", choices=_workload.ARRIVALS, default="poisson",
                        help="how they arrive; trace: as the trace has it")  # fmt: skip
    args = parser.parse_args(argv)
    planned = _workload.arrive(_workload.lengths(args), args.arrival, args.request_rate, seed=args.seed)
    llm, start_seconds = _offline.load(args)
    _offline.fit(llm, planned)
    prompts = [
        _workload.token_prompt(p.prompt, llm.info.vocab_size, args.seed + i) for i, p in enumerate(planned)
    ]
    llm.generate(prompts[0][:16], SamplingParams(max_tokens=2, ignore_eos=True))  # compiles what compiles
    load = _offline.serve(llm, planned, prompts, args.seed)
    total = load.output_tokens + sum(map(len, prompts))
    result = {
        "elapsed_time": load.seconds,
        "num_requests": len(planned),
        "total_num_tokens": total,
        "requests_per_second": len(planned) / load.seconds,
        "tokens_per_second": total / load.seconds,
        "output_tokens_per_second": load.output_tokens / load.seconds,
        **load.ttft_ms(),
        "peak_running": load.running,
        "steps": load.steps,
        "touched_per_layer": load.touched,
        "missed_share": load.missed,
        **_offline.facts(llm, start_seconds),
    }
    _offline.report(
        args,
        result,
        f"{result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.1f} tokens/s, "
        f"{result['output_tokens_per_second']:.1f} output tokens/s\n"
        f"TTFT mean {result['mean_ttft_ms']:.1f} ms, p99 {result['p99_ttft_ms']:.1f} ms; at most "
        f"{load.running} requests running\n"
        f"{load.steps} steps touched {load.touched:.1f} of {result['experts_per_layer']} experts a layer and "
        f"missed {load.missed:.1%} of them",
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
