"""Maps of a pool show the bytes its books speak of."""

from __future__ import annotations

from xml.etree import ElementTree

from fuzz import Fuzz
from shapes import every_kind

from rimuru.pool import Allocator, Kind
from rimuru.pool.draw import svg_map, text_map


def test_spans_cover_the_pool_once_and_agree_with_the_counts():
    fuzz = Fuzz(5)
    for _ in range(300):
        fuzz.rng.choice(fuzz.ops)()
        at = 0
        spans = fuzz.pool.spans()
        for span in spans:
            assert span.start == at
            at += span.grains
        assert at == fuzz.pool.roots * fuzz.plan.page_grains(0)
        for kind in Kind:
            used = sum(s.state == "used" and fuzz.plan.classes[s.cls].kind == kind for s in spans)
            assert used == fuzz.pool.counts(kind).used


def test_the_text_map_shows_kinds_free_pages_and_what_is_lost():
    plan = every_kind()
    pool = Allocator(plan, 4 * plan.huge_bytes)
    pool.take(plan.class_of(Kind.EXPERT), 1, "e")
    pool.take(plan.class_of(Kind.EXPERT_PACKED), 1, "p")
    pool.take(plan.classes_of(Kind.KV)[1], 3, "k")
    text = text_map(pool, width=288)  # a character a grain
    assert [line.split()[0] for line in text.splitlines()[:4]] == ["0", "288", "576", "864"]
    for letter in "EPk.-":
        assert letter in text.split("grain")[0]
    assert "k KV" in text


def test_the_svg_map_is_well_formed_and_has_a_rectangle_a_page():
    plan = every_kind()
    pool = Allocator(plan, 2 * plan.huge_bytes)
    pool.take(plan.class_of(Kind.EXPERT), 2, "e")
    tree = ElementTree.fromstring(svg_map(pool))
    used = [r for r in tree.iter() if r.get("fill") == "#d9822b" and r.get("height") == "16"]
    assert len(used) == 2
