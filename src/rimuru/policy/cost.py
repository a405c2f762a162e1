"""How long a step takes: from bytes, tokens and misses to seconds.

Room: the cost model of policies, simulator and planner. Rule: pure arithmetic, no torch, no clock; rates
come from the table of GPUs or from `OnlineFit`, which keeps the error of what it fits.

A step costs host time, then layer by layer what its HBM reads take, plus what the link cannot bring
beside them, plus the compute of prompt tokens:

    seconds = host x layers' share + mix [a prompt is in it] + hbm x bytes / rate
              + link x sum over layers max(0, missed bytes / link rate - hidden) + prefill x flops / rate

Hidden is the time of the layer's own expert reads (`overlap="layer"`: a kernel that reads missing
experts in place) or of all the step's HBM reads (`overlap="step"`: a perfect prefetch). The five
factors beside the rates are `Factors`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, fields

import numpy as np

from rimuru.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GPU:
    """Rates of one card: bytes/s, bf16 flop/s with float32 sums, bytes."""

    name: str
    hbm_bytes_s: float
    link_bytes_s: float  # host to device, large copies
    bf16_flops: float
    memory_bytes: int


# Memory and dense bf16 rates are the makers' figures, the HBM rate of an H200 and the PCIe 5 link are
# measured (4.22 TB/s by a device copy, 54.5 GB/s at 64 MiB); PCIe 4 is taken at half of that.
GPUS = {
    g.name: g
    for g in (
        GPU("rtx-4090", 1.008e12, 27.2e9, 165e12, 24 * 2**30),
        GPU("rtx-5090", 1.792e12, 54.5e9, 209e12, 32 * 2**30),
        GPU("a100", 2.039e12, 27.2e9, 312e12, 80 * 2**30),
        GPU("h100", 3.35e12, 54.5e9, 989e12, 80 * 2**30),
        GPU("h200", 4.22e12, 54.5e9, 989e12, 141 * 10**9),
    )
}


# A kernel's reads of pinned host memory against the copy engine's rate, GB/s measured.
ZERO_COPY = 49.6 / 54.5


def known_gpu(device: str) -> GPU | None:
    """The card behind a driver's name for it, as `NVIDIA H100 80GB HBM3`; None for others and laptops."""
    words = device.lower().replace("-", " ").split()
    if "laptop" in words:
        return None
    return next((card for card in GPUS.values() if set(card.name.split("-")) <= set(words)), None)


def gpu(name: str) -> GPU:
    """The card called `name` (case, blanks and a leading `nvidia` aside). Raises `ConfigError`."""
    key = name.lower().replace(" ", "-").replace("_", "-").removeprefix("nvidia-").removeprefix("geforce-")
    for known, card in GPUS.items():
        if key in (known, known.replace("-", ""), known.removeprefix("rtx-")):
            return card
    raise ConfigError(f"GPU {name!r} is unknown; known are {', '.join(GPUS)}")


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a step of a model reads and computes, on one device."""

    moe_layers: int
    experts: int  # a layer
    top_k: int
    expert_bytes: int
    dense_bytes: int  # weights that every step reads: attention, shared experts, head
    kv_bytes_per_token: int
    flops_per_token: float  # 2 x active parameters


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its tokens and, a layer, its touched and missed experts (`[moe_layers]`, or the mean)."""

    tokens: int  # decode and prompt tokens together
    context: float  # KV tokens read, summed over the sequences
    prefill_tokens: int = 0  # of `tokens`
    touched: np.ndarray | float = 0.0
    missed: np.ndarray | float = 0.0


@dataclass(frozen=True, slots=True)
class Factors:
    """What the rates do not say. `host`, `mix`: seconds; the others multiply ideal times.

    `host` is that of a model of 24 layers: all but 0.35 ms of it goes by the layer. The defaults were
    fitted to vLLM 0.26 on an H200 (`docs/policy.md`).
    """

    host: float = 1.6e-3
    mix: float = 2e-3
    hbm: float = 1.1
    link: float = 1.0
    prefill: float = 2.3  # 430 of 989 TFLOP/s, a fused MoE at 8,192 tokens


# The host's part of a step, of which a server around the engine takes the first and each layer the second:
# least squares over eight decode times of two models give 0.03 ms and 53 us without a server, and what
# serving takes in all was 1.6 ms for 24 layers.
_STEP, _LAYER = 0.352e-3, 52e-6


@dataclass(frozen=True, slots=True)
class CostModel:
    """Step times of one model on one card."""

    model: ModelCost
    card: GPU
    factors: Factors = field(default_factory=Factors)
    overlap: str = "layer"  # "layer": misses read in place; "step": a perfect prefetch

    def __post_init__(self) -> None:
        if self.overlap not in ("layer", "step"):
            raise ValueError(f"overlap must be 'layer' or 'step', got {self.overlap!r}")

    def features(self, step: Step) -> tuple[float, float, float, float, float]:
        """What each of the factors multiplies: share of the host's time, prompt in it, and ideal seconds of
        HBM, exposed link and compute."""
        m, card = self.model, self.card
        layers = m.moe_layers
        expert_hbm = m.expert_bytes / card.hbm_bytes_s
        expert_link = m.expert_bytes / card.link_bytes_s
        mean_touched, mean_missed = _mean(step.touched), _mean(step.missed)
        # A missing expert is read over the link instead of from HBM.
        moe = layers * (mean_touched - mean_missed) * expert_hbm
        hbm = moe + (m.dense_bytes + step.context * m.kv_bytes_per_token) / card.hbm_bytes_s
        exposed = 0.0
        if self.overlap == "step":
            exposed = max(0.0, layers * mean_missed * expert_link - hbm * self.factors.hbm)
        elif mean_missed:
            local = (np.asarray(step.touched) - step.missed) * (expert_hbm * self.factors.hbm)
            exposed = layers * _mean(np.maximum(0.0, np.asarray(step.missed) * expert_link - local))
        compute = step.prefill_tokens * m.flops_per_token / card.bf16_flops
        host = (_STEP + _LAYER * layers) / (_STEP + _LAYER * 24)
        return host, float(step.prefill_tokens > 0), hbm, exposed, compute

    def seconds(self, step: Step) -> float:
        """Predicted time of a step."""
        host, mix, hbm, link, compute = self.features(step)
        f = self.factors
        return f.host * host + f.mix * mix + f.hbm * hbm + f.link * link + f.prefill * compute

    @property
    def hiding_layers(self) -> int:
        """Parts of a step that hide misses by their own reads only."""
        return self.model.moe_layers if self.overlap == "layer" else 1

    def hidden_experts_per_layer(self, touched: float) -> float:
        """Missing experts that the link brings while a layer reads its `touched` experts from HBM."""
        return touched * self.card.link_bytes_s / self.card.hbm_bytes_s * self.factors.hbm

    def recompute_seconds(self, tokens: float) -> float:
        """Prefill compute of `tokens` tokens, alone: the price of preempting by recomputing."""
        return self.factors.prefill * tokens * self.model.flops_per_token / self.card.bf16_flops

    def swap_seconds(self, tokens: float) -> float:
        """Link time to bring `tokens` tokens of KV out and in again."""
        return 2 * tokens * self.model.kv_bytes_per_token / self.card.link_bytes_s


def _mean(values: np.ndarray | float) -> float:
    """`np.mean` of the few values of a step, at a third of its cost."""
    return float(np.add.reduce(values) / values.size) if isinstance(values, np.ndarray) else float(values)


def expected_touched(experts: int, top_k: int, tokens: float) -> float:
    """Distinct experts a layer that `tokens` tokens touch when all are equally likely."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


_NOISE = 0.03**2  # variance of a step's relative time
_STRANGE = 3.0  # times the prediction, or less than a third of it: something else held the step up
_STRANGERS = 8  # as many in a row are no accident: the machine is another than was thought


class OnlineFit:
    """Fits a `CostModel`'s factors to measured steps, by recursive least squares with forgetting.

    Each step weighs by the inverse of its measured time, so that the relative error counts. Factors stay
    at or above zero. The start is the model's own factors, trusted as much as `trust` steps.
    """

    def __init__(self, model: CostModel, *, memory: float = 2000.0, trust: float = 10.0):
        self.model = model
        self.steps = 0
        self.relative_error = 0.0  # mean of |predicted - measured| / measured over about `window` steps
        self.bias = 0.0  # the same without the absolute value: above zero, predictions are too long
        self._window = 100.0
        self._strangers = 0
        self._keep = 1 - 1 / memory
        self._theta = np.asarray(astuple(model.factors))
        # Uncertainty of the start: each factor off by its own size, seconds by a millisecond.
        scale = np.maximum(np.abs(self._theta), [1e-3, 1e-3, 0.1, 0.1, 0.1])
        self._start = scale**2 / trust
        self._p = np.diag(self._start)
        self._p_limit = scale**2

    def observe(self, step: Step, seconds: float) -> float:
        """Take in a measured step; returns what had been predicted.

        Ignores times at or below zero, and those far from the prediction unless many in a row are.
        """
        x = np.asarray(self.model.features(step))
        predicted = float(x @ self._theta)
        if seconds <= 0:
            return predicted
        near = predicted / _STRANGE <= seconds <= predicted * _STRANGE
        self._strangers = 0 if near else self._strangers + 1
        if self.steps and 0 < self._strangers < _STRANGERS:
            return predicted
        if self._strangers == _STRANGERS:
            self._p = np.diag(self._start)
        self.steps += 1
        rate = max(1 / self._window, 1 / self.steps)
        error = (predicted - seconds) / seconds
        self.relative_error += (abs(error) - self.relative_error) * rate
        self.bias += (error - self.bias) * rate
        x = x / seconds
        px = self._p @ x
        gain = px / (_NOISE + x @ px)
        self._theta = np.maximum(self._theta - gain * error, 0.0)
        self._p -= np.outer(gain, px)
        # Forgetting must not blow up what the steps of the moment do not show: a factor keeps its limit.
        self._p /= self._keep
        shrink = np.sqrt(np.minimum(1.0, self._p_limit / self._p.diagonal()))
        self._p *= np.outer(shrink, shrink)
        names = [f.name for f in fields(Factors)]
        factors = Factors(**dict(zip(names, self._theta.tolist(), strict=True)))
        self.model = CostModel(self.model.model, self.model.card, factors, self.model.overlap)
        return predicted
