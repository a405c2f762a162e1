"""Which experts each token is routed to: drawn from a routing model, or recorded.

Room: the simulator's input. Rule: numpy only, no clock; the same request routes the same way however it is
scheduled, so that policies are compared on one workload.

Routing is kept as a bank of *tracks*, uint8 `[tracks, tokens, layers x experts]`, one row a token with a 1
for each expert chosen. A request follows one track from a place of its own, round and round; a prompt
longer than a track goes on into the next one. A step's counts are then a sum of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from rimuru.policy.routing import UNIFORM, RoutingParams, read_params, read_trace

TRACKS, TOKENS = 32, 128
BANK_BYTES = 48 << 20  # a bank of larger models has shorter tracks


class Routing:
    """Expert selections of requests, by the number of the request and the position of the token."""

    def __init__(self, bank: np.ndarray, layers: int, experts: int, name: str):
        """bank: uint8 `[tracks, tokens, layers * experts]`, at most 255 tokens a track."""
        self.layers, self.experts, self.name = layers, experts, name
        self._tracks, self._tokens = bank.shape[:2]
        self._rows = bank.reshape(-1, layers * experts)
        self._totals = bank.sum(axis=1, dtype=np.int32)

    def decode(self, requests: Sequence[int], positions: Sequence[int]) -> np.ndarray:
        """Counts of one token of each request, int32 `[layers * experts]`."""
        who = np.asarray(requests)
        at = who % self._tracks * self._tokens + (who * 37 + positions) % self._tokens
        if len(at) < 256:
            return np.add.reduce(self._rows[at], axis=0, dtype=np.uint8).astype(np.int32)
        return np.add.reduce(self._rows[at], axis=0, dtype=np.int32)

    def prompt(self, request: int, start: int, count: int) -> np.ndarray:
        """Counts of `count` prompt tokens of one request from position `start`, int32."""
        total = np.zeros(self._rows.shape[1], np.int32)
        end = start + count
        while start < end:
            turn, at = divmod(start, self._tokens)
            track = (request + turn) % self._tracks
            n = min(self._tokens - at, end - start)
            if n == self._tokens:
                total += self._totals[track]
            else:
                first = track * self._tokens + at
                total += np.add.reduce(self._rows[first : first + n], axis=0, dtype=np.uint8)
            start += n
        return total


def draw(layers: int, experts: int, top_k: int, params: RoutingParams, seed: int = 0) -> Routing:
    """A routing bank drawn from `params`."""
    name = "uniform" if params == UNIFORM else "model"
    return Routing(_bank(layers, experts, top_k, params, seed), layers, experts, name)


@lru_cache(maxsize=4)
def _bank(layers: int, experts: int, top_k: int, params: RoutingParams, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    tokens = max(16, min(TOKENS, BANK_BYTES // (TRACKS * layers * experts)))
    bank = np.zeros((TRACKS, tokens, layers, experts), np.uint8)
    for layer, a in enumerate(params.popularity_share(layers)):
        logits = rng.standard_normal((TRACKS, tokens, experts), np.float32)
        logits *= np.sqrt(max(0.0, 1 - a - params.b - params.c))
        logits += np.sqrt(a) * rng.standard_normal(experts, np.float32)
        logits += np.sqrt(params.b) * rng.standard_normal((TRACKS, 1, experts), np.float32)
        if params.c:
            drift = rng.standard_normal((TRACKS, experts), np.float32)
            fresh = np.sqrt(1 - params.rho**2)
            for t in range(tokens):
                logits[:, t] += np.sqrt(params.c) * drift
                drift = params.rho * drift + fresh * rng.standard_normal(drift.shape, np.float32)
        chosen = np.argpartition(logits, -top_k, axis=-1)[..., -top_k:]
        np.put_along_axis(bank[:, :, layer], chosen, 1, axis=-1)
    return bank.reshape(TRACKS, tokens, layers * experts)


def load_routing(source: str, layers: int, experts: int, top_k: int, model: str, seed: int = 0) -> Routing:
    """`uniform`, a routing model (JSON) or a recorded trace (npz of uint8 `[tokens, layers, top_k]`).

    `model` picks the entry of a JSON file: the model's name, or the folder it lies in. Raises
    `ConfigError` where the file does not fit the model.
    """
    if source == "uniform":
        return draw(layers, experts, top_k, UNIFORM, seed)
    path = Path(source)
    if path.suffix == ".npz":
        return _recorded(path, layers, experts, top_k)
    return draw(layers, experts, top_k, read_params(path, experts, top_k, model)[1], seed)


def _recorded(path: Path, layers: int, experts: int, top_k: int) -> Routing:
    good = read_trace(path, layers, experts, top_k, TOKENS)
    good = good[: max(1, BANK_BYTES // (TOKENS * layers * experts))]
    bank = np.zeros((len(good), TOKENS, layers, experts), np.uint8)
    for track, trace in zip(bank, good, strict=True):
        np.put_along_axis(track, trace[:TOKENS].astype(np.int64), 1, axis=-1)
    return Routing(bank.reshape(len(good), TOKENS, layers * experts), layers, experts, path.stem)
