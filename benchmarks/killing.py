"""A started `xtrain run` that is to be killed: who its processes are, when the moment has come."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from attrs import define

from xtrain.runtime.store.checkpoints import POINTERS, CheckpointFolder

LIMIT = 240.0  # seconds after which a start hangs
VICTIMS = ("launcher", "everything", "ranks", "rank")
MOMENTS = {"set-up": 3, "step": 4, "saving": 5, "publishing": 3, "pruning": 3, "end": 2}  # how often of 20


@define(kw_only=True)
class Start:
    """One start of the command. steps: logged before it; seconds: what a start takes to its first step."""

    process: subprocess.Popen[bytes]
    directory: Path
    steps: int
    seconds: float
    began: float

    @classmethod
    def of(cls, command: list[str], folder: Path, directory: Path, seconds: float) -> "Start":
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / f"{directory.name}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        steps = logged(directory)
        return cls(process=process, directory=directory, steps=steps, seconds=seconds, began=time.monotonic())

    @property
    def folder(self) -> CheckpointFolder:
        return CheckpointFolder(self.directory / "checkpoints")

    def ended(self) -> bool:
        return self.process.poll() is not None

    def ranks(self) -> list[int]:
        """Process ids by rank of those that are alive."""
        return [pid for _, pid in sorted(_workers(self.directory))]

    def wait(self) -> int:
        """The exit code of the launcher, once nothing of the run is left. Raises TimeoutError."""
        deadline = time.monotonic() + LIMIT
        while not self.ended() or self.ranks():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running after {LIMIT:g} s: {self.ranks()}")
            time.sleep(0.02)
        return self.process.returncode

    def reach(self, moment: str, total: int, chance: random.Random) -> bool:
        """Return at the moment; False where the run has ended before it came.

        Where all steps were there before, and only the end is to be done again, it is any moment of the start.
        """
        if moment == "set-up" or self.steps >= total:
            return self._until(self._in(chance.uniform(0.0, self.seconds)))
        if moment == "end":
            reached = self._until(lambda: logged(self.directory) >= total)
            return reached and self._until(self._in(chance.uniform(0.0, 1.0)))
        first = min(self.steps + chance.randint(1, 6), total)
        later = self._in
        if not self._until(lambda: logged(self.directory) >= first):
            return False
        if moment == "step":
            return self._until(later(chance.uniform(0.0, 0.3)))
        seen = {"saving": self._saves, "publishing": self._publishes, "pruning": self._prunes}[moment]
        return self._until(seen) and self._until(later(chance.uniform(0.0, 0.1 if moment == "saving" else 0.002)))

    def kill(self, victim: str, chance: random.Random) -> str:
        """End processes with SIGKILL; who they were, in words."""
        ranks = self.ranks()
        chosen = chance.randrange(64)
        if victim == "rank" and ranks:
            number = chosen % len(ranks)
            _end(ranks[number])
            return f"rank {number}"
        if victim in ("launcher", "everything") or not ranks:
            self.process.kill()
        if victim in ("ranks", "everything"):
            for rank in ranks:
                _end(rank)
        return victim if ranks else "launcher"

    def _until(self, come: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + LIMIT
        while not come():
            if self.ended():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing has happened for {LIMIT:g} s")
            time.sleep(0.0005)
        return True

    def _in(self, seconds: float) -> Callable[[], bool]:
        end = time.monotonic() + seconds
        return lambda: time.monotonic() >= end

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.folder.root)  # noqa: PTH208  the fastest look there is
        except FileNotFoundError:
            return []

    def _saves(self) -> bool:
        return any(name.startswith("ckpt-") and name.endswith(".partial") for name in self._names())

    def _publishes(self) -> bool:
        """A pointer is being replaced, or the newest folder has its name and no pointer yet."""
        names = self._names()
        newest = max((name for name in names if name.startswith("ckpt-") and "." not in name), default="")
        return any(f"{pointer}.partial" in names for pointer in POINTERS) or newest > self.folder.named()

    def _prunes(self) -> bool:
        return any(name.endswith(".removing") for name in self._names())


def logged(directory: Path) -> int:
    """Steps that have their line in the metrics."""
    try:
        return (directory / "metrics.jsonl").read_bytes().count(b'"loss"')
    except FileNotFoundError:
        return 0


def _workers(directory: Path) -> Iterator[tuple[int, int]]:
    """(rank, process id) of each rank of the run that is alive."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                command = (process / "cmdline").read_bytes().decode().split("\0")
                if "xtrain.runtime.loop.worker" not in command or not _is_at(process, command, directory):
                    continue
                ended = (process / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
                said = dict(each.split("=", 1) for each in _environment(process) if "=" in each)
            except OSError:
                continue
            if not ended:
                yield int(said.get("RANK", "0")), int(process.name)


def _is_at(process: Path, command: list[str], directory: Path) -> bool:
    named = command[command.index("xtrain.runtime.loop.worker") + 1]
    return ((process / "cwd").resolve() / named).resolve() == directory.resolve()


def _environment(process: Path) -> list[str]:
    return (process / "environ").read_bytes().decode(errors="replace").split("\0")


def _end(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def command(spec: Path, name: str, ranks: int) -> list[str]:
    """The command that a user gives, again and again."""
    chosen = ("--world", str(ranks), "--ui", "none", "--set", f"workspace.run={name}")
    return [sys.executable, "-m", "xtrain", "run", spec.name, *chosen]
