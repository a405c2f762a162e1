"""Steps on a GPU: captured once for each shape, replayed whatever the pages hold, one ahead of the host.

Room: the runner of GPUs. Rule: a launch waits for nothing. All that changes from step to step is read on the
device, from the step's inputs and the page tables, so a graph outlives every move of the boundary; where an
expert lies is no part of a shape.

A decode step of n sequences takes the smallest decode graph that holds n, a step with prompt tokens the
smallest mixed graph that holds its tokens; attention's bound on lengths is rounded up too. Larger steps, and
those whose prompts want log-probabilities, are launched kernel by kernel from the same inputs.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from rimuru.experts.stream import ExpertStream
from rimuru.kernels.sampling import SampleOutput, SamplingBatch, choose, edit_logits, token_logprobs
from rimuru.kernels.types import KVView, RecurrentView

from .batch import BatchBuilder, StepArrays
from .request import Request
from .runner import (
    ExpertRows,
    ForwardModel,
    Launched,
    PromptScores,
    Runner,
    prompt_rows,
    sampled_logprobs,
    to_host,
)
from .sampling_state import SamplingRows, SamplingState
from .scheduler import StepPlan, StepResult
from .sizes import FEW_ROWS, GRAPH_TOKENS
from .step_io import StepInputs, StepIO, StepOutputs, StepShape

logger = logging.getLogger("rimuru.engine")

DECODE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
MIXED_SIZES = (32, 64, 128, 192, 256, 320, 384, 448, GRAPH_TOKENS)
# Attention splits sequences by a bound on their lengths: the closer the bound, the better it does.
LENGTHS = (2048, 4096, 8192, 16384, 32768)
MIXED_LENGTHS = (8192,)  # prompts' tokens take most of a mixed step


@dataclass(slots=True)
class _UnderWay:
    """A launched step of a `GraphRunner`."""

    plan: StepPlan
    arrays: StepArrays
    outputs: StepOutputs
    drawn: list[tuple[int, SampleOutput]]  # scores of rows from the first on
    scores: PromptScores | None

    def result(self) -> tuple[StepResult, np.ndarray]:
        self.outputs.wait()
        result = StepResult([-1] * len(self.plan.requests))
        tokens = self.outputs.tokens(len(self.arrays.sampled))
        for index, token in zip(self.arrays.sampled, tokens, strict=True):
            result.tokens[index] = token
        for first, drawn in self.drawn:
            rows = slice(first, first + len(drawn.tokens))
            result.logprobs |= sampled_logprobs(self.plan, self.arrays.sampled[rows], tokens[rows], drawn)
        if self.scores is not None:
            result.prompt_logprobs = self.scores.read()
        return result, self.outputs.touched()


class GraphRunner(Runner):
    """A runner that launches and returns. `overlaps` is false where a step's work needs the host."""

    def __init__(
        self,
        model: ForwardModel,
        kv: list[KVView | RecurrentView],
        expert_table: torch.Tensor,
        builder: BatchBuilder,
        sampling: SamplingState,
        io: StepIO,
        *,
        max_tokens: int,
        max_seqs: int,
        max_model_len: int,
        stream: ExpertStream | None = None,
        overlaps: bool = True,
    ):
        """`stream` brings experts from host memory ahead of the larger steps."""
        super().__init__(model, kv, expert_table, io.touched, builder, sampling, io.latest.device)
        self.stream, self.overlaps = stream, overlaps
        self.io, self.max_tokens, self.max_seqs = io, max_tokens, max_seqs
        self._lengths = [n for n in LENGTHS if n < max_model_len] + [max_model_len]
        self._mixed_lengths = [n for n in MIXED_LENGTHS if n < max_model_len] + [max_model_len]
        self._decode = [n for n in DECODE_SIZES if n < max_seqs] + [max_seqs]
        self._mixed = [n for n in MIXED_SIZES if n <= max_tokens]
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # and its logits
        # Of the start; the first includes the others.
        self.prepare_seconds = self.compile_seconds = self.capture_seconds = 0.0

    # -- shapes ------------------------------------------------------------------------------------

    def _bound(self, length: int, mixed: bool) -> int:
        bounds = self._mixed_lengths if mixed else self._lengths
        return bounds[bisect_left(bounds, length)]

    def _exact(self, arrays: StepArrays) -> StepShape:
        tokens, mixed = len(arrays.tokens), arrays.max_query_len > 1
        length = self._bound(arrays.max_seq_len, mixed)
        return StepShape(
            tokens, len(arrays.slots), len(arrays.sampled), tokens if mixed else 1, length
        )  # fmt: skip

    def _padded(self, exact: StepShape) -> StepShape | None:
        """The shape of the graph that holds a step; None where there is none."""
        if exact.max_query_len == 1:
            at = bisect_left(self._decode, exact.seqs)
            return self._decode_shape(self._decode[at], exact.max_seq_len)
        at = bisect_left(self._mixed, exact.tokens)
        return self._mixed_shape(self._mixed[at], exact.max_seq_len) if at < len(self._mixed) else None

    @staticmethod
    def _decode_shape(size: int, length: int) -> StepShape:
        return StepShape(size, size, size, 1, length)

    def _mixed_shape(self, tokens: int, length: int) -> StepShape:
        return StepShape(tokens, self.max_seqs, self.max_seqs, tokens, length)

    def small_shapes(self) -> list[StepShape]:
        """The shapes that have graphs."""
        decode = [self._decode_shape(n, length) for n in self._decode for length in self._lengths]
        return decode + [self._mixed_shape(n, length) for n in self._mixed for length in self._mixed_lengths]

    # -- before the first step ---------------------------------------------------------------------

    def prepare(self, capture: bool, report: Callable[[str, float], None]) -> None:
        """Compile whatever a step may launch, take the memory of the largest, and capture graphs.

        Steps whose capture fails, or all without `capture`, are launched kernel by kernel.
        """
        from rimuru.kernels.triton.ahead import compiling  # needs a GPU's driver

        began = time.monotonic()
        large = [self._large_shape(n, s, length) for n, s, length in self._larger_steps()]
        small = self.small_shapes()
        stream, pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        # The largest first: what it needs holds all others.
        shapes = sorted(large + small, key=lambda s: -s.tokens)
        with compiling():
            for shape in shapes:
                self._send_padding(shape)
                self._compute(self.io.inputs(shape))
        torch.cuda.synchronize(self.device)
        self.compile_seconds = time.monotonic() - began
        for done, shape in enumerate(shapes):
            report("warming up", done / len(shapes))
            inputs = self.io.inputs(shape, keep=shape in small)
            self._send_padding(shape)
            self._compute(inputs)
            if not capture or shape not in small:
                continue
            torch.cuda.synchronize(self.device)
            graph, started = torch.cuda.CUDAGraph(), time.monotonic()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    logits = self._compute(inputs)
            except RuntimeError as error:
                logger.warning("steps of up to %d tokens run without a graph: %s", shape.tokens, error)
                torch.cuda.synchronize(self.device)
                continue
            self._graphs[shape] = graph, _borrowed(logits)
            del logits  # the next capture takes its place
            self.capture_seconds += time.monotonic() - started
        torch.cuda.synchronize(self.device)
        self.prepare_seconds = time.monotonic() - began
        logger.info("%d graphs captured in %.1f s", len(self._graphs), self.prepare_seconds)

    def _larger_steps(self) -> Iterator[tuple[int, int, int]]:
        """(tokens, sequences, length bound) of steps above the graphs: one for each kernel they may take.

        Expert tiles follow from the tokens, attention's splits from the sequences and the bound.
        """
        least = MIXED_SIZES[-1] + 1
        if self.max_tokens < least:
            return
        sizes, size = {least, self.max_tokens}, 2 * least
        while size < self.max_tokens:
            sizes.add(size)
            size *= 2
        for tokens in sizes:
            for seqs in {1, min(64, self.max_seqs), self.max_seqs}:
                yield tokens, seqs, self._mixed_lengths[-1]
        for seqs in (1 << i for i in range(self.max_seqs.bit_length())):
            for length in self._mixed_lengths:
                yield least, seqs, length

    @staticmethod
    def _large_shape(tokens: int, seqs: int, length: int) -> StepShape:
        return StepShape(tokens, seqs, seqs, max(2, tokens), length)

    def _send_padding(self, shape: StepShape) -> None:
        none32, none64 = np.empty(0, np.int32), np.empty(0, np.int64)
        arrays = StepArrays(
            none64, none32, none32, np.zeros(1, np.int32), none32, none32, none64, [], 1, 1
        )  # fmt: skip
        rows = SamplingRows(none32, np.empty((3, 0), np.float32), none32, none64, none64)
        self.io.send(shape, arrays, rows)

    # -- a step ------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Launched:
        """Start the plan's step behind those launched before; see `Runner.launch`."""
        arrays = self.builder.build(plan)
        scored = prompt_rows(plan, arrays)
        shape = self._exact(arrays)
        found = None
        if scored is None and (padded := self._padded(shape)) is not None:
            shape = padded  # without a graph too: what was compiled before the first step is all there is
            found = self._graphs.get(shape)
        inputs = self.io.inputs(shape)
        requests = [plan.requests[i] for i in arrays.sampled]
        self.io.send(shape, arrays, self.sampling.rows(requests))
        scores = None
        if found is not None:
            graph, logits = found
            graph.replay()
        else:
            rows = inputs.rows if scored is None else torch.from_numpy(scored).to(self.device)
            with self._experts(shape.tokens) as experts:
                hidden = self._forward(inputs, rows, experts)
            if scored is not None:
                scores = PromptScores(self.model, plan, arrays, hidden, scored)
                hidden = hidden[torch.from_numpy(np.searchsorted(scored, arrays.last_rows)).to(self.device)]
            logits = self._draw(inputs, hidden)
        if self.on_logits is not None:
            self.on_logits(requests, logits)
        drawn = []
        for first in range(0, len(requests), FEW_ROWS):
            scored_rows = self._again(requests[first : first + FEW_ROWS], inputs, logits, first)
            if scored_rows is not None:
                drawn.append((first, scored_rows))
        return _UnderWay(plan, arrays, self.io.receive(), drawn, scores)

    def _compute(self, inputs: StepInputs) -> torch.Tensor:
        """The whole step: logits `[R, V]`; the tokens go to where `receive` looks for them."""
        return self._draw(inputs, self._forward(inputs, inputs.rows, self.expert_table))

    @contextmanager
    def _experts(self, tokens: int) -> Iterator[ExpertRows]:
        """Where an eager step finds the experts."""
        if self.stream is None:
            yield self.expert_table
            return
        with self.stream.step(tokens) as rows:
            yield self.expert_table if rows is None else rows

    def _forward(self, inputs: StepInputs, rows: torch.Tensor, experts: ExpertRows) -> torch.Tensor:
        self.touched.zero_()
        return self.model.forward(
            inputs.tokens, inputs.meta, self.kv, experts, self.touched, rows, self.io.latest
        )

    def _draw(self, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.logits(hidden)
        if len(logits):
            self._choose(inputs, logits, inputs.sampling)
        return logits

    def _choose(self, inputs: StepInputs, logits: torch.Tensor, batch: SamplingBatch, first: int = 0) -> None:
        """Draw for the rows from `first` on."""
        rows = slice(first, first + len(logits))
        out, slots = self.io.sampled(rows.stop)[rows], inputs.sample_slots[rows]
        choose(logits, batch, out=out, latest=self.io.latest, slots=slots)

    def _again(
        self, requests: list[Request], inputs: StepInputs, logits: torch.Tensor, first: int
    ) -> SampleOutput | None:
        """Draw again where requests, those of the rows from `first` on, asked for more than the captured draw
        knows; their scores, where one wants them."""
        rows = slice(first, first + len(requests))
        logits, batch = logits[rows], _part(inputs.sampling, rows)
        if not self.sampling.add_extras(batch, requests):
            return None
        if batch.penalties is not None or batch.bias is not None or batch.allowed_mask is not None:
            self._choose(inputs, edit_logits(logits, batch), batch, first)
        if batch.num_logprobs < 0:
            return None
        tokens = self.io.sampled(rows.stop)[rows].long()
        scores = token_logprobs(logits, tokens, batch.num_logprobs)
        return SampleOutput(tokens, *(to_host(t) for t in scores))


class _Address:
    """What torch makes a tensor of that owns nothing."""

    def __init__(self, t: torch.Tensor):
        self.__cuda_array_interface__ = {
            "shape": (t.nbytes,), "typestr": "|u1", "data": (t.data_ptr(), False), "version": 3,
        }  # fmt: skip


def _borrowed(logits: torch.Tensor) -> torch.Tensor:
    """The same memory, not owned: all graphs share a pool, and a tensor that kept its logits would keep a set
    for every shape (0.6 GB for a vocabulary of 152k). They hold from a replay to the next one."""
    return torch.as_tensor(_Address(logits), device=logits.device).view(logits.dtype).view(logits.shape)


def _part(batch: SamplingBatch, rows: slice) -> SamplingBatch:
    """Some rows of a batch that asks for nothing more."""
    return SamplingBatch(
        batch.temperature[rows], batch.top_k[rows], batch.top_p[rows], batch.min_p[rows],
        batch.seeds[rows], batch.steps[rows],
    )  # fmt: skip
