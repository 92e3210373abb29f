"""`setup.loss` with user code: the function is tried once before training, and its result is checked at each call."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from xtrain.dsl.user_parts.kinds import COUNTS, LOGPROB
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.user_parts import UserPart, failures_of, part_of, spec_folder
from xtrain.runtime.nn.build import compute_format
from xtrain.runtime.nn.loss import Term
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.unit_losses import UnitSums, UnitTerm

# Inputs for the trial call of a loss: from certain labels to almost impossible ones.
LOGPROBS: Final = (0.0, -1e-3, -0.1, -0.4, -0.7, -1.5, -3.0, -5.5, -8.0, -12.0, -20.0, -50.0)
OTHERS: Final = {"mean_logprob_T": (-30.0, -5.0), "entropy_T": (0.0, 5.0), "lse_T": (-5.0, 30.0)}
NUMBERS: Final = (-3.0, -0.1)  # columns
TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-4}


@op("setup.loss.user")
def build_user_loss(
    plan: Plan,
    model: ModelParts,
    user: dict[str, Any],
    reads: list[str],
    unit: str = "token",
    columns: Sequence[str] = (),
    values: Sequence[str] = (),
) -> None:
    """Build the user's loss. Raises PartFailed if the function does not return a loss per token or unit, or one that
    depends on other tokens."""
    part = part_of("loss", user, spec_folder(plan.spec))
    function = part.load()
    asked = inspect.signature(function).parameters
    failures = partial(failures_of, part)

    def called(logprob: Tensor, given: Mapping[str, Tensor], each: str) -> Tensor:
        """Call the user's function and validate its result. logprob: [T], or sums [U] or [2, U]. each: the unit of the
        loss."""
        found = function(logprob, **{n: value for n, value in given.items() if n in asked}, **part.arguments)
        if wrong := _wrong(found, logprob[0] if logprob.dim() == 2 else logprob, each):
            raise part.failed(wrong)
        return found

    if unit == "token":
        term = Term(lambda logprob_T, **given: called(logprob_T, given, unit), tuple(reads), failures, tuple(columns))
        _try_out(part, term, torch.float64 if compute_format(plan) == "fp64" else torch.float32)
        model.minimise(term)
        return

    def loss(units: UnitSums) -> Tensor:
        sums = {**units.sums, COUNTS: units.tokens_KU}
        if unit == "sequence":
            sums = {name: value[0] for name, value in sums.items()}
        return called(sums.pop(LOGPROB), {**sums, **units.values}, unit)

    of_units = UnitTerm(loss, reads=tuple(reads), columns=tuple(columns), failures=failures)
    _try_out_units(part, of_units, 2 if unit == "pair" else 1, tuple(values))
    model.minimise(of_units)


def _wrong(loss_T: Any, logprob_T: Tensor, each: str) -> str:
    """Return the problem of a result's type, shape, format or device; empty if it is valid."""
    if not isinstance(loss_T, Tensor):
        return f"gave {type(loss_T).__name__}, and the loss of each {each} is a tensor"
    if loss_T.shape != logprob_T.shape:
        wanted = tuple(logprob_T.shape)
        hint = ": do not sum or average" if loss_T.dim() == 0 else ""
        return f"gave a tensor of shape {tuple(loss_T.shape)} for {each}s of shape {wanted}, and each has a loss{hint}"
    if loss_T.dtype != logprob_T.dtype:
        return (
            f"gave {loss_T.dtype} for {logprob_T.dtype}, and a loss has the number format of what it is computed from"
        )
    if torch.is_grad_enabled() and not loss_T.requires_grad:
        return f"gave a loss without gradient: compute it from `{LOGPROB}` by operations of torch"
    return ""


def _try_out(part: UserPart, term: Term, dtype: torch.dtype) -> None:
    """Call the loss before the first step: values must be finite, and a token's loss independent of other tokens."""
    count = len(LOGPROBS)
    given = {LOGPROB: torch.tensor(LOGPROBS, dtype=dtype, device="cpu")}
    given |= {name: torch.linspace(*OTHERS[name], count, dtype=dtype, device="cpu") for name in term.reads}
    columns = {name: torch.linspace(*NUMBERS, count, dtype=dtype, device="cpu") for name in term.columns}
    loss_T, by, _ = term.by(given, columns)
    for values, what in ((loss_T, "a loss"), *((each, f"a derivative by `{name}`") for name, each in by.items())):
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            place = int(bad[0])
            at = ", ".join(f"`{name}` {float(each[place]):g}" for name, each in given.items())
            raise part.failed(f"gave {what} of {float(values[place])} for {at}, which may occur: bound it there")
    alone = torch.cat([term.by(*(_only(place, each) for each in (given, columns)))[0] for place in range(count)])
    apart = ~torch.isclose(loss_T, alone, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if apart.any():
        place = int(apart.nonzero()[0])
        seen = f"{float(loss_T[place]):g} among {count - 1} others and of {float(alone[place]):g} alone"
        why = "ranks hold different tokens: compute it from the values of that token alone, without random numbers"
        raise part.failed(f"gave a token a loss of {seen}, and {why}")


def _only(place: int, given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each[..., [place]] for name, each in given.items()}


def _try_out_units(part: UserPart, term: UnitTerm, sides: int, values: tuple[str, ...]) -> None:
    """Call a loss of sequences or pairs before the first step, as `_try_out` does, with sums over 1 to 12
    labels each."""
    count = len(LOGPROBS)
    tokens_KU = torch.arange(1, count + 1).repeat(sides, 1)
    ends = {LOGPROB: (-8.0, -0.1), **OTHERS, **dict.fromkeys(term.columns, NUMBERS)}
    sums = {
        name: tokens_KU * torch.linspace(*ends[name], sides * count, dtype=torch.float64).view(sides, count).flip(1)
        for name in (LOGPROB, *term.reads, *term.columns)
    }
    given = {name: (torch.arange(count) % 2).double() for name in values}

    def losses(sums: dict[str, Tensor], tokens_KU: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        sums = {**sums, LOGPROB: sums[LOGPROB].detach().requires_grad_()}
        with torch.enable_grad(), term.failures():
            loss_U = term.function(UnitSums(sums=sums, tokens_KU=tokens_KU, values=given))
            (slope_KU,) = torch.autograd.grad(loss_U.sum(), sums[LOGPROB], allow_unused=True, materialize_grads=True)
        return loss_U.detach(), slope_KU

    loss_U, slope_KU = losses(sums, tokens_KU, given)
    for found, what in ((loss_U, "a loss"), (slope_KU, "a derivative")):
        if not found.isfinite().all():
            raise part.failed(f"gave {what} of {float(found[~found.isfinite()][0])} for sums that may occur")
    alone = [losses(_only(n, sums), tokens_KU[:, [n]], _only(n, given))[0] for n in range(count)]
    if not torch.allclose(loss_U, torch.cat(alone), rtol=TOLERANCE[torch.float64], atol=TOLERANCE[torch.float64]):
        why = "ranks have different ones: compute it from its own values alone, without random numbers"
        raise part.failed(f"gave one of {count} a different loss than alone, and {why}")
