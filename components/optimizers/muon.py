"""`optimizer muon { … }`: Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv
2502.16982)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from xtrain.dsl.schema.setting import (
    Conflict,
    Range,
    UsualRange,
    at_least,
    momentum_pair,
    positive,
    proper_fraction,
    setting,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import ParameterSpec
from xtrain.text.units import BYTES, plural

if TYPE_CHECKING:
    from xtrain.blocks.op_trace import CollectiveCall
    from xtrain.dsl.spec import Spec
    from xtrain.plan.architecture import Architecture
    from xtrain.plan.mesh import Layout, MatrixBatch
    from xtrain.plan.resolved import Resolved

SYMMETRIC: Final = 2048  # rows from which a quarter of a matrix still fills a GPU
NORM_MARGIN: Final = 1.01
"""Factor on the norm that Polar Express divides a matrix by, so that rounding leaves singular values at most 1."""
_POLAR_EXPRESS: Final = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""Coefficients of one iteration each for singular values from 1e-3 on (Amsel et al. 2025, arXiv 2505.16932)."""


def polar_express(steps: int) -> list[list[float]]:
    """Return the coefficients of x, x³ and x⁵ in each of the iterations of Polar Express. All but those from the eighth
    on, which converge, leave 1% of the singular values for rounding."""
    margins = [NORM_MARGIN] * (len(_POLAR_EXPRESS) - 1) + [1.0]
    table = [[a / m, b / m**3, c / m**5] for (a, b, c), m in zip(_POLAR_EXPRESS, margins, strict=True)]
    return [table[min(step, len(table) - 1)] for step in range(steps)]


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
    iteration: Literal["newton_schulz", "polar_express"] = setting(
        "iteration that orthogonalizes: newton_schulz has `ns_coefficients` in each step; polar_express has other ones "
        "in each step, with which singular values come closer to 1 (arXiv 2505.16932)",
        default="newton_schulz",
        added=True,
    )
    neurons: float | None = setting(
        "exponential decay of the mean square of each output's update, whose root the update is divided by; the norm "
        "of a matrix's update stays (NorMuon, arXiv 2510.05491); none: no division",
        default=None,
        check=proper_fraction,
        example="0.95",
        added=True,
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
        per head, the number of heads and the dim (0 or 1) along which they are concatenated. series: coefficients of
        each step if they differ. neurons: `decay` of the mean squares of outputs, `columns`, the stacks whose outputs
        are columns, and the `format` of the means if it differs from the parameters'."""
        arch = resolved.architecture
        found = {
            f"layers.*.{parameter.name}": parameter
            for kind in arch.kinds
            for parameter in kind.block.parameters(arch)
            if parameter.is_matrix and not parameter.adapter and (self.routers or not parameter.router)
        }
        several = {name: [each.heads, int(each.cut == "row")] for name, each in sorted(found.items()) if each.heads > 1}
        common = super().arguments(resolved)
        more: dict[str, Any] = {"heads": several} if self.heads and several else {}
        more |= {"symmetric": SYMMETRIC} if "compiled" in common else {}
        if self.iteration == "polar_express":
            del common["ns_coefficients"]
            more["series"] = polar_express(self.ns_steps)
        if self.neurons is not None:
            columns = sorted(name for name, parameter in found.items() if parameter.expert)
            form = {"format": "fp32"} if resolved.formats.params == "bf16" else {}
            more["neurons"] = {"decay": self.neurons, "columns": columns, **form}
        return {**common, "matrices": sorted(found), "format": resolved.formats.compute, **more}

    def args(self) -> dict[str, Any]:
        found = super().args()
        del found["routers"]  # see `matrices`
        for name in ("heads", "iteration", "neurons"):
            found.pop(name, None)  # see `arguments`
        return found

    def conflicts(self, spec: "Spec", architecture: "Architecture", layout: "Layout") -> Iterator[Conflict]:
        yield from super().conflicts(spec, architecture, layout)
        if self.heads and self.neurons is not None:
            message = (
                "`neurons` has a mean for each output, and with `heads` outputs of attention have one for each head"
            )
            yield Conflict("neurons", message, "remove `heads` or `neurons`")

    def idle(self, spec: "Spec") -> Iterator[tuple[str, str]]:
        yield from super().idle(spec)
        if self.iteration == "polar_express":
            yield "ns_coefficients", "polar_express has its own in each step"

    def does(self, number_format: str) -> str:
        by_head = ", attention head by head" if self.heads else ""
        express = " of polar_express" if self.iteration == "polar_express" else ""
        divided = "" if self.neurons is None else f", divided by the root mean square of each output ({self.neurons:g})"
        return (
            f"muon: matrices of blocks by a momentum in {self.stored(number_format)}, orthogonalized in "
            f"{plural(self.ns_steps, 'step')}{express} ({self.scale}){by_head}{divided}, "
            f"{self.decayed(self.weight_decay)}; adamw for the others"
        )

    @classmethod
    def title(cls, args: Mapping[str, Any]) -> str:
        means = " with means of outputs" if "neurons" in args else ""
        return super().title({**args, "kind": f"muon of {plural(len(args['matrices']), 'matrix')}{means}"})

    @classmethod
    def state(cls, args: Mapping[str, Any], name: str) -> tuple[StateTensor, ...]:
        if not in_matrices(args["matrices"], name):
            return cls.moments(args, "exp_avg", "exp_avg_sq")
        return (*cls.moments(args, "momentum_buffer"), *means_of(args.get("neurons"), name))

    @classmethod
    def scalars(cls, args: Mapping[str, Any], name: str) -> tuple[str, ...]:
        return () if in_matrices(args["matrices"], name) else ("step",)

    def work(self, resolved: "Resolved", parameters: Iterable[ParameterSpec]) -> UpdateWork:
        from xtrain.planner.derive.update_work import batches_of, work_of

        args = self.arguments(resolved)
        found = batches_of(resolved, [each for each in parameters if in_matrices(args["matrices"], each.name)])
        work = work_of(
            found,
            BYTES[args["format"]],
            self.ns_steps,
            args.get("symmetric"),
            lambda name: heads_of(args.get("heads"), name),
        )
        if self.neurons is None:
            return work
        width = max(BYTES[resolved.formats.params], BYTES["fp32"])
        return work + UpdateWork(calls=tuple(sums_of_neurons(found, args["neurons"], width)))


def means_of(neurons: Mapping[str, Any] | None, name: str) -> tuple[StateTensor, ...]:
    """Return the mean squares of the outputs of a matrix. neurons: the node's argument."""
    if neurons is None:
        return ()
    inputs = -2 if in_matrices(neurons["columns"], name) else -1
    return (StateTensor("neuron_squares", neurons.get("format", ""), single=inputs),)


def sums_of_neurons(
    found: Iterable["MatrixBatch"], neurons: Mapping[str, Any], width: int
) -> Iterator["CollectiveCall"]:
    """Yield the sums over ranks that share matrices: of squares of each output where inputs are cut, then of two norms
    of a matrix where outputs are cut. width: bytes of a number."""
    from xtrain.blocks.op_trace import CollectiveCall
    from xtrain.planner.derive.update_work import NODE

    for batch in found:
        place = (0,) * len(batch.cuts)
        outputs = {stack: 2 if in_matrices(neurons["columns"], stack.name) else 1 for stack in batch.stacks}
        for of_norms in (False, True):
            for cut in batch.cuts:
                own = [stack for stack, dim in outputs.items() if (cut.dim == dim) == of_norms]
                numbers = [2 if of_norms else stack.at(len(batch.cuts) - 1, place)[outputs[stack]] for stack in own]
                size = sum(stack.shape[0] * each for stack, each in zip(own, numbers, strict=True))
                if size:
                    yield CollectiveCall(cut.axis, "all_reduce", NODE, size * width)


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
