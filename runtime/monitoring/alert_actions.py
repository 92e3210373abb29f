"""What all ranks do together about an alert: they hear of it where they agree, and act behind the step."""

import threading

from attrs import define, field

from xtrain.dsl.schema.actions import action_of
from xtrain.planner.plan import Node, Plan, Trigger
from xtrain.runtime.timers import Clocks


def informs(node: Node) -> bool:
    """Whether a node is a command that the first rank runs when the alert is raised, before the others hear of it."""
    action = action_of(node.op)
    return action is not None and action.informs


@define(eq=False)
class AlertActions:
    """The triggers of a plan that do more at an alert than run commands, and which of them are due.

    `due` is all that a step without one looks at. Nothing is exchanged where the plan has no such trigger.
    """

    triggers: tuple[Trigger, ...]
    due: list[Trigger] = field(factory=list)
    _waiting: int = 0  # a bit for each trigger; of the first rank
    _lock: threading.Lock = field(factory=threading.Lock)
    _clocks: Clocks | None = None
    _number: int = 0

    @classmethod
    def of(cls, plan: Plan, alerts: tuple[str, ...]) -> "AlertActions":
        """alerts: the events that are some."""

        def acts(trigger: Trigger) -> bool:
            return trigger.stop or not all(informs(plan.node(node)) for node in trigger.nodes)

        return cls(tuple(each for each in plan.timeline.triggers if each.event in alerts and acts(each)))

    def ask_through(self, clocks: Clocks) -> None:
        """Let all ranks hear of what is raised, if any of it concerns them."""
        if self.triggers:
            self._clocks, self._number = clocks, clocks.ask_for(self._take)

    def raised(self, kind: str) -> None:
        """An alert was raised; of the first rank, any thread."""
        for number, trigger in enumerate(self.triggers):
            if trigger.event == kind:
                with self._lock:
                    self._waiting |= 1 << number

    def _take(self) -> float:
        if not self._waiting:
            return 0
        with self._lock:
            found, self._waiting = self._waiting, 0
        return found

    def hear(self) -> None:
        """After an agreement: what is due behind this step, on all ranks alike."""
        if self._clocks is not None and (heard := self._clocks.value(self._number)):
            self.due += [each for number, each in enumerate(self.triggers) if heard >> number & 1]

    def take(self) -> list[Trigger]:
        """What is due, once."""
        found, self.due = self.due, []
        return found
