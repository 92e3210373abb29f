"""The address of the first machine or rank, and the own name: waited for, and reported where nobody answers there."""

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Final

from xtrain.runtime.errors import EnvironmentFault

# Seconds after which a wait is reported: for a name, and for an answer, which takes the first rank its imports.
NAME_NOTE_SECONDS: Final = 2.0
NOTE_SECONDS: Final = 10.0
# Seconds that a name has to resolve: that of a pod is published a while after the pod has started.
NAME_SECONDS: Final = 60.0
CONNECT_SECONDS: Final = 5.0
_PAUSE: Final = 0.1


def reach(host: str, port: int, seconds: float, *, note: str = "", stopped: Callable[[], bool] = lambda: False) -> bool:
    """Connect once, as soon as somebody listens there; False if `stopped` says before that nobody waits any more.

    note: who waits for whom, written to stderr if that takes long; nothing is written if empty. Raises OSError after
    `seconds`, or after NAME_SECONDS if the name does not resolve.
    """
    began = time.monotonic()
    while not stopped():
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
            return True
        except OSError as error:
            waited, unnamed = time.monotonic() - began, isinstance(error, socket.gaierror)
            if waited > (min(seconds, NAME_SECONDS) if unnamed else seconds):
                raise
            if note and waited > (NAME_NOTE_SECONDS if unnamed else NOTE_SECONDS):
                print(f"note: {note} at {host}:{port}: {words(error)}", file=sys.stderr, flush=True)
                note = ""
        time.sleep(_PAUSE)
    return False


def words(error: Exception) -> str:
    """The reason alone, in one line, without the number of the error."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
    return f"the name does not resolve: {reason}" if isinstance(error, socket.gaierror) else reason


def check_own_name(meet: str) -> None:
    """Raise EnvironmentFault if other machines do not reach this one by its own name, by which gloo connects ranks.

    meet: the host at which the machines meet. One that is a loopback address is that of a single machine.
    """
    name, set_by_user = socket.gethostname(), "GLOO_SOCKET_IFNAME" in os.environ
    if set_by_user or _is_loopback(meet):
        return
    try:
        found = [str(address[4][0]) for address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        fault = words(error)
    else:
        own = next((address for address in found if _is_own(address)), None)
        if own is not None and not _is_loopback(own):
            return
        fault = f"the name leads to {own or found[0]}, which is {'not an address of' if own is None else 'only'} "
        fault += "this machine" if own is None else "known on this machine"
    raise EnvironmentFault(
        "X732",
        f"other machines do not reach this one by its own name `{name}`: {fault}; give the name an address of the "
        "network that joins the machines (/etc/hosts, DNS), or set GLOO_SOCKET_IFNAME to the interface of that network",
    )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _is_own(address: str) -> bool:
    """By binding to it, as gloo finds out."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as own:
            own.bind((address, 0))
    except OSError:
        return False
    return True
