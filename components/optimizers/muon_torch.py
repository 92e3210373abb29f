"""`setup.optimizer` of muon; torch's needs whole matrices on every rank."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from xtrain.components.optimizers.adamw_torch import LocalAdamW
from xtrain.components.optimizers.muon import NORM_MARGIN, heads_of, in_matrices, means_of
from xtrain.plan.mesh import MatrixStack
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.build import DTYPES
from xtrain.runtime.nn.optimizer import Storage, groups_of, storage_of, updated
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.updates import (
    Box,
    Numbers,
    add_scaled,
    compiled_update,
    decay,
    row_ranges,
    tensors_of,
    wide,
    write_back,
)
from xtrain.runtime.nn.weights import first_state
from xtrain.runtime.nn.whole_matrices import SumsOverPieces, WholeMatrices

LEAST_NORM: Final = 1e-7  # as in torch.optim.Muon
LEAST_ROOT: Final = 1e-10  # of mean squares, as in the code of NorMuon's authors
BLOCKS: Final = 4  # along each side of a symmetric product
MATCHES_ADAMW: Final = 0.2  # times the root of the larger side: the RMS of AdamW's updates


class MuonOptimizer(Optimizer):
    """Muon: m ← μ m + (1 − μ) g; u = (1 − μ) g + μ m; w ← (1 − lr · decay) w − lr · scale · orthogonal(u).

    Collective: each matrix is orthogonalized by one of the ranks that share it.
    """

    def __init__(
        self,
        matrices: Mapping[str, Tensor],
        groups: Sequence[dict[str, Any]],
        rest: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        orthogonal: Callable[[Tensor], Tensor],
        heads: Mapping[str, Sequence[int]] | None = None,
        neurons: Mapping[str, Any] | None = None,
        scale: str,
        number_format: torch.dtype,
        device: torch.device,
        betas: tuple[float, float],
        eps: float,
        storage: Storage | None = None,
        cautious_decay: bool = False,
        compiled: bool = False,
    ) -> None:
        """Initialize the optimizer. matrices: the parameters of `groups`, by name. rest: groups updated by AdamW with
        `betas` and `eps`. orthogonal: orthogonalizes matrices [count, rows, columns]. heads, neurons: as in the node's
        arguments. number_format: format during orthogonalization. device: device of the orthogonalization. compiled:
        element-wise parts are compiled."""
        super().__init__([*groups, *rest], {"lr": lr, "weight_decay": 0.0})
        own, others = self.param_groups[: len(groups)], self.param_groups[len(groups) :]
        self._matrices, self._wholes = matrices, WholeMatrices.of(matrices, device)
        self._group_of = {id(parameter): group for group in own for parameter in group["params"]}
        self._momentum, self._nesterov = momentum, nesterov
        self._orthogonal, self._scale, self._format = orthogonal, scale, number_format
        self._heads, self._neurons, self._sums = heads, neurons, SumsOverPieces(device)
        self._cuts = {name: self._sums.cuts_of(matrix) for name, matrix in matrices.items()} if neurons else {}
        self._storage, self._cautious_decay, self._compiles = storage or Storage(), cautious_decay, compiled
        self._momentum_rule, self._weight_rule = self._rules()
        if compiled:
            self._momentum_rule, self._weight_rule = map(compiled_update, (self._momentum_rule, self._weight_rule))
        converts = self._storage.converts or cautious_decay  # torch's own kernel does all else
        self._rest = LocalAdamW(others, lr, betas, eps, self._storage, cautious_decay, compiled and converts)
        self._rest.state = self.state  # saving and loading expect a single optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters. closure: not used."""
        for name, parameter in self._matrices.items():
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = self._storage.first(parameter, "momentum_buffer")
                for tensor in means_of(self._neurons, name):
                    self.state[parameter][tensor.name] = first_state(parameter, tensor)
        for results in self._wholes.apply(self._update_of, self._made_orthogonal):
            scales = [None] * len(results) if self._neurons is None else self._scales(self._neurons, results)
            for (stack, update), scale in zip(results, scales, strict=True):
                self._write(stack, update, scale)
        self._rest.step()

    def _write(self, stack: MatrixStack, update: Tensor, scale: Tensor | None) -> None:
        """Update the weights of this rank's shard of a stack. scale: factors of the update, [count, rows, 1] or
        [count, 1, columns]; None: 1."""
        parameter = self._matrices[stack.name]
        group, part = self._group_of[id(parameter)], _part(parameter, stack)
        first, update = stack.first if parameter.dim() == 3 else 0, update.view(part.shape)
        if scale is not None and parameter.dim() == 2:
            scale = scale[0]
        factor = group["lr"] * scale_of(self._scale, self._shape_of(stack.name, parameter))
        share = group["lr"] * group["weight_decay"]
        by = self._by({"factor": -factor, "decay": share, "keep": 1 - share}, part)
        for rows in self._rows(part):
            box = self._storage.box(parameter, first + rows.start)
            self._weight_rule(part[rows], update[rows], by, box, None if scale is None else scale[rows])

    def _scales(self, neurons: Mapping[str, Any], results: list[tuple[MatrixStack, Tensor]]) -> list[Tensor]:
        """Update the mean squares of the outputs, and return the factors of this rank's shards of the updates: an
        output's is divided by the root of its mean, and all by what keeps the norm of a matrix. Collective."""
        wanted = []
        for stack, update in results:
            parameter = self._matrices[stack.name]
            inputs = 1 if in_matrices(neurons["columns"], stack.name) else 2
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            squares = torch.linalg.vector_norm(update, dim=inputs, keepdim=True, dtype=dtype).square()
            wanted.append((stack, parameter, inputs, squares))
        self._sums.sum_up(
            (squares, self._cuts[stack.name], [parameter.dim() - 3 + inputs])
            for stack, parameter, inputs, squares in wanted
        )
        roots, norms = [], []
        for stack, parameter, inputs, squares in wanted:
            stored = _part(self.state[parameter]["neuron_squares"], stack).view(squares.shape)
            means = stored.to(squares.dtype).lerp(squares / parameter.shape[inputs - 3], 1 - neurons["decay"])
            stored.copy_(means)
            roots.append(means.sqrt_().add_(LEAST_ROOT))
            norms.append(torch.stack([each.sum((1, 2)) for each in (squares, squares / roots[-1].square())]))
        self._sums.sum_up(
            (each, self._cuts[stack.name], [parameter.dim() - inputs])
            for each, (stack, parameter, inputs, _) in zip(norms, wanted, strict=True)
        )
        before_after = (each.sqrt() for each in norms)
        kept = ((before / (after + LEAST_ROOT))[:, None, None] for before, after in before_after)
        return [keep / root for keep, root in zip(kept, roots, strict=True)]

    def _update_of(self, stack: MatrixStack) -> Tensor:
        """Return this rank's piece of the matrix to orthogonalize; updates the momentum."""
        parameter = self._matrices[stack.name]
        assert parameter.grad is not None
        gradients, averages = _part(parameter.grad, stack), _part(self.state[parameter]["momentum_buffer"], stack)
        by = self._by({"share": 1 - self._momentum, "stays": self._momentum}, gradients)
        updates = [self._momentum_rule(gradients[rows], averages[rows], by) for rows in self._rows(gradients)]
        found = updates[0] if len(updates) == 1 else torch.cat(updates)
        return found if found.dim() == 3 else found[None]

    def _rules(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the update of the momentum, which gives the matrix to orthogonalize, and the update of weights."""
        nesterov, number_format = self._nesterov, self._format
        converts, cautious = self._storage.converts, self._cautious_decay

        def momentum_rule(gradient: Tensor, stored: Tensor, by: Any) -> Tensor:
            average = stored
            if converts:
                gradient, average = wide(gradient, gradient), wide(stored, gradient)
            average.lerp_(gradient, by["share"])
            if average is not stored:
                stored.copy_(average)
            update = torch.lerp(gradient, average, by["stays"]) if nesterov else average
            return update.to(number_format)

        def weight_rule(stored: Tensor, update: Tensor, by: Numbers, box: Box | None, scale: Tensor | None) -> None:
            weights = wide(stored, stored) if converts else stored
            update = update.to(weights.dtype) if scale is None else update.to(weights.dtype) * scale
            decay(weights, update, by, cautious=cautious)
            add_scaled(weights, update, by["factor"])
            if weights is not stored:
                write_back(stored, weights, box)

        return momentum_rule, weight_rule

    def _by(self, numbers: dict[str, float], like: Tensor) -> Numbers:
        return tensors_of(numbers, like) if self._compiles else numbers

    def _made_orthogonal(self, stack: MatrixStack, x_NRC: Tensor) -> Tensor:
        """Orthogonalize each matrix, or each head of it."""
        heads, dim = heads_of(self._heads, stack.name)
        if heads == 1:
            return self._orthogonal(x_NRC)
        # Heads are concatenated along rows or columns; move them to the batch dim to orthogonalize each one.
        split = x_NRC.unflatten(1 + dim, (heads, -1)).movedim(1 + dim, 1)
        found = self._orthogonal(split.flatten(0, 1)).unflatten(0, (-1, heads))
        return found.movedim(1, 1 + dim).flatten(1 + dim, 2 + dim)

    def _shape_of(self, name: str, parameter: Tensor) -> list[int]:
        """Return the shape of a parameter, or of each head's matrix."""
        heads, dim = heads_of(self._heads, name)
        shape = [*parameter.shape]
        if heads > 1:
            shape[dim] //= heads
        return shape

    def _rows(self, part: Tensor) -> Iterable[slice]:
        """Return the row ranges that are updated at once."""
        return row_ranges(part) if self._storage.converts and not self._compiles else (slice(0, part.shape[0]),)


def _part(tensor: Tensor, stack: MatrixStack) -> Tensor:
    """Return this rank's piece of a stack, [count, rows, columns], or of a single matrix, [rows, columns]."""
    own = local(tensor)
    return own[stack.first : stack.first + stack.shape[0]] if own.dim() == 3 else own


def scale_of(scale: str, shape: Sequence[int]) -> float:
    """Return the factor of an update. shape: of a matrix [outputs, inputs], or of a stack [count, inputs, outputs]."""
    outputs, inputs = shape[-2:] if len(shape) == 2 else (shape[-1], shape[-2])
    if scale == "match_rms_adamw":
        return MATCHES_ADAMW * max(outputs, inputs) ** 0.5
    return max(1.0, outputs / inputs) ** 0.5


def newton_schulz(
    x_NRC: Tensor, series: Sequence[Sequence[float]], *, margin: float = 1.0, symmetric: int | None = None
) -> Tensor:
    """Return matrices [count, rows, columns] with the singular vectors of `x_NRC` and singular values near 1, in its
    format. x ← a·x + (b·A + c·A²)·x with A = x·xᵀ, starting at x / ‖x‖ (Jordan et al. 2024).

    series: a, b, c of each step. margin: factor on ‖x‖. symmetric: rows from which A and A² are computed by
    `symmetric_product`; None: never.
    """
    tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    x = x_NRC.mT if tall else x_NRC
    norm_N = x.flatten(1).norm(dim=1) * margin
    x = x / norm_N.clamp(min=LEAST_NORM)[:, None, None]
    in_blocks = symmetric is not None and x.shape[1] >= symmetric and x.shape[1] % BLOCKS == 0
    for a, b, c in series:
        if in_blocks:
            squares = symmetric_product(x)
            inner = symmetric_product(squares, beta=b, alpha=c)
        else:
            squares = x @ x.mT
            inner = torch.baddbmm(squares, squares, squares, beta=b, alpha=c)
        x = torch.baddbmm(x, inner, x, beta=a)
    return x.mT if tall else x


def symmetric_product(x_NRC: Tensor, *, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Return alpha · x·xᵀ [count, rows, rows] + beta · x, of which 10 of 16 blocks are computed and 6 are copies.

    With a beta x must be symmetric. rows must be divisible by 4.
    """
    count, rows, _ = x_NRC.shape
    quarter, half = rows // BLOCKS, rows // 2
    out_NRR = x_NRC.new_empty(count, rows, rows)
    x_NQRC, out_NQRQR = x_NRC.unflatten(1, (BLOCKS, quarter)), out_NRR.view(count, BLOCKS, quarter, BLOCKS, quarter)
    added = x_NRC.unflatten(1, (BLOCKS, quarter)).unflatten(3, (BLOCKS, quarter)) if beta else None

    def multiply(left: Tensor, right: Tensor, add: Tensor | None) -> Tensor:
        shape = (*left.shape[:-1], right.shape[-2])
        left, right = left.flatten(0, -3), right.flatten(0, -3)
        if add is None:
            return torch.bmm(left, right.mT).view(shape)
        return torch.baddbmm(add.reshape(-1, *shape[-2:]), left, right.mT, beta=beta, alpha=alpha).view(shape)

    def diagonal(blocks: Tensor) -> Tensor:
        return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)

    diagonal(out_NQRQR).copy_(multiply(x_NQRC, x_NQRC, None if added is None else diagonal(added)))
    # Blocks (1, 0) and (3, 2), then the lower left half.
    below, above = (diagonal(out_NQRQR[:, one::2, :, other::2]) for one, other in ((1, 0), (0, 1)))
    add = None if added is None else diagonal(added[:, 1::2, :, ::2])
    product = multiply(x_NQRC[:, 1::2], x_NQRC[:, ::2], add)
    below.copy_(product)
    above.copy_(product.mT)
    product = multiply(x_NRC[:, half:], x_NRC[:, :half], x_NRC[:, half:, :half] if beta else None)
    out_NRR[:, half:, :half] = product
    out_NRR[:, :half, half:] = product.mT
    return out_NRR


@op("setup.optimizer.muon", gives="optimizer")
def build_muon(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    progress: Progress,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    ns_steps: int,
    scale: str,
    adamw_lr: float,
    betas: list[float],
    eps: float,
    matrices: list[str],
    format: str,
    heads: dict[str, list[int]] | None = None,
    ns_coefficients: list[float] | None = None,
    series: list[list[float]] | None = None,
    neurons: dict[str, Any] | None = None,
    states: str = "",
    stochastic_rounding: bool = False,
    cautious_decay: bool = False,
    compiled: Sequence[str] = (),
    symmetric: int | None = None,
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay, and Muon or AdamW, per
    parameter. compiled: kinds of devices on which element-wise parts are compiled. symmetric: as in `newton_schulz`, on
    these devices."""
    compiles = rank.device.type in compiled
    symmetric = symmetric if compiles else None
    margin = NORM_MARGIN if series else 1.0
    if series is None:
        assert ns_coefficients is not None
        series = [ns_coefficients] * ns_steps
    found = {name: parameter for name, parameter in updated(plan, model) if in_matrices(matrices, name)}
    rest = groups_of(plan, model, weight_decay, lambda name: name not in found)
    return MuonOptimizer(
        found,
        groups_of(plan, model, weight_decay, found.__contains__),
        [{**group, "lr_scale": adamw_lr} for group in rest],
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        orthogonal=partial(newton_schulz, series=series, margin=margin, symmetric=symmetric),
        heads=heads,
        neurons=neurons,
        scale=scale,
        number_format=DTYPES[format],
        device=rank.device,
        betas=(betas[0], betas[1]),
        eps=eps,
        storage=storage_of(plan, model, progress, states, stochastic_rounding),
        cautious_decay=cautious_decay,
        compiled=compiles,
    )
