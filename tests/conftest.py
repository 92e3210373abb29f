"""Which tests run beside each other: those that start ranks keep to one process, of the others each file does."""

import gc
import sys

import pytest
from xdist.scheduler import LoadScopeScheduling

RANKS = "tests/distributed"
# The longest first, so that no process is left alone with one of them at the end.
FIRST = (RANKS, "tests/test_quickstart.py")


class Dealt(LoadScopeScheduling):
    """Ranks of several tests at once would fight for the cores, and a gang of ranks serves a whole session."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Dealt:
    return Dealt(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        group = _group(item.nodeid)
        return FIRST.index(group) if group in FIRST else len(FIRST)

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    # What is loaded by now stays loaded: garbage is looked for among what comes later.
    gc.collect()
    gc.freeze()
    if (ranks := sys.modules.get("ranks")) is not None:
        ranks.begin()


def _group(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return RANKS if file.startswith(f"{RANKS}/") else file
