"""Sampling against independent models: numpy integers, sorted lists, and the laws of probability."""

from __future__ import annotations

import math

import pytest
import torch

from rimuru.kernels import sampling
from rimuru.kernels.sampling import Penalties, SamplingBatch, sample

M64, M32 = (1 << 64) - 1, (1 << 32) - 1


def make_batch(rows: int, **fields) -> SamplingBatch:
    """A batch with everything off; scalars are spread over the rows."""

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        value = torch.as_tensor(fields.pop(name, default), dtype=dtype)
        return value.expand(rows).contiguous() if value.ndim == 0 else value

    batch = SamplingBatch(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seeds=column("seeds", 0, torch.int64),
        steps=column("steps", 0, torch.int64),
    )
    for name, value in fields.items():
        setattr(batch, name, value)
    return batch


def kept(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters on one row, as a loop over a sorted list."""
    score = [x / temperature for x in row.double().tolist()]
    top = max(score)
    order = sorted(range(len(score)), key=lambda i: (-score[i], i))
    weight = {i: math.exp(score[i] - top) for i in order}
    order = [i for i in order if weight[i] >= min_p and weight[i] > 0]
    order = order[:top_k] if top_k else order
    total, mass, out = sum(weight[i] for i in order), 0.0, set()
    for i in order:
        if out and mass >= top_p * total and top_p < 1:
            break
        out.add(i)
        mass += weight[i]
    return out


def test_random_bits_match_plain_integer_arithmetic():
    def mix64(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
        return z ^ (z >> 31)

    def mix32(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
        x = ((x ^ (x >> 15)) * 0x846CA68B) & M32
        return x ^ (x >> 16)

    seeds, steps = [0, 1, -5, 2**62 + 3], [0, 7, 7, 123456789]
    got = sampling._uniform(torch.tensor(seeds), torch.tensor(steps), 1000)
    for r, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
        key = mix64((seed & M64) ^ mix64((step + 0x9E3779B97F4A7C15) & M64))
        for token in (0, 1, 17, 999):
            bits = mix32(mix32((token * 0x9E3779B1 + key) & M32) ^ (key >> 32))
            assert got[r, token].item() == pytest.approx(((bits >> 1) + 0.5) / 2**31, rel=1e-6)


def test_draws_follow_the_softmax():
    torch.manual_seed(0)
    logits = torch.randn(50) * 2
    draws = 40_000
    batch = make_batch(draws, temperature=0.7, seeds=torch.arange(draws), needs_top=False)
    counts = torch.bincount(sample(logits.expand(draws, -1), batch).tokens, minlength=50).double()
    expected = (logits.double() / 0.7).softmax(-1) * draws
    seen = expected > 5
    chi2 = ((counts - expected)[seen].square() / expected[seen]).sum()
    # chi-square with ~40 degrees of freedom: mean 40, standard deviation 9; 5 sigma.
    assert chi2 < 90


def test_steps_of_one_seed_are_independent_draws():
    draws, vocab = 20_000, 8
    batch = make_batch(draws, seeds=1234, steps=torch.arange(draws), needs_top=False)
    tokens = sample(torch.zeros(draws, vocab), batch).tokens
    pairs = torch.bincount(tokens[:-1] * vocab + tokens[1:], minlength=vocab * vocab).double()
    expected = (draws - 1) / vocab**2
    assert ((pairs - expected).square() / expected).sum() < 63 + 5 * math.sqrt(2 * 63)


def test_a_token_depends_on_its_own_row_only():
    torch.manual_seed(1)
    logits = torch.randn(16, 300)
    seeds, steps = torch.randint(1 << 40, (16,)), torch.randint(500, (16,))
    params = {
        "temperature": torch.rand(16) + 0.2,
        "top_k": torch.randint(0, 50, (16,)),
        "top_p": torch.rand(16),
        "min_p": torch.rand(16) / 10,
        "seeds": seeds,
        "steps": steps,
    }
    together = sample(logits, make_batch(16, **params)).tokens
    for r in range(16):
        alone = make_batch(1, **{name: value[r : r + 1] for name, value in params.items()})
        assert sample(logits[r : r + 1], alone).tokens.item() == together[r].item()


@pytest.mark.parametrize("round_to", [torch.float32, torch.bfloat16])
def test_filters_keep_the_sets_a_sorted_list_keeps(round_to):
    torch.manual_seed(2)
    rows, vocab = 60, 200
    logits = (torch.randn(rows, vocab) * 2).to(round_to)  # bf16 brings many ties
    batch = make_batch(
        rows,
        temperature=torch.rand(rows) + 0.3,
        top_k=torch.randint(0, 30, (rows,)),
        top_p=torch.rand(rows).where(torch.arange(rows) % 3 > 0, 1.0),
        min_p=torch.rand(rows).mul(0.2).where(torch.arange(rows) % 2 > 0, 0.0),
    )
    keep = sampling.keep_mask(logits.float() / batch.temperature[:, None], batch)
    for r in range(rows):
        want = kept(
            logits[r],
            *(float(t[r]) for t in (batch.temperature,)),
            int(batch.top_k[r]),
            float(batch.top_p[r]),
            float(batch.min_p[r]),
        )
        assert set(keep[r].nonzero().flatten().tolist()) == want, r


def test_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    for batch in (
        make_batch(1, temperature=0.0),
        make_batch(1, temperature=0.0, all_greedy=True),
        make_batch(1, top_k=1, seeds=99),
        make_batch(1, top_p=0.0, seeds=99),
    ):
        batch.num_logprobs = 3
        out = sample(logits, batch)
        assert out.tokens.item() == 1
        assert out.rank.item() == 1
        assert out.top_ids.tolist() == [[1, 2, 3]]


def test_half_of_equal_tokens_pass_top_p_of_one_half():
    batch = make_batch(1, top_p=0.5)
    assert sampling.keep_mask(torch.zeros(1, 64), batch)[0].nonzero().flatten().tolist() == list(range(32))


def test_greedy_and_random_rows_mix():
    torch.manual_seed(3)
    logits = torch.randn(64, 100)
    temperature = torch.where(torch.arange(64) % 2 == 0, 0.0, 1.0)
    tokens = sample(logits, make_batch(64, temperature=temperature, seeds=torch.arange(64))).tokens
    assert tokens[::2].tolist() == logits[::2].argmax(-1).tolist()
    assert tokens[1::2].tolist() != logits[1::2].argmax(-1).tolist()


def test_masks_bans_and_bias_are_obeyed():
    logits = torch.zeros(3, 10)
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[0] = False
    mask[0, 7] = True
    bias = (torch.tensor([1, 2, 2]), torch.tensor([4, 0, 0]), torch.tensor([100.0, 50.0, float("-inf")]))
    for seed in range(50):
        tokens = sample(logits, make_batch(3, seeds=seed, allowed_mask=mask, bias=bias)).tokens.tolist()
        assert tokens[:2] == [7, 4]
        assert tokens[2] != 0
    assert not logits.any()


def test_penalties_follow_their_formulas():
    torch.manual_seed(4)
    logits = torch.randn(2, 6)
    counts = torch.tensor([[0, 1, 3, 0, 0, 0], [0, 0, 0, 2, 0, 0]], dtype=torch.int32)
    seen = torch.tensor([[1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]], dtype=torch.bool)
    repetition, presence, frequency = torch.tensor([[1.3, 0.8], [0.5, -0.2], [0.1, 0.0]])
    pen = Penalties(repetition, presence, frequency, counts, seen)
    got = sampling.edit_logits(logits, make_batch(2, penalties=pen))
    for r in range(2):
        for t in range(6):
            x, n = float(logits[r, t]), int(counts[r, t])
            if n or seen[r, t]:
                x = x / float(pen.repetition[r]) if x > 0 else x * float(pen.repetition[r])
            x -= n * float(pen.frequency[r]) + (n > 0) * float(pen.presence[r])
            assert got[r, t].item() == pytest.approx(x, abs=1e-6)
    pen.record(torch.tensor([2, 5]))
    assert counts[0, 2] == 4
    assert counts[1, 5] == 1


def test_logprobs_come_from_the_raw_logits():
    torch.manual_seed(5)
    logits = torch.randn(4, 50, dtype=torch.bfloat16)
    batch = make_batch(4, temperature=0.3, top_k=1, num_logprobs=5, allowed_mask=torch.rand(4, 50) < 0.3)
    out = sample(logits, batch)
    reference = logits.float().log_softmax(-1)
    order = [sorted(range(50), key=lambda i: (-reference[r, i].item(), i)) for r in range(4)]
    assert out.top_ids.tolist() == [o[:5] for o in order]
    torch.testing.assert_close(out.top_logprobs, reference.gather(1, out.top_ids))
    torch.testing.assert_close(out.logprob, reference.gather(1, out.tokens[:, None])[:, 0])
    assert out.rank.tolist() == [o.index(t) + 1 for o, t in zip(order, out.tokens.tolist(), strict=True)]


def test_check_names_a_wrong_flag():
    make_batch(2).check(10)
    with pytest.raises(ValueError, match="all_greedy"):
        make_batch(2, all_greedy=True).check(10)
    with pytest.raises(ValueError, match="needs_top"):
        make_batch(2, top_k=3, needs_top=False).check(10)
    with pytest.raises(ValueError, match="allowed_mask"):
        make_batch(2, allowed_mask=torch.ones(2, 9, dtype=torch.bool)).check(10)
