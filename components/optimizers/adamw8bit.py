"""`optimizer adamw8bit { … }`: AdamW with moments in 8 bits (Dettmers et al. 2022, arXiv 2110.02861)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import evolve

from xtrain.contracts.optimizers import PlannedOptimizer
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import (
    OPTIMIZERS,
    Compiled,
    StateTensor,
    cautious_decay,
    clip_norm,
    clip_spikes,
    clip_value,
    decoupled_decay,
    learning_rate,
    random_rounding,
    scheduled_decay,
)
from xtrain.dsl.schema.setting import Conflict, at_least, momentum_pair, positive, setting
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, ParameterSpec
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.mesh import Cuts, Layout
    from xtrain.plan.resolved import Resolved

SMALLEST: Final = 4096  # elements of a tensor, as in the libraries
NAMES: Final = ("exp_avg", "exp_avg_sq")


@OPTIMIZERS.register()
@frozen
class AdamW8bit(PlannedOptimizer):
    """`optimizer adamw8bit { … }`: AdamW with 8-bit moments in blocks along the rows of matrices; moments of vectors
    and small matrices are in the format of the parameters."""

    kind: str = named("adamw8bit")
    lr: float = learning_rate()
    betas: tuple[float, ...] = setting(
        "exponential decay of the two moments",
        default=(0.9, 0.95),
        check=momentum_pair,
        resuming="the optimizer takes it from the plan, and the moments follow within some steps",
    )
    eps: float = setting("added to the denominator for numerical stability", default=1e-8, check=positive)
    weight_decay: float = decoupled_decay(0.1)
    block: int = setting("numbers of a row that share a scale in fp32", default=128, check=at_least(8))
    cautious_decay: bool = cautious_decay()
    scheduled_decay: bool = scheduled_decay()
    clip: float | None = clip_norm()
    clip_spikes: float | None = clip_spikes()
    clip_value: float | None = clip_value()
    stochastic_rounding: bool = random_rounding()

    scale_free: ClassVar[bool] = True
    compiled: ClassVar[Compiled] = "always"
    counts: ClassVar[bool] = True
    temporaries: ClassVar[int] = 6

    def arguments(self, resolved: "Resolved") -> dict[str, Any]:
        """Return the node's arguments. quantised: names of the tensors with 8-bit moments, with `*` for the layer."""
        found = self._quantised(resolved.inventory.tensors)
        return {**super().arguments(resolved), "quantised": sorted({pattern_of(each.name) for each in found})}

    def _quantised(self, tensors: Iterable[ParameterSpec]) -> list[ParameterSpec]:
        """Return the tensors with 8-bit moments, independent of layout and of what is trained. All tensors of a name
        shared by layers must fit."""
        tensors = list(tensors)
        others = {pattern_of(each.name) for each in tensors if not self._fits(each.shape)}
        return [each for each in tensors if pattern_of(each.name) not in others]

    def _fits(self, shape: tuple[int, ...]) -> bool:
        size = 1
        for extent in shape:
            size *= extent
        return len(shape) > 1 and size >= SMALLEST and shape[-1] % self.block == 0

    def does(self, number_format: str) -> str:
        return (
            f"adamw, two moments in 8 bits with a scale per {self.block} numbers, of vectors and small matrices in "
            f"{self.stored(number_format)}; {self.decayed(self.weight_decay)}"
        )

    @classmethod
    def title(cls, args: Mapping[str, Any]) -> str:
        return f"{args['kind']} of {plural(len(args['quantised']), 'matrix')} in blocks of {args['block']}"

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        return tuple(each for moment in NAMES for each in tensors_of(moment, args["block"], args["quantised"], name))

    @classmethod
    def converts(cls, args: Mapping[str, Any]) -> bool:
        return True

    def conflicts(self, spec: Spec, architecture: Architecture, layout: "Layout") -> Iterator[Conflict]:
        from xtrain.plan.mesh import cuts_of
        from xtrain.plan.parameters import parameters

        yield from super().conflicts(spec, architecture, layout)
        cuts, tensors = cuts_of(spec.parallel, layout.mesh, architecture), list(parameters(architecture))
        if (cut := self._cut(cuts, tensors)) is None:
            return
        message = (
            f"rows of {pattern_of(cut.name)} have {cut.shape[-1]} numbers, of which a rank has {cuts.shape(cut)[-1]}, "
            f"and a block of {self.block} would lie on two ranks"
        )
        smaller = (2**power for power in range(9, 2, -1) if 2**power < self.block)
        fitting = next((size for size in smaller if evolve(self, block=size)._cut(cuts, tensors) is None), None)
        yield Conflict("block", message, f"use block {fitting}" if fitting else "use fewer ranks for tp")

    def _cut(self, cuts: "Cuts", tensors: Sequence[ParameterSpec]) -> ParameterSpec | None:
        """Return a tensor with a block that would be split over two ranks; None if there is none."""
        return next((each for each in self._quantised(tensors) if cuts.shape(each)[-1] % self.block), None)


def pattern_of(name: str) -> str:
    """Return the name of a parameter with `*` for the layer."""
    start, _, inside = name.partition(".")
    return f"layers.*.{inside.partition('.')[2]}" if start == "layers" else name


def tensors_of(moment: str, block: int, quantised: Iterable[str], name: str) -> tuple[StateTensor, ...]:
    """Return the stored tensors of a parameter's moment: codes and scales, or the moment itself."""
    if pattern_of(name) not in quantised:
        return (StateTensor(moment),)
    return (StateTensor(moment, "uint8"), StateTensor(f"{moment}_scale", "fp32", block))
