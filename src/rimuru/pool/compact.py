"""Which pages to move so that parents come back whole.

Room: the pool. Rule: a plan only; `Allocator.move` keeps the books and the caller copies the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping


def plan_moves(
    parents: Mapping[int, tuple[Collection[int], Collection[int]]],
    pinned: Callable[[int], bool],
    most: int,
    enough: int | None = None,
) -> list[tuple[int, int]]:
    """Moves (source page, target page) that free the most of `parents` for the fewest pages moved.

    parents: of one class, those with both used and free pages, as (used pages, free pages). The
    emptiest give their pages to the fullest. A parent with a pinned page stays but takes pages in.
    What then remains is filled up, so that at most one parent without pinned pages is left partly
    used, if `most` moves suffice; not so with `enough`, the number of parents to free at most.
    Sources and targets are disjoint.
    """
    stuck = {p: any(map(pinned, used)) for p, (used, _) in parents.items()}
    # Those that stay anyway come first among the takers; then the fullest.
    takers = sorted(parents, key=lambda p: (not stuck[p], len(parents[p][1]), p))
    room = sum(len(free) for _, free in parents.values())
    givers: list[int] = []
    moved = 0
    for parent in reversed(takers):
        used, free = parents[parent]
        room -= len(free)
        # All pages of the givers so far must fit the parents that stay.
        if stuck[parent] or moved + len(used) > min(room, most) or len(givers) == enough:
            break
        givers.append(parent)
        moved += len(used)
    stay = takers[: len(takers) - len(givers)]
    targets = [page for p in stay for page in sorted(parents[p][1])]
    sources = [page for p in givers for page in sorted(parents[p][0])]
    moves = list(zip(sources, targets, strict=False))
    if enough is not None:
        return moves
    return moves + _fill(parents, stay, targets[len(moves) :], stuck, most - len(moves))


def _fill(
    parents: Mapping[int, tuple[Collection[int], Collection[int]]],
    stay: list[int],
    targets: list[int],
    stuck: Mapping[int, bool],
    most: int,
) -> list[tuple[int, int]]:
    """Fill the fullest of the parents that stay from the emptiest, until one is partly used."""
    moves: list[tuple[int, int]] = []
    open_ = set(targets)
    for giver in reversed(stay):
        if stuck[giver]:
            break
        used, free = parents[giver]
        open_ -= set(free)
        if not open_:
            break
        wanted = [page for page in targets if page in open_]
        some = list(zip(sorted(used), wanted, strict=False))[: most - len(moves)]
        moves += some
        open_ -= {target for _, target in some}
        if open_ or len(moves) >= most:
            break  # all its pages are placed, or no more may move
    return moves
