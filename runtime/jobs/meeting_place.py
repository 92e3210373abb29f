"""Process in which replica groups agree on who takes part in a step; restarted when it ends."""

import json
import os
import sys
import time
from importlib import import_module
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, Final

from attrs import define

from xtrain.runtime.base.errors import EXIT_CODES, EnvironmentFault, exit_process
from xtrain.runtime.base.hosts import in_url
from xtrain.runtime.base.process import die_with_launcher

MODULE: Final = "xtrain.runtime.jobs.meeting_place"


@define
class MeetingPlace:
    """Meeting process, seen from the launcher. module: of the stack. args: of its node. host: the address by which all
    machines reach this one."""

    module: str
    args: dict[str, Any]
    host: str
    port: int = 0
    _process: Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"http://{in_url(self.host)}:{self.port}"

    def keep_open(self) -> None:
        """Start the process if it does not run, at its former address. Raises EnvironmentFault if that fails."""
        if self._process is not None and self._process.poll() is None:
            return
        arguments = [str(os.getpid()), self.module, self.host, str(self.port), json.dumps(self.args)]
        command = [sys.executable, "-P", "-m", MODULE, *arguments]
        # Without Ctrl-C: ranks that stop still meet.
        self._process = Popen(
            command, stdin=DEVNULL, stdout=PIPE, text=True, start_new_session=True, env={**os.environ}
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if not said.isdecimal():
            self.close()
            raise EnvironmentFault("X715", said or "the meeting process of the replica groups has ended unexpectedly")
        self.port = int(said)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


def main() -> None:
    launcher, module, host, port, args = sys.argv[1:]
    die_with_launcher(int(launcher))
    try:
        number, kept = import_module(module).meet(host, int(port), **json.loads(args))
    except EnvironmentFault as fault:
        print(fault, flush=True)
        exit_process(EXIT_CODES["environment"])
        return
    print(number, flush=True)
    while kept is not None:
        time.sleep(3600)


if __name__ == "__main__":
    main()
