"""The lighthouse of torchft, one per run: it tracks the running replica groups and gives each step its quorum.

It has a process of its own that does not fork, because the threads of its server do not survive a fork.
"""

import os
from importlib import import_module
from typing import Any, Final

from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.hosts import LOOPBACK

ALL_INTERFACES: Final = ("0.0.0.0", "[::]")  # of IPv4 and IPv6
# Time that groups wait for a running group that does not join the next step; it may be saving or evaluating.
JOIN_SECONDS: Final = 3600
TICK_MS: Final = 100


def meet(host: str, port: int, min: int, heartbeat_seconds: float, **of_groups: Any) -> tuple[int, Any]:
    """Start a lighthouse. Return its port and an object that keeps it running. host: address by which groups reach this
    machine; a loopback address admits only this machine. port: 0 for any. of_groups: arguments of the node that only
    the groups read.

    Raises EnvironmentFault if the package cannot be imported.
    """
    os.environ.setdefault("RUST_LOG", "error")  # it would write a line for every step
    try:
        coordination: Any = import_module("torchft.coordination")
    except Exception as error:
        message = f"stack torchft needs the package torchft ({type(error).__name__}: {error}); install it with "
        raise EnvironmentFault("X715", message + "`pip install 'xtrain[torchft]'`, or use stack parallel") from error
    lighthouse = coordination.LighthouseServer(
        bind=f"{host if host == LOOPBACK else ALL_INTERFACES[':' in host]}:{port}",
        min_replicas=min,
        join_timeout_ms=JOIN_SECONDS * 1000,
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=round(heartbeat_seconds * 1000),
    )
    return int(lighthouse.address().rpartition(":")[2]), lighthouse
