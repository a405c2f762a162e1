"""Tokens a second of the engine alone: every request there from the start, no server.

Room: benchmarks. Rule: outputs have their full length; result keys are those of `vllm bench throughput`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rimuru.engine.request import SamplingParams

from . import _offline, _workload


def main(argv: list[str] | None = None) -> int:
    """`rimuru bench throughput`."""
    parser = argparse.ArgumentParser(
        prog="rimuru bench throughput", description=(__doc__ or "").split("\n")[0]
    )
    _offline.add_arguments(parser)
    _workload.add_arguments(parser, num_prompts=100)
    parser.add_argument("--output-json", metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of a line")
    args = parser.parse_args(argv)
    planned = _workload.lengths(args)
    llm = _offline.load(args)
    prompts = [
        _workload.token_prompt(p.prompt, llm.info.vocab_size, args.seed + i) for i, p in enumerate(planned)
    ]
    params = [SamplingParams(temperature=1.0, max_tokens=p.output, ignore_eos=True, seed=i)
              for i, p in enumerate(planned)]  # fmt: skip
    llm.generate(prompts[0][:16], SamplingParams(max_tokens=2, ignore_eos=True))  # compiles what compiles
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    made = sum(len(o.outputs[0].token_ids) for o in outputs)
    total = made + sum(map(len, prompts))
    result = {
        "elapsed_time": seconds,
        "num_requests": len(planned),
        "total_num_tokens": total,
        "requests_per_second": len(planned) / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": made / seconds,
    }
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(result), encoding="utf-8")
    print(
        json.dumps(result)
        if args.json
        else f"{result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.1f} tokens/s, "
        f"{result['output_tokens_per_second']:.1f} output tokens/s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
