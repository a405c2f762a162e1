"""`rimuru plan --trace`: which card, cap and policy would do, and that the answer is what was simulated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sim.conftest import ALL_EXPERTS, MODEL, ROUTING, WEIGHTS, load
from sim.test_simulate_command import CONFIG

from rimuru import cli
from rimuru.engine.config import EngineConfig
from rimuru.policy.cost import GPU
from rimuru.server import serve
from rimuru.sim.engine import Hardware, Simulation
from rimuru.sim.planner import Objectives, Planner, answer, table

# Three cards for a model of 192 experts of 3 MiB: too small for them all, just large enough, roomy and fast.
ROOM = WEIGHTS + ALL_EXPERTS
SMALL = GPU("small", 1e12, 5e9, 100e12, int(ROOM * 0.6))
MEDIUM = GPU("medium", 1e12, 5e9, 100e12, ROOM + (40 << 20))
LARGE = GPU("large", 3e12, 50e9, 900e12, ROOM * 3)
REQUESTS = load(16, output=40)
CARDS = [Hardware(card, reserve_bytes=0) for card in (LARGE, SMALL, MEDIUM)]


def planner(aims: Objectives, **options) -> Planner:
    config = EngineConfig(model="toy", max_num_seqs=32, max_num_batched_tokens=512)
    return Planner(MODEL, config, ROUTING, REQUESTS, aims, **options)


def test_the_smallest_card_that_does_is_recommended_with_the_policy_that_does() -> None:
    p = planner(Objectives(ttft_ms=1000, itl_ms=20))
    found = p.search(CARDS, share=1.0)
    assert found is not None
    assert (found.card, found.policy, found.host_bytes) == ("medium", "fixed", 0)
    tried = [(c.card, c.policy) for c in p.cases if c.cap >= 0.99 * ROOM or c.card == "small"]
    assert tried[:3] == [("small", "fixed"), ("small", "economic"), ("small", "reactive")]
    small = [c for c in p.cases if c.card == "small" and c.cap > 0.5 * ROOM]
    assert "does not start below" in small[0].reason
    assert not any(c.does for c in small)
    text = answer(p, found)
    assert text.startswith("Take medium: under fixed, ")
    assert f"--device-memory {found.cap / 1e9:.1f}GB --memory-policy fixed" in text


def test_smaller_caps_are_tried_on_the_card_found_until_none_does() -> None:
    p = planner(Objectives(ttft_ms=1000, itl_ms=20))
    found = p.search([Hardware(LARGE, reserve_bytes=0)], share=0.9)
    assert found is not None
    caps = [c.cap for c in p.cases]
    assert caps == sorted(caps, reverse=True)
    least = p.least_cap(found)
    assert least is not None
    assert least.cap < found.cap
    below = [c for c in p.cases if c.cap < least.cap]
    assert not any(c.does for c in below)
    assert f"{least.cap / 1e9:.1f}GB of it do too" in answer(p, found)


def test_a_cap_is_tried_alone() -> None:
    p = planner(Objectives(ttft_ms=1000, itl_ms=20))
    p.search([Hardware(LARGE, reserve_bytes=0)], share=0.9, cap=ROOM + (30 << 20))
    assert {c.cap for c in p.cases} == {(ROOM + (30 << 20)) // 10**8 * 10**8}


def test_shares_count_requests_that_meet_each_objective_and_both() -> None:
    cap = ROOM // 10**8 * 10**8
    config = EngineConfig(
        model="toy", max_num_seqs=32, max_num_batched_tokens=512, device_memory=cap, memory_policy="reactive"
    )
    sim = Simulation(MODEL, config, Hardware(MEDIUM, reserve_bytes=0), ROUTING)
    sim.run(REQUESTS)
    first = np.array([s.ttft for s in sim.scheduler.samples])
    other = np.array([s.decode_time / (s.output_tokens - 1) for s in sim.scheduler.samples])
    aims = Objectives(np.median(first) * 1e3, np.median(other) * 1e3)
    p = planner(aims, policies=("reactive",))
    p.search([Hardware(MEDIUM, reserve_bytes=0)], share=1.0, cap=cap)
    case = p.cases[0]
    assert (case.ttft_within, case.itl_within) == pytest.approx((0.5, 0.5), abs=1 / len(REQUESTS))
    met = (first * 1e3 <= aims.ttft_ms) & (other * 1e3 <= aims.itl_ms)
    assert case.within == pytest.approx(met.mean())


def test_where_nothing_does_the_closest_is_named_with_the_objective_it_misses() -> None:
    p = planner(Objectives(ttft_ms=1000, itl_ms=0.5))
    assert p.search(CARDS, share=1.0) is None
    near = p.closest()
    assert near is not None
    assert {c.within for c in p.cases} == {0.0}
    assert near.numbers["tpot_mean_s"] == min(c.numbers["tpot_mean_s"] for c in p.cases if c.numbers)
    text = answer(p, None)
    assert "No case keeps 99% of the requests within the objectives (first token within 1000 ms, 0.5" in text
    assert "Closest: large at" in text
    assert "first token: 100% in time" in text
    assert "between tokens: 0%" in text


def test_requests_that_are_refused_count_as_missed_and_say_why() -> None:
    config = EngineConfig(model="toy", max_num_seqs=32, max_model_len=85)
    p = Planner(MODEL, config, ROUTING, REQUESTS, Objectives(1000, 20), ("economic",))
    p.search([Hardware(LARGE, reserve_bytes=0)], share=1.0, cap=ROOM * 2)
    case = p.cases[0]
    longer = sum(a.prompt + a.output > 85 for a in REQUESTS)
    assert case.refused == longer > 0
    assert case.within == pytest.approx(1 - longer / len(REQUESTS))
    assert "85" in case.reason
    line = table(p.cases).splitlines()[1]
    assert line.endswith(case.reason)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    rows = "\n".join(f"{20 + i % 9},{30 + i % 5}" for i in range(20))
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n" + rows + "\n")
    return ["plan", str(tmp_path / "model"), "--trace", str(tmp_path / "t.csv"), "--rate", "50"]


def test_plan_with_a_trace_answers_with_a_command_that_the_server_takes(argv, capsys) -> None:
    assert cli.main([*argv, "--memory-policy", "economic"]) == 0
    captured = capsys.readouterr()
    assert "Take rtx-4090: under economic" in captured.out
    assert "objectives: first token within 2000 ms, 100 ms between tokens" in captured.out
    assert "simulating rtx-4090" in captured.err
    command = captured.out.splitlines()[-1].split()
    assert command[:2] == ["rimuru", "serve"]
    parser = cli.Parser(prog="rimuru serve", allow_abbrev=False)
    serve.add_arguments(parser)
    config = serve.engine_config(parser.parse_args(command[2:]))
    assert (config.memory_policy, config.ttft_slo, config.itl_slo) == ("economic", 2000, 100)
    assert config.device_memory == 23.1e9


def test_plan_answers_in_json_for_one_card(argv, capsys) -> None:
    assert cli.main([*argv, "--gpu", "H100", "--itl-slo", "50", "--requests", "7", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["objectives"] == {"ttft_ms": None, "itl_ms": 50, "share": 0.99}
    assert (data["load"]["requests"], data["load"]["rate"]) == (7, 50)
    assert {case["card"] for case in data["cases"]} == {"h100"}
    assert data["recommendation"]["policy"] == "fixed"
    assert data["recommendation"]["requests"] == 7
    assert data["closest"] is None
    assert data["answer"].startswith("Take h100")


def test_a_cap_leaves_out_the_cards_that_do_not_have_it(argv, capsys) -> None:
    assert cli.main([*argv, "--device-memory", "31GB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(c["card"], c["device_memory"]) for c in data["cases"]] == [
        (card, 31 * 10**9) for card in ("rtx-5090", "a100", "h100", "h200")
    ]


def test_an_objective_that_no_card_reaches_ends_with_1_and_the_closest(argv, capsys) -> None:
    assert cli.main([*argv, "--ttft-slo", "3.75", "--gpu", "h200"]) == 1
    assert "Closest: h200 at " in capsys.readouterr().out


def test_plan_without_a_trace_is_the_memory_plan(argv, capsys) -> None:
    assert cli.main([*argv[:2], "--gpu", "rtx-4090", "--device-memory", "2GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device_bytes"] == 2e9
