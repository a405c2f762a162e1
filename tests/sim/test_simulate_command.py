"""`rimuru simulate` from the command line: what it prints, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rimuru.cli import main
from rimuru.sim.case_study import KEYS, PUBLISHED

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 32_000, "hidden_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    rows = "\n".join(f"{20 + i % 9},{30 + i % 5}" for i in range(40))
    (tmp_path / "t.csv").write_text("prompt_tokens,output_tokens\n" + rows + "\n")
    return [
        "--model", str(tmp_path / "model"), "--gpu", "RTX 5090", "--trace", str(tmp_path / "t.csv"), "--rate",
        "50", "--device-memory", "600MB", "--reserve", "220MB",
    ]  # fmt: skip


def test_run_compares_policies_and_writes_plots(flags, tmp_path, capsys):
    plots = tmp_path / "p.svg"
    argv = ["simulate", "run", *flags, "--memory-policy", "fixed,economic", "--plots", str(plots), "--json"]
    assert main([*argv, "--ttft-slo", "100"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data["policies"]) == {"fixed", "economic"}
    assert data["policies"]["fixed"]["requests"] == 40
    assert "goodput_tokens_per_s" in data["policies"]["economic"]
    assert data["assumptions"]["gpu"] == "rtx-5090"
    assert plots.read_text().startswith("<svg")


def test_run_prints_a_table(flags, capsys):
    assert main(["simulate", "run", *flags, "--requests", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("policy")
    assert lines[1].startswith("economic")


def test_fleet_says_how_many_replicas_it_steps(flags, capsys):
    argv = ["simulate", "fleet", *flags, "--replicas", "100", "--sample", "2", "--router", "prefix,random"]
    assert main([*argv, "--rate", "2000", "--think", "0.5", "--seconds", "3", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["assumptions"]["sampled"].startswith("2 of 100 replicas are stepped")
    assert data["assumptions"]["warm_up_s"] == 1.0
    requests = data["routers"]["prefix"]["requests"]
    assert requests == data["routers"]["random"]["requests"]
    assert requests == pytest.approx(6000, rel=0.25)  # 120 at 2 of 100 replicas, Poisson


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--gpu", "voodoo-2"], "GPU 'voodoo-2' is unknown; known are rtx-4090"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv: cannot be read"),
        (["--memory-policy", "fixed,greedy"], "--memory-policy 'greedy' is unknown"),
        (["--resident-experts", "4"], "--resident-experts goes with --memory-policy static"),
        (["--rate", "-1"], "--rate must be above 0"),
        (["--rate", "often"], "invalid float value: 'often'"),
        (["--ttft-slo", "0", "--memory-policy", "economic"], "--ttft-slo must be more than 0 milliseconds"),
        (["--device-memory", "lots"], "--device-memory: cannot read 'lots'"),
        (["--routing", "/nowhere.json"], "--routing /nowhere.json: cannot be read"),
        (["--output-scale", "0"], "--output-scale must be above 0"),
        (["--requsts", "3"], "--requsts is unknown; did you mean --requests?"),
        (["--req", "3"], "--req is unknown"),
    ],
)
def test_bad_flags_end_in_one_line_that_names_them(flags, capsys, change, says):
    assert main(["simulate", "run", *flags, *change]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not captured.out


def test_a_cap_that_starts_nothing_says_what_would(flags, capsys):
    assert main(["simulate", "run", *flags, "--device-memory", "100MB", "--memory-policy", "fixed"]) == 1
    assert "what would start: --device-memory" in capsys.readouterr().err


@pytest.mark.slow
def test_the_case_study_fits_the_published_numbers_within_ten_per_cent(capsys):
    assert main(["simulate", "case-study", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    for name, row in PUBLISHED.items():
        for key, value in row.items():
            assert data["policies"][name][key] == pytest.approx(value, rel=0.10), (name, key)
    assert all(set(row) == set(KEYS) for row in data["policies"].values())
    assert set(data["policies"]) == {"fixed", "offload", "reactive", "economic"}
    assert "220 simulations" in data["assumptions"]["search"]
