"""Kernels compiled ahead are those that the same launches would compile."""

import json
import os
import subprocess
import sys

from kernels.compile_only import TESTS


def test_nothing_is_left_to_compile_after_compiling_ahead():
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}"}
    command = [sys.executable, "-m", "kernels.compile_ahead"]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    assert json.loads(run.stdout) == {"during": 3, "launchers": 3, "after": 0, "restored": True}
