"""A training server that listens on a free port of this machine, in a thread of this process."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from xtrain.server.access import Keys, ServerLimits
from xtrain.server.app import app_of
from xtrain.server.engine_interface import Engine
from xtrain.server.server import TrainingServer

KEY = "tml-test"


@contextmanager
def listening(
    engine: Engine,
    folder: Path,
    limits: ServerLimits | None = None,
    port: int = 0,
    keys: Keys | None = None,
    origins: Sequence[str] = (),
) -> Iterator[str]:
    """Its URL; it takes the key KEY unless there are others, and is stopped at the end."""
    server = TrainingServer(engine, folder, limits or ServerLimits(poll=2.0))
    app = app_of(server, keys or Keys({"me": KEY}), origins=origins)
    config = uvicorn.Config(app, port=port, log_config=None, lifespan="off")
    listener, ready = uvicorn.Server(config), threading.Event()
    began = listener.startup

    async def startup(sockets: object = None) -> None:
        await began()
        ready.set()

    listener.startup = startup
    thread = threading.Thread(target=listener.run)
    thread.start()
    try:
        assert ready.wait(30)
        yield f"http://127.0.0.1:{listener.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.drain()
        server.release()
        listener.should_exit = True
        thread.join()
        server.stop()
