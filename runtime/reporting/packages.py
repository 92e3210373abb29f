"""Packages that only some runs need, looked for before anything is begun."""

from ...dsl.schema.log import tracker_of
from ...dsl.schema.stacks import stack_of_node
from ...planner.installed_packages import is_installed
from ...planner.plan import Plan
from ..errors import EnvironmentFault
from ..ops import code_of


def check_packages(plan: Plan) -> None:
    """Raise EnvironmentFault where the first rank cannot load a tracker or what its stack runs on: a package is
    missing, which is not imported here, the stack finds that this machine lacks something, or the tracker's own module
    fails."""
    for node in plan.nodes:
        stack = stack_of_node(node.op)
        if stack is not None and stack.package and not is_installed(stack.package):
            message = f"stack {stack.kind} needs the package {stack.package}, which is not installed here; install it "
            raise EnvironmentFault("X715", f"{message}with `pip install '{stack.install}'`, or use stack parallel")
        if stack is not None and stack.looks_at_machine:
            code_of(stack, stack.run_module()).check_machine(plan.launch["device"], **node.args)
        tracker = tracker_of(node.op)
        if tracker is None:
            continue
        if tracker.package and not is_installed(tracker.package):
            remedy = f"install it with `pip install '{tracker.install or tracker.package}'`, or remove it from `log`"
            message = f"log needs the package {tracker.package}, which is not installed here; {remedy}"
            raise EnvironmentFault("X715", message)
        code_of(tracker, tracker.run_module())
