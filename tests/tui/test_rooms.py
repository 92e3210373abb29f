"""What the dashboard is made of: only its board knows Textual, and nothing of it knows what trains."""

import subprocess
import sys
from pathlib import Path

import pytest

import xtrain

TUI = Path(xtrain.__file__).parent / "tui"
PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*{".".join(module.split(".")[:depth]) for module in sys.modules for depth in (1, 2)})
"""


def modules(room: str) -> list[str]:
    return [f"xtrain.tui.{room}.{path.stem}" for path in sorted((TUI / room).glob("*.py")) if path.stem != "__init__"]


# What compiles plans, of which the dashboard knows only the files.
COMPILER = {f"xtrain.{room}" for room in ("dsl", "plan", "blocks", "contracts", "planner")}


@pytest.mark.parametrize(("room", "unknown"), [
    ("model", {"textual", "torch", "numba", *COMPILER, "xtrain.runtime", "xtrain.cli"}),
    ("curves", {"textual", "torch", "numba", *COMPILER, "xtrain.runtime", "xtrain.cli"}),
    ("pages", {"textual", "torch", "numba", *COMPILER, "xtrain.runtime", "xtrain.cli"}),
    ("report", {"textual", "torch", "numba", *COMPILER, "xtrain.runtime", "xtrain.cli"}),
    ("board", {"torch", "numba", *COMPILER, "xtrain.runtime", "xtrain.cli"}),
    ("lines", {"textual", "torch", "numpy", *COMPILER, "xtrain.runtime", "xtrain.cli"}),
])  # fmt: skip
def test_what_a_room_loads(room, unknown):
    command = [sys.executable, "-c", PROBE, *modules(room)]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert "xtrain.tui" in loaded
    assert not loaded & unknown


def test_what_the_command_line_and_the_launcher_ask_loads_no_textual():
    names = ["xtrain.tui.board.terminal", "xtrain.cli.watch", "xtrain.cli.following"]
    loaded = set(subprocess.run([sys.executable, "-c", PROBE, *names], capture_output=True, text=True).stdout.split())
    assert "xtrain.tui" in loaded and not loaded & {"textual", "numpy", "rich", "torch"}
