"""Which tests execute a line of the product: a plugin of pytest that records it, and the reader of its records.

    PYTHONPATH=tests/support python3.12 -m pytest -p executed_lines -m "not gpu"

Python 3.12 or newer can record. Processes that a test starts write records of their own, which belong to the test that
their worker ran when they began; those that are killed write none. The records lie in the folder `.executed`.
"""

import atexit
import bisect
import json
import os
import pickle
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from rooms import ROOMS, ROOT

FOLDER = ROOT / ".executed"
ROOM_PATHS = tuple(f"{ROOT}/{room}/" for room in ROOMS)
DIGESTS = FOLDER / "digests.json"  # of the product's files, by path
BETWEEN = ""  # of lines that a worker executes between tests, and while it collects them
SITE = f"""import sys
sys.path.append({str(ROOT / "tests/support")!r})
import executed_lines
executed_lines.RECORDER = executed_lines.RECORDER or executed_lines.Recorder()
"""


class Record(NamedTuple):
    """Lines that a process executed. test: its id, None for a process that a test started. began, ended: seconds since
    1970. seconds: processor time of the test with that of its processes. lines: bit masks by path."""

    worker: str
    test: str | None
    began: float
    ended: float
    seconds: float
    lines: dict[str, int]


class Recorder:
    """Records the first time that each line is executed, by `sys.monitoring`, in this process and forks of it."""

    def __init__(self) -> None:
        self.began, self.lines, self.used = time.time(), defaultdict[str, int](int), 0.0
        self.process = time.time_ns()  # numbers of processes come again
        self._rooms = ROOM_PATHS  # at the end of the interpreter no globals are left
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]  # 3.12
        self._monitoring, self._tool = monitoring, monitoring.COVERAGE_ID
        monitoring.use_tool_id(self._tool, "executed_lines")
        monitoring.register_callback(self._tool, monitoring.events.PY_START, self._on_start)
        monitoring.register_callback(self._tool, monitoring.events.LINE, self._on_line)
        monitoring.set_events(self._tool, monitoring.events.PY_START)
        os.register_at_fork(after_in_child=self._in_fork)
        atexit.register(self.write, None)
        leave = os._exit

        def write_and_leave(status: int) -> None:
            self.write(None)
            leave(status)

        os._exit = write_and_leave  # type: ignore[assignment]  # forks end without `atexit`

    def _on_start(self, code: CodeType, offset: int) -> object:
        if code.co_filename.startswith(self._rooms):
            self._monitoring.set_local_events(self._tool, code, self._monitoring.events.LINE)
        return self._monitoring.DISABLE

    def _on_line(self, code: CodeType, line: int) -> object:
        self.lines[code.co_filename] |= 1 << line
        return self._monitoring.DISABLE

    def _in_fork(self) -> None:
        self.process = time.time_ns()
        self.restart()

    def restart(self) -> None:
        """Record every line anew."""
        self.began, self.lines = time.time(), defaultdict(int)
        self._monitoring.restart_events()

    def write(self, test: str | None, seconds: float = 0.0) -> None:
        """Append what was executed since the last record."""
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        record = Record(worker, test, self.began, time.time(), seconds, dict(self.lines))
        self.lines.clear()
        if record.lines:
            with (FOLDER / f"{os.getpid()}-{self.process:x}.pickle").open("ab") as file:
                pickle.dump(tuple(record), file)


RECORDER: Recorder | None = None


def pytest_configure(config: Any) -> None:
    """Begin, in this process and in all that it starts."""
    global RECORDER
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        (FOLDER / "sitecustomize.py").write_text(SITE)
        paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
        digests = {path.relative_to(ROOT).as_posix(): _digest(path.read_bytes()) for path in paths}
        DIGESTS.write_text(json.dumps(digests))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    RECORDER = RECORDER or Recorder()


def pytest_runtest_logstart(nodeid: str) -> None:
    if RECORDER:
        RECORDER.write(BETWEEN)
        RECORDER.restart()
        RECORDER.used = _used()


def pytest_runtest_logfinish(nodeid: str) -> None:
    if RECORDER:
        RECORDER.write(nodeid, _used() - RECORDER.used)


def _used() -> float:
    return sum(os.times()[:4])


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=16).hexdigest()


class ExecutedLines:
    """Records of the last session. Raises FileNotFoundError without one."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = json.loads(DIGESTS.read_text())
        self.seconds: dict[str, float] = {}  # of processor time, by test
        self._files: dict[str, dict[str, int]] = defaultdict(dict)  # bit masks of lines by path and test
        records = [record for path in sorted(FOLDER.glob("*.pickle")) for record in _records(path)]
        spans: dict[str, list[Record]] = defaultdict(list)
        for record in sorted(records, key=lambda record: record.began):
            if record.test:
                spans[record.worker].append(record)
                self.seconds[record.test] = record.seconds
        for record in records:
            test = record.test
            if test is None and (of_worker := spans[record.worker]):
                at = bisect.bisect(of_worker, record.began, key=lambda record: record.began) - 1
                test = of_worker[max(at, 0)].test
            for path, mask in record.lines.items() if test else ():
                tests = self._files[Path(path).relative_to(ROOT).as_posix()]
                tests[test] = tests.get(test, 0) | mask

    def tests(self, path: str, text: bytes, lines: range) -> list[str] | None:
        """Return the tests that execute one of these lines; None if the text was another when they were recorded."""
        if self._digests.get(path) != _digest(text):
            return None
        wanted = sum(1 << line for line in lines)
        return [test for test, mask in self._files.get(path, {}).items() if mask & wanted]


def _records(path: Path) -> Iterator[Record]:
    """Read the records of a process; of one that was killed while it wrote, those before."""
    with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield Record(*pickle.load(file))
