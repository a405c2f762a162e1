"""Routing for random weights: the kernels against their twin, and what they add to a step in a graph."""

from __future__ import annotations

import numpy as np
import torch
from harness import Report, replay_times
from shapes import folder

from rimuru.engine.dummy_routing import DummyRouting, routing_noise
from rimuru.kernels import dummy_logits
from rimuru.kernels.dummy_logits import RoutingNoise, RoutingTrace, Sequences
from rimuru.kernels.types import StepMeta
from rimuru.models.config import load_model_config
from rimuru.policy.routing import RoutingParams

# Qwen3-30B's, as the routing model has them.
PARAMS = RoutingParams(((0.0, 0.25),), 0.2, 0.3, 0.93)
SEQUENCES = 128


def step(starts: list[int], counts: list[int], device: str) -> StepMeta:
    ends = np.cumsum(counts)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])

    def ints(values) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)

    slots = np.arange(len(starts))
    return StepMeta(
        ints(positions), ints(np.repeat(slots, counts)), ints([0, *ends]), ints(slots),
        ints(np.add(starts, counts)), max(counts), 4096,
    )  # fmt: skip


def check(report: Report) -> None:
    rng = np.random.default_rng(0)
    layers, experts = 48, 128
    cpu, gpu = (routing_noise(PARAMS, layers, experts, torch.device(d), 0) for d in ("cpu", "cuda"))
    ids = torch.from_numpy(np.argsort(rng.random((900, layers, experts)), axis=-1)[..., :8].astype(np.int16))
    starts = torch.tensor([0, 300, 301, 900], dtype=torch.int32)
    traces = (RoutingTrace(ids, starts, experts), RoutingTrace(ids.cuda(), starts.cuda(), experts))
    held = [dummy_logits.sequences(SEQUENCES, 5, d) for d in ("cpu", "cuda")]
    at = [0] * SEQUENCES
    for counts in ([3] * SEQUENCES, [1] * SEQUENCES, rng.integers(1, 6, SEQUENCES).tolist()):
        metas = [step(at, counts, d) for d in ("cpu", "cuda")]
        for meta, who in zip(metas, held, strict=True):
            dummy_logits.follow(meta, who)
        report.equal("salts", held[1].salts.cpu(), held[0].salts)
        at = np.add(at, counts).tolist()
    want = dummy_logits.model_logits(cpu, held[0], metas[0], 0, layers)
    got = dummy_logits.model_logits(gpu, held[1], metas[1], 0, layers).cpu()
    # Logarithms differ in their last bits; on the edge of a window of drift they decide which it is.
    report.check("logits: share that differs", ((got - want).abs() > 5e-5).float().mean().item(), 1e-3)
    same = [set(a) == set(b) for a, b in zip(*(x.topk(8).indices.flatten(0, 1).tolist() for x in (want, got)),
                                             strict=True)]  # fmt: skip
    report.check("share of tokens with other experts", 1 - sum(same) / len(same), 2e-2)
    want = dummy_logits.trace_logits(traces[0], held[0], metas[0], 0, layers)
    report.equal("recorded", dummy_logits.trace_logits(traces[1], held[1], metas[1], 0, layers).cpu(), want)


def run(report: Report) -> None:
    check(report)
    config = load_model_config(folder("qwen3-30b"))
    noise = routing_noise(PARAMS, len(config.moe_layers), config.num_experts, torch.device("cuda"), 0)

    def draw(held: Sequences, meta: StepMeta, first: int, layers: int, noise: RoutingNoise = noise):
        return dummy_logits.model_logits(noise, held, meta, first, layers)

    routing = DummyRouting("model", draw, config, 512, torch.device("cuda"), 0)
    report.say(routing.describe())
    for tokens in (1, 32, 128, 512, 8192):
        count = min(tokens, SEQUENCES)
        meta = step([7] * count, [tokens // count] * count, "cuda")

        def whole(meta: StepMeta = meta) -> None:
            for layer in range(len(config.moe_layers)):
                routing.logits(layer, meta)

        # 1 % of the fastest step that it may stand in: 2.4 ms at batch 1, 15 at 32, 19.5 at 128 and a little
        # more at 512 tokens, 48 x 1.35 ms of MoE and as much again of the rest at 8,192.
        bar = {1: 24.0, 32: 150.0, 128: 195.0, 512: 200.0, 8192: 900.0}[tokens]
        report.bar(f"a step's logits, {tokens} tokens", replay_times({"x": whole})["x"], "us", bar)
