"""Registry of operations (ops).

A plan names ops and the executor looks them up here only. An op is a plain function. Each parameter is filled by name,
from the node's `args` or from the result of an earlier op; the result is kept under `gives`. Step and tick ops are
factories: they take their resources once and return the callable that runs in the loop.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar, get_args, get_type_hints

import attrs
import cattrs
from attrs import frozen

from xtrain.dsl.schema import blocks  # noqa: F401 (declares all registries)
from xtrain.dsl.schema.actions import ACTIONS, action_of
from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.data_components import LINKS
from xtrain.dsl.schema.optimizers import SCHEDULERS
from xtrain.dsl.schema.parallel import stack_of_node, stack_of_step
from xtrain.dsl.schema.run import tracker_of
from xtrain.dsl.values import variables_in
from xtrain.plan.architecture import Architecture
from xtrain.plan.plan import Node
from xtrain.runtime.base.errors import EnvironmentFault, values_here

F = TypeVar("F", bound=Callable[..., Any])

# Rooms whose files define ops. Ops of a component are in the module next to it, imported when a plan names them.
ROOT: Final = Path(__file__).parents[2]
ROOMS: Final = ("runtime", "server")


class PlanMismatch(Exception):
    """The plan asks for something that this version of the runtime does not support."""


@frozen
class Op:
    """Registered function and the name under which its result is kept, if any."""

    name: str
    function: Callable[..., Any]
    gives: str | None
    traced: bool = True
    """False for an op that a trace leaves out: data, time, files, compiling, and user hooks."""
    chosen_by: tuple[str, ...] = ()
    """Arguments of the node that chose this op and are not passed to it."""

    def bind(self, node: Node, resources: Mapping[str, Any]) -> Callable[[], Any]:
        """Return the call with every parameter filled. Raises PlanMismatch if the plan and the function do not fit, and
        EnvironmentFault if an environment variable of a tracker is not set."""
        wanted, hints = _declared(self.function)
        args = {name: value for name, value in node.args.items() if name not in self.chosen_by}
        if "plan" in resources and tracker_of(node.op) is not None:
            args = values_here(args, variables_in(resources["plan"].spec_text))
        rest = next((name for name, p in wanted.items() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
        unused = set() if rest is not None else args.keys() - wanted.keys()
        if unused:
            names = ", ".join(sorted(unused))
            raise PlanMismatch(f"node `{node.id}` gives {names}, which op `{self.name}` does not take")
        given = {name: value for name, value in args.items() if name not in wanted}
        for name, parameter in wanted.items():
            if name == rest:
                continue
            if name in args:
                given[name] = _typed(args[name], hints.get(name))
            elif name in resources:
                given[name] = resources[name]
            elif parameter.default is inspect.Parameter.empty:
                raise PlanMismatch(f"op `{self.name}` of `{node.id}` needs `{name}`, which no earlier node provides")
        return lambda: self.function(**given)


@cache
def _declared(function: Callable[..., Any]) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    """Return the parameters of a function and its type hints."""
    return inspect.signature(function).parameters, get_type_hints(function)


OPS: dict[str, Op] = {}


def op(name: str, *, gives: str | None = None, traced: bool = True) -> Callable[[F], F]:
    """Register a function as the op `name`."""

    def register(function: F) -> F:
        assert name not in OPS or OPS[name].function.__module__ == function.__module__, f"op {name} is defined twice"
        OPS[name] = Op(name, function, gives, traced)
        return function

    return register


# Ops that every component of a kind registers as `<op>.<kind of the node>`, in the module next to it.
COMPONENTS: Final = Registry.of_ops
# Ops with a variant for functions of the user, `<op>.user`.
OF_USERS: Final = {**COMPONENTS, "setup.scheduler": SCHEDULERS}
# Node prefix → registry of the components whose op is `<prefix>.<kind>`, in the module next to the component.
CALLED_AFTER: Final = {"collate": LINKS}


def op_of(node: Node) -> Op:
    """Return the op of a node. Raises PlanMismatch without one."""
    registry, name = COMPONENTS.get(node.op), node.op
    kind = str(node.args.get("kind"))
    if "user" in node.args and node.op in OF_USERS:
        registry, name = OF_USERS[node.op], f"{node.op}.user"
        code_of(registry.of_users, registry.of_users.torch_module())
    elif registry is not None and kind in registry:
        code_of(registry[kind], registry[kind].torch_module())
        name = f"{node.op}.{kind}"
    registered = op_named(name)
    if registered is None:
        raise PlanMismatch(f"node `{node.id}` needs op `{name}`, which this version of xtrain does not have")
    return registered if registry is None else attrs.evolve(registered, chosen_by=("kind",))


def op_named(name: str) -> Op | None:
    """Return the op with a name, or None.

    Ops of components are registered by their own modules, which are imported here: actions (`step.norms`,
    `tick.norms`), links (`collate.pack`), stacks (`setup.parallel.NAME`, `step.NAME.…`) and trackers
    (`setup.log.wandb`).
    """
    head, _, last = name.partition(".")
    component = stack_of_node(name) or stack_of_step(name) or action_of(name) or ACTIONS.get(last)
    component = CALLED_AFTER[head].of_kind(last) if head in CALLED_AFTER else component
    if name not in OPS and component is not None:
        code_of(component, component.torch_module())
    elif name not in OPS and (tracker := tracker_of(name)) is not None:
        code_of(tracker, tracker.run_module())
    return OPS.get(name)


def code_of(component: type[Component], module: str) -> ModuleType:
    """Import the module that runs a component. Raises EnvironmentFault if the component is of another installed package
    and its module cannot be imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        offer = component.offer
        if offer is None or offer.package == "xtrain":
            raise
        why = f"its module {module} cannot be imported ({type(error).__name__}: {error})"
        raise EnvironmentFault(
            "X715",
            f"the {offer.word} {offer.name} of the package {offer.package} cannot run: {why}; update the package, or "
            f"choose another {offer.word}",
        ) from error


@cache
def load_ops() -> dict[str, Op]:
    """Import every module of `ROOMS` that defines ops, and return the registry."""
    for path in op_files():
        importlib.import_module(".".join(("xtrain", *path.relative_to(ROOT).with_suffix("").parts)))
    return OPS


def op_files() -> list[Path]:
    """Return the files of `ROOMS` that define ops."""
    files = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return [path for path in files if b"\n@op(" in path.read_bytes()]


def _typed(value: Any, hint: Any) -> Any:
    if isinstance(value, dict) and Architecture in (hint, *get_args(hint)):
        return Architecture.from_values(value)
    if isinstance(value, dict) and isinstance(hint, type) and attrs.has(hint):
        return cattrs.structure(value, hint)
    return value
