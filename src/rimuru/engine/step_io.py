"""What a step reads and gives back, packed so that each way is one copy.

Room: between the runner and a GPU. Rule: fixed addresses; page-locked host buffers in a ring, each guarded
by the event behind its last use; the host writes a step's inputs while an earlier step runs.

Inputs lie in one buffer of 4-byte words, each section on a multiple of 16 bytes. Where they lie follows
from a step's shape alone, so a captured graph finds the inputs of every step of its shape:

    [seeds, steps: int64 R][tokens, positions, token_slots: T][query_start: S + 1][slots, seq_lens: S]
    [rows: R][sample_slots, temperature, top_p, min_p, top_k: R]

Outputs: `[tokens: int32 slots][touched: int32 layers x experts]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rimuru.kernels.sampling import SamplingBatch
from rimuru.kernels.types import StepMeta

from .batch import StepArrays
from .sampling_state import SamplingRows

RING = 3  # one step runs, one waits behind it, one is being written
WORDS = 4  # sections start on this multiple of words


@dataclass(frozen=True, slots=True)
class StepShape:
    """`T` tokens of `S` sequences, `R` of them sampled, with the bounds the attention kernels are told."""

    tokens: int
    seqs: int
    rows: int
    max_query_len: int
    max_seq_len: int


@dataclass(slots=True)
class StepInputs:
    """One step's inputs on the device."""

    tokens: torch.Tensor  # int32 [T]; -1: the slot's latest token
    meta: StepMeta
    rows: torch.Tensor  # int32 [R], rows of T whose logits are sampled
    sample_slots: torch.Tensor  # int32 [R]; -1: padding
    sampling: SamplingBatch


def _sections(shape: StepShape) -> tuple[list[tuple[int, int]], int]:
    """(first word, words) of each section, and the words of all."""
    t, s, r = shape.tokens, shape.seqs, shape.rows
    sections, at = [], 0
    for size in (2 * r, 2 * r, t, t, t, s + 1, s, s, r, r, r, r, r, r):
        sections.append((at, size))
        at += -(-size // WORDS) * WORDS
    return sections, at


class StepIO:
    """Buffers for steps of at most `max_tokens` tokens and `max_seqs` sequences."""

    def __init__(self, max_tokens: int, max_seqs: int, experts: tuple[int, int], device: torch.device):
        largest = StepShape(max_tokens, max_seqs, max_seqs, 1, 1)
        words = _sections(largest)[1]
        pinned = device.type == "cuda"
        self._inbox = torch.zeros(words, dtype=torch.int32, device=device)
        self._outbox = torch.zeros(max_seqs + experts[0] * experts[1], dtype=torch.int32, device=device)
        self._in = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(RING)]
        self._out = [torch.zeros_like(self._outbox, device="cpu", pin_memory=pinned) for _ in range(RING)]
        self._sent: list[torch.cuda.Event | None] = [None] * RING
        self._received: list[torch.cuda.Event | None] = [None] * RING
        self._turn = 0
        self._known: dict[StepShape, StepInputs] = {}
        self._max_seqs, self._experts = max_seqs, experts
        # The token each slot sampled last, which the next step reads without asking the host.
        self.latest = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self.touched = self._outbox[max_seqs:].view(experts)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._inbox.nbytes + self._outbox.nbytes + self.latest.nbytes

    def sampled(self, rows: int) -> torch.Tensor:
        """Where a step's tokens go: int32 `[rows]` on the device."""
        return self._outbox[:rows]

    def inputs(self, shape: StepShape, keep: bool = False) -> StepInputs:
        """The device's view of a step of this shape. `keep`: a graph will ask for it again."""
        known = self._known.get(shape)
        if known is None:
            known = self._views(shape)
            if keep:
                self._known[shape] = known
        return known

    def _views(self, shape: StepShape) -> StepInputs:
        sections, _ = _sections(shape)
        words = [self._inbox[at : at + size] for at, size in sections]
        seeds, steps = words[0].view(torch.int64), words[1].view(torch.int64)
        tokens, positions, token_slots, query_start, slots, seq_lens, rows, sample_slots = words[2:10]
        temperature, top_p, min_p = (w.view(torch.float32) for w in words[10:13])
        meta = StepMeta(
            positions, token_slots, query_start, slots, seq_lens, shape.max_query_len, shape.max_seq_len
        )
        sampling = SamplingBatch(temperature, words[13], top_p, min_p, seeds, steps)
        return StepInputs(tokens, meta, rows, sample_slots, sampling)

    def send(self, shape: StepShape, arrays: StepArrays, sampling: SamplingRows) -> None:
        """Start the copy of a step's inputs, padded to `shape`, behind the work launched so far.

        A padding token has slot -1 and writes nowhere; a padding sequence has length 0, and one query of
        its own in a step of decodes, none otherwise; a padding row is greedy and nobody's.
        """
        turn = self._turn = (self._turn + 1) % RING
        sent = self._sent[turn]
        if sent is not None:
            sent.synchronize()
        sections, words = _sections(shape)
        buffer = self._in[turn].numpy()
        part = [buffer[at : at + size] for at, size in sections]
        t, s, r = len(arrays.tokens), len(arrays.slots), len(arrays.sampled)
        part[0].view(np.int64)[:r] = sampling.seeds
        part[1].view(np.int64)[:r] = sampling.steps
        _fill(part[2], arrays.tokens, 0)
        _fill(part[3], arrays.positions, 0)
        _fill(part[4], arrays.token_slots, -1)
        part[5][: s + 1] = arrays.query_start
        part[5][s + 1 :] = np.arange(s + 1, shape.seqs + 1) if shape.max_query_len == 1 else t
        _fill(part[6], arrays.slots, 0)
        _fill(part[7], arrays.seq_lens, 0)
        _fill(part[8], arrays.last_rows, 0)
        _fill(part[9], sampling.slots, -1)
        for at, values in zip((10, 11, 12), sampling.floats, strict=True):
            _fill(part[at].view(np.float32), values, 0)
        _fill(part[13], sampling.top_k, 0)
        self._inbox[:words].copy_(self._in[turn][:words], non_blocking=True)
        self._sent[turn] = self._event()

    def receive(self) -> StepOutputs:
        """Start the copy of the outputs of the step launched last."""
        turn = self._turn
        if (received := self._received[turn]) is not None:
            received.synchronize()
        self._out[turn].copy_(self._outbox, non_blocking=True)
        event = self._received[turn] = self._event()
        return StepOutputs(self._out[turn].numpy(), self._max_seqs, self._experts, event)

    def _event(self) -> torch.cuda.Event | None:
        """Behind the work launched so far; None where work is done at once."""
        return torch.cuda.current_stream().record_event() if self._inbox.is_cuda else None


@dataclass(slots=True)
class StepOutputs:
    """A step's outputs on their way; valid until `RING` more steps were sent."""

    words: np.ndarray
    max_seqs: int
    experts: tuple[int, int]
    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the step has ended."""
        if self.event is not None:
            self.event.synchronize()

    def tokens(self, rows: int) -> list[int]:
        """The sampled tokens; after `wait`."""
        return self.words[:rows].tolist()

    def touched(self) -> np.ndarray:
        """int32 `[layers, experts]`, tokens routed to each expert; after `wait`."""
        return self.words[self.max_seqs :].reshape(self.experts).copy()


def _fill(part: np.ndarray, values: np.ndarray, padding: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = padding
