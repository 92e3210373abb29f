"""`norms { … }`: norms of parameters, gradients and updates by group."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, Action
from xtrain.dsl.schema.setting import cadence_setting
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace, StepNode
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved

Group = Literal["layer", "module", "parameter", "model"]
Measured = Literal["parameters", "gradients", "updates"]
# The group of all parameters, which is always measured.
WHOLE: Final = "model"
MEANING: Final = (
    "L2 norm of {} of GROUP: `layers.0`, `embed_tokens` by layer, `layers.0.mlp` by module, the name of a parameter, "
    "or `model` for all together; only in steps with `norms`"
)


@ACTIONS.register()
@frozen
class Norms(PlannedAction):
    """`norms { by = layer }`: L2 norms of parameters, gradients and updates by layer, as metrics.

    Gradients are summed over microbatches and ranks, before clipping: the squares of all groups add up to that of
    `grad_norm`. An update is the optimizer's change of a parameter, including weight decay. To compute it, the
    parameters are copied before the optimizer's step when the action is due. Events such as `on finish` are not known
    in time, so they have no norms of updates.
    """

    kind: ClassVar[str] = "norms"
    records = True
    reads_parameters = True
    metrics: ClassVar = {
        "param_norm/GROUP": (MEANING.format("the parameters"), ""),
        "grad_norm/GROUP": (MEANING.format("the gradients, before clipping,"), ""),
        "update_norm/GROUP": (MEANING.format("the update of the parameters by the optimizer"), ""),
    }

    by: Group = cadence_setting(
        "unit of a norm: a layer, a module of a layer, a parameter, or the whole model", default="layer"
    )
    of: tuple[Measured, ...] = cadence_setting(
        "quantities to measure; updates need memory for a copy of the parameters",
        default=("parameters", "gradients", "updates"),
    )

    @property
    def reads_gradients(self) -> bool:
        return "gradients" in self.of

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        of = [each for each in self.of if each != "updates" or not place.event]
        count = len({group_of(tensor.name, self.by) for tensor in resolved.inventory.tensors} | {WHOLE})
        does = f"norms of {' and '.join(of) or 'nothing'} by {self.by}, {plural(count, 'group')}, with one all-reduce"
        return ActionNode("tick.norms", {"by": self.by, "of": of}, does)

    @classmethod
    def in_step(cls, ticks: Sequence[Action], resolved: "Resolved") -> Iterator[StepNode]:
        if any(isinstance(action, cls) and "updates" in action.of for action in ticks):
            does = "in steps with norms of updates: copy the parameters of a rank before the optimizer changes them"
            yield StepNode("step.optimizer", "step.norms", {}, does)

    def allocates(self, resolved: "Resolved", states: int) -> int:
        """Return the size of the parameters' copy."""
        return states if "updates" in self.of else 0

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return f"norms by {args['by']}"

    def idle(self, spec: Spec, ranks: int) -> dict[str, tuple[str, str]]:
        if self.of:
            return {}
        return {"of": ("it names nothing to measure", "write `of = [gradients]`, or leave it out")}


def group_of(name: str, by: str) -> str:
    """Return the group of a parameter: `layers.3.self_attn.q_proj.weight` is of the layer `layers.3` and of the module
    `layers.3.self_attn`, `norm.weight` of `norm`."""
    if by == "model":
        return WHOLE
    if by == "parameter":
        return name
    parts = name.split(".")
    depth = 1 if parts[0] != "layers" else 2 if by == "layer" else 3
    return ".".join(parts[:depth])
