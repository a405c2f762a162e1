"""The demo's own judgement and display; the whole run is slow."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from rimuru.demo.display import WIDTH, Chat, Lines
from rimuru.demo.run import DEVICE_MEMORY, PoolWatch, boundary_moves, faults, report

SNAPSHOT = {
    "pool_bytes": 400 * 2**20,
    "kinds": {
        "kv": {"used": {"bytes": 20 * 2**20, "pages": 40}, "cached": {"bytes": 0, "pages": 0}},
        "expert": {"resident": {"bytes": 380 * 2**20, "pages": 75}},
    },
    "experts_resident": 75,
    "experts_total": 240,
    "device_peak_bytes": DEVICE_MEMORY - 1,
}


def good_run() -> tuple[list[Chat], PoolWatch, int]:
    watch = PoolWatch()
    watch.add(copy.deepcopy(SNAPSHOT))
    chats = [Chat("capital?", "It is Paris.", "stop"), Chat("story?", "Once upon a time", "length")]
    return chats, watch, 0


def test_a_good_run_has_no_fault() -> None:
    assert faults(*good_run()) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda chats, watch: setattr(chats[0], "answer", "It is London."), "capital of France"),
        (lambda chats, watch: setattr(chats[1], "answer", " "), "story"),
        (lambda chats, watch: setattr(chats[1], "finish", "abort"), "abort"),
        (lambda chats, watch: watch.last.update(device_peak_bytes=DEVICE_MEMORY + 1), "device bytes"),
        (lambda chats, watch: watch.last.update(device_peak_bytes=0), "device bytes"),
        (lambda chats, watch: watch.resident.add(240), "cap is not tight"),
        (lambda chats, watch: watch.peak["kinds"]["kv"]["used"].update(bytes=0), "never held KV"),
    ],
)
def test_each_broken_claim_is_named(change, fault: str) -> None:
    chats, watch, code = good_run()
    change(chats, watch)
    (found,) = faults(chats, watch, code)
    assert fault in found


def test_a_server_that_does_not_stop_cleanly_is_a_fault() -> None:
    chats, watch, _ = good_run()
    assert "code -9" in faults(chats, watch, -9)[0]


def test_the_watch_keeps_the_snapshot_with_most_kv() -> None:
    watch = PoolWatch()
    for used in (3, 9, 4):
        snapshot = copy.deepcopy(SNAPSHOT)
        snapshot["kinds"]["kv"]["used"]["bytes"] = used * 2**20
        snapshot["experts_resident"] = 80 - used
        watch.add(snapshot)
    text = report(watch, {"lend, admission": 2, "lend, cold": 0, "reclaim, idle": 1})
    assert "9.0 MiB" in text
    assert "moved 3 times (2 x lend, admission; 1 x reclaim, idle)" in text
    assert "experts in the pool: 71 to 77 of 240" in text
    assert "cached" not in text


def test_moves_are_read_from_the_exposition() -> None:
    text = (
        "# HELP rimuru_boundary_moves_total x\n# TYPE rimuru_boundary_moves_total counter\n"
        'rimuru_boundary_moves_total{cause="admission",direction="lend",policy="reactive"} 4.0\n'
        'rimuru_boundary_moves_total{cause="idle",direction="reclaim",policy="reactive"} 2.0\n'
        "# TYPE rimuru_steps_total counter\nrimuru_steps_total 7.0\n"
    )
    assert boundary_moves(text) == {"lend, admission": 4, "reclaim, idle": 2}


def test_lines_show_every_word_once_under_its_chat(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"word{i}" for i in range(60)]
    chats = [Chat("first?"), Chat("second?")]
    with Lines(chats) as display:
        for i, word in enumerate(words):
            for chat in chats:
                chat.answer += word + ("\n\n" if i == 20 else " ")
                display.show(chat)
        for chat in chats:
            chat.finish = "stop"
            display.show(chat)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["[1] > first?", "[2] > second?"]
    assert max(map(len, lines)) <= WIDTH + len("[1] ")
    for n in (1, 2):
        mine = [line.removeprefix(f"[{n}] ") for line in lines[2:] if line.startswith(f"[{n}]")]
        assert " ".join(mine).split() == words


@pytest.mark.slow
def test_the_demo_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rimuru.demo"],
        capture_output=True,
        text=True,
        timeout=900,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "the boundary moved" in done.stdout
