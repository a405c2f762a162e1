"""The Triton router against its torch twin."""

import pytest
import torch

from rimuru.kernels import reference
from rimuru.kernels.triton import route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_matches_the_twin(scoring, normalize, biased):
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 60, generator=g).to(DEVICE)
    bias = torch.randn(60, generator=g).to(DEVICE) if biased else None
    weights, ids = route(logits, 6, scoring, normalize, bias)
    want, want_ids = reference.route(logits, 6, scoring, normalize, bias)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)


def test_ties_go_to_the_lower_expert():
    _, ids = route(torch.zeros(2, 12, device=DEVICE), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_strided_half_precision_logits():
    wide = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    logits = wide.to(torch.bfloat16).to(DEVICE)[:, :20]
    weights, ids = route(logits, 4)
    want, want_ids = reference.route(logits, 4)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_padding_tokens_choose_nobody():
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[3] = float("nan")  # a captured graph's padding computes with whatever lies there
    live = torch.tensor([0, 7, -1, -1, 3], dtype=torch.int32, device=DEVICE)
    weights, ids = route(logits, 4, live=live)
    want, want_ids = reference.route(logits, 4, live=live)
    assert torch.equal(ids, want_ids)
    assert (ids[2:4] == -1).all()
    assert (weights[2:4] == 0).all()
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="scoring 'tanh'; 'softmax' and 'sigmoid' work"):
        route(torch.zeros(1, 4), 2, "tanh")
    with pytest.raises(ValueError, match="top_k is 5, but the layer has 4 experts"):
        route(torch.zeros(1, 4), 5)
