"""Packages that only some runs need, checked before anything is started."""

import os
from collections.abc import Iterator
from importlib.metadata import version

from xtrain.dsl.schema.parallel import Stack, stack_of_node
from xtrain.dsl.schema.run import Tracker, tracker_of
from xtrain.dsl.values import variables_in
from xtrain.plan.hardware import is_installed
from xtrain.plan.pipeline import ZERO_BUBBLE
from xtrain.plan.plan import Node, Plan
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import code_of


def check_packages(plan: Plan) -> None:
    """Raise the first of `package_faults`."""
    for fault in package_faults(plan):
        raise fault


def package_faults(plan: Plan) -> Iterator[EnvironmentFault]:
    """Why the first rank cannot load a tracker, or what its stack runs on: a package is missing, which is not imported
    here, the stack finds that this machine lacks something, torch is too old for the schedule of the pipeline, or the
    tracker's own module fails. Also why the run cannot fill its texts: an environment variable is not set."""
    for name in sorted(variables_in(plan.spec_text) - os.environ.keys()):
        message = f"the environment variable {name} is not set, and the spec reads it with env"
        yield EnvironmentFault("X709", f"{message}; set it on every machine")
    for node in plan.nodes:
        stack, tracker = stack_of_node(node.op), tracker_of(node.op)
        try:
            if stack is not None:
                _check_stack(stack, plan, node)
            if tracker is not None:
                _check_tracker(tracker)
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


def check_schedule(schedule: str, torch: str) -> None:
    """Of a backward in two parts, torch 2.11 and 2.12 lose the nodes that functions of Python have made in the graph
    (`stage_backward_weight`).

    torch: its version. Raises EnvironmentFault X715 for a schedule that has such a backward.
    """
    major, minor = (int(each) for each in torch.split(".")[:2])
    if schedule in ZERO_BUBBLE and (major, minor) < (2, 13):
        message = f"schedule {schedule} computes a backward in two parts, which torch {torch} does not do right"
        raise EnvironmentFault("X715", f"{message}; install torch 2.13, or use schedule interleaved_1f1b")
