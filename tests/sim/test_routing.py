"""Routing: banks against closed forms, against recorded routing, and the errors of files that do not fit."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from rimuru.errors import ConfigError
from rimuru.policy.cost import expected_touched
from rimuru.sim.routing import UNIFORM, RoutingParams, draw, load_routing

V2_LITE = RoutingParams(((0.0, 0.079),), 0.118, 0.224, 0.88)


def distinct(routing, batch: int, draws: int = 40) -> float:
    """Experts a layer touched by one token each of `batch` requests, mean."""
    rng = np.random.default_rng(0)
    counts = [
        np.count_nonzero(routing.decode(rng.permutation(5000)[:batch].tolist(), rng.integers(0, 999, batch)))
        for _ in range(draws)
    ]
    return float(np.mean(counts)) / routing.layers


@pytest.mark.parametrize("batch", [1, 8, 32, 128])
def test_uniform_routing_touches_as_many_experts_as_the_closed_form(batch):
    # 40 draws x 8 layers: the standard error is at most 0.2 experts.
    assert distinct(draw(8, 64, 6, UNIFORM), batch) == pytest.approx(expected_touched(64, 6, batch), abs=0.7)


@pytest.mark.parametrize(("batch", "recorded"), [(8, 31.9), (32, 56.9), (128, 63.7)])
def test_a_drawn_bank_touches_as_many_experts_a_step_as_recorded_routing(batch, recorded):
    """DeepSeek-V2-Lite: means over requests of the recorded trace; the model's own error is 1 expert."""
    assert distinct(draw(26, 64, 6, V2_LITE), batch) == pytest.approx(recorded, abs=1.6)


def top_k_overlap(correlation: float, experts: int = 64, k: int = 6, draws: int = 20_000) -> float:
    """Share of experts common to two tokens whose logits correlate so, by plain sampling."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((draws, experts))
    y = correlation * x + np.sqrt(1 - correlation**2) * rng.standard_normal((draws, experts))
    above = [v >= np.sort(v, axis=1)[:, -k][:, None] for v in (x, y)]
    return float((above[0] & above[1]).sum()) / draws / k


def test_tokens_share_experts_as_their_logits_correlate():
    """A + B + C rho between neighbours of a request, A between requests."""
    routing = draw(12, 64, 6, V2_LITE)
    tokens = np.array([[routing.decode([r], [t]) for t in range(20)] for r in range(40)])

    def overlap(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.minimum(a, b).sum()) / (a.shape[0] * a.shape[1] * 12 * 6)

    p = V2_LITE
    near = top_k_overlap(0.079 + p.b + p.c * p.rho)
    # 32 tastes and one popularity a layer are few: each mean scatters by about 0.01.
    assert overlap(tokens[:, :-1], tokens[:, 1:]) == pytest.approx(near, abs=0.03)
    assert overlap(tokens[:-1], tokens[1:]) == pytest.approx(top_k_overlap(0.079), abs=0.03)


def test_every_token_chooses_top_k_in_every_layer():
    routing = draw(5, 16, 3, V2_LITE)
    counts = routing.decode([4, 9, 300], [0, 77, 1000]).reshape(5, 16)
    assert (counts.sum(axis=1) == 9).all()
    assert routing.decode(list(range(300)), [5] * 300).sum() == 300 * 15  # more rows than a byte counts


def test_a_prompt_s_counts_are_those_of_its_chunks():
    routing = draw(5, 16, 3, V2_LITE)
    whole = routing.prompt(7, 0, 1000)
    assert whole.sum() == 1000 * 15
    cuts = [0, 1, 127, 128, 300, 640, 1000]
    parts = [routing.prompt(7, a, b - a) for a, b in pairwise(cuts)]
    assert np.array_equal(whole, np.sum(parts, axis=0))


def test_a_routing_model_is_found_by_the_model_s_name(tmp_path):
    file = tmp_path / "r.json"
    entry = {"E": 60, "k": 4, "A": 0.08, "A_layer0": 0.012, "B": 0.12, "C": 0.22, "rho": 0.88}
    file.write_text(json.dumps({"models": {"Qwen1.5-MoE-A2.7B": entry, "OLMoE-1B-7B": {}}}))
    got = load_routing(str(file), 4, 60, 4, "/models/Qwen1.5-MoE-A2.7B-Chat")
    want = draw(4, 60, 4, RoutingParams(((0.0, 0.012), (1.0, 0.08)), 0.12, 0.22, 0.88))
    assert np.array_equal(got.prompt(0, 0, 50), want.prompt(0, 0, 50))
    with pytest.raises(ConfigError, match="has 60 experts, top 4; the model has 64, top 8"):
        load_routing(str(file), 4, 64, 8, "Qwen1.5-MoE-A2.7B")
    with pytest.raises(ConfigError, match=r"no entry for 'Mixtral'; it has Qwen1\.5-MoE-A2\.7B, OLMoE"):
        load_routing(str(file), 4, 60, 4, "Mixtral")
    with pytest.raises(ConfigError, match="no routing model in it"):
        load_routing(str(file), 4, 64, 8, "OLMoE-1B-7B")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_routing(str(tmp_path / "none.json"), 4, 60, 4, "x")


def test_recorded_routing_is_replayed_as_it_was(tmp_path):
    rng = np.random.default_rng(2)
    trace = np.argsort(rng.random((200, 3, 8)), axis=-1)[..., :2].astype(np.uint8)
    np.savez(tmp_path / "t.npz", a=trace, short=trace[:5])
    routing = load_routing(str(tmp_path / "t.npz"), 3, 8, 2, "x")
    got = routing.decode([0], [11]).reshape(3, 8)
    assert [sorted(np.flatnonzero(row)) for row in got] == [sorted(row) for row in trace[11]]
    with pytest.raises(ConfigError, match="the model needs sequences of at least 128 tokens x 4 layers"):
        load_routing(str(tmp_path / "t.npz"), 4, 8, 2, "x")
