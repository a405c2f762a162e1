"""Check every GPU kernel against its twin on fresh random data, then time it against its bars.

    PYTHONPATH=src python benchmarks/gpu_check.py [--only moe,host_memory] [--json out.json]

Needs torch, triton and a GPU; none of the server's dependencies. Every module of `checks/` is a
section: its `run(report)` checks first and times second.
"""

from __future__ import annotations

import argparse
import gc
import pkgutil
import platform
import sys
import traceback
from importlib import import_module

import checks
import torch
import triton
from harness import Report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted(m.name for m in pkgutil.iter_modules(checks.__path__))
    parser.add_argument("--only", help=f"comma-separated sections, of {', '.join(names)}")
    parser.add_argument("--json", help="write all checks and bars here")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else names
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown section {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if not torch.cuda.is_available():
        parser.error("no GPU here; the kernels' tests run without one: pytest tests/kernels")

    facts = {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(", ".join(f"{k} {v}" for k, v in facts.items()), flush=True)
    report = Report()
    crashed = []
    for name in chosen:
        report.section = name
        try:
            import_module(f"checks.{name}").run(report)
        except Exception:
            # One section that breaks must not hide the others' results.
            crashed.append(name)
            traceback.print_exc()
            report.say("CRASHED")
        gc.collect()
        torch.cuda.empty_cache()
        if args.json:
            report.dump(args.json, **facts, crashed=crashed)
    print(report.table())
    if crashed:
        print(f"crashed: {', '.join(crashed)}")
    return 1 if crashed or not all(c.ok for c in report.checks) else 0


if __name__ == "__main__":
    sys.exit(main())
