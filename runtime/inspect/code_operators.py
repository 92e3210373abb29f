"""Attention and experts of traced layers of transformers, each as one operation."""

from typing import Any, Final

import torch
from torch import Tensor, nn

from xtrain.runtime.nn.attention_blocks import Scores


# Attention of a traced layer, as one operation that keeps what the kernels of rows on one rank keep.
@torch.library.custom_op("xtrain::attention_of_code", mutates_args=())
def _traced(
    q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, sink_H: Tensor | None, window: int, scale: float, cap: float
) -> Tensor:
    raise NotImplementedError("it is traced, never computed")


@_traced.register_fake
def _shaped(q_BHSA: Tensor, *_: Any) -> Tensor:
    return q_BHSA.new_empty(q_BHSA.transpose(1, 2).shape).transpose(1, 2)  # layout of the next product


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3], output)


_traced.register_autograd(lambda *_: None, setup_context=_keep)  # pyright: ignore[reportArgumentType]
ATTENTION: Final = torch.ops.xtrain.attention_of_code.default


# Experts that xtrain computes, as one operation. What it keeps, and sends to other ranks, is known to the planner.
@torch.library.custom_op("xtrain::experts_of_code", mutates_args=())
def _traced_experts(x: Tensor, chosen_TK: Tensor, weights_TK: Tensor, parameters: list[Tensor]) -> Tensor:
    raise NotImplementedError("it is traced, never computed")


@_traced_experts.register_fake
def _like_input(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


_traced_experts.register_autograd(lambda *_: None)
EXPERTS_OF_CODE: Final = torch.ops.xtrain.experts_of_code.default


def experts_traced(module: nn.Module, *given: Tensor, **named: Tensor) -> Tensor:
    """Return the result of a module of experts as one operation of the trace. given, named: activations, numbers and
    weights of the chosen experts."""
    x, chosen, weights = (*given, *named.values())
    return _traced_experts(x, chosen, weights, list(module.parameters()))


def attend_traced(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, scores: Scores, sink_H: Tensor | None) -> Tensor:
    """Return the result of attention by xtrain's kernels as one operation of the trace."""
    scale = scores.factor(q_BHSA.shape[-1])
    return _traced(q_BHSA, k_BKSA, v_BKSA, sink_H, scores.window or 0, scale, scores.cap or 0.0)
