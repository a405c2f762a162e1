"""Runs one step on the device: arrays in, sampled tokens out.

Room: the engine's only place that calls the model. Rule: decides nothing; what a step computes is
the scheduler's plan, where bytes lie is in the tables. This one computes a step when it is launched; `graphs`
has the one that leaves a GPU working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from rimuru.kernels.sampling import SampleOutput, sample, token_logprobs
from rimuru.kernels.types import KVView, RecurrentView, StepMeta

from .batch import BatchBuilder, StepArrays
from .request import Request, TokenLogprobs
from .sampling_state import SamplingState
from .scheduler import StepPlan, StepResult
from .sizes import FEW_ROWS

ExpertRows = torch.Tensor | Sequence[Iterable[torch.Tensor]]  # the EXPERT table, or rows that arrive


class ForwardModel(Protocol):
    """What the runner needs of a model; `rimuru.models` builds these."""

    def forward(
        self, tokens: torch.Tensor, meta: StepMeta, kv: list[KVView | RecurrentView], experts: ExpertRows,
        touched: torch.Tensor | None, rows: torch.Tensor | None = None, latest: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """tokens int32 or int64 `[T]` -> hidden `[T, H]`, or `[rows, H]` where rows are given.

        latest: int32 by slot, the tokens that stand in for negative ones.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[R, H]` -> logits `[R, V]` in the model's dtype."""
        ...


class Launched(Protocol):
    """A step under way."""

    plan: StepPlan

    def result(self) -> tuple[StepResult, np.ndarray]:
        """Waits for the step: what it chose, and the tokens routed to each expert, int32 `[L, E]`."""
        ...


@dataclass(slots=True)
class Computed:
    """A step that ended before it was asked for."""

    plan: StepPlan
    chosen: StepResult
    touched: np.ndarray

    def result(self) -> tuple[StepResult, np.ndarray]:
        return self.chosen, self.touched


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
    overlaps = False  # whether the next step may be launched before this one has ended
    on_logits: Callable[[list[Request], torch.Tensor], None] | None = field(default=None, kw_only=True)

    def launch(self, plan: StepPlan) -> Launched:
        """Compute the plan's tokens and sample where it says so."""
        arrays = self.builder.build(plan)
        scored = prompt_rows(plan, arrays)
        wanted = arrays.last_rows if scored is None else scored
        self.touched.zero_()
        hidden = self.model.forward(
            torch.from_numpy(arrays.tokens).to(self.device), self._meta(arrays), self.kv, self.expert_table,
            self.touched, torch.from_numpy(wanted).to(self.device),
        )  # fmt: skip
        result = StepResult([-1] * len(plan.requests))
        if scored is not None:
            scores = PromptScores(self.model, plan, arrays, hidden, scored)
            result.prompt_logprobs = scores.read()
            hidden = hidden[torch.from_numpy(np.searchsorted(scored, arrays.last_rows)).to(self.device)]
        if arrays.sampled:
            self._sample(plan, arrays, self.model.logits(hidden), result)
        return Computed(plan, result, self.touched.cpu().numpy().copy())

    def _meta(self, a: StepArrays) -> StepMeta:
        def to(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        return StepMeta(
            to(a.positions), to(a.token_slots), to(a.query_start), to(a.slots), to(a.seq_lens),
            a.max_query_len, a.max_seq_len,
        )  # fmt: skip

    def _sample(self, plan: StepPlan, arrays: StepArrays, logits: torch.Tensor, result: StepResult) -> None:
        requests = [plan.requests[i] for i in arrays.sampled]
        if self.on_logits is not None:
            self.on_logits(requests, logits)
        drawn = sample(logits, self.sampling.batch(requests))
        tokens = drawn.tokens.tolist()
        for index, token in zip(arrays.sampled, tokens, strict=True):
            result.tokens[index] = token
        if drawn.logprob is not None:
            result.logprobs = sampled_logprobs(plan, arrays.sampled, tokens, drawn)


def prompt_rows(plan: StepPlan, arrays: StepArrays) -> np.ndarray | None:
    """All rows of T that need logits, ascending, when some prompt wants its own log-probabilities."""
    scored = [i for i in range(len(plan.requests)) if _scores_prompt(plan, i)]
    if not scored:
        return None
    spans = [np.arange(arrays.query_start[i], arrays.query_start[i + 1]) for i in scored]
    return np.unique(np.concatenate([arrays.last_rows, *spans]))


class PromptScores:
    """The log-probabilities of a step's prompt tokens, on their way from the device.

    hidden `[len(rows), H]` are the hidden states of `rows`, see `prompt_rows`.
    """

    def __init__(
        self, model: ForwardModel, plan: StepPlan, arrays: StepArrays, hidden: torch.Tensor, rows: np.ndarray
    ):
        self._parts: dict[int, list[tuple[list[int], int, tuple]]] = {}
        for index, request in enumerate(plan.requests):
            if not _scores_prompt(plan, index):
                continue
            start = plan.starts[index]
            # Row i of the chunk predicts token start + i + 1, where that is still of the prompt.
            n = min(plan.counts[index], request.num_prompt - 1 - start)
            at = int(np.searchsorted(rows, arrays.query_start[index]))
            k = request.params.prompt_logprobs or 0
            parts = self._parts[index] = []
            for low in range(0, n, FEW_ROWS):
                high = min(low + FEW_ROWS, n)
                targets = request.tokens[start + 1 + low : start + 1 + high]
                logits = model.logits(hidden[at + low : at + high])
                scores = token_logprobs(logits, torch.tensor(targets, device=hidden.device), k)
                parts.append((targets, k, tuple(to_host(t) for t in scores)))

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """By index in the plan; the device must have got here."""
        found: dict[int, list[TokenLogprobs]] = {}
        for index, parts in self._parts.items():
            found[index] = []
            for targets, k, (logprob, rank, ids, tops) in parts:
                found[index] += _rows(targets, logprob, rank, ids, tops, [k] * len(targets))
        return found


def to_host(t: torch.Tensor | None) -> torch.Tensor | None:
    """A copy on the host, complete when the work launched so far is."""
    if t is None or not t.is_cuda:
        return t
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)


def sampled_logprobs(
    plan: StepPlan, sampled: list[int], tokens: list[int], drawn: SampleOutput
) -> dict[int, TokenLogprobs]:
    """The log-probabilities that requests asked for, by index in the plan. `drawn`, of the requests
    `sampled`, lies on the host."""
    wanted = [plan.requests[i].params.logprobs for i in sampled]
    rows = _rows(tokens, drawn.logprob, drawn.rank, drawn.top_ids, drawn.top_logprobs, wanted)
    return {i: row for i, row in zip(sampled, rows, strict=True) if row is not None}


def _scores_prompt(plan: StepPlan, index: int) -> bool:
    """Whether this step's tokens of a request are of a prompt that wants its scores."""
    request, start = plan.requests[index], plan.starts[index]
    if request.params.prompt_logprobs is None or request.first_token_at is not None:
        return False
    return start == 0 or start < request.num_prompt - 1


def _rows(tokens: list[int], logprob, rank, top_ids, top_logprobs, wanted: list[int | None]) -> list:
    """Cut the batch's widest logprobs down to what each row asked for; None where it asked for none."""
    values, ranks = logprob.tolist(), rank.tolist()
    ids = top_ids.tolist() if top_ids is not None else [[]] * len(tokens)
    tops = top_logprobs.tolist() if top_logprobs is not None else [[]] * len(tokens)
    return [
        None if k is None else TokenLogprobs(t, values[i], ranks[i], ids[i][:k], tops[i][:k])
        for i, (t, k) in enumerate(zip(tokens, wanted, strict=True))
    ]
