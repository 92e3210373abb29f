"""`xtrain run` as a process of its own that need not import anything: forked from one that has torch loaded.

    command = ForkedCommand(["run", "tiny.xtrain"], folder, environment)
    out, err = command.communicate(timeout=60)

The launcher and its ranks are real processes, parents and children of one another, with the streams, the environment
and the command line (as /proc shows it) that they would have; the ranks are forked from the launcher. What they do not
show is whether they can import what they need: some tests start fresh ones for that.

Importing costs a launcher three seconds of a core and a rank six, a fork some milliseconds.
"""

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rank_forker import die_with, preload

# Bytes that the command line and the environment of a forked process may have.
COMMAND_BYTES, ENVIRONMENT_BYTES = 4096, 65536
LAUNCHERS = (
    "encodings.idna",
    "xtrain.cli.following",
    "xtrain.cli.main",
    "xtrain.cli.run",
    "xtrain.cli.run_sweep",
    "xtrain.cli.started",
    "xtrain.planner.compile_sweep",
    "xtrain.planner.review.changes",
    "xtrain.planner.review.page",
    "xtrain.runtime.jobs.launch",
    "xtrain.runtime.jobs.replica_groups",
    "xtrain.runtime.jobs.restarts",
    "xtrain.runtime.jobs.runs",
    "xtrain.runtime.jobs.submitted",
    "xtrain.runtime.jobs.trials",
    "xtrain.runtime.loop.preflight",
    "xtrain.runtime.store.run_directory",
    "xtrain.tui.lines.view",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.launcher.api",
    "torch.distributed.run",
)


class ForkedCommand:
    """`xtrain ARGUMENTS` under way; a part of `subprocess.Popen`. Its output goes to files, read at the end."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: dict[str, str],
        *,
        torchrun: int = 0,
        agent: tuple[str, ...] = ("--standalone",),
        one_output: bool = False,
    ) -> None:
        """torchrun: so many ranks are started by that, with `agent` as its options. one_output: what goes to stderr is
        read with what goes to stdout."""
        launcher = ["torch.distributed.run", *agent, "--nproc-per-node", str(torchrun), "-m"] if torchrun else []
        self.args = [sys.executable, "-m", *launcher, "xtrain", *arguments]
        self.arguments, self.environment = [*arguments], environment
        self.returncode: int | None = None
        output = tempfile.TemporaryFile()  # noqa: SIM115  open until it has ended
        self._output = [output, output if one_output else tempfile.TemporaryFile()]  # noqa: SIM115
        with Path(os.devnull).open() as nothing:
            streams = [nothing.fileno(), *(file.fileno() for file in self._output)]
            self.pid: int = _server().ask({"start": self.args, "folder": str(folder), "env": environment}, streams)
        self._handle = os.pidfd_open(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code (negative: a signal). Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            os.close(self._handle)
            self.returncode = _server().ask({"wait": self.pid})
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has written by its end. Raises TimeoutExpired."""
        self.wait(timeout)
        texts = []
        for file in dict.fromkeys(self._output):
            file.seek(0)
            texts.append(file.read().decode())
        return texts[0], "".join(texts[1:])

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that commands are forked from; it ends with this one."""

    def __init__(self) -> None:
        self._asked, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        room = {"XTRAIN_TEST_ROOM": "x" * ENVIRONMENT_BYTES}
        command = [sys.executable, __file__, str(os.getpid()), str(there.fileno()), "x" * COMMAND_BYTES]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {**os.environ, **threads, "OMP_WAIT_POLICY": "passive", **room}
        self.process = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment)
        there.close()

    def ask(self, what: dict[str, Any], streams: list[int] | None = None) -> int:
        socket.send_fds(self._asked, [json.dumps(what).encode()], streams or [])
        answer = self._asked.recv(1024)
        assert answer, "the process that commands are forked from has ended"
        return int(answer)


_servers: list[Server] = []


def _server() -> Server:
    if not _servers:
        _servers.append(Server())
    return _servers[0]


# In the process that commands are forked from, and in these ---------------------------------------------------------


def serve(asked: socket.socket) -> None:
    while True:
        message, streams, _, _ = socket.recv_fds(asked, 2 * ENVIRONMENT_BYTES, 3)
        if not message:
            return
        what = json.loads(message)
        if "wait" in what:
            answer = os.waitstatus_to_exitcode(os.waitpid(what["wait"], 0)[1])
        else:
            parent = os.getpid()
            answer = os.fork()
            if not answer:
                die_with(parent)
                os.chdir(what["folder"])
                become(what["start"], what["env"], streams)
        for stream in streams:
            os.close(stream)
        asked.send(str(answer).encode())


class ForkedRank(subprocess.Popen):
    """What torch's agent, or the driver of a sweep, starts, as a fork of this process."""

    def _execute_child(  # type: ignore[override]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ) -> None:  # fmt: skip
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            if preexec_fn is not None:
                preexec_fn()
            streams = [own if given < 0 else given for own, given in ((1, c2pwrite), (2, errwrite))]
            become(list(args), env, [0, *streams])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def become(command: list[str], environment: dict[str, str], streams: list[int]) -> NoReturn:
    """Turn this process, just forked, into `python -m MODULE ARGUMENTS`; it ends here, whatever happens."""
    code = 1
    try:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        copies = [os.dup(stream) for stream in streams]
        for number, stream in enumerate(copies):
            os.dup2(stream, number)
        os.closerange(3, 4096)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        show_as(command, environment)
        # torchrun adds -u.
        options, (module, *arguments) = command[1 : command.index("-m")], command[command.index("-m") + 1 :]
        assert set(options) <= {"-u", "-P"}, command
        sys.argv = [module, *arguments]
        sys.orig_argv = command
        if "-P" not in options:
            sys.path.insert(0, str(Path.cwd()))
        importlib.invalidate_caches()
        for site in (Path(folder) / "sitecustomize.py" for folder in environment.get("PYTHONPATH", "").split(":")):
            if site.is_file():
                exec(compile(site.read_text(), site, "exec"), {})
        code = run(module)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
        if isinstance(ended.code, str):
            code = 1
            print(ended.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(module: str) -> int:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    vars(subprocess_handler)["Popen"] = ForkedRank
    # It reads the sources of the whole stack, for a log: half of what a launcher computes.
    vars(dynamic_rendezvous)["get_method_name"] = lambda: ""
    if module == "xtrain":
        from xtrain.cli.main import main
        from xtrain.runtime.jobs import meeting_place, replica_groups
        from xtrain.runtime.jobs import trials as trial_launcher

        vars(trial_launcher)["Popen"] = ForkedRank
        vars(replica_groups)["Popen"] = vars(meeting_place)["Popen"] = ForkedRank
        return main()
    if module == "torch.distributed.run":
        from torch.distributed.run import main as torchrun

        torchrun()
        return 0
    if module == "xtrain.runtime.jobs.meeting_place":
        from xtrain.runtime.jobs import meeting_place

        meeting_place.main()
        return 0
    from xtrain.runtime.loop import worker

    assert module == worker.__name__, module
    worker.main()
    return 0


def show_as(command: list[str], environment: dict[str, str]) -> None:
    """Let /proc show this command line and this environment, and let this process have them.

    They are written over those that the first process was started with, which has left room.
    """
    libc = ctypes.CDLL(None)
    libc.clearenv()  # what getenv gives would lie where we write
    os.environ.clear()
    os.environ.update(environment)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, variables, variables_end = map(int, fields[45:49])
    rest = b"".join(b"\0" + os.fsencode(word) for word in command[1:]) + b"\0"
    # To its last byte: a path may begin with any number of slashes.
    first = os.fsencode(command[0]).rjust(arguments_end - arguments - len(rest), b"/")
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    assert len(first + rest) == arguments_end - arguments and len(shown) <= variables_end - variables
    ctypes.memmove(arguments, first + rest, len(first + rest))
    ctypes.memset(variables, 0, variables_end - variables)
    ctypes.memmove(variables, shown, len(shown))


def main() -> None:
    die_with(int(sys.argv[1]))
    asked = socket.socket(fileno=int(sys.argv[2]))
    for module in LAUNCHERS:
        importlib.import_module(module)
    preload()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, "a process with threads must not be forked"
    serve(asked)
    os._exit(0)  # taking torch down takes a second


if __name__ == "__main__":
    main()
