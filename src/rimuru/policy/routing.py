"""What is known of a model's expert routing: the parameters of a routing model, and recorded routing.

Room: policy. Rule: reads and checks files, draws nothing; the simulator and the engine's dummy routing
make their selections from what is read here. Errors name the flag that gave the file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from rimuru.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RoutingParams:
    """Expert logits = sqrt(a) popularity + sqrt(b) taste of the request + sqrt(c) drift + noise.

    All terms are standard normal, the drift an AR(1) over tokens with coefficient `rho`; a token takes
    the top k. So the logits of two tokens correlate by `a` across requests and by `a + b + c rho^d`, `d`
    tokens apart, within one. `a` may differ by layer: (layer, a) points, interpolated.
    """

    a: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    b: float = 0.0
    c: float = 0.0
    rho: float = 0.0

    def popularity_share(self, layers: int) -> np.ndarray:
        """`a` of every layer, float64 `[layers]`."""
        points, values = zip(*self.a, strict=True)
        return np.interp(np.arange(layers), points, values)


UNIFORM = RoutingParams()


def read_params(
    path: Path, experts: int, top_k: int, model: str, flag: str = "--routing"
) -> tuple[str, RoutingParams]:
    """An entry of a routing model's JSON file, by name: (name, parameters).

    `model` picks the entry: the model's name, or the folder it lies in. Raises `ConfigError` where the
    file or the entry does not fit a model of `experts` experts, `top_k` a token.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["models"]
        name = _entry(entries, model, path, flag)
        params = _params(entries[name])
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{flag} {path}: no routing model in it ({error})") from None
    shape = entries[name].get("E"), entries[name].get("k")
    if shape != (experts, top_k):
        raise ConfigError(
            f"{flag} {path}: {name} has {shape[0]} experts, top {shape[1]}; the model has {experts}, "
            f"top {top_k}"
        )
    return name, params


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _entry(entries: dict[str, Any], model: str, path: Path, flag: str) -> str:
    want = _plain(Path(model).name)
    found = [name for name in entries if want.startswith(_plain(name)) or _plain(name).startswith(want)]
    if not found:
        raise ConfigError(
            f"{flag} {path}: no entry for {Path(model).name!r}; it has {', '.join(entries) or 'none'}; "
            f"{flag} uniform needs none"
        )
    return max(found, key=len)


def _params(entry: dict[str, Any]) -> RoutingParams:
    a: list[tuple[float, float]] = [(1.0, float(entry["A"]))] if "A" in entry else []
    if "A_layer0" in entry:
        a.append((0.0, float(entry["A_layer0"])))
    a += [(float(layer), float(value)) for layer, value in entry.get("A_by_layer", {}).items()]
    if not a:
        raise KeyError("A")
    params = RoutingParams(tuple(sorted(a)), float(entry["B"]), float(entry["C"]), float(entry["rho"]))
    shares = [params.b, params.c, 1 - params.b - params.c - max(value for _, value in params.a)]
    if not all(0 <= share <= 1 for share in (*shares, params.rho, *(value for _, value in params.a))):
        raise ValueError("A, B and C must be shares that sum to at most 1, rho from 0 to 1")
    return params


def read_trace(
    path: Path, layers: int, experts: int, top_k: int, tokens: int = 1, flag: str = "--routing"
) -> list[np.ndarray]:
    """Recorded routing (npz of integer arrays `[tokens, layers, top_k]`, one a sequence).

    Returns the sequences of at least `tokens` tokens. Raises `ConfigError` where none fits the model.
    """
    try:
        with np.load(path) as arrays:
            traces = [arrays[name] for name in sorted(arrays.files)]
    except (OSError, EOFError, TypeError, ValueError, BadZipFile) as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {error}") from None
    good = [
        t for t in traces
        if t.dtype.kind in "iu" and t.ndim == 3 and t.shape[1:] == (layers, top_k) and len(t) >= tokens
    ]  # fmt: skip
    if not good or not all(int(t.min()) >= 0 and int(t.max()) < experts for t in good):
        have = traces[0].shape[1:] if traces and traces[0].ndim == 3 else "nothing of that shape"
        raise ConfigError(
            f"{flag} {path}: the model needs sequences of at least {tokens} tokens x {layers} layers x "
            f"{top_k} of {experts} experts; the file holds {have}"
        )
    return good
