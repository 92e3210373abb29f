"""Planted faults: which share of them the tests notice, and which ones they do not.

    python tests/mutants.py --seed 1 --count 60      # 60 faults at lines drawn by chance
    python tests/mutants.py --seed 1 --list          # the same faults, shown only
    python tests/mutants.py --seed 1 --only 4 31 --tests tests/planner  # two of them, with these tests
    python tests/mutants.py --at runtime/loop/step.py:70  # every fault of a line

Of each fault the tests run that execute its line, if a session recorded which do (support/executed_lines.py), those of
the files first that share most with the line (support/related_tests.py), until one fails or `--seconds` of processor
time are over; a fault that all of them pass survives. Needs a clean checkout of its own, which is changed while a fault
is tried. Exit status 1 if fewer than `--least` percent are noticed.
"""

import argparse
import ast
import gc
import importlib
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from inspect import CO_NEWLOCALS
from multiprocessing import Pipe
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "support"))

from executed_lines import ExecutedLines
from faults import Fault, faults
from related_tests import WORD, RelatedTests
from rooms import ROOMS

ROOT = Path(__file__).parents[1]
DEFAULT = "not slow and not gpu and not matrix"
PATIENCE = 120  # seconds for one test
WAITS = 4  # seconds on the clock for each of processor time
BATCHES = (3, 5, 8, 13)  # files that are collected at once
# Packages that tests load, and that load nothing of the product.
LOADED = (
    "hypothesis", "numba", "textual.app", "textual.widgets", "torch", "torch.distributed.fsdp", "torch._dynamo",
    "torch.distributed.checkpoint", "torch.distributed.launcher.api", "torch.distributed.pipelining", "lark", "cattrs",
    "jinja2", "tokenizers", "safetensors.torch", "transformers.models.llama.modeling_llama", "xdist.plugin",
)  # fmt: skip
FIRST = 0.1  # of the time, for the first tests that execute a line; for the next three times as much
LATER = 0.02  # seconds that a test may be cheaper for each file between them
OF_A_FILE = 0.4  # of the time that is left, at most, for one file


class Planted(NamedTuple):
    path: str
    fault: Fault


class Verdict(NamedTuple):
    word: str  # caught, survived, out of time
    by: str = ""


def drawn(seed: int, count: int) -> Iterator[Planted]:
    """Draw rooms by their lines, in each of them lines, and of each line a kind of fault and a fault of that kind."""
    chance = random.Random(seed)
    by_room = {room: [path for path in _tracked(room) if path.endswith(".py")] for room in ROOMS}
    lines = {room: [(path, line) for path in by_room[room] for line in _lines(path)] for room in ROOMS}
    for room in chance.choices(ROOMS, [len(lines[room]) for room in ROOMS], k=count):
        path, line = chance.choice(lines[room])
        possible = [fault for fault in faults((ROOT / path).read_bytes()) if fault.line == line]
        kind = chance.choice(sorted({fault.kind for fault in possible}))
        yield Planted(path, chance.choice([fault for fault in possible if fault.kind == kind]))


def _tracked(*places: str) -> list[str]:
    command = ["git", "ls-files", "--", *places]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def _lines(path: str) -> list[int]:
    return sorted({fault.line for fault in faults((ROOT / path).read_bytes())})


class Job(NamedTuple):
    """Tests to run. seconds: of processor time, after which none begins. executing: of tests that were recorded, only
    these run. path, text: product file of which functions have other code now."""

    tests: list[str]
    deselected: list[str]
    weights: dict[str, float]
    seconds: float
    marks: str
    executing: set[str] | None = None
    path: str | None = None
    text: bytes = b""


class Outcome(NamedTuple):
    """failed: the first test that fails, "" if none does, None if one does not end. seconds: processor time."""

    failed: str | None
    seconds: float


class TestServer:
    """Process from which tests are forked, so that what takes long is loaded once."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._pipe, other = Pipe()
        if os.fork():
            other.close()
            self._pipe.recv()  # no fault may be planted while modules are loaded
            return
        self._pipe.close()  # so that this process ends with the one that asks
        for module in modules:
            with suppress(Exception, SystemExit):
                importlib.import_module(module)
        other.send(None)
        while True:
            try:
                other.send(_outcome(other.recv()))
            except EOFError:
                os._exit(0)

    def outcome(self, job: Job) -> Outcome:
        self._pipe.send(job)
        return self._pipe.recv()


class Tester:
    """Tries faults. Faults of functions are tried where all modules are loaded, by other code of these functions; other
    faults, and those that survive, where no module of the product is. What passes the default suite meets tests of the
    long ones too."""

    def __init__(self, seconds: float, tests: list[str]) -> None:
        self.seconds, self.tests = seconds, tests
        self.related = RelatedTests()
        self.sound: set[str] = set()  # tests seen to pass without a fault
        self.broken: set[str] = set()  # tests that fail without one
        _recorded()  # before the servers are forked
        self.cold, self.warm = TestServer(()), TestServer(map(_module, self.related.product))

    def verdict(self, planted: Planted) -> Verdict:
        """Try a fault, and put the file back."""
        path = ROOT / planted.path
        text = path.read_bytes()
        other = planted.fault.planted(text)
        ranked = self.tests or self.related.of(planted.path, text, planted.fault.line)
        executing = None if self.tests else _executing(planted.path, text, planted.fault.line)
        weights = self.related.weights(planted.path, text, planted.fault.line)
        verdict, tried = Verdict("survived"), dict[str, None]()
        first = self.warm if _differs_in_functions(text, other) else self.cold
        others = None if executing is None else set[str]()  # the long tests are not recorded
        for server, marks, batches in (
            (first, DEFAULT, () if executing == set() else _batches(ranked, executing, self.seconds)),
            (self.cold, "not gpu", _batches(ranked, others, self.seconds)),
        ):
            seconds = self.seconds
            for chosen, only in batches:
                while verdict.word == "survived" and chosen and seconds > 0:
                    tried |= dict.fromkeys(chosen)
                    job = Job(chosen, sorted(self.broken), weights, seconds, marks, only)
                    failed, used = self._outcome(server, job, path, other)
                    seconds -= used
                    if not failed:
                        verdict = Verdict("out of time", " ".join(chosen)) if failed is None else verdict
                        break
                    again = [failed] if "::" in failed else chosen
                    alone = job._replace(tests=again, seconds=PATIENCE)
                    # What fails by chance, or with others alone, has noticed nothing.
                    fails = self._outcome(server, alone, path, other).failed
                    if fails and (self.sound.issuperset(again) or not server.outcome(alone).failed):
                        self.sound |= set(again)
                        verdict = Verdict("caught", failed)
                    else:
                        self.broken |= set(again)
                        chosen = [test for test in chosen if test not in self.broken]
        return verdict if verdict.by else verdict._replace(by=f"not by {' '.join(tried)}")

    def _outcome(self, server: TestServer, job: Job, path: Path, other: bytes) -> Outcome:
        """Run tests with a fault; the file is as before afterwards."""
        text = path.read_bytes()
        path.write_bytes(other)
        try:
            if server is self.warm:
                job = job._replace(path=path.relative_to(ROOT).as_posix(), text=other)
            return server.outcome(job)
        finally:
            path.write_bytes(text)


@cache
def _recorded() -> ExecutedLines | None:
    """Return the records of the last session that made some."""
    with suppress(FileNotFoundError):
        return ExecutedLines()


def _executing(path: str, text: bytes, line: int) -> set[str] | None:
    """Return the recorded tests that execute the statement of a line; None if the file has changed since, and if it is
    in no function, as what modules and classes execute is that of the first test that loads them."""
    recorded, inside, lines = _recorded(), False, range(0)
    for node in ast.walk(ast.parse(text)):  # outer nodes first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            inside = (is_function and body[0].lineno <= line) or (inside and not isinstance(node, ast.ClassDef))
            end = body[0].lineno - 1 if body and line < body[0].lineno else node.end_lineno or 0
            lines = range(node.lineno, max(node.lineno, end) + 1)
    found = recorded.tests(path, text, lines) if recorded and inside else None
    return None if found is None else set(found)


def _batches(
    ranked: list[str], executing: set[str] | None, seconds: float
) -> Iterator[tuple[list[str], set[str] | None]]:
    """Yield what runs together: of the tests that execute a line those first that are cheap and of files that come
    early; else the first files."""
    if not executing:
        left = ranked
        for size in BATCHES:
            yield left[:size], executing
            left = left[size:]
        return
    place = {file: number for number, file in enumerate(ranked)}
    cost = _recorded().seconds  # type: ignore[union-attr]
    chosen, spent, limit = set[str](), 0.0, seconds * FIRST
    for test in sorted(executing, key=lambda test: cost[test] + LATER * place.get(test.partition("::")[0], 0)):
        chosen.add(test)
        spent += cost[test]
        if spent > limit:
            yield _files(chosen, place), chosen
            chosen, spent, limit = set(), 0.0, limit * 3
    yield _files(chosen, place), chosen


def _files(tests: set[str], place: dict[str, int]) -> list[str]:
    return sorted({test.partition("::")[0] for test in tests}, key=lambda file: place.get(file, 0))


def _module(path: str) -> str:
    return "xtrain." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _differs_in_functions(text: bytes, other: bytes) -> bool:
    """Return True if only the code of functions differs, not that of modules and classes."""

    def outside(code: CodeType) -> list[Any]:
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        names = [each.co_name if isinstance(each, CodeType) else (type(each), each) for each in code.co_consts]
        names += [each.co_freevars for each in inner]
        classes = [each for each in inner if not each.co_flags & CO_NEWLOCALS]
        return [code.co_code, code.co_names, names, *(found for each in classes for found in outside(each))]

    return outside(compile(text, "", "exec")) == outside(compile(other, "", "exec"))


def _by_name(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each.co_qualname, each
            yield from _by_name(each)


def _swap(path: str, text: bytes) -> None:
    """Give the functions of a loaded file other code."""
    gc.unfreeze()  # frozen objects are not found
    name = str(ROOT / path)
    codes: dict[str, list[CodeType]] = defaultdict(list)
    for qualified, code in _by_name(compile(text, name, "exec")):
        codes[qualified].append(code)
    found = [each for each in gc.get_objects() if isinstance(each, FunctionType) and each.__code__.co_filename == name]
    lines: dict[str, list[int]] = defaultdict(list)
    for function in found:
        lines[function.__code__.co_qualname].append(function.__code__.co_firstlineno)
    for function in found:
        old, same = function.__code__, codes[function.__code__.co_qualname]
        place = sorted(set(lines[old.co_qualname])).index(old.co_firstlineno)
        if len(same) == len(set(lines[old.co_qualname])) and same[place].co_freevars == old.co_freevars:
            function.__code__ = same[place]


def _outcome(job: Job) -> Outcome:
    here, there = os.pipe()
    child = os.fork()
    if not child:
        _in_child(job, there)
    os.close(there)
    limit = time.monotonic() + WAITS * job.seconds + PATIENCE
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(here)
            return Outcome(None, job.seconds)
        time.sleep(0.05)
    with os.fdopen(here) as answer:
        said = answer.read()
    # A process that a fault has ended says nothing.
    return Outcome(*json.loads(said)) if said else Outcome("(all)", job.seconds)


def _spent() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


class Likeliest:
    """Plugin of pytest: of each file the tests first that share most with the fault, for a part of the time."""

    def __init__(self, weights: dict[str, float], seconds: float, executing: set[str] | None) -> None:
        self.weights, self.seconds, self.executing = weights, seconds, executing
        self.found = ""
        self.took: dict[Path, float] = defaultdict(float)  # by file
        self.began = _spent()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        place = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: (place[item.path], -self._points(item)))
        if self.executing is not None and (recorded := _recorded()):
            others = recorded.seconds.keys() - self.executing
            items[:] = [item for item in items if item.nodeid not in others]

    def _points(self, item: Any) -> float:
        text = item.nodeid + (inspect.getsource(item.function) if hasattr(item, "function") else "")
        return sum(self.weights.get(word, 0.0) for word in set(WORD.findall(text)))

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        self.began = _spent()
        return True if self.began > self.seconds or self.took[item.path] > self.seconds * OF_A_FILE else None

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.took[ROOT / report.nodeid.partition("::")[0]] += _spent() - self.began
        self.began = _spent()
        if report.failed:
            self.found = self.found or report.nodeid.partition("[")[0]


def _in_child(job: Job, there: int) -> None:
    import pytest

    os.setsid()
    os.chdir(ROOT)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(quiet, stream)
    if job.path is not None:
        _swap(job.path, job.text)
    likeliest = Likeliest(job.weights, job.seconds, job.executing)
    options = ["-x", "-q", "-n0", "-m", job.marks, f"--timeout={PATIENCE}"]
    options += [f"--deselect={test}" for test in job.deselected]
    code = pytest.main([*options, *job.tests], plugins=[likeliest])
    found = likeliest.found or ("" if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else "(all)")
    os.write(there, json.dumps([found, _spent()]).encode())
    os.close(there)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--at", metavar="FILE:LINE", help="every fault of this line instead of drawn ones")
    parser.add_argument("--list", action="store_true", help="show the faults and run nothing")
    parser.add_argument("--only", metavar="N", type=int, nargs="+", help="these of the drawn faults, by their number")
    parser.add_argument("--tests", metavar="TEST", nargs="+", default=[], help="tests to run instead of related ones")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor time for the tests of a fault")
    parser.add_argument("--least", type=float, default=90.0, help="percent that are to be noticed")
    arguments = parser.parse_args()
    if arguments.at:
        path, _, line = arguments.at.rpartition(":")
        tried = [Planted(path, fault) for fault in faults((ROOT / path).read_bytes()) if fault.line == int(line)]
    else:
        tried = list(drawn(arguments.seed, arguments.count))
    numbered = [(number, each) for number, each in enumerate(tried, 1) if number in (arguments.only or [number])]
    if arguments.list:
        for number, planted in numbered:
            print(_shown(number, planted, "drawn"))
        return 0
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *ROOMS], cwd=ROOT).returncode:
        parser.error("the product has changes that are not committed, and faults are planted in it")
    for module in LOADED:
        with suppress(ImportError):
            importlib.import_module(module)
    tester = Tester(arguments.seconds, arguments.tests)
    found: Counter[str] = Counter()
    for number, planted in numbered:
        began = time.monotonic()
        verdict = tester.verdict(planted)
        found[verdict.word] += 1
        print(f"{_shown(number, planted, verdict.word)}\n  {verdict.by} ({time.monotonic() - began:.0f} s)", flush=True)
    rate = 100 * found["caught"] / max(1, found.total())
    print(f"{rate:.0f} % noticed: {', '.join(f'{number} {word}' for word, number in sorted(found.items()))}")
    return int(rate < arguments.least)


def _shown(number: int, planted: Planted, word: str) -> str:
    place = f"{planted.path}:{planted.fault.line} {planted.fault.kind}"
    return f"{number} {word}: {place}\n  {planted.fault.shown((ROOT / planted.path).read_bytes())}"


if __name__ == "__main__":
    sys.exit(main())
