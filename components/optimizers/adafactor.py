"""`optimizer adafactor { … }`: Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), as torch has it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from xtrain.components.optimizers.adamw8bit import pattern_of
from xtrain.contracts.optimizers import PlannedOptimizer, UpdateWork
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import (
    OPTIMIZERS,
    StateTensor,
    clip_norm,
    clip_spikes,
    clip_value,
    decoupled_decay,
    learning_rate,
    random_rounding,
    scheduled_decay,
)
from xtrain.dsl.schema.setting import Range, positive, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import ParameterSpec
from xtrain.text.units import BYTES, plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved

NODE: Final = "step.optimizer"


@OPTIMIZERS.register()
@frozen
class Adafactor(PlannedOptimizer):
    """`optimizer adafactor { … }`: row and column averages of a matrix's squared gradients; updates proportional to the
    size of the weights. Communicates sums over whole matrices."""

    kind: str = named("adafactor")
    lr: float = learning_rate()
    beta2_decay: float = setting(
        "share of the new squares in the averages at update t: t to this power",
        default=-0.8,
        check=Range(low=-1, below=0),
        resuming="the optimizer takes it from the plan, and the averages follow within some steps",
    )
    eps1: float = setting("lower limit of the root of an average of squares", default=2**-23, check=positive)
    eps2: float = setting(
        "lower limit of the size of weights that updates are proportional to", default=1e-3, check=positive
    )
    largest: float = setting(
        "updates with a larger root mean square are scaled down to it", default=1.0, check=positive
    )
    weight_decay: float = decoupled_decay(0.0)
    scheduled_decay: bool = scheduled_decay()
    clip: float | None = clip_norm()
    clip_spikes: float | None = clip_spikes()
    clip_value: float | None = clip_value()
    stochastic_rounding: bool = random_rounding()

    counts: ClassVar[bool] = True
    temporaries: ClassVar[int] = 4

    def arguments(self, resolved: "Resolved") -> dict[str, Any]:
        """Return the node's arguments. factored: names of matrices, with `*` for the layer; each expert is one matrix.
        states: format of the averages if it differs from the parameters' format."""
        names = sorted({pattern_of(each.name) for each in resolved.inventory.tensors if is_factored(each)})
        states = {"states": "fp32"} if resolved.formats.params == "bf16" else {}
        return {**super().arguments(resolved), "factored": names, **states}

    def does(self, number_format: str) -> str:
        form = "fp32" if number_format == "bf16" else number_format
        rounded = ", stochastically rounded weights" if self.stochastic_rounding else ""
        return (
            f"adafactor, averages of squares by rows and columns in {form}, updates scaled by the size of "
            f"weights{rounded}; weight decay {self.weight_decay:g} on matrices"
        )

    @classmethod
    def title(cls, args: Mapping[str, Any]) -> str:
        return f"{args['kind']} of {plural(len(args['factored']), 'matrix')}"

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        form = args.get("states", "")
        if pattern_of(name) not in args["factored"]:
            return (StateTensor("variance", form),)
        return (StateTensor("row_var", form, single=-1), StateTensor("col_var", form, single=-2))

    @classmethod
    def converts(cls, args: Mapping[str, Any]) -> bool:
        return True

    def work(self, resolved: "Resolved", parameters: Iterable[ParameterSpec]) -> UpdateWork:
        """Return the optimizer's work: three sums along every axis that cuts matrices: of squares of weights and of
        gradients by rows and columns; of the latter by rows; of squares of updates."""
        from xtrain.blocks.op_trace import CollectiveCall
        from xtrain.contracts.optimizers import UpdateWork
        from xtrain.planner.derive.update_work import cuts_along

        sums: Counter[tuple[str, int]] = Counter()
        for parameter in parameters:
            shape = resolved.cuts.shape(parameter)
            matrices = shape[0] if parameter.expert else 1
            rows, columns = len(shape) - 2, len(shape) - 1
            for axis, dim in cuts_along(resolved, parameter):
                if parameter.expert and dim == 0:
                    continue  # whole matrices of a stack
                sums[axis, 0] += matrices
                sums[axis, 2] += matrices
                if is_factored(parameter):
                    sums[axis, 0] += prod(shape) // max(1, shape[dim])
                    sums[axis, 1] += matrices if dim == rows else 0
                    assert dim in (rows, columns)
        width = max(BYTES[resolved.formats.params], BYTES["fp32"])
        return UpdateWork(
            calls=tuple(
                CollectiveCall(axis, "all_reduce", NODE, count * width) for (axis, _), count in sums.items() if count
            )
        )


def is_factored(parameter: ParameterSpec) -> bool:
    """Return True if the parameter is a matrix, or a stack of expert matrices."""
    return len(parameter.shape) == (3 if parameter.expert else 2)
