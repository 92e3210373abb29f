"""What a live run does when it is asked to from outside: the commands of `xtrain control`, and their nodes."""

from ...dsl.schema.actions import ACTIONS
from ...dsl.spec import Spec
from ..plan import Command
from .action_node import CONTROL
from .actions import ActionNodes


def build_commands(spec: Spec, training: tuple[str, ...], nodes: ActionNodes) -> tuple[Command, ...]:
    """Everything that can be asked of this run, each with the nodes that carry it out between two steps.

    training: the datasets that are trained on. Actions say which commands there are of them.
    """
    declared = [action for trigger in (*spec.ticks, *spec.events) for action in trigger.actions]
    commands: list[Command] = []
    saves: tuple[str, ...] = ()
    for kind in ACTIONS.values():
        for name, action, counts in kind.commands(declared, spec, training):
            commands.append(Command(name=name, nodes=(nodes.add(action, CONTROL),), counts=counts))
            saves += commands[-1].nodes if action.saves else ()
    pause = nodes.add_own("pause", CONTROL, "wait between two steps until the run is to go on or to stop")
    stop = Command(name="stop", nodes=saves, stop=True)
    return stop, *commands, Command(name="pause", nodes=(pause,)), Command(name="resume", nodes=())
