"""Traces: what is read, what is refused by file, line and reason, how arrivals are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rimuru.errors import ConfigError
from rimuru.sim.trace import Arrival, read_trace, shape, square_wave


def write(tmp_path, text: str):
    path = tmp_path / "t.csv"
    path.write_text(text)
    return path


def test_columns_may_stand_in_any_order_and_others_are_left_alone(tmp_path):
    path = write(tmp_path, "turn,output_tokens,arrival_s,prompt_tokens,conv_id\n0,5,0.5,30,7\n1,6,1.5,40,7\n")
    assert read_trace(path) == [Arrival(0.5, 30, 5, 7), Arrival(1.5, 40, 6, 7)]


def test_the_trace_that_is_shipped_can_be_read():
    rows = read_trace(Path(__file__).parents[2] / "examples" / "lengths.csv")
    assert len(rows) == 20
    assert 0 < rows[0].at < rows[-1].at < 60


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: no column 'prompt_tokens'; there are none"),
        ("prompt_tokens,x\n1,2\n", "line 1: no column 'output_tokens'; there are prompt_tokens, x"),
        ("prompt_tokens,output_tokens\n3,4\n5,many\n", "line 3: output_tokens 'many' is no whole number"),
        ("prompt_tokens,output_tokens\n3,4,5\n", "line 2: 3 values for 2 columns"),
        ("prompt_tokens,output_tokens\n0,4\n", "line 2: prompt_tokens must be from 1"),
        ("prompt_tokens,output_tokens\n3,-4\n", "line 2: output_tokens must be from 1"),
        ("prompt_tokens,output_tokens,arrival_s\n3,4,2\n3,4,1\n", "line 3: arrival_s 1 comes before"),
        ("prompt_tokens,output_tokens,arrival_s\n3,4,nan\n", "line 2: arrival_s nan"),
        ("prompt_tokens,output_tokens,arrival_s\n3,4,inf\n", "line 2: arrival_s inf"),
        ("prompt_tokens,output_tokens\n", "no requests in it"),
    ],
)
def test_a_malformed_trace_is_named_with_line_and_reason(tmp_path, text, says):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert str(error.value).startswith(str(path))
    assert says in str(error.value)


def test_a_missing_or_binary_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.csv: cannot be read"):
        read_trace(tmp_path / "no.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00prompt")
    with pytest.raises(ConfigError, match=r"b\.csv: not a CSV file"):
        read_trace(tmp_path / "b.csv")


def test_poisson_arrivals_have_the_rate_and_do_not_depend_on_how_many_are_taken():
    rows = [Arrival(0.0, 10, 20, i) for i in range(50)]
    many = shape(rows, requests=4000, rate=20.0, seed=1)
    gaps = np.diff([a.at for a in many])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)  # standard error of the mean: 1.6 %
    assert gaps.std() == pytest.approx(1 / 20, rel=0.06)
    assert shape(rows, requests=10, rate=20.0, seed=1) == many[:10]
    assert len({a.conversation for a in many}) == 4000


def test_outputs_scale_and_the_trace_starts_over_where_more_is_asked_for():
    rows = [Arrival(0.0, 10, 100, 0), Arrival(4.0, 11, 1, 0)]
    got = shape(rows, requests=4, output_scale=0.43)
    assert [a.output for a in got] == [43, 1, 43, 1]
    assert [a.at for a in got] == [0.0, 4.0, 4.0, 8.0]
    assert [a.conversation for a in got] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "bad", [{"requests": 0}, {"rate": 0.0}, {"rate": float("inf")}, {"output_scale": 0.0}, {}]
)
def test_loads_that_cannot_be_are_refused(bad):
    with pytest.raises(ConfigError, match=r"--requests|--rate|--output-scale"):
        shape([Arrival(0.0, 1, 1, 0)] * 2, **bad)


def test_a_square_wave_alternates_between_its_rates():
    got = square_wave([Arrival(0.0, 10, 10, 0)], low=1, high=12, period=20.0, seconds=80.0)
    counts = np.histogram([a.at for a in got], bins=[0, 20, 40, 60, 80])[0]
    assert all(8 < low * 2 < 80 and 180 < high < 300 for low, high in counts.reshape(2, 2))
