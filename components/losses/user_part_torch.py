"""`setup.loss` of the user's own: the function, tried out once, and looked at whenever it is called."""

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ...dsl.user_parts.kinds import LOGPROB
from ...planner.plan import Plan
from ...runtime.data.user_parts import UserPart, failures_of, part_of, spec_folder
from ...runtime.models.build import compute_format
from ...runtime.models.loss import Term
from ...runtime.models.parts import ModelParts
from ...runtime.ops import op

# What a loss is tried out on: from labels that are sure to those that are next to impossible.
LOGPROBS: Final = (0.0, -1e-3, -0.1, -0.4, -0.7, -1.5, -3.0, -5.5, -8.0, -12.0, -20.0, -50.0)
OTHERS: Final = {"mean_logprob_T": (-30.0, -5.0), "entropy_T": (0.0, 5.0), "lse_T": (-5.0, 30.0)}
TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-4}


@op("setup.loss.user")
def build_user_loss(plan: Plan, model: ModelParts, user: dict[str, Any], reads: list[str]) -> None:
    """Raises PartFailed for a function that gives no loss of each token, or one that is none by itself."""
    part = part_of("loss", user, spec_folder(plan.spec))
    function = part.load()

    def loss(logprob_T: Tensor, **given: Tensor) -> Tensor:
        loss_T = function(logprob_T, **given, **part.arguments)
        if wrong := _wrong(loss_T, logprob_T):
            raise part.failed(wrong)
        return loss_T

    term = Term(loss, reads=tuple(reads), failures=partial(failures_of, part))
    _try_out(part, term, torch.float64 if compute_format(plan) == "fp64" else torch.float32)
    model.minimise(term)


def _wrong(loss_T: Any, logprob_T: Tensor) -> str:
    """What is wrong with what a function gave, whatever the values; empty if nothing is."""
    if not isinstance(loss_T, Tensor):
        return f"gave {type(loss_T).__name__}, and the loss of each token is a tensor"
    if loss_T.shape != logprob_T.shape:
        wanted = tuple(logprob_T.shape)
        hint = ": do not sum or average" if loss_T.dim() == 0 else ""
        return f"gave a tensor of shape {tuple(loss_T.shape)} for tokens of shape {wanted}, and each has a loss{hint}"
    if loss_T.dtype != logprob_T.dtype:
        return (
            f"gave {loss_T.dtype} for {logprob_T.dtype}, and a loss has the number format of what it is computed from"
        )
    if not loss_T.requires_grad:
        return f"gave a loss without gradient: compute it from `{LOGPROB}` by operations of torch"
    return ""


def _try_out(part: UserPart, term: Term, dtype: torch.dtype) -> None:
    """Call it before the first step: what it gives must be finite, and of a token the same whatever is beside it."""
    count = len(LOGPROBS)
    given = {LOGPROB: torch.tensor(LOGPROBS, dtype=dtype, device="cpu")}
    given |= {name: torch.linspace(*OTHERS[name], count, dtype=dtype, device="cpu") for name in term.reads}
    loss_T, by = term.by(given)
    for values, what in ((loss_T, "a loss"), *((each, f"a derivative by `{name}`") for name, each in by.items())):
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            place = int(bad[0])
            at = ", ".join(f"`{name}` {float(each[place]):g}" for name, each in given.items())
            raise part.failed(f"gave {what} of {float(values[place])} for {at}, which may occur: bound it there")
    alone = torch.cat([term.by({name: each[[place]] for name, each in given.items()})[0] for place in range(count)])
    apart = ~torch.isclose(loss_T, alone, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if apart.any():
        place = int(apart.nonzero()[0])
        seen = f"{float(loss_T[place]):g} beside {count - 1} others and of {float(alone[place]):g} by itself"
        why = "ranks hold different tokens: compute it from what is given of that token alone, without random numbers"
        raise part.failed(f"gave a token a loss of {seen}, and {why}")
