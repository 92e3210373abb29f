"""Servers in tests: in this process, as processes of their own, and ports that listen."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import uvicorn
from ranks import on_ranks

from xtrain.plan.plan import Plan
from xtrain.plan.serialise import from_json, to_json
from xtrain.planner.load import plan_from_spec
from xtrain.server.access import Keys, ServerLimits
from xtrain.server.app import app_of
from xtrain.server.engine_interface import Engine
from xtrain.server.server import TrainingServer

# A server's ranks for a test ------------------------------------------------------------------------------------------


SPEC = """
experiment served {{ seed = 3 }}
model {model}
tokenizer bytes
{adapter}
serve {{ {trained}, max_tokens = 64, rows = {rows} }}
launch {{ device = cpu }}
"""
ADAPTER = 'adapter lora {{ rank = {rank}, alpha = 16, targets = ["all_linear", "lm_head"] }}'
LLAMA = "llama { dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48, init_std = 0.2 }"
Script = Callable[..., Any]


def server_plan(
    folder: Path, *sets: str, rank: int = 8, rows: int = 2, model: str = LLAMA, world: int | None = None
) -> Plan:
    """rank: of the largest adapter; 0: the model itself is trained."""
    path = folder / "served.xtrain"
    adapter = ADAPTER.format(rank=rank) if rank else ""
    trained = "adapters = 4" if rank else "mode = full"
    path.write_text(SPEC.format(model=model, adapter=adapter, trained=trained, rows=rows))
    compiled = plan_from_spec(path, ("precision.params=fp64", *sets), world)
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def served(plan: Plan, script: Script, folder: Path, *args: Any) -> Any:
    """What `script(engine, folder, *args)` gives on the first rank; it stands in a test module."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_json(plan))
    return on_ranks(plan.mesh.world_size, _serve, folder, text, script, folder, args)[0]


def _serve(rank: int, world: int, text: str, script: Script, folder: Path, args: tuple[Any, ...]) -> Any:
    from xtrain.runtime.base.state import Progress, Rank
    from xtrain.runtime.observe.heartbeat import HeartbeatWriter
    from xtrain.runtime.observe.records import Records
    from xtrain.server.engine.ranks import set_up
    from xtrain.server.engine.started import RanksEngine

    plan = from_json(json.loads(text))
    os.chdir(folder)
    here = Rank(
        rank=rank,
        local_rank=rank,
        world_size=world,
        data_rank=plan.mesh.data_rank(rank),
        data_ranks=plan.mesh.data_ranks,
        device=torch.device("cpu"),
        pipeline_ranks=plan.mesh.size("pp"),
        coordinates=plan.mesh.coordinates(rank),
    )
    resources: dict[str, Any] = {
        "plan": plan,
        "rank": here,
        "records": Records.open(folder, rank),
        "progress": Progress(),
        "beat": HeartbeatWriter(),
    }
    ranks = set_up(plan, resources, without=("setup.bootstrap", "setup.watch"))
    if rank:
        ranks.follow()
        return None
    found = script(RanksEngine(plan, ranks.lead), folder, *args)
    ranks.stop()
    return found


@contextmanager
def one_rank(plan: Plan, folder: Path) -> Iterator[Engine]:
    """The engine of a plan of one rank, in this process, which works in `folder`."""
    from xtrain.runtime.base.state import Progress, Rank
    from xtrain.runtime.observe.heartbeat import HeartbeatWriter
    from xtrain.runtime.observe.records import Records
    from xtrain.server.engine.ranks import set_up
    from xtrain.server.engine.started import RanksEngine

    here = Rank(
        rank=0,
        local_rank=0,
        world_size=1,
        data_rank=0,
        data_ranks=1,
        device=torch.device("cpu"),
        pipeline_ranks=1,
        coordinates=plan.mesh.coordinates(0),
    )
    folder.mkdir(exist_ok=True)
    records = Records.open(folder, 0)
    resources: dict[str, Any] = {"plan": plan, "rank": here, "records": records, "progress": Progress()}
    ranks = set_up(plan, resources | {"beat": HeartbeatWriter()}, without=("setup.bootstrap", "setup.watch"))
    yield RanksEngine(plan, ranks.lead)


# A training server that listens on a free port of this machine, in a thread of this process ---------------------------


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
    # A client that has connected while the server ends keeps asking it.
    config = uvicorn.Config(app, port=port, log_config=None, lifespan="off", timeout_graceful_shutdown=5)
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


# A training server as a process, with the engine in numpy -------------------------------------------------------------


PROGRAM = """
import json, logging, sys
from pathlib import Path
from numpy_engine import NumpyEngine
from xtrain.server.access import Keys
from xtrain.server.access import ServerLimits
from xtrain.server.serving import Address, serve
folder, limits, files = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
logging.basicConfig(level="INFO")
address = Address(**{name: Path(path) for name, path in files.items()})
listening = lambda url: print(url, flush=True)
sys.exit(serve(NumpyEngine(), Path(folder), address, Keys({"me": "tml-test"}), ServerLimits(**limits), listening))
"""


class ServerProcess:
    """url: where it listens. log: what it has said, once it has ended. files: certificate and private_key."""

    def __init__(self, folder: Path, files: dict[str, Path] | None = None, **limits: Any) -> None:
        self._stderr = folder.with_suffix(".log")
        names = {name: str(path) for name, path in (files or {}).items()}
        with self._stderr.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(folder), json.dumps(limits), json.dumps(names)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.partition("://")[2].rsplit(":", 1)
        return host, int(port)

    @property
    def log(self) -> str:
        return self._stderr.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """The exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
