"""Experts of transformers' layers, computed by xtrain: grouped products, expert parallelism and adapters.

Their modules are stacks of matrices that are called with hidden states, and the numbers and weights of chosen experts.
Shapes: T tokens, K experts of a token, E experts, D width of the residual stream.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xtrain.plan.architecture import Architecture
from xtrain.runtime.base.collectives import join, own_piece, split
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.layers import HasKeys, splitmix64
from xtrain.runtime.nn.moe import Experts, weighted_sum
from xtrain.runtime.nn.recompute import keeps_choices, remember
from xtrain.runtime.nn.router import RouterLosses, attach, to_experts

# What the decorator of transformers' experts interface sets on a module.
FORMS: Final = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")


@frozen
class ExpertForm:
    """Experts of a module. matrices: names of its stacks, the last one gives the outputs."""

    matrices: tuple[str, ...]
    experts: int
    width: int

    @classmethod
    def of(cls, module: Any) -> "ExpertForm | None":
        """Return the experts of a module; None if it is no stack of transformers' experts interface, or has more
        parameters than its matrices and their biases."""
        if not all(hasattr(module, name) for name in FORMS) or module.has_post_expert_norm:
            return None
        matrices = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        biases = {f"{name}_bias" for name in matrices} if module.has_bias else set()
        own = dict(module.named_parameters())
        if own.keys() != {*matrices, *biases} or any(own[name].ndim != 3 for name in matrices):
            return None
        experts, *sides = own["down_proj"].shape
        width = sides[0 if module.is_transposed else 1]
        return cls(matrices, experts, width) if all(len(each) == experts for each in own.values()) else None


class CodeExperts(Experts, HasKeys, RouterLosses):
    """Experts of a layer: a base of the classes that `take_experts` makes.

    real_BS: the real tokens of the microbatch, in training; None: count nothing. has_loss: its router, which has just
    computed `logits`, has a loss.
    """

    matrices = ()
    real_BS: Tensor | None = None
    has_loss = False
    logits: Tensor | None = None

    @property
    def copies(self) -> int:
        """Tensor-parallel ranks, whose routers all have all tokens."""
        return 1 if self.axes.tensor is None else self.axes.tensor.size

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Return Σ weight · expert(x), of the shape of x. given, named: x, the chosen experts, and their weights.

        Tensor-parallel ranks, which all have all tokens, compute different ones.
        """
        x, chosen, weights = (*given, *named.values())
        x_TD = x.reshape(-1, x.shape[-1])
        chosen_TK = chosen.reshape(len(x_TD), -1)
        weights_TK, form, loss = weights.reshape(chosen_TK.shape), x.dtype, self._loss(chosen_TK)
        keys_TK = None if self.keys_BS is None else splitmix64(chosen_TK, self.keys_BS.flatten()[:, None])
        tensor, tokens = self.axes.tensor, len(x_TD)
        if tensor is not None:
            rest = (0, 0, 0, -tokens % tensor.size)
            x_TD, weights_TK = (split(F.pad(each, rest), 0, tensor.group) for each in (x_TD, weights_TK))
            chosen_TK = own_piece(F.pad(chosen_TK, rest), 0, tensor.group)
            keys_TK = None if keys_TK is None else own_piece(F.pad(keys_TK, rest), 0, tensor.group)
        out_TKD = to_experts(x_TD, chosen_TK, self.of_rows, self.experts, self.axes.experts, keys_TK)
        out_TD = weighted_sum(out_TKD, weights_TK, form)
        if tensor is not None:
            out_TD = join(out_TD, 0, tensor.group)[:tokens]
        out = out_TD.view(x.shape)
        return out if loss is None else attach(out, loss)

    def _loss(self, chosen_TK: Tensor) -> Tensor | None:
        """Count the chosen experts of real tokens; return the router's loss, if it has one. Raises PlanMismatch if
        experts or router do not get each token once."""
        logits, self.logits, real_BS = self.logits, None, self.real_BS
        if real_BS is None:
            return None
        tokens = real_BS.numel()
        if len(chosen_TK) != tokens or (self.has_loss and (logits is None or logits.numel() != tokens * self.experts)):
            seen = 0 if logits is None else logits.numel() // self.experts
            message = f"experts got {len(chosen_TK)} of {tokens} tokens, and their router {seen}; plan again"
            raise PlanMismatch(message)
        chosen_BSK = chosen_TK.view(*real_BS.shape, -1)
        if logits is None:
            self.count_alone(chosen_BSK, real_BS)
            return None
        exact = torch.promote_types(logits.dtype, torch.float32)
        logits_BSE = logits.view(*real_BS.shape, -1).to(exact)
        return self.loss_of(logits_BSE, logits_BSE.softmax(-1), chosen_BSK, real_BS)


class _Repeating(TorchFunctionMode):
    """Mode in which routers choose, in the second run of a checkpoint, the experts of the first run, and compute their
    weights. Experts of a token are chosen as the `per_token` largest of `experts` scores."""

    def __init__(self, experts: int, per_token: int) -> None:
        super().__init__()
        self.experts, self.per_token = experts, per_token

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        given = {**dict(zip(("input", "k", "dim"), args, strict=False)), **kwargs}
        scores, last = given["input"], given.get("dim", -1) in (-1, given["input"].ndim - 1)
        # Routers with groups of experts score a group by its two largest scores; the only group has all experts.
        scores_group = scores.ndim > 2 and scores.shape[-2] == 1
        if not last or scores_group or (scores.shape[-1], given["k"]) != (self.experts, self.per_token):
            return func(*args, **kwargs)
        with torch.no_grad():
            chosen = remember(lambda: func(*args, **kwargs).indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def repeating(modules: Sequence[CodeExperts]) -> AbstractContextManager[Any]:
    """Let the routers of experts choose as in the first run, within a checkpoint that keeps choices."""
    if not modules or not keeps_choices():
        return nullcontext()
    return _Repeating(modules[0].experts, modules[0].per_token)


def gate_of(module: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that computes the hidden values of a module's experts from their first product."""
    return module._apply_gate if module.has_gate else module.act_fn


@cache
def _experts_class(own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (CodeExperts, own), {})


def take_experts(module: Any, axes: Axes) -> CodeExperts:
    """Let xtrain compute the experts of a module of transformers, in place."""
    form = ExpertForm.of(module)
    assert form is not None
    gated = gate_of(module)
    module.__class__ = _experts_class(type(module))
    module.begin()
    module.tasks = module.routing = None
    module.axes, module.matrices, module.experts = axes, form.matrices, form.experts
    module.turned = not module.is_transposed
    module.__dict__["gated"] = gated  # no submodule of its own
    return module


def set_router_loss(
    layer: nn.Module, experts: CodeExperts, arch: Architecture, rows: int, router: Mapping[str, Any]
) -> None:
    """Give experts the weights of their router's losses. router: its module in the layer, and the place of its logits
    among its results."""
    experts.per_token = arch.experts_per_token
    experts.set_weights(arch, rows)
    experts.has_loss = arch.router_aux_loss > 0
    if not experts.has_loss:
        return

    def keep(logits: Tensor) -> None:
        experts.logits = logits

    hook_logits(layer.get_submodule(router["module"]), router["index"], keep)


def hook_logits(router: nn.Module, index: int, call: Callable[[Tensor], None]) -> None:
    """Call a function with the logits of a router after each forward. index: of its results, if it gives several."""

    def take(_: nn.Module, __: Any, result: Any) -> None:
        call(result[index] if isinstance(result, tuple) else result)

    router.register_forward_hook(take)
