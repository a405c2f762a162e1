"""Which experts are worth a page of the pool.

Room: the residency policy. Rule: pure numpy, no torch, no clock; it ranks, it never moves a byte.

An expert's worth is P(touched in the next step) x what its miss would cost in its layer. Misses cost
nothing while the layer's own HBM reads hide them: the link carries about
`HBM time of the layer x link rate` bytes beside it. A layer that misses less than that gives up an
expert for nothing, a layer at its limit does not, so victims spread over the layers by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Expert = tuple[int, int]  # (MoE layer, expert)


class Swap(NamedTuple):
    """Promote one expert, into the page of `demote` or, where that is None, into a free page."""

    promote: Expert
    demote: Expert | None


@dataclass(frozen=True, slots=True)
class ResidencyParams:
    """What the ranking assumes. Chosen on recorded routing, `docs/policy.md` says how.

    spans, weights: the touch probability is the weighted mean of one moving average for each span
    (in steps); a short span follows the requests that run now, a long one the model's habits.
    horizon: steps over which an advantage in touch probability is expected to last.
    hysteresis: by how much (share of the copy's cost) a swap must win before it is made.
    """

    spans: tuple[float, ...] = (4.0, 32.0, 256.0)
    weights: tuple[float, ...] = (0.2, 0.4, 0.4)
    horizon: float = 32.0
    hysteresis: float = 0.5


class ResidencyPolicy:
    """Decayed touch statistics of `layers x experts`, and the rankings drawn from them.

    Masks are bool `[layers, experts]`: `resident` has a page, `lendable` has a host copy and may
    lose its page, `in_use` may be read or filled by a step that has not finished. None means
    everything is lendable, nothing is in use.
    """

    def __init__(self, layers: int, experts: int, params: ResidencyParams | None = None):
        self.layers, self.experts = layers, experts
        self.params = params or ResidencyParams()
        if experts > 1024:
            raise ValueError(f"at most 1024 experts a layer can be ranked, got {experts}")
        if len(self.params.spans) != len(self.params.weights):
            raise ValueError("spans and weights must have the same length")
        spans = np.asarray(self.params.spans, np.float32)
        self._rates = (1 - np.exp(-1 / spans)).astype(np.float32)
        weights = np.asarray(self.params.weights, np.float32)
        self._weights = weights / weights.sum()
        self._means = np.zeros((len(spans), layers, experts), np.float32)
        self._routed = 0.0  # moving average of routed tokens a step, at the shortest span
        self._hidden = np.zeros((layers, 1), np.float32)
        self._observed = 0
        self._last_step = -1
        self._probability: np.ndarray | None = None
        self._settled: bytes | None = None  # residency for which no swap pays, until something changes

    # -- what was seen ---------------------------------------------------------------------------

    def observe(self, step: int, touched: np.ndarray) -> None:
        """Take in the counts of one step: tokens routed to each expert, int `[layers, experts]`.

        Steps may arrive late but in order; a step already seen, or one that routed nothing, changes
        nothing.
        """
        if step <= self._last_step:
            return
        self._last_step = step
        total = int(touched.sum())
        if total == 0:
            return
        self._observed += 1
        hit = (touched > 0).astype(np.float32)
        # Until a span has filled, its average is the plain mean of what was seen.
        rates = np.maximum(self._rates, 1 / self._observed)
        self._means += (hit - self._means) * rates[:, None, None]
        self._routed += (total - self._routed) * float(rates[0])
        self._probability = self._settled = None

    def hide(self, experts_per_layer: np.ndarray | float) -> None:
        """Set how many missing experts a step hides in each layer (scalar or `[layers]`).

        `HBM time of the layer x link bytes/s / expert bytes`; 0, the default, where nothing is hidden.
        """
        hidden = np.broadcast_to(np.asarray(experts_per_layer, np.float32), (self.layers,))[:, None]
        if not np.array_equal(hidden, self._hidden):
            self._hidden = hidden.copy()
            self._settled = None

    def probability(self, load: float = 1.0) -> np.ndarray:
        """P(touched in the next step), float32 `[layers, experts]`, not to be written to.

        `load`: the next step's tokens over the recent average; 1 when nothing is known.
        """
        if self._probability is None:
            self._probability = np.tensordot(self._weights, self._means, axes=1)
            self._probability.flags.writeable = False
        if load == 1.0:
            return self._probability
        return 1 - (1 - self._probability) ** np.float32(load)

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
        flat, _ = self._cheapest(n, resident, may_go)
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
        coming, gains = self._dearest(budget, resident, absent)
        filled = min(free, len(coming))
        swaps = [Swap(expert, None) for expert in self._pairs(coming[:filled])]
        coming, gains = coming[filled:], gains[filled:]
        if len(coming):
            going, losses = self._cheapest(len(coming), resident, _candidates(resident, lendable, in_use))
            n = len(going)
            pays = (gains[:n] - losses) * self.params.horizon > 1 + self.params.hysteresis
            worth = n if pays.all() else int(np.argmin(pays))  # gains fall, losses rise
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

    def _cheapest(self, n: int, resident: np.ndarray, may_go: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
        loss = p * self._exposed(self._expected_misses(resident) + np.cumsum(p, axis=1) - p / 2)
        loss[p > 1.5] = np.inf
        return self._flat(order, loss, count)

    def _dearest(self, n: int, resident: np.ndarray, absent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Flat indices of up to `n` absent experts and the gain of having each, falling."""
        count = min(n, int(np.count_nonzero(absent)))
        if count == 0:
            return np.empty(0, np.intp), np.empty(0, np.float32)
        minus_p = np.where(absent, -self.probability(), np.float32(1))  # 1: after every real one
        if not self._hidden.any():
            chosen, values = _smallest(minus_p.ravel(), count)
            return chosen, -values
        order, minus_p = _smallest_in_rows(minus_p, count)
        p = -np.minimum(minus_p, 0)
        gain = p * self._exposed(self._expected_misses(resident) - np.cumsum(p, axis=1) + p / 2)
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
