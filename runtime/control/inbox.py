"""`control/` of a live run: one file per command, `{"command": "eval", "arg": "web"}`, read by the first rank alone.

A command that is understood is accepted, one that is not or cannot be carried out is refused with the reason; both are
`control` events, and the file is gone. What lies there when the run is started was meant for an earlier start.
"""

import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from attrs import define, field, frozen

from xtrain.planner.plan import Command
from xtrain.records.control import ControlRequest
from xtrain.records.control_words import ControlState, ControlWord
from xtrain.records.run_events import ControlEvent
from xtrain.regular_files import MOST_JSON, read_regular
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Progress

# A profile keeps everything of its steps in memory until it is written.
MOST_PROFILED: Final = 100


class CommandRefused(Exception):
    """A command that is not carried out; the message says why."""


@frozen
class Order:
    """A command that was accepted. id: the name of its file. number: its place among the commands of the plan."""

    id: str
    command: Command
    number: int
    amount: int = 0


@define(kw_only=True)
class Inbox:
    """Turns files into orders. `look` is called by a thread beside training, `take` by the step."""

    folder: Path
    commands: tuple[Command, ...]
    records: Records
    progress: Progress
    profiling: bool = False
    """Whether a profile is asked for or under way."""
    _orders: deque[Order] = field(factory=deque)
    _paused: bool = False  # once all orders have been carried out
    _torn: dict[str, tuple[int, int]] = field(factory=dict)
    _done_with: set[str] = field(factory=set)
    _looking: threading.Lock = field(factory=threading.Lock)

    def sweep(self, before: float) -> None:
        """Refuse what lies there since before a time: whoever gave it did not mean this start of the run."""
        for path in self._files():
            with suppress(OSError):
                if path.stat().st_mtime >= before:
                    continue
            self._refuse(path, "the command is older than this start of the run: give it again")
        for path in self.folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def look(self) -> None:
        """Accept or refuse what has come since."""
        with self._looking:
            for path in self._files():
                try:
                    order = self._read(path)
                except CommandRefused as refused:
                    self._refuse(path, str(refused))
                    continue
                if order is not None:
                    self.report(order.id, order.command.name, ControlState.ACCEPTED)
                    self._remove(path)
                    self._orders.append(order)

    def ask(self, id: str, word: str) -> None:
        """Give an order of the run's own. Raises CommandRefused."""
        self._orders.append(self._understood(id, word, None))

    def take(self) -> Order | None:
        """The next order, if there is one."""
        return self._orders.popleft() if self._orders else None

    def close(self) -> None:
        """The run ends: nothing is carried out any more."""
        self.look()
        while self._orders:
            order = self._orders.popleft()
            why = "the run ended before the command was executed"
            self.report(order.id, order.command.name, ControlState.REFUSED, why)

    def report(self, id: str, command: str, state: str, detail: str = "") -> None:
        """Write what has become of a command: accepted, done or refused."""
        step = self.progress.step
        self.records.event(ControlEvent(step=step, id=id, command=command, state=state, detail=detail))

    def _files(self) -> list[Path]:
        """Oldest first; files of commands that could not be removed are not seen twice."""
        paths = [path for path in self.folder.glob("*.json") if path.name not in self._done_with]
        try:
            return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))
        except FileNotFoundError:
            return []  # one was taken back: look again next time

    def _read(self, path: Path) -> Order | None:
        """The order in a file; None for a file that may still be being written. Raises Refused."""
        try:
            status, text = path.stat(), read_regular(path, MOST_JSON)
        except FileNotFoundError:
            return None  # taken back
        except OSError as error:
            raise CommandRefused(f"the file cannot be read: {error.strerror}") from error
        try:
            request = msgspec.json.decode(text, type=ControlRequest)
        except msgspec.ValidationError as error:
            raise CommandRefused('the file holds no object with a "command"') from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            mark = (status.st_size, status.st_mtime_ns)
            if self._torn.get(path.name) != mark:
                self._torn[path.name] = mark
                return None
            raise CommandRefused("the file is not a complete JSON object") from error
        return self._understood(path.stem, request.command, request.arg)

    def _understood(self, id: str, word: str, arg: Any) -> Order:
        names = [command.name for command in self.commands]
        words = dict.fromkeys((*(name.partition(" ")[0] for name in names), ControlWord.SAVE, ControlWord.EVAL))
        if word not in words:
            raise CommandRefused(f"there is no command {word}; commands: {', '.join(words)}")
        if word == ControlWord.EVAL:
            known = [name.partition(" ")[2] for name in names if name.startswith(f"{ControlWord.EVAL} ")]
            if arg is None and len(known) == 1:
                arg = known[0]
            if arg not in known:
                choice = f"choose {' or '.join(known)}" if known else "no dataset of this run has a held-out part"
                raise CommandRefused(
                    f"which dataset: {choice}" if arg is None else f"dataset {arg} has no held-out part: {choice}"
                )
            word, arg = f"{ControlWord.EVAL} {arg}", None
        if word == ControlWord.SAVE and word not in names:
            raise CommandRefused("this run saves no checkpoints: checkpoint.enabled is false")
        command = self.commands[names.index(word)]
        amount = self._amount(command, arg)
        if word in (ControlWord.PAUSE, ControlWord.RESUME):
            if self._paused == (word == ControlWord.PAUSE):
                raise CommandRefused("the run is paused already" if self._paused else "the run is not paused")
            self._paused = word == ControlWord.PAUSE
        if word == ControlWord.PROFILE:
            if self.profiling:
                raise CommandRefused("another profile is being recorded")
            self.profiling = True
        return Order(id, command, names.index(word), amount)

    def _amount(self, command: Command, arg: Any) -> int:
        if not command.counts:
            if arg is not None:
                raise CommandRefused(f"{command.name} takes no argument, and {arg!r} was given")
            return 0
        if isinstance(arg, bool) or not isinstance(arg, int) or not 1 <= arg <= MOST_PROFILED:
            given = "nothing" if arg is None else repr(arg)
            raise CommandRefused(
                f"{command.name} takes a number of {command.counts} from 1 to {MOST_PROFILED}, not {given}"
            )
        return arg

    def _refuse(self, path: Path, reason: str) -> None:
        word = ""
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            word = msgspec.json.decode(read_regular(path, MOST_JSON), type=ControlRequest).command
        self.report(path.stem, word, ControlState.REFUSED, reason)
        self._remove(path)

    def _remove(self, path: Path) -> None:
        self._torn.pop(path.name, None)
        try:
            path.unlink(missing_ok=True)
        except OSError:
            self._done_with.add(path.name)
