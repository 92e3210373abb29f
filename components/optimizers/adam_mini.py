"""`optimizer adam_mini { … }`: Adam-mini (Zhang et al. 2024, arXiv 2406.16793)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from xtrain.components.optimizers.adamw8bit import pattern_of
from xtrain.contracts.optimizers import PlannedOptimizer, UpdateWork
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import (
    OPTIMIZERS,
    States,
    StateTensor,
    clip_norm,
    clip_spikes,
    clip_value,
    decoupled_decay,
    learning_rate,
    random_rounding,
    scheduled_decay,
    state_format,
)
from xtrain.dsl.schema.setting import momentum_pair, positive, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import ParameterSpec
from xtrain.text.units import BYTES, plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved

NODE: Final = "step.optimizer"
QUERIES_AND_KEYS: Final = ("q_proj", "k_proj")

Blocks = Literal["heads", "rows", "columns", "whole", "elements"]
NAMED: Final[tuple[Blocks, ...]] = ("heads", "rows", "columns", "whole")  # in the order of the node's arguments
"""Groups of a parameter's elements that share an average: the rows of a head; a row; a column of each matrix of a
stack; the whole parameter, or each expert's; single elements."""


@OPTIMIZERS.register()
@frozen
class AdamMini(PlannedOptimizer):
    """`optimizer adam_mini { … }`: AdamW with shared averages of squared gradients: one for each head of queries and
    keys, each output of other matrices, each token of embedding and head, and each vector. Communicates sums over
    sharded blocks."""

    kind: str = named("adam_mini")
    lr: float = learning_rate()
    betas: tuple[float, ...] = setting(
        "exponential decay of the momentum and of the averages of squares",
        default=(0.9, 0.95),
        check=momentum_pair,
        resuming="the optimizer takes it from the plan, and the averages follow within some steps",
    )
    eps: float = setting("added to the denominator for numerical stability", default=1e-8, check=positive)
    weight_decay: float = decoupled_decay(0.1)
    scheduled_decay: bool = scheduled_decay()
    clip: float | None = clip_norm()
    clip_spikes: float | None = clip_spikes()
    clip_value: float | None = clip_value()
    states: States = state_format()
    stochastic_rounding: bool = random_rounding()

    counts: ClassVar[bool] = True
    temporaries: ClassVar[int] = 2

    def arguments(self, resolved: "Resolved") -> dict[str, Any]:
        """Return the node's arguments. heads: names of queries and keys, with `*` for the layer, and their numbers of
        heads. rows, columns, whole: names of other parameters with such blocks; all others have an average per
        element. averages: format of the averages if it differs from the parameters' format."""
        heads = heads_of(resolved)
        found = {pattern_of(each.name): blocks_of(heads, each) for each in resolved.inventory.tensors}
        kinds = {kind: sorted(name for name, own in found.items() if own == kind) for kind in NAMED[1:]}
        averages = {"averages": "fp32"} if resolved.formats.params == "bf16" else {}
        return {**super().arguments(resolved), "heads": heads, **kinds, **averages}

    def does(self, number_format: str) -> str:
        return (
            f"adam_mini, a momentum in {self.stored(number_format)}, and an average of squares for each head of "
            f"queries and keys, each output of other matrices and each vector; {self.decayed(self.weight_decay)}"
        )

    @classmethod
    def title(cls, args: Mapping[str, Any]) -> str:
        blocks = sum(len(args[kind]) for kind in NAMED)
        return super().title({**args, "kind": f"{args['kind']} of blocks in {plural(blocks, 'parameter')}"})

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        """Return the state tensors of a parameter. A head's average is stored once per row, and a vector's once per
        element, so that any cut of the parameter also cuts its averages."""
        single = {"heads": -1, "rows": -1, "columns": -2}.get(blocks_in(args, name), 0)
        return (
            StateTensor("exp_avg", args.get("states", "")),
            StateTensor("block_avg_sq", args.get("averages", ""), single=single),
        )

    @classmethod
    def converts(cls, args: Mapping[str, Any]) -> bool:
        return True

    def work(self, resolved: "Resolved", parameters: Iterable[ParameterSpec]) -> UpdateWork:
        """Return the optimizer's work: one sum along every axis that cuts blocks."""
        from xtrain.blocks.op_trace import CollectiveCall
        from xtrain.contracts.optimizers import UpdateWork
        from xtrain.planner.derive.update_work import cuts_along

        sums: Counter[str] = Counter()
        heads = heads_of(resolved)
        for parameter in parameters:
            shape, blocks = resolved.cuts.shape(parameter), blocks_of(heads, parameter)
            dims = summed_dims(blocks, len(shape), parameter.expert)
            numbers = prod(extent for dim, extent in enumerate(shape) if dim not in dims)
            if blocks == "heads":
                numbers = heads[pattern_of(parameter.name)]
            for axis, dim in cuts_along(resolved, parameter):
                sums[axis] += numbers if dim in dims else 0
        width = max(BYTES[resolved.formats.params], BYTES["fp32"])
        return UpdateWork(
            calls=tuple(
                CollectiveCall(axis, "all_reduce", NODE, count * width) for axis, count in sums.items() if count
            )
        )


def heads_of(resolved: "Resolved") -> dict[str, int]:
    """Return the names of the matrices of queries and keys, with `*` for the layer, and how many heads each has."""
    arch = resolved.architecture
    return {
        f"layers.*.{parameter.name}": parameter.heads
        for kind in arch.kinds
        for layer in kind.block.layers()
        for parameter in layer.parameters(arch)
        if parameter.owner.rpartition(".")[2] in QUERIES_AND_KEYS
        and parameter.is_matrix
        and parameter.shape[0] == parameter.heads * layer.own(arch).head_dim
    }


def blocks_of(heads: Mapping[str, int], parameter: ParameterSpec) -> Blocks:
    if pattern_of(parameter.name) in heads:
        return "heads"
    if parameter.name.endswith("bias"):
        return "elements"
    if len(parameter.shape) == (3 if parameter.expert else 2):
        return "columns" if parameter.expert else "rows"
    return "whole"


def blocks_in(args: Mapping[str, Any], name: str) -> Blocks:
    """Return a parameter's kind of blocks. args: the node's arguments."""
    for kind in NAMED:
        if pattern_of(name) in args[kind]:
            return kind
    return "elements"


def summed_dims(blocks: Blocks, dims: int, expert: bool) -> tuple[int, ...]:
    """Return the dims of a parameter along which a block lies. dims: how many it has."""
    return {
        "heads": (0, 1),
        "rows": (dims - 1,),
        "columns": (dims - 2,),
        "whole": tuple(range(1 if expert else 0, dims)),
        "elements": (),
    }[blocks]
