"""`rimuru plan MODEL`: where every byte would go, without reading a weight.

Room: the command line's view of `plan.py`. Rule: prints what the engine would do, nothing else.
"""

from __future__ import annotations

import argparse
import json

from .config import POLICIES, EngineConfig, parse_size
from .core import plan_for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that change the plan."""
    parser.add_argument("model", help="folder with config.json, Hub id, or 'demo'")
    parser.add_argument("--device-memory", metavar="SIZE", help="cap on the device: bytes, 24GB or 24GiB")
    parser.add_argument("--host-memory", metavar="SIZE", help="cap on the experts' host copies")
    parser.add_argument("--memory-policy", choices=POLICIES, default="reactive")
    parser.add_argument("--resident-experts", type=int, metavar="N", help="with --memory-policy static")
    parser.add_argument("--max-model-len", type=int, metavar="N")
    parser.add_argument("--max-num-seqs", type=int, metavar="N")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan; a plan that cannot start raises `MemoryPlanError` with one that does."""
    options = {
        k: v for k, v in vars(args).items() if k in EngineConfig.__dataclass_fields__ and v is not None
    }
    for name in ("device_memory", "host_memory"):
        if name in options:
            options[name] = parse_size(options[name], "--" + name.replace("_", "-"))
    plan = plan_for(EngineConfig(**options))
    print(json.dumps(plan.to_json(), indent=1) if args.json else plan.describe())
    return 0
