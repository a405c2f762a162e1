"""Engines for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.cores import Bench, make_bench


@pytest.fixture
def bench() -> Callable[..., Bench]:
    """Makes an engine over a tiny checkpoint, see `make_bench`."""
    return make_bench
