"""Planted faults: which share of them the tests notice, and which ones they do not.

    python tests/mutants.py --seed 1 --count 60      # 60 faults at lines drawn by chance
    python tests/mutants.py --at runtime/loop/step.py:70  # every fault of a line
    python tests/mutants.py --record tests/planner   # first: which tests execute which lines

Of each fault the tests run that execute its line, the most specific ones first, until one fails; a fault that all of
them pass survives. The map from lines to tests is kept in build/; of test files that were not recorded since they were
changed, those run that import the module. Needs a clean checkout of its own, which is changed while a fault is tried,
and `coverage`. Exit status 1 if fewer than `--least` percent are noticed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "support"))

from covered_lines import ROOMS, CoveredLines
from faults import Fault, faults

ROOT = Path(__file__).parents[1]
PATIENCE = 60  # seconds for one test


class Planted(NamedTuple):
    path: str
    fault: Fault


class Verdict(NamedTuple):
    word: str  # caught, survived, no test, out of time
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


class Tester:
    """Runs tests in forks of this process, which has loaded what takes long and nothing of the product."""

    def __init__(self, covered: CoveredLines, seconds: float) -> None:
        self.covered, self.seconds = covered, seconds
        self.sound: set[str] = set()  # tests seen to pass without a fault
        self.broken: set[str] = set()  # tests that fail without one

    def verdict(self, planted: Planted) -> Verdict:
        """Try a fault, and put the file back."""
        path = ROOT / planted.path
        text = path.read_bytes()
        ranked = self.covered.tests_of(planted.path, text, planted.fault.line)
        budget, done = self.seconds / 3, 0
        while True:
            tests = [test for test in ranked if test not in self.broken]
            chosen = self.covered.within(tests, budget)[done:]
            if not chosen:
                return Verdict("survived" if done else "no test")
            path.write_bytes(planted.fault.planted(text))
            try:
                failed = self._run(chosen)
            finally:
                path.write_bytes(text)
            if failed is None:
                return Verdict("out of time", " ".join(chosen[:3]))
            if failed:
                again = [failed] if "::" in failed else chosen
                if failed in self.sound or not self._run(again):
                    self.sound.add(failed)
                    return Verdict("caught", failed)
                self.broken |= {failed} if "::" in failed else set(chosen)
            elif budget == self.seconds:
                return Verdict("survived")
            else:
                done, budget = done + len(chosen), self.seconds

    def _run(self, tests: list[str]) -> str | None:
        """Return the first test that fails, "" if none does, None if time is out."""
        here, there = os.pipe()
        child = os.fork()
        if not child:
            _in_child([*tests, *(f"--deselect={test}" for test in self.broken)], there)
        os.close(there)
        limit = time.monotonic() + 90 + 4 * self.seconds
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > limit:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(here)
                return None
            time.sleep(0.05)
        with os.fdopen(here) as answer:
            said = answer.read()
        # A process that a fault has ended says nothing.
        return json.loads(said) if said else "(all)"


def _in_child(tests: list[str], there: int) -> None:
    import pytest

    class FirstFailure:
        found = ""

        @pytest.hookimpl
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                self.found = self.found or report.nodeid.partition("[")[0]

    os.setsid()
    os.chdir(ROOT)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(quiet, stream)
    first = FirstFailure()
    options = ["-x", "-q", "-n0", f"--timeout={PATIENCE}"]
    code = pytest.main([*options, *tests], plugins=[first])
    os.write(there, json.dumps(first.found or ("" if code == 0 else "(all)")).encode())
    os.close(there)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--at", metavar="FILE:LINE", help="every fault of this line instead of drawn ones")
    parser.add_argument("--record", metavar="PLACE", nargs="*", help="record test files of these folders, or all")
    parser.add_argument("--seconds", type=float, default=60.0, help="tests of so many seconds for each fault")
    parser.add_argument("--least", type=float, default=90.0, help="percent that are to be noticed")
    arguments = parser.parse_args()
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *ROOMS], cwd=ROOT).returncode:
        parser.error("the product has changes that are not committed, and faults are planted in it")
    covered = CoveredLines.of(ROOT)
    if arguments.record is not None:
        covered.record(tuple(arguments.record) or ("tests/",))
        return 0
    if arguments.at:
        path, _, line = arguments.at.rpartition(":")
        tried = [Planted(path, fault) for fault in faults((ROOT / path).read_bytes()) if fault.line == int(line)]
    else:
        tried = list(drawn(arguments.seed, arguments.count))
    for module in ("hypothesis", "numba", "textual.app", "torch", "torch.distributed", "xdist.plugin"):
        __import__(module)
    tester = Tester(covered, arguments.seconds)
    found: Counter[str] = Counter()
    for number, planted in enumerate(tried, 1):
        verdict = tester.verdict(planted)
        found[verdict.word] += 1
        shown = planted.fault.shown((ROOT / planted.path).read_bytes())
        print(f"{number}/{len(tried)} {verdict.word}: {planted.path}:{planted.fault.line} {planted.fault.kind}")
        print(f"  {shown}\n  {verdict.by}", flush=True)
    missed = found["survived"] + found["no test"]
    rate = 100 * found["caught"] / max(1, found["caught"] + missed)
    print(f"{rate:.0f} % noticed: {', '.join(f'{number} {word}' for word, number in sorted(found.items()))}")
    return int(rate < arguments.least)


if __name__ == "__main__":
    sys.exit(main())
