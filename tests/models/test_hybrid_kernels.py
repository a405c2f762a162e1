"""The twins of the recurrent kernels against the plain recurrence, over pages in random places."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.harness import step_meta

from rimuru.kernels.reference import causal_conv, gated_delta_rule
from rimuru.kernels.types import StateLayout, StateView

GRAIN = 256
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 8, 5


def view(shape: tuple[int, ...], slots: int = 4) -> StateView:
    """The second of three layers' window on NaN-filled pages, slots in reverse order."""
    layout = StateLayout(3, shape, GRAIN, torch.float32)
    step = -(-layout.page_bytes // GRAIN)
    pool = torch.full(((slots + 1) * step * GRAIN // 4,), float("nan"))
    return StateView(pool, torch.arange(slots - 1, -1, -1, dtype=torch.int32) * step + 1, 1, layout)


def inputs(tokens: int, seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(tokens, *shape, generator=rng)

    return {
        "q": draw(KEY_HEADS, KEY_DIM), "k": draw(KEY_HEADS, KEY_DIM), "v": draw(VALUE_HEADS, VALUE_DIM),
        "decay": -draw(VALUE_HEADS).exp() * 0.1, "beta": draw(VALUE_HEADS).sigmoid(),
    }  # fmt: skip


def recurrence(q, k, v, decay, beta) -> torch.Tensor:
    """The definition, a token and a head at a time, in float64."""
    q, k, v, decay, beta = (x.double() for x in (q, k, v, decay, beta))
    out = torch.zeros_like(v)
    per = VALUE_HEADS // KEY_HEADS
    for h in range(VALUE_HEADS):
        state = torch.zeros(KEY_DIM, VALUE_DIM, dtype=torch.float64)
        for t in range(len(v)):
            key = k[t, h // per] / (k[t, h // per].square().sum() + 1e-6).sqrt()
            query = q[t, h // per] / (q[t, h // per].square().sum() + 1e-6).sqrt() / KEY_DIM**0.5
            state = state * decay[t, h].exp()
            state = state + torch.outer(key, beta[t, h] * (v[t, h] - key @ state))
            out[t, h] = query @ state
    return out.float()


@pytest.mark.parametrize("chunks", [[150], [1] * 9, [64, 1, 65, 2], [3, 128, 1, 1]])
def test_the_delta_rule_is_the_recurrence_however_it_is_cut(chunks):
    total = sum(chunks)
    ours, neighbour = inputs(total, 1), inputs(total, 2)
    want, other = recurrence(**ours), recurrence(**neighbour)
    window, at = view((VALUE_HEADS, KEY_DIM, VALUE_DIM)), 0
    for n in chunks:
        # A neighbour in another slot that begins in each step anew, beside the sequence that goes on.
        part = {name: torch.cat([x[at : at + n], neighbour[name][:n]]) for name, x in ours.items()}
        got = gated_delta_rule(*part.values(), window, step_meta([(2, at, n), (0, 0, n)]))
        torch.testing.assert_close(got[:n], want[at : at + n], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(got[n:], other[:n], atol=2e-6, rtol=1e-5)
        at += n


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("chunks", [[40], [1] * 7, [2, 1, 5, 3]])
def test_the_convolution_sees_the_inputs_of_earlier_steps(chunks, kernel):
    channels, total = 7, sum(chunks)
    x, weight = torch.randn(total, channels), torch.randn(channels, kernel)
    padded = F.pad(x.T, (kernel - 1, 0))
    want = F.silu(F.conv1d(padded[None], weight[:, None], groups=channels)[0].T)
    window, at = view((kernel - 1, channels)), 0
    for n in chunks:
        meta = step_meta([(1, at, n), (3, 0, 2)])
        got = causal_conv(torch.cat([x[at : at + n], x[:2]]), weight, window, meta)
        torch.testing.assert_close(got[:n], want[at : at + n], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(got[n:], want[:2], atol=1e-6, rtol=1e-5)
        at += n


def test_padding_behind_a_step_changes_nothing():
    """A GPU pads its steps: more tokens than sequences own, sequences without any."""
    channels, weight = 7, torch.randn(7, 4)
    x, part = torch.randn(9, channels), inputs(9, 4)
    for sequences in ([(1, 0, 4), (3, 0, 1)], []):
        exact = sum(n for *_, n in sequences)
        meta = step_meta(sequences or [(0, 0, 0)])
        meta.query_start = torch.cat([meta.query_start, torch.full((2,), exact, dtype=torch.int32)])
        meta.slots, meta.seq_lens = F.pad(meta.slots, (0, 2)), F.pad(meta.seq_lens, (0, 2))
        windows = [(view((3, channels)), view((VALUE_HEADS, KEY_DIM, VALUE_DIM))) for _ in range(2)]
        got = [
            causal_conv(x, weight, windows[0][0], meta),
            gated_delta_rule(*part.values(), windows[0][1], meta),
        ]
        if sequences:
            plain, short = step_meta(sequences), {name: t[:exact] for name, t in part.items()}
            want = [
                causal_conv(x[:exact], weight, windows[1][0], plain),
                gated_delta_rule(*short.values(), windows[1][1], plain),
            ]
            for mine, its in zip(got, want, strict=True):
                torch.testing.assert_close(mine[:exact], its, atol=1e-6, rtol=1e-5)
        for mine, its in zip(*windows, strict=True):
            torch.testing.assert_close(mine.pool, its.pool, equal_nan=True, atol=1e-6, rtol=1e-5)


def test_only_the_pages_of_live_sequences_are_written():
    window = view((VALUE_HEADS, KEY_DIM, VALUE_DIM))
    meta = step_meta([(2, 0, 3), (1, 0, 1)])
    meta.seq_lens[1] = 0
    gated_delta_rule(*inputs(4, 3).values(), window, meta)
    written = (~window.pool.isnan()).nonzero().flatten()
    start = int(window.table[2]) * window.layout.grain_elems + window.layout.layer_elems
    assert written.tolist() == list(range(start, start + window.layout.layer_elems))
