"""How fast this machine is, for the policies: known by the card's name, measured at start, fitted to steps.

Room: the engine's cost model; the simulator takes `model_cost` from here. Rule: one `CostModel`, always the
best known; a rate that the table of GPUs has is not measured, a link always is: the slot decides it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from rimuru.models.config import ModelConfig
from rimuru.policy.cost import GPU, ZERO_COPY, CostModel, Factors, ModelCost, OnlineFit, Step, known_gpu

from .plan import MemoryPlan
from .scheduler import StepPlan

if TYPE_CHECKING:
    import torch

EVERY = 16  # decode steps of which one is taken in: a fit costs some 0.2 ms, and neighbours say the same
WARM_UP = 8  # steps that still load kernels and fill caches
COPY = 64 << 20  # bytes moved to measure a rate; more than caches hold where memory is read


def model_cost(model: ModelConfig, expert_bytes: int, itemsize: int) -> ModelCost:
    """What a step of `model` reads and computes. The embedding table is looked up, not read through."""
    table = model.vocab_size * model.hidden_size
    dense = model.dense_parameters() - (0 if model.tie_embeddings else table)
    active = dense - table + len(model.moe_layers) * model.top_k * model.expert_parameters
    return ModelCost(
        moe_layers=len(model.moe_layers), experts=model.num_experts, top_k=model.top_k,
        expert_bytes=expert_bytes, dense_bytes=dense * itemsize,
        kv_bytes_per_token=model.attention_layers * 2 * model.kv_size * itemsize,
        flops_per_token=2.0 * active,
    )  # fmt: skip


class Rates:
    """The cost model of one model on one device, kept true to the steps that are measured.

    `cost` is what is known now, `error` the mean relative error of its last predictions (0 until steps
    have been taken in), `fitted` how many have been.
    """

    def __init__(
        self, model: ModelConfig, plan: MemoryPlan, card: GPU, itemsize: int, overlap: str = "layer"
    ):
        """`overlap`: see `CostModel`; "layer" where kernels read missing experts in place."""
        expert_bytes = plan.geometry.classes[plan.expert_class].page_bytes
        start = CostModel(model_cost(model, expert_bytes, itemsize), card, Factors(), overlap)
        self._fit = OnlineFit(start, memory=500.0)
        self._seen = 0

    @property
    def cost(self) -> CostModel:
        return self._fit.model

    @property
    def error(self) -> float:
        return self._fit.relative_error

    @property
    def fitted(self) -> int:
        return self._fit.steps

    def observe(self, plan: StepPlan, touched: np.ndarray, resident: np.ndarray, seconds: float) -> bool:
        """Take in a step that took `seconds`; whether `cost` has changed.

        touched: int `[moe layers, experts]`, tokens routed to each; resident: bool, the same shape, as the
        step met it.
        """
        self._seen += 1
        prompt_tokens = sum(count for count in plan.counts if count > 1)
        if self._seen <= WARM_UP or (not prompt_tokens and self._seen % EVERY):
            return False
        hit = touched > 0
        step = Step(
            plan.num_tokens, sum(plan.starts) + plan.num_tokens, prompt_tokens,
            np.count_nonzero(hit, axis=1), np.count_nonzero(hit & ~resident, axis=1),
        )  # fmt: skip
        self._fit.observe(step, seconds)
        return True


@lru_cache
def card_of(device: torch.device) -> GPU:
    """The rates of `device`: from the table of GPUs where it is in it, else measured, in some 0.1 s.

    The link is that of kernels which read host memory in place. Call it before the pool is allocated.
    """
    import torch

    if device.type != "cuda":  # experts without a page are read from the same memory
        rate = _memory_rate(device, COPY)
        return GPU("cpu", rate, rate, _flops(device, 256, torch.float32), 0)
    name = torch.cuda.get_device_name(device)
    memory = torch.cuda.get_device_properties(device).total_memory
    link = _link_rate(device) * ZERO_COPY
    card = known_gpu(name)
    if card is None:
        card = GPU(name, _memory_rate(device, 4 * COPY), link, _flops(device, 4096, torch.bfloat16), memory)
    torch.cuda.empty_cache()
    return replace(card, name=name, link_bytes_s=link, memory_bytes=memory)


def _link_rate(device: torch.device) -> float:
    """Bytes a second of the copy engine, host to device."""
    import torch

    source = torch.empty(COPY, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY, dtype=torch.uint8, device=device)
    return COPY / _best(lambda: target.copy_(source, non_blocking=True), device)


def _memory_rate(device: torch.device, size: int) -> float:
    """Bytes a second that the device's memory moves in a copy, reads and writes together."""
    import torch

    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def _flops(device: torch.device, n: int, dtype: torch.dtype) -> float:
    import torch

    a = torch.ones(n, n, dtype=dtype, device=device)
    return 2 * n**3 / _best(lambda: a @ a, device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of five runs, after one that warms up."""
    import torch

    best = float("inf")
    for run in range(6):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if run:
            best = min(best, time.perf_counter() - began)
    return best
