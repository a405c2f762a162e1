"""Check every GPU kernel against its twin on fresh random data, then time it against its bars.

    PYTHONPATH=src python benchmarks/gpu_check.py [--only moe,host_memory] [--json out.json]
    PYTHONPATH=src python benchmarks/gpu_check.py --only engines

Needs torch, triton and a GPU; none of the server's dependencies. Every module of `checks/` is a
section: its `run(report)` checks first and times second. The kernels' take some four minutes, those of
whole engines, which `--only engines` runs, up to ten.
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

ENGINES = ("engine", "decode", "offload", "load")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted(m.name for m in pkgutil.iter_modules(checks.__path__))
    groups = {"kernels": [n for n in names if n not in ENGINES], "engines": list(ENGINES)}
    parser.add_argument(
        "--only", default="kernels",
        help=f"comma-separated sections, of {', '.join(names)}, or kernels (the default) or engines",
    )  # fmt: skip
    parser.add_argument("--json", help="write all checks and bars here")
    args = parser.parse_args()
    chosen = [section for name in args.only.split(",") for section in groups.get(name, [name])]
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
