"""References, pins, epochs and tags."""

from __future__ import annotations

import pytest
from shapes import plain

from rimuru.pool import Allocator, ForeignPageError, InUseError, Kind, Ledger, PageError, StepEvent


@pytest.fixture
def ledger():
    plan = plain()
    return Ledger(Allocator(plan, plan.huge_bytes * 2), debug=True)


def test_a_page_waits_for_its_epoch_and_counts_as_coming(ledger):
    kv = ledger.allocator.geometry.class_of(Kind.KV)
    pages = ledger.allocator.take(kv, 2, "r")
    done = 0
    ledger.give_after(kv, pages, "r", StepEvent(3, lambda: done))
    assert ledger.coming(kv) == 2
    assert ledger.poll() == 0
    assert ledger.allocator.used(kv) == 2
    with pytest.raises(InUseError, match="waits for its epoch"):
        ledger.give(kv, pages[:1], "r")
    assert ledger.pinned(kv, pages[0]), "a page that waits must not be moved"
    done = 3
    assert ledger.poll() == 2
    assert not ledger.pinned(kv, pages[0])
    assert (ledger.coming(kv), ledger.allocator.used(kv)) == (0, 0)
    ledger.check()


def test_an_event_that_has_passed_is_not_waited_for(ledger):
    kv = ledger.allocator.geometry.class_of(Kind.KV)
    ledger.give_after(kv, ledger.allocator.take(kv, 1, "r"), "r", StepEvent(0, lambda: 0))
    assert ledger.allocator.used(kv) == 0


def test_pinned_and_shared_pages_are_not_given_back(ledger):
    kv = ledger.allocator.geometry.class_of(Kind.KV)
    (page,) = ledger.allocator.take(kv, 1, "r")
    ledger.pin(kv, page)
    with pytest.raises(InUseError, match="pinned"):
        ledger.give(kv, [page], "r")
    ledger.unpin(kv, page)
    assert ledger.retain(kv, page) == 2
    with pytest.raises(InUseError, match="2 users"):
        ledger.give(kv, [page], "r")
    assert ledger.pinned(kv, page)
    assert ledger.drop(kv, page) == 1
    ledger.give(kv, [page], "r")
    with pytest.raises(PageError, match="not pinned"):
        ledger.unpin(kv, page)


def test_tags_tell_a_page_that_was_handed_out_twice(ledger):
    kv = ledger.allocator.geometry.class_of(Kind.KV)
    pages = ledger.allocator.take(kv, 1, "a")
    ledger.tag(kv, pages, "a")
    with pytest.raises(InUseError, match="handed out twice, first to 'a'"):
        ledger.tag(kv, pages, "b")
    ledger.allocator.disown(kv, "a")
    with pytest.raises(ForeignPageError, match="tagged 'a'"):
        ledger.give(kv, pages, None)
