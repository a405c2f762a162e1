"""Views of the arena; tables whose device copy follows the host's mirror."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.pool import CorruptPoolError, GeometryError
from rimuru.pool.arena import Arena
from rimuru.pool.tables import KVTables, Table


def apply(table, index, value):
    table.view(-1)[index] = value


def test_views_pages_and_addresses_are_the_same_bytes():
    arena = Arena(8192)
    assert arena.address % 256 == 0
    page = arena.page(2, 1024, 512)
    arena.view(torch.bfloat16)[1024] = 1.5
    assert page.view(torch.bfloat16)[0] == 1.5
    assert page.data_ptr() == arena.address + 2048
    assert arena.view(torch.float32) is arena.view(torch.float32)


def test_poison_is_nan_in_every_float_format_and_stays_in_its_page():
    arena = Arena(4096)
    arena.data.zero_()
    arena.poison([1], 1024, 1000)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.isnan(arena.page(1, 1024, 1000).view(dtype)).all()
    assert int((arena.data == 0xFF).sum()) == 1000


def test_a_foreign_buffer_is_aligned_and_must_be_large_enough():
    buffer = torch.empty(4096 + 256, dtype=torch.uint8)
    arena = Arena(4096, buffer=buffer[1:])
    assert arena.address % 256 == 0
    with pytest.raises(GeometryError, match="for alignment"):
        Arena(4353, buffer=buffer)
    with pytest.raises(GeometryError, match="flat"):
        Arena(16, buffer=torch.empty(32))
    with pytest.raises(GeometryError, match="at least one"):
        Arena(0)
    with pytest.raises(GeometryError, match="outside"):
        arena.page(4, 1024, 1)


def test_the_peak_of_bytes_in_use_is_kept():
    arena = Arena(100)
    arena.account(70)
    arena.account(20)
    assert (arena.used_bytes, arena.peak_bytes) == (20, 70)


edits = st.lists(st.tuples(st.integers(0, 23), st.lists(st.integers(0, 99), min_size=1, max_size=4)))


@settings(max_examples=50, deadline=None)
@given(st.lists(edits, max_size=4))
def test_the_last_edit_of_a_cell_wins_and_each_cell_is_sent_once(batches):
    table = Table((4, 6), torch.int64, fill=-1)
    want = np.full(24, -1)
    for batch in batches:
        for start, values in batch:
            values = values[: 24 - start]
            table.stage_run(start, values)
            want[start : start + len(values)] = values

        def once(device_table, index, value):
            assert len(set(index.tolist())) == len(index)
            apply(device_table, index, value)

        table.flush(once)
        table.check()
        assert np.array_equal(table.device_table.numpy().reshape(-1), want)


def test_many_cells_at_once_and_one_cell():
    table = Table((10,), torch.int32)
    table.stage_many(np.array([1, 3, 1]), np.array([5, 6, 7]))
    table.stage(3, 9)
    assert table.staged == 4
    assert table.flush(apply) == 2
    assert table.device_table.tolist()[:4] == [0, 7, 0, 9]
    assert table.flush(apply) == 0


def test_edits_outside_the_table_are_refused():
    with pytest.raises(IndexError):
        Table((4,), torch.int32).stage_run(3, [1, 2])
    with pytest.raises(IndexError):
        KVTables(1, 2, 4).stage_blocks(0, 3, [1, 2])
    with pytest.raises(IndexError):
        Table((4,), torch.int32).stage(-1, 2)


def test_rows_land_in_their_group_and_slot():
    tables = KVTables(groups=2, slots=3, blocks=4)
    tables.stage_blocks(2, 1, [7, 70, 8, 80])
    tables.flush(apply)
    assert tables.device_table[0, 2].tolist() == [0, 7, 8, 0]
    assert tables.device_table[1, 2].tolist() == [0, 70, 80, 0]
    assert int(tables.device_table.sum()) == 165
    tables.check()


def test_check_sees_a_device_table_written_behind_the_mirror():
    table = Table((4,), torch.int32)
    table.device_table[2] = 1
    with pytest.raises(CorruptPoolError, match="differs from its mirror"):
        table.check()
