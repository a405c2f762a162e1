"""What a user can get wrong with `rimuru plan --trace` and `rimuru simulate`: one clear line, exit code 2.

Each fault is put before every command that takes it: the line names the file (and its line, where it has
lines) or the flag, and the reason.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sim.test_simulate_command import CONFIG

from rimuru.cli import main

COMMANDS = ("plan", "run", "fleet")
HEAD = b"prompt_tokens,output_tokens\n"
TIMED = b"prompt_tokens,output_tokens,arrival_s\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "t.csv").write_bytes(HEAD + b"20,30\n" * 8)
    return tmp_path


def fail(capsys: pytest.CaptureFixture[str], folder: Path, command: str, *change: str) -> str:
    """Run `command` with valid flags and `change` after them; the one line it ends with."""
    model, trace = str(folder / "model"), ["--trace", str(folder / "t.csv"), "--rate", "50"]
    argv = {
        "plan": ["plan", model, *trace],
        "run": ["simulate", "run", "--model", model, "--gpu", "h200", *trace],
        "fleet": ["simulate", "fleet", "--model", model, "--gpu", "h200", *trace, "--replicas", "4"],
    }[command]
    code = main([*argv, *change])
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if not line.startswith("simulating ")]
    assert (code, len(errors)) == (2, 1), captured.err
    assert not captured.out
    return errors[0]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "t.csv, line 1: no column 'prompt_tokens'; there are none"),
        (b"\n\n", "t.csv, line 1: no column 'prompt_tokens'"),
        (
            b"prompt_tokens,tokens\n1,2\n",
            "t.csv, line 1: no column 'output_tokens'; there are prompt",
        ),
        (HEAD, "t.csv: no requests"),
        (
            HEAD + b"3,4\n5,many\n",
            "t.csv, line 3: output_tokens 'many' is no whole number",
        ),
        (HEAD + b"3,4\n5,\n", "t.csv, line 3: output_tokens '' is no whole number"),
        (HEAD + b"3,4.5\n", "t.csv, line 2: output_tokens '4.5' is no whole number"),
        (HEAD + b"nan,4\n", "t.csv, line 2: prompt_tokens 'nan' is no whole number"),
        (HEAD + b"3\n", "t.csv, line 2: 1 values for 2 columns"),
        (HEAD + b"3,-4\n", "t.csv, line 2: output_tokens must be from 1 to 16777216"),
        (HEAD + b"0,4\n", "t.csv, line 2: prompt_tokens must be from 1 to 16777216"),
        (
            HEAD + b"3," + b"9" * 30 + b"\n",
            "t.csv, line 2: output_tokens must be from 1 to 16777216",
        ),
        (HEAD + b"3," + b"9" * 5000 + b"\n", "t.csv, line 2: output_tokens"),
        (TIMED + b"3,4,soon\n", "t.csv, line 2: arrival_s 'soon' is no number"),
        (TIMED + b"3,4,nan\n", "t.csv, line 2: arrival_s nan"),
        (TIMED + b"3,4,1e999\n", "t.csv, line 2: arrival_s 1e999"),
        (TIMED + b"3,4,-1\n", "t.csv, line 2: arrival_s -1"),
        (TIMED + b"3,4,2\n3,4,1\n", "t.csv, line 3: arrival_s 1 comes before the row above"),
        (b"prompt_tokens,output_tokens,conv_id\n3,4,x\n", "t.csv, line 2: conv_id 'x' is no whole number"),
        (b"\x89PNG\r\n\x1a\n\x00\xff\xfe", "t.csv: not a CSV file"),
        (b"\x00\x01\x02\x03", "t.csv"),
        (b"prompt_tokens,prompt_tokens,output_tokens\n1,2,3\n", "t.csv, line 1: two columns 'prompt_tokens'"),
        (HEAD + b'"3,4\n' * 40_000, "t.csv"),
    ],
)
def test_a_malformed_trace_is_named_with_its_line_and_the_reason(folder, capsys, command, text, says):
    (folder / "t.csv").write_bytes(text)
    line = fail(capsys, folder, command)
    assert says in line, line
    assert str(folder) in line
    assert len(line) < 400


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--ttft-slo", "0"], "--ttft-slo must be more than 0 milliseconds"),
        (["--ttft-slo", "-5"], "--ttft-slo must be more than 0 milliseconds"),
        (["--itl-slo", "nan"], "--itl-slo must be more than 0 milliseconds"),
        (["--itl-slo", "inf"], "--itl-slo must be more than 0 milliseconds"),
        (["--itl-slo", "soon"], "--itl-slo: invalid float value: 'soon'"),
        (["--itl-slo", "0.5"], "--itl-slo 0.5 cannot be met: a step with one token takes"),
        (["--ttft-slo", "1"], "--ttft-slo 1 cannot be met: a step with one token takes"),
        (["--gpu", "voodoo-2"], "GPU 'voodoo-2' is unknown; known are rtx-4090"),
        (["--gpu", ""], "GPU '' is unknown"),
        (["--memory-policy", "greedy"], "--memory-policy"),
        (["--memory-policy", ""], "--memory-policy"),
        (["--memory-policy", "static"], "--memory-policy static needs --resident-experts N"),
        (["--resident-experts", "4"], "--resident-experts goes with --memory-policy static"),
        (["--memory-policy", "static", "--resident-experts", "-1"], "--resident-experts"),
        (["--memory-policy", "static", "--resident-experts", "65"], "--resident-experts"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv: cannot be read: No such file"),
        (["--trace", "/"], "/: cannot be read: Is a directory"),
        (["--rate", "0"], "--rate must be above 0"),
        (["--rate", "nan"], "--rate must be above 0"),
        (["--rate", "inf"], "--rate must be above 0"),
        (["--rate", "1e-320"], "--rate"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--requests", "1.5"], "--requests: invalid int value: '1.5'"),
        (["--output-scale", "nan"], "--output-scale must be above 0"),
        (["--output-scale", "inf"], "--output-scale must be above 0"),
        (["--output-scale", "1e300"], "--output-scale"),
        (["--seed", "-1"], "--seed: must be at least 0"),
        (["--device-memory", "lots"], "--device-memory: cannot read 'lots'"),
        (["--device-memory", "0"], "--device-memory: must be more than 0 bytes"),
        (["--device-memory", "900GB"], "is above the 131.32 GiB"),
        (["--device-memory", "9" * 400], "--device-memory"),
        (["--host-memory", "-1GB"], "--host-memory"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["--max-model-len", "5000"], "--max-model-len 5000 is above the model's 4096 positions"),
        (["--routing", "/nowhere.json"], "--routing /nowhere.json: cannot be read: No such file"),
        (["--routing", "/nowhere.npz"], "--routing /nowhere.npz: cannot be read"),
        (["--pcie", "7"], "--pcie: invalid choice"),
        (["--requsts", "3"], "--requsts is unknown"),
    ],
)
def test_a_wrong_flag_is_named_with_its_limit(folder, capsys, command, change, says):
    line = fail(capsys, folder, command, *change)
    assert says in line, line
    assert len(line) < 400


@pytest.mark.parametrize("command", ["run", "fleet"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--reserve", "nothing"], "--reserve: cannot read 'nothing'"),
        (["--max-boundary-wait", "nan"], "--max-boundary-wait"),
        (["--max-boundary-wait", "-1"], "--max-boundary-wait"),
    ],
)
def test_a_wrong_flag_of_simulations_is_named(folder, capsys, command, change, says):
    assert says in fail(capsys, folder, command, *change)


@pytest.mark.parametrize(
    ("command", "change", "says"),
    [
        ("fleet", ["--replicas", "0"], "--replicas must be at least 1"),
        ("fleet", ["--sample", "0"], "--sample must be at least 1"),
        ("fleet", ["--router", "round"], "--router 'round' is unknown; choose of prefix, least, random"),
        ("fleet", ["--think", "-1"], "--think must be at least 0"),
        ("fleet", ["--think", "nan"], "--think must be at least 0"),
        ("fleet", ["--seconds", "0"], "--seconds must be above 0"),
        ("fleet", ["--seconds", "inf"], "--seconds must be above 0"),
        ("fleet", ["--memory-policy", "fixed,economic"], "one --memory-policy"),
        ("run", ["--memory-policy", "fixed,greedy"], "--memory-policy 'greedy' is unknown"),
        ("run", ["--plots", "/nowhere/p.svg"], "/nowhere/p.svg: cannot be written: No such file"),
        ("plan", ["--map"], "--map does not go with --trace"),
        ("plan", ["--expert-format", "fp8"], "--expert-format does not go with --trace"),
        ("plan", ["--tensor-parallel-size", "2"], "--tensor-parallel-size does not go with --trace"),
        ("plan", ["--gpu-memory-utilization", "1.2"], "--gpu-memory-utilization must be in (0, 1]"),
        ("plan", ["--memory-policy", "fixed", "--gpu", "rtx-4090", "--device-memory", "30GB"], "rtx-4090"),
    ],
)
def test_what_one_command_cannot_take_is_named(folder, capsys, command, change, says):
    line = fail(capsys, folder, command, *change)
    assert says in line, line


def test_a_trace_without_times_needs_a_rate(folder, capsys):
    model, trace = str(folder / "model"), str(folder / "t.csv")
    for argv in (
        ["plan", model, "--trace", trace],
        ["simulate", "run", "--model", model, "--gpu", "h200", "--trace", trace],
        ["simulate", "fleet", "--model", model, "--gpu", "h200", "--trace", trace],
    ):
        assert main(argv) == 2
        assert "--rate" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--rate", "--requests", "--seed", "--ttft-slo", "--pcie"])
def test_flags_of_a_load_go_with_a_trace(folder, capsys, flag):
    assert main(["plan", str(folder / "model"), "--gpu", "h200", flag, "4"]) == 2
    assert f"{flag} goes with --trace FILE" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("r.json", b"", "r.json: no routing model in it"),
        ("r.json", b"[1, 2]", "r.json: no routing model in it"),
        ("r.json", b'{"models": {}}', "r.json: no entry for 'model'; it has none"),
        ("r.json", b'{"models": {"model": {"E": 16, "k": 2}}}', "r.json: no routing model in it"),
        ("r.json", b'{"models": {"model": {"E": 16, "k": 2, "A": "x", "B": 0, "C": 0, "rho": 0}}}', "r.json"),
        (
            "r.json",
            b'{"models": {"model": {"E": 16, "k": 2, "A": 2, "B": 0, "C": 0, "rho": 0}}}',
            "at most 1",
        ),
        ("r.json", b'{"models": {"model": {"E": 16, "k": 2, "A": NaN, "B": 0, "C": 0, "rho": 0}}}', "r.json"),
        (
            "r.json",
            b'{"models": {"model": {"E": 8, "k": 2, "A": 0, "B": 0, "C": 0, "rho": 0}}}',
            "has 8 experts",
        ),
        ("r.json", b"\x00\xff", "r.json: no routing model in it"),
        ("r.npz", b"", "r.npz: cannot be read"),
        ("r.npz", b"PK\x03\x04 no zip", "r.npz: cannot be read"),
        ("r.txt", b"uniform", "r.txt: no routing model in it"),
    ],
)
def test_a_malformed_routing_file_is_named(folder, capsys, command, name, content, says):
    (folder / name).write_bytes(content)
    line = fail(capsys, folder, command, "--routing", str(folder / name))
    assert says in line, line


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({}, "the file holds nothing"),
        ({"a": np.zeros((200, 4), np.uint8)}, "the file holds nothing of that shape"),
        ({"a": np.zeros((200, 5, 2), np.uint8)}, "x 4 layers x 2 of 16 experts; the file holds (5, 2)"),
        ({"a": np.full((200, 4, 2), 16, np.uint8)}, "4 layers x 2 of 16 experts"),
        ({"a": np.full((200, 4, 2), -1, np.int64)}, "4 layers x 2 of 16 experts"),
        ({"a": np.zeros((200, 4, 2), np.float32)}, "4 layers x 2 of 16 experts"),
        ({"a": np.zeros((3, 4, 2), np.uint8)}, "at least 128 tokens"),
        ({"a": np.array([{}], dtype=object)}, "cannot be read"),
    ],
)
def test_recorded_routing_that_does_not_fit_says_what_is_needed(folder, capsys, arrays, says):
    np.savez(folder / "r.npz", **arrays)
    line = fail(capsys, folder, "run", "--routing", str(folder / "r.npz"))
    assert says in line, line
    assert "r.npz" in line


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "no config.json there"),
        ("{", "config.json: not valid JSON"),
        (json.dumps(CONFIG | {"model_type": "llama"}), "model_type 'llama' is not served"),
        (json.dumps(CONFIG | {"num_experts": -3}), "num_experts"),
        (json.dumps({k: v for k, v in CONFIG.items() if k != "hidden_size"}), "hidden_size"),
    ],
)
def test_a_model_that_is_none_is_named(folder, capsys, command, config, says):
    file = folder / "model" / "config.json"
    file.unlink()
    if config is not None:
        file.write_text(config)
    line = fail(capsys, folder, command)
    assert says in line, line
    assert str(folder) in line


def test_a_model_that_fits_no_card_says_so_for_each(folder, capsys):
    huge = CONFIG | {"hidden_size": 65_536, "vocab_size": 4_000_000}  # 0.5 TB of embeddings
    (folder / "model" / "config.json").write_text(json.dumps(huge))
    line = fail(capsys, folder, "plan")
    assert "fits none of the cards" in line
    assert all(card in line for card in ("rtx-4090", "rtx-5090", "a100", "h100", "h200"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--trace", "/nowhere.npz"], "/nowhere.npz: no such file"),
        (["--slots", "0"], "--slots 0"),
        (["--slots", "many"], "--slots: cannot read 'many'"),
        (["--requests", "0"], "--requests: cannot read '0'"),
        (["--requests", "900"], "900 interleaved requests need as many sequences"),
        (["--steps", "3"], "--steps must be at least 20"),
        (["--experts", "-2"], "--experts must be at least"),
        (["--experts", "2"], "--experts must be at least"),
        (["--seed", "-1"], "--seed must be at least 0"),
    ],
)
def test_residency_names_what_is_wrong(tmp_path, capsys, change, says):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "r.npz", **{f"s{i}": rng.integers(0, 8, (40, 2, 2)) for i in range(40)})
    assert main(["simulate", "residency", "--trace", str(tmp_path / "r.npz"), *change]) == 2
    captured = capsys.readouterr()
    assert says in captured.err, captured.err
    assert len(captured.err.splitlines()) == 1
