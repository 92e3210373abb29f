"""Nodes of environments, and what their episodes may cost at most."""

from typing import Any, Final

from xtrain.dsl.schema.policy import Environment, Rollout
from xtrain.plan.data import call_text
from xtrain.plan.graph import Builder, learns, resumes
from xtrain.plan.resolved import Resolved
from xtrain.planner.derive.further_models import completion_positions
from xtrain.text.units import bytes_text, plural, seconds_text

OP: Final = "setup.environment"
_CALLS: Final = "calls of an episode are limited by it from here on"


@resumes(
    OP,
    "name tools",
    user=learns("environment", "episodes come from other code or settings from here on"),
    seconds=learns("environment", _CALLS),
    wait=learns("environment", _CALLS),
    memory=learns("environment", _CALLS),
)
def add_environments(graph: Builder, resolved: Resolved, loader: str) -> None:
    """Add the node of each environment of a spec."""
    spec = resolved.spec
    if spec.rollout is None:
        return
    for environment in spec.environments.values():
        args = {"name": environment.name, "user": environment.call(), **limits(environment)}
        args |= {"tools": list(environment.tools)} if environment.tools else {}
        id = f"{OP}.{environment.name}"
        graph.add("setup", OP, _does(environment), id=id, args=args, after=(loader,))


def limits(environment: Environment) -> dict[str, Any]:
    """Return the limits of a call as JSON: seconds of processor time and of waiting, and bytes."""
    numbers = {name: getattr(environment, name).value for name in ("seconds", "wait", "memory")}
    return {name: int(number) if number == int(number) else number for name, number in numbers.items()}


def _does(environment: Environment) -> str:
    tools = ", ".join(tool_text(tool) for tool in environment.tools)
    does = f"have conversations with {call_text(environment.call())}"
    does += f"; the model may call {tools}" if tools else "; without tools"
    does += "; each episode has a process of its own, in which a call may take "
    does += (
        f"{seconds_text(environment.seconds.value)} of processor time, {seconds_text(environment.wait.value)} in all, "
    )
    return f"{does}and {bytes_text(int(environment.memory.value))} of memory; a call that takes more ends its episode"


def tool_text(tool: dict[str, Any]) -> str:
    """Return a tool as text: `add(a: integer, b: integer)`."""
    schema = tool["function"]["parameters"]
    parameters = (
        f"{name}: {form.get('type', 'any')}{'' if name in schema['required'] else ' = …'}"
        for name, form in schema["properties"].items()
    )
    return f"{tool['function']['name']}({', '.join(parameters)})"


def episodes_text(resolved: Resolved, rollout: Rollout) -> str:
    """Return what the episodes of a step are, and how many tokens they sample and read at most."""
    most = resolved.batch.rows * rollout.steps * rollout.group
    turns, room = plural(rollout.turns, "turn"), completion_positions(resolved, rollout) + 1
    sampled = most * rollout.turns * rollout.max_tokens
    text = f"episodes with the environment {rollout.environment} of at most {turns}, each at most "
    text += f"{plural(rollout.max_tokens, 'token')}, {room:,} tokens with what the environment says; a turn reads the "
    text += f"episode before it again: at most {sampled:,} tokens are sampled and {most * rollout.turns * room:,} read"
    return text
