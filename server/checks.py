"""Whether what a client asks for can be done, looked at in full before an engine is asked.

A mistake is a UserError, which becomes the result of the request: its text names the place in the request.
"""

import numpy as np

from xtrain.server.engine import IGNORED, TARGETS, Array, Capabilities, Datum, LossInput, LossOffer, UserError
from xtrain.server.limits import ServerLimits
from xtrain.server.messages import DatumRow, ForwardBackward
from xtrain.server.requests import MOST_SINGLE

EXACT = 2**24  # float32 represents all integers up to it


def rows_of(request: ForwardBackward, capabilities: Capabilities, limits: ServerLimits) -> list[Datum]:
    """Convert the rows of a request for an engine."""
    offer = capabilities.losses.get(request.loss)
    if offer is None:
        offered = ", ".join(sorted(capabilities.losses))
        raise UserError(f"loss_fn {request.loss[:80]!r} is not offered here; offered: {offered}")
    if unknown := sorted(set(request.settings) - offer.settings):
        known = ", ".join(sorted(offer.settings)) or "none"
        raise UserError(
            f"loss_fn_config has {unknown[0][:80]!r}, which {request.loss} does not read; it reads: {known}"
        )
    for name, value in request.settings.items():
        if not isinstance(value, float):
            raise UserError(f"loss_fn_config[{name!r}] is a text; {request.loss} reads a number there")
        if not abs(value) <= MOST_SINGLE:
            raise UserError(f"loss_fn_config[{name!r}] is not a finite number, or one that float32 does not have")
    if not request.rows:
        raise UserError("data is empty")
    if request.num_tokens > limits.tokens:
        raise UserError(f"data has {request.num_tokens} tokens; a request may have {limits.tokens}")
    name = "rows" if request.json else "data"
    found = [_datum(f"{name}[{number}]", row, request, offer, capabilities) for number, row in enumerate(request.rows)]
    if (targets := sum(datum.inputs[TARGETS].size for datum in found)) > limits.tokens:
        raise UserError(f"data has {targets} targets; a request may have {limits.tokens}")
    return [_without_ignored(datum) for datum in found] if request.json else found


def _without_ignored(datum: Datum) -> Datum:
    """Set all inputs to zero at ignored targets, as engines expect."""
    kept = datum.inputs[TARGETS] != IGNORED
    if kept.all():
        return datum
    inputs = {name: each if name == TARGETS else each * kept for name, each in datum.inputs.items()}
    return Datum(tokens=datum.tokens, inputs=inputs)


def _datum(place: str, row: DatumRow, request: ForwardBackward, offer: LossOffer, capabilities: Capabilities) -> Datum:
    loss = request.loss
    if row.tokens is None:
        raise UserError(f"{place}.model_input has a chunk that is no text; only tokens of text are taken")
    check_tokens(f"{place}.model_input", row.tokens, capabilities)
    known = {one.name: one for one in offer.inputs}
    for name in row.inputs:
        if name not in known:
            raise UserError(f"{place}.loss_fn_inputs has {name[:80]!r}, which {loss} does not read")
    inputs: dict[str, Array] = {}
    shape = row.inputs[TARGETS].shape if TARGETS in row.inputs else row.tokens.shape
    for one in offer.inputs:
        if one.name in row.inputs:
            inputs[one.name] = _input(place, one, row, shape, offer, capabilities, ignored=request.json)
        elif request.json and one.name == "weights":
            inputs[one.name] = np.ones(shape, np.float32)
        elif one.required:
            raise UserError(f"{place}.loss_fn_inputs has no {one.name!r}, which {loss} needs")
    if (targets := inputs[TARGETS].size) > capabilities.targets:
        raise UserError(f"{place} has {targets} targets; a row may have {capabilities.targets}")
    return Datum(tokens=row.tokens, inputs=inputs)


def _input(
    place: str,
    one: LossInput,
    row: DatumRow,
    shape: tuple[int, ...],
    offer: LossOffer,
    capabilities: Capabilities,
    *,
    ignored: bool,
) -> Array:
    """Return an input of a row after checking it. ignored: whether targets may be IGNORED."""
    where, numbers = f"{place}.loss_fn_inputs[{one.name!r}]", row.inputs[one.name]
    assert row.tokens is not None
    if numbers.ndim == 2 and not offer.wide:
        raise UserError(f"{where} has two dims; this loss takes one number a token")
    if numbers.shape[0] != row.tokens.size:
        raise UserError(f"{where} has {numbers.shape[0]} rows for {row.tokens.size} tokens")
    if not numbers.size:
        raise UserError(f"{where} has no number for a token")
    if numbers.shape != shape:
        raise UserError(f"{where} has shape {list(numbers.shape)}; that of target_tokens is {list(shape)}")
    if one.integer:
        if numbers.dtype.kind != "i":
            raise UserError(f"{where} must be int64")
        ids = numbers[numbers != IGNORED] if ignored else numbers
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < capabilities.vocabulary:
            besides = f", or {IGNORED} where no loss is taken" if ignored else ""
            raise UserError(f"{where} must be token ids of 0..{capabilities.vocabulary - 1}{besides}")
        return numbers
    if numbers.dtype.kind == "i":
        if not -EXACT <= int(numbers.min()) <= int(numbers.max()) <= EXACT:
            raise UserError(f"{where} has whole numbers that float32 does not have")
        return numbers.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise UserError(f"{where} has a number that is not finite")
    return numbers


def check_tokens(where: str, tokens: Array, capabilities: Capabilities) -> None:
    """Check the number and range of tokens. tokens: int32 [T]."""
    if not 1 <= tokens.size <= capabilities.context:
        raise UserError(f"{where} has {tokens.size} tokens; there may be 1 to {capabilities.context}")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < capabilities.vocabulary:
        raise UserError(f"{where} must be token ids of 0..{capabilities.vocabulary - 1}")
