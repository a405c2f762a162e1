"""Expert routing for models with random weights: as popular and as local as a real model's.

Room: the engine, beside the weights it stands in for. Rule: replaces the router's logits on the device
and nothing else; the router itself still runs, so a step costs what it costs. Two launches a step and no
word from the host, so that captured graphs hold it.

A router of random weights spreads tokens almost evenly and forgets from token to token, which is the
worst case for experts in host memory and unlike any trained model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rimuru.errors import ConfigError
from rimuru.kernels import dummy_logits
from rimuru.kernels.dummy_logits import RoutingNoise, RoutingTrace, Sequences
from rimuru.kernels.types import StepMeta
from rimuru.models.config import ModelConfig
from rimuru.policy.routing import UNIFORM, RoutingParams, read_params, read_trace

from .config import DUMMY_ROUTING, split_dummy_routing

AT_ONCE = 16 << 20  # bytes; steps whose logits of all layers fit are drawn in one launch
_DRAWS = 24  # steps whose mean `touched` is

Draw = Callable[[Sequences, StepMeta, int, int], torch.Tensor]


class DummyRouting:
    """The logits of every MoE layer's router, by what `draw` makes of sequences and positions."""

    def __init__(
        self, name: str, draw: Draw, config: ModelConfig, slots: int, device: torch.device, seed: int
    ):
        """`name` is what reports print; `slots`: table rows of the engine."""
        self.name = name
        self._draw = draw
        self._layers, self._experts, self._top_k = len(config.moe_layers), config.num_experts, config.top_k
        self._held = dummy_logits.sequences(slots, seed, device)
        self._device = device
        self._rows: tuple[torch.Tensor, ...] = ()

    def logits(self, layer: int, meta: StepMeta) -> torch.Tensor:
        """Router logits of MoE layer `layer` for the step's tokens: float32 `[T, E]`.

        A step asks for its layers in order, from 0: layer 0 begins the step.
        """
        if layer == 0:
            dummy_logits.follow(meta, self._held)
            size = self._layers * len(meta.positions) * self._experts * 4
            if size <= AT_ONCE:
                self._rows = self._draw(self._held, meta, 0, self._layers).unbind(0)
        if not self._rows:
            return self._draw(self._held, meta, layer, 1)[0]
        row = self._rows[layer]
        if layer == self._layers - 1:
            self._rows = ()  # a graph's memory is not held beyond its capture
        return row

    def touched(self, batch: int, seed: int = 0) -> float:
        """Mean number of experts a layer that one token each of `batch` sequences is routed to.

        Drawn anew from the same routing, on its device; not for use inside a step.
        """
        rng = np.random.default_rng(seed)
        total = 0
        for _ in range(_DRAWS):
            salts = torch.from_numpy(rng.integers(-(2**31), 2**31, batch, dtype=np.int32))
            held = Sequences(salts.to(self._device), torch.zeros_like(salts))
            order = torch.arange(batch, dtype=torch.int32, device=self._device)
            positions = torch.from_numpy(rng.integers(0, 4096, batch, dtype=np.int32)).to(self._device)
            meta = StepMeta(positions, order, order, order, order, 1, 4096)
            ids = self._draw(held, meta, 0, self._layers).topk(self._top_k).indices.flatten(1)
            total += int(torch.zeros(self._layers, self._experts).scatter_(1, ids.cpu(), 1).sum())
        return total / _DRAWS / self._layers

    def describe(self, batches: tuple[int, ...] = (1, 8, 32, 128)) -> str:
        """One line for logs and benchmarks: which routing, and the mean experts touched at batch sizes."""
        touched = " / ".join(f"{self.touched(b):.1f}" for b in batches)
        sizes = " / ".join(map(str, batches))
        return f"routing {self.name}: {touched} of {self._experts} experts a layer touched at batch {sizes}"


def make_dummy_routing(
    spec: str, config: ModelConfig, device: torch.device, *, slots: int, model: str = "", seed: int = 0
) -> DummyRouting:
    """The routing that `--dummy-routing` names (`engine.config` has the syntax).

    `model` is what the user calls the model: its folder or Hub id. Raises `ConfigError` where the file
    does not fit it.
    """
    kind, path, entry = split_dummy_routing(spec)
    layers, experts, top_k = len(config.moe_layers), config.num_experts, config.top_k
    if not layers:
        raise ConfigError(f"{DUMMY_ROUTING} {spec}: the model has no MoE layer")
    if kind == "trace":
        tracks = read_trace(Path(path), layers, experts, top_k, flag=DUMMY_ROUTING)
        trace = RoutingTrace(
            torch.from_numpy(np.concatenate(tracks).astype(np.int16)).to(device),
            torch.tensor([0, *np.cumsum([len(t) for t in tracks])], dtype=torch.int32, device=device),
            experts,
        )
        name = f"trace {Path(path).stem}"
        return DummyRouting(name, _with(dummy_logits.trace_logits, trace), config, slots, device, seed)
    name, params = "uniform", UNIFORM
    if kind == "model":
        name, params = read_params(Path(path), experts, top_k, entry or model, DUMMY_ROUTING)
        name = f"model {name}"
    noise = routing_noise(params, layers, experts, device, seed)
    return DummyRouting(name, _with(dummy_logits.model_logits, noise), config, slots, device, seed)


def _with(function: Callable, source: RoutingNoise | RoutingTrace) -> Draw:
    return lambda held, meta, first, layers: function(source, held, meta, first, layers)


def routing_noise(
    params: RoutingParams, layers: int, experts: int, device: torch.device, seed: int
) -> RoutingNoise:
    """A routing model's parameters as the kernels read them."""
    a = params.popularity_share(layers)
    popularity = np.random.default_rng(seed).standard_normal((layers, experts)) * np.sqrt(a)[:, None]
    # Drift that is forgotten at once is noise.
    c = params.c if params.rho > 0 else 0.0
    scales = np.stack([np.full(layers, params.b), np.full(layers, c), 1 - a - params.b - c], axis=1)
    return RoutingNoise(
        torch.tensor(popularity, dtype=torch.float32, device=device),
        torch.tensor(np.sqrt(scales.clip(0)), dtype=torch.float32, device=device),
        -float(np.log(params.rho)) if params.rho > 0 else 1.0,
    )
