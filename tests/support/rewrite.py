"""The same checkpoint in another dress: stacked or per-expert names, shards, spellings, damage.

Room: the tests' material. Rule: reads and writes with the `safetensors` package, never with ours.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
_PART = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def rewrite(
    source: Path,
    target: Path,
    tensors: Callable[[Tensors], Tensors] | None = None,
    config: Callable[[dict[str, Any]], Any] | None = None,
    shards: int = 1,
) -> Path:
    """Copy a checkpoint to the new folder `target`, its tensors and its config changed on the way."""
    shutil.copytree(source, target)
    if config is not None:
        change_json(target / "config.json", config)
    if tensors is None and shards == 1:
        return target
    old = target / "model.safetensors"
    values = load_file(old)
    values = tensors(values) if tensors is not None else values
    old.unlink()
    if shards == 1:
        save_file(values, old)
        return target
    names = sorted(values)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({n: values[n] for n in part}, target / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def change_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Apply `change` to a JSON file: in place, or to what it returns."""
    data = json.loads(file.read_text())
    result = change(data)
    file.write_text(json.dumps(data if result is None else result))


def stack_experts(tensors: Tensors) -> Tensors:
    """Per-expert tensors to `experts.gate_up_proj [E, 2I, H]` and `experts.down_proj [E, H, I]`."""
    out, experts = {}, {}
    for name, value in tensors.items():
        if m := _EXPERT.fullmatch(name):
            experts.setdefault(m[1], {}).setdefault(int(m[2]), {})[_PART.get(m[3], m[3])] = value
        else:
            out[name] = value
    for prefix, found in experts.items():
        each = [found[e] for e in sorted(found)]
        out[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([p["gate_proj"], p["up_proj"]]) for p in each])
        out[f"{prefix}.down_proj"] = torch.stack([p["down_proj"] for p in each])
    return out
