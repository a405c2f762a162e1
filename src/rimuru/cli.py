"""The `rimuru` command.

Room: the top of the house. Rule: commands are imported only when they run; whatever a user can get
wrong ends with one message, without a traceback: exit code 2 for a wrong choice, 1 for what went wrong.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from rimuru import __version__
from rimuru.errors import ConfigError, RimuruError

# Each module has `add_arguments(parser)` and `run(args) -> int`.
COMMANDS = {
    "serve": ("rimuru.server.serve", "serve a model over HTTP"),
    "chat": ("rimuru.server.chat", "talk to a running server"),
    "plan": ("rimuru.sim.planner", "where every byte would go; for a load, which card would do"),
    "simulate": ("rimuru.sim.cli", "on paper: a load under each memory policy, the case study, fleets"),
}

# Our flag, and what others call it where no likeness of letters leads to it.
MEANT = {
    "--max-num-seqs": "max-sequences max-batch-size batch-size parallel",
    "--max-num-batched-tokens": "chunked-prefill-size",
    "--max-model-len": "context-length ctx-size max-seq-len",
    "--device-memory": "gpu-memory vram",
    "--gpu-memory-utilization": "mem-fraction-static",
    "--enforce-eager": "disable-cuda-graph no-cuda-graph",
}


class Parser(argparse.ArgumentParser):
    """argparse that names the closest flag, and for flags of vLLM what takes their place here."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise for the first argument nobody took."""
        from rimuru.server.vllm_flags import advice

        flag = next((arg for arg in unknown if arg.startswith("-")), unknown[0]).split("=")[0]
        if not flag.startswith("-"):
            raise ConfigError(f"{flag!r} is one argument too many; see {self.prog} --help")
        if flag == "--dry-run":
            raise ConfigError(f"{flag} is unknown; rimuru plan MODEL shows the plan and loads nothing")
        known = advice(flag)
        if known:
            raise ConfigError(f"{flag} is a flag of vLLM that has no effect here: {known}")
        parsers = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
        own = [option for p in parsers for action in p._actions for option in action.option_strings]
        close = [ours for ours, names in MEANT.items() if flag[2:] in names.split() and ours in own]
        close += difflib.get_close_matches(flag, own, n=1)
        hint = f"did you mean {close[0]}?" if close else f"see {self.prog} --help"
        raise ConfigError(f"{flag} is unknown; {hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except ConfigError as exc:
        return _complain(exc, 2)
    except RimuruError as exc:
        return _complain(exc, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `rimuru plan ... | head`
        sys.stderr.close()
        return 0


def _complain(exc: Exception, code: int) -> int:
    print(f"rimuru: {exc}", file=sys.stderr)
    return code


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name in ("version", "--version", "-V"):
        print(f"rimuru {__version__}")
        return 0
    if name == "bench":
        return _bench(arguments[1:])
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, [*COMMANDS, "bench", "version"], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"there is no command {name!r}{hint} Commands: {', '.join(COMMANDS)}, bench, version"
        )
    module_name, summary = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = Parser(prog=f"rimuru {name}", description=summary, allow_abbrev=False)
    module.add_arguments(parser)
    args, unknown = parser.parse_known_args([_dashed(argument) for argument in arguments[1:]])
    if unknown:
        from rimuru.server.vllm_flags import split_granted

        unknown, notes = split_granted(unknown)
        for note in notes:
            print(f"rimuru: {note}", file=sys.stderr)
        if unknown:
            parser.refuse(unknown)
    return module.run(args)


def _dashed(argument: str) -> str:
    """`--max_model_len` is `--max-model-len`, as vLLM has it."""
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument


def _benchmarks() -> list[str]:
    import rimuru.bench

    return sorted(m.name for m in pkgutil.iter_modules(rimuru.bench.__path__) if not m.name.startswith("_"))


def _about(benchmark: str) -> str:
    """The first line of a benchmark's docstring, without importing it: some bring torch."""
    source = pkgutil.get_data("rimuru.bench", f"{benchmark}.py") or b""
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


def _bench(arguments: list[str]) -> int:
    """`rimuru bench NAME ...` runs `rimuru.bench.NAME.main`."""
    names = _benchmarks()
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name.replace('_', '-'):<12}{_about(name)}" for name in names]
        print("\n".join(["usage: rimuru bench NAME [--help | options]", "", *lines]))
        return 0
    name = arguments[0].replace("-", "_")
    if name not in names:
        raise ConfigError(f"there is no benchmark {arguments[0]!r}; there are: {', '.join(names)}")
    return int(importlib.import_module(f"rimuru.bench.{name}").main(arguments[1:]) or 0)


def _overview() -> str:
    rows = [(name, summary) for name, (_, summary) in COMMANDS.items()]
    benchmarks = ", ".join(name.replace("_", "-") for name in _benchmarks())
    rows += [("bench", f"measure; one of {benchmarks}"), ("version", "print the version")]
    lines = [f"  rimuru {name:<10} {summary}" for name, summary in rows]
    return "\n".join(
        [
            "rimuru serves Mixture-of-Experts models whose experts and KV cache share one page pool.",
            "",
            *lines,
            "",
            "`rimuru COMMAND --help` lists a command's flags.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
