"""How a plan was made, written into it when it is saved: what `drift` later holds against the day it is run."""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

from attrs import evolve

import xtrain
from xtrain.planner.plan import Plan, PlanOrigin
from xtrain.version import __version__

# The rooms that decide what a plan is and what it does; how it is shown or asked for does not.
ROOMS: Final = ("components", "dsl", "planner", "runtime")
PACKAGE: Final = Path(str(xtrain.__file__)).parent


def signed(plan: Plan, sets: Sequence[str], world: int | None) -> Plan:
    """`plan` with a note that it was made of its spec with these `--set` texts and this `--world`."""
    origin = PlanOrigin(sets=tuple(sets), world=world, version=__version__, source=source_fingerprint())
    return evolve(plan, origin=origin)


@cache
def source_fingerprint(package: Path = PACKAGE) -> str:
    """16 hex digits over the names and contents of xtrain's source files in ROOMS (4 ms)."""
    digest = blake2b(digest_size=8)
    files = (path for room in ROOMS for path in (package / room).rglob("*") if path.suffix in (".py", ".lark"))
    for path in sorted(files):
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
