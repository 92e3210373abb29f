"""User code that a saved plan or run directory executes, reported before it runs."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from xtrain.planner.plan import Plan


def say_own_code(plan: "Plan", path: "str | Path") -> None:
    """Warn of user modules and commands that the plan executes; print nothing if there are none. path: of the plan."""
    from xtrain.dsl.diagnostics.source import printable
    from xtrain.planner.data.chain import code_of

    if found := code_of(plan):
        said = f"warning: {path} runs code of its author: {', '.join(found)}; if you do not trust it, stop here"
        print(printable(said), file=sys.stderr, flush=True)
