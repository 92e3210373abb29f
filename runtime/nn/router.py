"""Routing of tokens to experts: choice, load balance and its losses, and the exchange of tokens between ranks.

Dispatch is a permutation, so its gradient is a permutation too.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.blocks.feed_forward import ExpertsLayer
from xtrain.plan.architecture import Architecture
from xtrain.runtime.base.collectives import Exchange, all_reduce, all_to_all, exchange
from xtrain.runtime.base.device import numbers
from xtrain.runtime.nn.axes import Axes, local
from xtrain.runtime.nn.layers import ExactBuffers, RMSNorm
from xtrain.runtime.nn.recompute import recomputing, remember


@frozen(eq=False)
class Routing:
    """Routing of tokens. chosen_TK: int64, experts of every token. weights_TK: factors of their outputs. loss: this
    layer's and these tokens' share of the step's objective; None outside training."""

    chosen_TK: Tensor
    weights_TK: Tensor
    loss: Tensor | None


class LayerLosses:
    """Losses that a layer adds to the objective of a step, as means over its rows.

    `aux` (fp64) counts in training: losses before their weight, summed over rows (of a row on several ranks, this
    rank's part). Counts only grow; readers remember earlier values, and the value of `begun` then.

    row_factor: ratio of a full step's rows to this step's rows; None: all are full. loss_scale: factor of the loss in
    fp16.
    """

    # Plain attributes, not buffers: DDP would overwrite buffers with the first rank's.
    aux: Tensor | None = None
    begun = 0
    row_factor: Tensor | None = None
    loss_scale: Tensor | None = None

    @property
    def counts(self) -> list[Tensor]:
        """Counts that exist."""
        return [] if self.aux is None else [self.aux]

    def forget(self) -> None:
        """Drop the counts."""
        self.aux = None

    def reset_counts(self) -> None:
        """Reset the counts."""
        self.forget()
        self.begun += 1

    @torch.no_grad()
    def add(self, aux: Tensor) -> None:
        """Add to the losses that are counted."""
        if self.aux is None:
            self.aux = torch.zeros_like(aux, dtype=torch.float64)
        self.aux += aux

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss as its share of the step's objective."""
        for factor in (self.row_factor, self.loss_scale):
            loss = loss if factor is None else loss * factor.to(loss.dtype)
        return loss


class RouterLosses(LayerLosses):
    """Losses and counts of a router of `experts` experts, of which a token takes `per_token`.

    `loads_E` (int64) counts assignments of this rank's real tokens to experts.

    aux_weight, z_weight: of the losses of a row, the model's weights by `divisor`. copies: ranks of `row` that have the
    same positions.
    """

    axes: Axes
    experts: int
    per_token: int
    sigmoid = False
    aux_weight: float
    z_weight: float
    divisor: int
    loads_E: Tensor | None = None

    @property
    def copies(self) -> int:
        return 1

    def set_weights(self, arch: Architecture, rows: int) -> None:
        """Set the weights of means over all rows of a full step and all routers of the model, however many are on this
        rank."""
        self.divisor = rows * len(arch.expert_layers)
        self.aux_weight = arch.router_aux_loss / self.divisor
        self.z_weight = arch.router_z_loss / self.divisor

    def loss_of(self, logits_BSE: Tensor, scores_BSE: Tensor, chosen_BSK: Tensor, real_BS: Tensor) -> Tensor:
        """Return the loss per row, with f the shares of its assignments and P its mean probabilities: E · Σ f·P (Switch
        Transformers, arXiv 2101.03961, eq. 4), and the mean of logsumexp² (ST-MoE, arXiv 2202.08906, eq. 5).

        f and the number of tokens are of the whole row, the sums over tokens of this rank's part of it.
        """
        with torch.no_grad():
            taken_BSE = torch.zeros_like(scores_BSE, dtype=torch.bool).scatter_(-1, chosen_BSK, True)
            loads_BE = (taken_BSE & real_BS[..., None]).sum(1)
            counts = torch.cat((loads_BE, real_BS.sum(1, keepdim=True)), dim=1)
            if self.axes.row is not None:
                counts = all_reduce(counts, self.axes.row) // self.copies
            # A row without real tokens has sums of zero, whatever the divisor.
            tokens_B1 = counts[:, self.experts :].clamp(min=1)
            shares_BE = counts[:, : self.experts] / (tokens_B1 * self.per_token).to(scores_BSE.dtype)
        unreal_BS1 = ~real_BS[..., None]
        probabilities_BSE = scores_BSE / scores_BSE.sum(-1, keepdim=True) if self.sigmoid else scores_BSE
        means_BE = probabilities_BSE.masked_fill(unreal_BS1, 0).sum(1) / tokens_B1
        aux = self.experts * (shares_BE * means_BE).sum()
        if not recomputing():
            self.count(loads_BE.sum(0), aux / self.copies)
        loss = self.aux_weight * aux
        if self.z_weight:
            squares_BS1 = logits_BSE.logsumexp(-1, keepdim=True).square()
            loss = loss + self.z_weight * (squares_BS1.masked_fill(unreal_BS1, 0).sum(1) / tokens_B1).sum()
        return self.scaled(loss)

    @torch.no_grad()
    def count_alone(self, chosen_BSK: Tensor, real_BS: Tensor) -> None:
        """Count the experts of real tokens, without a loss."""
        if not recomputing():
            loads_E = torch.zeros(self.experts, dtype=torch.int64, device=chosen_BSK.device)
            real_N = real_BS[..., None].expand_as(chosen_BSK).flatten().to(torch.int64)
            self.count(
                loads_E.scatter_add_(0, chosen_BSK.flatten(), real_N), loads_E.new_zeros((), dtype=torch.float64)
            )

    @property
    def counts(self) -> list[Tensor]:
        return [*super().counts, *(() if self.loads_E is None else (self.loads_E,))]

    def forget(self) -> None:
        super().forget()
        self.loads_E = None

    @torch.no_grad()
    def count(self, loads_E: Tensor, aux: Tensor) -> None:
        if self.loads_E is None:
            self.loads_E = torch.zeros_like(loads_E)
        self.loads_E += loads_E
        self.add(aux)


class ExpertRouter(ExactBuffers, RouterLosses):
    """Router: scores = softmax or sigmoid of x · Wᵀ + b, in at least fp32; a token takes the K experts of highest
    score.

    With a balance bias (DeepSeek-V3, arXiv 2412.19437) experts are chosen by score + bias and weighted by score; with
    groups, among the groups whose two best experts have the highest sums.

    `replayed` (int64 [2]) counts, in training, replayed choices, and how many of them differ from the router's own; a
    reader resets it.
    """

    def __init__(self, arch: Architecture, axes: Axes, rows: int, layer: ExpertsLayer) -> None:
        super().__init__()
        self.axes = axes
        self.experts, self.per_token = arch.experts, arch.experts_per_token
        self.sigmoid, self.normalise = arch.router_score == "sigmoid", arch.router_normalise
        self.groups, self.groups_per_token, self.scale = layer.groups, layer.groups_per_token, layer.scale
        self.set_weights(arch, rows)
        self.weight = nn.Parameter(torch.empty(arch.experts, arch.dim))
        self.bias = nn.Parameter(torch.empty(arch.experts)) if layer.matrix_bias else None
        self.factors = nn.Parameter(torch.empty(arch.experts)) if layer.factors else None
        self.norm = RMSNorm(arch.dim, arch.norm_eps, scale=arch.dim**-0.5) if layer.router_norm else None
        # Named as in the files of DeepSeek-V3. It changes by thousandths, which bf16 would round away.
        bias_E = torch.zeros(arch.experts) if layer.has_bias(arch) else None
        self.register_buffer("e_score_correction_bias", bias_E)
        self.e_score_correction_bias: Tensor | None
        self.replayed: Tensor | None = None

    def forward(self, x_BSD: Tensor, real_BS: Tensor, known_BSK: Tensor | None = None) -> Routing:
        """Route every token; tokens that are not real count in no loss and no load.

        known_BSK: experts to use whatever the scores, numbered from 1; 0: the router chooses.
        """
        exact = torch.float64 if x_BSD.dtype == torch.float64 else torch.float32
        # A rank's tokens are its own under tensor parallelism too, so its gradient is one summand.
        weight_ED = local(self.weight, partial=True)
        bias_E = None if self.bias is None else local(self.bias, partial=True).to(exact)
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        logits_BSE = F.linear(x_BSD.to(exact), weight_ED.to(exact), bias_E)
        scores_BSE = logits_BSE.sigmoid() if self.sigmoid else logits_BSE.softmax(-1)
        chosen_BSK = remember(lambda: self._chosen(scores_BSE, known_BSK, real_BS))
        weights_BSK = scores_BSE.gather(-1, chosen_BSK)
        if self.normalise:
            # Sigmoids can all be zero; rounding removes the addend from any other sum.
            weights_BSK = weights_BSK / (weights_BSK.sum(-1, keepdim=True) + 1e-20)
        if self.scale != 1:
            weights_BSK = weights_BSK * self.scale
        if self.factors is not None:
            factors_BSE = local(self.factors, partial=True).to(exact).expand_as(scores_BSE)
            weights_BSK = weights_BSK * factors_BSE.gather(-1, chosen_BSK)  # whose gradient has a fixed order
        loss = self.loss_of(logits_BSE, scores_BSE, chosen_BSK, real_BS) if self.training else None
        return Routing(chosen_BSK.flatten(0, 1), weights_BSK.flatten(0, 1), loss)

    @torch.no_grad()
    def _chosen(self, scores_BSE: Tensor, known_BSK: Tensor | None, real_BS: Tensor) -> Tensor:
        own_BSK = self._choose(scores_BSE)
        if known_BSK is None:
            return own_BSK
        chosen_BSK, replayed_BSK = known_BSK.long() - 1, (known_BSK > 0) & real_BS[..., None]
        if self.training and not recomputing():
            other_BSK = (chosen_BSK[..., None] != own_BSK[..., None, :]).all(-1) & replayed_BSK
            counts = torch.stack((replayed_BSK.sum(), other_BSK.sum()))
            self.replayed = counts if self.replayed is None else self.replayed + counts
        return torch.where(known_BSK > 0, chosen_BSK, own_BSK)

    @torch.no_grad()
    def _choose(self, scores_BSE: Tensor) -> Tensor:
        bias_E = self.e_score_correction_bias
        scores_BSE = scores_BSE if bias_E is None else scores_BSE + bias_E
        if self.groups_per_token < self.groups:
            grouped_BSGE = scores_BSE.unflatten(-1, (self.groups, -1))
            best_BSG = grouped_BSGE.topk(2).values.sum(-1).topk(self.groups_per_token).indices
            closed_BSG = torch.ones_like(grouped_BSGE[..., 0], dtype=torch.bool).scatter_(-1, best_BSG, False)
            scores_BSE = grouped_BSGE.masked_fill(closed_BSG[..., None], -math.inf).flatten(-2)
        return scores_BSE.topk(self.per_token).indices


def attach(x: Tensor, loss: Tensor) -> Tensor:
    """Return `x`; its backward also takes the gradient of `loss`, with factor one.

    The loss joins the objective where it is computed, whatever comes after it and on whatever rank.
    """
    return _Attach.apply(x, loss)  # pyright: ignore[reportReturnType]


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return grad_outputs[0], torch.ones((), dtype=ctx.dtype, device=ctx.device)


ExpertsCall = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@frozen(eq=False)
class ByExpert:
    """Assignments of tokens sorted by expert, then by token.

    order_N: the assignment at each place. inverse_N: the place of each assignment. counts_E: assignments of an expert.
    """

    order_N: Tensor
    inverse_N: Tensor
    counts_E: Tensor

    @classmethod
    def of(cls, expert_N: Tensor, experts: int) -> "ByExpert":
        sorted_N, order_N = expert_N.sort(stable=True)
        numbers_E = torch.arange(experts, device=expert_N.device)
        # bincount would wait for the device.
        ends_E = torch.searchsorted(sorted_N, numbers_E, right=True)
        return cls(order_N, _inverse(order_N), ends_E.diff(prepend=ends_E.new_zeros(1)))


def to_experts(
    x_TD: Tensor,
    chosen_TK: Tensor,
    experts: ExpertsCall,
    count: int,
    group: ProcessGroup | None,
    keys_TK: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Return the results of the chosen experts for every token, [T, K, D].

    experts: (rows sorted by expert [M, D], rows of each expert [L], keys of rows [M]) → rows. count: E; each rank of
    `group` has equally many consecutive experts. keys_TK: numbers sent with the rows, if any. meanwhile: called while
    rows are in transit.
    """
    tokens, per_token = chosen_TK.shape
    way = ByExpert.of(chosen_TK.flatten(), count)
    rows_ND = _Spread.apply(x_TD, way.order_N, way.inverse_N, per_token)
    assert isinstance(rows_ND, Tensor)
    if group is not None:
        experts = _spread_over(group, experts, meanwhile)
    rows_ND = experts(rows_ND, way.counts_E, None if keys_TK is None else keys_TK.flatten()[way.order_N])
    return permute(rows_ND, way.inverse_N, way.order_N).unflatten(0, (tokens, per_token))


def _spread_over(group: ProcessGroup, experts: ExpertsCall, meanwhile: Callable[[], None] | None) -> ExpertsCall:
    """Return a call of the experts of all ranks: rows are sent to their experts, computed there, and sent back.

    A rank takes part even without rows.
    """

    def call_spread(rows_ND: Tensor, counts_E: Tensor, keys_N: Tensor | None) -> Tensor:
        size = group.size()
        own = len(counts_E) // size
        theirs_E = all_to_all(counts_E, group, [own] * size, [own] * size)
        counts = torch.stack((counts_E, theirs_E)).view(2, size, own).sum(2)
        sent, received = numbers(counts, [even(len(rows_ND), size)] * 2)
        if meanwhile is None:
            rows_MD = exchange(rows_ND, group, received, sent)
        else:
            halves = Exchange(group, received, sent)
            rows_MD = halves.begun(rows_ND)
            meanwhile()
            rows_MD = halves.ended(rows_MD)
        # They arrive sorted by sender, then by expert.
        expert_M = torch.arange(own, device=rows_ND.device).repeat(size)
        way = ByExpert.of(expert_M.repeat_interleave(theirs_E, output_size=sum(received)), own)
        keys_M = None if keys_N is None else all_to_all(keys_N, group, received, sent)[way.order_N]
        rows_MD = experts(permute(rows_MD, way.order_N, way.inverse_N), way.counts_E, keys_M)
        return exchange(permute(rows_MD, way.inverse_N, way.order_N), group, sent, received)

    return call_spread


def even(rows: int, parts: int) -> list[int]:
    """Return `rows` distributed evenly, which a router is trained to do."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def permute(x_ND: Tensor, index_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Return rows `x_ND[index_N]`; the gradient is permuted by `inverse_N`."""
    return _Permute.apply(x_ND, index_N, inverse_N)  # pyright: ignore[reportReturnType]


def _inverse(order_N: Tensor) -> Tensor:
    places_N = torch.arange(len(order_N), device=order_N.device)
    return torch.empty_like(order_N).scatter_(0, order_N, places_N)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, index_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return x_ND[index_N]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (inverse_N,) = ctx.saved_tensors
        return grad_outputs[0][inverse_N], None, None


class _Spread(torch.autograd.Function):
    """Copies of every token for its K assignments, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.per_token = per_token
        return x_TD[order_N // per_token]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (inverse_N,) = ctx.saved_tensors
        return grad_outputs[0][inverse_N].unflatten(0, (-1, ctx.per_token)).sum(1), None, None, None
