"""A training server in this process, until a signal stops it or it fails."""

import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from attrs import frozen

from xtrain.plan.hardware import missing_for_server
from xtrain.server.access import Keys, ServerLimits
from xtrain.server.engine_interface import Engine, EngineLost
from xtrain.server.store import StoreDamaged, StoreInUse

LOG = logging.getLogger(__name__)

STOPPED: Final = 75  # by a signal; resumable
FAILED: Final = 1


class CannotServe(Exception):
    """The reason why a server does not start, and the fix."""


@frozen(kw_only=True)
class Address:
    """The address of a server. certificate, private_key: PEM files for TLS; None: plain HTTP. port: 0 takes a free one.
    hosts: additional names by which clients connect. origins: web pages that may call the server."""

    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    private_key: Path | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


def check_serving(address: Address) -> None:
    """Raise CannotServe for problems that can be found before anything is started."""
    check_installed()
    if address.certificate is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                address.certificate,
                address.private_key,
                lambda: "",  # no prompt for a passphrase
            )
        except OSError as error:  # ssl.SSLError is one
            why = error.strerror or str(error)
            raise CannotServe(
                f"{address.certificate} and {address.private_key} cannot be used for TLS: {why}"
            ) from None
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        where = f"port {address.port} of {address.host}"
        raise CannotServe(f"cannot listen on {where}: {error.strerror}; choose another `serve.port`") from None


def check_installed() -> None:
    """Raise CannotServe if a package is missing."""
    if (message := missing_for_server()) is not None:
        raise CannotServe(message)


def serve(
    engine: Engine,
    folder: Path,
    address: Address,
    keys: Keys,
    limits: ServerLimits | None = None,
    listening: Callable[[str], None] = lambda url: None,
) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code. listening: called with the URL once requests are
    accepted. Raises CannotServe, and the errors of `Engine.start` and of the folder."""
    check_serving(address)
    import uvicorn

    from xtrain.server.app import app_of
    from xtrain.server.connections import connections
    from xtrain.server.server import TrainingServer

    class Listener(uvicorn.Server):
        """Leaves signals to `serve`, and reports where it listens."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                port = self.servers[0].sockets[0].getsockname()[1]
                host = f"[{address.host}]" if ":" in address.host else address.host
                server.monitor.url = f"{'https' if address.certificate else 'http'}://{host}:{port}"
                listening(server.monitor.url)

    def stop(number: int, frame: FrameType | None) -> None:
        """Release waiting clients before connections are closed; after a second signal, do not wait for connections."""
        listener.force_exit = listener.should_exit
        listener.should_exit = True
        server.drain()
        threading.Thread(target=server.release).start()  # takes locks, which a signal handler must not

    def ended(reason: str | None) -> None:
        listener.should_exit = True
        server.release()

    limits = limits or ServerLimits()
    try:
        server = TrainingServer(engine, folder, limits, ended=ended)
    except EngineLost as error:
        raise CannotServe(f"the engine has not started: {error}") from error
    except StoreInUse as error:
        raise CannotServe(f"{error}; it is left unchanged") from error
    except StoreDamaged as error:
        hint = "`xtrain serve SPEC --repair` continues with the intact part, and keeps the rest in its folder `damaged`"
        raise CannotServe(f"{error}\nnothing was changed; {hint}") from error
    except OSError as error:
        raise CannotServe(f"{error.filename or folder} cannot be read and written: {error.strerror}") from error
    config = uvicorn.Config(
        app_of(server, keys, (address.host, *address.hosts), address.origins),
        host=address.host,
        port=address.port,
        http=connections(limits),  # pyright: ignore[reportArgumentType]
        ws="none",
        ssl_certfile=address.certificate,
        ssl_keyfile=address.private_key,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=10,
    )
    listener = Listener(config)
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        listener.run()
    finally:
        server.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    return FAILED if server.failure is not None else STOPPED
