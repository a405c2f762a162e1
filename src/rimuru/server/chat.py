"""`rimuru chat`: a conversation in the terminal with any server of the OpenAI API.

Room: a client; imports nothing of the server. Rule: the answer appears as it comes, and a server that
is not there is one clear sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from rimuru.errors import ConfigError, RimuruError

HELP = "/new starts over, /undo takes back the last turn, /quit ends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://localhost:8000",
                        help="the server, with or without http:// and /v1")  # fmt: skip
    parser.add_argument("--model", help="name at the server; its first model otherwise")
    parser.add_argument("--api-key", default=os.environ.get("RIMURU_API_KEY"), help="or RIMURU_API_KEY")
    parser.add_argument("-m", "--message", help="say this, print the answer, end")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)


def run(args: argparse.Namespace) -> int:
    try:
        import httpx
    except ModuleNotFoundError:
        raise RimuruError(
            "rimuru chat needs httpx, which is missing: pip install '.[server]' in the checkout"
        ) from None
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    timeout = httpx.Timeout(10.0, read=None)
    try:
        url = args.url if "://" in args.url else f"http://{args.url}"
        base = url.rstrip("/").removesuffix("/v1")
        with httpx.Client(base_url=base, headers=headers, timeout=timeout) as http:
            chat = Chat(http, args)
            return chat.once(args.message) if args.message is not None else chat.loop()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as exc:
        raise ConfigError(f"--url {args.url!r}: {exc}; write it as http://host:port") from None
    except httpx.TransportError as exc:
        raise RimuruError(
            f"no server answers at {args.url} ({exc}); start one with: rimuru serve demo"
        ) from None


class Chat:
    """A conversation: the turns so far and how to continue them."""

    def __init__(self, http: Any, args: argparse.Namespace):
        self.http = http
        self.opening = [{"role": "system", "content": args.system}] if args.system else []
        self.turns: list[dict[str, str]] = []
        self.options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
        self.model = args.model or self._first_model()

    def _first_model(self) -> str:
        response = self.http.get("/v1/models")
        _check(response)
        try:
            return response.json()["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise RimuruError(f"{response.url} lists no model; is this an OpenAI server?") from None

    def once(self, message: str) -> int:
        self.say(message)
        return 0

    def loop(self) -> int:
        """Turns until the end of input or /quit."""
        interactive = sys.stdin.isatty()
        if interactive:
            print(f"{self.model} at {self.http.base_url} ({HELP})")
            with contextlib.suppress(ModuleNotFoundError):
                import readline  # noqa: F401  line editing and history for input()
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                return 0
            if line in ("/quit", "/exit"):
                return 0
            if line == "/new":
                self.turns.clear()
            elif line == "/undo":
                del self.turns[-2:]
            elif line.startswith("/"):
                print(HELP)
            elif line:
                try:
                    self.say(line)
                except KeyboardInterrupt:  # stops this answer only; closing the stream aborts it
                    print()
                except RequestRefused as exc:
                    print(exc, file=sys.stderr)

    def say(self, message: str) -> None:
        """One turn; it is remembered once it was answered in full."""
        turn = {"role": "user", "content": message}
        answer = ""
        for piece in self._stream([*self.opening, *self.turns, turn]):
            print(piece, end="", flush=True)
            answer += piece
        print()
        self.turns += [turn, {"role": "assistant", "content": answer}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        options = {name: value for name, value in self.options.items() if value is not None}
        body = {"model": self.model, "messages": messages, "stream": True, **options}
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
            _check(response)
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RequestRefused(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""


class RequestRefused(RimuruError):
    """The server answered, and the answer was no."""


def _check(response: Any) -> None:
    if response.status_code == 200:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.text[:200]
    raise RequestRefused(f"the server answered {response.status_code}: {message}")
