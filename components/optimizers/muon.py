"""`optimizer muon { … }`: Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv
2502.16982)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from xtrain.contracts.optimizers import PlannedOptimizer, UpdateWork
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import (
    OPTIMIZERS,
    Compiled,
    States,
    StateTensor,
    cautious_decay,
    clip_norm,
    clip_spikes,
    clip_value,
    decoupled_decay,
    learning_rate,
    random_rounding,
    scheduled_decay,
    state_format,
)
from xtrain.dsl.schema.setting import Range, UsualRange, at_least, momentum_pair, positive, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import ParameterSpec
from xtrain.text.units import BYTES, plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved

SYMMETRIC: Final = 2048  # rows from which a quarter of a matrix still fills a GPU


@OPTIMIZERS.register()
@frozen
class Muon(PlannedOptimizer):
    """`optimizer muon { … }`: the orthogonalized momentum for every matrix of a block; AdamW for embedding, head,
    routers, norms and biases. Each matrix is gathered on one rank to orthogonalize it."""

    kind: str = named("muon")
    lr: float = learning_rate(
        UsualRange(1e-5, 0.1, "AdamW's with its scale (arXiv 2502.16982), 0.02 without (KellerJordan/Muon)")
    )
    momentum: float = setting(
        "exponential decay of the momentum",
        default=0.95,
        check=Range(low=0, below=1),
        resuming="the optimizer takes it from the plan, and the momentum follows within some steps",
    )
    nesterov: bool = setting("use Nesterov momentum", default=True)
    weight_decay: float = decoupled_decay(0.1)
    ns_steps: int = setting("number of Newton–Schulz iterations", default=5, check=at_least(1))
    ns_coefficients: tuple[float, ...] = setting(
        "coefficients of x, x³ and x⁵ in each iteration", default=(3.4445, -4.775, 2.0315), check=Range(count=3)
    )
    scale: Literal["match_rms_adamw", "original"] = setting(
        "factor of an update: 0.2·√(the larger side), as large as one of AdamW; or √(outputs / inputs), at least 1",
        default="match_rms_adamw",
    )
    routers: bool = setting("also update the matrices of routers with muon", default=False)
    heads: bool = setting(
        "orthogonalize the queries, keys, values and outputs of attention head by head", default=False, added=True
    )
    adamw_lr: float = setting("learning rate of AdamW, as a share of `lr`", default=1.0, check=positive)
    betas: tuple[float, ...] = setting("decay of the two moments of AdamW", default=(0.9, 0.95), check=momentum_pair)
    eps: float = setting("added to the denominator of AdamW", default=1e-8, check=positive)
    cautious_decay: bool = cautious_decay()
    scheduled_decay: bool = scheduled_decay()
    clip: float | None = clip_norm()
    clip_spikes: float | None = clip_spikes()
    clip_value: float | None = clip_value()
    states: States = state_format()
    stochastic_rounding: bool = random_rounding()

    compiled: ClassVar[Compiled] = "always"
    counts: ClassVar[bool] = True

    def arguments(self, resolved: "Resolved") -> dict[str, Any]:
        """Return the node's arguments. matrices: names of the matrices to orthogonalize, with `*` for the layer.
        format: number format during orthogonalization, the computation's. symmetric: rows from which symmetric
        products are computed once, on a device whose updates are compiled. heads: for matrices orthogonalized
        per head, the number of heads and the dim (0 or 1) along which they are concatenated."""
        arch = resolved.architecture
        found = {
            f"layers.*.{parameter.name}": parameter
            for kind in arch.kinds
            for parameter in kind.block.parameters(arch)
            if parameter.is_matrix and not parameter.adapter and (self.routers or not parameter.router)
        }
        several = {name: [each.heads, int(each.cut == "row")] for name, each in sorted(found.items()) if each.heads > 1}
        common = super().arguments(resolved)
        heads: dict[str, Any] = {"heads": several} if self.heads and several else {}
        heads |= {"symmetric": SYMMETRIC} if "compiled" in common else {}
        return {**common, "matrices": sorted(found), "format": resolved.formats.compute, **heads}

    def args(self) -> dict[str, Any]:
        found = super().args()
        del found["routers"]  # see `matrices`
        found.pop("heads", None)  # see `arguments`
        return found

    def does(self, number_format: str) -> str:
        by_head = ", attention head by head" if self.heads else ""
        return (
            f"muon: matrices of blocks by a momentum in {self.stored(number_format)}, orthogonalized in "
            f"{plural(self.ns_steps, 'step')} ({self.scale}){by_head}, {self.decayed(self.weight_decay)}; "
            "adamw for the others"
        )

    @classmethod
    def title(cls, args: Mapping[str, Any]) -> str:
        return super().title({**args, "kind": f"muon of {plural(len(args['matrices']), 'matrix')}"})

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        names = ("momentum_buffer",) if in_matrices(args["matrices"], name) else ("exp_avg", "exp_avg_sq")
        return cls.moments(args, *names)

    @classmethod
    def scalars(cls, args: Mapping[str, Any], name: str) -> tuple[str, ...]:
        return () if in_matrices(args["matrices"], name) else ("step",)

    def work(self, resolved: "Resolved", parameters: Iterable[ParameterSpec]) -> UpdateWork:
        from xtrain.planner.derive.update_work import batches_of, work_of

        args = self.arguments(resolved)
        found = [each for each in parameters if in_matrices(args["matrices"], each.name)]
        return work_of(
            batches_of(resolved, found),
            BYTES[args["format"]],
            self.ns_steps,
            args.get("symmetric"),
            lambda name: heads_of(args.get("heads"), name),
        )


def heads_of(heads: Mapping[str, Sequence[int]] | None, name: str) -> tuple[int, int]:
    """Return (number of separately orthogonalized heads, the dimension 0 or 1 along which they lie). heads: the node's
    argument."""
    start, _, inside = name.partition(".")
    count, dim = (heads or {}).get(f"{start}.*.{inside.partition('.')[2]}", (1, 0))
    return count, dim


def in_matrices(matrices: Sequence[str], name: str) -> bool:
    """Return True if a parameter is one of the orthogonalized matrices."""
    start, _, inside = name.partition(".")
    return start == "layers" and f"layers.*.{inside.partition('.')[2]}" in matrices
