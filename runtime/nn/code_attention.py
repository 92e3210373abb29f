"""Attention of transformers' layers, computed by xtrain's kernels through transformers' attention interface."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.runtime.nn.attention_blocks import Scores

NAME: Final = "xtrain"  # of the implementation, as a config of transformers names it
# Arguments of attention functions that other implementations need, or that repeat what is known.
_UNUSED: Final = frozenset(
    ("position_ids", "output_attentions", "use_cache", "cache_position", "output_hidden_states", "output_router_logits")
)


class Attend(Protocol):
    """Attention over the documents of a microbatch."""

    def __call__(
        self, q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, scores: Scores, sink_H: Tensor | None
    ) -> Tensor: ...


class UnknownAttention(Exception):
    """A layer asks its attention for something that xtrain's kernels do not compute."""


_ATTEND: ContextVar[Attend] = ContextVar("attend")


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Compute the attention of transformers' layers by `attend` within the block."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def register() -> None:
    """Add the implementation `NAME` to transformers, which makes no masks for it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention [B, S, H, A] of a layer, with the arguments of transformers' interface. `s_aux` and `sinks`
    are two names for the scores of attention sinks.

    Raises UnknownAttention for masks of its own, dropout, attention that is not causal, and further arguments.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    asked = {name for name, given in others.items() if given is not None and name not in _UNUSED}
    if attention_mask is not None or dropout or not causal or asked:
        raise UnknownAttention(", ".join(sorted(asked)) or "a mask, dropout, or attention that is not causal")
    sink_H = s_aux if sinks is None else sinks
    width = query.shape[-1]
    scale = None if scaling is None else float(scaling)
    scores = Scores(window=sliding_window or None, scale=scale, cap=softcap or None)
    missing = width - value.shape[-1]
    if missing < 0:
        raise UnknownAttention("values wider than keys")
    padded = F.pad(value, (0, missing)) if missing else value
    out_BHSA = _ATTEND.get()(query, key, padded, scores, sink_H)
    out_BSHA = out_BHSA.transpose(1, 2)
    return (out_BSHA[..., : value.shape[-1]] if missing else out_BSHA).contiguous(), None  # some layers take a view
