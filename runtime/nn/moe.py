"""Mixture of experts: each token passes through the few experts that its router chooses."""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from attrs import evolve, field, frozen
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xtrain.blocks.feed_forward import UNGATED, ExpertsLayer
from xtrain.plan.architecture import Architecture
from xtrain.runtime.base.collectives import join, own_piece, split
from xtrain.runtime.base.device import capability, device_type, numbers
from xtrain.runtime.nn.adapters import ExpertStacks, TaskExperts
from xtrain.runtime.nn.axes import Axes, local
from xtrain.runtime.nn.head_product import TaskRouting
from xtrain.runtime.nn.layers import ACTIVATIONS, Dropout, HasKeys, Linear, RMSNorm, SwiGLU, splitmix64
from xtrain.runtime.nn.number_formats import QuantisedMatrix
from xtrain.runtime.nn.router import ExpertRouter, attach, even, to_experts


@frozen(eq=False)
class ExpertWeights:
    """The weights of experts.

    matrices: [E, K, M] with K inputs and M outputs; the last one gives the experts' outputs. biases: one of each,
    [E, M], or none. quantised: storage of each quantized matrix, with the fp32 numbers of its scales. added: adapters
    of each of the products, one per task. gated, turned: see `Experts`.
    """

    matrices: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...] = (None, None, None)
    quantised: tuple[tuple[QuantisedMatrix, Tensor | None] | None, ...] = (None, None, None)
    added: "tuple[tuple[ExpertAdapter | None, ...], ...]" = ((None,), (None,), (None,))
    gated: "Callable[..., Tensor]" = field(factory=lambda: gated_by(None, 1.0))
    turned: bool = False


Product = Callable[[Tensor], Tensor]
Stored = tuple[QuantisedMatrix, Tensor | None] | None
MatrixProduct = Callable[[Tensor, Tensor], Tensor]
"""Rows [N, K] and a stack of matrices [E, K, M], or one of them [K, M] → [N, M]."""
MATRICES = ("gate_proj", "up_proj", "down_proj")
# Major CUDA capabilities with kernels of grouped products, and those whose kernels do not write the weight gradients of
# experts without rows (pytorch #172439).
GROUPED, LEAVE_GRADIENTS = (9, 10), (10,)


@frozen(eq=False)
class ExpertAdapter:
    """Adapter of a product of experts. stacks: of matrices [E, …]. call: returns its summand from the rows, these
    stacks or one expert's matrix of each, and the product function. shares: [E, M], or [M] for one expert: factor of
    the sum before the bias; None: 1. dropout: of the inputs, by the keys [N] of the rows."""

    stacks: tuple[Tensor, ...]
    call: Callable[[Tensor, tuple[Tensor, ...], MatrixProduct], Tensor]
    shares: Tensor | None = None
    dropout: Dropout | None = None
    keys_N: Tensor | None = None

    def sum(
        self,
        x_NK: Tensor,
        out_NM: Tensor,
        plain: "Product",
        times: MatrixProduct,
        shares: Callable[[Tensor], Tensor] = lambda shares: shares,
    ) -> Tensor:
        """Return the scaled product with the adapter's summand, [N, M]. plain: product without bias. shares: [E, M] or
        [M] → factors of the rows. Dropout is handled as in `DoraLinear`."""
        kept_NK, rest = x_NK, None
        if self.dropout is not None and self.keys_N is not None:
            kept_NK = self.dropout(x_NK, self.keys_N, 0)
            if self.shares is not None:
                kept_NM = plain(kept_NK)
                out_NM, rest = kept_NM, out_NM - kept_NM
        out_NM = out_NM + self.call(kept_NK, self.stacks, times)
        if self.shares is None:
            return out_NM
        share = shares(self.shares)
        return out_NM * share if rest is None else torch.addcmul(rest, out_NM, share)


class Experts(ExpertStacks):
    """Experts in stacks of matrices.

    matrices: their names; the last one gives the outputs. turned: they are stored as [E, outputs, inputs]. gated:
    hidden values of rows from the products with the other matrices.
    """

    factor = 1.0  # factor of adapters' scale, see `TaskExperts`
    matrices: tuple[str, ...] = MATRICES
    turned = False
    gated: Callable[..., Tensor]

    def begin(self) -> None:
        """Set what adapters and quantized bases fill in."""
        self.quantised: dict[str, QuantisedMatrix] = {}
        # Name of a matrix → function that returns the adapter of this rank's experts; it returns None while the adapter
        # is off.
        self.adapters: dict[str, Callable[[], ExpertAdapter | None]] = {}
        self.dropout: dict[str, Dropout] = {}  # by name of a matrix too, for its adapter's inputs

    def of_rows(self, rows_ND: Tensor, counts_E: Tensor, keys_N: Tensor | None = None) -> Tensor:
        """Compute rows sorted by expert, `counts_E` of them for each expert of this rank.

        For rows with adapters of tasks, `counts_E` has the rows of each expert and task, sorted by both. keys_N: keys
        of dropout.
        """
        names = self.matrices
        stored = tuple(self.quantised.get(name) for name in names)
        matrices = tuple(local(getattr(self, name)) for name in names)
        shapes = [m.shape if each is None else each.piece for m, each in zip(matrices, stored, strict=True)]
        if self.turned:
            matrices = tuple(m.mT if each is None else m for m, each in zip(matrices, stored, strict=True))
        biases = (getattr(self, f"{name}_bias", None) for name in names)
        biases = tuple(None if bias is None else local(bias) for bias in biases)
        beside = tuple(None if each is None else (each, each.beside(self)) for each in stored)
        if (tasks := self._tasks()) is not None:
            added = tuple(tuple(_made(each, name) for each in tasks) for name in names)
            weights = ExpertWeights(matrices, biases, beside, added, self.gated, self.turned)
            return one_by_one(rows_ND, counts_E, weights, self.routing)
        added = tuple((_made(self.adapters, name),) for name in names)
        if keys_N is not None:
            drops = [self.dropout.get(name) for name in names]
            added = tuple(
                (None if each is None else evolve(each, dropout=drop, keys_N=keys_N),)
                for (each,), drop in zip(added, drops, strict=True)
            )
        weights = ExpertWeights(matrices, biases, beside, added, self.gated, self.turned)
        shapes += [stack.shape for (each,) in added if each is not None for stack in each.stacks]
        return (grouped if can_group(rows_ND, shapes) else one_by_one)(rows_ND, counts_E, weights)

    def matrix(self, name: str, number: int, dtype: torch.dtype) -> Tensor:
        """Return the matrix of one of this rank's experts, [inputs, outputs]; a quantized one is dequantized."""
        whole, stored = local(getattr(self, name)), self.quantised.get(name)
        if stored is None:
            found = whole[number]
        else:
            matrix, beside = _expert((stored, stored.beside(self)), number)
            found = matrix.values(whole[number], beside, dtype)
        return found.mT if self.turned else found

    def _tasks(self) -> "list[Adapters] | None":
        """Return the adapters of each task; None if no row has a task's adapter."""
        if self.tasks is None or self.routing is None or not self.routing.counts:
            return None
        modules = [self.tasks.get(name) for name in self.routing.names]
        return [task_module.adapters if isinstance(task_module, TaskExperts) else {} for task_module in modules]


class SwiGLUExperts(Experts):
    """SwiGLUs of an `ExpertsLayer`: gate and up [E, D, F], down [E, F, D], and a bias of each or none; without gates
    the activation is of the product with up."""

    def __init__(self, arch: Architecture, layer: ExpertsLayer) -> None:
        super().__init__()
        self.begin()
        self.limit, self.alpha = layer.limit, layer.alpha
        # `setup.compile` compiles it.
        ungated = layer.activation in UNGATED
        self.gated = ACTIVATIONS[layer.activation] if ungated else gated_by(self.limit, self.alpha, layer.activation)
        self.matrices = (*layer.inner, "down_proj")
        widths = {**dict.fromkeys(layer.inner, (arch.dim, arch.expert_ffn)), "down_proj": (arch.expert_ffn, arch.dim)}
        for name, shape in widths.items():
            self.register_parameter(name, nn.Parameter(torch.empty(arch.experts, *shape)))
        for name, (_, width) in widths.items():
            bias = nn.Parameter(torch.empty(arch.experts, width)) if layer.matrix_bias else None
            self.register_parameter(f"{name}_bias", bias)

    def forward(self, rows_ND: Tensor, counts_E: Tensor, keys_N: Tensor | None = None) -> Tensor:
        return self.of_rows(rows_ND, counts_E, keys_N)


def _made(adapters: "Adapters", name: str) -> "ExpertAdapter | None":
    make = adapters.get(name)
    return None if make is None else make()


def can_group(rows_ND: Tensor, shapes: Iterable[Sequence[int]]) -> bool:
    """Return True if one kernel can compute the products of all experts: bf16 on CUDA, strides of whole 16 bytes."""
    if device_type(rows_ND) != "cuda" or rows_ND.dtype != torch.bfloat16 or len(rows_ND) == 0:
        return False
    aligned = all(extent % 8 == 0 for shape in shapes for extent in shape[1:])
    return aligned and capability(rows_ND) in GROUPED


class _WithoutGradient(torch.autograd.Function):
    """Matrices of experts, whose gradients are 0 for experts without rows."""

    @staticmethod
    def forward(ctx: Any, matrix_EKM: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(counts_E)
        return matrix_EKM.view_as(matrix_EKM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (counts_E,) = ctx.saved_tensors
        return grad_outputs[0].masked_fill((counts_E == 0)[:, None, None], 0), None


def grouped(rows_ND: Tensor, counts_E: Tensor, weights: ExpertWeights) -> Tensor:
    """Compute all experts with three kernels, without asking the device for the rows of each expert."""
    ends_E = counts_E.cumsum(0).int()
    scaled = any(adapter is not None and adapter.shares is not None for (adapter,) in weights.added)
    one_hot_NE = _one_hot(ends_E, rows_ND) if scaled or weights.biases[0] is not None else None

    leaves = device_type(rows_ND) == "cuda" and capability(rows_ND) in LEAVE_GRADIENTS

    def multiply(x_NK: Tensor, matrix_EKM: Tensor) -> Tensor:
        if leaves and matrix_EKM.requires_grad:
            matrix_EKM = _WithoutGradient.apply(matrix_EKM, counts_E)  # pyright: ignore[reportAssignmentType]
        return F.grouped_mm(x_NK, matrix_EKM, offs=ends_E)

    def product(matrix_EKM: Tensor, bias_EM: Tensor | None, stored: Stored, added: ExpertAdapter | None) -> Product:
        def plain(x_NK: Tensor) -> Tensor:
            return _times(x_NK, matrix_EKM, stored, multiply, turned=weights.turned)

        def of_rows(shares_EM: Tensor) -> Tensor:
            assert one_hot_NE is not None
            return one_hot_NE @ shares_EM

        def call(x_NK: Tensor) -> Tensor:
            out_NM = plain(x_NK)
            if added is not None:
                out_NM = added.sum(x_NK, out_NM, plain, multiply, of_rows)
            if bias_EM is not None and one_hot_NE is not None:
                out_NM = torch.addmm(out_NM, one_hot_NE, bias_EM)
            return out_NM

        return call

    added = (adapter for (adapter,) in weights.added)
    of_each = zip(weights.matrices, weights.biases, weights.quantised, added, strict=True)
    return _hidden_then_out(weights, rows_ND, *(product(*arguments) for arguments in of_each))


def _one_hot(ends_E: Tensor, rows_ND: Tensor) -> Tensor:
    """Return the one-hot expert of each row. A product with it adds biases, and sums their gradients in a fixed
    order."""
    expert_N = torch.searchsorted(ends_E, torch.arange(len(rows_ND), device=ends_E.device), right=True)
    return (expert_N[:, None] == torch.arange(len(ends_E), device=ends_E.device)).to(rows_ND.dtype)


def one_by_one(rows_ND: Tensor, counts_E: Tensor, weights: ExpertWeights, routing: TaskRouting | None = None) -> Tensor:
    """Compute a product per expert; with gradients also for experts without rows, so that every parameter has one.

    routing: `counts_E` are per expert and task.
    """
    tasks = 1 if routing is None else len(routing.names)
    guess = even(len(rows_ND), len(counts_E) // tasks)
    counts = numbers(counts_E, guess if routing is None else routing.as_in(guess))
    of_tasks = [counts[first : first + tasks] for first in range(0, len(counts), tasks)]
    parts = rows_ND.split([sum(each) for each in of_tasks])
    # Unbound once: gradients of single slices would each be as large as all experts.
    matrices = zip(*(matrix.unbind(0) for matrix in weights.matrices), strict=True)
    biases = zip(*(repeat(None) if bias is None else bias.unbind(0) for bias in weights.biases), strict=False)
    sizes = [len(part) for part in parts]
    added = zip(*(_one_by_one(each, sizes) for each in weights.added), strict=True)  # per expert
    experts = enumerate(zip(parts, matrices, biases, added, strict=False))
    if not torch.is_grad_enabled():
        experts = [(number, each) for number, each in experts if len(each[0])]

    def product(
        number: int, matrix_KM: Tensor, bias_M: Tensor | None, stored: Stored, added: "tuple[ExpertAdapter | None, ...]"
    ) -> Product:
        def plain(x_NK: Tensor) -> Tensor:
            return _times(x_NK, matrix_KM, stored, torch.matmul, turned=weights.turned)

        def plus(out_NM: Tensor, x_NK: Tensor, added: ExpertAdapter | None) -> Tensor:
            return out_NM if added is None else added.sum(x_NK, out_NM, plain, torch.matmul)

        def call(x_NK: Tensor) -> Tensor:
            scaled = any(each is not None and each.shares is not None for each in added)
            if stored is None and bias_M is not None and not scaled:
                out_NM = torch.addmm(bias_M, x_NK, matrix_KM)
            else:
                out_NM = plain(x_NK)
                out_NM = out_NM if bias_M is None or scaled else out_NM + bias_M  # as in a `Linear`
            if tasks == 1:
                out_NM = plus(out_NM, x_NK, added[0])
            else:
                rows = of_tasks[number]
                out_NM = torch.cat(list(map(plus, out_NM.split(rows), x_NK.split(rows), added)))
            return out_NM + bias_M if scaled and bias_M is not None else out_NM

        return call

    def own(number: int) -> list[Stored]:
        return [None if each is None else _expert(each, number) for each in weights.quantised]

    out = [
        _hidden_then_out(weights, x, *map(product, repeat(number), matrix, bias, own(number), more))
        for number, (x, matrix, bias, more) in experts
    ]
    return torch.cat(out) if out else rows_ND


def _one_by_one(
    added: "tuple[ExpertAdapter | None, ...]", rows: list[int]
) -> "Iterable[tuple[ExpertAdapter | None, ...]]":
    """Split adapters by expert."""
    return zip(*(_of_experts(each, rows) for each in added), strict=True)


def _of_experts(added: ExpertAdapter | None, rows: list[int]) -> Iterable[ExpertAdapter | None]:
    experts = len(rows)
    if added is None:
        return repeat(None, experts)
    shares = repeat(None, experts) if added.shares is None else added.shares.unbind(0)
    keys = repeat(None, experts) if added.keys_N is None else added.keys_N.split(rows)
    stacks = zip(*(stack.unbind(0) for stack in added.stacks), strict=True)
    pieces = zip(stacks, shares, keys, strict=True)
    return [evolve(added, stacks=own, shares=share, keys_N=key) for own, share, key in pieces]


def _expert(stored: tuple[QuantisedMatrix, Tensor | None], number: int) -> tuple[QuantisedMatrix, Tensor | None]:
    """Return the storage of one of this rank's experts' matrices."""
    matrix, beside = stored
    return matrix.expert(number), None if beside is None else beside[matrix.first[0] + number]


def _times(x: Tensor, matrix: Tensor, stored: Stored, multiply: MatrixProduct, *, turned: bool) -> Tensor:
    if stored is None:
        return multiply(x, matrix)
    return stored[0].product(x, matrix, stored[1], multiply, turned=turned)


def _hidden_then_out(weights: ExpertWeights, x_ND: Tensor, *products: Product) -> Tensor:
    *inner, out = products
    return out(weights.gated(*(product(x_ND) for product in inner)))


def gated_by(limit: float | None, alpha: float, activation: str = "silu") -> Callable[[Tensor, Tensor], Tensor]:
    """Return the product of activated gates and ups. limit, alpha, activation: see `ExpertsLayer`."""
    if limit is None:
        activate = ACTIVATIONS[activation]
        return lambda gate, up: activate(gate) * up
    return lambda gate, up: _ClampedSwiGLU.apply(gate, up, limit, alpha)  # pyright: ignore[reportReturnType]


def weighted_sum(out_TKD: Tensor, weights_TK: Tensor, form: torch.dtype) -> Tensor:
    """Return the sum of a token's experts [T, D], in order of choice and in the router's precision, as `form`."""
    pairs = zip(out_TKD.unbind(1), weights_TK.unbind(1), strict=True)
    return sum((out_TD * weight_T[:, None] for out_TD, weight_T in pairs), start=out_TKD.new_zeros(())).to(form)


class _ClampedSwiGLU(torch.autograd.Function):
    """(u + 1) · g · sigmoid(α · g) with g = min(gate, limit) and u = up within ± limit, which saves only gate
    and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit, ctx.alpha = limit, alpha
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit).add_(1)
        return u.mul_((alpha * g).sigmoid_().mul_(g))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (gate, up), (grad,) = ctx.saved_tensors, grad_outputs
        limit, alpha = ctx.limit, ctx.alpha
        g = gate.clamp(max=limit)
        s = (alpha * g).sigmoid_()
        glu = g.mul_(s)
        # As torch's clamp: there is a gradient at the limit itself.
        grad_up = (grad * glu).masked_fill_(up.abs() > limit, 0)
        slope = glu.mul_(alpha).mul_(1 - s).add_(s)
        grad_gate = slope.mul_(up.clamp(-limit, limit).add_(1)).mul_(grad).masked_fill_(gate > limit, 0)
        return grad_gate, grad_up, None, None


Adapters = dict[str, Callable[[], ExpertAdapter | None]]


class MoE(HasKeys):
    """Σ weight · expert(x) over a token's experts, plus the shared experts: one SwiGLU of their total width.

    Its ranks take different tokens, tensor-parallel ones too: they cut the positions, not the matrices. rows: per step,
    for the means of the router's losses.
    """

    def __init__(self, arch: Architecture, axes: Axes, rows: int, layer: ExpertsLayer) -> None:
        super().__init__()
        self.axes = axes
        self.combine = weighted_sum  # `setup.compile` compiles it
        self.gate = ExpertRouter(arch, axes, rows, layer)
        self.experts = SwiGLUExperts(arch, layer)
        self.norm = RMSNorm(arch.dim, arch.norm_eps) if layer.input_norm else None
        shared, how = layer.shared_width(arch), layer.activation
        self.shared_experts = SwiGLU(arch.dim, shared, activation=how) if arch.shared_experts else None
        gated = layer.gated_ffn
        self.shared_expert = SwiGLU(arch.dim, gated) if gated else None
        self.shared_expert_gate = Linear(arch.dim, 1) if gated else None
        for module in self.modules():
            if isinstance(module, Linear | RMSNorm):
                module.partial = True

    def forward(self, x_BSD: Tensor, real_BS: Tensor, known_BSK: Tensor | None = None) -> Tensor:
        """Compute the layer.

        `real_BS` and `known_BSK`, the experts to use instead of the router's choices, have all positions of `x_BSD`,
        and under sequence parallelism also those of the other ranks' pieces.
        """
        tensor, keys_BS = self.axes.tensor, self.keys_BS
        if tensor is None:
            return self._compute(x_BSD, real_BS, keys_BS, known_BSK)
        if keys_BS is not None:
            keys_BS = own_piece(F.pad(keys_BS, (0, -keys_BS.shape[1] % tensor.size)), 1, tensor.group)
        if known_BSK is not None:
            known_BSK = F.pad(known_BSK, (0, 0, 0, -known_BSK.shape[1] % tensor.size))
            known_BSK = own_piece(known_BSK, 1, tensor.group)
        if tensor.sequence:
            return self._compute(x_BSD, own_piece(real_BS, 1, tensor.group), keys_BS, known_BSK)
        positions = x_BSD.shape[1]
        # The length of texts that grow token by token is not always divisible.
        missing = -positions % tensor.size
        x_BSD, real_BS = F.pad(x_BSD, (0, 0, 0, missing)), F.pad(real_BS, (0, missing))
        real_BS = own_piece(real_BS, 1, tensor.group)
        piece_BSD = self._compute(split(x_BSD, 1, tensor.group), real_BS, keys_BS, known_BSK)
        return join(piece_BSD, 1, tensor.group)[:, :positions]

    def _compute(self, x_BSD: Tensor, real_BS: Tensor, keys_BS: Tensor | None, known_BSK: Tensor | None) -> Tensor:
        routing = self.gate(x_BSD, real_BS, known_BSK)
        if self.axes.recorded is not None:
            self.axes.recorded.append(routing.chosen_TK.view(*x_BSD.shape[:2], -1))
        x_TD = (x_BSD if self.norm is None else self.norm(x_BSD)).flatten(0, 1)
        chosen_TK, places = self._places(routing.chosen_TK, x_BSD)
        # Each expert drops different numbers of a token.
        keys_TK = None if keys_BS is None else splitmix64(routing.chosen_TK, keys_BS.flatten()[:, None])
        shared: list[Tensor] = []

        def meanwhile() -> None:
            shared.extend(self._shared(x_BSD))

        beside = meanwhile if self.axes.shared_meanwhile else None
        out_TKD = to_experts(x_TD, chosen_TK, self.experts, places, self.axes.experts, keys_TK, beside)
        out_BSD = self.combine(out_TKD, routing.weights_TK, x_BSD.dtype).view_as(x_BSD)
        for more_BSD in shared or self._shared(x_BSD):
            out_BSD = out_BSD + more_BSD
        return out_BSD if routing.loss is None else attach(out_BSD, routing.loss)

    def _shared(self, x_BSD: Tensor) -> list[Tensor]:
        """Return the results of experts that every token uses."""
        outputs = [] if self.shared_experts is None else [self.shared_experts(x_BSD)]
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            more_BSD = self.shared_expert(x_BSD)
            outputs.append(self.shared_expert_gate(x_BSD).sigmoid() * more_BSD)
        return outputs

    def _places(self, chosen_TK: Tensor, x_BSD: Tensor) -> tuple[Tensor, int]:
        """Return the expert of each assignment and the number of experts; with adapters of tasks, the pair of expert
        and task."""
        routing = self.experts.routing
        task_T = None if routing is None else routing.task_T(len(x_BSD), x_BSD.shape[1], x_BSD.device)
        if routing is None or task_T is None:
            return chosen_TK, self.gate.experts
        count = len(routing.names)
        return chosen_TK * count + task_T[:, None], self.gate.experts * count
