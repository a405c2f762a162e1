"""The embedding kernel against its torch twin."""

import pytest
import torch

from rimuru.kernels import reference
from rimuru.kernels.triton import embed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [48, 1100])
def test_a_row_a_token(kind, width):
    weight = torch.randn(20, width, device=DEVICE).bfloat16()
    tokens = torch.tensor([3, 0, 19, 3], dtype=kind, device=DEVICE)
    assert torch.equal(embed(tokens, weight), weight[tokens.long()])
    assert torch.equal(reference.embed(tokens, weight), weight[tokens.long()])
    assert embed(tokens[:0], weight).shape == (0, width)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_token_not_yet_known_to_the_host_comes_from_its_slot(kind):
    weight = torch.randn(20, 64, device=DEVICE)
    tokens = torch.tensor([5, -1, -1, 7, -1], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([2, 2, 0, -1, -1], dtype=torch.int32, device=DEVICE)
    latest = torch.tensor([11, -9, 13], dtype=kind, device=DEVICE)
    want = weight[torch.tensor([5, 13, 11, 7, 0], device=DEVICE)]
    assert torch.equal(embed(tokens, weight, slots, latest), want)
    assert torch.equal(reference.embed(tokens, weight, slots, latest), want)
