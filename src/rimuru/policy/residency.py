"""Which experts are worth a page of the pool.

Room: the residency policy. Rule: pure numpy, no torch, no clock; it ranks, it never moves a byte.

An expert's worth is P(touched in the next step) x what its miss would cost in its layer. Misses cost
nothing while the layer's own HBM reads hide them: the link carries about
`HBM time of the layer x link rate` bytes beside it. A layer that misses less than that gives up an
expert for nothing, a layer at its limit does not, so victims spread over the layers by themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

import numpy as np

_FEW = 8  # swaps looked at before all are
_PROMPT = math.log(4)  # a step so much larger than usual holds a prompt: it says nothing of decoding

Expert = tuple[int, int]  # (MoE layer, expert)


class Swap(NamedTuple):
    """Promote one expert, into the page of `demote` or, where that is None, into a free page."""

    promote: Expert
    demote: Expert | None


@dataclass(frozen=True, slots=True)
class ResidencyParams:
    """What the ranking assumes. Chosen on recorded routing, `docs/policy.md` says how.

    spans: the touch probability is a weighted sum of one moving average for each span (in steps). A short
    span follows the requests that run now, a long one the model's habits; the weights are fitted to
    the routing itself, over the last `fit_span` steps, every `fit_every` steps.
    horizon: steps over which an advantage in touch probability is expected to last.
    hysteresis: by how much (share of the copy's cost) a swap must win before it is made.
    """

    spans: tuple[float, ...] = (2.0, 8.0, 32.0, 128.0)
    fit_span: float = 100.0
    fit_every: int = 20
    horizon: float = 32.0
    hysteresis: float = 0.5


class ResidencyPolicy:
    """Decayed touch statistics of `layers x experts`, and the rankings drawn from them.

    Masks are bool `[layers, experts]`: `resident` has a page, `lendable` has a host copy and may
    lose its page, `in_use` may be read or filled by a step that has not finished. None means
    everything is lendable, nothing is in use.
    """

    def __init__(self, layers: int, experts: int, params: ResidencyParams | None = None):
        if experts > 1024:
            raise ValueError(f"at most 1024 experts a layer can be ranked, got {experts}")
        self.layers, self.experts = layers, experts
        self.params = params or ResidencyParams()
        n = len(self.params.spans)
        self._rates = 1 - np.exp(-1 / np.asarray(self.params.spans, np.float32))
        # One moving average for each span, then a row of ones: the constant of the fit.
        self._means = np.zeros((n + 1, layers * experts), np.float32)
        self._means[n] = 1
        self._prior = np.append(np.full(n, 1 / n), 0.0)
        self._weights = self._prior.astype(np.float32)
        self._squares = np.zeros((n + 1, n + 1))
        self._products = np.zeros(n + 1)
        self._load = 0.0  # moving average of the logarithm of routed tokens a step
        self._hidden = np.zeros((layers, 1), np.float32)
        self._observed = 0
        self._last_step = -1
        self._probability: np.ndarray | None = None
        self._settled: bytes | None = None  # residency for which no swap pays, until something changes

    # -- what was seen ---------------------------------------------------------------------------

    def observe(self, step: int, touched: np.ndarray) -> None:
        """Take in the counts of one step: tokens routed to each expert, int `[layers, experts]`.

        Steps may arrive late but in order. A step already seen, one that routed nothing, and one that
        routed many times the usual (a prompt, which touches nearly everything) change no statistics.
        """
        if step <= self._last_step:
            return
        self._last_step = step
        total = int(touched.sum())
        if total == 0:
            return
        load = math.log(total)
        usual = self._load if self._observed else load
        self._load = usual + (load - usual) / 4
        if load > usual + _PROMPT:
            return
        touch = (touched > 0).astype(np.float32).ravel()
        if self._observed:
            self._fit(touch)
        self._observed += 1
        # Until a span has filled, its average is the plain mean of what was seen.
        rates = np.maximum(self._rates, 1 / self._observed)
        self._means[:-1] += (touch - self._means[:-1]) * rates[:, None]
        self._probability = self._settled = None

    def _fit(self, touch: np.ndarray) -> None:
        """Least squares of this step's touches on the averages before it.

        An expert weighs by 1 / probability, the inverse of the variance: the order among cold experts
        decides who leaves, and plain squares would fit the hot ones only.
        """
        scaled = self._means / (self.probability().ravel() + np.float32(0.01))
        keep = 1 - 1 / self.params.fit_span
        self._squares = self._squares * keep + scaled @ self._means.T
        self._products = self._products * keep + scaled @ touch
        if self._observed % self.params.fit_every == 0:
            trust = 1e-4 * np.trace(self._squares) / len(self._prior)
            ridge = trust * np.eye(len(self._prior))
            # No weight below zero: a touch never makes an expert look colder.
            self._weights = _least_squares(
                self._squares + ridge, self._products + trust * self._prior, self._weights
            )

    def hide(self, experts_per_layer: np.ndarray | float) -> None:
        """Set how many missing experts a step hides in each layer (scalar or `[layers]`).

        `HBM time of the layer x link bytes/s / expert bytes`; 0, the default, where nothing is hidden.
        """
        hidden = np.broadcast_to(np.asarray(experts_per_layer, np.float32), (self.layers,))[:, None]
        if not np.array_equal(hidden, self._hidden):
            self._hidden = hidden.copy()
            self._settled = None

    def probability(self) -> np.ndarray:
        """P(touched in the next step), float32 `[layers, experts]`, not to be written to."""
        if self._probability is None:
            p = np.minimum(self._weights @ self._means, 1)  # neither weights nor averages are below 0
            self._probability = p.reshape(self.layers, self.experts)
            self._probability.flags.writeable = False
        return self._probability

    def cold_touches(self, points: int = 33) -> np.ndarray:
        """Expected touches a step of the coldest 0, 1/(points - 1), ... 1 of all experts, float64 `[points]`.

        What lending so many would miss, the cost of each layer aside.
        """
        total = np.concatenate([[0.0], np.cumsum(np.sort(self.probability(), axis=None), dtype=np.float64)])
        return np.interp(np.linspace(0, len(total) - 1, points), np.arange(len(total)), total)

    # -- rankings --------------------------------------------------------------------------------

    def victims(
        self,
        n: int,
        resident: np.ndarray,
        lendable: np.ndarray | None = None,
        in_use: np.ndarray | None = None,
    ) -> list[Expert]:
        """Up to `n` resident experts to demote, the cheapest loss first; fewer if fewer may go."""
        if n <= 0:
            return []
        may_go = _candidates(resident, lendable, in_use)
        flat, _ = self._cheapest(n, self._expected_misses(resident), may_go)
        return self._pairs(flat)

    def promotions(
        self,
        resident: np.ndarray,
        budget: int,
        in_use: np.ndarray | None = None,
        *,
        free: int = 0,
        lendable: np.ndarray | None = None,
    ) -> list[Swap]:
        """At most `budget` experts to bring in, the most valuable first.

        The first `free` of them take free pages. The others take the page of an expert that may go,
        and only where the gain over the horizon repays the copy with hysteresis.
        """
        if budget <= 0 or resident.all():
            return []
        state = resident.tobytes()
        if free <= 0 and state == self._settled:
            return []
        absent = ~resident
        if in_use is not None:
            absent &= ~in_use
        misses = self._expected_misses(resident)
        coming, gains = self._dearest(budget, misses, absent)
        filled = min(free, len(coming))
        swaps = [Swap(expert, None) for expert in self._pairs(coming[:filled])]
        coming, gains = coming[filled:], gains[filled:]
        if len(coming):
            may_go = _candidates(resident, lendable, in_use)
            for most in (_FEW, len(coming)):  # gains fall, losses rise: a few mostly show where to stop
                going, losses = self._cheapest(min(most, len(coming)), misses, may_go)
                n = len(going)
                pays = (gains[:n] - losses) * self.params.horizon > 1 + self.params.hysteresis
                worth = n if pays.all() else int(np.argmin(pays))
                if worth < most:
                    break
            swaps += map(Swap, self._pairs(coming[:worth]), self._pairs(going[:worth]))
            if not swaps and in_use is None:
                self._settled = state
        return swaps

    # -- how it is done --------------------------------------------------------------------------

    def _expected_misses(self, resident: np.ndarray) -> np.ndarray:
        return np.einsum("le,le->l", self.probability(), ~resident, dtype=np.float32)[:, None]

    def _exposed(self, misses: np.ndarray) -> np.ndarray:
        """Share of one more miss that the layer cannot hide, given its expected misses `[layers, n]`.

        The number of misses of a step scatters like a Poisson variable around its mean, so the edge
        at the hidden number is soft: the logistic fit of a normal with that variance. The floor keeps
        the order by probability where everything is hidden.
        """
        steepness = 1.7 / np.sqrt(np.maximum(self._hidden, np.float32(1e-6)))
        return 0.51 + 0.49 * np.tanh(0.5 * steepness * (misses - self._hidden))

    def _cheapest(self, n: int, misses: np.ndarray, may_go: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Flat indices of up to `n` experts that may go and the loss of each, rising.

        The cost of a layer is convex in its expected misses, so taking the smallest marginal loss
        over all layers, each layer's coldest first, is the optimum.
        """
        count = min(n, int(np.count_nonzero(may_go)))
        if count == 0:
            return np.empty(0, np.intp), np.empty(0, np.float32)
        p = np.where(may_go, self.probability(), np.float32(2))  # 2: after every real probability
        if not self._hidden.any():
            return _smallest(p.ravel(), count)
        order, p = _smallest_in_rows(p, count)
        loss = p * self._exposed(misses + np.cumsum(p, axis=1) - p / 2)
        loss[p > 1.5] = np.inf
        return self._flat(order, loss, count)

    def _dearest(self, n: int, misses: np.ndarray, absent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Flat indices of up to `n` absent experts and the gain of having each, falling."""
        count = min(n, int(np.count_nonzero(absent)))
        if count == 0:
            return np.empty(0, np.intp), np.empty(0, np.float32)
        minus_p = np.where(absent, -self.probability(), np.float32(1))  # 1: after every real one
        if not self._hidden.any():
            chosen, values = _smallest(minus_p.ravel(), count)
            return chosen, -values
        columns = int(np.count_nonzero(absent, axis=1).max())  # few where few are lent
        order, minus_p = _smallest_in_rows(minus_p, min(count, columns))
        p = -np.minimum(minus_p, 0)
        gain = p * self._exposed(misses - np.cumsum(p, axis=1) + p / 2)
        gain[minus_p > 0.5] = -np.inf
        chosen, values = self._flat(order, -gain, count)
        return chosen, -values

    def _flat(self, order: np.ndarray, values: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The `n` smallest of `values [layers, columns]`, as flat indices through `order`, rising."""
        chosen, values = _smallest(values.ravel(), n)
        return chosen // order.shape[1] * self.experts + order.ravel()[chosen], values

    def _pairs(self, flat: np.ndarray) -> list[Expert]:
        layer, expert = np.divmod(flat, self.experts)
        return list(zip(layer.tolist(), expert.tolist(), strict=True))


def _candidates(resident: np.ndarray, lendable: np.ndarray | None, in_use: np.ndarray | None) -> np.ndarray:
    mask = resident
    if lendable is not None:
        mask = mask & lendable
    if in_use is not None:
        mask = mask & ~in_use
    return mask


def _smallest(values: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and values of the `n` smallest, rising; ties go to the lower index."""
    chosen = np.sort(np.argpartition(values, n - 1)[:n])
    chosen = chosen[np.argsort(values[chosen], kind="stable")]
    return chosen, values[chosen]


def _smallest_in_rows(values: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Column indices and values of the `n` smallest of each row (at most all), rising.

    Value and column share one 32-bit key, because sorting integers is several times as fast as
    argsort and settles ties by column. Values lie in [-1, 2] and are rounded to 2^-20.
    """
    keys = ((values + np.float32(1)) * np.float32(2**20)).astype(np.uint32) << np.uint32(10)
    keys |= np.arange(values.shape[1], dtype=np.uint32)
    keys.sort(axis=1)
    keys = keys[:, :n]
    return keys & np.uint32(1023), (keys >> np.uint32(10)).astype(np.float32) * np.float32(2**-20) - 1


def _least_squares(a: np.ndarray, b: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The `x >= 0` that minimises `x a x / 2 - b x`, by coordinate descent from `start`; float32."""
    rows, right, x = a.tolist(), b.tolist(), start.tolist()
    for _ in range(30):
        for i, row in enumerate(rows):
            rest = sum(map(mul, row, x)) - row[i] * x[i]
            x[i] = max(0.0, (right[i] - rest) / row[i])
    return np.asarray(x, np.float32)
