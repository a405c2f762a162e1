"""What a simulation says: numbers that add up, a table, plots that are well-formed."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from sim.conftest import load

from rimuru.sim.report import COLUMNS, plots, summary, table
from rimuru.sim.svg import Line, Panel, label, log_marks, page, ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_the_summary_is_what_the_steps_and_requests_add_up_to(make_sim):
    sim = make_sim("reactive", kv_mib=8)
    arrivals = load(30)
    sim.run(arrivals)
    got, s = summary(sim, ttft_slo_ms=50, itl_slo_ms=1e9), sim.series
    assert got["requests"] == 30
    assert got["output_tokens_per_s"] * got["seconds"] == pytest.approx(sum(a.output for a in arrivals))
    assert got["peak_concurrency"] == max(s.running)
    assert got["mean_concurrency"] == pytest.approx(np.average(s.running, weights=s.seconds))
    assert got["experts_resident_least"] == min(s.resident) < 192
    assert got["link_bytes"] == pytest.approx(sum(s.link_bytes))
    met = [x for x in sim.scheduler.samples if x.ttft <= 0.05]
    assert got["met_objectives"] == pytest.approx(len(met) / 30)
    assert got["goodput_tokens_per_s"] == pytest.approx(sum(x.output_tokens for x in met) / sim.now)
    assert sorted(w for _, w in sim.first_tokens) == sorted(x.ttft for x in sim.scheduler.samples)


def test_gaps_between_tokens_are_each_request_s_own_preemptions_included(make_sim):
    sim = make_sim("fixed", kv_mib=3)
    arrivals = load(20)
    sim.run(arrivals)
    assert sum(sim.scheduler.preemptions.values()) > 0
    assert len(sim.gaps) == sum(a.output - 1 for a in arrivals)
    assert sum(sim.gaps) == pytest.approx(sum(x.decode_time for x in sim.scheduler.samples), rel=1e-5)
    assert summary(sim)["itl_p99_s"] == pytest.approx(np.percentile(sim.gaps, 99))
    assert max(sim.gaps) > 2 * max(sim.series.seconds)  # one that was preempted waited for many steps


def test_a_simulation_of_nothing_has_numbers_too(make_sim):
    got = summary(make_sim())
    assert (got["requests"], got["steps"], got["output_tokens_per_s"]) == (0, 0, 0.0)
    assert all(np.isfinite(v) for v in got.values() if isinstance(v, float))


def test_the_table_has_a_line_for_each_result_and_its_columns_align(make_sim):
    sim = make_sim()
    sim.run(load(5))
    lines = table({"fixed": summary(sim), "a longer name": summary(sim)}).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert all(name in lines[0] for _, name, _, _ in COLUMNS)


def test_plots_are_well_formed_and_hold_every_curve(make_sim):
    sims = {name: make_sim(name, kv_mib=8) for name in ("fixed", "reactive & co")[:1]}
    sims["reactive & co"] = make_sim("reactive", kv_mib=8)
    for sim in sims.values():
        sim.run(load(30))
    root = ET.fromstring(plots("a < b", sims))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"a < b", "reactive & co", "Boundary: lent to KV", "Link use, host to device"} <= set(texts)
    assert len([p for p in root.iter(f"{SVG}path") if p.get("fill") == "none"]) == 2 * 8
    width, height = float(root.get("width")), float(root.get("height"))
    assert all(
        0 <= float(t.get("x")) <= width and 0 <= float(t.get("y")) <= height for t in root.iter(f"{SVG}text")
    )


def test_curves_lie_where_their_values_say():
    text = page("t", [Panel("p", "u", [Line("a", [0.0, 5.0, 10.0], [0.0, 50.0, 100.0])])])
    path = next(p for p in ET.fromstring(text).iter(f"{SVG}path") if p.get("fill") == "none").get("d")
    points = [tuple(map(float, pair.split())) for pair in path[1:].split("L")]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y2


def test_a_held_value_is_drawn_to_its_end():
    line = Line("a", [0.0, 2.0, 4.0, 6.0, 10.0], [5.0, 5.0, 5.0, 10.0, 10.0], steps=True)
    text = page("t", [Panel("p", "u", [line])])
    path = next(p for p in ET.fromstring(text).iter(f"{SVG}path") if p.get("fill") == "none").get("d")
    at = [64 + seconds / 10 * (520 - 64 - 16) for seconds in (6, 10)]
    assert re.findall(r"H([\d.]+)", path) == [f"{x:.1f}" for x in at]
    assert path.count("V") == 1


def test_a_page_has_colours_for_light_and_dark():
    text = page("t", [Panel("p", "u", [Line("a", [0.0], [1.0])])])
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    assert ".bg{fill:#ffffff}" in light
    assert ".bg{fill:#14161a}" in dark


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.003), (0, 97_000), (-3, 4), (5, 5)])
def test_ticks_are_few_round_and_inside(low, high):
    got = ticks(low, high)
    assert 1 <= len(got) <= 7
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in got)
    assert len(got) >= 3 or low == high


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.3, 4.0, [0.2, 0.5, 1, 2, 5]),
        (1, 10, [1, 2, 5, 10]),
        (3, 3, [2, 5]),
        (0.004, 900, [0.001, 0.01, 0.1, 1, 10, 100, 1000]),
        (5, 5, [5, 10]),
    ],
)
def test_a_log_axis_begins_and_ends_at_a_label(low, high, marks):
    assert log_marks(low, high) == marks


def test_labels_are_short():
    assert label(3000, 3000) == "3,000"
    assert [label(v, 20_000) for v in (0, 5000, 20_000)] == ["0", "5k", "20k"]
    assert label(0.25, 1) == "0.25"
