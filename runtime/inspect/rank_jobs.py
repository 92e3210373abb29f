"""Short jobs on several ranks of this machine: ranks are forked from a process that has torch loaded.

    with RankForks() as ranks:
        outcome = ranks.run(plan, folder, name="tp2")

Does not import torch itself.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from attrs import frozen

from xtrain.plan.plan import Plan
from xtrain.plan.serialise import to_json

TIMEOUT: Final = 60.0
ENTRY: Final = "xtrain.runtime.inspect.held_state:run"


class RanksFailed(Exception):
    """A rank failed, was killed or hung; the message has the reports of all ranks."""


@frozen(kw_only=True)
class Outcome:
    """A job that went well.

    routing: the experts' part of each record of metrics. whole: by rank, the joined parameters, buffers and optimizer
    state that it holds a piece of. shapes: of its pieces of parameters. bytes: of these with gradients and moments.
    """

    directory: Path
    seconds: float
    curve: list[tuple[int, float, float]]
    routing: list[dict[str, float | list[float]]]
    evals: list[dict[str, Any]]
    whole: list[dict[str, np.ndarray]]
    shapes: list[dict[str, tuple[int, ...]]]
    bytes: list[dict[str, int]]

    @classmethod
    def read(cls, directory: Path, world: int, seconds: float) -> Self:
        whole = saved_tensors(directory / "held", world)
        parts = [json.loads((directory / "held" / f"{rank}.json").read_text())["parts"] for rank in range(world)]
        return cls(
            directory=directory,
            seconds=seconds,
            curve=curve(directory),
            routing=[{key: r[key] for key in r if key.startswith("moe/")} for r in records(directory, "metrics")],
            evals=events(directory, "eval"),
            whole=whole,
            shapes=[{name: tuple(part["shape"]) for name, part in own.items()} for own in parts],
            bytes=[{name: part["bytes"] for name, part in own.items()} for own in parts],
        )

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """The whole state: of every tensor what the first rank that holds it has."""
        return {name: value for state in reversed(self.whole) for name, value in state.items()}


def saved_tensors(folder: Path, world: int) -> list[dict[str, np.ndarray]]:
    """Return the tensors that ranks saved with `held_state.save`, joined, by rank."""
    pieces = [dict(np.load(folder / f"{rank}.npz")) for rank in range(world)]
    places = [json.loads((folder / f"{rank}.json").read_text())["places"] for rank in range(world)]
    found: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}  # by name and ranks of a copy

    def copy(name: str, ranks: tuple[int, ...]) -> np.ndarray:
        shape = places[ranks[0]][name]["shape"]
        whole, covered = np.empty(shape, pieces[ranks[0]][name].dtype), np.zeros(shape, bool)
        for rank in ranks:
            piece, start = pieces[rank][name], places[rank][name]["start"]
            if piece.size:
                there = tuple(slice(a, a + length) for a, length in zip(start, piece.shape, strict=True))
                assert not covered[there].any(), f"two ranks have the same piece of {name}"
                whole[there], covered[there] = piece, True
        assert covered.all(), f"ranks {ranks} have not all of {name}"
        return whole

    for own in places:
        for name, place in own.items():
            key = (name, tuple(place["ranks"]))
            if key not in found:
                found[key] = copy(*key)
    return [{name: found[name, tuple(place["ranks"])] for name, place in own.items()} for own in places]


class RankForks:
    """Jobs of ranks that are forked from a process of its own, which lives as long as this is open."""

    def __init__(self) -> None:
        self._forker: subprocess.Popen[str] | None = None
        self._killed = False
        self.missed: list[str] = []  # what that process could not do once for all ranks: known after a job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and self._forker is not None:
            self._killed = True
            self._forker.kill()  # its ranks die with it
        self.close()

    def start(self) -> None:
        """Load torch in the background; `run` does so too if need be."""
        if self._forker is None:
            command, path = self.forker()
            ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            clean = {name: value for name, value in os.environ.items() if name not in ours}
            if path:
                clean["PYTHONPATH"] = os.pathsep.join((*path, *filter(None, [clean.get("PYTHONPATH")])))
            threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            self._forker = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env={**clean, **threads, "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"},
            )

    def forker(self) -> tuple[list[str], list[str]]:
        """Return the command of the process that ranks are forked from, without its last argument, and folders of
        further packages."""
        return [sys.executable, "-P", "-m", "xtrain.runtime.inspect.rank_forker"], []

    def close(self) -> None:
        if self._forker is not None:
            assert self._forker.stdin is not None
            self._forker.stdin.close()
            self._forker.wait(timeout=60)
            self._forker = None

    def run(
        self, plan: Plan, folder: Path, *, name: str, timeout: float = TIMEOUT, more: Mapping[str, Any] | None = None
    ) -> Outcome:
        """Run `plan` on as many ranks as it asks for, with `folder` as working folder; files go to `folder/jobs/name`.

        more: keys of the job that its entry reads, or another `entry`. Raises RanksFailed, with all ranks gone, if one
        of them fails or `timeout` seconds are over.
        """
        begin = time.monotonic()
        directory = self.complete(plan, folder, name=name, timeout=timeout, more=more)
        return Outcome.read(directory, plan.mesh.world_size, time.monotonic() - begin)

    def complete(
        self, plan: Plan, folder: Path, *, name: str, timeout: float = TIMEOUT, more: Mapping[str, Any] | None = None
    ) -> Path:
        """Run `plan` as `run` does; return the directory of the job, without reading what its entry saved."""
        directory = folder / "jobs" / name
        directory.mkdir(parents=True, exist_ok=True)  # a job of the same name resumes its run
        (directory / "plan.json").write_text(json.dumps(to_json(plan), sort_keys=True))
        job = {
            "entry": ENTRY,
            "world": plan.mesh.world_size,
            "folder": str(folder),
            "directory": str(directory),
            "timeout": timeout,
            **(more or {}),
        }
        answer = self._ask(job)
        if any(answer["codes"]):
            raise RanksFailed(_report(directory, answer, timeout))
        return directory

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        if self._killed:
            raise RanksFailed("the forker was killed")
        self.start()
        forker = self._forker
        assert forker is not None and forker.stdin is not None and forker.stdout is not None
        forker.stdin.write(json.dumps(job) + "\n")
        while line := forker.stdout.readline():
            if line.startswith("{"):
                answer = json.loads(line)
                self.missed = answer["missed"]
                return answer
        raise RanksFailed(f"the forker has ended with {forker.wait()}")


def _report(directory: Path, answer: dict[str, Any], timeout: float) -> str:
    """Describe a failure: how each rank ended, each error once with the ranks that had it, and logs."""
    how = ", ".join(f"rank {rank}: {_ending(code)}" for rank, code in enumerate(answer["codes"]))
    parts = [f"not finished within {timeout:g} s ({how})" if answer["timed_out"] else f"failed ({how})"]
    failures: dict[str, list[int]] = {}
    if (directory / "events.jsonl").exists():
        for event in events(directory, "failure"):
            failures.setdefault(event["traceback"] or event["error"], []).append(event["rank"])
    failed = {rank for ranks in failures.values() for rank in ranks}
    for rank, code in enumerate(answer["codes"]):
        if code and rank not in failed:
            log = (directory / "logs" / f"{rank}.log").read_text(errors="replace").strip()
            failures.setdefault(f"(log)\n{log[-6000:]}", []).append(rank)
    parts += [f"--- rank {', '.join(map(str, sorted(ranks)))}\n{text}" for text, ranks in failures.items()]
    return "\n".join(parts)


def _ending(code: int | None) -> str:
    if code is None:
        return "did not die"
    return f"signal {-code}" if code < 0 else "ok" if code == 0 else f"exit code {code}"


def records(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Return all lines of `metrics` or `events` of a run."""
    return list(map(json.loads, (directory / f"{kind}.jsonl").read_text().splitlines()))


def curve(directory: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, gradient norm) of every logged step."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(directory, "metrics") if "loss" in r]


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind."""
    return [r for r in records(directory, "events") if r["event"] == kind]
