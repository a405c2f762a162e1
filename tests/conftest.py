"""What every test shares: one thread a process, no network, and data that may be absent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Before torch and tokenizers are imported: several test processes share the cores, and a sum's order must
# not depend on how many there are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton decides when its language is first imported, by whichever test comes first, whether it interprets.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest

REPO = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("fuzz", deadline=None, print_blob=True, max_examples=5_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def shared_file() -> Callable[[str], Path]:
    """`shared_file("data/x.csv")` is that file of the `shared` folder beside the repository.

    Skips the test, naming the file, where it is absent: the folder is not part of the repository.
    """
    root = Path(os.environ.get("RIMURU_SHARED", REPO.parent / "shared"))

    def find(name: str) -> Path:
        if not (root / name).exists():
            pytest.skip(f"shared file {name} is absent")
        return root / name

    return find
