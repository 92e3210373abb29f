"""LoRA on a rank: the factors A and B of a matrix, and their initial values.

Shapes: D inputs, F outputs, R rank.
"""

from collections.abc import Mapping
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xtrain.blocks.adapted import alone_name
from xtrain.components.adapters._lora_matrix import LoraMatrix, rows_at_once
from xtrain.plan.architecture import BlockParameter, ParameterSpec
from xtrain.plan.plan import Plan
from xtrain.runtime.base.collectives import all_reduce, own_piece
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.nn.adapters import TaskExperts, TaskPlace, begins_with, decomposes, draws, merges, puts_on, writes
from xtrain.runtime.nn.axes import Axes, local
from xtrain.runtime.nn.head_product import HeadFactors
from xtrain.runtime.nn.layers import DropsInputs, Linear, first_row, generator_of
from xtrain.runtime.nn.moe import ExpertAdapter, Experts, MatrixProduct
from xtrain.runtime.nn.recompute import as_one
from xtrain.runtime.nn.transformer import ModelParts, QuantisedParameter
from xtrain.runtime.nn.weights import fill, own_indices, values_of


class LoraLinear(Linear, DropsInputs):
    """x · Wᵀ + scale · (x · Aᵀ) · Bᵀ with W from `base`, A [R, D] and B [F, R]; with `dropout`, the input of A is
    dropped in part.

    factor: multiplies `scale`, in a slot for larger adapters.
    """

    factor = 1.0
    scales = False

    def __init__(self, base: Linear, matrix: LoraMatrix, axes: Axes) -> None:
        super().__init__(base.in_features, base.out_features)
        self.weight, self.bias, self.partial = base.weight, base.bias, base.partial
        self.scale, self.axes, self.by_input = matrix.scale, axes, matrix.by_input
        self.lora_A = Linear(base.in_features, matrix.rank)
        self.lora_B = Linear(matrix.rank, base.out_features)
        if matrix.pissa:  # not used in the computation
            self.lora_begun_A = Linear(base.in_features, matrix.rank)
            self.lora_begun_B = Linear(matrix.rank, base.out_features)

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        return out if self.axes.without_adapter else out + self.added(input)

    def without_bias(self, x_BSD: Tensor) -> Tensor:
        out = super().without_bias(x_BSD)
        return out if self.axes.without_adapter else out + self.added(x_BSD)

    def applied(self, x_BSD: Tensor, out_BSF: Tensor) -> Tensor:
        """Return the matrix product plus the adapter's output."""
        return out_BSF + self.added(x_BSD)

    def added(self, x_BSD: Tensor) -> Tensor:
        return self.product_of_factors(self.kept(x_BSD))

    def kept(self, x_BSD: Tensor) -> Tensor:
        """Return the input of A after dropout; `x_BSD` itself without dropout."""
        keys_BS = self.keys_BS  # of all tokens; they determine which inputs are dropped
        if self.dropout is None or keys_BS is None:
            return x_BSD
        tensor = self.axes.tensor
        if tensor is not None and keys_BS.shape[1] != x_BSD.shape[1]:  # each rank holds its own positions
            missing = -keys_BS.shape[1] % tensor.size
            keys_BS = own_piece(torch.nn.functional.pad(keys_BS, (0, missing)), 1, tensor.group)
        first = first_row(self.in_features, tensor) if self.by_input else 0
        return self.dropout(x_BSD, keys_BS, first)

    def factors(self, first: int, end: int) -> HeadFactors:
        """Return the adapter's factors for tokens `first` to before `end`, for a head, whose product is computed
        elsewhere."""
        a_RD, b_VR = (local(each.weight, partial=each.partial) for each in (self.lora_A, self.lora_B))
        return HeadFactors(a_RD, b_VR, self.scale * self.factor, first, end)

    def product_of_factors(self, x_BSD: Tensor) -> Tensor:
        """Return scale · (x · Aᵀ) · Bᵀ."""
        low_BSR = self.lora_A(x_BSD)
        scale = self.scale * self.factor
        return self.lora_B(low_BSR if scale == 1 else low_BSR * scale)


class DoraLinear(LoraLinear):
    """DoRA: g = m / ‖W + scale · B · A‖ times LoRA's output, then the bias. Norms are taken of rows and are constant in
    the backward (Liu et al. 2024, arXiv 2402.09353, section 4.3). With dropout, d being the kept part of x: x · Wᵀ +
    g · (d · Wᵀ + scale · (d · Aᵀ) · Bᵀ) − d · Wᵀ, as in PEFT."""

    magnitude_partial = False
    scales = True

    def __init__(self, base: Linear, matrix: LoraMatrix, axes: Axes) -> None:
        super().__init__(base, matrix, axes)
        self.under = base.under if isinstance(base, TaskPlace) else None  # holds the matrix
        self.lora_magnitude_vector = nn.Parameter(torch.empty(base.out_features))

    def forward(self, input: Tensor) -> Tensor:
        if self.axes.without_adapter:
            return super().forward(input)
        if self.bias is None:
            return self.without_bias(input)
        out, share_F, rest = self._unscaled(input, self._product(input))
        bias_F = local(self.bias, partial=self.partial)
        return torch.addcmul(bias_F if rest is None else rest + bias_F, out, share_F)

    def without_bias(self, x_BSD: Tensor) -> Tensor:
        out_BSF = self._product(x_BSD)
        return out_BSF if self.axes.without_adapter else self.applied(x_BSD, out_BSF)

    def applied(self, x_BSD: Tensor, out_BSF: Tensor) -> Tensor:
        out, share_F, rest = self._unscaled(x_BSD, out_BSF)
        return out * share_F if rest is None else torch.addcmul(rest, out, share_F)

    @property
    def base(self) -> Linear:
        """The module that holds the matrix; for a task it is another module."""
        return self if self.under is None else self.under.module

    def _unscaled(self, x_BSD: Tensor, out_BSF: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the output before scaling, its scale, and the term added afterwards. out_BSF: x · Wᵀ."""
        kept_BSD, rest = self.kept(x_BSD), None
        if kept_BSD is not x_BSD:
            kept_BSF = self.base.without_adapters(kept_BSD)
            out_BSF, rest = kept_BSF, out_BSF - kept_BSF
        out_BSF = out_BSF + self.product_of_factors(kept_BSD)
        return out_BSF, self._share(out_BSF.dtype), rest

    def _share(self, dtype: torch.dtype) -> Tensor:
        norm_F = self._norms(dtype)
        magnitude_F = local(self.lora_magnitude_vector, partial=self.partial or self.magnitude_partial)
        return (magnitude_F.to(norm_F.dtype) / norm_F).to(dtype)

    @torch.no_grad()
    def _norms(self, dtype: torch.dtype) -> Tensor:
        """Return the row norms of W + scale · B · A, in fp32 or wider, computed as one matrix product."""
        exact = torch.promote_types(dtype, torch.float32)

        def make() -> tuple[Tensor]:
            weight_FD, a_RD = self.base.matrix(dtype), local(self.lora_A.weight).to(exact)
            rows = rows_at_once(weight_FD.shape[1])
            parts = zip(weight_FD.split(rows), local(self.lora_B.weight).split(rows), strict=True)
            norms = [torch.addmm(w.to(exact), b.to(exact), a_RD, alpha=self.scale).norm(dim=1) for w, b in parts]
            norm_F = torch.cat(norms)
            tensor = self.axes.tensor if self.by_input else None
            if tensor is not None:
                norm_F = all_reduce(norm_F.square_(), tensor.group).sqrt_()
            return (norm_F.clamp_(min=torch.finfo(exact).tiny),)  # a row of zeros keeps its zeros

        (norm_F,) = make() if torch.compiler.is_compiling() else as_one("matmul", make)
        return norm_F


@puts_on(LoraMatrix)
def put_on(matrix: LoraMatrix, block: nn.Module, known: Mapping[str, BlockParameter], axes: Axes) -> None:
    """Replace the module that holds the matrix."""
    path = known[matrix.name].owner
    base = block.get_submodule(path)
    if isinstance(base, Experts | TaskExperts):
        _put_on_experts(matrix, base, known, axes)
        return
    assert isinstance(base, Linear)
    if matrix.dora:
        module = DoraLinear(base, matrix, axes)
        module.magnitude_partial = known[matrix.magnitude].partial == "always"
    else:
        module = LoraLinear(base, matrix, axes)
    for factor, name in zip((module.lora_A, module.lora_B), matrix.factors(), strict=True):
        factor.partial = known[name].partial == "always"
    above, _, own = path.rpartition(".")
    setattr(block.get_submodule(above), own, module)


def _put_on_experts(
    matrix: LoraMatrix, experts: Experts | TaskExperts, known: Mapping[str, BlockParameter], axes: Axes
) -> None:
    """Add A [E, D, R] and B [E, R, F] of each expert, and its magnitudes [E, F]."""
    a, b = (name.rpartition(".")[2] for name in matrix.factors())
    own = matrix.name.rpartition(".")[2]
    magnitudes = (matrix.magnitude,) if matrix.dora else ()
    for name in (*magnitudes, *matrix.factors(), *(matrix.begun() if matrix.pissa else ())):
        experts.register_parameter(name.rpartition(".")[2], nn.Parameter(torch.empty(known[name].shape)))

    def added(x_ND: Tensor, stacks: tuple[Tensor, ...], times: MatrixProduct) -> Tensor:
        low_NR = times(x_ND, stacks[0])
        scale = matrix.scale * experts.factor
        return times(low_NR if scale == 1 else low_NR * scale, stacks[1])

    def make() -> ExpertAdapter | None:
        if axes.without_adapter:
            return None
        stacks = (local(getattr(experts, a)), local(getattr(experts, b)))
        return ExpertAdapter(stacks, added, _shares(experts, matrix, *stacks) if matrix.dora else None)

    experts.adapters[own] = make


def _shares(experts: Experts | TaskExperts, matrix: LoraMatrix, a_EDR: Tensor, b_ERF: Tensor) -> Tensor:
    """Return [E, F]: as in `DoraLinear`, each expert's magnitudes divided by the norms of W + scale · A · B, whose
    columns are its outputs."""
    base = experts if isinstance(experts, Experts) else experts.under.module
    own, exact = matrix.name.rpartition(".")[2], torch.promote_types(a_EDR.dtype, torch.float32)

    def norms_of(number: int, a_DR: Tensor, b_RF: Tensor) -> Tensor:
        weight_DF = base.matrix(own, number, a_EDR.dtype)
        columns = rows_at_once(weight_DF.shape[0])
        parts = zip(weight_DF.split(columns, 1), b_RF.split(columns, 1), strict=True)
        return torch.cat([torch.addmm(w.to(exact), a_DR, b, alpha=matrix.scale).norm(dim=0) for w, b in parts])

    def make() -> tuple[Tensor]:
        factors = zip(a_EDR.to(exact), b_ERF.to(exact), strict=True)
        norm_EF = torch.stack([norms_of(number, *each) for number, each in enumerate(factors)])
        return (norm_EF.clamp_(min=torch.finfo(exact).tiny),)

    with torch.no_grad():
        (norm_EF,) = make() if torch.compiler.is_compiling() else as_one("matmul", make)
    magnitude_EF = local(getattr(experts, matrix.magnitude.rpartition(".")[2]))
    return (magnitude_EF.to(exact) / norm_EF).to(a_EDR.dtype)


@merges(LoraMatrix)
def merge(matrix: LoraMatrix, weight: Tensor, beside: Mapping[str, Tensor]) -> Tensor:
    """Return W + scale · B · A, with rows scaled to their magnitudes if there are any; for experts [E, D, F], W + scale
    · A · B, or its transpose if they are stored turned."""
    whole = weight + _product(matrix, *(beside[name] for name in matrix.factors()))
    if not matrix.dora:
        return whole
    dim = _input_dim(matrix)
    norms = whole.norm(dim=dim, keepdim=True).clamp_(min=torch.finfo(whole.dtype).tiny)
    return whole * (beside[matrix.magnitude].unsqueeze(dim) / norms)


def _product(matrix: LoraMatrix, a: Tensor, b: Tensor) -> Tensor:
    """Return the summand of a weight for its factors."""
    product = (a @ b if a.dim() == 3 else b @ a) * matrix.scale
    return product.mT if matrix.turned else product


def _input_dim(matrix: LoraMatrix) -> int:
    """Return the dimension of the inputs of a weight [F, D], or of experts [E, D, F] or [E, F, D]."""
    return 2 if matrix.turned else 1


@begins_with(LoraMatrix)
def begun_with(matrix: LoraMatrix, beside: Mapping[str, Tensor]) -> Tensor:
    """Return scale · B · A of the initial A and B; for experts scale · A · B."""
    return _product(matrix, *(beside[name] for name in matrix.begun()))


@decomposes(LoraMatrix)
def decompose(matrix: LoraMatrix, weight: Tensor, format: torch.dtype) -> dict[str, Tensor]:
    """Initialize A and B from W = U · S · Vᵀ: of the R largest singular values, A = √(S / scale) · Vᵀ and B = U · √(S /
    scale) (PiSSA: Meng, Wang, Zhang 2024, arXiv 2404.02948, section 3). The largest entry of each column of U is
    made positive, so that signs are deterministic. Experts [E, D, F] are decomposed one by one."""
    if weight.dim() == 3:
        pairs = [_largest(matrix, each if matrix.turned else each.mT) for each in weight]
        a, b = (torch.stack([factor.mT for factor in factors]) for factors in zip(*pairs, strict=True))
    else:
        a, b = _largest(matrix, weight)
    a, b = a.to(format), b.to(format)
    found = dict(zip((*matrix.factors(), *matrix.begun()), (a, b, a, b), strict=True))
    if matrix.dora:
        found[matrix.magnitude] = torch.linalg.vector_norm(weight, dim=_input_dim(matrix), dtype=torch.float64)
    return found


@writes(LoraMatrix)
def write(matrix: LoraMatrix, as_written: LoraMatrix, beside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the exported factors. [B, −B₀] · [A; A₀] is B · A − B₀ · A₀, the difference of W − s · B₀ · A₀ + s · B · A
    from W. A larger rank is padded with zeros; B compensates for another scale."""
    a_name, b_name = matrix.factors()
    a, b = beside[a_name], beside[b_name]
    a_dim, b_dim = (-1, -2) if a.dim() == 3 else (0, 1)
    if matrix.pissa:
        begun_a, begun_b = (beside[name].to(a.dtype) for name in matrix.begun())
        a, b = torch.cat((a, begun_a), a_dim), torch.cat((b, -begun_b), b_dim)
    if matrix.scale != as_written.scale:
        b = b * (matrix.scale / as_written.scale)
    found = {name: each for name, each in beside.items() if name not in matrix.begun()}
    return {**found, a_name: _widened(a, a_dim, as_written.rank), b_name: _widened(b, b_dim, as_written.rank)}


def _widened(factor: Tensor, dim: int, rank: int) -> Tensor:
    """Pad a factor with zeros along a dim to a rank."""
    shape = list(factor.shape)
    shape[dim] = rank - shape[dim]
    return torch.cat((factor, factor.new_zeros(shape)), dim) if shape[dim] else factor


def _largest(matrix: LoraMatrix, weight_FD: Tensor) -> tuple[Tensor, Tensor]:
    """Return A [R, D] and B [F, R]."""
    u_FK, s_K, v_KD = torch.linalg.svd(weight_FD, full_matrices=False)
    u_FR, s_R, v_RD = u_FK[:, : matrix.rank], s_K[: matrix.rank], v_KD[: matrix.rank]
    sign_R = u_FR.gather(0, u_FR.abs().argmax(0, keepdim=True))[0].sign()
    root_R = (s_R / matrix.scale).sqrt() * sign_R
    return root_R[:, None] * v_RD, u_FR * root_R


@op("setup.adapter.lora")
@torch.no_grad()
def draw(plan: Plan, model: ModelParts, rank: Rank, seed: int, init: str, task: str = "") -> None:
    """Initialize A and B. Each is drawn whole in fp32 and then cut, as `setup.weights` does for the model. As in PEFT:
    A by `kaiming_uniform_` with √5 or normal and B zero, or both by its `orthogonal_init`."""
    own = (tensor for tensor in plan.parameters.tensors if tensor.adapter and tensor.task == task)
    tensors = {tensor.name: tensor for tensor in own if len(tensor.shape) > 1}
    for name, parameter in model.named_parameters():
        if name in tensors:
            fill(parameter, first_values(tensors[name], init, seed, rank.device))
    for module in model.modules():
        if isinstance(module, DoraLinear):
            fill(module.lora_magnitude_vector, row_norms(module.base, rank.device))
        elif isinstance(module, Experts | TaskExperts):
            base = module if isinstance(module, Experts) else module.under.module
            for name in module.adapters:
                magnitude = getattr(module, f"{name}_lora_magnitude_vector", None)
                if magnitude is not None:
                    fill(magnitude, column_norms(base, name, rank.device))


def row_norms(module: Linear, device: torch.device) -> Tensor:
    """Return the row norms of the whole W, fp64 [F]; every rank sums the squares of its own piece."""
    weight, matrix = module.weight, module.quantised
    if matrix is None:
        values, row_N = local(weight), own_indices(weight, 0)
    else:
        values, row_N = values_of(QuantisedParameter("", module, "weight", matrix)), own_indices(weight, 0)
        if not matrix.base.in_rows(matrix.shape):  # numbers of the flattened matrix, some of each row of the parameter
            place = row_N[:, None] * matrix.base.block + torch.arange(matrix.base.block)
            values, row_N = values.reshape(-1, 1), place.flatten().div(module.in_features, rounding_mode="floor")
            row_N = row_N.clamp(max=module.out_features - 1)  # zero padding after the last row
    squares_F = torch.zeros(module.out_features, dtype=torch.float64, device=device)
    if values.numel():
        own_N = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64).square()
        squares_F.index_add_(0, row_N.to(device), own_N.to(device))
    return _summed(squares_F, weight).sqrt()


def column_norms(experts: Experts, name: str, device: torch.device) -> Tensor:
    """Return the norms of all outputs of experts' matrices [E, D, F] or [E, F, D], fp64 [E, F], likewise."""
    weight, matrix = getattr(experts, name), experts.quantised.get(name)
    values = local(weight) if matrix is None else values_of(QuantisedParameter("", experts, name, matrix))
    outputs = (weight.shape if matrix is None else matrix.shape)[1 if experts.turned else 2]
    squares_EF = torch.zeros(weight.shape[0], outputs, dtype=torch.float64, device=device)
    if values.numel():
        own_EF = torch.linalg.vector_norm(values, dim=2 if experts.turned else 1, dtype=torch.float64).square()
        expert_E = own_indices(weight, 0).to(device)[:, None]
        output_F = own_indices(weight, 1).to(device) if experts.turned else torch.arange(outputs, device=device)
        squares_EF[expert_E, output_F] = own_EF.to(device)
    return _summed(squares_EF, weight).sqrt()


def _summed(squares: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over the ranks that have other pieces of a weight."""
    if isinstance(weight, DTensor):
        for axis, placement in enumerate(weight.placements):
            if not placement.is_replicate():
                dist.all_reduce(squares, group=weight.device_mesh.get_group(axis))
    return squares


@draws(LoraMatrix)
def first_values(factor: ParameterSpec, init: str, seed: int, device: torch.device) -> Tensor:
    """Return the initial values of a whole factor: A [R, D], B [F, R]; of experts [E, D, R] and [E, R, F]."""
    is_a, shape = "lora_A" in factor.name, factor.shape
    generator = generator_of(alone_name(factor), seed, device)
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
