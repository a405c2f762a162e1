"""From a step's plan to the flat arrays a forward pass reads.

Room: between scheduler and runner. Rule: numpy only, no device; one array per field, filled in
place of last step's, so that the same addresses can be copied to a device each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .scheduler import StepPlan


@dataclass(slots=True)
class StepArrays:
    """Views of the builder's buffers, valid until the next build. `T` tokens, `S` sequences."""

    tokens: np.ndarray  # int64 [T]
    positions: np.ndarray  # int32 [T]
    token_slots: np.ndarray  # int32 [T]
    query_start: np.ndarray  # int32 [S + 1]
    slots: np.ndarray  # int32 [S]
    seq_lens: np.ndarray  # int32 [S]
    last_rows: np.ndarray  # int64 [samples], rows of T whose logits are sampled
    sampled: list[int]  # index in the plan of each row of last_rows
    max_query_len: int
    max_seq_len: int


class BatchBuilder:
    """Buffers for the largest step, filled from a `StepPlan`."""

    def __init__(self, max_tokens: int, max_seqs: int):
        self._tokens = np.zeros(max_tokens, np.int64)
        self._positions = np.zeros(max_tokens, np.int32)
        self._token_slots = np.zeros(max_tokens, np.int32)
        self._query_start = np.zeros(max_seqs + 1, np.int32)
        self._slots = np.zeros(max_seqs, np.int32)
        self._seq_lens = np.zeros(max_seqs, np.int32)

    def build(self, plan: StepPlan) -> StepArrays:
        """Fill the buffers; costs a few microseconds a request and nothing per decoded token more."""
        total, count = plan.num_tokens, len(plan.requests)
        slots = self._slots[:count]
        slots[:] = [r.slot for r in plan.requests]
        starts = np.asarray(plan.starts, np.int32)
        counts = np.asarray(plan.counts, np.int32)
        lens = self._seq_lens[:count]
        np.add(starts, counts, out=lens)
        query_start = self._query_start[: count + 1]
        query_start[0] = 0
        np.cumsum(counts, out=query_start[1:])
        tokens, positions = self._tokens[:total], self._positions[:total]
        token_slots = self._token_slots[:total]
        if total == count:  # one token each: a decode step
            tokens[:] = [r.tokens[s] for r, s in zip(plan.requests, plan.starts, strict=True)]
            positions[:] = starts
            token_slots[:] = slots
            longest = 1
        else:
            token_slots[:] = np.repeat(slots, counts)
            positions[:] = np.arange(total, dtype=np.int32) - np.repeat(query_start[:-1] - starts, counts)
            at = 0
            for request, start, n in zip(plan.requests, plan.starts, plan.counts, strict=True):
                tokens[at : at + n] = request.tokens[start : start + n]
                at += n
            longest = int(counts.max())
        sampled = [i for i, yes in enumerate(plan.samples) if yes]
        last_rows = query_start[1:][sampled].astype(np.int64) - 1
        return StepArrays(
            tokens, positions, token_slots, query_start, slots, lens, last_rows, sampled,
            max_query_len=longest, max_seq_len=int(lens.max()) if count else 0,
        )  # fmt: skip
