"""The plan of a run, as its directory has it."""

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from xtrain.planner.plan import Plan
from xtrain.planner.serialise import PlanError, from_json
from xtrain.regular_files import read_json
from xtrain.runtime.errors import EnvironmentFault

PATIENCE: Final = 60.0  # seconds: file systems of several machines may show a new file late


def plan_in(directory: Path) -> Plan:
    """The plan that the launcher has left in a run directory. Raises OSError, ValueError, PlanError."""
    return from_json(read_json(directory / "plan.json"))


def planned(directory: Path, plan_id: str, patience: float | None = None) -> Plan:
    """The same on any machine, as soon as its file system shows what the first rank has written there. Raises
    EnvironmentFault if it does not within `patience` seconds; None: PATIENCE."""
    deadline = time.monotonic() + (PATIENCE if patience is None else patience)
    while True:
        with suppress(OSError, ValueError, PlanError):
            if (plan := plan_in(directory)).id == plan_id:
                return plan
        if time.monotonic() > deadline:
            where = f"{directory}, seen from {Path.cwd()} on {socket.gethostname()},"
            raise EnvironmentFault(
                "X706", f"{where} does not hold the plan of this start: all machines need a shared run directory"
            )
        time.sleep(0.2)
