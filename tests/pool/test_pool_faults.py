"""Planted faults: each is one that corrupts output in silence elsewhere, and each is caught here."""

from __future__ import annotations

import pytest
import torch
from fuzz import Fuzz
from shapes import every_kind, plain

from rimuru.pool import (
    Allocator,
    CorruptPoolError,
    DoubleFreeError,
    ForeignPageError,
    InUseError,
    Kind,
    Ledger,
    StepEvent,
    WrongKindError,
)
from rimuru.pool.tables import Table


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_every_block_what_it_was(seed):
    Fuzz(seed).run(600, check_every=20)


@pytest.fixture
def pool():
    plan = every_kind()
    return Allocator(plan, 2 * plan.huge_bytes)


def refused(pool, error, cls, pages, owner):
    before = [pool.counts(k) for k in Kind]
    with pytest.raises(error):
        pool.give(cls, pages, owner)
    assert before == [pool.counts(k) for k in Kind]
    pool.check()


def test_double_free(pool):
    kv = pool.geometry.classes_of(Kind.KV)[0]
    pages = pool.take(kv, 2, "a")
    pool.give(kv, pages[:1], "a")
    refused(pool, DoubleFreeError, kv, pages, "a")
    refused(pool, DoubleFreeError, kv, [pages[1], pages[1]], "a")


def test_foreign_free(pool):
    kv = pool.geometry.classes_of(Kind.KV)[0]
    mine, others = pool.take(kv, 1, "a"), pool.take(kv, 1, "b")
    refused(pool, ForeignPageError, kv, mine + others, "a")


def test_wrong_kind(pool):
    kv, expert = pool.geometry.classes_of(Kind.KV)[0], pool.geometry.class_of(Kind.EXPERT)
    page = pool.take(expert, 1, "a")
    refused(pool, WrongKindError, kv, page, "a")
    inner = pool.take(kv, 1, "kv")
    refused(pool, WrongKindError, expert, [pool.parent_of(kv, inner[0])], None)


def test_early_reuse_behind_an_epoch():
    """A page whose reader on another stream has not finished is not handed out again."""
    plan = plain()
    ledger = Ledger(Allocator(plan, plan.huge_bytes))
    expert = plan.class_of(Kind.EXPERT)
    pages = ledger.allocator.take(expert, 1, "store")
    ledger.give_after(expert, pages, "store", StepEvent(1, lambda: 0))
    assert ledger.allocator.obtainable(expert) == 0
    with pytest.raises(InUseError):
        ledger.give(expert, pages, "store")


def test_a_second_owner_of_a_page_is_seen(pool):
    kv = pool.geometry.classes_of(Kind.KV)[0]
    pages = pool.take(kv, 1, "a")
    pool._levels[kv].split[pool.parent_of(kv, pages[0])].add(pages[0])
    with pytest.raises(CorruptPoolError, match="have an owner"):
        pool.check()


def test_a_block_written_into_two_rows_is_seen():
    fuzz = Fuzz(1)
    for slot in (0, 1):
        fuzz.cache.admit(slot, [], 0)
        fuzz.cache.grow(slot, 2)
    for group in range(1, fuzz.groups):
        fuzz.cache._rows[1][group] = fuzz.cache._rows[0][group]
    with pytest.raises(CorruptPoolError, match="stands in two blocks"):
        fuzz.cache.check()


def test_a_table_edit_out_of_order_is_seen():
    """An old batch of edits applied after a newer one leaves the device behind the mirror."""
    table = Table((4,), torch.int32)
    batches = []

    def hold(device_table, index, value):
        batches.append((index, value))

    for value in (1, 2):
        table.stage(0, value)
        table.flush(hold)
    for index, value in reversed(batches):
        table.device_table.view(-1)[index] = value
    with pytest.raises(CorruptPoolError, match="differs from its mirror"):
        table.check()


class SlowEvent:
    """An event that has not passed until somebody waits for it."""

    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


def test_a_staging_buffer_in_flight_is_not_overwritten():
    """A ring of two: the third batch waits for the first one's copy, and bytes in flight stay."""
    table = Table((64,), torch.int32, ring=2)
    events, seen = [], []

    def record():
        events.append(SlowEvent())
        return events[-1]

    table._ring.record = record
    for value in range(1, 4):
        table.stage_run(0, [value] * 8)
        table.flush(lambda device_table, index, value: seen.append((value, value.clone())))
        for event, (live, copy) in zip(events, seen, strict=True):
            assert event.passed or torch.equal(live, copy), "overwritten while in flight"
    assert [e.passed for e in events] == [True, False, False]


def test_a_page_with_an_owner_is_not_given_back_as_nobodys():
    plan = every_kind()
    pool = Allocator(plan, 4 * plan.huge_bytes)
    cls = plan.groups_of(Kind.KV)[0].page_class
    mine, nobodys = pool.take(cls, 2 * plan.classes[cls].per_parent, "me"), pool.take(cls, 3, None)
    with pytest.raises(ForeignPageError, match="held by 'me'"):
        pool.give(cls, [nobodys[0], mine[0]], None)
    pool.check()
    pool.give(cls, nobodys, None)
    pool.give(cls, mine, "me")
    assert pool.whole_free() == pool.roots
