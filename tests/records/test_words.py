"""The words of records stand in `records/` alone: those who read them compare with these."""

import ast
from pathlib import Path

from xtrain.records.events import EVENT_TYPES
from xtrain.records.names import ControlState, ControlWord, EndStatus

ROOT = Path(__file__).parents[2]
# Words of other things too: verbs and folders, severities, what a rank or a run is like, columns, keys of plans.
COMMON = {
    "alert", "best", "checkpoint", "control", "data", "done", "environment", "eval", "export", "failed", "generate",
    "model", "paused", "restart", "resumed", "rollback", "setup", "stop", "stopped", "stuck", "warning",
}  # fmt: skip


def test_the_dashboard_and_the_command_line_write_none_out():
    words = {*EVENT_TYPES, *ControlWord, *ControlState, *EndStatus}
    assert words > COMMON
    found = []
    for path in (path for room in ("tui", "cli", "text") for path in (ROOT / room).rglob("*.py")):
        texts = (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Constant))
        found += [f"{path.relative_to(ROOT)}: {each.value}" for each in texts if each.value in words - COMMON]
    assert not found
