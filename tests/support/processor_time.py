"""A plugin that says what tests cost: the seconds of processor time of each file, with all processes that it starts.

    PYTHONPATH=tests/support pytest -p processor_time

Seconds of the clock say little on a machine that does other things too. What a process costs that others are forked
from, as that of the ranks, is on the account of the test during which it works.
"""

import os
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

COLLECTION = "(until all tests are collected)"
LISTED = 40
LONG = 0.1  # seconds; a shorter test starts no process
_TICKS = os.sysconf("SC_CLK_TCK")


def _of_children() -> float:
    """Seconds of the processes that this one has started and that live, of theirs, and of those of them that have
    ended."""
    children: dict[int, list[tuple[int, float]]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            children.setdefault(int(fields[1]), []).append((int(folder.name), sum(map(int, fields[11:15])) / _TICKS))

    def below(parent: int) -> float:
        return sum(seconds + below(child) for child, seconds in children.get(parent, ()))

    return below(os.getpid())


class _Account:
    """Seconds and tests by file."""

    def __init__(self) -> None:
        self.seconds, self.tests = Counter[str](), Counter[str]()
        self._last = self._of_children = 0.0

    def charge(self, name: str, *, looks: bool = True) -> None:
        """looks: at other processes, which takes some milliseconds."""
        if looks:
            self._of_children = _of_children()
        now = sum(os.times()[:4]) + self._of_children
        self.seconds[name] += now - self._last
        self._last = now


ACCOUNT = _Account()


def pytest_collection_finish() -> None:
    ACCOUNT.charge(COLLECTION)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    file, begun = item.nodeid.partition("::")[0], time.monotonic()
    result = yield
    ACCOUNT.charge(file, looks=time.monotonic() - begun > LONG)
    ACCOUNT.tests[file] += 1
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["processor_time"] = [dict(ACCOUNT.seconds), dict(ACCOUNT.tests)]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    seconds, tests = getattr(node, "workeroutput", {}).get("processor_time", ({}, {}))
    ACCOUNT.seconds.update(seconds)
    ACCOUNT.tests.update(tests)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section(f"{ACCOUNT.seconds.total():.0f} s of processor time")
    for name, seconds in ACCOUNT.seconds.most_common(LISTED):
        terminalreporter.write_line(f"{seconds:8.1f} s {ACCOUNT.tests[name]:5d} tests  {name}")
