"""Several answers streaming at once, readable on a terminal and in a log.

Room: demo. Rule: shows `Chat` objects that others fill; knows nothing of HTTP.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

WIDTH = 88


@dataclass(slots=True, eq=False)
class Chat:
    question: str
    answer: str = ""
    finish: str | None = None  # as the server said; None while it streams


class Lines:
    """One line at a time, each with the number of its chat, as soon as it is full or the answer ends."""

    def __init__(self, chats: Sequence[Chat]) -> None:
        self.number = {id(chat): n for n, chat in enumerate(chats, 1)}
        self.printed = dict.fromkeys(self.number, 0)  # characters of each answer that are out
        for chat in chats:
            print(f"[{self.number[id(chat)]}] > {chat.question}")

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, chat: Chat) -> None:
        rest = chat.answer[self.printed[id(chat)] :]
        lines = rest.splitlines(keepends=True)
        # The last line may still grow, and a full one may still end within a word.
        whole = lines if chat.finish else [line for line in lines if line.endswith("\n")]
        if not whole and len(rest) > WIDTH and " " in rest[:WIDTH]:
            whole = [rest[: rest.rindex(" ", 0, WIDTH) + 1]]
        for line in whole:
            self.printed[id(chat)] += len(line)
            for part in textwrap.wrap(line, WIDTH):
                print(f"[{self.number[id(chat)]}] {part}", flush=True)


class Panes:
    """A pane for each chat, redrawn in place."""

    def __init__(self, chats: Sequence[Chat]) -> None:
        from rich.live import Live

        self.chats = chats
        self.live = Live(get_renderable=self.draw, refresh_per_second=10)

    def __enter__(self) -> Panes:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)

    def show(self, chat: Chat) -> None:
        """Nothing to do: the panes are drawn at their own pace."""

    def draw(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        return Group(
            *(
                Panel(Text(chat.answer.strip() or "..."), title=chat.question, title_align="left",
                      border_style="green" if chat.finish else "yellow")
                for chat in self.chats
            )
        )  # fmt: skip
