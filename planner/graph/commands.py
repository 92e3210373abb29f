"""What a live run does when it is asked to from outside: the commands of `xtrain control`, and their nodes."""

from collections.abc import Iterator

from ...dsl.schema.actions import Action, CheckpointAction, EvalAction, ProfileAction
from ...dsl.spec import Spec
from ..data.data_rules import evaluated
from ..plan import Command
from .actions import CONTROL, ActionNodes


def build_commands(spec: Spec, training: tuple[str, ...], nodes: ActionNodes) -> tuple[Command, ...]:
    """Everything that can be asked of this run, each with the nodes that carry it out between two steps.

    training: the datasets that are trained on. Those, and what else is evaluated, can be evaluated on if they hold
    something out.
    """
    save = (nodes.add(CheckpointAction(), CONTROL),) if spec.checkpoint.enabled else ()
    commands = [Command(name="stop", nodes=save, stop=True)]
    if save:
        commands.append(Command(name="save", nodes=save))
    held_out = [name for name in dict.fromkeys((*training, *evaluated(spec))) if spec.datasets[name].holdout.value]
    commands += [
        Command(name=f"eval {name}", nodes=(nodes.add(_as_declared(spec, name), CONTROL),)) for name in held_out
    ]
    profile = nodes.add_profile(_profile(spec), CONTROL)
    pause = nodes.add_own("pause", CONTROL, "wait between two steps until the run is to go on or to stop")
    commands += [
        Command(name="profile", nodes=(profile,), counts="steps"),
        Command(name="pause", nodes=(pause,)),
        Command(name="resume", nodes=()),
    ]
    return tuple(commands)


def _as_declared(spec: Spec, dataset: str) -> Action:
    """The evaluation that the spec declares first, so that losses can be compared; else the usual one."""
    declared = (action for action in _declared(spec) if isinstance(action, EvalAction) and action.dataset == dataset)
    return next(declared, EvalAction(dataset=dataset))


def _profile(spec: Spec) -> ProfileAction:
    """The profile that the spec declares first; else the usual one."""
    return next((action for action in _declared(spec) if isinstance(action, ProfileAction)), ProfileAction())


def _declared(spec: Spec) -> Iterator[Action]:
    return (action for trigger in (*spec.ticks, *spec.events) for action in trigger.actions)
