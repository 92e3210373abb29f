"""A training server as a process, with the engine in numpy."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
