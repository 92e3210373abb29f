"""Commands to a running run: files in `control/`, read by the first rank and carried out by all ranks between steps."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from attrs import define, field, frozen

from xtrain.plan.plan import Command
from xtrain.records.events import ControlEvent
from xtrain.records.names import ControlState, ControlWord
from xtrain.records.status import ControlRequest
from xtrain.regular_files import MOST_JSON, read_regular
from xtrain.runtime.base.errors import StorageFailed
from xtrain.runtime.base.state import Clocks, Progress
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.observe.records import Records

# A profile stays in memory until it is written.
MOST_PROFILED: Final = 100


class CommandRefused(Exception):
    """Refusal of a command; the message gives the reason."""


@frozen
class Order:
    """Accepted command. id: the name of its file. number: its index among the plan's commands."""

    id: str
    command: Command
    number: int
    amount: int = 0


@define(kw_only=True)
class Inbox:
    """Conversion of command files to orders. A background thread calls `look`, the step `take`."""

    folder: Path
    commands: tuple[Command, ...]
    records: Records
    progress: Progress
    profiling: bool = False
    """True if a profile is requested or being recorded."""
    _orders: deque[Order] = field(factory=deque)
    _paused: bool = False  # state after all queued orders
    _torn: dict[str, tuple[int, int]] = field(factory=dict)
    _done_with: set[str] = field(factory=set)
    _looking: threading.Lock = field(factory=threading.Lock)

    def sweep(self, before: float) -> None:
        """Refuse files older than `before`: they were meant for an earlier start of the run."""
        for path in self._files():
            with suppress(OSError):
                if path.stat().st_mtime >= before:
                    continue
            self._refuse(path, "the command is older than this start of the run: repeat it")
        for path in self.folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def look(self) -> None:
        """Accept or refuse new files."""
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
        """Queue an order of the run itself. Raises CommandRefused."""
        self._orders.append(self._understood(id, word, None))

    def take(self) -> Order | None:
        """Return the next order, if any."""
        return self._orders.popleft() if self._orders else None

    def close(self) -> None:
        """Refuse all waiting orders, because the run ends."""
        self.look()
        while self._orders:
            order = self._orders.popleft()
            why = "the run ended before the command was executed"
            self.report(order.id, order.command.name, ControlState.REFUSED, why)

    def report(self, id: str, command: str, state: str, detail: str = "") -> None:
        """Write a command's outcome: accepted, done or refused."""
        step = self.progress.step
        self.records.event(ControlEvent(step=step, id=id, command=command, state=state, detail=detail))

    def _files(self) -> list[Path]:
        """Return command files, oldest first; files that could not be removed are skipped."""
        paths = [path for path in self.folder.glob("*.json") if path.name not in self._done_with]
        try:
            return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))
        except FileNotFoundError:
            return []  # one was withdrawn: look again next time

    def _read(self, path: Path) -> Order | None:
        """Return the order in a file; None if the file may be incomplete. Raises CommandRefused."""
        try:
            status, text = path.stat(), read_regular(path, MOST_JSON)
        except FileNotFoundError:
            return None  # withdrawn
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
            raise CommandRefused(f"unknown command {word}; commands: {', '.join(words)}")
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
                raise CommandRefused(f"{command.name} takes no argument, but {arg!r} was given")
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


class Control:
    """State of commands on all ranks. A step without commands only checks `busy`.

    call: returns the callable of a plan node. inbox: on the first rank, None on others.
    """

    def __init__(self, commands: tuple[Command, ...], call: Callable[[str], StepCall]) -> None:
        self.busy = False
        self.paused = False
        self.inbox: Inbox | None = None
        self.order: Order | None = None
        """The order being carried out."""
        self._commands, self._call = commands, call
        self.stopping = False
        self._taken: Order | None = None  # taken by the first rank, not agreed upon yet
        self._heard: list[Order] = []

    def ask_through(self, clocks: Clocks) -> None:
        """Share the first rank's next order with all ranks."""
        self._clocks = clocks
        self._number = clocks.ask_for(self._next)
        self._amount = clocks.ask_for(lambda: self._taken.amount if self._taken else 0)

    def _next(self) -> float:
        if self.inbox is None or self._taken is not None:
            return 0
        self._taken = self.inbox.take()
        return self._taken.number + 1 if self._taken else 0

    def hear(self) -> None:
        """After an agreement, keep the shared order, if any."""
        if number := self._clocks.value(self._number):
            command, amount = self._commands[number - 1], self._clocks.value(self._amount)
            id = self._taken.id if self._taken else ""
            self._heard.append(Order(id, command, number - 1, amount))
            self._taken, self.busy = None, True

    def obey(self, step: Step) -> bool:
        """Carry out the received orders; return True if the run is to stop. Collective.

        Raises Halt if the run is to stop while it is paused.
        """
        self.carry_out(step)
        self.busy = False
        return self.stopping

    def carry_out(self, step: Step) -> None:
        """Carry out the received orders one by one, until the run is to stop."""
        while self._heard and not self.stopping:
            order = self._heard.pop(0)
            if order.command.name == ControlWord.RESUME:
                self.paused = False
            self.order = order
            try:
                for node in order.command.nodes:
                    self._call(node)(step)
            except StorageFailed as failure:
                if order.command.stop:
                    raise
                self.report(order, ControlState.REFUSED, str(failure))
                continue
            self.stopping = self.stopping or order.command.stop
            if order.command.name not in (ControlWord.PROFILE, ControlWord.PAUSE):  # these report themselves
                self.report(order, ControlState.DONE)

    def report(self, order: Order, state: str, detail: str = "") -> None:
        """Write the outcome of an order, on the first rank."""
        if self.inbox is not None:
            self.inbox.report(order.id, order.command.name, state, detail)

    def close(self) -> None:
        """Refuse the remaining orders, because the run ends."""
        if self.inbox is None:
            return
        for order in (*self._heard, *([self._taken] if self._taken else [])):
            self.report(order, ControlState.REFUSED, "the run ended before the command was executed")
        self._heard, self._taken = [], None
        self.inbox.close()


class LongAction(Protocol):
    """Action that continues over several steps, such as a profile. `kind`: one of each kind at a time."""

    kind: str

    def after_step(self) -> bool:
        """Update after a step; return True if the action continues. Collective."""
        ...

    def cut_short(self, why: str) -> None:
        """Stop early: keep the partial result and its reason. Collective."""
        ...

    def drop(self) -> None:
        """Free everything after a failure, without the other ranks, which may be gone. Never raises."""
        ...


class UnderWay:
    """Running long actions. All ranks begin and end the same actions at the same points."""

    def __init__(self) -> None:
        self._all: list[LongAction] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def has(self, kind: str) -> bool:
        """Return True if an action of a kind is running."""
        return any(action.kind == kind for action in self._all)

    def begin(self, lasting: LongAction) -> None:
        """Add an action, which starts with the next step."""
        self._all.append(lasting)

    def after_step(self) -> None:
        """Update all actions after a step, before its ticks. Collective."""
        self._all = [action for action in self._all if action.after_step()]

    def cut_short(self, why: str) -> None:
        """Stop all actions early, because the steps are interrupted. Collective."""
        while self._all:
            self._all.pop(0).cut_short(why)

    def drop(self) -> None:
        """Drop all actions after a failure."""
        while self._all:
            self._all.pop(0).drop()
