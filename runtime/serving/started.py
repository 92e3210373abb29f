"""The ranks of a server as processes of this machine: started, asked, and started again."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from attrs import define, field

from xtrain.planner.plan import Plan
from xtrain.planner.serialise import to_json
from xtrain.records.events import events_since
from xtrain.records.paths import EVENTS_FILE
from xtrain.regular_files import reason_of
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.files import durable
from xtrain.runtime.files.locks import LAUNCHER_LOCK, HeldLock, hold
from xtrain.runtime.launch.failure_cause import failures_in
from xtrain.runtime.run_directory.workspace import locate
from xtrain.runtime.serving.connection import Closed, Connection
from xtrain.runtime.serving.engine import RanksEngine
from xtrain.runtime.serving.messages import RankMessage
from xtrain.runtime.serving.rank import READY
from xtrain.server.engine import Capabilities, EngineLost

PLAN: Final = "plan.json"
SPEC: Final = "spec.xtrain"
LOOK: Final = 0.5  # seconds between two looks whether ranks are alive, while one computes
LEAVE: Final = 10.0  # seconds that ranks have to leave by themselves


@define(eq=False)
class StartedRanks:
    """directory: of the server, with the plan, records and logs of its ranks. begun: byte of the file of events at
    which those of this start begin."""

    plan: Plan
    directory: Path
    _lock: HeldLock
    processes: list[subprocess.Popen[bytes]] = field(factory=list)
    _connection: Connection | None = None
    _begun: int = 0
    _number: int = 0

    @classmethod
    def open(cls, plan: Plan, spec_text: str) -> "StartedRanks":
        """Make the directory ready, in which no other server may be, nor models over another base. Raises
        EnvironmentFault."""
        directory = locate(plan, None).absolute()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = hold(directory, LAUNCHER_LOCK)
            _check_same(directory, plan)
            for name in ("ranks", "logs"):
                (directory / name).mkdir(exist_ok=True)
            durable.write(directory / PLAN, json.dumps(to_json(plan), sort_keys=True))
            durable.write(directory / SPEC, spec_text)
        except OSError as error:
            raise EnvironmentFault(
                "X706", f"the run directory {directory} cannot be written: {reason_of(error)}"
            ) from error
        return cls(plan, directory, lock)

    def start(self) -> None:
        """Start all ranks, without those that there may be; returns when they take requests. Raises EngineLost."""
        self.end()
        events = self.directory / EVENTS_FILE
        self._begun, self._number = events.stat().st_size if events.exists() else 0, self._number + 1
        here, there = socket.socketpair()
        port, world = _free_port(), self.plan.mesh.world_size
        for rank in range(world):
            more = [str(there.fileno())] if rank == 0 else []
            command = [
                sys.executable,
                "-P",
                "-m",
                "xtrain.runtime.serving.rank",
                str(self.directory),
                str(os.getpid()),
                *more,
            ]
            with (self.directory / "logs" / f"rank{rank}-{self._number}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **_environment(rank, world, port)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=(there.fileno(),) if rank == 0 else (),
                    )
                )
        there.close()
        self._connection = Connection(here)
        if self._answer().name != READY:
            raise EngineLost("the first rank has begun with something else")

    def call(self, message: RankMessage) -> RankMessage:
        """Let all ranks carry out a request; the answer of the first one. Raises EngineLost."""
        if self._connection is None:
            raise EngineLost("the ranks have ended")
        try:
            self._connection.send(message)
        except Closed:
            raise self._lost() from None
        return self._answer()

    def _answer(self) -> RankMessage:
        assert self._connection is not None
        while True:
            try:
                message = self._connection.receive(LOOK)
            except Closed:
                raise self._lost() from None
            if message is not None:
                return message
            if any(process.poll() is not None for process in self.processes):
                raise self._lost()

    def _lost(self) -> EngineLost:
        """Ends what is left of the ranks."""
        self.end(patience=1.0)
        said = failures_in(events_since(self.directory / EVENTS_FILE, self._begun))
        first = next((failure for failure in said if not failure.lost), None)
        if first is None:
            return EngineLost(f"a rank ended; see {self.directory / 'logs'}")
        return EngineLost(f"rank {first.rank}: {first.error}")

    def end(self, patience: float = LEAVE) -> None:
        """Let all ranks leave; those that do not are ended."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        until = time.monotonic() + patience
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        self.processes = []


@define(eq=False)
class StartedEngine(RanksEngine):
    """An engine whose ranks are started with it, and again after they were lost."""

    ranks: StartedRanks = field(kw_only=True)

    @classmethod
    def over(cls, ranks: StartedRanks) -> "StartedEngine":
        return cls(ranks.plan, ranks.call, ranks=ranks)

    def start(self) -> Capabilities:
        self.models = {}
        self.ranks.start()
        return self.capabilities

    def close(self) -> None:
        self.ranks.end()


def _check_same(directory: Path, plan: Plan) -> None:
    """Raises EnvironmentFault where the models of a directory are those of another model, adapter or seed."""
    try:
        before = json.loads((directory / PLAN).read_text())["config_id"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none, or none that could have been served
        return
    if before != plan.config_id:
        message = f"{directory} has the models of a server with another spec ({before}, and this one is "
        message += f"{plan.config_id}), which would be lost; serve that spec, {directory / SPEC}, or give this server "
        raise EnvironmentFault("X705", f"{message}another name with workspace.run")


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    if world == 1:
        return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
