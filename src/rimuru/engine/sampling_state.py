"""Each slot's sampling parameters, and the batch of them a step needs.

Room: between runner and sampler. Rule: what a request never asked for costs nothing; count tables
exist only for slots with penalties, masks only while one is needed.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np
import torch

from rimuru.kernels.sampling import GREEDY_BELOW, Penalties, SamplingBatch

from .request import Request


@dataclass(slots=True)
class SamplingRows:
    """What every row of a step's logits needs, on the host. `R` rows."""

    slots: np.ndarray  # int32 [R]
    floats: np.ndarray  # float32 [3, R]: temperature, top_p, min_p
    top_k: np.ndarray  # int32 [R]
    seeds: np.ndarray  # int64 [R]
    steps: np.ndarray  # int64 [R]

    @property
    def all_greedy(self) -> bool:
        return bool((self.floats[0] < GREEDY_BELOW).all())

    @property
    def needs_top(self) -> bool:
        return bool((self.top_k > 0).any() or (self.floats[1] < 1).any())


class SamplingState:
    """Rows of parameters by slot, filled at admission, gathered by each step."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device
        self._floats = np.zeros((3, slots), np.float32)  # temperature, top_p, min_p
        self._top_k = np.zeros(slots, np.int32)
        self._seeds = np.zeros(slots, np.int64)
        self._owner: list[Request | None] = [None] * slots
        self._plain = np.ones(slots, bool)  # asks for nothing but a draw
        self._counts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # slot -> output counts, prompt seen
        self._counted: dict[int, int] = {}  # slot -> output tokens already counted

    def _enter(self, request: Request) -> None:
        p, slot = request.params, request.slot
        self._owner[slot] = request
        self._floats[:, slot] = p.temperature, p.top_p, p.min_p
        self._top_k[slot] = max(p.top_k, 0)
        if request.seed is None:
            # One seed for the request's life, so that a resumed request draws on as it would have.
            request.seed = p.seed if p.seed is not None else secrets.randbits(63)
        self._seeds[slot] = request.seed
        self._counts.pop(slot, None)
        if p.penalised:
            seen = torch.zeros(self.vocab_size, dtype=torch.bool)
            seen[torch.tensor(request.tokens[: request.num_prompt])] = True
            counts = torch.zeros(self.vocab_size, dtype=torch.int32)
            self._counts[slot] = counts.to(self.device), seen.to(self.device)
            self._counted[slot] = 0
        self._plain[slot] = not (
            p.penalised
            or p.logprobs is not None
            or p.logit_bias
            or p.allowed_token_ids is not None
            or p.min_tokens
            or p.grammar is not None
        )

    def rows(self, requests: list[Request]) -> SamplingRows:
        """Parameters of the requests that sample in this step, in that order."""
        for r in requests:
            if self._owner[r.slot] is not r:
                self._enter(r)
        n = len(requests)
        slots = np.fromiter((r.slot for r in requests), np.int32, n)
        steps = np.fromiter((len(r.tokens) - r.num_prompt for r in requests), np.int64, n)
        return SamplingRows(slots, self._floats[:, slots], self._top_k[slots], self._seeds[slots], steps)

    def batch(self, requests: list[Request]) -> SamplingBatch:
        """The same on the device, with what only some requests asked for."""
        out = self._upload(self.rows(requests))
        self.add_extras(out, requests)
        return out

    def _upload(self, rows: SamplingRows) -> SamplingBatch:
        def to(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

        temperature, top_p, min_p = (to(f) for f in rows.floats)
        return SamplingBatch(
            temperature, to(rows.top_k), top_p, min_p, to(rows.seeds), to(rows.steps),
            all_greedy=rows.all_greedy, needs_top=rows.needs_top,
        )  # fmt: skip

    def add_extras(self, out: SamplingBatch, requests: list[Request]) -> bool:
        """Add what only some requests asked for to their batch; whether any did."""
        if self._plain[[r.slot for r in requests]].all():
            return False
        out.num_logprobs = max(-1 if r.params.logprobs is None else r.params.logprobs for r in requests)
        rows: list[int] = []
        ids: list[int] = []
        values: list[float] = []
        for row, r in enumerate(requests):
            if r.params.logit_bias:
                rows += [row] * len(r.params.logit_bias)
                ids += r.params.logit_bias.keys()
                values += r.params.logit_bias.values()
            if len(r.tokens) - r.num_prompt < r.params.min_tokens:
                rows += [row] * len(r.stop_ids)
                ids += r.stop_ids
                values += [-math.inf] * len(r.stop_ids)
        if rows:
            out.bias = tuple(
                torch.tensor(x, dtype=t, device=self.device)
                for x, t in ((rows, torch.int64), (ids, torch.int64), (values, torch.float32))
            )  # type: ignore[assignment]
        if any(r.params.allowed_token_ids is not None or r.constraint is not None for r in requests):
            mask = torch.ones(len(requests), self.vocab_size, dtype=torch.bool)
            for row, r in enumerate(requests):
                if r.params.allowed_token_ids is not None:
                    mask[row] = False
                    mask[row, r.params.allowed_token_ids] = True
                elif r.constraint is not None:
                    r.constraint.advance(r.tokens, r.num_prompt)
                    r.constraint.fill(mask[row].numpy())
            out.allowed_mask = mask.to(self.device)
        if any(r.slot in self._counts for r in requests):
            out.penalties = self._penalties(requests)
        return True

    def _penalties(self, requests: list[Request]) -> Penalties:
        counts = torch.zeros(len(requests), self.vocab_size, dtype=torch.int32, device=self.device)
        seen = torch.zeros(len(requests), self.vocab_size, dtype=torch.bool, device=self.device)
        for row, r in enumerate(requests):
            if r.slot not in self._counts:
                continue
            mine, prompt = self._counts[r.slot]
            fresh = r.tokens[r.num_prompt + self._counted[r.slot] :]
            if fresh:  # one token a step; all of them after a preemption
                index = torch.tensor(fresh, device=self.device)
                mine.scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))
                self._counted[r.slot] += len(fresh)
            counts[row], seen[row] = mine, prompt
        columns = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        values = [[getattr(r.params, c) for r in requests] for c in columns]
        rep, pres, freq = (torch.tensor(v, dtype=torch.float32, device=self.device) for v in values)
        return Penalties(rep, pres, freq, counts, seen)
