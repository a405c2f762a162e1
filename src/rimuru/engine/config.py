"""What the user chose, checked once, before anything large is touched.

Room: the engine's configuration. Rule: plain data without torch; sizes are bytes; every refusal
names the flag, the limit and a value that works.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rimuru.errors import ConfigError

POLICIES = ("fixed", "static", "reactive", "economic")
DUMMY_ROUTING = "--dummy-routing"
WHOLE = {  # fields that count something, and the least of each
    "seed": 0, "max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 1, "max_model_len": 2,
    "device_memory": 1, "host_memory": 1, "resident_experts": 0,
}  # fmt: skip
OPTIONAL = ("max_model_len", "device_memory", "host_memory", "resident_experts")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def parse_size(text: str | int, flag: str = "size", bare: int = 1 << 20) -> int:
    """Bytes from `'30.9GB'` (1e9), `'24GiB'` (2^30), an int, or text without a unit, from `bare` bytes on."""
    unit = "B"
    if isinstance(text, int) and not isinstance(text, bool):
        value = float(text)
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(text))
        if not match or match[2].upper() not in _UNITS:
            raise ConfigError(
                f"{flag}: cannot read {text!r} as a size; write bytes, '24GB' (1e9) or '24GiB' (2^30)"
            )
        unit = match[2].upper()
        value = float(match[1]) * _UNITS[unit]
    if not 0 < value < 2.0**63:
        raise ConfigError(f"{flag}: must be more than 0 bytes and below 2^63, got {str(text)[:40]!r}")
    if not unit and value < bare:
        raise ConfigError(f"{flag}: {text} is {text} bytes; was {text}GB meant? Else write {text}B")
    return int(value)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def split_dummy_routing(spec: str) -> tuple[str, str, str]:
    """(kind, file, entry) of `uniform`, `model:FILE[#ENTRY]` or `trace:FILE`.

    FILE of `model` is a JSON file of routing models; without ENTRY, the one that bears the served model's
    name. FILE of `trace` holds recorded routing (npz of integer arrays `[tokens, MoE layers, top_k]`).
    """
    kind, _, rest = spec.partition(":")
    path, _, entry = rest.partition("#") if kind == "model" else (rest, "", "")
    if kind not in ("uniform", "model", "trace") or bool(path) == (kind == "uniform"):
        raise ConfigError(
            f"{DUMMY_ROUTING} {spec!r} is unknown; choose uniform, model:FILE.json, model:FILE.json#ENTRY or "
            "trace:FILE.npz"
        )
    return kind, path, entry


@dataclass(slots=True)
class EngineConfig:
    """Everything `rimuru serve` and `rimuru.LLM` accept that shapes the engine.

    Sizes are bytes. `device_memory` caps every byte the engine takes on the device; `host_memory`
    caps the experts' host copies. None means: as much as the machine gives.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"  # auto, bfloat16, float16, float32
    device: str = "auto"  # auto, cpu, cuda
    load_format: str = "auto"  # auto, safetensors, dummy
    dummy_routing: str | None = None  # for load_format dummy: see `split_dummy_routing`
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    enable_prefix_caching: bool = True
    device_memory: int | None = None
    host_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    memory_policy: str = "economic"
    resident_experts: int | None = None  # for `static`
    max_boundary_wait: float = 2.0  # seconds the oldest request may wait before pages are lent anyway
    ttft_slo: float | None = None  # milliseconds to the first token, an objective of `economic`
    itl_slo: float | None = None  # milliseconds between tokens, an objective of `economic`
    enforce_eager: bool = False
    # Steps are planned by token counts alone, never by measured or predicted times: while memory admits the
    # same requests, they are the same steps wherever experts lie, which makes outputs comparable bit by bit.
    # Experts may still be promoted and lent. Costs first-token time where prompts stream experts.
    schedule_replay: bool = False
    debug_pool: bool = False  # owner tags, poison and check() after every step
    trust_remote_code: bool = False
    revision: str | None = None

    def check(self) -> None:
        """Raise `ConfigError` for values that can never work, whatever the model."""
        if self.memory_policy not in POLICIES:
            raise ConfigError(
                f"--memory-policy {self.memory_policy!r} is unknown; choose one of {', '.join(POLICIES)}"
            )
        if self.memory_policy == "static" and self.resident_experts is None:
            raise ConfigError("--memory-policy static needs --resident-experts N")
        if self.memory_policy != "static" and self.resident_experts is not None:
            raise ConfigError("--resident-experts goes with --memory-policy static")
        for name, low in WHOLE.items():
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is None and name in OPTIONAL:
                continue
            if type(value) is not int:
                raise ConfigError(f"{flag} must be a whole number, got {value!r}")
            if value < low:
                raise ConfigError(f"{flag} must be at least {low}, got {value}")
        if not _finite(self.max_boundary_wait) or self.max_boundary_wait < 0:
            raise ConfigError(
                f"--max-boundary-wait must be at least 0 seconds, got {self.max_boundary_wait!r}"
            )
        if not _finite(self.gpu_memory_utilization) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization!r}"
            )
        for name in ("ttft_slo", "itl_slo"):
            value = getattr(self, name)
            flag = f"--{name.replace('_', '-')}"
            if value is not None and (not _finite(value) or value <= 0):
                raise ConfigError(f"{flag} must be more than 0 milliseconds, got {value!r}")
            if value is not None and self.memory_policy != "economic":
                raise ConfigError(f"{flag} is an objective of --memory-policy economic")
        if self.dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise ConfigError(f"--dtype {self.dtype!r} is unknown; choose auto, bfloat16, float16 or float32")
        if self.load_format not in ("auto", "safetensors", "dummy"):
            raise ConfigError(
                f"--load-format {self.load_format!r} is unknown; choose auto, safetensors or dummy"
            )
        if self.dummy_routing is not None:
            split_dummy_routing(self.dummy_routing)
            if self.load_format != "dummy":
                raise ConfigError(
                    f"{DUMMY_ROUTING} goes with --load-format dummy: real weights bring their own routing"
                )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"--device {self.device!r} is unknown; choose auto, cpu or cuda")
