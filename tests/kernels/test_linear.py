"""Dense products of few rows against the twin."""

from importlib import import_module

import pytest
import torch

from rimuru.kernels import reference

linear = import_module("rimuru.kernels.triton.linear")  # the package's attribute of that name is the function
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Against the sum in float32: rounding moves no value by more than half a unit in its last place.
LIMIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def case(dtype: torch.dtype, tokens: int, n: int, k: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(n + k)
    x, weight, bias = (torch.randn(s, generator=g) for s in ((tokens, k), (n, k), (n,)))
    return [t.to(dtype).to(DEVICE) for t in (x, weight * k**-0.5, bias)]


def agree(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    want = reference.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert got.dtype == x.dtype
    assert ((got.float() - want).norm() / want.norm()).item() < LIMIT[x.dtype]


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize(("n", "k"), [(24, 64), (37, 104)])
def test_one_row_or_two_match_the_twin(dtype, n, k):
    for tokens in (1, 3):
        x, weight, bias = case(dtype, tokens, n, k)
        agree(linear.rows_linear(x, weight, bias), x, weight, bias)
        agree(linear.rows_linear(x, weight, None), x, weight, None)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize(("n", "k"), [(37, 256), (16, 1024)])
def test_a_few_rows_match_the_twin(dtype, n, k):
    for tokens in (3, 8):
        x, weight, bias = case(dtype, tokens, n, k)
        agree(linear.few_linear(x, weight, bias), x, weight, bias)
        agree(linear.few_linear(x, weight, None), x, weight, None)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    x, weight, bias = case(torch.bfloat16, 8, 24, 512)
    together = linear.few_linear(x, weight, bias)
    assert torch.equal(linear.few_linear(x[2:5].contiguous(), weight, bias), together[2:5])


def test_a_few_rows_are_for_weights_that_fit_the_chip_at_once():
    chip = (132, 227 << 10)
    assert linear.holds_at_once(2048, 4096, *chip)
    assert linear.holds_at_once(2048, 2048, *chip)
    assert not linear.holds_at_once(5120, 2048, *chip)  # two and a half programs a multiprocessor
    assert not linear.holds_at_once(128, 2048, *chip)
    assert not linear.holds_at_once(2048, 1408, *chip)
    assert not linear.holds_at_once(2048, 8192, *chip)
    assert not linear.holds_at_once(2048, 4096, 132, 99 << 10)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 33])
def test_every_number_of_rows_is_served(tokens):
    x, weight, bias = case(torch.bfloat16, tokens, 16, 32)
    assert linear.linear(x, weight, bias).shape == (tokens, 16)
    if tokens:
        agree(linear.linear(x, weight, bias), x, weight, bias)
        wide = torch.cat([x, x], 1)
        agree(linear.linear(wide[:, 32:], weight, bias), x, weight, bias)  # rows with a stride


def test_float32_stays_with_the_dense_product():
    x, weight = torch.randn(2, 32, device=DEVICE), torch.randn(8, 32, device=DEVICE)
    assert torch.equal(linear.linear(x, weight), reference.linear(x, weight))
