"""Layers that read their weights as this rank's pieces, so that the same code runs whole and cut.

Shapes: B rows, S positions, D dim, A head width, V vocabulary.
"""

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from xtrain.planner.architecture import RotaryAngles
from xtrain.planner.mesh.sharding import piece
from xtrain.runtime.models.fp8 import Fp8Matrix
from xtrain.runtime.models.fused import Fusible, normed_and_turned, silu_times
from xtrain.runtime.models.quantised import QuantisedMatrix
from xtrain.runtime.models.rms_norm import rms_norm
from xtrain.runtime.models.tiled import TiledModule
from xtrain.runtime.parallel.axes import Axes, TensorAxis
from xtrain.runtime.parallel.tensor import column_parallel_input, local, row_parallel_output

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Linear(nn.Linear):
    """x · Wᵀ, and the bias if there is one. `partial` as in `local`. quantised: how the matrix is stored, if not as it
    is; fp8: how it is multiplied, if not in the format of the computation."""

    partial = False
    quantised: QuantisedMatrix | None = None
    fp8: Fp8Matrix | None = None

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else local(self.bias, partial=self.partial)
        return self._product(input, bias)

    def _product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.fp8 is not None:
            out = self.fp8.product(x, local(self.weight, partial=self.partial))
            return out if bias is None else out + bias
        if self.quantised is None:
            return F.linear(x, local(self.weight, partial=self.partial), bias)
        out = self.quantised.product(x, local(self.weight), self.quantised.beside(self), torch.matmul, turned=True)
        return out if bias is None else out + bias  # not in place: recomputation may keep the product

    def without_adapters(self, x: Tensor) -> Tensor:
        """x · Wᵀ alone, also of what an adapter has put in its place."""
        return self._product(x)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """What of it a rank computes with, [outputs, inputs]; of a quantised one computed anew."""
        weight = local(self.weight)
        if self.quantised is None:
            return weight
        return self.quantised.values(weight, self.quantised.beside(self), dtype)

    def row_parallel(self, x_BSD: Tensor, tensor: TensorAxis | None) -> Tensor:
        """The same of a matrix that tensor parallel cuts by input: the bias is added once, to the sum over ranks, of
        which each has its own positions under sequence parallel."""
        return self.row_parallel_sum(self.row_parallel_summand(x_BSD, tensor), tensor)

    def row_parallel_summand(self, x_BSD: Tensor, tensor: TensorAxis | None) -> Tensor:
        """What this rank has of it before the sum."""
        return self(x_BSD) if tensor is None or self.bias is None else self.without_bias(x_BSD)

    def row_parallel_sum(self, summand_BSD: Tensor, tensor: TensorAxis | None) -> Tensor:
        """The sum of what ranks have of it."""
        out_BSD = row_parallel_output(summand_BSD, tensor)
        return out_BSD if tensor is None or self.bias is None else out_BSD + local(self.bias, partial=tensor.sequence)

    def without_bias(self, x_BSD: Tensor) -> Tensor:
        return self._product(x_BSD)


class RMSNorm(Fusible):
    """`rms_norm`. `partial` as in `local`. by_head: of heads, of which a tensor-parallel rank has its own. axes: given
    where rows are cut by tensor parallel. plus_one: rows are multiplied by 1 + weight."""

    partial = False

    def __init__(
        self, width: int, eps: float, *, by_head: bool = False, axes: Axes | None = None, plus_one: bool = False
    ) -> None:
        super().__init__()
        self.by_head, self.axes, self.plus_one = by_head, axes, plus_one
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        tensor = None if self.axes is None else self.axes.tensor
        group = None if tensor is None else tensor.group
        weight_D = local(self.weight, partial=self.partial)
        return rms_norm(x, weight_D, self.eps, group, plus_one=self.plus_one, fused=self.fused)

    def turned(self, x_BSHA: Tensor, rotate: "Rotation") -> Tensor:
        """Heads that are normed and turned by their positions, by the fused kernels."""
        weight_A = local(self.weight, partial=self.partial)
        return normed_and_turned(x_BSHA, 1 + weight_A if self.plus_one else weight_A, self.eps, rotate)


class Embedding(nn.Embedding):
    """Rows of a table of which a tensor-parallel rank holds some: the others are looked up where they are."""

    def __init__(self, vocabulary: int, dim: int, axes: Axes) -> None:
        super().__init__(vocabulary, dim)
        self.axes = axes

    def forward(self, input: Tensor) -> Tensor:
        weight_VD = local(self.weight)
        tensor = self.axes.tensor
        if tensor is None:
            return F.embedding(input, weight_VD)
        first = first_row(self.num_embeddings, tensor)
        own_BS = (input >= first) & (input < first + len(weight_VD))
        if not len(weight_VD):
            x_BSD = weight_VD.new_zeros(*input.shape, self.embedding_dim) + 0 * weight_VD.sum()
        else:
            x_BSD = F.embedding(torch.where(own_BS, input - first, 0), weight_VD) * own_BS[..., None]
        return row_parallel_output(x_BSD, tensor)


class SwiGLU(TiledModule, Fusible):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020). With `axes` its width is cut where there is tensor parallel."""

    def __init__(
        self, dim: int, ffn: int, axes: Axes | None = None, *, bias: bool = False, activation: str = "silu"
    ) -> None:
        super().__init__()
        self.axes, self.activation = axes, ACTIVATIONS[activation]
        self.gate_proj = Linear(dim, ffn, bias=bias)
        self.up_proj = Linear(dim, ffn, bias=bias)
        self.down_proj = Linear(ffn, dim, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        tensor = self._tensor
        return self.down_proj.row_parallel_sum(self.in_pieces(column_parallel_input(x_BSD, tensor)), tensor)

    def of_piece(self, x_BSD: Tensor) -> Tensor:
        if self.fused and self.activation is F.silu:
            hidden_BSF = silu_times(self.gate_proj(x_BSD), self.up_proj(x_BSD))
        else:
            hidden_BSF = self.activation(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        return self.down_proj.row_parallel_summand(hidden_BSF, self._tensor)

    @property
    def _tensor(self) -> TensorAxis | None:
        return None if self.axes is None else self.axes.tensor


@frozen(eq=False)
class Rotation:
    """Cosine and sine of every position's angles, each [B, 1, S, A]; made once a forward for all blocks that have the
    same angles."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions_BS: Tensor, angles: RotaryAngles, dtype: torch.dtype) -> "Rotation":
        # Angles in fp64 when the model is, else fp32: a bf16 angle is wrong by whole turns at long positions.
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        width, theta, rope = angles.width, angles.theta, angles.rope
        if rope.scaling == "none":
            frequencies = theta ** (-torch.arange(0, width, 2, device=positions_BS.device, dtype=exact) / width)
        else:
            frequencies = torch.tensor(rope.frequencies(width, theta), device=positions_BS.device, dtype=exact)
        angle = positions_BS.to(exact)[:, None, :, None] * frequencies
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos(), angle.sin()
        if rope.magnitude != 1:
            cos, sin = cos * rope.magnitude, sin * rope.magnitude
        return cls(cos=cos.to(dtype), sin=sin.to(dtype))

    def __call__(self, x_BHSA: Tensor) -> Tensor:
        left, right = x_BHSA.chunk(2, dim=-1)
        return x_BHSA * self.cos + torch.cat((-right, left), dim=-1) * self.sin


def first_row(extent: int, tensor: TensorAxis | None) -> int:
    """Where this rank's piece of `extent` rows begins."""
    return 0 if tensor is None else tensor.group.rank() * piece(extent, tensor.size, 0)
