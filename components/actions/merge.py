"""`merge { state = reset }`: add the adapter to the model under it, and begin a new one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from xtrain.blocks.adapted import adapted_matrices
from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, Action
from xtrain.dsl.schema.losses import ADAPTER_OFF, INITIAL
from xtrain.dsl.schema.setting import setting
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.graph import ActionNode, ActionPlace
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@ACTIONS.register()
@frozen
class Merge(PlannedAction):
    """`merge { state = reset }`: add the adapter to the matrices under it, and begin a new one.

    This is ReLoRA without its schedule (Lialin et al. 2023, arXiv 2307.05695).

    The loss does not change in this step, up to the rounding of the matrices. The sum of several adapters has a higher
    rank than each. Checkpoints then hold the whole model, and `xtrain merge` exports it.
    """

    kind: ClassVar[str] = "merge"
    example: ClassVar[str] = "adapter lora {{ }}\nevery 100 steps {}"
    changes_base = True

    state: Literal["keep", "reset"] = setting(
        "optimizer state of the adapter. reset: as at its first update; keep: of the adapter before", default="reset"
    )

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        adapter = resolved.architecture.adapter
        assert adapter is not None
        matrices = plural(sum(1 for _ in adapted_matrices(resolved.architecture)), "matrix")
        moments = "with its optimizer state" if self.state == "keep" else "with a new optimizer state"
        does = f"add the adapter to {matrices} of the model, and begin a new one, {moments}"
        args = {"state": self.state, "seed": resolved.spec.experiment.seed, "adapter": adapter.args()}
        return ActionNode("tick.merge", args, does)

    def allocates(self, resolved: "Resolved", states: int) -> int:
        """Return the bytes of the largest matrix three times: in its format, and before and after in fp32 or fp64."""
        adapted = {tensor.adapter for tensor in resolved.inventory.tensors}
        largest = max((tensor.size for tensor in resolved.inventory.tensors if tensor.name in adapted), default=0)
        return 3 * largest * (8 if resolved.formats.params == "fp64" else 4)

    def misplaced(self, event: str, following: Sequence[Action]) -> tuple[str, str] | None:
        if not event:
            return None
        message = f"on {event} has the action merge, but only a tick merges adapters"
        return message, "write `every 100 steps merge`; `xtrain merge RUN` merges the last adapter into an export"

    def faults(self, event: str, arch: Architecture, spec: Spec) -> dict[str, tuple[str, str, str]]:
        if arch.adapter is None:
            return {"": ("X435", "merge adds an adapter to the model, and the spec has none", "add `adapter lora { }`")}
        for fault, hint in self._unfit(arch, spec):
            return {"": ("X435", f"merge does not work with {fault}", hint)}
        return {}

    def _unfit(self, arch: Architecture, spec: Spec) -> Sequence[tuple[str, str]]:
        """Return (what it does not work with, what to write instead)."""
        adapter, reference = arch.adapter, getattr(spec.loss, "reference", None)
        assert adapter is not None
        found = [
            (bool(spec.tasks), "adapters of several tasks", "train one adapter"),
            (not adapter.begins_again, "dora or pissa, whose factors belong to the first matrices", "leave them out"),
            (spec.precision.base.stores, "a quantized base, which would be rounded again each time", "use base none"),
            (spec.ema is not None, "averaged weights, which would mix adapters of several bases", "leave ema out"),
            (bool(spec.parallel.execution.package), f"stack = {spec.parallel.stack}", "leave the stack out"),
            (
                arch.tie_embeddings and bool(arch.head_matrices),
                "an adapter of a head that is tied to the embedding",
                "leave lm_head out of targets",
            ),
            (
                reference in (INITIAL, ADAPTER_OFF),
                f"reference = {reference}, which is the model under the adapter",
                "give a folder as the reference",
            ),
            (
                spec.engine is not None,
                "an engine that gets adapters alone",
                "sample with the ranks of the run",
            ),
        ]
        return [(what, hint) for wrong, what, hint in found if wrong]
