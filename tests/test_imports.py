"""The rooms of the house: imports go downwards only, and light modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
MODULES = sorted((SRC / "rimuru").rglob("*.py"))

# Each floor may import the floors before it and its own room; rooms on one floor do not see each other.
FLOORS = [
    {"errors"},
    {"kernels", "pool"},
    {"policy", "cache", "experts"},
    {"layers"},
    {"models"},
    {"engine"},
    {"server", "sim", "bench", "demo"},
    {"cli"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
POOL_MAY_IMPORT = {*sys.stdlib_module_names, "numpy", "rimuru"}
POOL_WITH_TORCH = {"arena", "tables"}
WITHOUT_TORCH = {
    "engine": {"request", "config", "stats", "client", "scheduler", "text"},
    "policy": None,  # every module
    "cache": None,
}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of the modules that `path` imports anywhere, with line numbers (type checking too)."""
    package = path.relative_to(SRC).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*base, *filter(None, [node.module])])
            # `from rimuru import pool` names a room in its alias, not in its origin.
            yield from ((f"{origin}.{alias.name}", node.lineno) for alias in node.names)


def room_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "rimuru" and len(parts) > 1 and parts[1] in FLOOR_OF else None


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_downwards_and_light_modules_stay_light(path: Path) -> None:
    room, stem = room_of(name_of(path)), path.stem
    light = room in WITHOUT_TORCH and (WITHOUT_TORCH[room] is None or stem in WITHOUT_TORCH[room])
    wrong = []
    for name, line in imports(path):
        top, target = name.split(".")[0], room_of(name)
        if room and target and target != room and FLOOR_OF[target] >= FLOOR_OF[room]:
            wrong.append(f"line {line}: {room} imports {target}")
        if light and top in {"torch", "triton", "transformers"}:
            wrong.append(f"line {line}: {name} in a module that must stay light")
        torch_allowed = top == "torch" and stem in POOL_WITH_TORCH
        if room == "pool" and top not in POOL_MAY_IMPORT and not torch_allowed:
            wrong.append(f"line {line}: the pool imports {name}")
    assert not wrong, f"{path.relative_to(SRC)}: " + "; ".join(wrong)


def test_every_room_has_a_floor() -> None:
    rooms = {p.relative_to(SRC / "rimuru").parts[0].removesuffix(".py") for p in MODULES} - {"__init__"}
    assert rooms <= FLOOR_OF.keys(), f"give {sorted(rooms - FLOOR_OF.keys())} a place in FLOORS"


def test_the_package_imports_without_the_server_s_dependencies() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"fastapi", "uvicorn", "httptools", "msgspec", "zmq", "prometheus_client"}:
            raise ModuleNotFoundError(f"{name} is blocked")
sys.meta_path.insert(0, Absent())
import rimuru
for name in getattr(rimuru, "__all__", ()):
    getattr(rimuru, name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
