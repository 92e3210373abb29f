"""Map from lines of the product to the tests that execute them, for tests/mutants.py.

It is recorded by coverage.py: a plugin of pytest notes the running test, and a plugin of coverage reads the note in
each process that a test starts, so that lines of ranks and commands count for the test they belong to. A line is known
by its file, its function and its text, so that the map outlives other changes of the file.
"""

import ast
import os
import pickle
import re
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coverage import Coverage, CoveragePlugin
from coverage.numbits import numbits_to_nums
from rooms import ROOMS

if TYPE_CHECKING:
    import pytest

FOLDER = "XTRAIN_COVERED"  # environment variable: where data and notes are written
# Tests of all that a room says, which notice most of what changes it. They follow the first few of the others.
PLANS = ("tests/planner/test_golden.py::test_a_plan_is_as_it_was_looked_at",)
TEXTS = ("tests/dsl/test_gallery.py::test_gallery", "tests/dsl/test_docs.py::test_the_reference_is_current")
RUNS = ("tests/test_quickstart.py",)
WHOLE = {
    "dsl": (*TEXTS, *PLANS),
    **dict.fromkeys(("plan", "blocks", "contracts", "planner"), (*PLANS, TEXTS[0])),
    "components": (*PLANS, *TEXTS, *RUNS),
    "runtime": RUNS,
}
FEW = 3
FILE_SECONDS = 0.5  # to collect one more file
AT_ONCE = 10  # files recorded before the map is saved
UNKNOWN_LINES = 1000
MOST_IMPORTERS = 40
UNKNOWN_SECONDS = 8.0  # of a file that is not recorded
CONFIG = """\
[run]
include = {root}/*
omit =
  */tests/*
  */benchmarks/*
  */examples/*
parallel = true
data_file = {folder}/data
plugins = covered_lines
patch = fork, _exit
disable_warnings = no-data-collected, module-not-imported, couldnt-parse
"""
_note: list[Path] = []  # of this worker; commands clear their environment, but are forks


class TestOfProcess(CoveragePlugin):
    """Context of a process: the test that started it."""

    def configure(self, config: Any) -> None:
        if _note and _note[0].exists():
            config.set_option("run:context", _note[0].read_text())


def coverage_init(registry: Any, options: object) -> None:
    if not _note and "XTRAIN_COVERED_NOTE" in os.environ:
        _note.append(Path(os.environ["XTRAIN_COVERED_NOTE"]))
    registry.add_configurer(TestOfProcess())


def pytest_configure() -> None:
    _note[:] = [Path(os.environ[FOLDER]) / f"test-{os.getpid()}"]
    os.environ["XTRAIN_COVERED_NOTE"] = str(_note[0])


def pytest_runtest_logstart(nodeid: str) -> None:
    test = nodeid.partition("[")[0]
    _note[0].write_text(test)
    if (coverage := Coverage.current()) is not None:
        coverage.switch_context(test)


def pytest_runtest_logreport(report: "pytest.TestReport") -> None:
    if report.when == "call" and report.passed:
        with _note[0].with_suffix(".seconds").open("a") as seconds:
            seconds.write(f"{report.nodeid}\t{report.duration:.3f}\n")


class CoveredLines:
    """The recorded map of a checkout, in its build/covered_lines.pickle."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / "build/covered_lines.pickle"
        self.digests: dict[str, str] = {}  # of test files, as they were recorded
        self.seconds: dict[str, float] = {}  # by test, all its cases
        self.lines: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))  # file → line's name → tests
        if self.path.exists():
            self.digests, self.seconds, lines = pickle.loads(self.path.read_bytes())
            for path, names in lines.items():
                self.lines[path].update(names)

    @classmethod
    def of(cls, root: Path) -> "CoveredLines":
        """Return the map without what was recorded of test files that have changed since."""
        covered = cls(root)
        now = covered._files()
        covered._forget([file for file in covered.digests if covered.digests[file] != now.get(file)])
        return covered

    def record(self, places: tuple[str, ...]) -> None:
        """Record test files in these places that are new or have changed."""
        now = self._files()
        stale = [file for file in now if file not in self.digests and file.startswith(places)]
        for first in range(0, len(stale), AT_ONCE):
            batch = stale[first : first + AT_ONCE]
            print(f"{first}/{len(stale)} recorded; next {batch[0]}", flush=True)
            self._record(batch)
            self.digests |= {file: now[file] for file in batch}
            self.save()

    def _files(self) -> dict[str, str]:
        """Return the digest of each test file by its path."""
        paths = sorted((self.root / "tests").rglob("test_*.py"))
        return {
            path.relative_to(self.root).as_posix(): blake2b(path.read_bytes(), digest_size=8).hexdigest()
            for path in paths
        }

    def save(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        lines = {path: dict(names) for path, names in self.lines.items()}
        self.path.write_bytes(pickle.dumps((self.digests, self.seconds, lines)))

    def tests_of(self, path: str, text: bytes, line: int) -> list[str]:
        """Return the tests that execute a line, those first that execute little else; of a line that is executed when
        its file is imported, or compiled, the tests of its file."""
        names = line_names(text)
        of_line = {test for at in _statement(text, line) for test in self.lines[path].get(names.get(at, ""), ())}
        tests = of_line or {test for found in self.lines[path].values() for test in found}
        tests |= self._naming(path)
        name = Path(path).stem.removesuffix("_run").removesuffix("_torch")
        folders = Path("tests", path).parents

        def distance(test: str) -> tuple[bool, bool, int, float]:
            """Tests that are known to execute the line first, then those of the same name, then the nearest folder."""
            file = Path(test.partition("::")[0])
            near = sum(folder in file.parents for folder in folders)
            breadth = self._breadth().get(test, UNKNOWN_LINES)
            return test not in of_line, file.stem != f"test_{name}", -near, breadth * (0.1 + self._took(test))

        whole = WHOLE.get(Path(path).parts[0], ())
        ranked = sorted(tests.difference(whole), key=distance)
        return [*ranked[:FEW], *whole, *ranked[FEW:]]

    def within(self, tests: list[str], budget: float) -> list[str]:
        """Return as many of the tests as take so many seconds together, at least one."""
        chosen: list[str] = []
        files: set[str] = set()
        for test in tests:
            budget -= self._took(test) + FILE_SECONDS * (test.partition("::")[0] not in files)
            if budget < 0 and chosen:
                break
            files.add(test.partition("::")[0])
            chosen.append(test)
        return chosen

    def _took(self, test: str) -> float:
        return self.seconds.get(test, UNKNOWN_SECONDS)

    def _naming(self, path: str) -> set[str]:
        """Return test files that are not recorded and import a module or have its name; where there are none, those
        that import a module which imports it."""
        stem = Path(path).stem.removesuffix("_run").removesuffix("_torch")
        tests = {name: text for name, text in self._texts("tests").items() if name not in self.digests}
        product = {name: text for room in ROOMS for name, text in self._texts(room).items()}
        modules, seen = [path], {path}
        while modules:
            importing = [_importing(module) for module in modules]
            found = {name for name, text in tests.items() if any(each.search(text) for each in importing)}
            found |= {name for name in tests if modules == [path] and stem in name}
            if found or len(seen) > MOST_IMPORTERS:
                return found
            modules = [
                name
                for name, text in product.items()
                if name not in seen and any(each.search(text) for each in importing)
            ]
            seen.update(modules)
        return set()

    def _texts(self, folder: str) -> dict[str, str]:
        pattern = "test_*.py" if folder == "tests" else "*.py"
        return {
            file.relative_to(self.root).as_posix(): file.read_text() for file in (self.root / folder).rglob(pattern)
        }

    def _breadth(self) -> dict[str, int]:
        if not hasattr(self, "_counted"):
            self._counted: dict[str, int] = defaultdict(int)
            for names in self.lines.values():
                for tests in names.values():
                    for test in tests:
                        self._counted[test] += 1
        return self._counted

    def _forget(self, files: list[str]) -> None:
        for file in files:
            self.digests.pop(file, None)
        gone = {test for test in self.seconds if test.partition("::")[0] in files}
        self.seconds = {test: took for test, took in self.seconds.items() if test not in gone}
        for names in self.lines.values():
            for tests in names.values():
                tests -= gone

    def _record(self, files: list[str]) -> None:
        folder = self.path.parent / "covered_lines"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "config").write_text(CONFIG.format(root=self.root, folder=folder))
        support = str(self.root / "tests/support")
        environment = {**os.environ, FOLDER: str(folder), "COVERAGE_PROCESS_START": str(folder / "config")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (support, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "pytest", "-p", "covered_lines", "-q", "-n0", *files]
        subprocess.run(command, cwd=self.root, env=environment, stdout=subprocess.DEVNULL)
        self.read(folder)
        shutil.rmtree(folder)

    def read(self, folder: Path) -> None:
        """Add what was recorded in a folder."""
        cases: dict[str, float] = {}
        for path in folder.glob("*.seconds"):
            cases.update((name, float(took)) for name, took in _rows(path))
        for case, took in cases.items():
            test = case.partition("[")[0]
            self.seconds[test] = self.seconds.get(test, 0.0) + took
        names: dict[str, dict[int, str]] = {}
        joined = "line_bits join file on file.id = file_id join context on context.id = context_id"
        for data in folder.glob("data.*"):
            with suppress(sqlite3.DatabaseError), sqlite3.connect(data) as store:  # of a process that was killed
                for path, test, bits in store.execute(f"select path, context, numbits from {joined}"):
                    if test not in self.seconds:
                        continue
                    relative = Path(path).relative_to(self.root).as_posix() if Path(path).is_absolute() else path
                    if relative not in names:
                        names[relative] = line_names((self.root / relative).read_bytes())
                    for line in numbits_to_nums(bits):
                        self.lines[relative][names[relative].get(line, "")].add(test)


def _importing(path: str) -> re.Pattern[str]:
    """Return what an import of a module looks like, absolute or relative."""
    folder, _, name = path.removesuffix(".py").replace("/", ".").rpartition(".")
    parent = re.escape(folder.rpartition(".")[2])
    among = rf"from ([.\w]*\b{parent}|\.+) import .*\b{name}\b"
    return re.compile(rf"from [.\w]*(\.|\b{parent}\.){name} import|{among}")


def _rows(path: Path) -> list[list[str]]:
    return [line.rsplit("\t", 1) for line in path.read_text().splitlines()]


def line_names(text: bytes) -> dict[int, str]:
    """Return a name for each line that stands in a function: the function's and the line's text."""
    functions: dict[int, str] = {}

    def visit(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = inside
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{inside}.{child.name}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                first = child.body.lineno if isinstance(child, ast.Lambda) else child.body[0].lineno
                functions.update(dict.fromkeys(range(first, (child.end_lineno or first) + 1), name))
            visit(child, name)

    visit(ast.parse(text), "")
    lines = text.decode().split("\n")
    return {number: f"{name}: {lines[number - 1].strip()}" for number, name in functions.items()}


def _statement(text: bytes, line: int) -> range:
    """Return the lines of the smallest statement, or the head of a compound one, that a line belongs to."""
    best = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno
            if line <= max(end or 0, node.lineno):
                best = range(node.lineno, max(end or 0, node.lineno) + 1)
    return best
