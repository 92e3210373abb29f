"""Commands to a live run: heard by all ranks in `step.agree`, carried out between two steps by nodes of the plan."""

from collections.abc import Callable

from xtrain.planner.plan import Command
from xtrain.records.control_words import ControlState, ControlWord
from xtrain.runtime.control.inbox import Inbox, Order
from xtrain.runtime.errors import StorageFailed
from xtrain.runtime.step_state import Step, StepCall
from xtrain.runtime.timers import Clocks


class Control:
    """What all ranks know of commands. `busy` is all that a step without one looks at.

    call: the callable of a node of the plan. inbox: of the first rank, None on the others.
    """

    def __init__(self, commands: tuple[Command, ...], call: Callable[[str], StepCall]) -> None:
        self.busy = False
        self.paused = False
        self.inbox: Inbox | None = None
        self.order: Order | None = None
        """The order that is being carried out."""
        self._commands, self._call = commands, call
        self.stopping = False
        self._taken: Order | None = None  # by the first rank, and not agreed upon yet
        self._heard: list[Order] = []

    def ask_through(self, clocks: Clocks) -> None:
        """Let all ranks hear of the first rank's next order."""
        self._clocks = clocks
        self._number = clocks.ask_for(self._next)
        self._amount = clocks.ask_for(lambda: self._taken.amount if self._taken else 0)

    def _next(self) -> float:
        if self.inbox is None or self._taken is not None:
            return 0
        self._taken = self.inbox.take()
        return self._taken.number + 1 if self._taken else 0

    def hear(self) -> None:
        """After an agreement: keep the order that was spoken of, if any."""
        if number := self._clocks.value(self._number):
            command, amount = self._commands[number - 1], self._clocks.value(self._amount)
            id = self._taken.id if self._taken else ""
            self._heard.append(Order(id, command, number - 1, amount))
            self._taken, self.busy = None, True

    def obey(self, step: Step) -> bool:
        """Carry out what was heard; whether the run is to stop. Collective.

        Raises Halt if the run is to stop while it is paused.
        """
        self.carry_out(step)
        self.busy = False
        return self.stopping

    def carry_out(self, step: Step) -> None:
        """What was heard, one after the other, until the run is to stop."""
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
            if order.command.name not in (ControlWord.PROFILE, ControlWord.PAUSE):  # which speak for themselves
                self.report(order, ControlState.DONE)

    def report(self, order: Order, state: str, detail: str = "") -> None:
        """The first rank writes what has become of an order."""
        if self.inbox is not None:
            self.inbox.report(order.id, order.command.name, state, detail)

    def close(self) -> None:
        """The run ends: what was not carried out is refused."""
        if self.inbox is None:
            return
        for order in (*self._heard, *([self._taken] if self._taken else [])):
            self.report(order, ControlState.REFUSED, "the run ended before the command was executed")
        self._heard, self._taken = [], None
        self.inbox.close()
