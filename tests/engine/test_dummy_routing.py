"""Routing for random weights against the simulator's draws, published measurements and recordings."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cores import greedy, make_bench, run_ahead
from support.tiny import tiny_checkpoint

from rimuru.engine.config import EngineConfig, split_dummy_routing
from rimuru.engine.dummy_routing import DummyRouting, make_dummy_routing
from rimuru.errors import ConfigError
from rimuru.kernels.types import StepMeta
from rimuru.models.config import ModelConfig, load_model_config
from rimuru.policy.cost import expected_touched
from rimuru.policy.routing import RoutingParams
from rimuru.sim.routing import draw

CPU = torch.device("cpu")
V2_LITE = {"E": 64, "k": 6, "A": 0.079, "B": 0.118, "C": 0.224, "rho": 0.88}
QWEN3 = {"E": 128, "k": 8, "A": 0.25, "B": 0.2, "C": 0.3, "rho": 0.93}


def shape(layers: int, experts: int, top_k: int) -> ModelConfig:
    config = load_model_config(tiny_checkpoint("qwen3_moe"))
    return replace(config, num_experts=experts, top_k=top_k, moe_layers=tuple(range(layers)))


def make(spec: str, layers: int = 12, experts: int = 64, top_k: int = 6, slots: int = 64, **options):
    return make_dummy_routing(spec, shape(layers, experts, top_k), CPU, slots=slots, **options)


@pytest.fixture
def model_file(tmp_path):
    def write(**entry: float) -> str:
        (tmp_path / "r.json").write_text(json.dumps({"models": {"toy": entry}}))
        return f"model:{tmp_path / 'r.json'}#toy"

    return write


def step(starts: list[int], counts: list[int], slots: list[int] | None = None, padding: int = 0) -> StepMeta:
    """`counts` tokens of each sequence from position `starts` on, then padding of both kinds."""
    slots = list(range(len(starts))) if slots is None else slots
    ends = np.cumsum(counts)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])

    def tensor(values, fill: int = 0):
        return torch.tensor([*values, *[fill] * padding], dtype=torch.int32)

    return StepMeta(
        tensor(positions), tensor(np.repeat(slots, counts), -1), tensor([0, *ends], int(ends[-1])),
        tensor(slots), tensor(np.add(starts, counts)), max(counts), 4096,
    )  # fmt: skip


def choose(routing: DummyRouting, meta: StepMeta, layers: int, top_k: int) -> np.ndarray:
    """Chosen experts bool `[T, layers, E]`, as the router chooses them from the logits."""
    rows = [routing.logits(layer, meta) for layer in range(layers)]
    ids = torch.stack([r.topk(top_k).indices for r in rows], dim=1)
    return torch.zeros(len(ids), layers, rows[0].shape[1]).scatter_(2, ids, 1.0).bool().numpy()


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Share of the experts of a token in `a` that the token in `b` uses too."""
    return float((a & b).sum() / a.sum())


def sequences_of(routing: DummyRouting, count: int, tokens: int, layers: int, top_k: int) -> np.ndarray:
    """bool `[count, tokens, layers, E]`, each sequence's prompt in one step."""
    chosen = choose(routing, step([0] * count, [tokens] * count), layers, top_k)
    return chosen.reshape(count, tokens, layers, -1)


# -- the profile ---------------------------------------------------------------------------


def test_overlaps_skew_and_breadth_are_those_of_the_routing_model(model_file):
    """Against the simulator's bank, which draws the drift as the AR(1) process that the model says it is."""
    layers, experts, k = 12, 64, 6
    mine = sequences_of(make(model_file(**V2_LITE), layers), 32, 64, layers, k)
    bank = draw(layers, experts, k, RoutingParams(((0.0, 0.079),), 0.118, 0.224, 0.88), seed=3)
    theirs = np.array([[bank.decode([r], [t - r * 37 % 128]) for t in range(64)] for r in range(32)])
    theirs = theirs.reshape(mine.shape).astype(bool)
    # 12 popularities a model and 384 tastes: two draws of the simulator differ by up to 0.01 in each.
    for lag in (1, 2, 8, 32):
        near = [overlap(x[:, lag:], x[:, :-lag]) for x in (mine, theirs)]
        assert near[0] == pytest.approx(near[1], abs=0.02), lag
    across = [overlap(x[1:], x[:-1]) for x in (mine, theirs)]
    assert across[0] == pytest.approx(across[1], abs=0.02)
    load = [np.sort(x.mean((0, 1)), axis=1)[:, ::-1] for x in (mine, theirs)]
    busiest = [float((x[:, : experts // 5].sum(1) / k).mean()) for x in load]
    assert busiest[0] == pytest.approx(busiest[1], abs=0.03)


@pytest.mark.parametrize(("batch", "recorded"), [(8, 31.9), (32, 56.9), (128, 63.7)])
def test_a_step_touches_as_many_experts_as_a_step_of_the_recorded_model(batch, recorded, model_file):
    """DeepSeek-V2-Lite's trace, as in the simulator's own test: the routing model's error is 1 expert."""
    assert make(model_file(**V2_LITE)).touched(batch) == pytest.approx(recorded, abs=1.6)


@pytest.mark.parametrize("batch", [1, 8, 32, 128])
def test_uniform_routing_touches_what_the_closed_form_says(batch):
    # 24 steps x 12 layers: the standard error is below 0.2 experts.
    assert make("uniform").touched(batch) == pytest.approx(expected_touched(64, 6, batch), abs=0.7)


def test_uniform_routing_has_neither_memory_nor_favourites():
    chosen = sequences_of(make("uniform"), 16, 64, 12, 6)
    even = 6 / 64
    assert overlap(chosen[:, 1:], chosen[:, :-1]) == pytest.approx(even, abs=0.01)
    # Of 1,024 draws at this rate each expert's share scatters by 0.0091; 768 shares lie within 5 of these.
    assert np.abs(chosen.mean((0, 1)) - even).max() < 5 * 0.0091


def test_an_lru_cache_hits_as_often_as_was_measured_on_the_real_model(model_file):
    """Qwen3-30B-A3B, caches of 8 to 64 experts a layer, cold at each prompt of 129 tokens (moe-trace,
    findings 005 to 008): .424, .647, .810, .918. The routing model's own error is 0.011."""
    layers, k = 12, 8
    chosen = sequences_of(make(model_file(**QWEN3), layers, 128, k), 6, 129, layers, k)
    hits = dict.fromkeys((8, 16, 32, 64), 0)
    for sequence in chosen:
        last = np.full((layers, 128), -1.0)
        for t, used in enumerate(sequence):
            # An expert is cached if fewer than `slots` others were used after it.
            rank = (-last).argsort(1, kind="stable").argsort(1)
            for slots in hits:
                hits[slots] += int((used & (rank < slots) & (last >= 0)).sum())
            last[used] = t
    got = [n / chosen.sum() for n in hits.values()]
    assert got == pytest.approx([0.424, 0.647, 0.810, 0.918], abs=0.03)


def test_layers_have_the_skew_the_file_gives_them(model_file):
    entry = {"E": 64, "k": 6, "A": 0.3, "A_layer0": 0.0, "B": 0.1, "C": 0.2, "rho": 0.9}
    chosen = sequences_of(make(model_file(**entry), layers=3), 64, 32, 3, 6)
    across = [overlap(chosen[1:, :, layer], chosen[:-1, :, layer]) for layer in range(3)]
    assert across[0] == pytest.approx(6 / 64, abs=0.02)
    assert min(across[1:]) > 0.14


# -- sequences -----------------------------------------------------------------------------


def test_a_token_routes_the_same_in_any_step_that_reaches_it(model_file):
    spec = model_file(**V2_LITE)
    whole = choose(make(spec), step([0, 0], [20, 9]), 12, 6)
    routing = make(spec)
    parts = [
        choose(routing, step([0, 0], [7, 9]), 12, 6)[:7],
        choose(routing, step([7], [12], padding=3), 12, 6)[:12],
        choose(routing, step([19], [1]), 12, 6),
    ]
    assert np.array_equal(whole[:20], np.concatenate(parts))


def test_a_slot_s_next_sequence_has_a_taste_of_its_own(model_file):
    routing = make(model_file(E=64, k=6, A=0.0, B=0.9, C=0.0, rho=0.0))
    first = choose(routing, step([0], [30]), 12, 6)
    goes_on = choose(routing, step([30], [1]), 12, 6)
    second = choose(routing, step([16], [30]), 12, 6)  # behind a cached prefix
    third = choose(routing, step([0], [30]), 12, 6)
    assert overlap(first[-1:], goes_on) > 0.6
    for one, other in ((first, second), (second, third), (first, third)):
        assert overlap(one, other) < 0.2


def test_padding_disturbs_no_sequence(model_file):
    spec = model_file(**V2_LITE)
    plain, padded = make(spec), make(spec)
    choose(plain, step([0, 0], [5, 5]), 12, 6)
    choose(padded, step([0, 0], [5, 5], padding=6), 12, 6)
    want = choose(plain, step([5, 5], [1, 1]), 12, 6)
    assert np.array_equal(choose(padded, step([5, 5], [1, 1], padding=2), 12, 6)[:2], want)


def test_a_large_step_draws_layer_by_layer_and_alike(model_file, monkeypatch):
    spec = model_file(**V2_LITE)
    want = choose(make(spec), step([0, 3], [40, 9]), 12, 6)
    monkeypatch.setattr("rimuru.engine.dummy_routing.AT_ONCE", 0)
    assert np.array_equal(choose(make(spec), step([0, 3], [40, 9]), 12, 6), want)


# -- recordings ----------------------------------------------------------------------------


def recording(tmp_path, lengths=(9, 4, 6)) -> tuple[str, list[np.ndarray]]:
    rng = np.random.default_rng(2)
    traces = [np.argsort(rng.random((n, 3, 16)), axis=-1)[..., :4].astype(np.uint8) for n in lengths]
    np.savez(tmp_path / "t.npz", **{f"s{i}": t for i, t in enumerate(traces)})
    return f"trace:{tmp_path / 't.npz'}", traces


def test_a_recording_is_replayed_round_and_round(tmp_path):
    spec, traces = recording(tmp_path)
    routing = make(spec, layers=3, experts=16, top_k=4)
    chosen = sequences_of(routing, 24, 30, 3, 4)
    sets = [
        np.stack([np.isin(np.arange(16), row) for row in t.reshape(-1, 4)]).reshape(len(t), 3, 16)
        for t in traces
    ]
    followed = [
        [i for i, s in enumerate(sets) if all(np.array_equal(seq[p], s[p % len(s)]) for p in range(30))]
        for seq in chosen
    ]
    assert all(len(f) == 1 for f in followed)
    assert {f[0] for f in followed} == {0, 1, 2}


def test_the_order_of_a_recorded_choice_is_the_order_of_its_weights(tmp_path):
    spec, traces = recording(tmp_path, lengths=(5,))
    routing = make(spec, layers=3, experts=16, top_k=4)
    ids = routing.logits(0, step([0], [5])).topk(4).indices
    assert torch.equal(ids, torch.from_numpy(traces[0][:, 0].astype(np.int64)))


def test_real_recordings_touch_what_they_did(shared_file):
    spec = f"trace:{shared_file('data/routing/gpt_oss_20b_decode_trace.npz')}"
    routing = make(spec, layers=24, experts=32, top_k=4)
    for batch, recorded in ((1, 4), (8, 17.7), (32, 26.5), (128, 30.3)):
        assert routing.touched(batch) == pytest.approx(recorded, abs=0.5)
    chosen = sequences_of(routing, 48, 128, 24, 4)
    # 48 of 128 requests, in the recording's own mean .446.
    assert overlap(chosen[:, 1:], chosen[:, :-1]) == pytest.approx(0.446, abs=0.02)


# -- what the user writes ------------------------------------------------------------------


def test_what_was_chosen_is_told_with_the_experts_it_touches(model_file, tmp_path):
    text = make("uniform", layers=2).describe((1, 8))
    assert text.startswith("routing uniform: 6.0 / 3")
    assert text.endswith("of 64 experts a layer touched at batch 1 / 8")
    assert make(model_file(**V2_LITE), layers=2).name == "model toy"
    assert make(recording(tmp_path)[0], layers=3, experts=16, top_k=4).name == "trace t"


def test_the_entry_of_the_served_model_is_found_by_its_name(tmp_path):
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"models": {"DeepSeek-V2-Lite": V2_LITE, "Qwen3-30B-A3B": QWEN3}}))
    assert make(f"model:{file}", model="/models/DeepSeek-V2-Lite-Chat").name == "model DeepSeek-V2-Lite"
    with pytest.raises(ConfigError, match=r"--dummy-routing .*has 128 experts, top 8; the model has 64"):
        make(f"model:{file}#Qwen3-30B-A3B", model="DeepSeek-V2-Lite")
    with pytest.raises(ConfigError, match=r"no entry for 'other'.*--dummy-routing uniform needs none"):
        make(f"model:{file}", model="org/other")


@pytest.mark.parametrize("spec", ["", "even", "model", "model:", "model:#x", "trace", "trace:", "uniform:x"])
def test_an_unknown_kind_names_those_there_are(spec):
    with pytest.raises(ConfigError, match=r"choose uniform, model:FILE\.json.* or trace:FILE\.npz"):
        split_dummy_routing(spec)


def test_real_weights_refuse_a_routing():
    with pytest.raises(ConfigError, match="--dummy-routing goes with --load-format dummy"):
        EngineConfig("m", dummy_routing="uniform").check()
    EngineConfig("m", dummy_routing="uniform", load_format="dummy").check()


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 cut short", "one array"])
def test_a_recording_that_cannot_be_read_is_named(content, tmp_path):
    file = tmp_path / "t.npz"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content:
        with file.open("wb") as f:
            np.save(f, np.zeros((9, 12, 6), np.uint8))
    with pytest.raises(ConfigError, match=r"--dummy-routing .*t\.npz: cannot be read"):
        make(f"trace:{file}")


def test_shares_that_exceed_one_are_refused(model_file):
    with pytest.raises(ConfigError, match="shares that sum to at most 1"):
        make(model_file(**V2_LITE | {"A": 0.8}))


def test_a_recording_of_another_model_says_what_it_holds(tmp_path):
    spec, _ = recording(tmp_path)
    with pytest.raises(ConfigError, match=r"x 12 layers x 6 of 64 experts; the file holds \(3, 4\)"):
        make(spec)


# -- in the engine -------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_routes_as_the_recording_says(ahead, tmp_path):
    """Two of eight experts a layer, one token after the other: also in padded steps that run ahead."""
    recorded = np.array([[[t % 4, 4 + (t + layer) % 4] for layer in range(4)] for t in range(50)], np.uint8)
    np.savez(tmp_path / "t.npz", only=recorded)
    bench = make_bench(
        "qwen3_moe", load_format="dummy", dummy_routing=f"trace:{tmp_path / 't.npz'}", max_num_seqs=4
    )
    if ahead:
        run_ahead(bench, padded=True)
    seen = []
    learn = bench.core.memory.after_step
    bench.core.memory.after_step = lambda touched, *rest: (seen.append(touched.copy()), learn(touched, *rest))
    bench.add("r", list(range(5)), greedy(20))
    bench.run()
    counts = np.zeros((25, 4, 8), int)
    np.put_along_axis(counts, recorded[:25].astype(int), 1, axis=-1)
    assert np.array_equal(seen[0], counts[:5].sum(0))
    assert all(np.array_equal(a, b) for a, b in zip(seen[1:], counts[5:24], strict=False))
    assert len(seen) >= 20
