"""Small machines and loads for the simulator's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rimuru.engine.config import EngineConfig
from rimuru.models.config import ModelConfig
from rimuru.policy.cost import gpu
from rimuru.sim.engine import Hardware, Simulation
from rimuru.sim.routing import UNIFORM, Routing, RoutingParams, draw
from rimuru.sim.trace import Arrival

MODEL = ModelConfig(
    family="qwen3_moe", vocab_size=32_000, hidden_size=1024, num_layers=6, num_heads=8, num_kv_heads=4,
    head_dim=128, max_position_embeddings=4096, rms_eps=1e-6, num_experts=32, top_k=4, moe_intermediate=512,
    norm_topk=True, moe_layers=tuple(range(6)), rotary_dim=128, windows=(0,) * 6, dtype="bfloat16",
)  # fmt: skip
ALL_EXPERTS = 6 * 32 * 3 * 1024 * 512 * 2  # bytes
WEIGHTS = MODEL.dense_parameters() * 2 + 4096 * 128 * 4
ROUTING = draw(6, 32, 4, UNIFORM)
SKEWED = draw(6, 32, 4, RoutingParams(((0.0, 0.25),), 0.2, 0.3, 0.9))


@pytest.fixture
def make_sim() -> Callable[..., Simulation]:
    """Simulates a model of 192 experts of 3 MiB with `kv_mib` of pool beside them on an RTX 5090."""

    def make(
        policy: str = "fixed", kv_mib: float = 12, routing: Routing = ROUTING, overlap: str = "layer",
        slack_blocks: int = 1, **engine,
    ) -> Simulation:  # fmt: skip
        options = {"max_num_seqs": 32, "max_num_batched_tokens": 512} | engine
        config = EngineConfig(
            model="toy", device_memory=WEIGHTS + ALL_EXPERTS + int(kv_mib * 2**20), memory_policy=policy,
            **options,
        )  # fmt: skip
        hardware = Hardware(gpu("rtx-5090"), overlap=overlap, reserve_bytes=0)
        return Simulation(MODEL, config, hardware, routing, slack_blocks=slack_blocks)

    return make


def load(n: int, gap: float = 0.005, prompt: int = 40, output: int = 60) -> list[Arrival]:
    """`n` requests of like length, `gap` seconds apart."""
    return [Arrival(i * gap, prompt + i % 7, output + i % 11, i) for i in range(n)]
