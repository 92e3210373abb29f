"""lora on a rank: A and B beside a matrix, and their first values.

Shapes: D inputs, F outputs, R rank.
"""

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor, nn

from ...planner.architecture import BlockParameter, ParameterSpec
from ...planner.plan import Plan
from ...runtime.models.adapted import merges, puts_on
from ...runtime.models.layers import Linear
from ...runtime.models.moe import ExpertAdapter, Experts, MatrixProduct
from ...runtime.models.parts import ModelParts
from ...runtime.models.tensors import fill
from ...runtime.models.weights import generator_of
from ...runtime.ops import op
from ...runtime.parallel.tensor import local
from ...runtime.state import Rank
from .lora import LoraMatrix


class LoraLinear(Linear):
    """x · Wᵀ + scale · (x · Aᵀ) · Bᵀ, W being that of `base`, A [R, D] and B [F, R]."""

    def __init__(self, base: Linear, rank: int, scale: float) -> None:
        super().__init__(base.in_features, base.out_features)
        self.weight, self.bias, self.partial = base.weight, base.bias, base.partial
        self.scale = scale
        self.lora_A = Linear(base.in_features, rank)
        self.lora_B = Linear(rank, base.out_features)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self._added(input)

    def without_bias(self, x_BSD: Tensor) -> Tensor:
        return super().without_bias(x_BSD) + self._added(x_BSD)

    def _added(self, x_BSD: Tensor) -> Tensor:
        low_BSR = self.lora_A(x_BSD)
        return self.lora_B(low_BSR if self.scale == 1 else low_BSR * self.scale)


@puts_on(LoraMatrix)
def put_on(matrix: LoraMatrix, block: nn.Module, known: Mapping[str, BlockParameter]) -> None:
    """In the place of the module that has the matrix."""
    path = known[matrix.name].owner
    base = block.get_submodule(path)
    if isinstance(base, Experts):
        _put_on_experts(matrix, base, known)
        return
    assert isinstance(base, Linear)
    module = LoraLinear(base, matrix.rank, matrix.scale)
    for factor, name in zip((module.lora_A, module.lora_B), matrix.factors(), strict=True):
        factor.partial = known[name].partial == "always"
    above, _, own = path.rpartition(".")
    setattr(block.get_submodule(above), own, module)


def _put_on_experts(matrix: LoraMatrix, experts: Experts, known: Mapping[str, BlockParameter]) -> None:
    """A [E, D, R] and B [E, R, F] of each expert."""
    a, b = (name.rpartition(".")[2] for name in matrix.factors())
    for own, name in zip((a, b), matrix.factors(), strict=True):
        experts.register_parameter(own, nn.Parameter(torch.empty(known[name].shape)))

    def added(x_ND: Tensor, stacks: tuple[Tensor, ...], times: MatrixProduct) -> Tensor:
        low_NR = times(x_ND, stacks[0])
        return times(low_NR if matrix.scale == 1 else low_NR * matrix.scale, stacks[1])

    def make() -> ExpertAdapter:
        return ExpertAdapter((local(getattr(experts, a)), local(getattr(experts, b))), added)

    experts.adapters[matrix.name.rpartition(".")[2]] = make


@merges(LoraMatrix)
def merge(matrix: LoraMatrix, weight: Tensor, beside: Mapping[str, Tensor]) -> Tensor:
    """W + scale · B · A; of experts, whose matrices are [E, D, F], W + scale · A · B."""
    a, b = (beside[name] for name in matrix.factors())
    return weight + (a @ b if weight.dim() == 3 else b @ a) * matrix.scale


@op("setup.adapter.lora")
@torch.no_grad()
def draw(plan: Plan, model: ModelParts, rank: Rank, seed: int, init: str) -> None:
    """Give A and B their first values, each drawn whole in fp32 and then cut, as `setup.weights` draws those of the
    model: as PEFT does, A by `kaiming_uniform_` with √5 or normal and B zero, or both by its `orthogonal_init`."""
    tensors = {tensor.name: tensor for tensor in plan.parameters.tensors if tensor.adapter}
    for name, parameter in model.named_parameters():
        if name in tensors:
            fill(parameter, first_values(tensors[name], init, seed, rank.device))


def first_values(factor: ParameterSpec, init: str, seed: int, device: torch.device) -> Tensor:
    """Of a whole factor: A is [R, D], B [F, R]; of experts [E, D, R] and [E, R, F]."""
    is_a, shape = "lora_A" in factor.name, factor.shape
    generator = generator_of(factor.name, seed, device)
    if init == "orthogonal":
        rank = shape[-1] if is_a == factor.expert else shape[-2]
        # The same for both factors of a matrix; every expert has it.
        normal = torch.empty(rank, rank, device=device).normal_(generator=generator_of(factor.adapter, seed, device))
        half = torch.linalg.qr(normal).Q[0 if is_a else 1 :: 2]  # [R / 2, R]
        width = shape[-2] if is_a == factor.expert else shape[-1]
        drawn = torch.empty(*shape[:-2], width, rank // 2, device=device).normal_(generator=generator)
        whole = drawn @ half / 10
        return whole if is_a == factor.expert else whole.mT.contiguous()
    whole = torch.zeros(shape, device=device)
    if not is_a:
        return whole
    rank, inputs = (shape[2], shape[1]) if factor.expert else shape
    if init == "gaussian":
        return whole.normal_(0.0, 1 / rank, generator=generator)
    bound = 1 / sqrt(inputs)
    return whole.uniform_(-bound, bound, generator=generator)
