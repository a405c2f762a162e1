"""Runs one step on the device: arrays in, sampled tokens out.

Room: the engine's only place that calls the model. Rule: decides nothing; what a step computes is
the scheduler's plan, where bytes lie is in the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rimuru.kernels.sampling import sample, token_logprobs
from rimuru.kernels.types import KVView, RecurrentView, StepMeta

from .batch import BatchBuilder, StepArrays
from .request import Request, TokenLogprobs
from .sampling_state import SamplingState
from .scheduler import StepPlan, StepResult

PROMPT_ROWS = 128  # prompt positions whose logits exist at one time


class ForwardModel(Protocol):
    """What the runner needs of a model; `rimuru.models` builds these."""

    def forward(
        self, tokens: torch.Tensor, meta: StepMeta, kv: list[KVView | RecurrentView], experts: torch.Tensor,
        touched: torch.Tensor | None, rows: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """tokens int64 `[T]` -> hidden `[T, H]`, or `[rows, H]` where rows are given."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[R, H]` -> float32 logits `[R, V]`."""
        ...


@dataclass
class Runner:
    """One model on one device."""

    model: ForwardModel
    kv: list[KVView | RecurrentView]
    expert_table: torch.Tensor  # int64 [MoE layers, E]
    touched: torch.Tensor  # int32 [MoE layers, E], tokens routed to each expert in the last step
    builder: BatchBuilder
    sampling: SamplingState
    device: torch.device

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens and sample where it says so."""
        arrays = self.builder.build(plan)
        rows = self._prompt_rows(plan, arrays)
        wanted = arrays.last_rows if rows is None else rows
        self.touched.zero_()
        hidden = self.model.forward(
            torch.from_numpy(arrays.tokens).to(self.device), self._meta(arrays), self.kv, self.expert_table,
            self.touched, torch.from_numpy(wanted).to(self.device),
        )  # fmt: skip
        result = StepResult([-1] * len(plan.requests))
        if rows is not None:
            self._score_prompts(plan, arrays, hidden, rows, result)
            hidden = hidden[torch.from_numpy(np.searchsorted(rows, arrays.last_rows)).to(self.device)]
        if arrays.sampled:
            self._sample(plan, arrays, self.model.logits(hidden), result)
        return result

    def _meta(self, a: StepArrays) -> StepMeta:
        def to(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device, non_blocking=True)

        return StepMeta(
            to(a.positions), to(a.token_slots), to(a.query_start), to(a.slots), to(a.seq_lens),
            a.max_query_len, a.max_seq_len,
        )  # fmt: skip

    def _sample(self, plan: StepPlan, arrays: StepArrays, logits: torch.Tensor, result: StepResult) -> None:
        requests = [plan.requests[i] for i in arrays.sampled]
        batch = self.sampling.batch(requests)
        drawn = sample(logits, batch)
        tokens = drawn.tokens.tolist()
        for index, token in zip(arrays.sampled, tokens, strict=True):
            result.tokens[index] = token
        if batch.num_logprobs >= 0:
            wanted = [r.params.logprobs for r in requests]
            rows = _logprob_rows(tokens, drawn, wanted)
            result.logprobs = {i: row for i, row in zip(arrays.sampled, rows, strict=True) if row is not None}

    def _prompt_rows(self, plan: StepPlan, arrays: StepArrays) -> np.ndarray | None:
        """All rows of T that need logits, when some prompt wants its own log-probabilities."""
        scored = [i for i, r in enumerate(plan.requests) if _scores_prompt(r)]
        if not scored:
            return None
        spans = [np.arange(arrays.query_start[i], arrays.query_start[i + 1]) for i in scored]
        return np.unique(np.concatenate([arrays.last_rows, *spans]))

    def _score_prompts(
        self, plan: StepPlan, arrays: StepArrays, hidden: torch.Tensor, rows: np.ndarray, result: StepResult
    ) -> None:
        for index, request in enumerate(plan.requests):
            if not _scores_prompt(request):
                continue
            start = plan.starts[index]
            # Row i of the chunk predicts token start + i + 1, where that is still of the prompt.
            n = min(plan.counts[index], request.num_prompt - 1 - start)
            at = int(np.searchsorted(rows, arrays.query_start[index]))
            k = request.params.prompt_logprobs or 0
            found: list[TokenLogprobs] = []
            for low in range(0, n, PROMPT_ROWS):
                high = min(low + PROMPT_ROWS, n)
                targets = request.tokens[start + 1 + low : start + 1 + high]
                logits = self.model.logits(hidden[at + low : at + high])
                scores = token_logprobs(logits, torch.tensor(targets, device=self.device), k)
                found += _rows(targets, *scores, [k] * len(targets))
            result.prompt_logprobs[index] = found


def _scores_prompt(request: Request) -> bool:
    return request.params.prompt_logprobs is not None and request.first_token_at is None


def _logprob_rows(tokens: list[int], drawn: Any, wanted: list[int | None]) -> list[TokenLogprobs | None]:
    return _rows(tokens, drawn.logprob, drawn.rank, drawn.top_ids, drawn.top_logprobs, wanted)


def _rows(tokens: list[int], logprob, rank, top_ids, top_logprobs, wanted: list[int | None]) -> list:
    """Cut the batch's widest logprobs down to what each row asked for; None where it asked for none."""
    values, ranks = logprob.tolist(), rank.tolist()
    ids = top_ids.tolist() if top_ids is not None else [[]] * len(tokens)
    tops = top_logprobs.tolist() if top_logprobs is not None else [[]] * len(tokens)
    return [
        None if k is None else TokenLogprobs(t, values[i], ranks[i], ids[i][:k], tops[i][:k])
        for i, (t, k) in enumerate(zip(tokens, wanted, strict=True))
    ]
