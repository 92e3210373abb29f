"""Runs from Python: begin them, follow them, and read what they have written."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import field

from xtrain.lazy_attrs import define
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import load_plan
from xtrain.records.events import events_since
from xtrain.records.lines import Event, kind_of, object_of, objects_since
from xtrain.records.names import EVENTS_FILE, METRICS_FILE, EndStatus
from xtrain.runtime.base.errors import EXIT_CODES
from xtrain.tui.feed import RecordFeed
from xtrain.tui.lines.view import follow
from xtrain.tui.model.find import NoRun, run_at
from xtrain.tui.state import RunState, reduce_all

if TYPE_CHECKING:
    import torch

    from xtrain.runtime.sampling.trained_run import TrainedRun
    from xtrain.runtime.store.checkpoints import CheckpointEntry

LAST_LINES: Final = 40


class RunFailed(RuntimeError):
    """A run that could not start, or failed; the text is its output. exit_code: as of `xtrain run`."""

    def __init__(self, exit_code: int, text: str) -> None:
        super().__init__(text.strip() or f"the run ended with exit code {exit_code}")
        self.exit_code = exit_code


def open_run(directory: str | PathLike[str]) -> "Run":
    """Open a running or ended run by its directory, or by a name as for `xtrain watch`. Raises FileNotFoundError."""
    try:
        return Run(run_at(str(directory)))
    except NoRun as error:
        raise FileNotFoundError(str(error)) from None


@define(eq=False)
class Run:
    """A run directory. Everything is read on access, also while the run is running."""

    directory: Path
    _launched: "_Launched | None" = field(default=None, repr=False)

    @property
    def plan(self) -> Plan:
        """The run's plan. Raises PlanError if it was written by an incompatible version."""
        return load_plan(self.directory / "plan.json")

    @property
    def state(self) -> RunState:
        """Status, step, loss, pace, evaluations and the other contents of the run's records."""
        feed, state = RecordFeed(self.directory), RunState()
        while True:
            state = reduce_all(state, feed.read())
            if not feed.behind:
                return state

    @property
    def status(self) -> str:
        """`waiting`, `starting`, `training`, or the final status (`done`, `stopped`, `failed`, …)."""
        return self.state.status

    def metrics(self) -> list[dict[str, Any]]:
        """Return the logged steps that count, one dict per step, without steps that a resumed run discarded."""
        return objects_since(self.directory / METRICS_FILE)

    def frame(self, library: Literal["pandas", "polars"] = "pandas") -> Any:
        """Return the metrics as a data frame, a row per step. Raises ModuleNotFoundError if the library is not
        installed, and ValueError for an unknown one."""
        if library not in ("pandas", "polars"):
            raise ValueError(f"a frame is one of pandas or polars, not {library!r}")
        rows = self.metrics()
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = {name: [row.get(name) for row in rows] for name in names}
        if library == "polars":
            import polars  # pyright: ignore[reportMissingImports]

            return polars.DataFrame(columns, strict=False)
        import pandas

        return pandas.DataFrame(columns)

    def events(self, kind: str | None = None) -> list[Event]:
        """Return the events in order: `eval`, `checkpoint`, `generate`, `warning`, … ; kind: only this kind."""
        found = events_since(self.directory / EVENTS_FILE)
        return found if kind is None else [each for each in found if kind_of(type(each)) == kind]

    def checkpoints(self) -> "list[CheckpointEntry]":
        """Return the intact checkpoints, oldest first: their `path`, `step` and `state()`."""
        from xtrain.runtime.store.checkpoints import CheckpointFolder

        return CheckpointFolder(self.directory / "checkpoints").entries()

    def trained(self, checkpoint: str | None = None, *, task: str | None = None, device: str = "auto") -> "TrainedRun":
        """Load a checkpoint's model in one piece, whatever layout it was trained in, with `continue_texts`. checkpoint:
        `latest`, `best`, a step, a name or a path; None: the final weights, otherwise the latest. task: task whose
        adapter is used. device: `auto`, `cpu` or `cuda`. Raises EnvironmentFault if there is no checkpoint,
        PlanError if the plan is unreadable, and ValueError for another device."""
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"a device is one of auto, cpu or cuda, not {device!r}")
        from xtrain.runtime.sampling.trained_run import TrainedRun

        return TrainedRun.load(self.directory, device, checkpoint, task)

    def model(self, checkpoint: str | None = None, *, device: str = "auto") -> "torch.nn.Module":
        """Return the model of a checkpoint as a torch module, with the plan's parameter names."""
        return self.trained(checkpoint, device=device).writer.model.whole

    def generate(
        self, prompts: str | Sequence[str], tokens: int = 64, *, checkpoint: str | None = None, **sampling: Any
    ) -> list[str]:
        """Return the continuation of each prompt; sampling: as `xtrain generate` (`temperature`, `top_k`, `top_p`,
        `seed`, …). Raises ValueError for invalid numbers, and the errors of `trained`."""
        from xtrain.runtime.nn.texts import Sampling

        if tokens < 1:
            raise ValueError("tokens must be at least 1")
        drawn = Sampling(**sampling)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self.trained(checkpoint).continue_texts(texts, tokens, drawn)

    def wait(self) -> str:
        """Wait until a run that was started here has ended; return its status. Raises RunFailed if it fails."""
        if self._launched is not None:
            self._launched.wait()
        return self.status

    def stop(self) -> None:
        """Ask a run that was started here to save a checkpoint and stop; for other runs use `xtrain control`."""
        if self._launched is not None:
            self._launched.process.send_signal(signal.SIGTERM)

    def _repr_html_(self) -> str:
        from xtrain.tui.report.content import report_of
        from xtrain.tui.report.page import fragment

        return fragment(report_of([self.directory]))


def start(plan: str, *, wait: bool, show: bool) -> Run:
    """Start a run of a plan, given as the text of its `plan.json`; see `ReviewedPlan.run`."""
    launched = _Launched.begin(plan)
    directory = launched.directory()
    if directory is None:
        launched.wait()
        raise RunFailed(launched.process.returncode, "".join(launched.errors))
    if show:
        launched.show(directory)
    run = Run(directory, launched)
    if wait:
        run.wait()
    return run


@define(eq=False)
class _Launched:
    """`xtrain run` in a separate process and session: an interrupt of this process reaches it as a stop request."""

    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory
    began: float
    errors: deque[str] = field(factory=lambda: deque(maxlen=LAST_LINES))
    _readers: list[threading.Thread] = field(factory=list)
    _known: threading.Event = field(factory=threading.Event)
    _ended: threading.Event = field(factory=threading.Event)
    _directory: Path | None = None
    _shows: threading.Thread | None = None

    @classmethod
    def begin(cls, plan: str) -> "_Launched":
        folder = tempfile.TemporaryDirectory(prefix="xtrain-")
        path = Path(folder.name) / "plan.json"
        path.write_text(plan, encoding="utf-8")
        command = [sys.executable, "-P", "-m", "xtrain", "run", str(path), "--ui", "json"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True
        )
        launched = cls(process, folder, time.time())
        for read in (launched._read_records, launched._read_errors):
            launched._readers.append(threading.Thread(target=read, daemon=True))
            launched._readers[-1].start()
        return launched

    def directory(self) -> Path | None:
        """Return the run directory; None if the run ended before it started."""
        self._interruptible(self._known)
        return self._directory

    def show(self, directory: Path) -> None:
        """Print the run's lines from its start here on."""
        options = {"ui": "plain", "finished": self._ended, "quiet_until": self.began}
        self._shows = threading.Thread(target=follow, args=(directory,), kwargs=options, daemon=True)
        self._shows.start()

    def wait(self) -> None:
        """Wait for the run's end. Raises RunFailed if it fails. KeyboardInterrupt first stops the run."""
        self._interruptible(self._ended)
        if self._shows is not None:
            self._shows.join()
        self.folder.cleanup()
        code = self.process.returncode
        if code not in (EXIT_CODES[each] for each in (EndStatus.DONE, EndStatus.STOPPED, EndStatus.INTERRUPTED)):
            raise RunFailed(code, "".join(self.errors))

    def _interruptible(self, what: threading.Event) -> None:
        try:
            what.wait()
        except KeyboardInterrupt:
            self.process.send_signal(signal.SIGINT)
            self._ended.wait()
            raise

    def _read_records(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = object_of(line) or {}
            if self._directory is None and found.get("event") == "run_start":
                self._directory = Path(found["directory"])
                self._known.set()
        self.process.wait()
        self._readers[1].join()
        self._ended.set()
        self._known.set()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.decode(errors="replace"))
