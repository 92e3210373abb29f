"""A mixture of experts in place of a block's SwiGLU: every token goes through the few experts its router chooses.

No expert has a capacity, so no token is dropped. Names are those of Hugging Face's files, the experts stacked.
Shapes: B rows, S positions, D dim, F width of an expert, E experts, K experts of a token, T = B·S tokens, N rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...planner.architecture import Architecture
from ..parallel.axes import Axes
from ..parallel.collectives import join, own_piece, split
from ..parallel.dispatch import even, to_experts
from ..parallel.fake import capability, device_type, numbers
from ..parallel.tensor import local
from .layers import Linear, SwiGLU
from .router import ExpertRouter, attach


class Experts(nn.Module):
    """SwiGLUs side by side: [E, D, F], [E, D, F] and [E, F, D], the last dim being the output."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(arch.experts, arch.dim, arch.expert_ffn))
        self.up_proj = nn.Parameter(torch.empty(arch.experts, arch.dim, arch.expert_ffn))
        self.down_proj = nn.Parameter(torch.empty(arch.experts, arch.expert_ffn, arch.dim))

    def forward(self, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Rows in order of expert, `counts_E` of them for each expert of this rank."""
        weights = local(self.gate_proj), local(self.up_proj), local(self.down_proj)
        if can_group(rows_ND, weights):
            return grouped(rows_ND, counts_E, *weights)
        return one_by_one(rows_ND, counts_E, *weights)


def can_group(rows_ND: Tensor, weights: tuple[Tensor, ...]) -> bool:
    """Whether one kernel may do the products of all experts: bf16 on CUDA, strides of whole 16 bytes.

    On Hopper alone: on Blackwell experts without rows get weight gradients that are not zero (pytorch #172439).
    """
    if device_type(rows_ND) != "cuda" or rows_ND.dtype != torch.bfloat16 or len(rows_ND) == 0:
        return False
    aligned = all(extent % 8 == 0 for weight in weights for extent in weight.shape[1:])
    return aligned and capability(rows_ND) == 9


def grouped(rows_ND: Tensor, counts_E: Tensor, gate_EDF: Tensor, up_EDF: Tensor, down_EFD: Tensor) -> Tensor:
    """Three kernels for all experts; the device is not asked how many rows each of them has."""
    ends_E = counts_E.cumsum(0).int()
    hidden_NF = F.silu(F.grouped_mm(rows_ND, gate_EDF, offs=ends_E)) * F.grouped_mm(rows_ND, up_EDF, offs=ends_E)
    return F.grouped_mm(hidden_NF, down_EFD, offs=ends_E)


def one_by_one(rows_ND: Tensor, counts_E: Tensor, gate_EDF: Tensor, up_EDF: Tensor, down_EFD: Tensor) -> Tensor:
    """A product for each expert; where there are gradients those without rows included, so that every parameter has
    one."""
    parts = rows_ND.split(numbers(counts_E, even(len(rows_ND), len(counts_E))))
    # Unbound at once: gradients of single slices would each be as large as all experts.
    weights = zip(gate_EDF.unbind(0), up_EDF.unbind(0), down_EFD.unbind(0), strict=True)
    pairs = zip(parts, weights, strict=True)
    if not torch.is_grad_enabled():
        pairs = [(x, each) for x, each in pairs if len(x)]
    out = [(F.silu(x @ gate) * (x @ up)) @ down for x, (gate, up, down) in pairs]
    return torch.cat(out) if out else rows_ND


class MoE(nn.Module):
    """Σ weight · expert(x) over a token's experts, plus the shared experts: one SwiGLU as wide as they are together.

    Its ranks take different tokens, tensor-parallel ones too: they cut the positions, not the matrices.
    rows: those of a step, for the means of the router's losses. gated_ffn: as of an `ExpertsLayer`.
    """

    def __init__(self, arch: Architecture, axes: Axes, rows: int, gated_ffn: int = 0) -> None:
        super().__init__()
        self.axes = axes
        self.gate = ExpertRouter(arch, axes, rows)
        self.experts = Experts(arch)
        self.shared_experts = SwiGLU(arch.dim, arch.shared_experts * arch.expert_ffn) if arch.shared_experts else None
        self.shared_expert = SwiGLU(arch.dim, gated_ffn) if gated_ffn else None
        self.shared_expert_gate = Linear(arch.dim, 1) if gated_ffn else None
        for module in self.modules():
            if isinstance(module, Linear):
                module.partial = True

    def forward(self, x_BSD: Tensor, real_BS: Tensor) -> Tensor:
        """`real_BS` has all positions of `x_BSD`, and under sequence parallel those of the other ranks' pieces too."""
        tensor = self.axes.tensor
        if tensor is None:
            return self._compute(x_BSD, real_BS)
        if tensor.sequence:
            return self._compute(x_BSD, own_piece(real_BS, 1, tensor.group))
        positions = x_BSD.shape[1]
        # Texts that grow token by token cannot always be cut evenly.
        missing = -positions % tensor.size
        x_BSD, real_BS = F.pad(x_BSD, (0, 0, 0, missing)), F.pad(real_BS, (0, missing))
        piece_BSD = self._compute(split(x_BSD, 1, tensor.group), own_piece(real_BS, 1, tensor.group))
        return join(piece_BSD, 1, tensor.group)[:, :positions]

    def _compute(self, x_BSD: Tensor, real_BS: Tensor) -> Tensor:
        routing = self.gate(x_BSD, real_BS)
        x_TD = x_BSD.flatten(0, 1)
        out_TKD = to_experts(x_TD, routing.chosen_TK, self.experts, self.gate.experts, self.axes.experts)
        # Summed in order of choice and in the router's precision.
        pairs = zip(out_TKD.unbind(1), routing.weights_TK.unbind(1), strict=True)
        out_TD = sum((out_TD * weight_T[:, None] for out_TD, weight_T in pairs), start=x_TD.new_zeros(()))
        out_BSD = out_TD.to(x_BSD.dtype).view_as(x_BSD)
        if self.shared_experts is not None:
            out_BSD = out_BSD + self.shared_experts(x_BSD)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            more_BSD = self.shared_expert(x_BSD)
            out_BSD = out_BSD + self.shared_expert_gate(x_BSD).sigmoid() * more_BSD
        return out_BSD if routing.loss is None else attach(out_BSD, routing.loss)
