"""Process of one rank of a server, started with run directory, launcher's process id and socket.

`python -m xtrain.server.engine.rank RUN_DIRECTORY LAUNCHER_PID [SOCKET]`
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

from xtrain.plan.plan import Node, Plan
from xtrain.records.names import EndStatus
from xtrain.records.training_events import RunStartEvent, SetupDoneEvent, SetupEvent
from xtrain.runtime.base.device import forget_peak
from xtrain.runtime.base.errors import EXIT_CODES, DataError, EnvironmentFault, exit_process
from xtrain.runtime.base.process import die_with_launcher
from xtrain.runtime.base.state import Progress
from xtrain.runtime.loop.bootstrap import choose_device
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.provenance import plan_in
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.stopping import StopRequests, lost_a_peer, report_failure, stop_signals
from xtrain.server.engine.messages import RankMessage
from xtrain.server.engine.ranks import Closed, Connection, ServingRanks, set_up, shut_down

LOOK: Final = 5.0  # seconds without a request after which the other ranks get a sign of life
READY: Final = "ready"


def serve_rank(plan: Plan, directory: Path, connection: Connection | None) -> str:
    """Set up, execute requests until there are no more, and shut down; return the end status. Reports failures."""
    records, beat, began = Records.open(directory, _number()), HeartbeatWriter(), time.perf_counter()
    requests = StopRequests(deadline_seconds=300.0, report=lambda message: records.warn(message, step=0))
    resources: dict[str, Any] = {
        "plan": plan,
        "records": records,
        "requests": requests,
        "progress": Progress(),
        "beat": beat,
        "exit_process": exit_process,
        "store": None,
    }

    def done(node: Node, seconds: float) -> None:
        beat.at(node.id, lasting=True)
        records.event(SetupEvent(step=0, node=node.id, seconds=seconds, detail=node.does))

    try:
        records.event(_start(plan, records))
        ranks = set_up(plan, resources, done)
        most = forget_peak(resources["rank"].device)
        records.event(SetupDoneEvent(step=0, seconds=time.perf_counter() - began, memory_bytes=most))
        records.flush(0)
        if connection is None:
            ranks.follow()
        else:
            lead(ranks, connection)
    except (EnvironmentFault, DataError) as error:
        status = EndStatus.ENVIRONMENT
        report_failure(records, error, step=0, place=beat.node, exit_code=EXIT_CODES[status], trace=False)
        return status
    except BaseException as error:  # the launcher ends the other ranks
        report_failure(records, error, step=0, place=beat.node, exit_code=1, trace=not lost_a_peer(error))
        return EndStatus.FAILED
    shut_down(plan, resources)
    return EndStatus.DONE


def lead(ranks: ServingRanks, connection: Connection) -> None:
    """Execute requests from the socket in order, until the other end closes it."""
    connection.send(RankMessage(name=READY))
    try:
        while True:
            message = connection.receive(LOOK)
            if message is None:
                ranks.wait()
            else:
                connection.send(ranks.lead(message))
    except Closed:
        ranks.stop()


def _start(plan: Plan, records: Records) -> RunStartEvent:
    return RunStartEvent(
        step=0,
        run_id=records.directory.name,
        plan_id=plan.id,
        name=plan.name,
        world_size=plan.mesh.world_size,
        device=choose_device(plan.node("setup.bootstrap").args["device"], int(os.environ.get("LOCAL_RANK", "0"))).type,
        steps=None,
        attempt=records.attempts() + 1,
        resumed_step=None,
        directory=str(records.directory),
    )


def _number() -> int:
    return int(os.environ.get("RANK", "0"))


def main() -> None:
    directory, launcher = Path(sys.argv[1]), int(sys.argv[2])
    die_with_launcher(launcher)
    for number in stop_signals():  # the server process decides when ranks end
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=int(sys.argv[3]))) if len(sys.argv) > 3 else None
    status = serve_rank(plan_in(directory), directory, connection)
    exit_process(EXIT_CODES[status])


if __name__ == "__main__":
    main()
