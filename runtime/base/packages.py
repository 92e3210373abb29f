"""Packages that only some runs need, checked before the run starts."""

import os
from collections.abc import Iterator
from importlib.metadata import version

from xtrain.dsl.schema.parallel import Stack, stack_of_node
from xtrain.dsl.schema.run import Tracker, tracker_of
from xtrain.dsl.values import variables_in
from xtrain.plan.hardware import FLASH, is_installed
from xtrain.plan.pipeline import ZERO_BUBBLE
from xtrain.plan.plan import Node, Plan
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import code_of


def check_packages(plan: Plan) -> None:
    """Raise the first of `package_faults`."""
    for fault in package_faults(plan):
        raise fault


def package_faults(plan: Plan) -> Iterator[EnvironmentFault]:
    """Yield the faults of the environment that the first rank would meet.

    These are: an environment variable that is not set, a missing package of a tracker or stack (packages are not
    imported here), a machine without what the stack needs, a torch too old for the pipeline schedule, and a tracker
    whose own module fails.
    """
    for name in sorted(variables_in(plan.spec_text) - os.environ.keys()):
        message = f"the environment variable {name} is not set, but the spec reads it with env"
        yield EnvironmentFault("X709", f"{message}; set it on every machine")
    for node in plan.nodes:
        stack, tracker = stack_of_node(node.op), tracker_of(node.op)
        try:
            if stack is not None:
                _check_stack(stack, plan, node)
            if tracker is not None:
                _check_tracker(tracker)
            if node.op == "setup.build_model" and plan.launch["device"] == "cuda":
                _check_attention(node.args["attention"]["cuda"])
            if node.op == "setup.parallel.pp":
                check_schedule(node.args["schedule"], version("torch"))
        except EnvironmentFault as fault:
            yield fault


def _check_stack(stack: type[Stack], plan: Plan, node: Node) -> None:
    if stack.package and not is_installed(stack.package):
        message = f"stack {stack.kind} needs the package {stack.package}, which is not installed here; install it "
        raise EnvironmentFault("X715", f"{message}with `pip install '{stack.install}'`, or use stack parallel")
    if stack.looks_at_machine:
        code_of(stack, stack.run_module()).check_machine(plan.launch["device"], **node.args)


def _check_tracker(tracker: type[Tracker]) -> None:
    if tracker.package and not is_installed(tracker.package):
        remedy = f"install it with `pip install '{tracker.install or tracker.package}'`, or remove it from `log`"
        message = f"log needs the package {tracker.package}, which is not installed here; {remedy}"
        raise EnvironmentFault("X715", message)
    code_of(tracker, tracker.run_module())


def _check_attention(kernel: str) -> None:
    if (flash := FLASH.get(kernel)) is None or _finds(flash.module):
        return
    message = f"attention {kernel} needs {flash.title}, whose module {flash.module} is not installed here"
    raise EnvironmentFault("X715", f"{message}; {flash.install}, or use attention auto")


def _finds(module: str) -> bool:
    """Return True if a module of a package can be imported."""
    try:
        return is_installed(module)
    except ModuleNotFoundError:  # of its package
        return False


def check_schedule(schedule: str, torch: str) -> None:
    """Raise EnvironmentFault X715 if this torch cannot run a pipeline schedule. torch: its version.

    torch 2.11 and 2.12 lose the graph nodes of Python autograd functions in backwards of two parts
    (`stage_backward_weight`).
    """
    major, minor = (int(part) for part in torch.split(".")[:2])
    if schedule in ZERO_BUBBLE and (major, minor) < (2, 13):
        message = f"schedule {schedule} computes a backward in two parts, which torch {torch} computes incorrectly"
        raise EnvironmentFault("X715", f"{message}; install torch 2.13, or use schedule interleaved_1f1b")
